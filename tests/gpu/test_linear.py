"""Products of row-scaled FP8 operands: against the exact product, and the fused forms against the plain one bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops.linear import Rotation, scaled_gemm
from tests.inputs import generator
from tests.numerics import assert_bitwise

IMPLS = ("sm90", "library")


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest, cuda: torch.device) -> str:
    if request.param == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"needs compute capability 9.0, found {torch.cuda.get_device_capability()}")
    return request.param


def operands(tokens: int, groups: int, k: int, columns: int, device: torch.device) -> tuple[Tensor, ...]:
    """Gaussian codes, and scales of many binades."""
    g = generator(tokens + k)
    codes = (8 * torch.randn(tokens, groups, k, generator=g)).to(torch.float8_e4m3fn)
    weight = (8 * torch.randn(columns, k, generator=g)).to(torch.float8_e4m3fn)
    row_scale = torch.exp2(torch.randint(-20, 20, (tokens, groups), generator=g).float())
    weight_scale = torch.exp2(torch.randint(-20, 20, (columns,), generator=g).float())
    return tuple(t.to(device) for t in (codes, row_scale, weight, weight_scale))


def exact(codes: Tensor, row_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64 and the norm of its terms."""
    values = codes.double() * row_scale.double()[..., None]
    weights = (weight.double() * weight_scale.double()[:, None]).unflatten(0, (codes.shape[1], -1))
    product = torch.einsum("tgk,gok->tgo", values, weights).flatten(1)
    size = torch.einsum("tgk,gok->tgo", values.square(), weights.square()).sqrt().flatten(1)
    return product, size


SHAPES = [
    (1, 1, 128, 8), (300, 1, 640, 328), (257, 1, 1280, 512), (512, 1, 5120, 1792), (33, 8, 512, 2048), (129, 2, 4096, 512),
    (5, 1, 8192, 640), (70, 3, 256, 240),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "groups", "k", "columns"), SHAPES)
def test_scaled_gemm(cuda: torch.device, impl: str, tokens: int, groups: int, k: int, columns: int) -> None:
    """Within one bf16 rounding and the error of sums with 14 bits that are promoted every 128 of K."""
    if impl == "library" and columns % 16:
        pytest.skip("the library wants O a multiple of 16")
    inputs = operands(tokens, groups, k, columns, cuda)
    out = scaled_gemm(*inputs, impl=impl)
    product, size = exact(*inputs)
    error = (out.double() - product).abs()
    bound = 2.0**-8 * product.abs() + 2.0**-10 * size
    assert bool((error <= bound).all()), f"{int((error > bound).sum())} over the bound, worst {float((error / bound).max()):.2f}"
    assert float((error / size).mean()) <= 1.5e-3
    assert_bitwise(scaled_gemm(*inputs, impl=impl), out, "second run")


def test_scaled_gemm_is_exact_on_small_integers(cuda: torch.device, impl: str) -> None:
    """Sums below 2^8 have no rounding at all: wrong columns, rows, scales or K blocks cannot hide."""
    g = generator(4)
    codes = torch.zeros(400, 1, 1280)
    codes[torch.arange(400), 0, torch.randint(1280, (400,), generator=g)] = 3.0
    codes[torch.arange(400), 0, torch.randint(1280, (400,), generator=g)] += 2.0
    weight = torch.randint(-4, 5, (528, 1280), generator=g).float()
    row_scale = torch.exp2(torch.randint(-9, 9, (400, 1), generator=g).float())
    weight_scale = torch.exp2(torch.randint(-9, 9, (528,), generator=g).float())
    inputs = (codes.to(torch.float8_e4m3fn), row_scale, weight.to(torch.float8_e4m3fn), weight_scale)
    out = scaled_gemm(*(t.to(cuda) for t in inputs), impl=impl)
    assert torch.equal(out.cpu().double(), exact(*inputs)[0])


@pytest.mark.parametrize("groups", [1, 8])
def test_a_row_does_not_depend_on_the_others(cuda: torch.device, needs_sm90: None, groups: int) -> None:
    codes, row_scale, weight, weight_scale = operands(700, groups, 512, 256 * groups, cuda)
    whole = scaled_gemm(codes, row_scale, weight, weight_scale, impl="sm90")
    for rows in (slice(0, 1), slice(255, 257), slice(300, 700)):
        assert_bitwise(scaled_gemm(codes[rows], row_scale[rows], weight, weight_scale, impl="sm90"), whole[rows], f"rows {rows}")
    assert scaled_gemm(codes[:0], row_scale[:0], weight, weight_scale, impl="sm90").shape == (0, 256 * groups)


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(512, 64), (128, 64), (64, 64), (40, 16), (128, 0)])
def test_scaled_gemm_with_rotation_is_the_composition(cuda: torch.device, impl: str, head_dim: int, rope_dim: int) -> None:
    inputs = operands(333, 1, 256, 8 * head_dim, cuda)
    g = generator(head_dim)
    positions = torch.randint(0, 500, (333,), generator=g).int().to(cuda)
    angle = 6 * torch.rand(500, rope_dim // 2, generator=g)
    rotation = Rotation(positions, torch.stack((angle.cos(), angle.sin()), -1).to(cuda), head_dim)
    wanted = scaled_gemm(*inputs, impl=impl)
    heads = wanted.view(333, 8, head_dim)
    elementwise.rope(heads, *rotation[:2], out=heads)
    assert_bitwise(scaled_gemm(*inputs, rotation, impl=impl), wanted, "rotated product")


def test_scaled_gemm_of_strided_rows_stays_inside(cuda: torch.device, needs_sm90: None) -> None:
    """Codes that lie apart; NaN scales stay in their row."""
    codes, row_scale, weight, weight_scale = operands(70, 1, 256, 264, cuda)
    wide = torch.full((70, 1, 512), 1.0, device=cuda).to(torch.float8_e4m3fn)
    wide[..., 128:384].view(torch.uint8).copy_(codes.view(torch.uint8))
    wanted = scaled_gemm(codes, row_scale, weight, weight_scale, impl="sm90")
    assert_bitwise(scaled_gemm(wide[..., 128:384], row_scale, weight, weight_scale, impl="sm90"), wanted, "strided rows")
    row_scale[3] = float("nan")
    out = scaled_gemm(codes, row_scale, weight, weight_scale, impl="sm90")
    assert bool(out[3].isnan().all())
    assert_bitwise(torch.cat((out[:3], out[4:])), torch.cat((wanted[:3], wanted[4:])), "the other rows")
