"""Grouped projections: group by group what the plain ones give, and operands as the library wants them."""

from __future__ import annotations

import pytest
import torch

from mini_deepinfer.config import NumericProfile
from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops import linear as linear_ops
from mini_deepinfer.ops.linear import LIBRARY_ROWS, Activation, Fp8Weight, fp8, fp8_grouped_linear, fp8_linear, grouped_linear, linear

TOKENS, GROUPS, K, RANK = 5, 3, 64, 32


def rows(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(TOKENS, GROUPS, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def fp8_parts() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    codes = torch.randn(GROUPS * RANK, K, generator=g).to(torch.float8_e4m3fn)
    return codes, torch.randint(120, 130, (GROUPS * RANK // 32, K // 32), generator=g, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_linear_is_linear_of_every_group(dtype: torch.dtype) -> None:
    profile, x = NumericProfile(dtype), rows(dtype)
    weight = torch.randn(GROUPS, RANK, K, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = grouped_linear(x, weight, profile)
    assert out.shape == (TOKENS, GROUPS, RANK) and out.dtype == dtype
    for g in range(GROUPS):
        assert torch.equal(out[:, g], linear(x[:, g], weight[g], profile))


def test_fp8_grouped_linear_is_fp8_linear_of_every_group() -> None:
    profile, x = NumericProfile(torch.bfloat16), rows()
    codes, scale = fp8_parts()
    quantised, scales = elementwise.act_quant(x.flatten(0, 1))
    out = fp8_grouped_linear(
        quantised.unflatten(0, (TOKENS, GROUPS)), scales.unflatten(0, (TOKENS, GROUPS)), Fp8Weight(codes, scale, "wo_a"), x.dtype, profile
    )
    for g in range(GROUPS):
        part = slice(g * RANK, (g + 1) * RANK)
        weight = Fp8Weight(codes[part], scale[g * RANK // 32 : (g + 1) * RANK // 32], f"wo_a[{g}]")
        assert torch.equal(out[:, part], fp8_linear(Activation(x[:, g].contiguous(), profile), weight))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_library_gets_every_group_in_its_layout(monkeypatch: pytest.MonkeyPatch, batch_invariant: bool) -> None:
    """A group's rows and scales in one piece each; no call without rows."""
    calls: list[int] = []

    def library(codes, weight_t, *, scale_a, scale_b, out_dtype, use_fast_accum):
        assert codes.is_contiguous() and scale_a.is_contiguous() and scale_a.shape == (codes.shape[0], 1) and not use_fast_accum
        calls.append(codes.shape[0])
        return ((codes.float() * scale_a) @ (weight_t.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", library)
    monkeypatch.setattr(linear_ops, "select", lambda op, tensor, impl=None: "library")
    weight = Fp8Weight(*fp8_parts(), "wo_a")
    weight.folded = (fp8_parts()[0], torch.exp2(torch.arange(GROUPS * RANK) % 5.0))
    codes, scale = elementwise.act_quant_folded(rows().flatten(0, 1))
    codes, scale = codes.unflatten(0, (TOKENS, GROUPS)), scale.unflatten(0, (TOKENS, GROUPS))
    profile = NumericProfile(torch.bfloat16, batch_invariant=batch_invariant)
    out = fp8_grouped_linear(codes, scale, weight, torch.bfloat16, profile)
    assert len(calls) == GROUPS
    weights = (weight.folded[0].float() * weight.folded[1][:, None]).unflatten(0, (GROUPS, RANK))
    for g in range(GROUPS):
        wanted = (codes[:, g].float() * scale[:, g, None]) @ weights[g].t()
        torch.testing.assert_close(out[:, g * RANK : (g + 1) * RANK].float(), wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))
    assert fp8_grouped_linear(codes[:0], scale[:0], weight, torch.bfloat16, profile).shape == (0, GROUPS * RANK)
    assert len(calls) == GROUPS


@pytest.mark.parametrize("num_rows", [1, 256, 257])
def test_invariant_calls_have_one_number_of_rows_and_leave_none_behind(num_rows: int) -> None:
    """The rows that fill the last call up are not kept alive by the result."""
    seen: list[int] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return 2 * x

    x = torch.arange(num_rows * 3.0).view(num_rows, 3)
    out = linear_ops._by_rows(product, True, x)
    assert torch.equal(out, 2 * x) and set(seen) == {linear_ops.INVARIANT_ROWS}
    assert out.untyped_storage().nbytes() == out.numel() * 4


def operands(tokens: int = 5, groups: int = 2, k: int = 128, columns: int = 512) -> tuple[torch.Tensor, ...]:
    """Of the product of row-scaled FP8 operands."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randn(tokens, groups, k, generator=g).to(torch.float8_e4m3fn)
    weight = torch.randn(columns, k, generator=g).to(torch.float8_e4m3fn)
    return codes, torch.exp2(torch.arange(tokens * groups) % 5.0).view(tokens, groups), weight, torch.exp2(torch.arange(columns) % 3.0)


@pytest.mark.parametrize(
    ("place", "tensor", "error", "message"),
    [
        (0, torch.ones(5, 2, 128), TypeError, r"codes must be float8_e4m3fn \[T, g, K\], got float32"),
        (1, torch.ones(5, 1), ValueError, r"row_scale must be float32 \[T=5, g=2\], got float32 \[5, 1\]"),
        (2, torch.ones(512, 96).to(torch.float8_e4m3fn), ValueError, r"weight must be float8_e4m3fn \[O, K=128\], got .* \[512, 96\]"),
        (3, torch.ones(256), ValueError, r"weight_scale must be float32 \[O=512\], got float32 \[256\]"),
    ],
)
def test_wrong_operands_are_refused(place: int, tensor: torch.Tensor, error: type[Exception], message: str) -> None:
    inputs = list(operands())
    inputs[place] = tensor
    with pytest.raises(error, match=r"linear.fp8: " + message):
        fp8(*inputs)
    codes, row_scale, weight, weight_scale = operands()
    with pytest.raises(ValueError, match=r"as many rows for each of the g=2 groups of codes, got O=511"):
        fp8(codes, row_scale, weight[:511], weight_scale[:511])


def test_the_reference_multiplies_group_by_group() -> None:
    codes, row_scale, weight, weight_scale = operands()
    out = fp8(codes, row_scale, weight, weight_scale)
    for g in range(2):
        values = codes[:, g].double() * row_scale[:, g, None].double()
        wanted = values @ (weight[256 * g : 256 * (g + 1)].double() * weight_scale[256 * g : 256 * (g + 1), None].double()).t()
        assert torch.equal(out[:, 256 * g : 256 * (g + 1)], wanted.float().bfloat16())


def test_what_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for all groups. The library has what the kernel does not take, and few rows of one group where bits may depend on T."""
    kernel: list[tuple] = []
    library: list[tuple] = []
    monkeypatch.setattr(linear_ops, "select", lambda op, tensor, impl=None: impl or "sm90")
    monkeypatch.setattr(linear_ops, "call", lambda op, impl, *args: kernel.append((op, impl, args)))
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **rest: library.append((a, b)) or torch.zeros(a.shape[0], b.shape[1]))
    many = LIBRARY_ROWS + 1
    inputs = operands(many)
    out = fp8(*inputs)
    ((op, impl, args),) = kernel
    assert (op, impl) == ("linear.fp8", "sm90") and args[-1] is out and out.shape == (many, 512)
    assert fp8(*operands(tokens=0)).shape == (0, 512)
    assert len(kernel) == 1 and not library
    fp8(*operands(1, 2))
    fp8(*operands(LIBRARY_ROWS, 1), batch_invariant=True)
    fp8(*operands(1, 1), impl="sm90")
    assert len(kernel) == 4 and not library
    for shape in ((many, 1, 40, 512), (many, 1, 128, 500), (many, 2, 128, 272), (LIBRARY_ROWS, 1, 128, 512)):
        assert fp8(*operands(*shape)).shape == (shape[0], shape[3])
    assert len(kernel) == 4 and len(library) == 5
