"""Cases of the attention ops: the measured step's shapes, with the index draws the peers were measured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench.shapes import CONTEXT_TOKENS, RELEASED, STEP_TOKENS, Case, strata_rows
from mini_deepinfer.ops import attention, elementwise
from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS, why_not
from mini_deepinfer.ops.reference import attention as reference

HEADS, DIM, WINDOW = 64, 512, 128
SCALE = DIM**-0.5
WINDOW_BYTES, COMPRESSED_BYTES = DIM + DIM // 32, DIM // 2 + DIM // 16
PICK_POOL = CONTEXT_TOKENS // 2  # model-like picks come from the rows before the window's part of the pool
CHECKED_TOKENS = 4
ROPE_SHAPES = ((STEP_TOKENS, 512), (STEP_TOKENS, 0), (256, 512), (8, 512))
MAX_ERROR = 4e-3  # two bf16 steps at |o| < 0.5, which holds for these inputs

Make = Callable[[torch.device], dict[str, Any]]


def pools(window_rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Packed pools of standard normal rows."""
    gen = torch.Generator(device).manual_seed(1)

    def packed(rows: int, pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parts = [pack(torch.randn(min(8192, rows - r), DIM, generator=gen, device=device).bfloat16()) for r in range(0, rows, 8192)]
        return torch.cat(parts)

    return {"window": packed(window_rows, reference.pack_window), "compressed": packed(CONTEXT_TOKENS, reference.pack_compressed)}


def sparse_inputs(tokens: int, picks: int, kind: str, expanded: bool) -> Make:
    """kind "model": sliding windows, picks shared by 8 neighbours with probability 3/4; "random": nothing shared."""

    def make(device: torch.device) -> dict[str, Any]:
        gen = torch.Generator().manual_seed(2)
        if kind == "model":
            window_rows = tokens + WINDOW
            window_idx = (torch.arange(tokens)[:, None] + torch.arange(WINDOW)).int()
        else:
            window_rows = CONTEXT_TOKENS
            window_idx = strata_rows(tokens, WINDOW, window_rows, gen)
        inputs: dict[str, Any] = pools(window_rows, device)
        on_device = torch.Generator(device).manual_seed(3)
        inputs["q"] = torch.randn(tokens, HEADS, DIM, generator=on_device, device=device).bfloat16()
        inputs["window_idx"] = window_idx.to(device)
        inputs["sink"] = torch.randn(HEADS, generator=on_device, device=device)
        inputs["compressed_idx"] = inputs["compressed_len"] = None
        if picks:
            shared_by, rows = (8, PICK_POOL) if kind == "model" else (1, CONTEXT_TOKENS)
            inputs["compressed_idx"] = strata_rows(tokens, picks, rows, gen, shared_by=shared_by).to(device)
            inputs["compressed_len"] = torch.full((tokens,), picks, dtype=torch.int32, device=device)
        else:
            inputs["compressed"] = None
        for name in ("window", "compressed") if expanded else ():
            inputs[name] = None if inputs[name] is None else attention.expand_rows(inputs[name], DIM)
        inputs["out"] = torch.empty_like(inputs["q"])
        return inputs

    return make


def run_sparse(inputs: dict[str, Any], impl: str) -> torch.Tensor:
    return attention.sparse(
        inputs["q"], inputs["window"], inputs["window_idx"], inputs["compressed"], inputs["compressed_idx"],
        inputs["compressed_len"], inputs["sink"], SCALE, out=inputs["out"], impl=impl,
    )  # fmt: skip


def check_sparse(inputs: dict[str, Any], out: torch.Tensor) -> float:
    """Maximal error of a few tokens against the float32 reference."""
    tokens = inputs["q"].shape[0]
    pick = torch.linspace(0, tokens - 1, min(CHECKED_TOKENS, tokens), device=out.device).long()
    rows = {key: None if inputs[key] is None else inputs[key][pick] for key in ("window_idx", "compressed_idx", "compressed_len")}
    wanted = reference.sparse(
        inputs["q"][pick].float(), inputs["window"], rows["window_idx"], inputs["compressed"], rows["compressed_idx"],
        rows["compressed_len"], inputs["sink"], SCALE,
    )  # fmt: skip
    error = float((out[pick].float() - wanted).abs().max())
    if not error <= MAX_ERROR:
        raise ValueError(f"max error {error:.3e} over {MAX_ERROR:.1e}")
    return error


def sparse_case(tokens: int, picks: int, kind: str, expanded: bool = False) -> Case:
    """Floor: 4 T H (W + K) D operations; q and out once, and every row that is used at least once.

    expanded: over rows that `expand_rows` made, which a step does once for the layers of a KV owner.
    """
    lanes = WINDOW + picks
    window_bytes, compressed_bytes = (2 * DIM, 2 * DIM) if expanded else (WINDOW_BYTES, COMPRESSED_BYTES)
    used = min(CONTEXT_TOKENS if kind == "random" else PICK_POOL, tokens * picks)
    rows = (min(tokens + WINDOW, tokens * WINDOW) if kind == "model" else min(CONTEXT_TOKENS, tokens * WINDOW)) * window_bytes
    return Case(
        op="attention.sparse",
        name=f"T={tokens} H={HEADS} K={lanes} {kind}{' expanded' if expanded else ''}",
        params={"T": tokens, "H": HEADS, "D": DIM, "W": WINDOW, "K": picks, "indices": kind, "dtype": "bf16"}
        | ({"rows": "expanded"} if expanded else {}),
        make=sparse_inputs(tokens, picks, kind, expanded),
        run=run_sparse,
        check=check_sparse,
        flops=4.0 * tokens * HEADS * lanes * DIM,
        bytes=4.0 * tokens * HEADS * DIM + rows + used * compressed_bytes + 4.0 * tokens * lanes,
        impls=("sm90",) if expanded else IMPLEMENTATIONS["attention.sparse"],
    )


def sparse_rope_case(tokens: int, picks: int, quantises: bool, kind: str = "model", expanded: bool = False) -> Case:
    """Sparse attention as the model calls it: rotated queries, output without its rotation, quantised for an FP8 `wo_a` or not."""
    plain, groups, rope_dim = sparse_case(tokens, picks, kind, expanded), RELEASED.o_groups, RELEASED.qk_rope_head_dim
    op = "sparse_rope_quant" if quantises else "sparse_rope"

    def make(device: torch.device) -> dict[str, Any]:
        inputs = plain.make(device)
        angle = 6.28 * torch.rand(tokens, rope_dim // 2, generator=torch.Generator(device).manual_seed(7), device=device)
        inputs["positions"] = torch.arange(tokens, dtype=torch.int32, device=device)
        inputs["table"] = torch.stack((angle.cos(), angle.sin()), -1)
        return inputs

    def run(inputs: dict[str, Any], impl: str) -> tuple[torch.Tensor, ...]:
        operands = {name: value for name, value in inputs.items() if name != "out"} | {"softmax_scale": SCALE, "impl": impl}
        if quantises:
            return attention.sparse_rope_quant(**operands, groups=groups, folded=True)
        return (attention.sparse_rope(**operands, out=inputs["out"]),)

    def check(inputs: dict[str, Any], out: tuple[torch.Tensor, ...]) -> float:
        """Every implementation bit for bit against the separate ops. Runs them anew: the timed ones may have rotated their q in place."""
        rotation = {name: inputs[name] for name in ("positions", "table")}
        wrong = 0
        for impl in plain.impls:
            if why_not("attention.sparse", impl, out[0].device):
                continue
            got = run({**inputs, "q": inputs["q"].clone(), "out": torch.empty_like(inputs["q"])}, impl)
            o = run_sparse({**inputs, "q": elementwise.rope(inputs["q"], **rotation), "out": torch.empty_like(inputs["q"])}, impl)
            if quantises:
                wanted = elementwise.rope_quant(o, **rotation, groups=groups, inverse=True, folded=True)
            else:
                wanted = (elementwise.rope(o, **rotation, inverse=True),)
            wrong += sum(int((a.contiguous().view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(got, wanted))
        if wrong:
            raise ValueError(f"{wrong} bytes differ")
        return 0.0

    return replace(
        plain, op=f"attention.{op}", make=make, run=run, check=check,
        bytes=plain.bytes - (1.0 if quantises else 0.0) * tokens * HEADS * DIM + tokens * rope_dim * 4.0,
    )  # fmt: skip


def expand_case(rows: int, row_bytes: int) -> Case:
    """A layer's window rows, or an owner's rows in pages."""
    page_rows = 256

    def make(device: torch.device) -> dict[str, Any]:
        pool = pools(rows, device)["window" if row_bytes == WINDOW_BYTES else "compressed"][:rows]
        pages = torch.randperm(rows // page_rows, generator=torch.Generator().manual_seed(8)).int().to(device)
        inputs: dict[str, Any] = {"packed": pool, "out": torch.empty(rows, DIM, dtype=torch.bfloat16, device=device)}
        return inputs if row_bytes == WINDOW_BYTES else inputs | {"pages": pages, "page_rows": page_rows}

    def run(inputs: dict[str, Any], impl: str) -> torch.Tensor:
        return attention.expand_rows(**inputs, dim=DIM, impl=impl)

    def check(inputs: dict[str, Any], out: torch.Tensor) -> float:
        wanted = attention.expand_rows(**{**inputs, "out": torch.empty_like(out)}, dim=DIM, impl="reference")
        wrong = int((out.view(torch.int16) != wanted.view(torch.int16)).sum())
        if wrong:
            raise ValueError(f"{wrong} values differ")
        return 0.0

    return Case(
        op="attention.expand_rows", name=f"rows={rows} of {row_bytes} bytes", params={"rows": rows, "row_bytes": row_bytes}, make=make,
        run=run, check=check, flops=0.0, bytes=float(rows * (row_bytes + 2 * DIM)), impls=IMPLEMENTATIONS["attention.expand_rows"],
    )  # fmt: skip


def write_case(op: str, tokens: int, row_bytes: int) -> Case:
    kernel, pack = getattr(attention, op), getattr(reference, op.replace("write", "pack"))

    def make(device: torch.device) -> dict[str, Any]:
        gen = torch.Generator(device).manual_seed(4)
        values = torch.randn(tokens, DIM, generator=gen, device=device).bfloat16()
        slots = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(4))[:tokens].int().to(device)
        return {"values": values, "slots": slots, "rows": torch.zeros(2 * tokens, row_bytes, dtype=torch.uint8, device=device)}

    def run(inputs: dict[str, Any], impl: str) -> torch.Tensor:
        kernel(inputs["values"], inputs["rows"], inputs["slots"], impl=impl)
        return inputs["rows"]

    def check(inputs: dict[str, Any], rows: torch.Tensor) -> float:
        wrong = int((rows[inputs["slots"].long()] != pack(inputs["values"])).sum())
        if wrong:
            raise ValueError(f"{wrong} bytes differ")
        return 0.0

    return Case(
        op=f"attention.{op}", name=f"T={tokens}", params={"T": tokens, "D": DIM, "dtype": "bf16"}, make=make, run=run, check=check,
        flops=0.0, bytes=float(tokens * (2 * DIM + row_bytes + 4)), impls=IMPLEMENTATIONS[f"attention.{op}"],
    )  # fmt: skip


def normed_window_case(tokens: int) -> Case:
    """From the projection to the cache row, as part of a wider product's rows: against the separate ops, bit for bit."""
    rope_dim = RELEASED.qk_rope_head_dim

    def make(device: torch.device) -> dict[str, Any]:
        gen = torch.Generator(device).manual_seed(6)
        wide = torch.randn(tokens, RELEASED.q_lora_rank + DIM, generator=gen, device=device).bfloat16()
        angle = 6.28 * torch.rand(tokens, rope_dim // 2, generator=gen, device=device)
        return {
            "x": wide[:, RELEASED.q_lora_rank :],
            "weight": torch.randn(DIM, generator=gen, device=device).bfloat16(),
            "eps": RELEASED.rms_norm_eps,
            "positions": torch.arange(tokens, dtype=torch.int32, device=device),
            "table": torch.stack((angle.cos(), angle.sin()), -1),
            "rows": torch.zeros(2 * tokens, WINDOW_BYTES, dtype=torch.uint8, device=device),
            "slots": torch.arange(tokens, 2 * tokens, dtype=torch.int32, device=device),
        }

    def run(inputs: dict[str, Any], impl: str) -> torch.Tensor:
        attention.write_normed_window(**inputs, impl=impl)
        return inputs["rows"]

    def check(inputs: dict[str, Any], rows: torch.Tensor) -> float:
        wanted = torch.zeros_like(rows)
        y = elementwise.rmsnorm(inputs["x"], inputs["weight"], inputs["eps"])
        y = elementwise.rope(y[:, None], inputs["positions"], inputs["table"])[:, 0]
        attention.write_window(y, wanted, inputs["slots"])
        wrong = int((rows != wanted).sum())
        if wrong:
            raise ValueError(f"{wrong} bytes differ")
        return 0.0

    return Case(
        op="attention.write_normed_window", name=f"T={tokens}", params={"T": tokens, "D": DIM, "R": rope_dim, "dtype": "bf16"},
        make=make, run=run, check=check, flops=0.0, bytes=float(tokens * (2 * DIM + WINDOW_BYTES + 8 + 4 * rope_dim)),
        impls=IMPLEMENTATIONS["attention.write_normed_window"],
    )  # fmt: skip


def compress_case(tokens: int, ratio: int) -> Case:
    groups = tokens // ratio

    def make(device: torch.device) -> dict[str, Any]:
        gen = torch.Generator(device).manual_seed(5)
        kv, score = (torch.randn(tokens, DIM, generator=gen, device=device) for _ in range(2))
        rows = torch.arange(groups * ratio, dtype=torch.int32, device=device).view(groups, ratio)
        return {"args": (kv, score if ratio > 1 else None, None, None, rows)}

    def run(inputs: dict[str, Any], impl: str) -> torch.Tensor:
        return attention.compress(*inputs["args"], torch.bfloat16, impl=impl)

    def check(inputs: dict[str, Any], out: torch.Tensor) -> float:
        error = float((out.float() - reference.compress(*inputs["args"], torch.float32)).abs().max())
        if not error <= 0.016:  # one bf16 rounding at |x| < 8
            raise ValueError(f"max error {error:.3e} over 1.6e-02")
        return error

    read = (4 if ratio == 1 else 8) * DIM * ratio
    return Case(
        op="attention.compress", name=f"T={tokens} r={ratio}", params={"T": tokens, "D": DIM, "r": ratio, "dtype": "f32"}, make=make,
        run=run, check=check, flops=0.0, bytes=float(groups * (read + 2 * DIM + 4 * ratio)), impls=IMPLEMENTATIONS["attention.compress"],
    )  # fmt: skip


CASES: list[Case] = [
    *(sparse_case(tokens, 512, kind) for tokens in (STEP_TOKENS, 256) for kind in ("model", "random")),
    *(sparse_case(tokens, 0, "model") for tokens in (STEP_TOKENS, 256)),
    *(sparse_case(tokens, 512, "model") for tokens in (8, 1)),
    *(sparse_rope_case(tokens, picks, quantises) for tokens, picks in ROPE_SHAPES for quantises in (False, True)),
    *(sparse_rope_case(STEP_TOKENS, 512, quantises, kind, expanded=True) for quantises in (False, True) for kind in ("model", "random")),
    *(expand_case(rows, COMPRESSED_BYTES) for rows in (CONTEXT_TOKENS // 2, CONTEXT_TOKENS)),
    expand_case(STEP_TOKENS + WINDOW, WINDOW_BYTES),
    write_case("write_window", STEP_TOKENS, WINDOW_BYTES),
    normed_window_case(STEP_TOKENS),
    write_case("write_compressed", STEP_TOKENS, COMPRESSED_BYTES),
    compress_case(STEP_TOKENS, 2),
    compress_case(STEP_TOKENS, 1),
]
