"""The portable MoE kernels run on the CPU (tests/host/cuda_on_cpu.h) against the reference: index logic without a GPU."""

from __future__ import annotations

from ctypes import c_bool, c_float, c_int, c_int64

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops import moe
from mini_deepinfer.ops.reference import moe as reference
from mini_deepinfer.ops.reference import number_formats as nf
from mini_deepinfer.ops.reference.elementwise import fold_scales
from tests.host.build import library, pointer
from tests.inputs import Canary, fp4_weight, fp8_activation, generator, normal
from tests.numerics import assert_bitwise, compare, compare_codes


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()


@pytest.mark.parametrize(
    "counts, k, o, gather",
    [([1], 32, 32, False), ([0, 70, 0, 3], 96, 160, True), ([130, 0, 2], 160, 128, False)],
)
def test_grouped_gemm(counts: list[int], k: int, o: int, gather: bool) -> None:
    g = generator(k + o)
    total, spare = sum(counts), 3
    rows = 20 if gather else total + spare
    a, a_scale = fp8_activation(g, rows, k)
    weight, weight_scale = fp4_weight(g, len(counts), o, k, scale=0.02)
    weight_scale[-1, ::3] = 131  # above byte 128 the kernel multiplies twice
    a_rows = torch.randint(0, rows, (total + spare,), generator=g).int() if gather else None
    offsets = offsets_of(counts)
    out = Canary((total + spare, o), torch.bfloat16, "cpu")
    out.tensor.fill_(7.0)
    wanted = out.tensor.clone()
    kernel = library("moe_grouped_gemm", ["csrc/moe/grouped_gemm.cu"]).grouped_gemm
    kernel(
        c_int64(total + spare), c_int64(rows), len(counts), k, o, pointer(a), pointer(a_scale), pointer(a_rows),
        pointer(weight), pointer(weight_scale), pointer(offsets), pointer(out.tensor),
    )  # fmt: skip
    reference.grouped_gemm(a, a_scale, weight, weight_scale, offsets, a_rows, wanted)
    out.check()
    assert torch.equal(out.tensor[total:], wanted[total:]), "rows past offsets[-1] were written"
    compare(out.tensor[:total], wanted[:total], what="grouped_gemm")


@pytest.mark.parametrize("tokens, k, experts, first, local", [(0, 2, 8, 0, 8), (1, 2, 8, 0, 8), (700, 6, 384, 96, 96), (683, 3, 6, 4, 2)])
def test_permute(tokens: int, k: int, experts: int, first: int, local: int) -> None:
    g = generator(tokens)
    ids = torch.rand(tokens, experts, generator=g).topk(k, dim=1).indices.sort(dim=1).values.int()
    row_of_slot, slot_of_row = torch.empty_like(ids), torch.empty(tokens * k, dtype=torch.int32)
    offsets = torch.empty(local + 1, dtype=torch.int32)
    counts = torch.empty(max(1, -(-tokens * k // 2048)), local, dtype=torch.int32)
    kernel = library("moe_permute", ["csrc/moe/permute.cu"]).dispatch
    common = (
        c_int64(tokens * k), first, local, pointer(ids), pointer(row_of_slot), pointer(slot_of_row), pointer(offsets), pointer(counts), k,
    )  # fmt: skip
    kernel(*common, pointer(None), pointer(None), pointer(None))
    for got, wanted in zip((row_of_slot, slot_of_row, offsets), reference.permute(ids, first, local), strict=True):
        compare(got, wanted)
    weights = torch.rand(tokens, k, generator=g)
    token_of_row, row_weight = torch.empty(tokens * k, dtype=torch.int32), torch.empty(tokens * k)
    kernel(*common, pointer(weights), pointer(token_of_row), pointer(row_weight))
    for got, wanted in zip(
        (row_of_slot, slot_of_row, offsets, token_of_row, row_weight), moe.dispatch(ids, weights, first, local), strict=True
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("tokens, k, n, with_shared", [(1, 1, 8, False), (5, 6, 1288, True), (3, 32, 9216, True)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_combine(tokens: int, k: int, n: int, with_shared: bool, out_dtype: torch.dtype) -> None:
    g = generator(n)
    rows = torch.randperm(2 * tokens * k + 1, generator=g)[: tokens * k].view(tokens, k).int()
    rows[torch.rand(tokens, k, generator=g) < 0.5] = -1
    y = torch.full((2 * tokens * k + 1, n), float("nan"), dtype=torch.bfloat16)
    live = rows[rows >= 0].long()
    y[live] = normal(g, live.numel(), n)
    shared = normal(g, tokens, n) if with_shared else None
    out = torch.empty(tokens, n, dtype=out_dtype)
    library("moe_combine", ["csrc/moe/combine.cu"]).combine(
        c_int64(tokens), n, k, out_dtype == torch.float32, pointer(y), pointer(rows), pointer(shared), pointer(out)
    )
    assert torch.equal(out, reference.combine(y, rows, shared, out_dtype))


@pytest.mark.parametrize(
    "tokens, k, n, num_parts, rank, with_shared",
    [(3, 2, 8, 0, 0, True), (5, 6, 1288, 3, 2, True), (4, 1, 64, 2, 2, False), (4, 3, 2568, 1, 0, True)],
)
def test_combine_parts(tokens: int, k: int, n: int, num_parts: int, rank: int, with_shared: bool) -> None:
    """The sums of the other ranks around this rank's, which is rounded as theirs were."""
    g = generator(n)
    rows = torch.randperm(2 * tokens * k, generator=g)[: tokens * k].view(tokens, k).int()
    rows[torch.rand(tokens, k, generator=g) < 0.5] = -1
    rows[0] = -1
    y = torch.full((2 * tokens * k, n), float("nan"), dtype=torch.bfloat16)
    live = rows[rows >= 0].long()
    y[live] = normal(g, live.numel(), n)
    parts = normal(g, num_parts * tokens, n).view(num_parts, tokens, n)
    shared = normal(g, tokens, n) if with_shared else None
    out = torch.empty(tokens, n, dtype=torch.bfloat16)
    library("moe_combine", ["csrc/moe/combine.cu"]).combine_parts(
        c_int64(tokens), n, k, pointer(y), pointer(rows), pointer(shared), pointer(out), num_parts, rank, pointer(parts)
    )
    assert_bitwise(out, reference.combine_parts(y, rows, parts, rank, shared))
    own = reference.combine(y, rows, None, torch.bfloat16)  # the same in two passes: every rank's sum is a row, added in rank order
    stacked = torch.stack([*parts[:rank], own, *parts[rank:]])
    order = torch.arange(stacked.shape[0] * tokens, dtype=torch.int32).view(-1, tokens).t()
    assert_bitwise(out, reference.combine(stacked.flatten(0, 1), order, shared, torch.bfloat16))


@pytest.mark.parametrize("m, f, limit", [(1, 32, 10.0), (7, 288, 0.0), (3, 4160, 1.5)])
def test_swiglu_quant(m: int, f: int, limit: float) -> None:
    g = generator(f)
    gu, row_weight = normal(g, m, 2 * f, scale=4.0), torch.rand(m, generator=g)
    gu[m - 1, 3] = float("nan")
    bound = torch.tensor([m], dtype=torch.int32)
    codes, scale = torch.empty(m, f, dtype=torch.float8_e4m3fn), torch.empty(m, f // 32, dtype=torch.uint8)
    h = torch.empty(m, f, dtype=torch.bfloat16)
    kernel = library("moe_swiglu_quant", ["csrc/moe/swiglu_quant.cu"]).swiglu_quant
    shared = (c_int64(m), f, c_float(limit), pointer(gu), pointer(row_weight), pointer(bound))
    kernel(*shared, pointer(codes), pointer(scale), pointer(None))
    kernel(*shared, pointer(None), pointer(None), pointer(h))
    compare(h, reference.swiglu(gu, row_weight, limit))
    wanted_codes, wanted_scale = nf.quant_fp8_ue8m0(h)
    compare(scale, wanted_scale)
    compare_codes(codes, wanted_codes, steps=0)


def test_route() -> None:
    g = generator(4)
    tokens, n, experts, k = 35, 160, 130, 6
    x, weight = normal(g, tokens, n), normal(g, experts, n, scale=n**-0.5)
    x[3] = 0  # ties
    x[4] = float("nan")
    bias = torch.randn(experts, generator=g).bfloat16().float() * 0.1
    ids, weights = torch.empty(tokens, k, dtype=torch.int32), torch.empty(tokens, k)
    library("moe_route", ["csrc/moe/route.cu"]).route(
        c_int64(tokens), n, experts, k, c_float(1.5), pointer(x), pointer(weight), pointer(bias), pointer(ids), pointer(weights)
    )
    wanted_ids, wanted_weights = reference.route(x, weight, bias, k, 1.5)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted_weights, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("k", [32, 352, 1024])
def test_fold_rows(k: int) -> None:
    """Codes at the row's largest scale, words of each 128 columns transposed 4 x 8, zeros past K, nothing past offsets[-1]."""
    g = generator(k)
    a, _ = fp8_activation(g, 9, k)
    a_scale = torch.randint(100, 128, (9, k // 32), generator=g).to(torch.uint8)
    a_rows = torch.tensor([3, 3, 8, 0, 5, 77], dtype=torch.int32)
    padded = -(-k // 128) * 128
    folded = torch.full((6, padded), 0xEE, dtype=torch.uint8)
    row_scale, offsets = torch.full((6,), -1.0), offsets_of([2, 3])
    library("moe_fold", ["csrc/moe/fold.cu"]).fold_rows(
        c_int64(6), k, c_int(2), pointer(a), pointer(a_scale), pointer(a_rows), pointer(offsets), pointer(folded),
        pointer(row_scale),
    )  # fmt: skip
    source = a_rows[:5].long()
    top = a_scale[source].amax(1)
    values = nf.dequant_fp8_ue8m0(a[source], a_scale[source]) / nf.decode_e8m0(top)[:, None]
    codes = torch.zeros(5, padded, dtype=torch.uint8)
    codes[:, :k] = nf.encode_e4m3(values).view(torch.uint8)
    wanted = codes.view(5, padded // 128, 4, 8, 4).transpose(2, 3).reshape(5, padded)
    assert_bitwise(folded[:5], wanted)
    assert_bitwise(row_scale[:5], nf.decode_e8m0(top))
    assert bool((folded[5] == 0xEE).all()) and float(row_scale[5]) == -1.0


@pytest.mark.parametrize("tokens, picks, k", [(1, 1, 32), (9, 6, 352), (11, 3, 5120), (10, 32, 5280)])
def test_folding_then_placing_is_fold_rows(tokens: int, picks: int, k: int) -> None:
    """A token folded before it travels lands with the bits that folding its rows at the end would give; other rows are left alone."""
    g = generator(k)
    codes, _ = fp8_activation(g, tokens, k)
    scale = torch.randint(100, 128, (tokens, k // 32), generator=g).to(torch.uint8)
    scale[0, 0] = 255
    ids = torch.rand(tokens, 3 * picks, generator=g).topk(picks, dim=1).indices.sort(dim=1).values.int()
    ids[tokens // 2] = 3 * picks - 1  # a token without an expert here
    row_of_slot, slot_of_row, offsets = reference.permute(ids, 1, picks)
    token_of_row = (slot_of_row.clamp(min=0) // picks).int()
    rows, padded = tokens * picks, -(-k // 128) * 128
    outs = [(torch.full((rows, padded), 0xEE, dtype=torch.uint8), torch.full((rows,), -1.0)) for _ in range(2)]
    library("moe_fold", ["csrc/moe/fold.cu"]).fold_rows(
        c_int64(rows), k, c_int(picks), pointer(codes), pointer(scale), pointer(token_of_row),
        pointer(offsets), *(pointer(t) for t in outs[0]),
    )  # fmt: skip
    folded, code_scale = fold_scales(codes, scale)
    library("moe_place_rows", ["csrc/moe/place_rows.cu"]).place_rows(
        c_int64(tokens), k, picks, pointer(folded), pointer(code_scale), pointer(row_of_slot), *(pointer(t) for t in outs[1])
    )
    assert_bitwise(outs[1][0], outs[0][0])
    assert_bitwise(outs[1][1], outs[0][1])


@pytest.mark.parametrize("m, f, limit", [(1, 32, 10.0), (200, 32, 0.0), (7, 288, 1.7), (4, 2304, 2.5)])
def test_swiglu_fold_is_swiglu_quant_then_fold_rows(m: int, f: int, limit: float) -> None:
    """With limits that are bf16 numbers and one (1.7) that is not: those are clamped elsewhere."""
    g = generator(f)
    gu, row_weight = normal(g, m, 2 * f, scale=4.0), torch.rand(m, generator=g)
    gu[:, : f // 3] *= 1e-3  # groups at other scales
    gu[0, :4] = torch.tensor([limit, -limit, float("inf"), -float("inf")])
    gu[0, f : f + 6] = torch.tensor([1.0, limit, -limit, float("inf"), 0.0, -0.0])
    gu[m // 2, 7] = gu[m - 1, f + 9] = float("nan")
    bound = torch.tensor([m], dtype=torch.int32)
    codes, scale = torch.empty(m, f, dtype=torch.uint8), torch.empty(m, f // 32, dtype=torch.uint8)
    swiglu = library("moe_swiglu_quant", ["csrc/moe/swiglu_quant.cu"])
    shared = (c_int64(m), f, c_float(limit), pointer(gu), pointer(row_weight), pointer(bound))
    swiglu.swiglu_quant(*shared, pointer(codes), pointer(scale), pointer(None))
    padded = -(-f // 128) * 128
    outs = [(torch.full((m, padded), 0xEE, dtype=torch.uint8), torch.empty(m)) for _ in range(2)]
    swiglu.swiglu_fold(*shared, c_bool(True), *(pointer(t) for t in outs[0]))
    offsets = offsets_of([m])
    library("moe_fold", ["csrc/moe/fold.cu"]).fold_rows(
        c_int64(m), f, c_int(1), pointer(codes), pointer(scale), pointer(None), pointer(offsets), *(pointer(t) for t in outs[1])
    )
    assert_bitwise(outs[0][0], outs[1][0])
    assert_bitwise(outs[0][1], outs[1][1])
    plain, row_scale = torch.full((m, f), 0xEE, dtype=torch.uint8), torch.empty(m)
    swiglu.swiglu_fold(*shared, c_bool(False), pointer(plain), pointer(row_scale))
    wanted, wanted_scale = fold_scales(codes.view(torch.float8_e4m3fn), scale)
    assert_bitwise(plain, wanted.view(torch.uint8))
    assert_bitwise(row_scale, wanted_scale)
