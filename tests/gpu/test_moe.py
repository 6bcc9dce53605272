"""MoE ops on the GPU against the plain PyTorch reference: exact where the arithmetic is exact, bounded elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops import _dispatch, elementwise, moe
from mini_deepinfer.ops.packed_weight import PackedWeight, pack_weight
from mini_deepinfer.ops.reference import moe as reference
from mini_deepinfer.ops.reference import number_formats as nf
from tests.inputs import Canary, fp4_weight, fp8_activation, generator, normal, random_bytes
from tests.numerics import assert_bitwise, compare, compare_codes

GEMM_IMPLS = _dispatch.IMPLEMENTATIONS["moe.grouped_gemm"]


@pytest.fixture(params=GEMM_IMPLS)
def impl(request: pytest.FixtureRequest, cuda: torch.device) -> str:
    """Every compiled implementation of grouped_gemm that this GPU and build can run."""
    if reason := _dispatch.why_not("moe.grouped_gemm", request.param, cuda):
        pytest.skip(reason)
    return request.param


def offsets_of(counts: list[int]) -> Tensor:
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
    return offsets


def guarded(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device between bytes 0xff: NaN as a scale and as a code, for a kernel that reads past the ends."""
    canary = Canary(tuple(tensor.shape), tensor.dtype, device)
    canary.buffer.fill_(0xFF)
    canary.tensor.copy_(tensor)
    return canary.tensor


# -- grouped_gemm ----------------------------------------------------------------------------------------------------

ROW_COUNTS = {
    "one_row": [1],
    "one_expert_129": [129],
    "uneven": [0, 3, 200, 64, 0, 65, 1, 0],
    "all_on_one": [0, 0, 300, 0],
    "none": [0, 0, 0],
    "tails": [127, 128, 129, 63, 64, 65],
}


@pytest.mark.parametrize("gather", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("counts", ROW_COUNTS.values(), ids=ROW_COUNTS.keys())
@pytest.mark.parametrize("k, o", [(32, 32), (96, 160), (256, 128), (512, 288)])
def test_grouped_gemm(cuda: torch.device, impl: str, k: int, o: int, counts: list[int], gather: bool) -> None:
    g = generator(k + o + sum(counts))
    total, spare = sum(counts), 5
    rows = 50 if gather else total + spare
    a, a_scale = fp8_activation(g, rows, k)
    weight, weight_scale = fp4_weight(g, len(counts), o, k, scale=0.02)
    a_rows = torch.randint(0, rows, (total + spare,), generator=g).int() if gather else None
    out = Canary((total + spare, o), torch.bfloat16, cuda)
    out.tensor.fill_(7.0)
    args = [t.to(cuda) for t in (a, a_scale, weight, weight_scale, offsets_of(counts))]
    rows_arg = None if a_rows is None else a_rows.to(cuda)
    result = moe.grouped_gemm(*args, rows_arg, out.tensor, impl=impl)
    assert result.data_ptr() == out.tensor.data_ptr()
    wanted = torch.full((total + spare, o), 7.0, dtype=torch.bfloat16)
    reference.grouped_gemm(a, a_scale, weight, weight_scale, offsets_of(counts), a_rows, wanted)
    out.check()
    assert bool((out.tensor[total:] == 7.0).all()), "rows past offsets[-1] were written"
    if total:
        compare(out.tensor[:total], wanted[:total], what="grouped_gemm")
    assert_bitwise(moe.grouped_gemm(*args, rows_arg, impl=impl)[:total], out.tensor[:total], "second run")


@pytest.mark.parametrize("m", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("k, o", [(32, 32), (96, 96), (160, 288), (416, 160)])
def test_grouped_gemm_integers(cuda: torch.device, impl: str, m: int, k: int, o: int) -> None:
    """Small integers times scales 2^(i mod 7): every partial sum is an integer below 2^24, so the result is exact."""
    g = generator(m * k + o)
    limit = 4 if k <= 160 else 2
    values = torch.randint(-limit, limit + 1, (2 * m, k), generator=g).float()
    a = values.to(torch.float8_e4m3fn)
    a_scale = (127 + torch.arange(2 * m * (k // 32)) % 7).to(torch.uint8).view(2 * m, k // 32)
    codes = torch.tensor([0, 2, 4, 10, 12] if limit == 2 else [0, 2, 4, 5, 6, 10, 12, 13], dtype=torch.uint8)
    weight = nf.pack_fp4(codes[torch.randint(0, len(codes), (2, o, k), generator=g)])
    weight_scale = (127 + torch.arange(2 * o * (k // 32)) % 7).to(torch.uint8).view(2, o, k // 32)
    exact = torch.cat(
        [
            nf.dequant_fp8_ue8m0(a[e * m : (e + 1) * m], a_scale[e * m : (e + 1) * m]).double()
            @ nf.dequant_mxfp4(weight[e], weight_scale[e]).double().T
            for e in range(2)
        ]
    )
    assert float(exact.abs().max()) < 2**24
    out = moe.grouped_gemm(
        a.to(cuda), guarded(a_scale, cuda), weight.to(cuda), guarded(weight_scale, cuda), offsets_of([m, m]).to(cuda),
        impl=impl,
    )  # fmt: skip
    if impl == "sm90":  # FP8 products are aligned to about 14 bits before they are added
        compare(out, exact.bfloat16(), what="integers")
    else:
        assert_bitwise(out, exact.float().bfloat16() + 0.0, "integers")


def test_grouped_gemm_every_fp4_byte_and_scale(cuda: torch.device) -> None:
    """One expert per scale byte: 512 bytes of codes, read back by one-hot rows that undo the scale exactly."""
    scales = torch.tensor([*range(253), 255])
    e = len(scales)
    packed = torch.arange(512, dtype=torch.int32).to(torch.uint8).view(32, 16)  # every byte, at two places of a row
    weight = packed.repeat(e, 1, 1)
    weight_scale = scales.to(torch.uint8)[:, None, None].repeat(1, 32, 1)
    a = torch.eye(32).to(torch.float8_e4m3fn).repeat(e, 1)
    a_scale = (254 - scales.clamp(max=252)).to(torch.uint8).repeat_interleave(32)[:, None]
    args = [t.to(cuda) for t in (a, a_scale.contiguous(), weight, weight_scale.contiguous(), offsets_of([32] * e))]
    out = moe.grouped_gemm(*args, impl="portable").cpu().view(e, 32, 32)
    values = nf.decode_e2m1(nf.unpack_fp4(packed)).T
    for i, scale in enumerate(scales.tolist()):
        if scale == 255:
            assert bool(out[i].isnan().all())
        else:
            assert torch.equal(out[i].float(), values), f"scale byte {scale}"


def test_grouped_gemm_every_fp8_code_and_scale(cuda: torch.device) -> None:
    """One expert per activation scale byte; one-hot weights undo the scale. A NaN code makes its row NaN."""
    scales = torch.arange(3, 247)
    e = len(scales)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(8, 32)
    a = codes.repeat(e, 1)
    a_scale = scales.to(torch.uint8).repeat_interleave(8)[:, None]
    weight = nf.pack_fp4((torch.eye(32) * 2).to(torch.uint8)).repeat(e, 1, 1)
    weight_scale = (254 - scales).to(torch.uint8)[:, None, None].repeat(1, 32, 1)
    args = [t.to(cuda) for t in (a.view(torch.float8_e4m3fn), a_scale.contiguous(), weight, weight_scale, offsets_of([8] * e))]
    out = moe.grouped_gemm(*args, impl="portable").cpu().view(e, 8, 32)
    wanted = nf.decode_e4m3(codes)
    wanted[wanted.isnan().any(1)] = float("nan")
    for i, scale in enumerate(scales.tolist()):
        assert torch.equal(out[i].float().nan_to_num(1e9), wanted.nan_to_num(1e9)), f"scale byte {scale}"


@pytest.mark.parametrize("spread", [(120, 135), (110, 145)])
def test_grouped_gemm_mixed_scales(cuda: torch.device, spread: tuple[int, int]) -> None:
    """Weight scales on both sides of byte 128, where the kernel's second multiply starts."""
    g = generator(spread[0])
    a, a_scale = fp8_activation(g, 150, 352)
    weight = random_bytes(g, 2, 96, 176)
    weight_scale = random_bytes(g, 2, 96, 11, low=spread[0], high=spread[1])
    args = [t.to(cuda) for t in (a, a_scale, weight, weight_scale, offsets_of([20, 130]))]
    compare(moe.grouped_gemm(*args, impl="portable"), moe.grouped_gemm(*args, impl="reference"), what="mixed scales")


def test_grouped_gemm_rows_are_independent(cuda: torch.device, impl: str) -> None:
    """A row's bits do not depend on which rows share its tile."""
    g = generator(11)
    a, a_scale = fp8_activation(g, 200, 512)
    weight, weight_scale = fp4_weight(g, 1, 256, 512, scale=0.02)
    w = [weight.to(cuda), weight_scale.to(cuda)]
    whole = moe.grouped_gemm(a.to(cuda), a_scale.to(cuda), *w, offsets_of([200]).to(cuda), impl=impl)
    for begin, end in ((0, 1), (37, 70), (100, 200)):
        part = moe.grouped_gemm(a[begin:end].to(cuda), a_scale[begin:end].to(cuda), *w, offsets_of([end - begin]).to(cuda), impl=impl)
        assert_bitwise(part, whole[begin:end], f"rows {begin}..{end}")


@pytest.mark.parametrize("k, o", [(128, 512), (416, 288), (640, 512), (1280, 512)])
def test_grouped_gemm_every_width(cuda: torch.device, impl: str, k: int, o: int) -> None:
    """150 experts of 1 to 299 rows and two of many, all with one weight: every width of a tile, and blocks that meet several layouts of
    their shared memory. The bits are those of one expert that has all rows."""
    sizes = torch.cat([torch.arange(1, 300, 2), torch.tensor([577, 900])])
    counts = sizes[torch.randperm(len(sizes), generator=generator(k))].tolist()
    a, a_scale = fp8_activation(generator(o), sum(counts), k)
    weight, weight_scale = fp4_weight(generator(k + o), 1, o, k, scale=0.02)
    rows, w = [a.to(cuda), a_scale.to(cuda)], [weight.to(cuda), weight_scale.to(cuda)]
    one = offsets_of([sum(counts)]).to(cuda)
    wanted = moe.grouped_gemm(*rows, *w, one, impl=impl)
    compare(wanted, moe.grouped_gemm(*rows, *w, one, impl="reference"), what="one expert")
    many = [t.repeat(len(counts), 1, 1) for t in w] + [offsets_of(counts).to(cuda)]
    for run in range(3):
        assert_bitwise(moe.grouped_gemm(*rows, *many, impl=impl), wanted, f"many experts, run {run}")


def test_grouped_gemm_unused_expert_may_be_nan(cuda: torch.device, impl: str) -> None:
    g = generator(12)
    a, a_scale = fp8_activation(g, 70, 128)
    weight, weight_scale = fp4_weight(g, 4, 64, 128)
    clean = [t.to(cuda) for t in (a, a_scale, weight, weight_scale, offsets_of([0, 50, 0, 20]))]
    wanted = moe.grouped_gemm(*clean, impl=impl)
    weight_scale[0], weight_scale[2] = 255, 255
    poisoned = [t.to(cuda) for t in (a, a_scale, weight, weight_scale, offsets_of([0, 50, 0, 20]))]
    assert_bitwise(moe.grouped_gemm(*poisoned, impl=impl), wanted)


def test_grouped_gemm_nan_stays_in_its_row(cuda: torch.device, impl: str) -> None:
    g = generator(13)
    a, a_scale = fp8_activation(g, 66, 96)
    weight, weight_scale = fp4_weight(g, 1, 64, 96)
    a.view(torch.uint8)[3, 40] = 0x7F
    a_scale[65, 2] = 255
    args = [t.to(cuda) for t in (a, a_scale, weight, weight_scale, offsets_of([66]))]
    nan_rows = moe.grouped_gemm(*args, impl=impl).isnan()
    wanted = torch.zeros(66, dtype=torch.bool)
    wanted[[3, 65]] = True
    assert torch.equal(nan_rows.all(1).cpu(), wanted)
    assert torch.equal(nan_rows.any(1).cpu(), wanted)


@pytest.mark.parametrize("kind", ["up", "down"])
def test_grouped_gemm_model_shapes(cuda: torch.device, impl: str, kind: str) -> None:
    """Released widths, a few uneven experts (the whole layer is the benchmark's check)."""
    g = generator(14)
    k, o = (5120, 4608) if kind == "up" else (2304, 5120)
    counts = [300, 0, 74, 129, 1, 250]
    a, a_scale = fp8_activation(g, 200, k)
    weight, weight_scale = fp4_weight(g, len(counts), o, k, scale=0.02)
    a_rows = torch.randint(0, 200, (sum(counts),), generator=g).int()
    args = [t.to(cuda) for t in (a, a_scale, weight, weight_scale, offsets_of(counts), a_rows)]
    compare(moe.grouped_gemm(*args, impl=impl), moe.grouped_gemm(*args, impl="reference"), what=kind)


@pytest.mark.parametrize("kind", ["gaussian", "heavy_tailed", "outliers"])
def test_grouped_gemm_error_of_the_whole_product(cuda: torch.device, impl: str, kind: str) -> None:
    """Frobenius error against the exact product: bf16 output rounding is 1.66e-3, the rest may add 5e-4 (squares add)."""
    g = generator(17)
    m, k, o = 384, 5120, 512
    x = torch.randn(m, k, generator=g)
    if kind == "heavy_tailed":
        x *= torch.exp(torch.randn(k, generator=g) * 1.5)
    elif kind == "outliers":
        x[:, torch.randperm(k, generator=g)[:8]] *= 1000.0
    a, a_scale = (t.to(cuda) for t in nf.quant_fp8_ue8m0(x.bfloat16()))
    weight, weight_scale = (t.to(cuda) for t in fp4_weight(g, 1, o, k, scale=0.02))
    exact = nf.dequant_fp8_ue8m0(a, a_scale).double() @ nf.dequant_mxfp4(weight[0], weight_scale[0]).double().T
    out = moe.grouped_gemm(a, a_scale, weight, weight_scale, offsets_of([m]).to(cuda), impl=impl)
    error = float((out.double() - exact).norm() / exact.norm())
    assert error <= (1.67e-3**2 + 5e-4**2) ** 0.5, f"{kind}: relative error {error:.3g}"


def test_grouped_gemm_wide_weight_scales_take_the_portable_kernel(cuda: torch.device) -> None:
    g = generator(18)
    a, a_scale = fp8_activation(g, 40, 128)
    weight, weight_scale = fp4_weight(g, 1, 64, 128)
    weight_scale[0, 5] = torch.tensor([127, 127, 105, 120])
    args = [t.to(cuda) for t in (a, a_scale, weight, weight_scale, offsets_of([40]))]
    assert pack_weight(args[2], args[3]) is None
    assert_bitwise(moe.grouped_gemm(*args), moe.grouped_gemm(*args, impl="portable"))
    if "sm90" in GEMM_IMPLS and _dispatch.why_not("moe.grouped_gemm", "sm90", cuda) is None:
        with pytest.raises(RuntimeError, match="within 14 binades"):
            moe.grouped_gemm(*args, impl="sm90")


@pytest.fixture
def hopper(cuda: torch.device) -> torch.device:
    if reason := _dispatch.why_not("moe.grouped_gemm", "sm90", cuda):
        pytest.skip(reason)
    return cuda


def test_packed_weight_every_byte_at_every_distance(hopper: torch.device) -> None:
    """One-hot rows read the weights back: every byte at every place of a word, under scales up to 14 binades apart."""
    rows, columns = 256 * 15, 640
    g = generator(19)
    weight = torch.stack([torch.randperm(256, generator=g) for _ in range(15 * columns // 2)], 1).to(torch.uint8)
    weight = weight.view(256, 15, columns // 2).transpose(0, 1).reshape(1, rows, columns // 2).contiguous()
    distance = torch.arange(rows) // 256
    groups = torch.arange(columns // 32)
    weight_scale = torch.where(groups % 5 == distance[:, None] % 5, 127, 127 - distance[:, None]).to(torch.uint8)[None]
    a = torch.eye(columns).to(torch.float8_e4m3fn)
    a_scale = torch.full((columns, columns // 32), 127, dtype=torch.uint8)
    args = [t.to(hopper) for t in (a, a_scale, weight, weight_scale.contiguous(), offsets_of([columns]))]
    exact = nf.dequant_mxfp4(weight[0], weight_scale[0]).T
    assert torch.equal(moe.grouped_gemm(*args, impl="sm90").float().cpu(), exact)


@pytest.mark.parametrize("k, o", [(32, 32), (160, 96), (512, 288)])
def test_packed_weight_gives_the_bits_of_the_stored_one(hopper: torch.device, k: int, o: int) -> None:
    """Packed on the CPU, on the GPU and in place, and read back by the portable kernel."""
    g = generator(k)
    a, a_scale = (t.to(hopper) for t in fp8_activation(g, 150, k))
    weight, weight_scale = fp4_weight(g, 3, o, k, scale=0.02)
    stored = (weight.to(hopper), weight_scale.to(hopper))
    offsets = offsets_of([100, 0, 50]).to(hopper)
    on_cpu, on_gpu = pack_weight(weight, weight_scale), pack_weight(*stored)
    taken = pack_weight(stored[0].clone(), stored[1], in_place=True)
    assert on_cpu is not None and on_gpu is not None and taken is not None
    for packed in (on_gpu, taken):
        for got, wanted in zip(vars(packed).values(), vars(on_cpu).values(), strict=True):
            assert torch.equal(got.cpu(), wanted)
    for impl in GEMM_IMPLS:
        wanted_out = moe.grouped_gemm(a, a_scale, *stored, offsets, impl=impl)
        assert_bitwise(moe.grouped_gemm(a, a_scale, on_gpu, None, offsets, impl=impl), wanted_out, impl)
    packed_out = moe.grouped_gemm(a, a_scale, on_gpu, None, offsets)
    chosen = _dispatch.select("moe.grouped_gemm", a, compute_dtype=torch.bfloat16)
    assert_bitwise(packed_out, moe.grouped_gemm(a, a_scale, *stored, offsets, impl=chosen), chosen)
    assert_bitwise(moe.grouped_gemm(a, a_scale, *stored, offsets), moe.grouped_gemm(a, a_scale, *stored, offsets, impl="portable"))


@pytest.mark.big
def test_grouped_gemm_rows_past_2_31_elements(cuda: torch.device, impl: str) -> None:
    """131,072 tokens on the same six experts: the product has 4.0e9 elements, row 419,431 crosses 2^31."""
    g = generator(15)
    tokens, k_picks, k, o = 131_072, 6, 64, 5120
    a, a_scale = (t.to(cuda) for t in fp8_activation(g, tokens, k))
    weight, weight_scale = (t.to(cuda) for t in fp4_weight(g, k_picks, o, k))
    ids = torch.arange(k_picks, dtype=torch.int32, device=cuda).repeat(tokens, 1)
    row_of_slot, slot_of_row, offsets = moe.permute(ids, 0, k_picks)
    a_rows = torch.div(slot_of_row, k_picks, rounding_mode="floor").int()
    out = moe.grouped_gemm(a, a_scale, weight, weight_scale, offsets, a_rows, impl=impl)
    for row in (419_430, 419_431, 419_432, 786_431):
        expert, token = row // tokens, row % tokens
        assert int(a_rows[row]) == token
        one = moe.grouped_gemm(
            a[token : token + 1], a_scale[token : token + 1], weight[expert : expert + 1],
            weight_scale[expert : expert + 1], offsets_of([1]).to(cuda), impl=impl,
        )  # fmt: skip
        assert_bitwise(out[row : row + 1], one, f"row {row}")
    some = slice(130_000, 130_008)
    wanted = moe.combine(out[row_of_slot[some].flatten().long()], torch.arange(48, device=cuda).int().view(8, 6), None, torch.float32)
    assert_bitwise(moe.combine(out, row_of_slot, None, torch.float32)[some], wanted, "combine")


# -- permute ---------------------------------------------------------------------------------------------------------


def random_ids(g: torch.Generator, tokens: int, k: int, experts: int) -> Tensor:
    return torch.rand(tokens, experts, generator=g).topk(k, dim=1).indices.sort(dim=1).values.int()


@pytest.mark.parametrize(
    "tokens, k, experts, first, local",
    [
        (0, 2, 8, 0, 8), (1, 2, 8, 0, 8), (1, 1, 1, 0, 1), (5, 3, 8, 4, 4), (341, 6, 32, 8, 8), (700, 6, 384, 96, 96),
        (342, 6, 8, 0, 8), (4096, 6, 384, 288, 96), (16384, 6, 384, 0, 96), (6, 2, 6, 4, 2), (6, 2, 6, 5, 1), (40, 2, 6, 0, 2),
    ],
)  # fmt: skip
def test_permute(cuda: torch.device, tokens: int, k: int, experts: int, first: int, local: int) -> None:
    ids = random_ids(generator(tokens + experts), tokens, k, experts)
    out = moe.permute(ids.to(cuda), first, local, impl="portable")
    for name, got, wanted in zip(("row_of_slot", "slot_of_row", "offsets"), out, reference.permute(ids, first, local), strict=True):
        compare(got, wanted, what=name)


@pytest.mark.parametrize("target", ["all_on_one", "none_local", "last_rank"])
def test_permute_hot_and_cold(cuda: torch.device, target: str) -> None:
    tokens, k = 5000, 4
    ids = {
        "all_on_one": torch.full((tokens, k), 3),
        "none_local": torch.full((tokens, k), 9),
        "last_rank": torch.arange(4, 8).repeat(tokens, 1),
    }[target].int()
    for got, wanted in zip(moe.permute(ids.to(cuda), 2, 6, impl="portable"), reference.permute(ids, 2, 6), strict=True):
        compare(got, wanted, what=target)


def test_permute_six_experts_over_four_ranks(cuda: torch.device) -> None:
    ids = random_ids(generator(3), 50, 2, 6)
    seen = torch.zeros(50, 2, dtype=torch.int32)
    for first, local in ((0, 2), (2, 2), (4, 1), (5, 1)):
        row_of_slot, slot_of_row, offsets = moe.permute(ids.to(cuda), first, local, impl="portable")
        for got, wanted in zip((row_of_slot, slot_of_row, offsets), reference.permute(ids, first, local), strict=True):
            compare(got, wanted)
        seen += (row_of_slot >= 0).cpu().int()
    assert bool((seen == 1).all())


def test_dispatch_knows_token_and_weight_of_every_row(cuda: torch.device) -> None:
    g = generator(9)
    for tokens, first, local in ((700, 96, 96), (3, 300, 84), (0, 0, 8)):
        ids, weights = random_ids(g, tokens, 6, 384), torch.rand(tokens, 6, generator=g)
        outs = moe.dispatch(ids.to(cuda), weights.to(cuda), first, local, impl="portable")
        for got, wanted in zip(outs, moe.dispatch(ids, weights, first, local, impl="reference"), strict=True):
            assert torch.equal(got.cpu(), wanted)


def test_permute_largest(cuda: torch.device) -> None:
    ids = random_ids(generator(4), 131_072, 6, 64)
    for got, wanted in zip(moe.permute(ids.to(cuda), 16, 48, impl="portable"), reference.permute(ids, 16, 48), strict=True):
        compare(got, wanted)


# -- swiglu_quant ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m, f", [(1, 32), (3, 96), (65, 288), (300, 2304), (4, 8192)])
@pytest.mark.parametrize("limit, weighted", [(10.0, True), (0.0, False), (1.5, True)])
def test_swiglu_quant(cuda: torch.device, m: int, f: int, limit: float, weighted: bool) -> None:
    g = generator(m + f)
    gu = normal(g, m, 2 * f, scale=4.0)
    row_weight = torch.rand(m, generator=g) if weighted else None
    on_gpu = (gu.to(cuda), None if row_weight is None else row_weight.to(cuda), limit)
    codes, scale = moe.swiglu_quant(*on_gpu, impl="portable")
    wanted_codes, wanted_scale = reference.swiglu_quant(gu, row_weight, limit)
    same = scale.cpu() == wanted_scale  # exp differs in the last bit between libraries: a maximum may cross a power of two
    assert int((~same).sum()) <= max(1, same.numel() // 1000)
    groups = same.repeat_interleave(32, 1)
    compare_codes(
        torch.where(groups, codes.cpu().view(torch.uint8), wanted_codes.view(torch.uint8)).view(torch.float8_e4m3fn),
        wanted_codes,
    )
    h = moe.swiglu(*on_gpu, impl="portable")
    compare(h, reference.swiglu(gu, row_weight, limit), what="h")
    again = moe.swiglu_quant(*on_gpu, impl="portable")
    assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(again[1], scale)
    requantised = nf.quant_fp8_ue8m0(h.cpu())
    assert torch.equal(codes.cpu().view(torch.uint8), requantised[0].view(torch.uint8)), "codes are not act_quant(h)"
    assert torch.equal(scale.cpu(), requantised[1]), "scale is not act_quant(h)"


@pytest.mark.parametrize("m, f", [(1, 32), (65, 288), (300, 2304), (4, 8192), (3, 8224)])
def test_swiglu_quant_folded_is_swiglu_then_act_quant_folded(cuda: torch.device, m: int, f: int) -> None:
    gu = normal(generator(m + f), m, 2 * f, scale=4.0)
    gu[:, : f // 3] *= 1e-3  # groups at other scales
    gu[m - 1, 5] = float("nan")
    codes, row_scale = moe.swiglu_quant_folded(gu.to(cuda), 10.0, impl="portable")
    wanted_codes, wanted_scale = elementwise.act_quant_folded(moe.swiglu(gu.to(cuda), None, 10.0, impl="portable"))
    assert_bitwise(codes[: m - 1], wanted_codes[: m - 1], "codes")
    assert_bitwise(row_scale[: m - 1], wanted_scale[: m - 1], "row_scale")
    assert bool(row_scale[m - 1].isnan()) and bool(wanted_scale[m - 1].isnan())


def test_swiglu_quant_nan_zero_and_bound(cuda: torch.device) -> None:
    f = 64
    gu = torch.ones(6, 2 * f, dtype=torch.bfloat16)
    gu[0, 5] = float("nan")  # gate
    gu[1, f + 40] = float("nan")  # up
    gu[2] = 0
    gu[3, :f] = 1000.0
    gu[3, f:] = -1000.0
    bound = torch.tensor([5], dtype=torch.int32)
    h = moe.swiglu(gu.to(cuda), None, 10.0, bound.to(cuda), impl="portable").cpu()
    assert bool(h[0, 5].isnan()) and int(h[0].isnan().sum()) == 1
    assert bool(h[1, 40].isnan()) and int(h[1].isnan().sum()) == 1
    assert bool((h[2] == 0).all())
    assert torch.equal(h[3], reference.swiglu(gu, None, 10.0)[3])
    codes, scale = (t.cpu() for t in moe.swiglu_quant(gu.to(cuda), None, 10.0, bound.to(cuda), impl="portable"))
    assert scale[0].tolist() == [255, int(scale[4, 0])] and scale[1].tolist() == [int(scale[4, 0]), 255]
    assert bool(nf.dequant_fp8_ue8m0(codes[:2], scale[:2]).isnan().any(1).all())
    assert scale[2].tolist() == [127 - 22] * 2 and bool((codes[2].view(torch.uint8) & 0x7F == 0).all())


def test_swiglu_quant_bound_is_not_passed(cuda: torch.device) -> None:
    gu = torch.ones(40, 128, dtype=torch.bfloat16, device=cuda)
    h = torch.full((40, 64), 9.0, dtype=torch.bfloat16, device=cuda)
    for rows in (0, 7, 40):
        h.fill_(9.0)
        bound = torch.tensor([rows], dtype=torch.int32, device=cuda)
        _dispatch.call("moe.swiglu_quant", "portable", gu, None, 10.0, bound, None, None, h)
        assert bool((h[rows:] == 9.0).all()) and not bool((h[:rows] == 9.0).any())


@pytest.mark.big
def test_swiglu_quant_past_2_31_elements(cuda: torch.device) -> None:
    m, f = 786_432, 2304
    gu = torch.zeros(m, 2 * f, dtype=torch.bfloat16, device=cuda)
    rows = [466_032, 466_033, 466_034, m - 1]
    g = generator(16)
    gu[rows] = normal(g, 4, 2 * f).to(cuda)
    codes, scale = moe.swiglu_quant(gu, None, 10.0, impl="portable")
    small_codes, small_scale = moe.swiglu_quant(gu[rows], None, 10.0, impl="portable")
    assert torch.equal(codes[rows].view(torch.uint8), small_codes.view(torch.uint8)) and torch.equal(scale[rows], small_scale)
    assert int(codes.view(torch.uint8).count_nonzero()) == int(small_codes.view(torch.uint8).count_nonzero())


@pytest.mark.big
def test_swiglu_quant_folded_past_2_31_elements(cuda: torch.device) -> None:
    """932,100 rows of 2,304: codes cross 2^31 at row 932,067, gate and up at row 466,033."""
    m, f = 932_100, 2304
    rows = [0, 466_033, 466_034, 932_067, 932_068, m - 1]
    gu = torch.zeros(m, 2 * f, dtype=torch.bfloat16, device=cuda)
    gu[rows] = normal(generator(17), len(rows), 2 * f).to(cuda)
    got = moe.swiglu_quant_folded(gu, 10.0, impl="portable")
    for out, wanted, name in zip(got, moe.swiglu_quant_folded(gu[rows], 10.0, impl="portable"), ("codes", "row_scale"), strict=True):
        assert_bitwise(out[rows], wanted, name)
    codes = got[0].view(torch.uint8)
    assert int(codes.count_nonzero()) == int(codes[rows].count_nonzero())


def test_no_rows(cuda: torch.device) -> None:
    """M = 0, as on a rank without tokens: the ops return empty tensors, and the kernels launch nothing."""
    gu = torch.empty(0, 128, dtype=torch.bfloat16, device=cuda)
    none, bound = torch.empty(0, device=cuda), torch.zeros(1, dtype=torch.int32, device=cuda)
    codes, scale = moe.swiglu_quant(gu, none, 10.0, bound, impl="portable")
    h = moe.swiglu(gu, None, 10.0, impl="portable")
    folded, row_scale = moe.swiglu_quant_folded(gu, 10.0, impl="portable")
    for out in (h, codes, folded):
        assert out.shape == (0, 64)
    assert scale.shape == (0, 2) and row_scale.shape == (0,)
    _dispatch.call("moe.swiglu_quant", "portable", gu, None, 10.0, None, codes, scale, None)
    _dispatch.call("moe.swiglu_quant", "portable", gu, None, 10.0, None, None, None, h)
    _dispatch.call("moe.swiglu_quant_folded", "portable", gu, 10.0, folded, row_scale)
    wide = torch.empty(0, 128, dtype=torch.uint8, device=cuda)
    _dispatch.call("moe.swiglu_fold", "portable", gu, none, 10.0, bound, wide, row_scale)
    torch.cuda.synchronize(cuda)  # a launch of zero blocks would be an error here


# -- combine ---------------------------------------------------------------------------------------------------------


def combine_operands(tokens: int, k: int, n: int) -> tuple[torch.Generator, torch.Tensor, torch.Tensor]:
    """The generator, y [2 * tokens * k + 1, n] and row_of_slot [tokens, k]: most slots have no row here, rows nobody names are NaN."""
    g = generator(tokens + n)
    slots = tokens * k
    rows = torch.randperm(2 * slots + 1, generator=g)[:slots].view(tokens, k).int()
    rows[torch.rand(tokens, k, generator=g) < 0.6] = -1
    y = torch.full((2 * slots + 1, n), float("nan"), dtype=torch.bfloat16)
    live = rows[rows >= 0].long()
    y[live] = normal(g, live.numel(), n)
    return g, y, rows


@pytest.mark.parametrize("tokens, k, n", [(1, 1, 8), (5, 2, 64), (33, 6, 5120), (300, 6, 1288), (7, 32, 9216), (0, 6, 64)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_shared", [False, True])
def test_combine(cuda: torch.device, tokens: int, k: int, n: int, out_dtype: torch.dtype, with_shared: bool) -> None:
    """Rows nobody names are NaN; the fp32 sums are in slot order, so they equal the reference bit for bit."""
    g, y, rows = combine_operands(tokens, k, n)
    shared = normal(g, tokens, n) if with_shared else None
    out = moe.combine(y.to(cuda), rows.to(cuda), None if shared is None else shared.to(cuda), out_dtype, impl="portable")
    assert bool(out.isfinite().all())
    wanted = reference.combine(y, rows, shared, out_dtype)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize(
    "tokens, k, n, num_parts, rank, with_shared",
    [(1, 1, 8, 0, 0, True), (33, 6, 5120, 3, 1, True), (70, 6, 1288, 2, 2, False), (7, 32, 9216, 7, 0, True), (0, 6, 64, 3, 3, True)],
)
def test_combine_parts(cuda: torch.device, tokens: int, k: int, n: int, num_parts: int, rank: int, with_shared: bool) -> None:
    """The bits of two passes: this rank's sums as another row, then all ranks' in rank order."""
    g, y, rows = combine_operands(tokens, k, n)
    parts = normal(g, num_parts * tokens, n).view(num_parts, tokens, n)
    shared = normal(g, tokens, n) if with_shared else None
    out = moe.combine_parts(y.to(cuda), rows.to(cuda), parts.to(cuda), rank, None if shared is None else shared.to(cuda), impl="portable")
    assert_bitwise(out.cpu(), reference.combine_parts(y, rows, parts, rank, shared))
    own = moe.combine(y.to(cuda), rows.to(cuda), None, torch.bfloat16).cpu()
    stacked = torch.stack([*parts[:rank], own, *parts[rank:]])
    order = torch.arange(len(stacked) * tokens, dtype=torch.int32).view(len(stacked), tokens).t().contiguous()
    two = moe.combine(stacked.flatten(0, 1).to(cuda), order.to(cuda), None if shared is None else shared.to(cuda), torch.bfloat16)
    assert_bitwise(out, two)


# -- route -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=_dispatch.IMPLEMENTATIONS["moe.route"])
def route_impl(request: pytest.FixtureRequest, cuda: torch.device) -> str:
    if reason := _dispatch.why_not("moe.route", request.param, cuda):
        pytest.skip(reason)
    return request.param


def check_route(x: Tensor, weight: Tensor, bias: Tensor, k: int, scaling: float, ids: Tensor, weights: Tensor) -> None:
    """ids are a top-k of the exact scores up to rounding, weights are normalised over them."""
    logits = x.double().cpu() @ weight.double().cpu().T
    scores = torch.where(logits > 20, logits, torch.log1p(torch.exp(logits.clamp(max=20)))).sqrt()
    biased = scores + bias.double().cpu()
    ids, weights = ids.cpu().long(), weights.cpu().double()
    assert bool((ids[:, 1:] > ids[:, :-1]).all()), "ids must ascend"
    kth = biased.topk(k, dim=1).values[:, -1:]
    picked = biased.gather(1, ids)
    margin = 2e-5 * (1 + biased.abs().amax(1, keepdim=True))
    assert bool((picked >= kth - margin).all()), f"not a top-{k}: {float((kth - picked).max())}"
    chosen = scores.gather(1, ids)
    wanted = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scaling
    error = ((weights - wanted).abs() / wanted.abs().clamp(min=1e-12)).max() if ids.numel() else torch.zeros(())
    assert float(error) < 3e-5, f"weights off by {float(error)}"


@pytest.mark.parametrize(
    "tokens, n, experts, k",
    [(1, 32, 8, 2), (31, 96, 8, 8), (33, 160, 128, 6), (64, 512, 129, 6), (100, 1024, 256, 6), (70, 5120, 384, 6), (40, 640, 512, 32)],
)
def test_route(cuda: torch.device, route_impl: str, tokens: int, n: int, experts: int, k: int) -> None:
    g = generator(tokens + n)
    x, weight = normal(g, tokens, n), normal(g, experts, n, scale=n**-0.5)
    bias = torch.randn(experts, generator=g) * 0.1
    args = (x.to(cuda), weight.to(cuda), bias.to(cuda), k, 1.5)
    ids, weights = moe.route(*args, impl=route_impl)
    check_route(x, weight, bias, k, 1.5, ids, weights)
    ref_ids, ref_weights = reference.route(x, weight, bias, k, 1.5)
    same = (ids.cpu() == ref_ids).all(1)
    assert int((~same).sum()) <= max(1, tokens // 50), "near ties are rare"
    assert torch.allclose(weights.cpu()[same], ref_weights[same], rtol=3e-5, atol=1e-7)
    again = moe.route(*args, impl=route_impl)
    assert torch.equal(again[0], ids) and torch.equal(again[1], weights)


def test_route_ties_go_to_the_lower_id(cuda: torch.device, route_impl: str) -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    weight = normal(generator(5), 40, 64)
    bias = torch.zeros(40)
    bias[[7, 33, 21]] = 1.0
    ids, weights = moe.route(x.to(cuda), weight.to(cuda), bias.to(cuda), 6, 1.5, impl=route_impl)
    assert ids.cpu().tolist() == [[0, 1, 2, 7, 21, 33]] * 3
    assert torch.allclose(weights.cpu(), torch.full((3, 6), 0.25))


def test_route_extreme_logits(cuda: torch.device, route_impl: str) -> None:
    """Above 20 softplus is the identity, below -16.64 it must not become 0, above 88 exp must not overflow."""
    logits = torch.tensor([-100.0, -87.0, -40.0, -17.0, -16.0, 0.0, 5.0, 19.0, 20.0, 20.5, 21.0, 60.0, 89.0, 200.0, 3e4])
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    x[1, 1] = 1.0
    weight = torch.zeros(15, 32, dtype=torch.bfloat16)
    weight[:, 0] = logits.bfloat16()
    weight[:, 1] = -logits.abs().bfloat16() - 17
    bias = torch.zeros(15)
    for k in (1, 4, 15):
        ids, weights = moe.route(x.to(cuda), weight.to(cuda), bias.to(cuda), k, 1.5, impl=route_impl)
        ref_ids, ref_weights = reference.route(x, weight, bias, k, 1.5)
        assert torch.equal(ids.cpu(), ref_ids)
        assert bool(weights.isfinite().all())
        assert torch.allclose(weights.cpu(), ref_weights, rtol=1e-5, atol=1e-20)  # exp(-100) is subnormal
        assert torch.allclose(weights.sum(1).cpu(), torch.full((2,), 1.5), rtol=1e-5)


def test_route_nan_token(cuda: torch.device, route_impl: str) -> None:
    g = generator(6)
    x, weight, bias = normal(g, 40, 64), normal(g, 16, 64), torch.zeros(16)
    clean = moe.route(x.to(cuda), weight.to(cuda), bias.to(cuda), 4, 1.0, impl=route_impl)
    x[9] = float("nan")
    ids, weights = moe.route(x.to(cuda), weight.to(cuda), bias.to(cuda), 4, 1.0, impl=route_impl)
    assert ids[9].cpu().tolist() == [0, 1, 2, 3] and bool(weights[9].isnan().all())
    others = [i for i in range(40) if i != 9]
    assert torch.equal(ids[others], clean[0][others]) and torch.equal(weights[others], clean[1][others])


def test_route_does_not_depend_on_the_batch(cuda: torch.device, route_impl: str) -> None:
    g = generator(7)
    x, weight = normal(g, 4096, 1024).to(cuda), normal(g, 384, 1024, scale=1 / 32).to(cuda)
    bias = (torch.randn(384, generator=g) * 0.1).to(cuda)
    ids, weights = moe.route(x, weight, bias, 6, 1.5, impl=route_impl)
    for begin, end in ((0, 1), (5, 6), (17, 50), (1000, 4096)):
        part_ids, part_weights = moe.route(x[begin:end].contiguous(), weight, bias, 6, 1.5, impl=route_impl)
        assert torch.equal(part_ids, ids[begin:end]) and torch.equal(part_weights, weights[begin:end])


@pytest.mark.parametrize(
    "tokens, n, experts, k",
    [(0, 32, 8, 2), (1, 32, 8, 2), (65, 96, 192, 6), (130, 5120, 384, 6), (4096, 5120, 384, 6), (77, 1056, 300, 32)],
)
def test_route_kernels_give_the_same_bits(cuda: torch.device, route_impl: str, tokens: int, n: int, experts: int, k: int) -> None:
    if route_impl == "portable":
        pytest.skip("the others are compared with it")
    g = generator(9)
    args = (normal(g, tokens, n).to(cuda), normal(g, experts, n, scale=n**-0.5).to(cuda), torch.randn(experts, generator=g).to(cuda) * 0.1)
    for got, wanted in zip(moe.route(*args, k, 1.5, impl=route_impl), moe.route(*args, k, 1.5, impl="portable"), strict=True):
        assert_bitwise(got, wanted)


def test_route_writes_nothing_outside(cuda: torch.device, route_impl: str) -> None:
    g = generator(10)
    x, weight, bias = normal(g, 67, 160), normal(g, 384, 160), torch.zeros(384)
    ids, weights = Canary((67, 6), torch.int32, cuda), Canary((67, 6), torch.float32, cuda)
    _dispatch.call("moe.route", route_impl, x.to(cuda), weight.to(cuda), bias.to(cuda), 1.5, ids.tensor, weights.tensor)
    ids.check()
    weights.check()


# -- the whole sublayer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 4])
def test_experts_end_to_end(cuda: torch.device, world: int) -> None:
    """route -> permute -> product -> SwiGLU -> product -> combine, summed over ranks, against the float32 reference."""
    g = generator(8)
    tokens, n, f, experts, k = 77, 256, 96, 6, 2
    x = normal(g, tokens, n)
    gate, bias = normal(g, experts, n, scale=n**-0.5), torch.zeros(experts)
    w13, w13_scale = fp4_weight(g, experts, 2 * f, n, scale=n**-0.5)
    w2, w2_scale = fp4_weight(g, experts, n, f, scale=f**-0.5)
    codes, scale = nf.quant_fp8_ue8m0(x)

    def run(device: torch.device | str, impl: str) -> Tensor:
        ids, weights = (t.to(device) for t in reference.route(x, gate, bias, k, 1.5))
        total = torch.zeros(tokens, n, device=device)
        first = 0
        for rank in range(world):
            local = experts // world + (rank < experts % world)
            row_of_slot, slot_of_row, offsets = moe.permute(ids, first, local, impl=impl)
            slot = slot_of_row.clamp(min=0).long()
            w = [t[first : first + local].to(device) for t in (w13, w13_scale, w2, w2_scale)]
            a_rows = (slot // k).int()
            gu = moe.grouped_gemm(codes.to(device), scale.to(device), w[0], w[1], offsets, a_rows, impl=impl)
            h, h_scale = moe.swiglu_quant(gu, weights.flatten()[slot], 10.0, offsets[-1:], impl=impl)
            y = moe.grouped_gemm(h, h_scale, w[2], w[3], offsets, impl=impl)
            total += moe.combine(y, row_of_slot, None, torch.float32, impl=impl)
            first += local
        return total

    def run_fused(impl: str, fused: bool) -> Tensor:
        ids, weights = (t.to(cuda) for t in reference.route(x, gate, bias, k, 1.5))
        outs = moe.dispatch(ids, weights, 0, experts)
        args = (codes.to(cuda), scale.to(cuda), *(t.to(cuda) for t in (w13, w13_scale, w2, w2_scale)))
        if fused:
            return moe.experts(*args, outs[2], outs[3], outs[4], 10.0, impl=impl)[: int(outs[2][-1])]
        gu = moe.grouped_gemm(*args[:4], outs[2], outs[3], impl=impl)
        h, h_scale = moe.swiglu_quant(gu, outs[4], 10.0, outs[2][-1:])
        return moe.grouped_gemm(h, h_scale, *args[4:], outs[2], impl=impl)[: int(outs[2][-1])]

    for impl in GEMM_IMPLS if world == 1 else ():
        if _dispatch.why_not("moe.grouped_gemm", impl, cuda) is None:
            assert_bitwise(run_fused(impl, True), run_fused(impl, False), f"experts ({impl})")

    if world == 1 and _dispatch.select("moe.grouped_gemm", codes.to(cuda), compute_dtype=torch.bfloat16) == "sm90":
        ids, weights = (t.to(cuda) for t in reference.route(x, gate, bias, k, 1.5))
        outs = moe.dispatch(ids, weights, 0, experts)
        folded = elementwise.act_quant_folded(x.to(cuda))
        packed = [pack_weight(*pair) for pair in ((w13.to(cuda), w13_scale.to(cuda)), (w2.to(cuda), w2_scale.to(cuda)))]
        assert all(isinstance(weight, PackedWeight) for weight in packed)
        y = moe.experts(*folded, packed[0], None, packed[1], None, outs[2], outs[3], outs[4], 10.0, row_of_slot=outs[0])
        assert_bitwise(y[: int(outs[2][-1])], run_fused("sm90", True), "tokens folded before they are placed")

    difference = (run(cuda, "portable").cpu() - run("cpu", "reference")).abs()
    assert float(difference.max()) < 0.02 * float(run("cpu", "reference").abs().max())
