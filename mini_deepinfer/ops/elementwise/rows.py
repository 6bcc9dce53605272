"""Ops on single rows: RMSNorm, activation quantisation, rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import call, select
from mini_deepinfer.ops._operands import COMPUTE_DTYPES, check_eps, check_groups, check_operand, check_out, check_rotary
from mini_deepinfer.ops.reference import elementwise as reference


def check_norm(op: str, x: Tensor, width: int, weight: Tensor, eps: float) -> None:
    check_operand(op, "weight", weight, COMPUTE_DTYPES, {"N": width}, x)
    check_eps(op, "eps", eps)


def new_codes(x: Tensor, tokens: int, width: int, folded: bool, groups: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((tokens, *groups, width), dtype=torch.float8_e4m3fn)
    if folded:
        return codes, x.new_empty((tokens, *groups), dtype=torch.float32)
    return codes, x.new_empty((tokens, *groups, width // 32), dtype=torch.uint8)


def reference_quant(x: Tensor, folded: bool) -> tuple[Tensor, Tensor]:
    return reference.act_quant_folded(x) if folded else reference.act_quant(x)


# -- norms and activation quantisation -------------------------------------------------------------------------------


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, impl: str | None = None) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dim in float32, one rounding at the end (model spec 3.6).

    Shapes: T rows, N columns; on CUDA N % 32 == 0 and N <= 16384.
        x       [T, N]  bfloat16 (float32 in the reference), last dim contiguous, row stride a multiple of 8
        weight  [N]     bfloat16 or float32
    Returns:
        [T, N] of x's dtype; an all-zero row gives zeros, a NaN in a row makes the row NaN
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or eps
        RuntimeError           strides or widths the kernel does not take; GPU or build cannot run it
    Deterministic, a row does not depend on the others. Synchronises: no. Workspace: none.
    Kernel: csrc/elementwise/rmsnorm_quant.cu. Reference: ops.reference.elementwise.rmsnorm.
    """
    op = "elementwise.rmsnorm"
    check_operand(op, "x", x, COMPUTE_DTYPES, {"T": None, "N": None})
    check_norm(op, x, x.shape[1], weight, eps)
    impl = select(op, x, impl=impl)
    if impl == "reference":
        return reference.rmsnorm(x, weight, eps)
    out = x.new_empty(x.shape)
    if x.shape[0]:
        call(op, impl, x, weight, eps, out)
    return out


def act_quant(x: Tensor, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """FP8 with one power-of-two scale per 32 columns: s = ceilpow2(max(amax, 1e-4) * fp32(1/448)) (model spec 8).

    Shapes: T rows, K columns, K % 32 == 0; on CUDA K <= 16384.
        x  [T, K]  bfloat16 (float32 in the reference), last dim contiguous, row stride a multiple of 8
    Returns:
        codes  [T, K]     float8_e4m3fn, round to nearest even, saturating
        scale  [T, K/32]  uint8, E8M0 bytes; at least 105 (2^-22), so a zero group decodes to exact zeros.
                          A group that holds NaN or Inf gets byte 255 and NaN codes.
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/rmsnorm_quant.cu. Reference: ops.reference.elementwise.act_quant.
    """
    return _act_quant("elementwise.act_quant", x, False, impl)


def act_quant_folded(x: Tensor, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """`act_quant`, then every code re-expressed at the row's largest group scale: operands of a row-scaled FP8 GEMM.

    Values above rowmax / 28,500 keep their quantised value exactly, smaller ones round to the nearest E4M3 value.

    Shapes: T rows, K columns, K % 32 == 0; on CUDA K <= 16384.
        x  [T, K]  bfloat16 (float32 in the reference), last dim contiguous, row stride a multiple of 8
    Returns:
        codes      [T, K]  float8_e4m3fn
        row_scale  [T]     float32, a power of two (NaN when the row holds NaN or Inf)
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/rmsnorm_quant.cu. Reference: ops.reference.elementwise.act_quant_folded.
    """
    return _act_quant("elementwise.act_quant_folded", x, True, impl)


def _act_quant(op: str, x: Tensor, folded: bool, impl: str | None) -> tuple[Tensor, Tensor]:
    check_operand(op, "x", x, COMPUTE_DTYPES, {"T": None, "K": None})
    check_groups(op, "x", x.shape[1])
    impl = select(op, x, impl=impl)
    if impl == "reference":
        return reference_quant(x, folded)
    codes, scale = new_codes(x, x.shape[0], x.shape[1], folded)
    if x.shape[0]:
        call(op, impl, x, codes, scale)
    return codes, scale


def rmsnorm_quant(
    x: Tensor, weight: Tensor, eps: float, *, folded: bool, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`rmsnorm` and `act_quant` (or `act_quant_folded`) of its result in one pass, with the bits of the two ops.

    Shapes: T rows, N columns, N % 32 == 0; on CUDA N <= 16384.
        x       [T, N]  bfloat16 (float32 in the reference), last dim contiguous, row stride a multiple of 8
        weight  [N]     bfloat16 or float32
    Returns:
        y      [T, N]  of x's dtype, the norm
        codes  [T, N]  float8_e4m3fn
        scale  [T, N/32] uint8 E8M0 bytes, or with folded=True [T] float32 row scales
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/rmsnorm_quant.cu. Reference: the composition of the two reference ops.
    """
    op = "elementwise.rmsnorm_quant"
    check_operand(op, "x", x, COMPUTE_DTYPES, {"T": None, "N": None})
    check_groups(op, "x", x.shape[1])
    check_norm(op, x, x.shape[1], weight, eps)
    impl = select(op, x, impl=impl)
    if impl == "reference":
        y = reference.rmsnorm(x, weight, eps)
        return y, *reference_quant(y, folded)
    y = x.new_empty(x.shape)
    codes, scale = new_codes(x, x.shape[0], x.shape[1], folded)
    if x.shape[0]:
        call(op, impl, x, weight, eps, y, codes, scale)
    return y, codes, scale


def fold_scales(codes: Tensor, scale: Tensor, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Re-express quantised rows at their largest group scale: the second half of `act_quant_folded`.

    Shapes: T rows, K columns, K % 32 == 0.
        codes  [T, K]     float8_e4m3fn, contiguous
        scale  [T, K/32]  uint8, E8M0 bytes, contiguous
    Returns:
        codes      [T, K]  float8_e4m3fn
        row_scale  [T]     float32
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/rmsnorm_quant.cu. Reference: ops.reference.elementwise.fold_scales.
    """
    op = "elementwise.fold_scales"
    check_operand(op, "codes", codes, (torch.float8_e4m3fn,), {"T": None, "K": None})
    tokens, width = codes.shape
    check_groups(op, "codes", width)
    check_operand(op, "scale", scale, (torch.uint8,), {"T": tokens, "K/32": width // 32}, codes)
    impl = select(op, codes, impl=impl)
    if impl == "reference":
        return reference.fold_scales(codes, scale)
    folded, row_scale = new_codes(codes, tokens, width, True)
    if tokens:
        call(op, impl, codes, scale, folded, row_scale)
    return folded, row_scale


# -- rotary embedding --------------------------------------------------------------------------------------------------


def _check_rope(op: str, x: Tensor, positions: Tensor, table: Tensor) -> None:
    check_operand(op, "x", x, COMPUTE_DTYPES, {"T": None, "h": None, "d": None})
    check_rotary(op, "x", x, positions, table)


def rope(
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    inverse: bool = False,
    *,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Rotate the last R of d columns in adjacent pairs: (a*c - b*s, a*s + b*c) in float32 (model spec 4.2).

    The products are rounded on their own, never contracted into fused multiply-adds; one rounding to x's dtype.

    Shapes: T tokens, h heads, d head dim, R rotary dims, P positions; d and R even, R <= d.
        x          [T, h, d]     bfloat16 (float32 in the reference), heads contiguous, any even token stride
        positions  [T]           int32, 0 <= positions[t] < P (not checked on CUDA: that would wait for the GPU)
        table      [P, R/2, 2]   float32, (cos, sin)
        inverse                  rotate by minus the angle
        out        [T, h, d]     as x, optional; may be x itself, must not overlap it otherwise
    Returns:
        [T, h, d]: out, or a new tensor; the first d - R columns are x's, bit for bit
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/rope.cu. Reference: ops.reference.elementwise.rope.
    """
    op = "elementwise.rope"
    _check_rope(op, x, positions, table)
    out = check_out(op, out, x, "T", "h", "d")
    impl = select(op, x, impl=impl)
    if impl == "reference":
        return reference.rope(x, positions, table, inverse, out)
    if x.numel():
        call(op, impl, x, positions, table, inverse, out)
    return out


def rope_quant(
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    groups: int,
    inverse: bool = False,
    *,
    folded: bool,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`rope`, then `act_quant` (or `act_quant_folded`) of every group of heads as a row of its own (spec 4.7); x is not changed.

    Shapes: T tokens, h heads, d head dim, R rotary dims, P positions, g groups, K = h*d/g; on CUDA d, R % 8 == 0, K <= 16384.
        x          [T, h, d]     bfloat16 (float32 in the reference), contiguous on CUDA; h % g == 0, K % 32 == 0
        positions  [T]           int32, as in rope
        table      [P, R/2, 2]   float32, (cos, sin)
        groups                   g
        inverse                  rotate by minus the angle
    Returns:
        codes  [T, g, K]     float8_e4m3fn
        scale  [T, g, K/32]  uint8 E8M0 bytes, or with folded=True [T, g] float32 row scales
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/rmsnorm_quant.cu. Reference: ops.reference.elementwise.rope_quant.
    """
    op = "elementwise.rope_quant"
    _check_rope(op, x, positions, table)
    tokens, heads, dim = x.shape
    if groups < 1 or heads % groups:
        raise ValueError(f"{op}: groups must divide the h={heads} heads of x, got {groups}")
    width = heads // groups * dim
    check_groups(op, "a group of heads of x", width)
    impl = select(op, x, impl=impl)
    if impl == "reference":
        return reference.rope_quant(x, positions, table, groups, inverse, folded=folded)
    codes, scale = new_codes(x, tokens, width, folded, (groups,))
    if tokens:
        call(op, impl, x, positions, table, inverse, codes, scale)
    return codes, scale
