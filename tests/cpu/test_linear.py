"""Grouped projections: group by group what the plain ones give, and operands as the library wants them."""

from __future__ import annotations

import pytest
import torch

from mini_deepinfer.config import NumericProfile
from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops import linear as linear_ops
from mini_deepinfer.ops.linear import Activation, Fp8Weight, fp8_grouped_linear, fp8_linear, grouped_linear, linear

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
