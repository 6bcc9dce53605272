"""Exact bfloat16 values of quantised rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import call, select
from mini_deepinfer.ops._operands import check_operand
from mini_deepinfer.ops.reference import number_formats as reference


def _check_expand(op: str, name: str, codes: Tensor, dtypes: tuple[torch.dtype, ...], per_byte: int, scale: Tensor) -> None:
    check_operand(op, name, codes, dtypes, {"M": None, "bytes": None})
    width = codes.shape[1] * per_byte
    if width % 32:
        raise ValueError(f"{op}: {name} must hold a multiple of 32 columns, got K={width}")
    check_operand(op, "scale", scale, (torch.uint8,), {"M": codes.shape[0], "K/32": width // 32}, codes)


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
    _check_expand(op, "codes", codes, (torch.float8_e4m3fn, torch.uint8), 1, scale)
    impl = select(op, codes, impl=impl)
    if impl == "reference":
        return reference.expand_fp8(codes, scale)
    out = codes.new_empty(codes.shape, dtype=torch.bfloat16)
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
    _check_expand(op, "packed", packed, (torch.uint8,), 2, scale)
    impl = select(op, packed, impl=impl)
    if impl == "reference":
        return reference.expand_fp4(packed, scale)
    out = packed.new_empty((packed.shape[0], packed.shape[1] * 2), dtype=torch.bfloat16)
    call(op, impl, packed, scale, out)
    return out
