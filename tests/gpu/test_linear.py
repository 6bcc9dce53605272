"""Products of row-scaled FP8 operands: against the exact product, and rows that know nothing of each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS, call, why_not
from mini_deepinfer.ops.linear import LIBRARY_ROWS, fp8
from tests.inputs import generator
from tests.numerics import assert_bitwise

NAN_CODE = 0x7F


@pytest.fixture(params=IMPLEMENTATIONS["linear.fp8"])
def impl(request: pytest.FixtureRequest, cuda: torch.device) -> str:
    if reason := why_not("linear.fp8", request.param, cuda):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def sm90(cuda: torch.device) -> str:
    if reason := why_not("linear.fp8", "sm90", cuda):
        pytest.skip(reason)
    return "sm90"


def operands(tokens: int, groups: int, k: int, columns: int, device: torch.device, heavy: bool = False) -> tuple[Tensor, ...]:
    """Codes (Gaussian, or of all magnitudes that E4M3 has), and scales of many binades."""
    g = generator(tokens + k)

    def codes(*shape: int) -> Tensor:
        values = 8 * torch.randn(*shape, generator=g)
        if heavy:
            values = values.sign() * torch.exp2(17.5 * torch.rand(*shape, generator=g) ** 4 - 9)
        return values.to(torch.float8_e4m3fn)

    row_scale = torch.exp2(torch.randint(-20, 20, (tokens, groups), generator=g).float())
    weight_scale = torch.exp2(torch.randint(-20, 20, (columns,), generator=g).float())
    return tuple(t.to(device) for t in (codes(tokens, groups, k), row_scale, codes(columns, k), weight_scale))


def exact(codes: Tensor, row_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64 and the norm of its terms."""
    values = codes.double() * row_scale.double()[..., None]
    weights = (weight.double() * weight_scale.double()[:, None]).unflatten(0, (codes.shape[1], -1))
    product = torch.einsum("tgk,gok->tgo", values, weights).flatten(1)
    size = torch.einsum("tgk,gok->tgo", values.square(), weights.square()).sqrt().flatten(1)
    return product, size


SHAPES = [
    (1, 1, 128, 8), (7, 1, 48, 16), (63, 1, 336, 328), (129, 1, 1280, 512), (300, 1, 640, 1792), (512, 1, 5120, 480),
    (33, 8, 512, 512), (129, 2, 4096, 640), (5, 1, 8192, 640), (70, 3, 272, 576), (257, 1, 144, 4640), (4097, 1, 96, 224),
    (1024, 1, 400, 4608),  # on 66 clusters: 66 tiles, and 6 cut in two
]  # fmt: skip


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize(("tokens", "groups", "k", "columns"), SHAPES)
def test_fp8(cuda: torch.device, impl: str, tokens: int, groups: int, k: int, columns: int, heavy: bool) -> None:
    """Within one bf16 rounding and the error of sums of some 13 bits that are promoted every 128 of K.

    Rounding is right on average: the mean distance to the rounded exact product is the mean error before the rounding.
    """
    if impl == "library" and columns // groups % 16:
        pytest.skip("the library wants a multiple of 16 outputs")
    inputs = operands(tokens, groups, k, columns, cuda, heavy)
    out = fp8(*inputs, impl=impl)
    product, size = exact(*inputs)
    error = (out.double() - product).abs()
    bound = 2.0**-8 * product.abs() + 2.0**-9 * size  # a term far below the largest of its 32 may be lost
    assert bool((error <= bound).all()), f"{int((error > bound).sum())} over the bound, worst {float((error / bound).max()):.2f}"
    if out.numel() >= 10_000:
        mean = float(((out.double() - product.bfloat16().double()).abs() / size).mean())
        assert mean <= 5e-4, f"{mean:.1e} of a product's size before the rounding"
    assert_bitwise(fp8(*inputs, impl=impl), out, "second run")


def test_small_integers_are_exact(cuda: torch.device, impl: str) -> None:
    """Sums below 2^8 are not rounded at all: wrong columns, rows, scales or parts of K cannot hide."""
    g = generator(4)
    codes = torch.zeros(400, 1, 1296)
    codes[torch.arange(400), 0, torch.randint(1296, (400,), generator=g)] = 3.0
    codes[torch.arange(400), 0, torch.randint(1296, (400,), generator=g)] += 2.0
    weight = torch.randint(-4, 5, (1072, 1296), generator=g).float()
    row_scale = torch.exp2(torch.randint(-9, 9, (400, 1), generator=g).float())
    weight_scale = torch.exp2(torch.randint(-9, 9, (1072,), generator=g).float())
    inputs = (codes.to(torch.float8_e4m3fn), row_scale, weight.to(torch.float8_e4m3fn), weight_scale)
    out = fp8(*(t.to(cuda) for t in inputs), impl=impl)
    assert torch.equal(out.cpu().double(), exact(*inputs)[0])


@pytest.mark.parametrize(("groups", "columns"), [(1, 1792), (8, 1024)])
def test_a_row_does_not_depend_on_the_others(cuda: torch.device, sm90: str, groups: int, columns: int) -> None:
    """Nor on its place, on T, or on whether its tile is cut in two."""
    codes, row_scale, weight, weight_scale = operands(4097, groups, 400, columns, cuda)
    whole = fp8(codes, row_scale, weight, weight_scale, impl=sm90)
    for rows in (slice(0, 1), slice(4096, 4097), slice(255, 262), slice(300, 363), slice(100, 229), slice(0, 1100), slice(0, 4096)):
        part = fp8(codes[rows].contiguous(), row_scale[rows].contiguous(), weight, weight_scale, impl=sm90)
        assert_bitwise(part, whole[rows], f"rows {rows}")
    assert fp8(codes[:0], row_scale[:0], weight, weight_scale, impl=sm90).shape == (0, columns)


def test_a_column_does_not_depend_on_the_others(cuda: torch.device, sm90: str) -> None:
    """Nor on its place in a tile."""
    codes, row_scale, weight, weight_scale = operands(2048, 1, 528, 5120, cuda)
    whole = fp8(codes, row_scale, weight, weight_scale, impl=sm90)
    for columns in (slice(0, 192), slice(8, 1800), slice(2560, 5120), slice(5112, 5120)):
        part = fp8(codes, row_scale, weight[columns].contiguous(), weight_scale[columns].contiguous(), impl=sm90)
        assert_bitwise(part, whole[:, columns].contiguous(), f"columns {columns}")


@pytest.mark.parametrize(("tokens", "groups", "k", "columns"), [(1, 1, 128, 8), (129, 1, 336, 328), (300, 3, 144, 576), (257, 1, 256, 256)])
def test_nothing_outside_is_read_or_written(cuda: torch.device, sm90: str, tokens: int, groups: int, k: int, columns: int) -> None:
    """NaN around the operands, and in the result before it is written."""
    codes, row_scale, weight, weight_scale = inputs = operands(tokens, groups, k, columns, cuda)
    wanted = fp8(*inputs, impl="reference")
    wide_codes = torch.full((tokens + 300, groups, k), NAN_CODE, dtype=torch.uint8, device=cuda)
    wide_weight = torch.full((columns + 300, k), NAN_CODE, dtype=torch.uint8, device=cuda)
    wide_codes[:tokens], wide_weight[:columns] = codes.view(torch.uint8), weight.view(torch.uint8)
    out = torch.full((tokens + 300, columns), float("nan"), dtype=torch.bfloat16, device=cuda)
    operand = (wide_codes[:tokens].view(torch.float8_e4m3fn), row_scale, wide_weight[:columns].view(torch.float8_e4m3fn), weight_scale)
    call("linear.fp8", sm90, *operand, out[:tokens])
    assert bool(out[tokens:].isnan().all()) and not bool(out[:tokens].isnan().any())
    assert float((out[:tokens].float() - wanted.float()).norm() / wanted.float().norm()) < 2.0**-8
    assert_bitwise(out[:tokens].clone(), fp8(*inputs, impl=sm90), "operands with room around them")


def test_nan_stays_in_its_row_and_column(cuda: torch.device, sm90: str) -> None:
    codes, row_scale, weight, weight_scale = operands(140, 1, 256, 264, cuda)
    clean = fp8(codes, row_scale, weight, weight_scale, impl=sm90)
    row_scale[3] = float("nan")
    codes.view(torch.uint8)[130, 0, 200] = NAN_CODE
    weight.view(torch.uint8)[70, 17] = NAN_CODE
    out = fp8(codes, row_scale, weight, weight_scale, impl=sm90)
    nan = torch.zeros_like(out, dtype=torch.bool)
    nan[3] = nan[130] = nan[:, 70] = True
    assert torch.equal(out.isnan(), nan)
    assert_bitwise(out.masked_fill(nan, 0), clean.masked_fill(nan, 0), "the others")


def test_few_rows_take_the_library_unless_bits_must_not_depend_on_them(cuda: torch.device, sm90: str) -> None:
    codes, row_scale, weight, weight_scale = operands(LIBRARY_ROWS + 1, 1, 1024, 512, cuda)
    for rows in (1, LIBRARY_ROWS, LIBRARY_ROWS + 1):
        inputs = (codes[:rows], row_scale[:rows], weight, weight_scale)
        assert_bitwise(fp8(*inputs), fp8(*inputs, impl="library" if rows <= LIBRARY_ROWS else sm90), f"{rows} rows")
        assert_bitwise(fp8(*inputs, batch_invariant=True), fp8(*inputs, impl=sm90), f"{rows} rows, batch invariant")


@pytest.mark.parametrize(
    ("place", "make", "message"),
    [
        (0, lambda t: t[..., :-8].contiguous(), "codes must have groups and K a positive multiple of 16, got g=1 and K=248"),
        (2, lambda t: t[:-4], "weight must have a multiple of 8 rows, of 64 in each of several groups, got O=260 for g=1"),
        (0, lambda t: t[:, :, ::2], "codes must be contiguous"),
        (4, lambda t: t.float(), "out must be bfloat16, got float32"),
        (2, lambda t: torch.cat((t.view(-1), t.view(-1)[:1]))[1:].view(t.shape), "weight must start at a multiple of 16 bytes"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_take(cuda: torch.device, sm90: str, place: int, make, message: str) -> None:
    inputs = [*operands(8, 1, 256, 264, cuda), torch.empty(8, 264, dtype=torch.bfloat16, device=cuda)]
    inputs[place] = make(inputs[place])
    if place == 0 and inputs[0].shape[2] != 256:
        inputs[2] = inputs[2][:, : inputs[0].shape[2]].contiguous()
    if place == 2 and inputs[2].shape[0] != 264:
        inputs[3], inputs[4] = inputs[3][:260], inputs[4][:, :260].contiguous()
    with pytest.raises(RuntimeError, match=f"linear.fp8: {message}"):
        call("linear.fp8", sm90, *inputs)
