"""Norms, activation quantisation, rope, hyper-connections and the engram gate on the GPU.

Quantised outputs, scales, rope and every fused pass are compared bit for bit; sums against float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS, call
from mini_deepinfer.ops.reference import elementwise as reference
from tests.inputs import Canary, generator, integers, normal
from tests.numerics import assert_bitwise

EPS = 1e-20
HALF_STEP = 2.0**-8  # largest relative error of one rounding to bf16
TOKENS = (1, 31, 33, 129)


def to(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(device) for t in tensors)


def implementations(op: str) -> tuple[str, ...]:
    """The kernels of elementwise.<op>."""
    return IMPLEMENTATIONS[f"elementwise.{op}"]


def positive(g: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=g) + 0.1


def check_sum(out: Tensor, exact: Tensor, magnitude: Tensor, what: str, slack: float = 1e-6) -> None:
    """`out` is `exact` (float64) rounded once to bf16, up to `slack` of the summed magnitudes; errors lean to no side."""
    error = out.double() - exact
    bound = HALF_STEP * exact.abs() * (1 + 2.0**-7) + slack * magnitude + 2.0**-134
    over = error.abs() > bound
    if over.any():
        at = tuple(int(i) for i in over.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(over.sum())} of {out.numel()} over the bound, first at {at}: "
            f"{float(out[at])} against {float(exact[at])}, magnitude {float(magnitude[at])}"
        )
    away = (error * exact.sign())[error != 0]
    up = int((away > 0).sum())
    assert away.numel() < 1000 or abs(2 * up - away.numel()) <= 6 * away.numel() ** 0.5, (
        f"{what}: biased rounding, {up} of {away.numel()} errors lead away from zero"
    )


def quant_rows(tokens: int, width: int) -> Tensor:
    """Rows with groups of many scales; the first rows hold the edges of the format."""
    g = generator(tokens * width)
    exponent = torch.randint(-24, 24, (tokens, width // 32), generator=g).float()
    x = torch.randn(tokens, width, generator=g) * torch.exp2(exponent).repeat_interleave(32, 1)
    edges = torch.zeros(24, width)
    edges[1, 32:] = 1.0  # one zero group
    edges[2] = 1e-45  # rounds to zero in bf16
    edges[3] = 3e38
    edges[4] = -0.0
    edges[5] = -1e-40  # bf16 subnormal
    edges[6] = 1e-4  # amax at the floor
    edges[7] = torch.arange(width) % 32 * 0.0625 + 2.03125  # ties between codes
    for i, exponent in enumerate((-22, -14, -1, 0, 1, 15, 100, 118)):
        at = torch.tensor(448.0 * 2.0**exponent, dtype=torch.bfloat16)
        above = (at.view(torch.int16) + 1).view(torch.bfloat16)
        for row, amax in ((8 + 2 * i, at), (9 + 2 * i, above)):  # amax exactly at, and one step above, 448 * 2^e
            edges[row] = torch.linspace(-1, 1, width) * float(at) * 0.9
            edges[row, ::32] = float(amax)
    count = min(tokens, edges.shape[0])
    x[:count] = edges[:count]
    return x.bfloat16()


QUANT_SHAPES = [(1, 32), (31, 64), (33, 128), (129, 512), (33, 1280), (65, 5120), (31, 6144), (33, 8192), (9, 16384)]


@pytest.mark.parametrize("tokens, width", QUANT_SHAPES)
def test_act_quant_bitwise(cuda: torch.device, tokens: int, width: int) -> None:
    x = quant_rows(tokens, width)
    codes, scale = elementwise.act_quant(x.to(cuda), impl="portable")
    wanted_codes, wanted_scale = reference.act_quant(x)
    assert_bitwise(scale, wanted_scale, "scale")
    assert_bitwise(codes, wanted_codes, "codes")
    assert (scale >= 105).all() and not codes.float().isnan().any()


@pytest.mark.parametrize("tokens, width", QUANT_SHAPES)
def test_act_quant_folded_bitwise(cuda: torch.device, tokens: int, width: int) -> None:
    x = quant_rows(tokens, width)
    codes, row_scale = elementwise.act_quant_folded(x.to(cuda), impl="portable")
    wanted_codes, wanted_scale = reference.act_quant_folded(x)
    assert_bitwise(row_scale, wanted_scale, "row_scale")
    assert_bitwise(codes, wanted_codes, "codes")


@pytest.mark.parametrize("tokens, width", QUANT_SHAPES)
def test_fold_scales_bitwise(cuda: torch.device, tokens: int, width: int) -> None:
    codes, scale = reference.act_quant(quant_rows(tokens, width))
    got_codes, got_scale = elementwise.fold_scales(codes.to(cuda), scale.to(cuda), impl="portable")
    wanted_codes, wanted_scale = reference.fold_scales(codes, scale)
    assert_bitwise(got_scale, wanted_scale, "row_scale")
    assert_bitwise(got_codes, wanted_codes, "codes")


def test_fold_scales_every_code_and_scale(cuda: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(256, 2).view(torch.float8_e4m3fn)
    scale = torch.full((256, 16), 0, dtype=torch.uint8)
    scale[:, 8:] = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None]  # row s: bytes 0 and s
    scale[128:, :8] = scale[128:, 8:] - 5  # close scales too
    got = elementwise.fold_scales(codes.to(cuda), scale.to(cuda), impl="portable")
    for name, out, wanted in zip(("codes", "row_scale"), got, reference.fold_scales(codes, scale)):
        assert_bitwise(out, wanted, name)


def test_zero_group_rows(cuda: torch.device) -> None:
    """A zero row and a zero group: finite scale above zero, codes exactly zero, other rows unchanged."""
    x = normal(generator(24), 4, 64)
    plain = elementwise.act_quant(x.to(cuda))
    x[2] = 0
    x[3, 32:] = 0
    codes, scale = elementwise.act_quant(x.to(cuda))
    values = reference.formats.dequant_fp8_ue8m0(codes.cpu(), scale.cpu())
    assert (scale >= 105).all() and values.isfinite().all()
    assert (values[2] == 0).all() and (values[3, 32:] == 0).all()
    assert_bitwise(codes[:2], plain[0][:2], "rows 0 and 1")
    norm = elementwise.rmsnorm(x.to(cuda), torch.ones(64, device=cuda), EPS)
    assert (norm[2] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_stays_in_its_group(cuda: torch.device, value: float) -> None:
    x = normal(generator(5), 3, 96)
    x[1, 40] = value
    codes, scale = elementwise.act_quant(x.to(cuda))
    wanted = reference.act_quant(x)
    assert_bitwise(codes, wanted[0], "codes")
    assert_bitwise(scale, wanted[1], "scale")
    assert scale[1, 1] == 255 and (scale != 255).sum() == 8
    for got, want in zip(elementwise.act_quant_folded(x.to(cuda)), reference.act_quant_folded(x)):
        assert_bitwise(got, want, "folded")


def test_strided_rows(cuda: torch.device) -> None:
    wide = quant_rows(33, 192).to(cuda)
    x = wide[:, 64:160]
    weight = normal(generator(1), 96).to(cuda)
    for op in (
        elementwise.act_quant,
        elementwise.act_quant_folded,
        lambda t: (elementwise.rmsnorm(t, weight, EPS),),
        lambda t: elementwise.rmsnorm_quant(t, weight, EPS, folded=True),
    ):
        for got, wanted in zip(op(x), op(x.contiguous())):
            assert_bitwise(got, wanted, "strided rows")


# -- norms ----------------------------------------------------------------------------------------------------

NORM_SHAPES = [(1, 32), (33, 64), (129, 128), (31, 512), (33, 1280), (129, 5120), (5, 10240), (3, 16384)]


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens, width", NORM_SHAPES)
def test_rmsnorm(cuda: torch.device, tokens: int, width: int, weight_dtype: torch.dtype) -> None:
    g = generator(width)
    x, weight = normal(g, tokens, width, scale=3.0).to(cuda), normal(g, width, dtype=weight_dtype).to(cuda)
    out = elementwise.rmsnorm(x, weight, EPS, impl="portable")
    value = x.double()
    exact = weight.double() * value * torch.rsqrt(value.square().mean(-1, keepdim=True) + EPS)
    check_sum(out, exact, exact.abs(), "rmsnorm")


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-12, 1e18])
def test_rmsnorm_extremes(cuda: torch.device, scale: float) -> None:
    x = normal(generator(3), 5, 256, scale=scale)
    weight = normal(generator(4), 256)
    out = elementwise.rmsnorm(x.to(cuda), weight.to(cuda), EPS)
    exact = reference.rmsnorm(x, weight, EPS).double()
    check_sum(out.cpu(), exact, exact.abs() * 2.0**-7, "rmsnorm", slack=1.0)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("tokens, width", NORM_SHAPES)
def test_rmsnorm_quant_is_the_composition(cuda: torch.device, tokens: int, width: int, folded: bool) -> None:
    x = quant_rows(tokens, width).to(cuda)
    weight = normal(generator(2), width).to(cuda)
    y, codes, scale = elementwise.rmsnorm_quant(x, weight, EPS, folded=folded, impl="portable")
    wanted_y = elementwise.rmsnorm(x, weight, EPS)
    quant = elementwise.act_quant_folded if folded else elementwise.act_quant
    wanted_codes, wanted_scale = quant(wanted_y)
    assert_bitwise(y, wanted_y, "y")
    assert_bitwise(codes, wanted_codes, "codes")
    assert_bitwise(scale, wanted_scale, "scale")


# -- rope -----------------------------------------------------------------------------------------------------------


def angles(num_positions: int, rope_dim: int) -> Tensor:
    frequency = 160000.0 ** (-torch.arange(rope_dim // 2, dtype=torch.float32) * 2 / max(rope_dim, 1))
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), -1)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    "tokens, heads, dim, rope_dim",
    [(33, 64, 512, 64), (1, 1, 512, 64), (129, 1, 512, 64), (31, 32, 128, 64), (5, 3, 64, 64), (7, 2, 10, 6),
     (3, 1, 4160, 64)],
)  # fmt: skip
def test_rope_bitwise(cuda: torch.device, tokens: int, heads: int, dim: int, rope_dim: int, inverse: bool) -> None:
    g = generator(heads * dim)
    x = normal(g, tokens, heads, dim)
    positions = torch.randint(0, 300, (tokens,), generator=g).int()
    positions[-1] = 299
    table = angles(300, rope_dim)
    wanted = reference.rope(x, positions, table, inverse)
    args = to(cuda, positions, table)
    assert_bitwise(elementwise.rope(x.to(cuda), *args, inverse, impl="portable"), wanted, "rope")
    in_place = x.to(cuda)
    assert elementwise.rope(in_place, *args, inverse, out=in_place) is in_place
    assert_bitwise(in_place, wanted, "rope in place")


def test_rope_strided_and_non_finite(cuda: torch.device) -> None:
    g = generator(8)
    wide = normal(g, 33, 6, 128)
    wide[3, 2, 70] = float("nan")
    wide[4, 2, 70] = float("inf")
    positions = torch.arange(33).int()
    table = angles(64, 64)
    wanted = reference.rope(wide[:, 2:5].contiguous(), positions, table)
    on_gpu = wide.to(cuda)
    args = to(cuda, positions, table)
    assert_bitwise(elementwise.rope(on_gpu[:, 2:5], *args), wanted, "strided in, new out")
    elementwise.rope(on_gpu[:, 2:5], *args, out=on_gpu[:, 2:5])
    assert_bitwise(on_gpu[:, 2:5].contiguous(), wanted, "strided in place")
    assert_bitwise(on_gpu[:, :2].contiguous(), wide[:, :2].contiguous(), "heads before")
    assert_bitwise(on_gpu[:, 5:].contiguous(), wide[:, 5:].contiguous(), "heads behind")


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    "tokens, heads, dim, rope_dim, groups",
    [(33, 64, 512, 64, 8), (1, 64, 512, 64, 1), (129, 4, 64, 64, 2), (31, 6, 96, 16, 3), (5, 6, 160, 0, 2)],
)
def test_rope_quant_is_the_composition(
    cuda: torch.device, tokens: int, heads: int, dim: int, rope_dim: int, groups: int, inverse: bool, folded: bool
) -> None:
    x = quant_rows(tokens, heads * dim).view(tokens, heads, dim).to(cuda)
    if heads * dim // groups > 16384:
        x = x[:, : 16384 // dim].contiguous()
    positions = torch.randint(0, 300, (tokens,), generator=generator(dim)).int()
    args = to(cuda, positions, angles(300, rope_dim))
    before = x.clone()
    codes, scale = elementwise.rope_quant(x, *args, groups, inverse, folded=folded, impl="portable")
    assert_bitwise(x, before, "x")
    rotated = elementwise.rope(x, *args, inverse).view(tokens * groups, -1)
    wanted = (elementwise.act_quant_folded if folded else elementwise.act_quant)(rotated)
    assert_bitwise(codes.view(wanted[0].shape), wanted[0], "codes")
    assert_bitwise(scale.view(wanted[1].shape), wanted[1], "scale")


# -- hyper-connections ------------------------------------------------------------------------------------------------


def mix_inputs(tokens: int, n: int, width: int, seed: int = 0, scale: float = 2.0) -> dict[str, Tensor]:
    g = generator(seed + 7 * tokens + n)
    mixes = 2 * n + n * n
    return {
        "streams": normal(g, tokens, n, width, scale=scale),
        "fn": normal(g, mixes, n * width, dtype=torch.float32, scale=(n * width) ** -0.5),
        "base": normal(g, mixes, dtype=torch.float32),
        "scale": positive(g, 3),
    }


def run_mix(inputs: dict[str, Tensor], device: torch.device, iters: int = 20) -> tuple[Tensor, ...]:
    streams, fn, base, scale = to(device, *(inputs[k] for k in ("streams", "fn", "base", "scale")))
    return elementwise.hc_mix(streams, fn, base, scale, iters, 1e-6, EPS, impl="portable")


def exact_mix(inputs: dict[str, Tensor], iters: int = 20) -> tuple[Tensor, ...]:
    n = inputs["streams"].shape[1]
    flat = inputs["streams"].flatten(1).double()
    mixes = flat @ inputs["fn"].double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    group = torch.tensor([0] * n + [1] * n + [2] * n * n)
    logits = mixes * inputs["scale"].double()[group] + inputs["base"].double()
    comb = reference.sinkhorn(logits[:, 2 * n :].unflatten(-1, (n, n)), iters, 1e-6)
    return torch.sigmoid(logits[:, :n]) + 1e-6, 2 * torch.sigmoid(logits[:, n : 2 * n]), comb


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens, width", [(1, 64), (31, 256), (33, 8), (129, 328), (33, 5120), (600, 1280)])
def test_hc_mix_against_float64(cuda: torch.device, n: int, tokens: int, width: int) -> None:
    inputs = mix_inputs(tokens, n, width)
    for name, out, exact in zip(("pre", "post", "comb"), run_mix(inputs, cuda), exact_mix(inputs)):
        error = (out.double().cpu() - exact).abs()
        assert out.dtype == torch.float32 and float(error.max()) <= 3e-6, f"{name}: max error {float(error.max())}"


@pytest.mark.parametrize("kind", ["normal", "positive", "one large stream"])
def test_hc_mix_projection_has_float32_quality(cuda: torch.device, kind: str) -> None:
    """raw within 2e-6 of float64; positive operands are what a truncating accumulator gets wrong."""
    tokens, n, width = 40, 4, 5120
    inputs = mix_inputs(tokens, n, width)
    if kind == "positive":
        inputs["streams"], inputs["fn"] = inputs["streams"].abs() + 1, inputs["fn"].abs() + 0.01
    elif kind == "one large stream":
        inputs["streams"][:, 2] *= 256
    streams, fn, base, scale = to(cuda, *inputs.values())
    workspace = torch.full((tokens * 32 * 28,), float("nan"), device=cuda)
    outs = [torch.empty(shape, device=cuda) for shape in ((tokens, n), (tokens, n), (tokens, n, n))]
    call("elementwise.hc_mix", "portable", streams, fn, base, scale, 20, 1e-6, EPS, workspace, *outs)
    partial = workspace.view(32, tokens, 28).double()
    flat, weight = streams.flatten(1).double(), fn.double()
    raw = flat @ weight.T
    size = raw.abs() if kind == "positive" else (flat.square() @ weight.square().T).sqrt()
    worst = float(((partial[..., :24].sum(0) - raw).abs() / size).max())
    assert worst <= 2e-6, f"raw: relative error {worst}"
    square = flat.square().sum(-1)
    assert float(((partial[..., 24].sum(0) - square) / square).abs().max()) <= 1e-6
    for out in outs:
        assert out.isfinite().all()


def test_hc_mix_sinkhorn_vector(cuda: torch.device) -> None:
    """Zero streams leave the logits at base: the test vector of model spec 3.4."""
    logits = torch.tensor([[0.5, -1, 0.25, 2], [1, 0, -0.5, 0.75], [-2, 1.5, 0, 0.5], [0, 0.25, 3, -1]])
    wanted = torch.tensor(
        [[0.280841, 0.0441497, 0.0822140, 0.592795], [0.584844, 0.151581, 0.0490524, 0.214521],
         [0.0304466, 0.710306, 0.0845602, 0.174686], [0.103867, 0.0939614, 0.784172, 0.0179972]]
    )  # fmt: skip
    inputs = mix_inputs(3, 4, 64)
    inputs["streams"].zero_()
    inputs["base"] = torch.cat((torch.zeros(8), logits.flatten()))
    pre, post, comb = run_mix(inputs, cuda)
    torch.testing.assert_close(comb[1].cpu(), wanted, rtol=1e-6, atol=6e-7)  # given with six digits
    torch.testing.assert_close(pre, torch.full_like(pre, 0.5 + 1e-6), rtol=1e-6, atol=0)
    torch.testing.assert_close(post, torch.ones_like(post), rtol=1e-6, atol=0)


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_hc_mix_iterations(cuda: torch.device, iters: int) -> None:
    inputs = mix_inputs(9, 4, 64, seed=3)
    comb = run_mix(inputs, cuda, iters)[2]
    torch.testing.assert_close(comb.double().cpu(), exact_mix(inputs, iters)[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(comb.sum(1).cpu(), torch.ones(9, 4), rtol=1e-5, atol=1e-5)  # ends on the columns


def test_hc_mix_does_not_depend_on_the_batch(cuda: torch.device) -> None:
    """Sizes whose blocks hold one tile, some, and several a warp; a row alone, in a batch, and run twice."""
    inputs = mix_inputs(4099, 4, 5120)
    whole = run_mix(inputs, cuda)
    for name, first, second in zip(("pre", "post", "comb"), whole, run_mix(inputs, cuda)):
        assert_bitwise(first, second, f"{name}: second run")
    for start, stop in ((0, 1), (31, 33), (4098, 4099), (700, 3005), (1, 130)):
        part = run_mix({**inputs, "streams": inputs["streams"][start:stop].contiguous()}, cuda)
        for name, out, wanted in zip(("pre", "post", "comb"), part, whole):
            assert_bitwise(out, wanted[start:stop], f"{name} of tokens {start}..{stop}")


def test_hc_mix_nan_stays_in_its_token(cuda: torch.device) -> None:
    inputs = mix_inputs(70, 4, 328)
    clean = run_mix(inputs, cuda)
    inputs["streams"][37, 2, 300] = float("nan")
    for name, out, wanted in zip(("pre", "post", "comb"), run_mix(inputs, cuda), clean):
        assert out[37].isnan().all(), name
        keep = [t for t in range(70) if t != 37]
        assert_bitwise(out[keep], wanted[keep], name)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens, width", [(1, 32), (31, 256), (33, 5120), (129, 1280), (3, 10240)])
def test_hc_collapse(cuda: torch.device, n: int, tokens: int, width: int) -> None:
    g = generator(n + tokens)
    streams, pre = to(cuda, normal(g, tokens, n, width), positive(g, tokens, n))
    out = elementwise.hc_collapse(streams, pre, impl="portable")
    terms = pre.double()[..., None] * streams.double()
    check_sum(out, terms.sum(1), terms.abs().sum(1), "hc_collapse")
    weight = normal(g, width).to(cuda)
    wanted = elementwise.rmsnorm(out, weight, EPS)
    assert_bitwise(elementwise.hc_collapse_norm(streams, pre, weight, EPS, impl="portable"), wanted, "collapse_norm")
    for folded in (False, True):
        got = elementwise.hc_collapse_norm_quant(streams, pre, weight, EPS, folded=folded, impl="portable")
        for name, a, b in zip(("x", "codes", "scale"), got, elementwise.rmsnorm_quant(out, weight, EPS, folded=folded)):
            assert_bitwise(a, b, f"collapse_norm_quant {name}")


def test_hc_collapse_first_layer_is_stream_zero(cuda: torch.device) -> None:
    streams = normal(generator(1), 5, 4, 64).to(cuda)
    pre = torch.tensor([1.0, 0, 0, 0], device=cuda).repeat(5, 1)
    assert_bitwise(elementwise.hc_collapse(streams, pre), streams[:, 0].contiguous(), "pre = [1, 0, 0, 0]")


def test_hc_expand_orientation(cuda: torch.device) -> None:
    """comb's first index is the input stream: [[1.3, 13], [1.8, 18]], not [[1.1, 11], [1.9, 19]]."""
    comb = torch.tensor([[[0.7, 0.2], [0.3, 0.8]]], device=cuda)
    streams = torch.tensor([[[1.0, 10.0] * 16, [2.0, 20.0] * 16]], device=cuda).bfloat16()
    y = torch.zeros(1, 32, device=cuda).bfloat16()
    out = elementwise.hc_expand(y, streams, torch.zeros(1, 2, device=cuda), comb)
    wanted = torch.tensor([[[1.3, 13.0] * 16, [1.8, 18.0] * 16]]).bfloat16()
    assert_bitwise(out, wanted, "expand")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens, width", [(1, 8), (31, 256), (33, 5120), (129, 328)])
def test_hc_expand(cuda: torch.device, n: int, tokens: int, width: int) -> None:
    g = generator(n + width)
    y, streams = to(cuda, normal(g, tokens, width), normal(g, tokens, n, width))
    post, comb = to(cuda, positive(g, tokens, n), torch.rand(tokens, n, n, generator=g))
    out = elementwise.hc_expand(y, streams, post, comb, impl="portable")
    terms = torch.cat(
        (
            (post.double()[:, :, None] * y.double()[:, None]).unsqueeze(1),
            comb.double()[..., None] * streams.double()[:, :, None],
        ),
        1,
    )
    check_sum(out, terms.sum(1), terms.abs().sum(1), "hc_expand")
    in_place = streams.clone()
    assert elementwise.hc_expand(y, in_place, post, comb, out=in_place) is in_place
    assert_bitwise(in_place, out, "hc_expand in place")
    wide = torch.zeros(tokens, width + 8, dtype=torch.bfloat16, device=cuda)
    wide[:, :width] = y
    assert_bitwise(elementwise.hc_expand(wide[:, :width], streams, post, comb), out, "hc_expand, strided y")


def test_hc_exact_on_integers(cuda: torch.device) -> None:
    """Small integers: every order of summation gives the same bits as the reference."""
    g = generator(12)
    streams, y = integers(g, 65, 4, 512), integers(g, 65, 512)
    post, comb = integers(g, 65, 4, dtype=torch.float32), integers(g, 65, 4, 4, dtype=torch.float32)
    out = elementwise.hc_expand(*to(cuda, y, streams, post, comb))
    assert_bitwise(out, reference.hc_expand(y, streams, post, comb), "expand")
    assert_bitwise(elementwise.hc_collapse(*to(cuda, streams, post)), reference.hc_collapse(streams, post), "collapse")


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """hc_collapse, for widths that its kernel does not take (not a multiple of 32) padded with zeros."""
    padded = torch.nn.functional.pad(streams, (0, -streams.shape[2] % 32)).contiguous()
    return elementwise.hc_collapse(padded, pre)[:, : streams.shape[2]].contiguous()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens, width", [(1, 64), (31, 256), (33, 8), (17, 328), (129, 5120), (1000, 5120), (2309, 1280)])
def test_hc_expand_mix_is_the_composition(cuda: torch.device, n: int, tokens: int, width: int) -> None:
    g = generator(n * width)
    inputs = mix_inputs(tokens, n, width)
    streams, fn, base, scale = to(cuda, *(inputs[k] for k in ("streams", "fn", "base", "scale")))
    y, last_pre, last_post = to(cuda, normal(g, tokens, width), positive(g, tokens, n), positive(g, tokens, n))
    last_comb = torch.rand(tokens, n, n, generator=g).to(cuda)
    site = (fn, base, scale, 20, 1e-6, EPS)
    expanded = elementwise.hc_expand(y, streams, last_post, last_comb)
    wanted = (expanded, collapse(expanded, last_pre), *elementwise.hc_mix(expanded, *site))
    names = ("streams", "x", "pre", "post", "comb")
    got = elementwise.hc_expand_mix(y, streams, last_pre, last_post, last_comb, *site, impl="portable")
    for name, out, want in zip(names, got, wanted):
        assert_bitwise(out, want, f"hc_expand_mix {name}")
    in_place = streams.clone()
    got = elementwise.hc_expand_mix(y, in_place, last_pre, last_post, last_comb, *site, out=in_place)
    assert got[0] is in_place
    for name, out, want in zip(names, got, wanted):
        assert_bitwise(out, want, f"hc_expand_mix in place {name}")
    if width % 32:
        return
    weight = normal(g, width).to(cuda)
    names = ("streams", "x", "codes", "scale", "pre", "post", "comb")
    for folded, impl in itertools.product((False, True), implementations("hc_expand_mix_norm_quant")):
        full = (wanted[0], *elementwise.rmsnorm_quant(wanted[1], weight, EPS, folded=folded), *wanted[2:])
        for keep_x, given in ((True, streams.clone()), (False, streams)):  # in place, and beside the streams
            got = elementwise.hc_expand_mix_norm_quant(
                y, given, last_pre, last_post, last_comb, *site, weight, folded=folded, keep_x=keep_x, impl=impl,
                out=given if keep_x else None,
            )  # fmt: skip
            assert (got[0] is given) == keep_x and (got[1] is None) != keep_x
            for name, out, want in zip(names, got, full, strict=True):
                if out is not None:
                    assert_bitwise(out, want, f"hc_expand_mix_norm_quant {impl}, folded={folded}, keep_x={keep_x}: {name}")


# -- engram gate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens, width", [(1, 8), (31, 256), (33, 5120), (129, 328), (3, 10240)])
def test_engram_gate(cuda: torch.device, n: int, tokens: int, width: int) -> None:
    g = generator(n + width)
    streams, z = to(cuda, normal(g, tokens, n, width, scale=2.0), normal(g, tokens, (n + 1) * width))
    q_weight, k_weight = to(cuda, normal(g, n, width), normal(g, n, width))
    streams[0, 0] = 0
    z[:, :width] *= 1e-3 if tokens > 1 else 1
    out = elementwise.engram_gate(streams, z, q_weight, k_weight, EPS, impl="portable")
    value = streams.double()
    key, addend = z.double().unflatten(-1, (n + 1, width)).split((n, 1), 1)
    rstd = torch.rsqrt(value.square().mean(-1) + EPS) * torch.rsqrt(key.square().mean(-1) + EPS)
    products = value * (q_weight.double() * k_weight.double()) * key
    dot = products.sum(-1) * rstd * width**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    # the square root turns a small error of a small dot into a large one: allow for the rounding of the dot
    dot_error = 1e-5 * products.abs().sum(-1) * rstd * width**-0.5
    gate_error = 0.25 * torch.minimum(dot_error.sqrt(), dot_error / dot.abs().clamp(min=1e-6).sqrt()) + 1e-6
    exact = value + gate[..., None] * addend
    error = (out.double() - exact).abs()
    bound = HALF_STEP * 1.01 * exact.abs() + gate_error[..., None] * addend.abs() + 1e-6 * (value.abs() + addend.abs())
    clear = (dot.abs() > 2 * dot_error) | (dot == 0)  # elsewhere the sign of dot is open
    assert clear.float().mean() > 0.9 or tokens == 1
    assert (error <= bound)[clear].all(), f"worst error over bound {float((error / bound)[clear].max())}"
    in_place = streams.clone()
    assert elementwise.engram_gate(in_place, z, q_weight, k_weight, EPS, out=in_place) is in_place
    assert_bitwise(in_place, out, "engram_gate in place")


def test_engram_gate_of_zero_dot(cuda: torch.device) -> None:
    """|dot| = 0 keeps the gate at sigmoid(1e-3), not 0 or NaN."""
    streams = torch.zeros(2, 4, 64, dtype=torch.bfloat16, device=cuda)
    z = torch.zeros(2, 320, dtype=torch.bfloat16, device=cuda)
    z[:, 256:] = 4.0
    weight = torch.ones(4, 64, dtype=torch.bfloat16, device=cuda)
    out = elementwise.engram_gate(streams, z, weight, weight, EPS)
    assert_bitwise(out, torch.full_like(out, float(torch.sigmoid(torch.tensor(1e-3)) * 4)), "gate")


# -- every op: empty, alone, twice, guarded ---------------------------------------------------------------------------


def every_op(tokens: int, width: int = 320, n: int = 4) -> tuple[tuple[Tensor, ...], dict[str, Callable]]:
    """Per-token operands, and per op a call on them that returns per-token outputs."""
    g = generator(99)
    rows = normal(g, 129, width)
    heads = normal(g, 129, 6, 128)
    streams = normal(g, 129, n, width)
    z = normal(g, 129, (n + 1) * width)
    pre, comb = positive(g, 129, n), positive(g, 129, n, n)
    positions = torch.randint(0, 64, (129,), generator=g).int()
    weight, gate_weight = normal(g, width), normal(g, n, width)
    fn, base, scale = mix_inputs(1, n, width)["fn"], normal(g, 24, dtype=torch.float32), positive(g, 3)
    codes, group_scale = reference.act_quant(rows)

    def calls(device: torch.device) -> dict[str, Callable]:
        w, gw, f, b, s, table = to(device, weight, gate_weight, fn, base, scale, angles(64, 64))
        e = elementwise
        return {
            "rmsnorm": lambda r, h, st, z, p, c, pos, q, qs: (e.rmsnorm(r, w, EPS),),
            "act_quant": lambda r, h, st, z, p, c, pos, q, qs: e.act_quant(r),
            "act_quant_folded": lambda r, h, st, z, p, c, pos, q, qs: e.act_quant_folded(r),
            "rmsnorm_quant": lambda r, h, st, z, p, c, pos, q, qs: e.rmsnorm_quant(r, w, EPS, folded=True),
            "fold_scales": lambda r, h, st, z, p, c, pos, q, qs: e.fold_scales(q, qs),
            "rope": lambda r, h, st, z, p, c, pos, q, qs: (e.rope(h, pos, table),),
            "rope_quant": lambda r, h, st, z, p, c, pos, q, qs: e.rope_quant(h, pos, table, 3, folded=True),
            "hc_mix": lambda r, h, st, z, p, c, pos, q, qs: e.hc_mix(st, f, b, s, 20, 1e-6, EPS),
            "hc_collapse": lambda r, h, st, z, p, c, pos, q, qs: (e.hc_collapse(st, p),),
            "hc_collapse_norm": lambda r, h, st, z, p, c, pos, q, qs: (e.hc_collapse_norm(st, p, w, EPS),),
            "hc_collapse_norm_quant": lambda r, h, st, z, p, c, pos, q, qs: e.hc_collapse_norm_quant(
                st, p, w, EPS, folded=False
            ),
            "hc_expand": lambda r, h, st, z, p, c, pos, q, qs: (e.hc_expand(r, st, p, c),),
            "hc_expand_mix": lambda r, h, st, z, p, c, pos, q, qs: e.hc_expand_mix(
                r, st, p, p, c, f, b, s, 20, 1e-6, EPS
            ),
            "hc_expand_mix_norm_quant": lambda r, h, st, z, p, c, pos, q, qs: e.hc_expand_mix_norm_quant(
                r, st, p, p, c, f, b, s, 20, 1e-6, EPS, w, folded=True
            ),
            "engram_gate": lambda r, h, st, z, p, c, pos, q, qs: (e.engram_gate(st, z, gw, gw, EPS),),
        }

    operands = (rows, heads, streams, z, pre, comb, positions, codes, group_scale)
    return tuple(t[:tokens] for t in operands), calls


OPS = ("rmsnorm", "act_quant", "act_quant_folded", "rmsnorm_quant", "fold_scales", "rope", "rope_quant", "hc_mix",
       "hc_collapse", "hc_collapse_norm", "hc_collapse_norm_quant", "hc_expand", "hc_expand_mix",
       "hc_expand_mix_norm_quant", "engram_gate")  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_twice_alone_and_empty(cuda: torch.device, op: str) -> None:
    operands, calls = every_op(129)
    operands = to(cuda, *operands)
    run = calls(cuda)[op]
    whole = run(*operands)
    for first, second in zip(whole, run(*operands)):
        assert_bitwise(first, second, f"{op}: second run")
    for t in (0, 30, 32, 128):
        for out, wanted in zip(run(*(x[t : t + 1].clone() for x in operands)), whole):
            assert_bitwise(out, wanted[t : t + 1], f"{op}: token {t} alone")
    for tokens in TOKENS[1:3]:
        for out, wanted in zip(run(*(x[:tokens] for x in operands)), whole):
            assert_bitwise(out, wanted[:tokens], f"{op}: {tokens} tokens")
    for out, wanted in zip(run(*(x[:0] for x in operands)), whole):
        assert out.shape == (0, *wanted.shape[1:]) and out.dtype == wanted.dtype


@pytest.mark.parametrize("tokens, width", [(1, 32), (33, 96), (5, 1312)])
def test_nothing_is_written_outside(cuda: torch.device, tokens: int, width: int) -> None:
    g = generator(6)
    n = 4
    x, streams, z = to(cuda, normal(g, tokens, width), normal(g, tokens, n, width), normal(g, tokens, 5 * width))
    weight, gate_weight = to(cuda, normal(g, width), normal(g, n, width))
    pre, comb = to(cuda, positive(g, tokens, n), positive(g, tokens, n, n))
    inputs = mix_inputs(tokens, n, width)
    fn, base, scale = to(cuda, inputs["fn"], inputs["base"], inputs["scale"])
    positions, table = to(cuda, torch.zeros(tokens, dtype=torch.int32), angles(4, 32))
    f8, u8, bf, f32 = torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float32
    row, groups, full = (tokens, width), (tokens, width // 32), (tokens, n, width)
    codes, group_scale = elementwise.act_quant(x)
    floats = tokens * -(-width // 160) * 28
    runs = [
        ("rmsnorm", (x, weight, EPS), [(row, bf)]),
        ("act_quant", (x,), [(row, f8), (groups, u8)]),
        ("act_quant_folded", (x,), [(row, f8), ((tokens,), f32)]),
        ("rmsnorm_quant", (x, weight, EPS), [(row, bf), (row, f8), (groups, u8)]),
        ("fold_scales", (codes, group_scale), [(row, f8), ((tokens,), f32)]),
        ("rope", (x[:, None], positions, table, False), [((tokens, 1, width), bf)]),
        ("rope_quant", (x[:, None], positions, table, True), [((tokens, 1, width), f8), ((tokens, 1), f32)]),
        ("hc_mix", (streams, fn, base, scale, 20, 1e-6, EPS),
         [((floats,), f32), ((tokens, n), f32), ((tokens, n), f32), ((tokens, n, n), f32)]),
        ("hc_collapse", (streams, pre), [(row, bf)]),
        ("hc_collapse_norm_quant", (streams, pre, weight, EPS), [(row, bf), (row, f8), ((tokens,), f32)]),
        ("hc_expand", (x, streams, pre, comb), [(full, bf)]),
        ("hc_expand_mix", (x, streams, pre, pre, comb, fn, base, scale, 20, 1e-6, EPS),
         [((floats,), f32), (full, bf), (row, bf), ((tokens, n), f32), ((tokens, n), f32), ((tokens, n, n), f32)]),
        ("hc_expand_mix_norm_quant", (x, streams, pre, pre, comb, fn, base, scale, 20, 1e-6, EPS, weight, True),
         [((floats,), f32), (full, bf), (row, bf), (row, f8), (groups, u8), ((tokens, n), f32), ((tokens, n), f32),
          ((tokens, n, n), f32)]),
        ("engram_gate", (streams, z, gate_weight, gate_weight, EPS), [(full, bf)]),
    ]  # fmt: skip
    for (op, args, outputs), impl in ((run, impl) for run in runs for impl in implementations(run[0])):
        canaries = [Canary(shape, dtype, cuda) for shape, dtype in outputs]
        call(f"elementwise.{op}", impl, *args, *(c.tensor for c in canaries))
        for canary in canaries:
            canary.check()
        if "mix" not in op:  # every output byte is written: a second run over other bytes agrees
            first = [c.tensor.clone() for c in canaries]
            for canary in canaries:
                canary.tensor.view(torch.uint8).fill_(0x5A)
            call(f"elementwise.{op}", impl, *args, *(c.tensor for c in canaries))
            for canary, wanted in zip(canaries, first):
                assert_bitwise(canary.tensor, wanted, f"{op}: every byte written")


# -- past 2^31 elements -----------------------------------------------------------------------------------------------


@pytest.mark.big
def test_hyper_connections_past_int32(cuda: torch.device) -> None:
    """131072 x 4 x 5120: elements pass 2^31 at token 104,858. Planted tokens equal a small batch of the same tokens."""
    tokens, n, width = 131_072, 4, 5120
    at = torch.tensor([0, 65_536, 104_857, 104_858, 131_071], device=cuda)
    g = generator(18)
    small_y, small = to(cuda, normal(g, 5, width), normal(g, 5, n, width))
    weight, gate_weight, z_small = to(cuda, normal(g, width), normal(g, n, width), normal(g, 5, 5 * width))
    pre, comb = to(cuda, positive(g, 5, n), positive(g, 5, n, n))
    inputs = mix_inputs(1, n, width)
    fn, base, scale = to(cuda, inputs["fn"], inputs["base"], inputs["scale"])
    streams = torch.zeros(tokens, n, width, dtype=torch.bfloat16, device=cuda)
    streams[at] = small

    def plant(value: Tensor) -> Tensor:
        whole = torch.zeros(tokens, *value.shape[1:], dtype=value.dtype, device=cuda)
        whole[at] = value
        return whole

    mixed = elementwise.hc_mix(streams, fn, base, scale, 20, 1e-6, EPS)
    for out, wanted in zip(mixed, elementwise.hc_mix(small, fn, base, scale, 20, 1e-6, EPS)):
        assert_bitwise(out[at], wanted, "hc_mix")
    collapsed = elementwise.hc_collapse_norm_quant(streams, plant(pre), weight, EPS, folded=False)
    for out, wanted in zip(collapsed, elementwise.hc_collapse_norm_quant(small, pre, weight, EPS, folded=False)):
        assert_bitwise(out[at], wanted, "hc_collapse_norm_quant")
    gated = elementwise.engram_gate(small, z_small, gate_weight, gate_weight, EPS)
    elementwise.engram_gate(streams, plant(z_small), gate_weight, gate_weight, EPS, out=streams)
    assert_bitwise(streams[at], gated, "engram_gate")
    elementwise.hc_expand(plant(small_y), streams, plant(pre), plant(comb), out=streams)
    expanded = elementwise.hc_expand(small_y, gated, pre, comb)
    assert_bitwise(streams[at], expanded, "hc_expand")
    site = (fn, base, scale, 20, 1e-6, EPS)
    passed = elementwise.hc_expand_mix(plant(small_y), streams, plant(pre), plant(pre), plant(comb), *site, out=streams)
    for out, wanted in zip(passed, elementwise.hc_expand_mix(small_y, expanded, pre, pre, comb, *site)):
        assert_bitwise(out[at], wanted, "hc_expand_mix")
    small_pass = elementwise.hc_expand_mix_norm_quant(small_y, passed[0][at], pre, pre, comb, *site, weight, folded=True)
    planted = (plant(small_y), streams, plant(pre), plant(pre), plant(comb))
    for impl in implementations("hc_expand_mix_norm_quant"):
        passed = elementwise.hc_expand_mix_norm_quant(*planted, *site, weight, folded=True, impl=impl)
        for out, wanted in zip(passed, small_pass):
            assert_bitwise(out[at], wanted, f"hc_expand_mix_norm_quant {impl}")
    assert int(streams.view(torch.int16).ne(0).any(-1).any(-1).sum()) == 5, "a token that was zero changed"


@pytest.mark.big
def test_rows_past_int32(cuda: torch.device) -> None:
    tokens, width = 430_000, 5120  # 2.2e9 elements, past 2^31 from token 419,431 on
    at = torch.tensor([0, 419_430, 419_431, 429_999], device=cuda)
    g = generator(19)
    small, weight = to(cuda, normal(g, 4, width), normal(g, width))
    x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=cuda)
    x[at] = small
    for folded in (False, True):
        got = elementwise.rmsnorm_quant(x, weight, EPS, folded=folded)
        for out, wanted in zip(got, elementwise.rmsnorm_quant(small, weight, EPS, folded=folded)):
            assert_bitwise(out[at], wanted, "rmsnorm_quant")
        if not folded:
            for out, wanted in zip(
                elementwise.fold_scales(*got[1:]), elementwise.rmsnorm_quant(small, weight, EPS, folded=True)[1:]
            ):
                assert_bitwise(out[at], wanted, "fold_scales")


@pytest.mark.big
def test_rope_past_int32(cuda: torch.device) -> None:
    """rope, and rope_quant with its codes: 2.15e9 elements, token 65,536 starts at 2^31."""
    tokens = 65_600  # x 64 x 512
    at = torch.tensor([0, 65_535, 65_536, 65_599], device=cuda)
    g = generator(20)
    small = normal(g, 4, 64, 512).to(cuda)
    positions, table = to(cuda, torch.tensor([3, 1, 63, 20], dtype=torch.int32), angles(64, 64))
    x = torch.zeros(tokens, 64, 512, dtype=torch.bfloat16, device=cuda)
    x[at] = small
    where = torch.zeros(tokens, dtype=torch.int32, device=cuda)
    where[at] = positions
    for folded in (False, True):
        got = elementwise.rope_quant(x, where, table, 8, inverse=True, folded=folded)
        for out, wanted in zip(got, elementwise.rope_quant(small, positions, table, 8, inverse=True, folded=folded)):
            assert_bitwise(out[at], wanted, f"rope_quant, folded={folded}")
        values, few = (codes.view(torch.uint8) & 0x7F for codes in (got[0], got[0][at]))  # a rotated zero may be -0
        assert int(values.count_nonzero()) == int(few.count_nonzero())
    elementwise.rope(x, where, table, out=x)
    assert_bitwise(x[at], elementwise.rope(small, positions, table), "rope")
