"""Indexer ops at the released model's shapes: one prefill step of 4,096 tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.shapes import CONTEXT_TOKENS, RELEASED, STEP_TOKENS, Case, strata_rows
from mini_deepinfer.ops import indexer
from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS
from mini_deepinfer.ops.reference import indexer as reference

HEADS, DIM = RELEASED.index_n_heads, RELEASED.index_head_dim
TOPK = RELEASED.index_topk
BLOCKS, BLOCK_SIZE = RELEASED.candidate_topk_blocks, RELEASED.candidate_block_size
ROW_BYTES = DIM // 2 + DIM // 32
ENTRIES_PER_PAGE = 128
CHECKED_TOKENS = 8  # the reference is a CPU-sized op: a few rows, spread over the step, are compared with it


def _key_rows(num_rows: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Packed rows of Gaussian keys, made in pieces on the device."""
    rows = torch.empty(num_rows, ROW_BYTES, dtype=torch.uint8, device=device)
    for start in range(0, num_rows, 1 << 14):
        piece = rows[start : start + (1 << 14)]
        piece.copy_(reference.pack_keys(torch.randn(piece.shape[0], DIM, device=device, generator=generator).bfloat16()))
    return rows


def _operands(device: torch.device, columns: int, visible: Tensor) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(columns)
    tokens = visible.shape[0]
    q = torch.randn(tokens, HEADS, DIM, device=device, generator=generator).bfloat16()
    codes, scale = indexer.quant_query(q)
    pages = -(-columns // ENTRIES_PER_PAGE)
    table = torch.randperm(pages, generator=generator, device=device).int()[None]
    weights = (torch.randn(tokens, HEADS, device=device, generator=generator) * 2.0**-6).bfloat16()
    return {
        "q_codes": codes,
        "q_scale": scale,
        "weights": weights,
        "keys": _key_rows(pages * ENTRIES_PER_PAGE, device, generator),
        "page_table": table,
        "seq_of_token": torch.zeros(tokens, dtype=torch.int32, device=device),
        "visible": visible.to(device),
        "entries_per_page": ENTRIES_PER_PAGE,
    }


def _some_tokens(inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    tokens = inputs["visible"].shape[0]
    picked = torch.linspace(0, tokens - 1, CHECKED_TOKENS).long()
    on_device = picked.to(inputs["visible"].device)
    per_token = {"q_codes", "q_scale", "weights", "seq_of_token", "visible", "candidates"}
    cut = {k: v[on_device].contiguous() if k in per_token else v for k, v in inputs.items()}
    return on_device, {k: v.cpu() if isinstance(v, Tensor) else v for k, v in cut.items()}


def _compare(out: Tensor, wanted: Tensor, what: str) -> float:
    out = out.cpu()
    if not torch.equal(out, wanted):
        raise AssertionError(f"{what}: {int((out != wanted).sum())} of {out.numel()} values differ from the reference")
    return 0.0


def _causal(columns: int, ratio: int) -> Tensor:
    positions = torch.arange(CONTEXT_TOKENS - STEP_TOKENS, CONTEXT_TOKENS)
    return torch.minimum((positions + 1) // ratio, torch.tensor(columns)).int()


def _logits_case(name: str, columns: int, visible: Tensor) -> Case:
    def make(device: torch.device) -> dict[str, Any]:
        return _operands(device, columns, visible)

    def run(inputs: dict[str, Any], impl: str) -> Tensor:
        return indexer.logits(**inputs, num_cols=columns, impl=impl)

    def check(inputs: dict[str, Any], out: Tensor) -> float:
        picked, cut = _some_tokens(inputs)
        return _compare(out[picked], reference.logits(**cut, num_cols=columns), name)

    scored = int(visible.long().sum())
    return Case(
        op="indexer.logits",
        name=name,
        params={"T": len(visible), "n": columns, "Hi": HEADS, "Di": DIM, "scored": scored},
        make=make,
        run=run,
        check=check,
        flops=2.0 * scored * HEADS * DIM,
        bytes=2.0 * len(visible) * columns + columns * ROW_BYTES + len(visible) * HEADS * ROW_BYTES,
        impls=IMPLEMENTATIONS["indexer.logits"],
    )


def _candidate_case(shared_by: int = 1) -> Case:
    """shared_by = n: a candidate is, with probability 3/4, one that n neighbouring queries share."""
    columns, name = CONTEXT_TOKENS, f"candidates of {CONTEXT_TOKENS}"
    if shared_by > 1:
        name += f", 3/4 shared by {shared_by} queries"

    def make(device: torch.device) -> dict[str, Any]:
        inputs = _operands(device, columns, _causal(columns, 1))
        if shared_by > 1:
            draw = strata_rows(STEP_TOKENS, BLOCKS, columns // BLOCK_SIZE, torch.Generator().manual_seed(7), shared_by=shared_by)
            inputs["candidates"] = draw.to(device)
            inputs["block_size"] = BLOCK_SIZE
            return inputs
        generator = torch.Generator(device).manual_seed(7)
        inputs["candidates"] = torch.empty(STEP_TOKENS, BLOCKS, dtype=torch.int32, device=device)
        for start in range(0, STEP_TOKENS, 512):  # 2,048 distinct visible blocks a token, and always the newest
            newest = (inputs["visible"][start : start + 512].long() - 1) // BLOCK_SIZE
            draw = torch.rand(512, columns // BLOCK_SIZE, device=device, generator=generator)
            block = torch.arange(columns // BLOCK_SIZE, device=device)
            draw = torch.where(block > newest[:, None], -1.0, torch.where(block == newest[:, None], 2.0, draw))
            inputs["candidates"][start : start + 512] = draw.topk(BLOCKS, dim=1).indices.sort(1).values.int()
        inputs["block_size"] = BLOCK_SIZE
        return inputs

    def run(inputs: dict[str, Any], impl: str) -> Tensor:
        return indexer.candidate_logits(**inputs, impl=impl)

    def check(inputs: dict[str, Any], out: Tensor) -> float:
        picked, cut = _some_tokens(inputs)
        return _compare(out[picked], reference.candidate_logits(**cut), name)

    scored = STEP_TOKENS * BLOCKS * BLOCK_SIZE
    return Case(
        op="indexer.candidate_logits",
        name=name,
        params={"T": STEP_TOKENS, "C": BLOCKS, "block_size": BLOCK_SIZE, "n": columns, "Hi": HEADS, "Di": DIM, "shared_by": shared_by},
        make=make,
        run=run,
        check=check,
        flops=2.0 * scored * HEADS * DIM,
        bytes=2.0 * scored + columns * ROW_BYTES + STEP_TOKENS * (HEADS * ROW_BYTES + 4 * BLOCKS),
        impls=IMPLEMENTATIONS["indexer.candidate_logits"],
    )


def _scores(device: torch.device, columns: int) -> Tensor:
    """Rows shaped like index scores: sums of 32 weighted ReLUs, in bf16."""
    generator = torch.Generator(device).manual_seed(columns + 1)
    out = torch.empty(STEP_TOKENS, columns, dtype=torch.bfloat16, device=device)
    for start in range(0, STEP_TOKENS, 256):
        part = out[start : start + 256]
        part.copy_(torch.randn(part.shape, device=device, generator=generator) * 0.6 + 0.1)
    return out


def _topk_case(columns: int) -> Case:
    def make(device: torch.device) -> dict[str, Any]:
        return {"logits": _scores(device, columns), "visible": torch.full((STEP_TOKENS,), columns, dtype=torch.int32, device=device)}

    def run(inputs: dict[str, Any], impl: str) -> tuple[Tensor, Tensor]:
        return indexer.topk(inputs["logits"], inputs["visible"], TOPK, impl=impl)

    def check(inputs: dict[str, Any], out: tuple[Tensor, Tensor]) -> float:
        picked = torch.linspace(0, STEP_TOKENS - 1, CHECKED_TOKENS).long().to(out[0].device)
        wanted = reference.topk(inputs["logits"][picked].cpu(), inputs["visible"][picked].cpu(), TOPK)
        return max(_compare(out[0][picked], wanted[0], "ids"), _compare(out[1][picked], wanted[1], "count"))

    return Case(
        op="indexer.topk",
        name=f"top {TOPK} of {columns}",
        params={"T": STEP_TOKENS, "n": columns, "k": TOPK, "dtype": "bfloat16"},
        make=make,
        run=run,
        check=check,
        flops=0.0,
        bytes=2.0 * STEP_TOKENS * columns + 4.0 * STEP_TOKENS * TOPK,
        impls=IMPLEMENTATIONS["indexer.topk"],
    )


def _blocks_case(columns: int) -> Case:
    def make(device: torch.device) -> dict[str, Any]:
        return {"logits": _scores(device, columns), "visible": _causal(columns, 1).to(device)}

    def run(inputs: dict[str, Any], impl: str) -> Tensor:
        return indexer.candidate_blocks(inputs["logits"], inputs["visible"], BLOCK_SIZE, BLOCKS, impl=impl)

    def check(inputs: dict[str, Any], out: Tensor) -> float:
        picked = torch.linspace(0, STEP_TOKENS - 1, CHECKED_TOKENS).long().to(out.device)
        cut = (inputs["logits"][picked].cpu(), inputs["visible"][picked].cpu())
        return _compare(out[picked], reference.candidate_blocks(*cut, BLOCK_SIZE, BLOCKS), "blocks")

    return Case(
        op="indexer.candidate_blocks",
        name=f"{BLOCKS} blocks of {columns}",
        params={"T": STEP_TOKENS, "n": columns, "block_size": BLOCK_SIZE, "num_blocks": BLOCKS},
        make=make,
        run=run,
        check=check,
        flops=0.0,
        bytes=2.0 * STEP_TOKENS * columns + 4.0 * STEP_TOKENS * BLOCKS,
        impls=IMPLEMENTATIONS["indexer.candidate_blocks"],
    )


def _topk_blocks_case(columns: int) -> Case:
    def make(device: torch.device) -> dict[str, Any]:
        return {"logits": _scores(device, columns), "visible": _causal(columns, 1).to(device)}

    def run(inputs: dict[str, Any], impl: str) -> tuple[Tensor, Tensor, Tensor]:
        return indexer.topk_blocks(inputs["logits"], inputs["visible"], TOPK, BLOCK_SIZE, BLOCKS, impl=impl)

    def check(inputs: dict[str, Any], out: tuple[Tensor, Tensor, Tensor]) -> float:
        picked = torch.linspace(0, STEP_TOKENS - 1, CHECKED_TOKENS).long().to(out[0].device)
        cut = (inputs["logits"][picked].cpu(), inputs["visible"][picked].cpu())
        wanted = reference.topk_blocks(*cut, TOPK, BLOCK_SIZE, BLOCKS)
        return max(_compare(got[picked], right, "picks") for got, right in zip(out, wanted, strict=True))

    return Case(
        op="indexer.topk_blocks",
        name=f"top {TOPK} and {BLOCKS} blocks of {columns}",
        params={"T": STEP_TOKENS, "n": columns, "k": TOPK, "block_size": BLOCK_SIZE, "num_blocks": BLOCKS},
        make=make,
        run=run,
        check=check,
        flops=0.0,
        bytes=2.0 * STEP_TOKENS * columns + 4.0 * STEP_TOKENS * (TOPK + BLOCKS),
        impls=IMPLEMENTATIONS["indexer.topk_blocks"],
    )


def _quantise_case(op: str) -> Case:
    rows = STEP_TOKENS if op == "write_keys" else STEP_TOKENS * HEADS

    def make(device: torch.device) -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(1)
        x = torch.randn(rows, DIM, device=device, generator=generator).bfloat16()
        if op == "quant_query":
            return {"q": x.view(STEP_TOKENS, HEADS, DIM)}
        if op == "rope_quant_query":
            angle = 6.28 * torch.rand(STEP_TOKENS, RELEASED.qk_rope_head_dim // 2, device=device, generator=generator)
            positions = torch.arange(STEP_TOKENS, dtype=torch.int32, device=device)
            return {"q": x.view(STEP_TOKENS, HEADS, DIM), "positions": positions, "table": torch.stack((angle.cos(), angle.sin()), -1)}
        slots = torch.randperm(rows, device=device, generator=generator).int()
        return {"k": x, "rows": torch.zeros(rows, ROW_BYTES, dtype=torch.uint8, device=device), "slots": slots}

    def run(inputs: dict[str, Any], impl: str) -> Any:
        if op != "write_keys":
            return getattr(indexer, op)(**inputs, impl=impl)
        indexer.write_keys(**inputs, impl=impl)
        return inputs["rows"]

    def check(inputs: dict[str, Any], out: Any) -> float:
        if op != "write_keys":
            wanted = getattr(reference, op)(*(operand.cpu() for operand in inputs.values()))
            return max(_compare(out[0], wanted[0], "codes"), _compare(out[1], wanted[1], "scale"))
        rows_wanted = torch.zeros(rows, ROW_BYTES, dtype=torch.uint8)
        reference.write_keys(inputs["k"].cpu(), rows_wanted, inputs["slots"].cpu())
        return _compare(out, rows_wanted, "rows")

    return Case(
        op=f"indexer.{op}",
        name=f"{rows} rows",
        params={"rows": rows, "Di": DIM},
        make=make,
        run=run,
        check=check,
        flops=0.0,
        bytes=float(rows) * (2 * DIM + ROW_BYTES),
        impls=IMPLEMENTATIONS[f"indexer.{op}"],
    )


_ALL = torch.full((STEP_TOKENS,), 1, dtype=torch.int32)

CASES: list[Case] = [
    _logits_case("n=65536, all visible", 65_536, _ALL * 65_536),
    _logits_case("n=131072, all visible", 131_072, _ALL * 131_072),
    _logits_case("ratio 2, last chunk of 131072 tokens", 65_536, _causal(65_536, 2)),
    _logits_case("ratio 1, last chunk of 131072 tokens", 131_072, _causal(131_072, 1)),
    _logits_case("first chunk", STEP_TOKENS, torch.arange(1, STEP_TOKENS + 1, dtype=torch.int32)),
    _candidate_case(),
    _candidate_case(shared_by=16),
    _topk_case(65_536),
    _topk_case(131_072),
    _topk_case(16_384),
    _blocks_case(131_072),
    _topk_blocks_case(131_072),
    _quantise_case("quant_query"),
    _quantise_case("rope_quant_query"),
    _quantise_case("write_keys"),
]
