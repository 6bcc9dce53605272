"""Cases of the elementwise ops at the measured step's shapes. All are memory-bound: the floor is the bytes that must move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.shapes import RELEASED, STEP_TOKENS, Case
from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS
from mini_deepinfer.ops.reference import elementwise as reference

HIDDEN, STREAMS = RELEASED.hidden_size, RELEASED.hc_mult
MIXES = 2 * STREAMS + STREAMS * STREAMS
EPS = RELEASED.rms_norm_eps
CHECKED_TOKENS = 64
MIX_BYTES = 4.0 * MIXES * STREAMS * HIDDEN  # of fn

Inputs = dict[str, Any]


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def normal(device: torch.device, seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(device, seed), device=device)


def picks(tokens: int) -> slice:
    return slice(0, tokens, max(1, tokens // CHECKED_TOKENS))


def worst(outputs: Any, wanted: Any, bounds: tuple[float, ...]) -> float:
    """Largest |difference| over the outputs; raises when one is over its bound (relative to its largest value)."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    largest = 0.0
    for i, (out, want, bound) in enumerate(zip(outputs, wanted, bounds, strict=True)):
        error = float((out.double() - want.double()).abs().max())
        limit = bound * float(want.double().abs().max())
        if not error <= limit:
            raise ValueError(f"output {i}: max error {error:.3e} over {limit:.3e}")
        largest = max(largest, error)
    return largest


def row_inputs(tokens: int, width: int) -> Callable[[torch.device], Inputs]:
    def make(device: torch.device) -> Inputs:
        x = normal(device, 1, tokens, width).bfloat16()
        return {"x": x, "weight": (1 + 0.1 * normal(device, 2, width)).bfloat16()}

    return make


def row_case(op: str, tokens: int, width: int, call: Callable[..., Any], wanted: Callable[..., Any],
             bounds: tuple[float, ...], bytes_per_value: float) -> Case:  # fmt: skip
    """call(x, weight, impl) against wanted(x, weight) for some of the tokens."""
    some = picks(tokens)

    def check(inputs: Inputs, out: Any) -> float:
        outputs = out if isinstance(out, tuple) else (out,)
        return worst(tuple(o[some] for o in outputs), wanted(inputs["x"][some], inputs["weight"]), bounds)

    return Case(
        op=f"elementwise.{op}",
        name=f"T={tokens} N={width}",
        params={"T": tokens, "N": width, "dtype": "bf16"},
        make=row_inputs(tokens, width),
        run=lambda inputs, impl: call(inputs["x"], inputs["weight"], impl),
        check=check,
        flops=0.0,
        bytes=bytes_per_value * tokens * width,
        impls=IMPLEMENTATIONS[f"elementwise.{op}"],
    )


ONE_STEP = 2.0**-8  # of the largest value: one bf16 step, where sums are taken in another order
GROUP = 1 / 32


def rmsnorm_case(tokens: int, width: int) -> Case:
    return row_case(
        "rmsnorm", tokens, width,
        lambda x, weight, impl: elementwise.rmsnorm(x, weight, EPS, impl=impl),
        lambda x, weight: reference.rmsnorm(x, weight, EPS),
        (ONE_STEP,), 4,
    )  # fmt: skip


def act_quant_case(tokens: int, width: int, folded: bool) -> Case:
    op = "act_quant_folded" if folded else "act_quant"
    return row_case(
        op, tokens, width,
        lambda x, weight, impl: getattr(elementwise, op)(x, impl=impl),
        lambda x, weight: getattr(reference, op)(x),
        (0.0, 0.0), 3 if folded else 3 + GROUP,
    )  # fmt: skip


def rmsnorm_quant_case(tokens: int, width: int, folded: bool) -> Case:
    def wanted(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = elementwise.rmsnorm(x, weight, EPS)  # its own case compares it with the reference
        return y, *(reference.act_quant_folded(y) if folded else reference.act_quant(y))

    return row_case(
        "rmsnorm_quant", tokens, width,
        lambda x, weight, impl: elementwise.rmsnorm_quant(x, weight, EPS, folded=folded, impl=impl),
        wanted, (0.0, 0.0, 0.0), 5 if folded else 5 + GROUP,
    )  # fmt: skip


def fold_scales_case(tokens: int, width: int) -> Case:
    def make(device: torch.device) -> Inputs:
        codes, scale = reference.act_quant(normal(device, 1, tokens, width).bfloat16())
        return {"codes": codes, "scale": scale}

    def check(inputs: Inputs, out: tuple[Tensor, ...]) -> float:
        some = picks(tokens)
        wanted = reference.fold_scales(inputs["codes"][some], inputs["scale"][some])
        return worst(tuple(o[some] for o in out), wanted, (0.0, 0.0))

    return Case(
        op="elementwise.fold_scales",
        name=f"T={tokens} K={width}",
        params={"T": tokens, "K": width, "dtype": "e4m3"},
        make=make,
        run=lambda inputs, impl: elementwise.fold_scales(inputs["codes"], inputs["scale"], impl=impl),
        check=check,
        flops=0.0,
        bytes=(2 + GROUP) * tokens * width,
        impls=IMPLEMENTATIONS["elementwise.fold_scales"],
    )


def rope_case(tokens: int, heads: int, dim: int) -> Case:
    """In place, as the model calls it: only the rotary columns move."""
    rope_dim = RELEASED.qk_rope_head_dim
    some = picks(tokens)

    def make(device: torch.device) -> Inputs:
        x = normal(device, 1, tokens, heads, dim).bfloat16()
        angle = torch.rand(tokens, rope_dim // 2, generator=generator(device, 2), device=device) * 6.28
        positions = torch.arange(tokens, dtype=torch.int32, device=device)
        table = torch.stack((angle.cos(), angle.sin()), -1)
        return {"x": x, "positions": positions, "table": table, "first": x[some].clone(), "runs": 0}

    def run(inputs: Inputs, impl: str) -> Tensor:
        inputs["runs"] += 1
        return elementwise.rope(inputs["x"], inputs["positions"], inputs["table"], out=inputs["x"], impl=impl)

    def check(inputs: Inputs, out: Tensor) -> float:
        wanted = inputs["first"].clone()
        for _ in range(inputs["runs"]):
            wanted = reference.rope(wanted, inputs["positions"][some], inputs["table"])
        return worst(out[some], wanted, (0.0,))

    return Case(
        op="elementwise.rope",
        name=f"T={tokens} h={heads} d={dim}",
        params={"T": tokens, "h": heads, "d": dim, "R": rope_dim, "dtype": "bf16"},
        make=make,
        run=run,
        check=check,
        flops=0.0,
        bytes=4.0 * tokens * heads * rope_dim + 4.0 * tokens * rope_dim,
        impls=IMPLEMENTATIONS["elementwise.rope"],
    )


def rope_quant_case(tokens: int) -> Case:
    """o without its rotation, quantised by output group: against the separate ops, bit for bit."""
    heads, dim, groups, rope_dim = RELEASED.num_attention_heads, RELEASED.head_dim, RELEASED.o_groups, RELEASED.qk_rope_head_dim
    some = picks(tokens)

    def make(device: torch.device) -> Inputs:
        angle = torch.rand(tokens, rope_dim // 2, generator=generator(device, 2), device=device) * 6.28
        return {
            "x": normal(device, 1, tokens, heads, dim).bfloat16(),
            "positions": torch.arange(tokens, dtype=torch.int32, device=device),
            "table": torch.stack((angle.cos(), angle.sin()), -1),
        }

    def run(inputs: Inputs, impl: str) -> tuple[Tensor, Tensor]:
        return elementwise.rope_quant(**inputs, groups=groups, inverse=True, folded=True, impl=impl)

    def check(inputs: Inputs, out: tuple[Tensor, ...]) -> float:
        part = {**inputs, "x": inputs["x"][some], "positions": inputs["positions"][some]}
        wanted = reference.rope_quant(**part, groups=groups, inverse=True, folded=True)
        return worst(tuple(o[some] for o in out), wanted, (0.0, 0.0))

    return Case(
        op="elementwise.rope_quant",
        name=f"T={tokens} h={heads} d={dim} g={groups}",
        params={"T": tokens, "h": heads, "d": dim, "g": groups, "R": rope_dim, "dtype": "bf16"},
        make=make,
        run=run,
        check=check,
        flops=0.0,
        bytes=3.0 * tokens * heads * dim,
        impls=IMPLEMENTATIONS["elementwise.rope_quant"],
    )


def hc_inputs(tokens: int) -> Callable[[torch.device], Inputs]:
    def make(device: torch.device) -> Inputs:
        streams = (2 * normal(device, 1, tokens, STREAMS, HIDDEN)).bfloat16()
        return {
            "streams": streams,
            "out": torch.empty_like(streams),
            "y": normal(device, 2, tokens, HIDDEN).bfloat16(),
            "fn": normal(device, 3, MIXES, STREAMS * HIDDEN) * (STREAMS * HIDDEN) ** -0.5,
            "base": normal(device, 4, MIXES),
            "scale": torch.ones(3, device=device),
            "pre": torch.rand(tokens, STREAMS, generator=generator(device, 5), device=device),
            "comb": torch.rand(tokens, STREAMS, STREAMS, generator=generator(device, 6), device=device) / STREAMS,
            "weight": (1 + 0.1 * normal(device, 7, HIDDEN)).bfloat16(),
            "z": normal(device, 8, tokens, (STREAMS + 1) * HIDDEN).bfloat16(),
            "gate_weight": normal(device, 9, STREAMS, HIDDEN).bfloat16(),
        }

    return make


def hc_case(op: str, tokens: int, call: Callable[[Inputs, str], Any], wanted: Callable[[Inputs], Any],
            bounds: tuple[float, ...], values: float, extra: float = 0.0) -> Case:  # fmt: skip
    """call on all tokens against wanted on some; the floor is `values` bf16 rows of N per token and `extra` bytes."""
    some = picks(tokens)
    per_token = ("streams", "y", "pre", "comb", "z")

    def check(inputs: Inputs, out: Any) -> float:
        outputs = out if isinstance(out, tuple) else (out,)
        part = {key: value[some] if key in per_token else value for key, value in inputs.items()}
        return worst(tuple(o[some] for o in outputs), wanted(part), bounds)

    return Case(
        op=f"elementwise.{op}",
        name=f"T={tokens} n={STREAMS} N={HIDDEN}",
        params={"T": tokens, "n": STREAMS, "N": HIDDEN, "dtype": "bf16"},
        make=hc_inputs(tokens),
        run=call,
        check=check,
        flops=2.0 * MIXES * STREAMS * HIDDEN * tokens if "mix" in op else 0.0,
        bytes=2.0 * values * HIDDEN * tokens + extra,
        impls=IMPLEMENTATIONS[f"elementwise.{op}"],
    )


def hc_mix_case(tokens: int) -> Case:
    iters, hc_eps = RELEASED.hc_sinkhorn_iters, RELEASED.hc_eps

    def mix(i: Inputs, **impl: str) -> tuple[Tensor, ...]:
        return elementwise.hc_mix(i["streams"], i["fn"], i["base"], i["scale"], iters, hc_eps, EPS, **impl)

    return hc_case(
        "hc_mix", tokens, lambda i, impl: mix(i, impl=impl), lambda i: mix(i, impl="reference"),
        (1e-5, 1e-5, 1e-5), STREAMS, MIX_BYTES + 4.0 * MIXES * tokens,
    )  # fmt: skip


def hc_collapse_norm_quant_case(tokens: int, folded: bool) -> Case:
    def wanted(i: Inputs) -> tuple[Tensor, ...]:
        x = elementwise.hc_collapse_norm(i["streams"].contiguous(), i["pre"].contiguous(), i["weight"], EPS)
        reference_x = reference.rmsnorm(reference.hc_collapse(i["streams"], i["pre"]), i["weight"], EPS)
        worst(x, reference_x, (2 * ONE_STEP,))
        return x, *(reference.act_quant_folded(x) if folded else reference.act_quant(x))

    return hc_case(
        "hc_collapse_norm_quant", tokens,
        lambda i, impl: elementwise.hc_collapse_norm_quant(
            i["streams"], i["pre"], i["weight"], EPS, folded=folded, impl=impl
        ),
        wanted, (0.0, 0.0, 0.0), STREAMS + 1.5,
    )  # fmt: skip


def hc_expand_case(tokens: int) -> Case:
    return hc_case(
        "hc_expand", tokens,
        lambda i, impl: elementwise.hc_expand(i["y"], i["streams"], i["pre"], i["comb"], out=i["out"], impl=impl),
        lambda i: reference.hc_expand(i["y"], i["streams"], i["pre"], i["comb"]),
        (ONE_STEP,), 2 * STREAMS + 1,
    )  # fmt: skip


def between(i: Inputs, **options: Any) -> tuple[Tensor, ...]:
    """All the work between two sublayers; without a norm when `folded` is not among the options."""
    site = (i["fn"], i["base"], i["scale"], RELEASED.hc_sinkhorn_iters, RELEASED.hc_eps, EPS)
    last = (i["y"], i["streams"], i["pre"], i["pre"], i["comb"])
    if "folded" in options:
        return elementwise.hc_expand_mix_norm_quant(*last, *site, i["weight"], **options)
    return elementwise.hc_expand_mix(*last, *site, **options)


def hc_expand_mix_case(tokens: int) -> Case:
    return hc_case(
        "hc_expand_mix", tokens,
        lambda i, impl: between(i, out=i["out"], impl=impl),
        lambda i: between(i, impl="reference"),
        (ONE_STEP, 2 * ONE_STEP, 1e-4, 1e-4, 1e-4),  # the coefficients follow from streams that may differ by a step
        2 * STREAMS + 2, MIX_BYTES + 8.0 * MIXES * tokens,
    )  # fmt: skip


def hc_expand_mix_norm_quant_case(tokens: int) -> Case:
    """Against the separate kernels, which the other cases compare with the reference: bit for bit."""

    def separate(i: Inputs) -> tuple[Tensor, ...]:
        i = {key: value.contiguous() for key, value in i.items()}
        streams = elementwise.hc_expand(i["y"], i["streams"], i["pre"], i["comb"])
        normed = elementwise.hc_collapse_norm_quant(streams, i["pre"], i["weight"], EPS, folded=True)
        site = (i["fn"], i["base"], i["scale"], RELEASED.hc_sinkhorn_iters, RELEASED.hc_eps, EPS)
        return streams, *normed, *elementwise.hc_mix(streams, *site)

    return hc_case(
        "hc_expand_mix_norm_quant", tokens,
        lambda i, impl: between(i, folded=True, out=i["out"], impl=impl),
        separate, (0.0,) * 7, 2 * STREAMS + 2.5, MIX_BYTES + 8.0 * MIXES * tokens,
    )  # fmt: skip


def engram_gate_case(tokens: int) -> Case:
    return hc_case(
        "engram_gate", tokens,
        lambda i, impl: elementwise.engram_gate(
            i["streams"], i["z"], i["gate_weight"], i["gate_weight"], EPS, out=i["out"], impl=impl
        ),
        lambda i: reference.engram_gate(i["streams"], i["z"], i["gate_weight"], i["gate_weight"], EPS),
        (2 * ONE_STEP,), 3 * STREAMS + 1,
    )  # fmt: skip


CASES: list[Case] = [
    rmsnorm_case(STEP_TOKENS, HIDDEN),
    rmsnorm_case(STEP_TOKENS, RELEASED.q_lora_rank),
    rmsnorm_case(STEP_TOKENS, RELEASED.head_dim),
    act_quant_case(STEP_TOKENS, HIDDEN, folded=False),
    act_quant_case(STEP_TOKENS, RELEASED.o_groups * RELEASED.o_lora_rank, folded=True),
    rmsnorm_quant_case(STEP_TOKENS, HIDDEN, folded=False),
    rmsnorm_quant_case(STEP_TOKENS, RELEASED.q_lora_rank, folded=True),
    fold_scales_case(STEP_TOKENS, HIDDEN),
    rope_case(STEP_TOKENS, RELEASED.num_attention_heads, RELEASED.head_dim),
    rope_case(STEP_TOKENS, 1, RELEASED.head_dim),
    rope_case(STEP_TOKENS, RELEASED.index_n_heads, RELEASED.index_head_dim),
    rope_quant_case(STEP_TOKENS),
    *(hc_mix_case(tokens) for tokens in (1, 256, STEP_TOKENS)),
    hc_collapse_norm_quant_case(STEP_TOKENS, folded=True),
    hc_expand_case(STEP_TOKENS),
    hc_expand_mix_case(STEP_TOKENS),
    *(hc_expand_mix_norm_quant_case(tokens) for tokens in (1, 256, STEP_TOKENS)),
    engram_gate_case(STEP_TOKENS),
]
