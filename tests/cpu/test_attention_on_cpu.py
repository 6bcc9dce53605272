"""The portable attention kernels themselves, run on the CPU (tests/host/cuda_on_cpu.h) and compared with the reference."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops.reference import attention as reference
from mini_deepinfer.ops.reference.elementwise import rope
from tests.cpu.test_elementwise_on_cpu import SOURCES as ELEMENTWISE_SOURCES
from tests.gpu.test_attention import DIM, GARBAGE, SCALE, all_codes, assert_close, awkward_values, normed_inputs
from tests.host.build import library, pointer
from tests.inputs import far_apart, untouched


def sparse(q: Tensor, window: Tensor, window_idx: Tensor, compressed: Tensor, idx: Tensor, length: Tensor, sink: Tensor) -> Tensor:
    out = torch.full_like(q, float("nan"))
    library("attention_sparse", ["csrc/attention/sparse.cu"]).sparse(
        q.shape[0], q.shape[1], window_idx.shape[1], idx.shape[1], window.shape[0], compressed.shape[0], ctypes.c_float(SCALE),
        pointer(q), pointer(window), pointer(window_idx), pointer(compressed), pointer(idx), pointer(length), pointer(sink), pointer(out),
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("heads", "window_lanes", "picks"), [(64, 70, 66), (68, 8, 5), (4, 1, 0), (20, 0, 64)])
def test_sparse(heads: int, window_lanes: int, picks: int) -> None:
    """Full, short and empty tokens with holes; rows that nobody names are NaN, lanes past the length are garbage."""
    gen = torch.Generator().manual_seed(heads)
    kv = torch.randn(40, DIM, generator=gen).bfloat16()
    window, compressed = reference.pack_window(kv), reference.pack_compressed(kv.flip(0))
    window[33:], compressed[35:] = 0xFF, 0xFF
    window_idx = torch.randint(-5, 33, (4, window_lanes), generator=gen, dtype=torch.int32)
    idx = torch.randint(-5, 35, (4, picks), generator=gen, dtype=torch.int32)
    length = torch.tensor([picks, picks // 2, 0, -1], dtype=torch.int32)
    window_idx[3] = -1  # a token without a valid lane
    wild = torch.where(torch.arange(picks) < length[:, None], idx, GARBAGE)
    q, sink = torch.randn(4, heads, DIM, generator=gen).bfloat16(), torch.randn(heads, generator=gen)
    got = sparse(q, window, window_idx, compressed, wild, length, sink)
    assert torch.equal(got[3], torch.zeros_like(got[3]))
    assert_close(got, reference.sparse(q, window, window_idx, compressed, idx, length, sink, SCALE))


@pytest.mark.parametrize("dim", [512, 64])
@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_write_rows(kind: str, dim: int) -> None:
    x = awkward_values(50, dim, 32 if kind == "window" else 16)
    packed = reference.pack_window(x) if kind == "window" else reference.pack_compressed(x)
    slots = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:50].int()
    slots[::7] = -1
    rows = torch.full((60, packed.shape[1]), 0xA5, dtype=torch.uint8)
    wanted = rows.clone()
    reference.scatter_rows(wanted, slots, packed)
    write = library("attention_write_rows", ["csrc/attention/write_rows.cu"]).write_rows
    write(int(kind == "window"), 50, dim, pointer(x), pointer(rows), pointer(slots))
    assert torch.equal(rows, wanted)


@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_expand_rows(kind: str) -> None:
    packed = all_codes(kind)
    expand = library("attention_expand_rows", ["csrc/attention/expand_rows.cu"]).expand_rows
    for pages, page_rows in ((None, 1), (torch.tensor([3, 0, 29, 3, -1, 30, 500], dtype=torch.int32), 10)):
        got, wanted = (torch.full((300 if pages is None else 70, 512), 7.0, dtype=torch.bfloat16) for _ in range(2))
        page_table = ctypes.c_void_p(0) if pages is None else pointer(pages)
        expand(got.shape[0], 300, int(kind == "window"), pointer(packed), page_table, page_rows, pointer(got))
        reference.expand_rows(packed, pages, page_rows, wanted)
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(nan=0.0).view(torch.int16), wanted.nan_to_num(nan=0.0).view(torch.int16))


@pytest.mark.parametrize(("dim", "rope_dim"), [(512, 64), (288, 32), (32, 8)])
def test_write_normed_window(dim: int, rope_dim: int) -> None:
    """Against the kernels of the three ops: rmsnorm's sum is taken in the kernel's order."""
    x, weight, positions, table, slots = normed_inputs(50, dim, rope_dim)
    wide = torch.zeros(50, dim + 64, dtype=torch.bfloat16)
    wide[:, 32:-32] = x
    y = torch.empty_like(x)
    norm = library("elementwise", ELEMENTWISE_SOURCES)
    null = ctypes.c_void_p(0)
    norm.run_row(
        ctypes.c_int64(50), dim, pointer(x), ctypes.c_int64(dim), null, null, 0, pointer(weight), 0, ctypes.c_float(1e-6), pointer(y),
        null, null, null,
    )  # fmt: skip
    wanted, rows = (torch.full((100, dim + dim // 32), 0xA5, dtype=torch.uint8) for _ in range(2))
    reference.write_window(rope(y[:, None], positions, table)[:, 0], wanted, slots)
    library("attention_write_rows", ["csrc/attention/write_rows.cu"]).write_normed_window(
        50, dim, rope_dim, ctypes.c_void_p(wide.data_ptr() + 64), ctypes.c_int64(wide.stride(0)), pointer(weight), ctypes.c_float(1e-6),
        pointer(positions), pointer(table), pointer(rows), pointer(slots),
    )  # fmt: skip
    assert torch.equal(rows, wanted)


def test_rows_past_2_31_bytes() -> None:
    """Slots at the end of a pool of more than 2^31 bytes, for all writers; the projection's rows more than 2^31 elements apart."""
    x, weight, positions, table, _ = (part[-3:].contiguous() if len(part) == 20 else part for part in normed_inputs(20, 64, 16))
    kernels = library("attention_write_rows", ["csrc/attention/write_rows.cu"])
    for kind, pack, width in ((1, reference.pack_window, 66), (0, reference.pack_compressed, 36)):
        slots = torch.tensor([2**31 // width + 7, -1, 2**31 // width - 1], dtype=torch.int32)
        rows = untouched((2**31 // width + 8) * width).view(-1, width)
        kernels.write_rows(kind, 3, 64, pointer(x), pointer(rows), pointer(slots))
        assert torch.equal(rows[slots[::2].long()], pack(x)[::2])
    near, slots[1] = torch.empty(3, 66, dtype=torch.uint8), slots[0] - 1
    rows = untouched((int(slots[0]) + 1) * 66).view(-1, 66)
    for out, at, source in ((near, torch.arange(3, dtype=torch.int32), x), (rows, slots, far_apart(x, 2**30))):
        kernels.write_normed_window(
            3, 64, 16, ctypes.c_void_p(source.data_ptr()), ctypes.c_int64(source.stride(0)), pointer(weight), ctypes.c_float(1e-6),
            pointer(positions), pointer(table), pointer(out), pointer(at),
        )  # fmt: skip
    assert torch.equal(rows[slots.long()], near)


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_compress(ratio: int) -> None:
    gen = torch.Generator().manual_seed(ratio)
    kv, score = (torch.randn(20, 64, generator=gen) for _ in range(2))
    tails = (torch.randn(3, 64, generator=gen), torch.randn(3, 64, generator=gen)) if ratio > 1 else (None, None)
    rows = torch.randint(23 if ratio > 1 else 20, (9, ratio), generator=gen, dtype=torch.int32)
    scores = score if ratio > 1 else None
    out = torch.empty(9, 64, dtype=torch.bfloat16)
    library("attention_compress", ["csrc/attention/compress.cu"]).compress(
        9, ratio, 64, 20, pointer(kv), pointer(scores), pointer(tails[0]), pointer(tails[1]), pointer(rows), pointer(out)
    )
    exact = reference.compress(kv, scores, *tails, rows, torch.float32)
    step = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-6))) - 7)
    assert float(((out.float() - exact).abs() / step).max()) < 0.51
