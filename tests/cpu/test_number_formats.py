"""FP4, FP8 and E8M0: known values, rounding, the scale rules, and the C++ codecs against the PyTorch ones."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops.reference import number_formats as nf
from tests.inputs import generator, normal
from tests.numerics import assert_bitwise

ROOT = Path(__file__).resolve().parents[2]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def bits(x: Tensor) -> list[int]:
    return [int(v) & 0xFFFFFFFF for v in x.float().view(torch.int32).flatten()]


def float_samples() -> Tensor:
    """float32 values of every exponent and both signs, with the neighbours of every E2M1 and E4M3 midpoint."""
    pattern = torch.arange(0, 2**32, 65537 // 3, dtype=torch.int64)
    spread = (pattern - 2**31).to(torch.int32).view(torch.float32)
    grid = torch.cat((nf.decode_e2m1(torch.arange(8)), nf.decode_e4m3(BYTES[:127])))
    middle = (grid[1:] + grid[:-1]) / 2
    near = torch.cat((middle, grid)).view(torch.int32)
    near = torch.cat((near, near + 1, (near - 1).clamp(min=0))).view(torch.float32)
    return torch.cat((spread, near, -near))


# -- decoders: C21 ---------------------------------------------------------------------------------------------------


def test_e2m1_codes_low_nibble_first() -> None:
    row = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    assert bits(nf.decode_e2m1(nf.unpack_fp4(row))) == bits(torch.tensor(E2M1))
    assert torch.equal(nf.pack_fp4(nf.unpack_fp4(row)), row)


def test_e8m0_codes() -> None:
    value = nf.decode_e8m0(BYTES)
    assert bits(value[0]) == [0x00400000] and bits(value[254]) == [0x7F000000]
    assert value[127] == 1 and value[134] == 128 and value[255].isnan()
    assert torch.equal(value[:255].double(), 2.0 ** (torch.arange(255).double() - 127))


def test_e4m3_codes() -> None:
    value = nf.decode_e4m3(BYTES)
    assert value.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert value[1] == 2**-9 and value[0x7E] == 448 and bits(value[0x80]) == [0x80000000]
    assert_bitwise(nf.encode_e4m3(value).view(torch.uint8)[:127], BYTES[:127])


def test_every_fp4_byte_under_every_scale() -> None:
    packed, scale = BYTES.repeat(256, 1), BYTES[:, None].repeat(1, 16)
    out = nf.expand_fp4(packed, scale)
    exact = torch.tensor(E2M1, dtype=torch.float64)[nf.unpack_fp4(BYTES).long()] * nf.decode_e8m0(BYTES).double()[:, None]
    fits = exact.abs() < 2.0**128
    assert out[255].isnan().all() and not out[:255].isnan().any()
    assert torch.equal(out.double()[fits], exact[fits])
    assert bool(out[:255][~fits[:255]].isinf().all())
    assert bits(out[0, :4]) == bits(torch.tensor([0.0, 0.0, 2.0**-128, 0.0]))  # bytes 0x00 and 0x01 under scale byte 0


# -- encoders: C23 ---------------------------------------------------------------------------------------------------


def test_e2m1_ties_to_even_codes() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -0.25, -2.5])
    assert bits(nf.decode_e2m1(nf.encode_e2m1(x))) == bits(torch.tensor([0, 1, 1, 2, 2, 4, 4, 6, -0.0, -2]))


@pytest.mark.parametrize("block, quant, dequant", [
    (32, nf.quant_fp8_ue8m0, nf.dequant_fp8_ue8m0),
    (32, nf.quant_mxfp4, nf.dequant_mxfp4),
    (16, nf.quant_nvfp4, nf.dequant_nvfp4),
], ids=["window", "index", "compressed"])  # fmt: skip
def test_a_large_group_leaves_the_next_alone(block, quant, dequant) -> None:
    row = torch.full((1, 128), 0.1)
    row[:, :block] = 1000.0
    back = dequant(*quant(row))
    assert bool(((back[:, block:] - 0.1).abs() <= 0.025).all())
    assert bool(((back[:, :block] - 1000).abs() <= 250).all())


def test_scale_rules_by_hand() -> None:
    assert nf.ceilpow2_scale(torch.tensor([448.0, 448.1, 1.0, 0.0]), 1 / 448, 1e-4)[1].tolist() == [
        1, 2, 2**-8, 2**-22,
    ]  # fmt: skip
    assert nf.ceilpow2_scale(torch.tensor([6.0, 6.1, 3.0, 0.0]), 1 / 6, nf.MXFP4_FLOOR)[0].tolist() == [
        127,
        128,
        126,
        1,
    ]
    packed, scale = nf.quant_nvfp4(torch.tensor([[6.0] + [0.0] * 15, [0.0] * 16, [1e6] * 16]))
    assert nf.decode_e4m3(scale).flatten().tolist() == [1.0, 2**-9, 448.0]
    assert packed[0, 0] == 7 and bool((packed[1] == 0).all()) and bool((packed[2] == 0x77).all())


# -- zero rows: C24 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant, dequant", [
    (nf.quant_fp8_ue8m0, nf.dequant_fp8_ue8m0),
    (nf.quant_mxfp4, nf.dequant_mxfp4),
    (nf.quant_nvfp4, nf.dequant_nvfp4),
], ids=["fp8", "mxfp4", "nvfp4"])  # fmt: skip
def test_zero_rows_and_groups(quant, dequant) -> None:
    x = normal(generator(24), 4, 64, dtype=torch.float32)
    x[2] = 0
    x[3, 32:] = 0
    codes, scale = quant(x)
    back = dequant(codes, scale)
    assert back.isfinite().all()
    assert not back[2].any() and not back[3, 32:].any()
    value = nf.decode_e4m3(scale) if quant is nf.quant_nvfp4 else nf.decode_e8m0(scale)
    assert bool((value > 0).all()) and bool(value.isfinite().all())
    alone = dequant(*quant(x[:2]))
    assert_bitwise(back[:2], alone, "rows beside a zero row")


def test_extreme_rows_of_act_quant() -> None:
    x = torch.tensor([1e-45, 3e38, -0.0])[:, None].repeat(1, 32)
    codes, scale = nf.quant_fp8_ue8m0(x)
    back = nf.dequant_fp8_ue8m0(codes, scale)
    assert back.isfinite().all() and not back[0].any() and not back[2].any()
    assert bool(((back[1] - 3e38).abs() < 3e38 / 16).all())
    assert bool((codes.view(torch.uint8)[2] == 0x80).all())  # the sign of zero is kept


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_stays_visible(poison: float) -> None:
    x = torch.ones(1, 64)
    x[0, 3] = poison
    for quant, dequant in ((nf.quant_fp8_ue8m0, nf.dequant_fp8_ue8m0), (nf.quant_mxfp4, nf.dequant_mxfp4)):
        back = dequant(*quant(x))
        assert back[0, :32].isnan().all() and bool((back[0, 32:] == 1).all())


# -- the C++ codecs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host():
    return pytest.importorskip("mini_deepinfer._host", reason="the extension is not built")


def _u8(x: Tensor) -> np.ndarray:
    return x.view(torch.uint8).numpy()


def test_host_codecs_match_the_reference(host) -> None:
    x = float_samples()
    assert np.array_equal(host.encode_e2m1(x.numpy()), nf.encode_e2m1(x).numpy())
    assert np.array_equal(host.encode_e4m3(x.numpy()), _u8(nf.encode_e4m3(x)))
    assert_bitwise(torch.from_numpy(host.decode_e2m1(np.arange(16, dtype=np.uint8))), torch.tensor(E2M1).float())
    assert_bitwise(torch.from_numpy(host.decode_e4m3(BYTES.numpy())), nf.decode_e4m3(BYTES))
    assert_bitwise(torch.from_numpy(host.decode_e8m0(BYTES.numpy())), nf.decode_e8m0(BYTES))
    bf16 = torch.from_numpy(host.float_to_bf16_bits(x.numpy()).view(np.int16)).view(torch.bfloat16)
    assert_bitwise(bf16, x.bfloat16(), "float_to_bf16_bits")


def test_host_scales_match_the_reference(host) -> None:
    amax = float_samples().abs()
    for name, factor, floor in (
        ("act_quant_scale", 1 / nf.FP8_MAX, nf.ACT_QUANT_FLOOR),
        ("mxfp4_scale", 1 / nf.FP4_MAX, nf.MXFP4_FLOOR),
    ):
        scale, value = nf.ceilpow2_scale(amax, factor, floor)
        assert np.array_equal(getattr(host, name)(amax.numpy()), scale.numpy()), name
        finite = value.isfinite()
        product = amax.clamp(min=floor).float() * torch.tensor(factor)
        assert bool((value[finite] >= product[finite]).all()) and bool((value[finite] / 2 < product[finite]).all())
    expected = nf.encode_e4m3(amax.clamp(min=nf.NVFP4_FLOOR) / 6.0)
    assert np.array_equal(host.nvfp4_scale(amax.numpy()), _u8(expected))


def test_inverse_scale_is_division(host) -> None:
    inverse = torch.from_numpy(host.inverse_e8m0(BYTES.numpy()))
    assert torch.equal(inverse[:255] * nf.decode_e8m0(BYTES)[:255], torch.ones(255)) and inverse[255].isnan()
    x = normal(generator(1), 255, 64, dtype=torch.float32)
    assert_bitwise(x * inverse[:255, None], x / nf.decode_e8m0(BYTES)[:255, None], "x / scale")


def test_pair_decoders(host) -> None:
    pairs = torch.from_numpy(host.fp4_to_bf16_bits(BYTES.numpy()).view(np.int16)).view(torch.bfloat16)
    assert_bitwise(pairs, nf.decode_e2m1(nf.unpack_fp4(BYTES)).bfloat16(), "fp4x2_to_bf16x2")
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    words = torch.cat((halves, halves.flip(0)))
    out = torch.from_numpy(host.fp4_words_to_bf16_bits(words.numpy()).view(np.int16)).view(torch.bfloat16)
    assert_bitwise(out, nf.decode_e2m1(nf.unpack_fp4(words)).bfloat16(), "fp4x8_to_bf16x8")
    out = torch.from_numpy(host.fp8_to_bf16_bits(halves.numpy()).view(np.int16)).view(torch.bfloat16)
    assert_bitwise(out, nf.decode_e4m3(halves).bfloat16(), "fp8x2_to_bf16x2")
    factor = torch.from_numpy(host.e8m0_to_bf16_bits(BYTES.numpy()).view(np.int16)).view(torch.bfloat16)
    assert_bitwise(factor.float(), nf.decode_e8m0(BYTES), "e8m0_to_bf16_bits")


def test_gather_rows(host, tmp_path: Path) -> None:
    table = np.memmap(tmp_path / "table", dtype=np.uint8, mode="w+", shape=(1000, 24))
    table[:] = np.random.default_rng(0).integers(0, 256, table.shape, dtype=np.uint8)
    ids = np.random.default_rng(1).integers(0, 1000, 777)
    ids[:3] = 0, 999, 999
    for threads in (1, 3, 64):
        assert np.array_equal(host.gather_rows(table, ids, threads), table[ids])
    assert host.gather_rows(table, ids[:0], 2).shape == (0, 24)
    assert np.array_equal(host.gather_rows(table[:, :16], ids, 2), table[ids, :16])
    for bad in (-1, 1000):
        with pytest.raises(IndexError, match=rf"row_ids\[1\] must be in 0..999, got {bad}"):
            host.gather_rows(table, np.array([5, bad]), 2)
    with pytest.raises(TypeError):
        host.gather_rows(table.astype(np.int32), ids, 1)
    with pytest.raises(ValueError, match="num_threads"):
        host.gather_rows(table, ids, 0)


def test_codecs_match_the_vendor_headers(tmp_path: Path) -> None:
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    compiler = shutil.which("g++")
    if compiler is None or not (home / "include/cuda_fp4.h").exists():
        pytest.skip(f"needs g++ and {home}/include/cuda_fp4.h")
    program = tmp_path / "codecs"
    source = ROOT / "tests/host/codecs_against_vendor.cpp"
    subprocess.run(
        [compiler, "-std=c++17", "-O2", f"-I{home}/include", f"-I{ROOT}/csrc", str(source), "-o", str(program)],
        check=True,
    )
    run = subprocess.run([str(program), "257"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


# -- the op wrappers -------------------------------------------------------------------------------------------------


def test_expand_on_the_cpu_is_the_reference() -> None:
    codes, scale = nf.quant_fp8_ue8m0(normal(generator(2), 5, 64))
    assert_bitwise(elementwise.expand_fp8(codes, scale), nf.expand_fp8(codes, scale))
    assert_bitwise(elementwise.expand_fp8(codes.view(torch.uint8), scale), nf.expand_fp8(codes, scale))
    packed, scale = nf.quant_mxfp4(normal(generator(3), 5, 64))
    assert_bitwise(elementwise.expand_fp4(packed, scale), nf.expand_fp4(packed, scale))
    assert elementwise.expand_fp4(packed[:0], scale[:0]).shape == (0, 64)
