"""Attention kernels against the plain PyTorch reference, from the same packed operands."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from mini_deepinfer.ops import attention, elementwise
from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS
from mini_deepinfer.ops.reference import attention as reference
from mini_deepinfer.ops.reference import number_formats as formats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DIM = 512
SCALE = DIM**-0.5
GARBAGE = 2147480000
GATE_MAX_ERROR = 4.9e-4  # max error against float32 at T=256, H=64, K=640 with |o| < 0.125: one bf16 ulp there


@pytest.fixture(params=IMPLEMENTATIONS["attention.sparse"])
def impl(request: pytest.FixtureRequest) -> str:
    if request.param == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"needs compute capability 9.0, found {torch.cuda.get_device_capability()}")
    return request.param


@dataclass
class Inputs:
    """Operands of one sparse call, in the order of the op."""

    q: torch.Tensor
    window: torch.Tensor
    window_idx: torch.Tensor
    compressed: torch.Tensor | None
    compressed_idx: torch.Tensor | None
    compressed_len: torch.Tensor | None
    sink: torch.Tensor
    scale: float = SCALE

    def run(self, impl: str, **changes) -> torch.Tensor:
        kwargs = {"out": changes.pop("out", None)}
        operands = {**self.__dict__, **changes}
        return attention.sparse(*operands.values(), impl=impl, **kwargs)

    def float32(self) -> torch.Tensor:
        """The reference in float32: probabilities are not rounded."""
        return self.run("reference", q=self.q.float())


def random_pool(rows: int, pack, gen: torch.Generator, amplitude: float = 1.0) -> torch.Tensor:
    return pack((torch.randn(rows, DIM, generator=gen) * amplitude).bfloat16()).cuda()


def random_lanes(tokens: int, lanes: int, rows: int, gen: torch.Generator, holes: float) -> torch.Tensor:
    idx = torch.randint(rows, (tokens, lanes), generator=gen, dtype=torch.int32)
    return torch.where(torch.rand(tokens, lanes, generator=gen) < holes, -1, idx).cuda()


def make(
    tokens: int, heads: int = 64, window: int = 128, picks: int = 512, *, seed: int = 0, holes: float = 0.1,
    amplitude: float = 1.0, lengths: str = "random", window_rows: int = 700, compressed_rows: int = 3000,
) -> Inputs:  # fmt: skip
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, DIM, generator=gen).bfloat16().cuda()
    pool = random_pool(window_rows, reference.pack_window, gen, amplitude)
    window_idx = random_lanes(tokens, window, window_rows, gen, holes)
    sink = torch.randn(heads, generator=gen).cuda()
    if picks == 0:
        return Inputs(q, pool, window_idx, None, None, None, sink)
    compressed = random_pool(compressed_rows, reference.pack_compressed, gen, amplitude)
    idx = random_lanes(tokens, picks, compressed_rows, gen, holes)
    length = None
    if lengths == "random":
        length = torch.randint(picks + 1, (tokens,), generator=gen, dtype=torch.int32).cuda()
    elif lengths == "full":
        length = torch.full((tokens,), picks, dtype=torch.int32, device="cuda")
    return Inputs(q, pool, window_idx, compressed, idx, length, sink)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, ulps: float = 2.0) -> None:
    """|got - wanted| <= `ulps` bf16 steps at the larger of |wanted| and half its head's largest |wanted|."""
    assert got.shape == wanted.shape and got.dtype == torch.bfloat16
    assert bool(got.isfinite().all()), f"{int((~got.isfinite()).sum())} values are not finite"
    got, wanted = got.double(), wanted.double()
    level = torch.maximum(wanted.abs(), wanted.abs().amax(-1, keepdim=True) / 2).clamp(min=1e-30)
    step = torch.exp2(torch.floor(torch.log2(level)) - 7)
    error = (got - wanted).abs() / step
    worst = int(error.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape)]
    assert float(error.max()) <= ulps, (
        f"{float(error.max()):.2f} bf16 steps at {place}: got {float(got.flatten()[worst]):.6g}, "
        f"wanted {float(wanted.flatten()[worst]):.6g}; {int((error > ulps).sum())} of {error.numel()} values are off"
    )


# -- sparse ----------------------------------------------------------------------------------------------------------

# On a GPU of 132 multiprocessors sm90 gives up to twelve blocks of 64 heads to one kernel and more to another: a case that is
# about one token runs at both counts.
few_and_many = pytest.mark.parametrize("tokens", [5, 29])


def test_sparse_gate(impl: str) -> None:
    case = make(256, amplitude=0.3, holes=0.0, lengths="full")
    wanted = case.float32()
    assert float(wanted.abs().max()) < 0.125
    error = float((case.run(impl).float() - wanted).abs().max())
    assert error <= GATE_MAX_ERROR, f"max error {error:.3e} against float32, bound {GATE_MAX_ERROR:.1e}"


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 66, 127, 128, 129])
def test_sparse_token_counts(impl: str, tokens: int) -> None:
    case = make(tokens, seed=tokens)
    assert_close(case.run(impl), case.run("reference"))


@few_and_many
@pytest.mark.parametrize("heads", [4, 16, 20, 60, 64, 68, 128])
def test_sparse_head_counts(impl: str, heads: int, tokens: int) -> None:
    case = make(tokens, heads, 128, 192, seed=heads)
    assert_close(case.run(impl), case.run("reference"))


@few_and_many
@pytest.mark.parametrize(
    ("window", "picks"),
    [(128, 0), (1, 0), (0, 64), (8, 13), (64, 1), (63, 1), (63, 66), (65, 127), (128, 128), (70, 640), (0, 0), (128, 1000)],
)
def test_sparse_lane_counts(impl: str, window: int, picks: int, tokens: int) -> None:
    case = make(tokens, 64, window, picks, seed=window + picks)
    assert_close(case.run(impl), case.run("reference"))


@pytest.mark.parametrize("amplitude", [1e-3, 0.1, 1.0, 4.0, 16.0])
def test_sparse_amplitudes(impl: str, amplitude: float) -> None:
    """From nearly uniform weights to one key that takes all."""
    case = make(17, seed=3, amplitude=amplitude)
    assert_close(case.run(impl), case.run("reference"))


def test_sparse_without_lengths(impl: str) -> None:
    case = make(9, seed=4, lengths="none")
    full = torch.full((9,), 512, dtype=torch.int32, device="cuda")
    assert torch.equal(case.run(impl), case.run(impl, compressed_len=full))
    longer = torch.full((9,), 100_000, dtype=torch.int32, device="cuda")
    assert torch.equal(case.run(impl), case.run(impl, compressed_len=longer))


def test_sparse_unused_lanes_and_poisoned_memory(impl: str) -> None:
    """Case C08: unreferenced rows are NaN, lanes past the length hold anything: bit-equal to a clean run."""
    for tokens in (1, 63, 64, 65, 66, 127, 128, 129):
        clean = make(tokens, picks=136, seed=tokens, window_rows=400, compressed_rows=500)
        assert clean.compressed is not None and clean.compressed_idx is not None and clean.compressed_len is not None
        lane = torch.arange(136, device="cuda")
        dead = lane >= clean.compressed_len[:, None]
        base = clean.run(impl, compressed_idx=torch.where(dead, -1, clean.compressed_idx))
        assert bool(base.isfinite().all())
        poisoned = []
        for pool, idx in ((clean.window, clean.window_idx), (clean.compressed, torch.where(dead, -1, clean.compressed_idx))):
            used = torch.zeros(pool.shape[0] + 1, dtype=torch.bool, device="cuda")
            used[idx.long()] = True  # -1 lands on the extra row
            poisoned.append(torch.where(used[:-1, None], pool, 0xFF).to(torch.uint8))
        for filling in (-1, 0, GARBAGE):
            idx = torch.where(dead, filling, clean.compressed_idx)
            out = torch.full_like(clean.q, math.nan)
            got = clean.run(impl, window=poisoned[0], compressed=poisoned[1], compressed_idx=idx, out=out)
            assert got is out
            assert torch.equal(got, base), f"T={tokens}, unused lanes {filling}"


def test_sparse_three_of_eight(impl: str) -> None:
    case = make(3, picks=8, holes=0.0, seed=8)
    assert case.compressed_idx is not None
    case.compressed_len = torch.full((3,), 3, dtype=torch.int32, device="cuda")
    outs = []
    for filling in (-1, 0, GARBAGE):
        case.compressed_idx[:, 3:] = filling
        outs.append(case.run(impl))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert_close(outs[0], case.run("reference"))


@few_and_many
def test_sparse_no_valid_lane_is_zero(impl: str, tokens: int) -> None:
    case = make(tokens, picks=128, seed=9)
    assert case.compressed_idx is not None and case.compressed_len is not None
    case.window_idx[::2] = -1
    case.compressed_len[0], case.compressed_len[2] = 0, 128
    case.compressed_idx[2] = -1
    case.compressed_len[4], case.compressed_idx[4] = -5, 7  # a negative length is no lane
    case.compressed_len[6::2] = 0
    case.sink[:4] = torch.tensor([math.inf, -math.inf, 1e30, -1e30])
    got = case.run(impl, out=torch.full_like(case.q, math.nan))
    assert torch.equal(got[::2], torch.zeros_like(got[::2]))
    assert bool(got[1::2].isfinite().all())


@few_and_many
def test_sparse_holes_anywhere(impl: str, tokens: int) -> None:
    """Moving the valid lanes apart with -1 between them changes nothing but the blocks they fall into."""
    case = make(tokens, picks=64, window=64, holes=0.5, seed=10)
    assert_close(case.run(impl), case.run("reference"))
    case.window_idx[:, :63] = -1  # a whole block with one valid lane, at its end
    assert_close(case.run(impl), case.run("reference"))
    case.window_idx[:] = -1  # an empty block before the valid ones
    assert_close(case.run(impl), case.run("reference"))


def test_sparse_duplicates(impl: str) -> None:
    """n copies of one key weigh n times: with a sink far below, the output is that key."""
    case = make(3, picks=64, seed=11, holes=0.0, lengths="full")
    assert case.compressed_idx is not None and case.compressed is not None
    case.compressed_idx[:] = 17
    assert_close(case.run(impl), case.run("reference"))
    case.window_idx[:] = -1
    case.sink[:] = -200.0
    value = reference.unpack_compressed(case.compressed[17]).bfloat16()
    assert torch.equal(case.run(impl), value.expand(3, 64, DIM))


def test_sparse_ties(impl: str) -> None:
    """Equal scores: a zero query averages all keys and the sink evenly."""
    case = make(3, picks=64, window=64, seed=12, holes=0.0, lengths="full")
    case.q.zero_()
    case.sink.zero_()
    assert case.compressed is not None and case.compressed_idx is not None
    window_keys = reference.unpack_window(case.window[case.window_idx.long()])
    keys = torch.cat((window_keys, reference.unpack_compressed(case.compressed[case.compressed_idx.long()])), 1)
    wanted = (keys.sum(1, keepdim=True) / 129).expand(3, 64, DIM)
    assert_close(case.run(impl), wanted)


def rounding_fixture(sink: float, tokens: int) -> tuple[Inputs, float, float, float]:
    """Two kinds of keys whose probabilities straddle a bf16 rounding boundary, and one key at the maximum.

    softmax_scale 1, q = (1, 1 at dim 32, 0...). p_A = 0.50173 rounds down to 0.5, p_B = 0.50216 rounds up to 0.50390625;
    values +1 and -1 in dim 64, so the exact products nearly cancel and the rounded ones do not.
    Returns the inputs and what dim 64 is: right, with unrounded probabilities, with the sink in the running maximum.
    """
    kv = torch.zeros(3, DIM)
    kv[1, 0], kv[1, 32], kv[1, 64] = -0.6875, -1.125 * 2**-9, 1.0
    kv[2, 0], kv[2, 32], kv[2, 64] = -0.6875, -1.375 * 2**-10, -1.0
    window = reference.pack_window(kv).cuda()
    assert torch.equal(reference.unpack_window(window).cpu(), kv)
    q = torch.zeros(tokens, 64, DIM)
    q[..., 0] = q[..., 32] = 1.0
    idx = torch.tensor([[0] + [1, 2] * 30] * tokens, dtype=torch.int32, device="cuda")
    sinks = torch.full((64,), sink, device="cuda")
    case = Inputs(q.bfloat16().cuda(), window, idx, None, None, None, sinks, 1.0)

    def output(top: float, rounded: bool) -> float:
        p = torch.exp(torch.tensor([0.0, *(float(kv[i, 0] + kv[i, 32]) for i in (1, 2))], dtype=torch.float64) - top)
        total = float(p[0] + 30 * (p[1] + p[2])) + math.exp(sink - top)
        a, b = (p.bfloat16().double() if rounded else p)[1:].tolist()
        return 30 * (a - b) / total

    return case, output(0.0, True), output(0.0, False), output(max(sink, 0.0), True)


@few_and_many
def test_sparse_rounds_probabilities(impl: str, tokens: int) -> None:
    """Fails if P is not rounded to bf16 for the product with the values (it would be five times too small)."""
    case, right, unrounded, _ = rounding_fixture(-3.0, tokens)
    assert abs(right) > 5 * abs(unrounded)
    got = case.run(impl)[:, :, 64].float()
    assert float((got - right).abs().max()) < 0.02 * abs(right), f"got {float(got[0, 0])}, wanted {right} (unrounded {unrounded})"
    # and the sum takes the unrounded p: with equal values the quotient shows it
    kv = reference.unpack_window(case.window)
    kv[2, 64] = 1.0
    case.window[:] = reference.pack_window(kv)
    assert_close(case.run(impl), case.run("reference"), ulps=1.0)


@few_and_many
def test_sparse_sink_is_not_in_the_maximum(impl: str, tokens: int) -> None:
    """Fails if the sink enters the running maximum: both probabilities would then round the same way."""
    case, right, _, with_sink = rounding_fixture(0.36, tokens)
    assert abs(with_sink) < 0.1 * abs(right)
    got = case.run(impl)[:, :, 64].float()
    assert float((got - right).abs().max()) < 0.02 * abs(right), f"got {float(got[0, 0])}, wanted {right} (sink in max {with_sink})"


@few_and_many
def test_sparse_sink_takes_its_share(impl: str, tokens: int) -> None:
    case = make(tokens, picks=0, holes=0.0, seed=13)
    case.sink[:] = torch.linspace(-60, 60, 64, device="cuda")
    assert_close(case.run(impl), case.run("reference"))
    case.sink[:] = math.nan
    assert bool(case.run(impl).isnan().all())


@few_and_many
def test_sparse_nan_stays_in_its_token(impl: str, tokens: int) -> None:
    case = make(tokens, picks=64, seed=14, holes=0.0)
    clean = case.run(impl)
    case.window_idx[2, 5] = 0
    case.window[0, :DIM] = 0x7F
    others = [t for t in range(tokens) if t != 2]
    case.window_idx[others] = case.window_idx[others].clamp(min=1)
    got = case.run(impl)
    assert bool(got[2].isnan().all())
    assert bool(got[others].isfinite().all())
    assert clean.shape == got.shape


def test_sparse_is_deterministic_and_alone(impl: str) -> None:
    """Twice bitwise equal; a token's result does not depend on its neighbours or on T (a block may serve several tokens)."""
    case = make(900, seed=15)
    first = case.run(impl)
    assert torch.equal(first, case.run(impl))
    assert_close(first, case.run("reference"))
    assert case.compressed_idx is not None and case.compressed_len is not None
    for t in (0, 31, 64, 150, 299, 477, 640, 899):
        part = slice(t, t + 1)
        alone = case.run(
            impl, q=case.q[part], window_idx=case.window_idx[part], compressed_idx=case.compressed_idx[part],
            compressed_len=case.compressed_len[part],
        )  # fmt: skip
        assert torch.equal(alone, first[part]), f"token {t}"


@pytest.mark.parametrize(("heads", "window", "picks"), [(64, 128, 512), (64, 70, 1000), (68, 13, 7), (128, 63, 130), (20, 128, 0)])
def test_sparse_few_tokens_bits(impl: str, heads: int, window: int, picks: int) -> None:
    """Few tokens may be spread over more blocks each, in rounds of 512 slots: the same bits."""
    case = make(140, heads, window, picks, seed=17)
    wanted = case.run(impl)
    for tokens in (1, 6, 7, 12, 13):
        few = Inputs(
            case.q[:tokens], case.window, case.window_idx[:tokens], case.compressed,
            None if case.compressed_idx is None else case.compressed_idx[:tokens],
            None if case.compressed_len is None else case.compressed_len[:tokens], case.sink,
        )  # fmt: skip
        assert torch.equal(few.run(impl), wanted[:tokens]), f"T={tokens}"


@few_and_many
def test_sparse_strided_query_and_canary(impl: str, tokens: int) -> None:
    case = make(tokens, 20, picks=64, seed=16)
    wide = torch.full((tokens, 30, DIM), math.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, :20] = case.q
    store = torch.full((tokens * 20 * DIM + 2048,), 3.0, dtype=torch.bfloat16, device="cuda")
    out = store[1024:-1024].view(tokens, 20, DIM)
    case.run(impl, q=wide[:, :20], out=out)
    assert torch.equal(out, case.run(impl))
    assert bool((store[:1024] == 3).all()) and bool((store[-1024:] == 3).all())


def test_sparse_without_tokens(impl: str) -> None:
    case = make(1, picks=64)
    assert case.compressed_idx is not None and case.compressed_len is not None
    got = case.run(
        impl, q=case.q[:0], window_idx=case.window_idx[:0], compressed_idx=case.compressed_idx[:0],
        compressed_len=case.compressed_len[:0],
    )  # fmt: skip
    assert got.shape == (0, 64, DIM)


@pytest.mark.big
def test_sparse_offsets_past_2_31(impl: str) -> None:
    """Case C18 (a): q and out pass 2^31 elements at token 65,536; both pools pass 2^31 bytes."""
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    tokens, picks = 131_072, 64
    chosen = torch.tensor([65_535, 65_536, 65_537], device="cuda")
    small = make(3, window=64, picks=picks, seed=17, window_rows=64, compressed_rows=64, lengths="full")
    assert small.compressed is not None and small.compressed_idx is not None and small.compressed_len is not None
    first_window, first_compressed = 4_070_000, 7_460_000
    window = torch.zeros(first_window + 64, small.window.shape[1], dtype=torch.uint8, device="cuda")
    compressed = torch.zeros(first_compressed + 64, small.compressed.shape[1], dtype=torch.uint8, device="cuda")
    assert window.numel() > 2**31 and compressed.numel() > 2**31
    window[first_window:], compressed[first_compressed:] = small.window, small.compressed
    q = torch.zeros(tokens, 64, DIM, dtype=torch.bfloat16, device="cuda")
    window_idx = torch.full((tokens, 64), -1, dtype=torch.int32, device="cuda")
    compressed_idx = torch.full((tokens, picks), -1, dtype=torch.int32, device="cuda")
    length = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    q[chosen], length[chosen] = small.q, small.compressed_len
    window_idx[chosen] = torch.where(small.window_idx >= 0, small.window_idx + first_window, -1).int()
    compressed_idx[chosen] = torch.where(small.compressed_idx >= 0, small.compressed_idx + first_compressed, -1).int()
    got = attention.sparse(q, window, window_idx, compressed, compressed_idx, length, small.sink, SCALE, impl=impl)
    assert torch.equal(got[chosen], small.run(impl))
    assert not bool(got[:65_535].any()) and not bool(got[65_538:].any())


def test_sparse_refuses_other_sizes(impl: str) -> None:
    case = make(2, 6, picks=0)
    with pytest.raises(ValueError, match=r"H a multiple of 4 from 4 to 128, got D=512 H=6"):
        case.run(impl)
    q = torch.zeros(2, 8, 256, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match=r"D=512 .* got D=256"):
        case.run(impl, q=q, window=torch.zeros(8, 264, dtype=torch.uint8, device="cuda"), sink=torch.zeros(8, device="cuda"))


# -- sparse_rope, sparse_rope_quant ------------------------------------------------------------------------------------


def bits(x: torch.Tensor) -> torch.Tensor:
    """For comparisons that tell -0 from 0 and hold for NaN."""
    return x.flatten().view(torch.uint8)


def rotary(tokens: int, rope_dim: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(tokens + rope_dim)
    angle = 6.28 * torch.rand(500, rope_dim // 2, generator=gen)
    positions = torch.randint(500, (tokens,), generator=gen, dtype=torch.int32)
    return {"positions": positions.cuda(), "table": torch.stack((angle.cos(), angle.sin()), -1).cuda()}


def make_uneven(tokens: int, heads: int, window: int = 128, picks: int = 100) -> Inputs:
    """Columns over sixteen binades, so that groups of a row lie far apart; every third token without a valid lane."""
    case = make(tokens, heads, window, picks, seed=heads + picks)
    gen = torch.Generator().manual_seed(1)
    binades = torch.randint(-14, 2, (DIM // 32,), generator=gen).repeat_interleave(32)
    case.window = reference.pack_window((torch.randn(700, DIM, generator=gen) * torch.exp2(binades)).bfloat16()).cuda()
    case.window_idx[1::3] = -1
    if case.compressed_len is not None:
        case.compressed_len[1::3] = 0
    return case


@few_and_many
@pytest.mark.parametrize(
    ("heads", "groups", "rope_dim"),
    [(64, 8, 64), (64, 8, 32), (64, 4, 64), (64, 16, 8), (8, 1, 64), (24, 3, 64), (104, 13, 64), (128, 16, 64), (20, 5, 64)],
)
def test_sparse_rope_is_the_composition(impl: str, heads: int, groups: int, rope_dim: int, tokens: int) -> None:
    case, rotation = make_uneven(tokens, heads), rotary(tokens, rope_dim)
    o = case.run(impl, q=elementwise.rope(case.q, **rotation))
    operands = [case.window, case.window_idx, case.compressed, case.compressed_idx, case.compressed_len, case.sink, SCALE]
    out = torch.full_like(o, math.nan)
    got = attention.sparse_rope(case.q.clone(), *operands, **rotation, out=out, impl=impl)
    assert got is out
    assert torch.equal(bits(got), bits(elementwise.rope(o, **rotation, inverse=True)))
    for folded in (True, False):
        wanted = elementwise.rope_quant(o, **rotation, groups=groups, inverse=True, folded=folded)
        rows = attention.sparse_rope_quant(case.q.clone(), *operands, **rotation, groups=groups, folded=folded, impl=impl)
        for part, whole in zip(rows, wanted, strict=True):
            assert part.shape == whole.shape and part.dtype == whole.dtype
            assert torch.equal(bits(part), bits(whole)), f"folded={folded}"


@few_and_many
@pytest.mark.parametrize(("window", "picks"), [(128, 0), (128, 512), (1, 0), (0, 70), (0, 0)])
def test_sparse_rope_quant_lane_counts_and_nan(impl: str, window: int, picks: int, tokens: int) -> None:
    case, rotation = make_uneven(tokens, 64, window, picks), rotary(tokens, 64)
    if window:
        case.window_idx[2, 0] = 0
        case.window[0, 300] = 0x7F
    o = case.run(impl, q=elementwise.rope(case.q, **rotation))
    operands = [case.window, case.window_idx, case.compressed, case.compressed_idx, case.compressed_len, case.sink, SCALE]
    rows = attention.sparse_rope_quant(case.q.clone(), *operands, **rotation, groups=8, folded=True, impl=impl)
    wanted = elementwise.rope_quant(o, **rotation, groups=8, inverse=True, folded=True)
    assert torch.equal(bits(rows[0]), bits(wanted[0])) and torch.equal(bits(rows[1]), bits(wanted[1]))
    if window:
        assert bool(rows[1][2].isnan().all()) and bool(rows[1][3:].isfinite().any())


@pytest.mark.parametrize("window", [128, 0])
def test_sparse_rope_is_alone(impl: str, window: int) -> None:
    """A token's output does not depend on its neighbours (without window lanes some have no lane at all), nor on how many there are."""
    case, rotation = make_uneven(600, 64, window), rotary(600, 64)
    operands = [case.window, case.window_idx, case.compressed, case.compressed_idx, case.compressed_len, case.sink, SCALE]
    whole = attention.sparse_rope_quant(case.q.clone(), *operands, **rotation, groups=8, folded=True, impl=impl)
    o = case.run(impl, q=elementwise.rope(case.q, **rotation))
    wanted = elementwise.rope_quant(o, **rotation, groups=8, inverse=True, folded=True)
    assert torch.equal(bits(whole[0]), bits(wanted[0])) and torch.equal(bits(whole[1]), bits(wanted[1]))
    for first, count in ((0, 1), (131, 7), (550, 50)):
        part = slice(first, first + count)
        alone = [x[part] if x is not None and x.shape[0] == 600 else x for x in operands[:-1]]
        positions = rotation["positions"][part]
        got = attention.sparse_rope_quant(
            case.q[part].clone(), *alone, SCALE, positions, rotation["table"], groups=8, folded=True, impl=impl
        )  # fmt: skip
        assert torch.equal(bits(got[0]), bits(whole[0][part])) and torch.equal(got[1], whole[1][part])


# -- expand_rows, and sparse over expanded rows ------------------------------------------------------------------------


needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="only the Hopper kernels read expanded rows"
)


def all_codes(kind: str) -> torch.Tensor:
    """300 packed rows, of which 256 have a byte of codes each, with any scale whose values are floats and exact in an expanded row."""
    packed = torch.randint(256, (300, 528 if kind == "window" else 288), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    codes = packed[:, : DIM if kind == "window" else DIM // 2]
    codes[:256] = torch.arange(256, dtype=torch.uint8)[:, None]
    if kind == "window":
        codes[(codes & 0x7F) == 0x7F] = 1  # NaN: of eight columns here, of one in the reference
        scales = packed[:, DIM:]
        packed[:, DIM:] = torch.where(scales < 255, scales.clamp(20, 246), scales)
    return packed


@pytest.mark.parametrize("kind", ["window", "compressed"])
def test_expand_rows_bits(kind: str) -> None:
    """Every code with many scales, NaN and extreme ones among them; pages in another order, twice, and outside the pool."""
    packed = all_codes(kind).cuda()
    for pages, page_rows in ((None, 1), (torch.tensor([3, 0, 29, 3, -1, 30, 500], dtype=torch.int32, device="cuda"), 10)):
        count = 300 if pages is None else 70
        got, wanted = (torch.full((count, DIM), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        assert attention.expand_rows(packed, DIM, pages, page_rows, out=got, impl="portable") is got
        attention.expand_rows(packed, DIM, pages, page_rows, out=wanted, impl="reference")
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(bits(got.nan_to_num(nan=0.0)), bits(wanted.nan_to_num(nan=0.0)))
        if pages is not None:
            assert bool((got[40:] == 7.0).all())
    assert attention.expand_rows(packed[:0], DIM, impl="portable").shape == (0, DIM)


def all_forms(case: Inputs, rotation: dict[str, torch.Tensor], impl: str, **changes) -> list[torch.Tensor]:
    operands = [{**case.__dict__, **changes}[name] for name in case.__dict__ if name != "q"]
    forms = [case.run(impl, **changes), attention.sparse_rope(case.q.clone(), *operands, **rotation, impl=impl)]
    if case.q.shape[1] % 8 == 0:
        groups = case.q.shape[1] // 8
        forms += attention.sparse_rope_quant(case.q.clone(), *operands, **rotation, groups=groups, folded=True, impl=impl)
    return [bits(form) for form in forms]


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 13, 300])
@pytest.mark.parametrize(
    ("heads", "window", "picks"),
    [(64, 128, 512), (64, 70, 1000), (68, 13, 7), (128, 63, 130), (24, 128, 0), (4, 0, 66), (64, 0, 0), (64, 1, 63)],
)
def test_sparse_expanded_rows_give_the_bits_of_packed_ones(heads: int, window: int, picks: int, tokens: int) -> None:
    """Holes and random lengths, duplicates, lanes past the length and outside the pool; rows that nobody reads are NaN."""
    case, rotation = make(tokens, heads, window, picks, seed=heads + picks), rotary(tokens, 64)
    case.window_idx[:, : window // 3] = 5
    for idx, rows in ((case.window_idx, 700), (case.compressed_idx, 3000)):
        if idx is not None and idx.numel():
            idx[0, 0], idx[-1, -1], idx[-1, idx.shape[1] // 2] = GARBAGE, rows, rows - 1
    case.window_idx[tokens // 2] = -1
    if case.compressed_len is not None:
        case.compressed_len[tokens // 2] = 0
    wanted = all_forms(case, rotation, "sm90")
    expanded = {}
    for name, pool, idx in (("window", case.window, case.window_idx), ("compressed", case.compressed, case.compressed_idx)):
        if pool is None or idx is None:
            continue
        rows = attention.expand_rows(pool, DIM, impl="portable")
        used = torch.zeros(pool.shape[0], dtype=torch.bool, device="cuda")
        used[idx[(idx >= 0) & (idx < pool.shape[0])].long()] = True
        expanded[name] = torch.where(used[:, None], rows, math.nan)
    for got, packed in zip(all_forms(case, rotation, "sm90", **expanded), wanted, strict=True):
        assert torch.equal(got, packed)


@needs_hopper
def test_sparse_expanded_rows_at_the_limits() -> None:
    """Columns over sixteen binades, tokens without a lane, and NaN in one token's row."""
    case, rotation = make_uneven(29, 64), rotary(29, 64)
    case.window_idx[2, 0] = 0
    case.window[0, 300] = 0x7F
    assert case.compressed is not None
    expanded = {name: attention.expand_rows(pool, DIM) for name, pool in (("window", case.window), ("compressed", case.compressed))}
    for got, packed in zip(all_forms(case, rotation, "sm90", **expanded), all_forms(case, rotation, "sm90"), strict=True):
        assert torch.equal(got, packed)


@needs_hopper
def test_sparse_expanded_rows_are_alone() -> None:
    """Twice bitwise equal; a token's result does not depend on its neighbours, nor on how many there are."""
    case = make(900, seed=15)
    assert case.compressed is not None and case.compressed_idx is not None and case.compressed_len is not None
    case.window, case.compressed = attention.expand_rows(case.window, DIM), attention.expand_rows(case.compressed, DIM)
    first = case.run("sm90")
    assert torch.equal(first, case.run("sm90"))
    assert_close(first, case.run("reference"))
    for t in (0, 31, 150, 477, 899):
        part = slice(t, t + 1)
        alone = case.run(
            "sm90", q=case.q[part], window_idx=case.window_idx[part], compressed_idx=case.compressed_idx[part],
            compressed_len=case.compressed_len[part],
        )  # fmt: skip
        assert torch.equal(alone, first[part]), f"token {t}"


def test_sparse_expanded_rows_are_refused() -> None:
    case = make(2, picks=64)
    with pytest.raises(ValueError, match=r"the portable kernel reads packed rows \(uint8\), got expanded ones \(bfloat16\)"):
        case.run("portable", window=attention.expand_rows(case.window, DIM), compressed=attention.expand_rows(case.compressed, DIM))
    with pytest.raises(TypeError, match=r"compressed must be bfloat16"):
        case.run("portable", window=attention.expand_rows(case.window, DIM))


@needs_hopper
@pytest.mark.big
def test_expanded_offsets_past_2_31() -> None:
    """A pool whose expanded rows pass 2^31 bytes and elements."""
    small = make(3, window=64, picks=64, seed=17, window_rows=64, compressed_rows=64, lengths="full")
    assert small.compressed is not None and small.compressed_idx is not None
    first = 2**31 // DIM + 3
    packed = torch.zeros(first + 64, small.compressed.shape[1], dtype=torch.uint8, device="cuda")
    packed[first:] = small.compressed
    changes = {"window": attention.expand_rows(small.window, DIM), "compressed": attention.expand_rows(packed, DIM)}
    idx = torch.where(small.compressed_idx >= 0, small.compressed_idx + first, -1).int()
    assert torch.equal(small.run("sm90", **changes, compressed_idx=idx), small.run("sm90"))


# -- write_window, write_compressed ----------------------------------------------------------------------------------

WRITERS = {
    "window": (attention.write_window, reference.pack_window, 32),
    "compressed": (attention.write_compressed, reference.pack_compressed, 16),
}


def awkward_values(rows: int, dim: int, block: int) -> torch.Tensor:
    """Random rows over many binades, then rows at the limits of the formats."""
    gen = torch.Generator().manual_seed(1)
    binades = torch.randint(-30, 30, (rows, dim // block), generator=gen)
    x = torch.randn(rows, dim, generator=gen) * torch.exp2(binades).repeat_interleave(block, 1)
    x[1] = 0.0
    x[2] = 0.1
    x[2, :block] = 1000.0  # case C23: the other groups keep their own scale
    x[3] = 3e38
    x[4] = 1e-40
    x[5] = -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, 0.75, -0.75, 1.0, 0.0, -5.0, -6.0])
    x[6] = ties.repeat(dim // 16)
    x[7] = 448.0 * torch.exp2(torch.arange(dim // block)).clamp(max=2.0**60).repeat_interleave(block)  # amax at a power of two
    x[8] = x[7] * 1.01
    x[9] = torch.linspace(-1, 1, dim)
    return x.bfloat16()


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("dim", [512, 128, 64, 32])
def test_write_rows_bits(kind: str, dim: int) -> None:
    write, pack, block = WRITERS[kind]
    x = awkward_values(333, dim, block).cuda()
    wanted = pack(x)
    gen = torch.Generator().manual_seed(2)
    slots = torch.randperm(500, generator=gen)[:333].int()
    slots[torch.rand(333, generator=gen) < 0.2] = -1
    slots[10] = -7
    slots = slots.cuda()
    store = torch.full((502, wanted.shape[1]), 0xA5, dtype=torch.uint8, device="cuda")
    rows = store[1:-1]
    before = rows.clone()
    write(x, rows, slots, impl="portable")
    expected = before
    reference.scatter_rows(expected, slots, wanted)
    assert torch.equal(rows, expected)
    assert bool((store[0] == 0xA5).all()) and bool((store[-1] == 0xA5).all())


def normed_inputs(count: int, dim: int, rope_dim: int) -> tuple[torch.Tensor, ...]:
    """Rows, norm weight, positions, angles and slots with holes."""
    gen = torch.Generator().manual_seed(count + dim)
    x = awkward_values(count, dim, 32)
    x[3] = x[3].clamp(-1e18, 1e18)  # its squares must stay finite
    x[7:9] = x[7:9].clamp(-1e18, 1e18)
    weight = torch.randn(dim, generator=gen).bfloat16()
    positions = torch.randint(0, 200, (count,), generator=gen).int()
    angle = 6 * torch.rand(200, rope_dim // 2, generator=gen)
    slots = torch.randperm(2 * count, generator=gen)[:count].int()
    slots[::7] = -1
    return x, weight, positions, torch.stack((angle.cos(), angle.sin()), -1), slots


@pytest.mark.parametrize(("dim", "rope_dim"), [(512, 64), (512, 0), (288, 32), (64, 64), (32, 8)])
def test_write_normed_window_is_the_composition(dim: int, rope_dim: int) -> None:
    """With the bits of rmsnorm, rope and write_window, for bfloat16 and float32 weights, rows that lie apart, and no row at all."""
    x, weight, positions, table, slots = (operand.cuda() for operand in normed_inputs(333, dim, rope_dim))
    wide = torch.randn(333, dim + 128, device="cuda").bfloat16()
    wide[:, 64:-64] = x
    for norm in (weight, weight.float() * 1.01):
        wanted, rows = (torch.full((668, dim + dim // 32), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(2))
        y = elementwise.rope(elementwise.rmsnorm(x, norm, 1e-6)[:, None], positions, table)[:, 0]
        attention.write_window(y, wanted[1:-1], slots)
        attention.write_normed_window(wide[:, 64:-64], norm, 1e-6, positions, table, rows[1:-1], slots, impl="portable")
        assert torch.equal(rows, wanted)
        attention.write_normed_window(x[:0], norm, 1e-6, positions[:0], table, rows[1:-1], slots[:0], impl="portable")
        assert torch.equal(rows, wanted)


@pytest.mark.parametrize("kind", WRITERS)
def test_write_rows_ties_and_groups(kind: str) -> None:
    """Case C23: ties to even at scale 1; a large group does not flush its neighbours."""
    write, pack, block = WRITERS[kind]
    unpack = reference.unpack_window if kind == "window" else reference.unpack_compressed
    x = torch.full((2, DIM), 0.1)
    x[0, :block] = 1000.0
    x[1] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5] + [6.0] * 6).repeat(32)
    rows = torch.zeros(2, pack(x).shape[1], dtype=torch.uint8, device="cuda")
    write(x.bfloat16().cuda(), rows, torch.tensor([0, 1], dtype=torch.int32, device="cuda"), impl="portable")
    values = unpack(rows).cpu()
    assert bool(((values[0, block:] - 0.1).abs() < 0.025).all())
    if kind == "compressed":
        assert values[1, :10].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -2.0]


@pytest.mark.parametrize("kind", WRITERS)
def test_write_rows_not_finite(kind: str) -> None:
    write, pack, _ = WRITERS[kind]
    x = torch.randn(4, DIM).bfloat16()
    x[0, 3], x[1, 40], x[2, 100], x[3, -1] = math.nan, math.inf, -math.inf, -math.nan
    x = x.cuda()
    wanted = pack(x)
    rows = torch.zeros_like(wanted)
    write(x, rows, torch.arange(4, dtype=torch.int32, device="cuda"), impl="portable")
    unpack = reference.unpack_window if kind == "window" else reference.unpack_compressed
    torch.testing.assert_close(unpack(rows), unpack(wanted), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", WRITERS)
def test_write_rows_strided_and_empty(kind: str) -> None:
    write, pack, _ = WRITERS[kind]
    wide = torch.randn(10, 2 * DIM).bfloat16().cuda()
    x = wide[:, DIM:]
    wanted = pack(x)
    rows = torch.zeros_like(wanted)
    write(x, rows, torch.arange(10, dtype=torch.int32, device="cuda"), impl="portable")
    assert torch.equal(rows, wanted)
    write(x[:0], rows, torch.zeros(0, dtype=torch.int32, device="cuda"), impl="portable")
    write(x, rows, torch.full((10,), -1, dtype=torch.int32, device="cuda"), impl="portable")
    assert torch.equal(rows, wanted)


@pytest.mark.big
@pytest.mark.parametrize("kind", WRITERS)
def test_write_rows_offsets_past_2_31(kind: str) -> None:
    write, pack, _ = WRITERS[kind]
    x = torch.randn(3, DIM).bfloat16().cuda()
    wanted = pack(x)
    count = 2**31 // wanted.shape[1] + 10
    rows = torch.zeros(count, wanted.shape[1], dtype=torch.uint8, device="cuda")
    slots = torch.tensor([0, count - 12, count - 1], dtype=torch.int32, device="cuda")
    write(x, rows, slots, impl="portable")
    assert torch.equal(rows[slots.long()], wanted)


@pytest.mark.big
def test_write_normed_window_past_2_31() -> None:
    """Rows of the projection past 2^31 elements, as columns of a wider tensor, to a pool of more than 2^31 bytes."""
    tokens, width, pool_rows = 1_200_000, 1792, 2**31 // 528 + 10
    at = torch.tensor([0, 2**31 // width, 2**31 // width + 1, tokens - 1], device="cuda")
    x, weight, positions, table, _ = (part[-4:].cuda() if len(part) == 20 else part.cuda() for part in normed_inputs(20, DIM, 64))
    slots = torch.tensor([pool_rows - 1, 0, pool_rows - 12, 5], dtype=torch.int32, device="cuda")
    wide = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    wide[at, -DIM:] = x
    where = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    to = torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
    where[at], to[at] = positions, slots
    rows, wanted = (torch.zeros(count, 528, dtype=torch.uint8, device="cuda") for count in (pool_rows, 4))
    attention.write_normed_window(wide[:, -DIM:], weight, 1e-6, where, table, rows, to, impl="portable")
    attention.write_normed_window(x, weight, 1e-6, positions, table, wanted, torch.arange(4).int().cuda(), impl="portable")
    assert torch.equal(rows[slots.long()], wanted)
    assert int(rows.count_nonzero()) == int(wanted.count_nonzero())


def test_written_rows_are_what_sparse_reads() -> None:
    """write_window and write_compressed, then sparse: equal to attention over the decoded values."""
    gen = torch.Generator().manual_seed(5)
    kv = torch.randn(20, DIM, generator=gen).bfloat16().cuda()
    window = torch.zeros(20, 528, dtype=torch.uint8, device="cuda")
    compressed = torch.zeros(20, 288, dtype=torch.uint8, device="cuda")
    slots = torch.arange(20, dtype=torch.int32, device="cuda").flip(0).contiguous()
    attention.write_window(kv, window, slots)
    attention.write_compressed(kv, compressed, slots)
    q = torch.randn(2, 64, DIM, generator=gen).bfloat16().cuda()
    idx = torch.arange(20, dtype=torch.int32, device="cuda").expand(2, 20).contiguous()
    case = Inputs(q, window, idx, compressed, idx, None, torch.zeros(64, device="cuda"))
    keys = torch.cat(
        (formats.dequant_fp8_ue8m0(window[:, :512], window[:, 512:]), formats.dequant_nvfp4(compressed[:, :256], compressed[:, 256:]))
    )
    score = torch.einsum("thd,kd->thk", q.float(), keys) * SCALE
    weight = torch.softmax(torch.cat((score, torch.zeros(2, 64, 1, device="cuda")), -1), -1)[..., :-1]
    assert_close(case.run("portable"), weight @ keys)


# -- compress --------------------------------------------------------------------------------------------------------


def groups_of(tokens: int, ratio: int, tails: int, gen: torch.Generator) -> torch.Tensor:
    return torch.randint(tokens + tails, (tokens // ratio + 3, ratio), generator=gen, dtype=torch.int32).cuda()


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [512, 128, 36])
def test_compress(ratio: int, dim: int) -> None:
    gen = torch.Generator().manual_seed(ratio)
    kv, score = (torch.randn(100, dim, generator=gen).cuda() for _ in range(2))
    tail_kv, tail_score = (torch.randn(7, dim, generator=gen).cuda() for _ in range(2))
    rows = groups_of(100, ratio, 7, gen)
    args = (kv, score * 5, tail_kv, tail_score, rows, torch.bfloat16)
    got, wanted = attention.compress(*args, impl="portable"), reference.compress(*args)
    assert torch.equal(got, attention.compress(*args, impl="portable"))
    exact = reference.compress(*args[:-1], torch.float32)
    step = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-6))) - 7)
    assert float(((got.float() - exact).abs() / step).max()) < 0.51  # rounded once, from nearly the same float32 value
    assert float((got != wanted).float().mean()) < 1e-3


def test_compress_two_tokens_by_hand() -> None:
    """Two groups of two tokens and a token left over; the weights are softmaxes over the group, channel by channel."""
    kv = torch.tensor([[1.0, 0], [0, 2], [3, 1], [1, 5], [2, 2]]).repeat(1, 2).cuda()
    gate = torch.tensor([[0.0, 0], [math.log(3), 0], [0, math.log(3)], [0, 0], [9, 9]]).repeat(1, 2).cuda()
    rows = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="cuda")
    got = attention.compress(kv, gate, None, None, rows, torch.bfloat16, impl="portable").cpu()
    assert got.tolist() == [[0.25, 1.0, 0.25, 1.0], [2.0, 2.0, 2.0, 2.0]]


def test_compress_without_scores_is_a_gather() -> None:
    kv = torch.randn(50, DIM).cuda()
    rows = torch.randperm(50)[:20, None].int().cuda()
    got = attention.compress(kv, None, None, None, rows, torch.bfloat16, impl="portable")
    assert torch.equal(got, kv[rows[:, 0].long()].bfloat16())
    assert attention.compress(kv, None, None, None, rows[:0], torch.bfloat16, impl="portable").shape == (0, DIM)


def test_compress_extremes() -> None:
    """Far-apart scores do not overflow; NaN stays in its channel; a tail row that no group names may be NaN."""
    kv, score = torch.randn(4, DIM).cuda(), torch.randn(4, DIM).cuda() * 1e4
    tail = torch.full((1, DIM), math.nan, device="cuda")
    rows = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="cuda")
    got = attention.compress(kv, score, tail, tail, rows, torch.bfloat16, impl="portable")
    assert bool(got.isfinite().all())
    kv[0, 5] = math.nan
    got = attention.compress(kv, score, tail, tail, rows, torch.bfloat16, impl="portable")
    assert int(got.isnan().sum()) == 1 and bool(got[0, 5].isnan())
