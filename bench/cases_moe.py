"""Benchmark cases of the MoE ops at the released model's shapes (docs of the draws: bench/shapes.py)."""

from __future__ import annotations

from typing import Any

import torch

from bench.shapes import EP_RANKS, LOCAL_EXPERTS, LOCAL_ROWS, RELEASED, STEP_TOKENS, Case, uneven_offsets
from mini_deepinfer.ops import moe
from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS
from mini_deepinfer.ops.packed_weight import pack_weight
from mini_deepinfer.ops.reference import number_formats as nf

N, F, K = RELEASED.hidden_size, RELEASED.moe_intermediate_size, RELEASED.num_experts_per_tok
E = RELEASED.n_routed_experts
ALL_TOKENS = STEP_TOKENS * EP_RANKS


def _generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _relative(out: torch.Tensor, ref: torch.Tensor, bound: float) -> float:
    """Largest |out - ref| as a share of the largest |ref|; raises over `bound`."""
    error = float((out.float() - ref.float()).abs().max() / ref.float().abs().max())
    if not error <= bound:
        raise AssertionError(f"max error {error:.3g} of the largest value, bound {bound:.3g}")
    return error


# -- grouped_gemm ----------------------------------------------------------------------------------------------------


def _fp4(experts: int, outputs: int, columns: int, g: torch.Generator, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    packed, scale = zip(
        *(nf.quant_mxfp4(torch.randn(outputs, columns, generator=g, device=device) * columns**-0.5) for _ in range(experts)),
        strict=True,
    )
    return torch.stack(packed), torch.stack(scale)


def _make_gemm(columns: int, outputs: int, tokens: int | None, spread: float = 0.5) -> Any:
    """Rows over the local experts as uneven_offsets draws them; with `tokens`, rows are gathered out of that many token rows."""

    def make(device: torch.device) -> dict[str, Any]:
        g = _generator(device, columns)
        rows = tokens or LOCAL_ROWS
        codes, scale = nf.quant_fp8_ue8m0(torch.randn(rows, columns, generator=g, device=device))
        weight, weight_scale = _fp4(LOCAL_EXPERTS, outputs, columns, g, device)
        offsets = uneven_offsets(LOCAL_EXPERTS, LOCAL_ROWS, torch.Generator().manual_seed(0), spread=spread).to(device)
        a_rows = None
        if tokens:
            a_rows = torch.randint(tokens, (LOCAL_ROWS,), generator=g, device=device, dtype=torch.int32)
            for e in range(LOCAL_EXPERTS):  # an expert's rows come in token order, as permute gives them
                part = slice(int(offsets[e]), int(offsets[e + 1]))
                a_rows[part] = a_rows[part].sort().values
        return {
            "a": codes, "a_scale": scale, "weight": weight, "weight_scale": weight_scale, "offsets": offsets,
            "a_rows": a_rows, "out": torch.empty(LOCAL_ROWS, outputs, dtype=torch.bfloat16, device=device), "packed": {},
        }  # fmt: skip

    return make


def _operands(inputs: dict[str, Any], impl: str, *weights: str) -> dict[str, Any]:
    """The arguments of the op, these weights in the form that the implementation reads: sm90 packed, once, as at the model's load."""
    operands = {name: operand for name, operand in inputs.items() if name != "packed"}
    for name in weights if impl == "sm90" else ():
        if name not in inputs["packed"]:
            inputs["packed"][name] = pack_weight(inputs[name], inputs[f"{name}_scale"])
        operands |= {name: inputs["packed"][name], f"{name}_scale": None}
    return operands


def _run_gemm(inputs: dict[str, Any], impl: str) -> torch.Tensor:
    return moe.grouped_gemm(**_operands(inputs, impl, "weight"), impl=impl)


def _check_gemm(inputs: dict[str, Any], out: torch.Tensor) -> float:
    return _relative(out, _run_gemm({**inputs, "out": None}, "reference"), 2**-7)  # two roundings may differ by one ulp


def _gemm(name: str, columns: int, outputs: int, tokens: int | None, spread: float = 0.5) -> Case:
    weight_bytes = LOCAL_EXPERTS * outputs * columns * 17 // 32
    activation_bytes = LOCAL_ROWS * columns * 33 // 32
    return Case(
        op="moe.grouped_gemm",
        name=name,
        params={"rows": LOCAL_ROWS, "experts": LOCAL_EXPERTS, "k": columns, "o": outputs, "uneven": spread > 0, "gather": bool(tokens)},
        make=_make_gemm(columns, outputs, tokens, spread),
        run=_run_gemm,
        check=_check_gemm,
        flops=2.0 * LOCAL_ROWS * columns * outputs,
        bytes=float(weight_bytes + activation_bytes + LOCAL_ROWS * outputs * 2),
        impls=IMPLEMENTATIONS["moe.grouped_gemm"],
    )


# -- route -----------------------------------------------------------------------------------------------------------


def _make_route(device: torch.device) -> dict[str, Any]:
    g = _generator(device, 1)
    return {
        "x": torch.randn(STEP_TOKENS, N, generator=g, device=device).bfloat16(),
        "weight": (torch.randn(E, N, generator=g, device=device) * N**-0.5).bfloat16(),
        "bias": torch.randn(E, generator=g, device=device) * 0.1,
    }


def _run_route(inputs: dict[str, Any], impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    return moe.route(inputs["x"], inputs["weight"], inputs["bias"], K, RELEASED.routed_scaling_factor, impl=impl)


def _check_route(inputs: dict[str, Any], out: tuple[torch.Tensor, torch.Tensor]) -> float:
    ids, weights = _run_route(inputs, "reference")
    same = (out[0] == ids).all(1)
    if int((~same).sum()) > STEP_TOKENS // 100:
        raise AssertionError(f"{int((~same).sum())} of {STEP_TOKENS} tokens chose other experts")
    return _relative(out[1][same], weights[same], 3e-5)


# -- permute, combine, swiglu_quant ------------------------------------------------------------------------------------


def _make_permute(device: torch.device) -> dict[str, Any]:
    keys = torch.rand(ALL_TOKENS, E, generator=_generator(device, 2), device=device)
    return {"ids": keys.topk(K, dim=1).indices.sort(dim=1).values.int()}


def _run_permute(inputs: dict[str, Any], impl: str) -> tuple[torch.Tensor, ...]:
    return moe.permute(inputs["ids"], LOCAL_EXPERTS, LOCAL_EXPERTS, impl=impl)


def _check_permute(inputs: dict[str, Any], out: tuple[torch.Tensor, ...]) -> float:
    for name, got, wanted in zip(("row_of_slot", "slot_of_row", "offsets"), out, _run_permute(inputs, "reference"), strict=True):
        if not torch.equal(got, wanted):
            raise AssertionError(f"permute: {name} differs")
    return 0.0


def _make_combine(device: torch.device) -> dict[str, Any]:
    row_of_slot, _, offsets = moe.permute(_make_permute(device)["ids"], LOCAL_EXPERTS, LOCAL_EXPERTS, impl="reference")
    rows = int(offsets[-1])
    y = torch.randn(rows, N, generator=_generator(device, 3), device=device).bfloat16()
    return {"y": y, "row_of_slot": row_of_slot}


def _run_combine(inputs: dict[str, Any], impl: str) -> torch.Tensor:
    return moe.combine(inputs["y"], inputs["row_of_slot"], None, torch.bfloat16, impl=impl)


def _check_combine(inputs: dict[str, Any], out: torch.Tensor) -> float:
    return _relative(out, _run_combine(inputs, "reference"), 2**-8)


def _make_swiglu(device: torch.device) -> dict[str, Any]:
    g = _generator(device, 4)
    return {
        "gu": torch.randn(LOCAL_ROWS, 2 * F, generator=g, device=device).bfloat16(),
        "row_weight": torch.rand(LOCAL_ROWS, generator=g, device=device),
    }


def _run_swiglu(inputs: dict[str, Any], impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    return moe.swiglu_quant(inputs["gu"], inputs["row_weight"], RELEASED.swiglu_limit, impl=impl)


def _check_swiglu(inputs: dict[str, Any], out: tuple[torch.Tensor, torch.Tensor]) -> float:
    wanted = nf.dequant_fp8_ue8m0(*_run_swiglu(inputs, "reference"))
    return _relative(nf.dequant_fp8_ue8m0(*out), wanted, 2**-4)  # a code may move by one step


def _make_experts(device: torch.device) -> dict[str, Any]:
    up, down = _make_gemm(N, 2 * F, ALL_TOKENS)(device), _make_gemm(F, N, None)(device)
    weight = torch.rand(LOCAL_ROWS, generator=_generator(device, 5), device=device)
    return {
        "codes": up["a"], "scale": up["a_scale"], "w13": up["weight"], "w13_scale": up["weight_scale"],
        "w2": down["weight"], "w2_scale": down["weight_scale"], "offsets": up["offsets"], "token_of_row": up["a_rows"],
        "row_weight": weight, "limit": RELEASED.swiglu_limit, "packed": {},
    }  # fmt: skip


def _run_experts(inputs: dict[str, Any], impl: str) -> torch.Tensor:
    return moe.experts(**_operands(inputs, impl, "w13", "w2"), impl=impl)


def _check_experts(inputs: dict[str, Any], out: torch.Tensor) -> float:
    return _relative(out, _run_experts(inputs, "reference"), 2**-5)  # h is quantised between: codes move by a step


CASES: list[Case] = [
    Case(
        "moe.experts", "layer", {"rows": LOCAL_ROWS, "experts": LOCAL_EXPERTS, "hidden": N, "expert_hidden": F},
        _make_experts, _run_experts, _check_experts, 6.0 * LOCAL_ROWS * N * F,
        float(LOCAL_EXPERTS * 3 * N * F * 17 // 32 + LOCAL_ROWS * N * 3), IMPLEMENTATIONS["moe.grouped_gemm"],
    ),
    _gemm("up", N, 2 * F, ALL_TOKENS),
    _gemm("down", F, N, None),
    _gemm("up_even", N, 2 * F, ALL_TOKENS, spread=0.0),  # as a router without favourites spreads a step
    _gemm("down_even", F, N, None, spread=0.0),
    Case(
        "moe.route", "step", {"tokens": STEP_TOKENS, "hidden": N, "experts": E, "k": K}, _make_route, _run_route,
        _check_route, 2.0 * STEP_TOKENS * N * E, 2.0 * N * (STEP_TOKENS + E), IMPLEMENTATIONS["moe.route"],
    ),
    Case(
        "moe.permute", "all_ranks", {"tokens": ALL_TOKENS, "k": K, "local": LOCAL_EXPERTS}, _make_permute,
        _run_permute, _check_permute, 0.0, 12.0 * ALL_TOKENS * K, IMPLEMENTATIONS["moe.permute"],
    ),
    Case(
        "moe.combine", "all_ranks", {"tokens": ALL_TOKENS, "k": K, "rows": LOCAL_ROWS, "hidden": N}, _make_combine,
        _run_combine, _check_combine, float(LOCAL_ROWS * N), 2.0 * N * (LOCAL_ROWS + ALL_TOKENS),
        IMPLEMENTATIONS["moe.combine"],
    ),
    Case(
        "moe.swiglu_quant", "local_rows", {"rows": LOCAL_ROWS, "hidden": F}, _make_swiglu, _run_swiglu, _check_swiglu,
        0.0, LOCAL_ROWS * F * (4 + 33 / 32), IMPLEMENTATIONS["moe.swiglu_quant"],
    ),
]  # fmt: skip
