"""The low-precision number formats in plain PyTorch: bit layouts, rounding and scale rules (model spec 2.2, 4.4 and 8).

E2M1 ("FP4") codes are 0..15 in a uint8, sign in bit 3; two codes a byte, the even element in the low nibble.
E4M3 codes are torch.float8_e4m3fn (or their bytes in a uint8). E8M0 bytes are 2^(byte - 127): byte 0 is the subnormal
2^-127 and byte 255 is NaN.

Rounding is to nearest, ties to the even code; signed zero is kept. Values that are not finite: a group that holds NaN
or an infinity gets the scale byte 255 and decodes to NaN (E8M0 scales); with E4M3 scales an infinity saturates and a
NaN makes the scale NaN.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

FP8_MAX = 448.0
FP4_MAX = 6.0
ACT_QUANT_FLOOR = 1e-4  # lowest amax of the fp8 1x32 rule: scale >= 2^-22 and a zero row stays finite
MXFP4_FLOOR = 6.0 * 2.0**-126
NVFP4_FLOOR = 6.0 * 2.0**-9

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Values of E2M1 codes. codes: uint8 in 0..15, any shape -> float32, same shape; -0 is kept."""
    return _e2m1_table(codes.device)[codes.long()]


@cache
def _e2m1_table(device: torch.device) -> Tensor:
    return torch.tensor([*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)], dtype=torch.float32, device=device)


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 code, ties to the even code, saturating at 6; NaN gives +6. x: float -> uint8, same shape."""
    x = x.float()
    m = x.abs()
    code = (m > 0.25).to(torch.uint8)  # the midpoint goes to the even code: > below it, >= above it
    for step, midpoint in enumerate((0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (m >= midpoint) if step % 2 == 0 else (m > midpoint)
    code |= torch.signbit(x).to(torch.uint8) << 3
    return torch.where(x.isnan(), torch.full_like(code, 7), code)


def pack_fp4(codes: Tensor) -> Tensor:
    """codes [.., K] uint8 0..15 -> [.., K/2] uint8, even element in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"pack_fp4: codes must have an even last dimension, got {list(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """packed [.., K/2] uint8 -> codes [.., K] uint8 0..15, low nibble first."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Values of E4M3 codes (float8_e4m3fn, or their uint8 bytes) as float32; 0x7f and 0xff are NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def encode_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 code, ties to even, saturating at 448; NaN gives 0x7f. x: float -> float8_e4m3fn, same shape."""
    x = x.float()
    codes = x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, 0x7F), codes).view(torch.float8_e4m3fn)


def decode_e8m0(scale: Tensor) -> Tensor:
    """2^(byte - 127) of uint8 bytes as float32: byte 0 is 2^-127 (bits 0x00400000), byte 255 is NaN."""
    return _e8m0_table(scale.device)[scale.long()]


@cache
def _e8m0_table(device: torch.device) -> Tensor:
    bits = torch.arange(256, dtype=torch.int32, device=device) << 23
    bits[0], bits[255] = 0x00400000, 0x7FC00000
    return bits.view(torch.float32)


def ceilpow2_scale(amax: Tensor, factor: float, floor: float) -> tuple[Tensor, Tensor]:
    """The power-of-two scale of a group: the least power of two >= max(amax, floor) * factor (model spec 4.4, 8).

    The product is one float32 multiply by the float32 constant `factor`. amax: float, any shape, >= 0.
    Returns (E8M0 byte uint8, value float32), both of amax's shape; NaN or infinite amax gives byte 255, value NaN.
    """
    amax = amax.float()
    product = amax.clamp(min=floor) * torch.tensor(factor, dtype=torch.float32, device=amax.device)
    bits = product.view(torch.int32).long() & 0x7FFFFFFF
    scale = ((bits + 0x7FFFFF) >> 23).clamp(max=255).to(torch.uint8)
    return scale, decode_e8m0(scale)


def _groups(x: Tensor, block: int, what: str) -> Tensor:
    if x.shape[-1] % block:
        raise ValueError(f"{what}: the last dimension must be a multiple of {block}, got {list(x.shape)}")
    return x.float().unflatten(-1, (x.shape[-1] // block, block))


def quant_fp8_ue8m0(x: Tensor, block: int = 32, floor: float = ACT_QUANT_FLOOR) -> tuple[Tensor, Tensor]:
    """FP8 with one power-of-two scale per `block` columns (act_quant, model spec 8; window rows, 4.4).

    x [.., K] float -> (codes [.., K] float8_e4m3fn, scale [.., K/block] uint8 E8M0).
    """
    groups = _groups(x, block, "quant_fp8_ue8m0")
    scale, value = ceilpow2_scale(groups.abs().amax(-1), 1.0 / FP8_MAX, floor)
    return encode_e4m3(groups / value.unsqueeze(-1)).flatten(-2), scale


def dequant_fp8_ue8m0(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [.., K] e4m3 or uint8, scale [.., K/block] uint8 E8M0 -> float32 [.., K] (exact)."""
    values = decode_e4m3(codes).unflatten(-1, (scale.shape[-1], -1))
    return (values * decode_e8m0(scale).unsqueeze(-1)).flatten(-2)


def quant_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 with one power-of-two scale per 32 columns (index keys and queries, model spec 4.4).

    x [.., K] float -> (packed [.., K/2] uint8, scale [.., K/32] uint8 E8M0).
    """
    groups = _groups(x, 32, "quant_mxfp4")
    scale, value = ceilpow2_scale(groups.abs().amax(-1), 1.0 / FP4_MAX, MXFP4_FLOOR)
    return pack_fp4(encode_e2m1(groups / value.unsqueeze(-1)).flatten(-2)), scale


def dequant_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """packed [.., K/2] uint8, scale [.., K/32] uint8 E8M0 -> float32 [.., K] (overflow past 2^128 gives Inf)."""
    values = decode_e2m1(unpack_fp4(packed)).unflatten(-1, (scale.shape[-1], -1))
    return (values * decode_e8m0(scale).unsqueeze(-1)).flatten(-2)


def quant_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 with one E4M3 scale per 16 columns, no global scale (compressed rows, model spec 4.4).

    scale = e4m3(max(amax, 6 * 2^-9) / 6), a true division; codes = e2m1(x / scale), a true division.
    x [.., K] float -> (packed [.., K/2] uint8, scale [.., K/16] uint8 holding E4M3 codes).
    """
    groups = _groups(x, 16, "quant_nvfp4")
    scale = encode_e4m3(groups.abs().amax(-1).clamp(min=NVFP4_FLOOR) / FP4_MAX)
    return pack_fp4(encode_e2m1(groups / scale.float().unsqueeze(-1)).flatten(-2)), scale.view(torch.uint8)


def dequant_nvfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """packed [.., K/2] uint8, scale [.., K/16] uint8 E4M3 codes -> float32 [.., K] (exact)."""
    values = decode_e2m1(unpack_fp4(packed)).unflatten(-1, (scale.shape[-1], -1))
    return (values * decode_e4m3(scale).unsqueeze(-1)).flatten(-2)


def expand_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [M, K] e4m3 or uint8, scale [M, K/32] uint8 E8M0 -> bf16 [M, K] (exact; bf16 subnormals are kept)."""
    return dequant_fp8_ue8m0(codes, scale).bfloat16()


def expand_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """packed [M, K/2] uint8, scale [M, K/32] uint8 E8M0 -> bf16 [M, K] (exact; bf16 subnormals are kept)."""
    return dequant_mxfp4(packed, scale).bfloat16()
