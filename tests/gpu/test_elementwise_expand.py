"""elementwise.expand_fp8 and expand_fp4 on the GPU: bit for bit the reference, for every code and every scale."""

from __future__ import annotations

import pytest
import torch

from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops._dispatch import call
from mini_deepinfer.ops.reference import number_formats as nf
from tests.inputs import Canary, generator, random_bytes
from tests.numerics import assert_bitwise


def test_every_fp4_byte_and_scale(cuda: torch.device) -> None:
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(256, 1)  # row s: all bytes under scale s
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].repeat(1, 16)
    out = elementwise.expand_fp4(packed.to(cuda), scale.to(cuda), impl="portable")
    assert_bitwise(out, nf.expand_fp4(packed, scale), "expand_fp4")


def test_every_fp8_code_and_scale(cuda: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.int32).to(torch.uint8)[:, None].repeat(1, 8)
    out = elementwise.expand_fp8(codes.to(cuda), scale.to(cuda), impl="portable")
    assert_bitwise(out, nf.expand_fp8(codes, scale), "expand_fp8")


@pytest.mark.parametrize("m, k", [(0, 64), (1, 32), (3, 96), (257, 5120), (1000, 2048)])
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_shapes_and_repeat(cuda: torch.device, kind: str, m: int, k: int) -> None:
    g = generator(m + k)
    codes = random_bytes(g, m, k if kind == "fp8" else k // 2)
    scale = random_bytes(g, m, k // 32)
    op = getattr(elementwise, f"expand_{kind}")
    first = op(codes.to(cuda), scale.to(cuda))
    assert_bitwise(first, getattr(nf, f"expand_{kind}")(codes, scale), f"expand_{kind}")
    assert_bitwise(op(codes.to(cuda), scale.to(cuda)), first, "second run")


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_writes_nothing_outside(cuda: torch.device, kind: str) -> None:
    g = generator(5)
    codes, scale = random_bytes(g, 33, 96 if kind == "fp8" else 48).to(cuda), random_bytes(g, 33, 3).to(cuda)
    out = Canary((33, 96), torch.bfloat16, cuda)
    call(f"elementwise.expand_{kind}", "portable", codes, scale, out.tensor)
    out.check()
    assert_bitwise(out.tensor, getattr(nf, f"expand_{kind}")(codes, scale))


def test_strided_input_is_refused(cuda: torch.device) -> None:
    codes = torch.zeros(4, 128, dtype=torch.uint8, device=cuda)[:, :64]
    with pytest.raises(RuntimeError, match=r"expand_fp8: codes must be contiguous"):
        elementwise.expand_fp8(codes, torch.zeros(4, 2, dtype=torch.uint8, device=cuda))


@pytest.mark.big
def test_offsets_past_2_31(cuda: torch.device) -> None:
    m, k = (1 << 31) // 8192 + 3, 8192
    packed = torch.zeros(m, k // 2, dtype=torch.uint8, device=cuda)
    packed[-1] = 0x21
    scale = torch.full((m, k // 32), 127, dtype=torch.uint8, device=cuda)
    out = elementwise.expand_fp4(packed, scale)
    assert_bitwise(out[-1], nf.expand_fp4(packed[-1:].cpu(), scale[-1:].cpu())[0])
    assert int(out[:-1].count_nonzero()) == 0
