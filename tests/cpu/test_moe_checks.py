"""Checks of the MoE ops: wrong operands are refused with their name and never reach a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mini_deepinfer.ops import moe
from mini_deepinfer.ops.packed_weight import pack_weight
from tests.inputs import fp4_weight, fp8_activation, generator
from tests.numerics import assert_bitwise


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every op takes the kernel path; launches are recorded instead of made."""
    seen: list[str] = []
    monkeypatch.setattr(moe, "select", lambda op, tensor, *, impl=None, compute_dtype=None: impl or "portable")
    monkeypatch.setattr(moe, "call", lambda op, impl, *args: seen.append(op))
    return seen


def gemm(**changes: Any) -> dict[str, Any]:
    args: dict[str, Any] = {
        "a": torch.zeros(4, 64, dtype=torch.float8_e4m3fn),
        "a_scale": torch.zeros(4, 2, dtype=torch.uint8),
        "weight": torch.zeros(2, 96, 32, dtype=torch.uint8),
        "weight_scale": torch.zeros(2, 96, 2, dtype=torch.uint8),
        "offsets": torch.zeros(3, dtype=torch.int32),
    }
    return args | changes


GEMM_ERRORS = [
    ({"a": torch.zeros(4, 64)}, TypeError, r"grouped_gemm: a must be float8_e4m3fn \[rows, K\], got float32 \[4, 64\]"),
    ({"a": torch.zeros(4, 2, 32, dtype=torch.float8_e4m3fn)}, ValueError, r"a must be float8_e4m3fn \[rows, K\]"),
    ({"a": torch.zeros(4, 96, dtype=torch.float8_e4m3fn)}, ValueError, r"weight must be uint8 \[E, O, K/2=48\], got uint8 \[2, 96, 32\]"),
    (
        {"a": torch.zeros(4, 48, dtype=torch.float8_e4m3fn), "weight": torch.zeros(2, 96, 24, dtype=torch.uint8)},
        ValueError,
        r"multiples of 32, got K=48",
    ),
    ({"a_scale": torch.zeros(4, 4, dtype=torch.uint8)}, ValueError, r"a_scale must be uint8 \[rows=4, K/32=2\], got uint8 \[4, 4\]"),
    ({"a_scale": torch.ones(4, 2)}, TypeError, r"a_scale must be uint8 \[rows=4, K/32=2\], got float32"),
    ({"weight": torch.zeros(2, 96, 64, dtype=torch.uint8)}, ValueError, r"weight must be uint8 \[E, O, K/2=32\]"),
    ({"weight": torch.zeros(2, 80, 32, dtype=torch.uint8)}, ValueError, r"O=80"),
    ({"weight_scale": torch.zeros(2, 96, 4, dtype=torch.uint8)}, ValueError, r"weight_scale must be .*K/32=2"),
    ({"offsets": torch.zeros(2, dtype=torch.int32)}, ValueError, r"offsets must be int32 \[E\+1=3\], got int32 \[2\]"),
    ({"offsets": torch.zeros(3, dtype=torch.int64)}, TypeError, r"offsets must be int32 \[E\+1=3\], got int64 \[3\]"),
    ({"a_rows": torch.zeros(4, dtype=torch.int64)}, TypeError, r"a_rows must be int32"),
    ({"out": torch.zeros(4, 64, dtype=torch.bfloat16)}, ValueError, r"out must be bfloat16 or float32 \[M=4, O=96\]"),
]


@pytest.mark.parametrize("changes, error, match", GEMM_ERRORS)
def test_grouped_gemm_refuses(launches: list[str], changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        moe.grouped_gemm(**gemm(**changes))
    assert launches == []


def test_grouped_gemm_launches(launches: list[str]) -> None:
    assert moe.grouped_gemm(**gemm()).shape == (4, 96)
    assert moe.grouped_gemm(**gemm(a_rows=torch.zeros(7, dtype=torch.int32))).shape == (7, 96)
    assert launches == ["moe.grouped_gemm"] * 2
    empty = gemm(a=torch.zeros(0, 64, dtype=torch.float8_e4m3fn), a_scale=torch.zeros(0, 2, dtype=torch.uint8))
    assert moe.grouped_gemm(**empty).shape == (0, 96)
    assert len(launches) == 2, "no rows, no launch"


def test_grouped_gemm_without_scales_is_the_reference(launches: list[str]) -> None:
    args = gemm(a=torch.zeros(4, 64), a_scale=None)
    assert moe.grouped_gemm(**args, out_dtype=torch.float32).shape == (4, 96)
    with pytest.raises(RuntimeError, match="needs a_scale"):
        moe.grouped_gemm(**args, impl="portable")
    assert launches == []


def test_the_form_of_a_weight_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """sm90 reads packed weights, every other implementation stored ones; each gets its own and never the other's bytes."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    monkeypatch.setattr(moe, "call", lambda op, impl, *args: seen.append((impl, args)))
    chosen = "sm90"
    monkeypatch.setattr(moe, "select", lambda op, tensor, *, impl=None, compute_dtype=None: impl or chosen)
    weight = torch.randint(0, 256, (2, 96, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stored = gemm(weight=weight, weight_scale=torch.full((2, 96, 2), 120, dtype=torch.uint8))
    packed_weight = pack_weight(stored["weight"], stored["weight_scale"])
    assert packed_weight is not None
    packed = gemm(weight=packed_weight, weight_scale=None)
    moe.grouped_gemm(**stored)
    moe.grouped_gemm(**packed)
    moe.grouped_gemm(**stored, impl="sm90")
    moe.grouped_gemm(**packed, impl="portable")
    assert [impl for impl, _ in seen] == ["portable", "sm90", "sm90", "portable"]
    for _, args in (seen[0], seen[3]):
        assert torch.equal(args[2], stored["weight"]) and torch.equal(args[3], stored["weight_scale"])
    for _, args in seen[1:3]:
        assert torch.equal(args[2], packed_weight.words) and torch.equal(args[3], packed_weight.shifts)
    with pytest.raises(ValueError, match="weight_scale must be None with a PackedWeight"):
        moe.grouped_gemm(**packed | {"weight_scale": stored["weight_scale"]})
    with pytest.raises(ValueError, match=r"weight_scale must be a tensor \[E, O, K/32\]"):
        moe.grouped_gemm(**stored | {"weight_scale": None})
    with pytest.raises(TypeError, match=r"weight must be uint8 \[E, O, K/2=32\], got int32"):
        moe.grouped_gemm(**stored | {"weight": packed_weight.words.view(2, 96, 8).repeat(1, 1, 4)})
    with pytest.raises(ValueError, match=r"weight.words must be int32 \[E=2, O=96, K/8=12\]"):
        moe.grouped_gemm(**packed | {"a": torch.zeros(4, 96, dtype=torch.float8_e4m3fn), "a_scale": torch.zeros(4, 3, dtype=torch.uint8)})
    stored["weight_scale"][1, 5, 0] = 90
    with pytest.raises(RuntimeError, match="within 14 binades"):
        moe.grouped_gemm(**stored, impl="sm90")


def test_packed_weights_run_the_reference_on_the_cpu() -> None:
    g = generator(1)
    codes, scale = fp8_activation(g, 9, 160)
    weight, weight_scale = fp4_weight(g, 2, 64, 160)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    wanted = moe.grouped_gemm(codes, scale, weight, weight_scale, offsets, out_dtype=torch.float32)
    packed = pack_weight(weight, weight_scale)
    assert packed is not None
    assert_bitwise(moe.grouped_gemm(codes, scale, packed, None, offsets, out_dtype=torch.float32), wanted)


ROUTE = {"x": torch.zeros(3, 64), "weight": torch.zeros(8, 64), "bias": torch.zeros(8), "k": 2, "scaling": 1.5}


@pytest.mark.parametrize(
    "changes, error, match",
    [
        ({"weight": torch.zeros(8, 32)}, ValueError, r"route: weight must be bfloat16 or float32 \[E, N=64\]"),
        ({"bias": torch.zeros(7)}, ValueError, r"bias must be float32 \[E=8\], got float32 \[7\]"),
        ({"bias": torch.zeros(8, dtype=torch.bfloat16)}, TypeError, r"bias must be float32"),
        ({"k": 9}, ValueError, r"k must be in 1\.\.E=8, got 9"),
        ({"k": 0}, ValueError, r"k must be in 1\.\.E=8, got 0"),
        ({"x": torch.zeros(3, 64, dtype=torch.float16)}, TypeError, r"x must be bfloat16 or float32 \[T, N\], got float16"),
        ({}, TypeError, r"weight must be bfloat16 for the portable kernel"),
    ],
)
def test_route_refuses(launches: list[str], changes: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        moe.route(**(ROUTE | changes))
    assert launches == []


def test_permute_refuses(launches: list[str]) -> None:
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"ids must be int32 \[T, k\], got int64 \[3, 2\]\. Cast with ids\.int\(\)"):
        moe.permute(ids.long(), 0, 4)
    with pytest.raises(ValueError, match=r"ids must be int32 \[T, k\], got int32 \[6\]"):
        moe.permute(ids.flatten(), 0, 4)
    with pytest.raises(ValueError, match="must be >= 0, got -1 and 4"):
        moe.permute(ids, -1, 4)
    assert launches == []
    row_of_slot, slot_of_row, offsets = moe.permute(ids, 0, 4)
    assert (row_of_slot.shape, slot_of_row.shape, offsets.shape) == ((3, 2), (6,), (5,))
    assert launches == ["moe.permute"]


def test_swiglu_quant_refuses(launches: list[str]) -> None:
    gu = torch.zeros(3, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="F a multiple of 32, got 96"):
        moe.swiglu_quant(gu[:, :96], None, 10.0)
    with pytest.raises(ValueError, match=r"row_weight must be float32 \[M=3\], got float32 \[4\]"):
        moe.swiglu_quant(gu, torch.zeros(4), 10.0)
    with pytest.raises(ValueError, match="limit must be >= 0"):
        moe.swiglu_quant(gu, None, -1.0)
    with pytest.raises(ValueError, match="limit must be >= 0"):
        moe.swiglu_quant(gu, None, float("nan"))
    with pytest.raises(TypeError, match=r"num_rows must be int32 \[1\], got float32 \[1\]"):
        moe.swiglu_quant(gu, None, 10.0, torch.zeros(1))
    assert launches == []
    codes, scale = moe.swiglu_quant(gu, None, 10.0)
    assert (codes.shape, scale.shape) == ((3, 64), (3, 2))
    assert moe.swiglu(gu, None, 10.0).shape == (3, 64)
    assert [t.shape for t in moe.swiglu_quant_folded(gu, 10.0)] == [(3, 64), (3,)]
    assert launches == ["moe.swiglu_quant"] * 2 + ["moe.swiglu_quant_folded"]
    launches.clear()
    assert [t.shape for t in moe.swiglu_quant(gu[:0], torch.zeros(0), 10.0)] == [(0, 64), (0, 2)]
    assert [t.shape for t in moe.swiglu_quant_folded(gu[:0], 10.0)] == [(0, 64), (0,)]
    assert moe.swiglu(gu[:0], None, 10.0).shape == (0, 64)
    assert launches == []


def test_combine_refuses(launches: list[str]) -> None:
    y, rows = torch.zeros(5, 64, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match="row_of_slot must be int32"):
        moe.combine(y, rows.long(), None, torch.bfloat16)
    with pytest.raises(ValueError, match=r"shared must be bfloat16 \[T=3, N=64\]"):
        moe.combine(y, rows, torch.zeros(3, 32, dtype=torch.bfloat16), torch.bfloat16)
    with pytest.raises(TypeError, match="out_dtype must be bfloat16 or float32"):
        moe.combine(y, rows, None, torch.float16)
    assert launches == []
    assert moe.combine(y, rows, None, torch.float32).dtype == torch.float32
    assert launches == ["moe.combine"]


def test_combine_parts_refuses(launches: list[str]) -> None:
    y, rows, parts = torch.zeros(5, 64).bfloat16(), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 3, 64).bfloat16()
    with pytest.raises(ValueError, match=r"parts must be bfloat16 \[P, T=3, N=64\], got bfloat16 \[2, 4, 64\]"):
        moe.combine_parts(y, rows, torch.zeros(2, 4, 64).bfloat16(), 0, None)
    with pytest.raises(TypeError, match=r"parts must be bfloat16 \[P, T=3, N=64\], got float32"):
        moe.combine_parts(y, rows, parts.float(), 0, None)
    with pytest.raises(ValueError, match=r"rank must be in 0..P=2, got 3"):
        moe.combine_parts(y, rows, parts, 3, None)
    assert launches == []
    assert moe.combine_parts(y, rows, parts, 2, None).shape == (3, 64)
    assert launches == ["moe.combine_parts"]


def test_experts_take_folded_tokens_only_where_the_product_does(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, k, n, f, experts = 3, 2, 64, 32, 2
    weights = [torch.full(shape, 120, dtype=torch.uint8) for shape in ((experts, 2 * f, n // 2), (experts, 2 * f, n // 32))]
    weights += [torch.full(shape, 120, dtype=torch.uint8) for shape in ((experts, n, f // 2), (experts, n, f // 32))]
    outs = moe.reference.permute(torch.tensor([[0, 1]] * tokens, dtype=torch.int32), 0, experts)
    rows = (outs[2], torch.zeros(tokens * k, dtype=torch.int32), torch.ones(tokens * k))
    folded = (torch.zeros(tokens, n, dtype=torch.float8_e4m3fn), torch.ones(tokens))
    with pytest.raises(ValueError, match="folded tokens need row_of_slot"):
        moe.experts(*folded, *weights, *rows, 10.0)
    with pytest.raises(RuntimeError, match=r"rows with one scale each are for the sm90 product"):
        moe.experts(*folded, *weights, *rows, 10.0, row_of_slot=outs[0])
    assert launches == [] and not moe.takes_folded_rows(weights[0], torch.bfloat16)
    choices = {"moe.grouped_gemm": "sm90"}
    monkeypatch.setattr(moe, "select", lambda op, tensor, *, impl=None, compute_dtype=None: choices.get(op, "portable"))
    assert not moe.takes_folded_rows(weights[0], torch.bfloat16)
    packed = [pack_weight(*weights[:2]), None, pack_weight(*weights[2:]), None]
    assert moe.takes_folded_rows(packed[0], torch.bfloat16)
    weights = packed
    assert moe.experts(*folded, *weights, *rows, 10.0, row_of_slot=outs[0]).shape == (tokens * k, n)
    assert launches == ["moe.place_rows", "moe.folded_gemm", "moe.swiglu_fold", "moe.folded_gemm"]
    with pytest.raises(ValueError, match=r"row_of_slot must be int32 \[T=3, k=2\]"):
        moe.experts(*folded, *weights, *rows, 10.0, row_of_slot=outs[0][:2])


def test_cpu_tensors_run_the_reference() -> None:
    ids = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)
    row_of_slot, slot_of_row, offsets = moe.permute(ids, 1, 2)
    assert row_of_slot.tolist() == [[-1, 1], [0, 2]]
    assert slot_of_row.tolist() == [2, 1, 3, -1]
    assert offsets.tolist() == [0, 1, 3]
