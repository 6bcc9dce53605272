"""Elementwise ops: number formats, norms, rotary embedding, hyper-connections, engram gate."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import call, select
from mini_deepinfer.ops.reference import number_formats

# -- number formats ------------------------------------------------------------------------------------------------


def _check_expand(op: str, codes: Tensor, per_byte: int, scale: Tensor, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if codes.dim() != 2:
        raise ValueError(f"{op}: {name} must have two dimensions, got {list(codes.shape)}")
    if codes.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be {wanted}, got {codes.dtype}")
    if scale.dtype != torch.uint8:
        raise TypeError(f"{op}: scale must be uint8 (E8M0 bytes), got {scale.dtype}. Use scale.view(torch.uint8).")
    m, k = codes.shape[0], codes.shape[1] * per_byte
    if k % 32:
        raise ValueError(f"{op}: {name} must hold a multiple of 32 columns, got K={k}")
    if tuple(scale.shape) != (m, k // 32):
        raise ValueError(f"{op}: scale must be uint8 [M={m}, K/32={k // 32}], got {list(scale.shape)}")
    if scale.device != codes.device:
        raise ValueError(f"{op}: scale must be on {codes.device} like {name}, got {scale.device}")


def expand_fp8(codes: Tensor, scale: Tensor, *, impl: str | None = None) -> Tensor:
    """Exact bf16 values of FP8 rows with one power-of-two scale per 32 columns (model spec 4.4, 8).

    Shapes: M rows, K columns, K % 32 == 0.
        codes  [M, K]     float8_e4m3fn or uint8 (E4M3 codes), contiguous on CUDA
        scale  [M, K/32]  uint8, E8M0 bytes, contiguous on CUDA
    Returns:
        [M, K] bfloat16; codes 0x7f and 0xff and scale byte 255 give NaN, bf16 subnormals are kept
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device
        RuntimeError           not contiguous on CUDA; GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none.
    Kernel: csrc/elementwise/expand.cu. Reference: ops.reference.number_formats.expand_fp8.
    """
    op = "elementwise.expand_fp8"
    _check_expand(op, codes, 1, scale, "codes", (torch.float8_e4m3fn, torch.uint8))
    impl = select(op, codes, impl=impl)
    if impl == "reference":
        return number_formats.expand_fp8(codes, scale)
    out = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    call(op, impl, codes, scale, out)
    return out


def expand_fp4(packed: Tensor, scale: Tensor, *, impl: str | None = None) -> Tensor:
    """Exact bf16 values of packed FP4 rows with one power-of-two scale per 32 columns (model spec 2.2, 4.4).

    Shapes: M rows, K columns, K % 32 == 0.
        packed  [M, K/2]   uint8, two E2M1 codes a byte, even element in the low nibble, contiguous on CUDA
        scale   [M, K/32]  uint8, E8M0 bytes, contiguous on CUDA
    Returns:
        [M, K] bfloat16; scale byte 255 gives NaN, byte 0 is 2^-127, values past 2^128 are Inf
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device
        RuntimeError           not contiguous on CUDA; GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none.
    Kernel: csrc/elementwise/expand.cu. Reference: ops.reference.number_formats.expand_fp4.
    """
    op = "elementwise.expand_fp4"
    _check_expand(op, packed, 2, scale, "packed", (torch.uint8,))
    impl = select(op, packed, impl=impl)
    if impl == "reference":
        return number_formats.expand_fp4(packed, scale)
    out = torch.empty((packed.shape[0], packed.shape[1] * 2), dtype=torch.bfloat16, device=packed.device)
    call(op, impl, packed, scale, out)
    return out


# -- norms, rotary embedding, hyper-connections, engram gate ---------------------------------------------------------
