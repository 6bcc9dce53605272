"""Elementwise ops: number formats, norms, rotary embedding, hyper-connections, engram gate."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import call, register_self_test, select
from mini_deepinfer.ops._operands import COMPUTE_DTYPES, check_eps, check_groups, check_operand, check_rotary
from mini_deepinfer.ops.reference import elementwise as reference
from mini_deepinfer.ops.reference import number_formats

# -- number formats ------------------------------------------------------------------------------------------------


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
    _check_expand(op, "packed", packed, (torch.uint8,), 2, scale)
    impl = select(op, packed, impl=impl)
    if impl == "reference":
        return number_formats.expand_fp4(packed, scale)
    out = torch.empty((packed.shape[0], packed.shape[1] * 2), dtype=torch.bfloat16, device=packed.device)
    call(op, impl, packed, scale, out)
    return out


def _expand_self_test(device: torch.device) -> dict[str, Tensor]:
    """Every byte under 32 scales spread over the range, the subnormal and the NaN one included."""
    every = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)
    scale = torch.cat((every[::9], every[-1:]))[:, None]
    rows = every.repeat(scale.shape[0], 1)
    return {"codes": rows, "fp8_scale": scale.repeat(1, 8), "fp4_scale": scale.repeat(1, 16)}


register_self_test(
    "elementwise.expand_fp8",
    _expand_self_test,
    lambda inputs, impl: expand_fp8(inputs["codes"], inputs["fp8_scale"], impl=impl),
    bound=0.0,
)
register_self_test(
    "elementwise.expand_fp4",
    _expand_self_test,
    lambda inputs, impl: expand_fp4(inputs["codes"], inputs["fp4_scale"], impl=impl),
    bound=0.0,
)


# -- checks of the ops below ---------------------------------------------------------------------------------------

_F32 = (torch.float32,)


def _check_norm(op: str, x: Tensor, width: int, weight: Tensor, eps: float) -> None:
    check_operand(op, "weight", weight, COMPUTE_DTYPES, {"N": width}, x)
    check_eps(op, "eps", eps)


def _check_streams(op: str, streams: Tensor) -> tuple[int, int, int]:
    check_operand(op, "streams", streams, COMPUTE_DTYPES, {"T": None, "n": None, "N": None})
    tokens, num_streams, width = streams.shape
    if not 1 <= num_streams <= 4:
        raise ValueError(f"{op}: streams must have n = 1..4 streams, got n={num_streams}")
    return tokens, num_streams, width


def _check_out(op: str, out: Tensor | None, like: Tensor) -> Tensor:
    """`out` after its checks, or a new tensor like `like`."""
    if out is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    check_operand(op, "out", out, (like.dtype,), {f"dim{i}": size for i, size in enumerate(like.shape)}, like)
    return out


def _new_codes(x: Tensor, tokens: int, width: int, folded: bool, groups: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    codes = torch.empty((tokens, *groups, width), dtype=torch.float8_e4m3fn, device=x.device)
    if folded:
        return codes, torch.empty((tokens, *groups), dtype=torch.float32, device=x.device)
    return codes, torch.empty((tokens, *groups, width // 32), dtype=torch.uint8, device=x.device)


def _reference_quant(x: Tensor, folded: bool) -> tuple[Tensor, Tensor]:
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
    _check_norm(op, x, x.shape[1], weight, eps)
    impl = select(op, x, impl=impl)
    if impl == "reference":
        return reference.rmsnorm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
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
        return _reference_quant(x, folded)
    codes, scale = _new_codes(x, x.shape[0], x.shape[1], folded)
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
    _check_norm(op, x, x.shape[1], weight, eps)
    impl = select(op, x, impl=impl)
    if impl == "reference":
        y = reference.rmsnorm(x, weight, eps)
        return y, *_reference_quant(y, folded)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    codes, scale = _new_codes(x, x.shape[0], x.shape[1], folded)
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
    folded, row_scale = _new_codes(codes, tokens, width, True)
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
    out = _check_out(op, out, x)
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
    codes, scale = _new_codes(x, tokens, width, folded, (groups,))
    if tokens:
        call(op, impl, x, positions, table, inverse, codes, scale)
    return codes, scale


# -- hyper-connections -------------------------------------------------------------------------------------------------


def _check_coefficients(op: str, streams: Tensor, post: Tensor, comb: Tensor) -> None:
    tokens, num_streams, _ = streams.shape
    check_operand(op, "post", post, _F32, {"T": tokens, "n": num_streams}, streams)
    check_operand(op, "comb", comb, _F32, {"T": tokens, "n": num_streams, "n ": num_streams}, streams)


def _check_mix(
    op: str, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, sinkhorn_iters: int, hc_eps: float, norm_eps: float
) -> None:
    _, n, width = _check_streams(op, streams)
    mixes = 2 * n + n * n
    check_operand(op, "fn", fn, _F32, {"2n+n*n": mixes, "n*N": n * width}, streams)
    check_operand(op, "base", base, _F32, {"2n+n*n": mixes}, streams)
    check_operand(op, "scale", scale, _F32, {"3": 3}, streams)
    if sinkhorn_iters < 1:
        raise ValueError(f"{op}: sinkhorn_iters must be >= 1, got {sinkhorn_iters}")
    check_eps(op, "hc_eps", hc_eps)
    check_eps(op, "norm_eps", norm_eps)


def _new_coefficients(streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Workspace (partial sums of 160 columns a slice), pre, post, comb."""
    tokens, n, width = streams.shape
    floats = tokens * -(-width // 160) * (-(-(2 * n + n * n) // 8) * 8 + 4)
    workspace, pre, post, comb = (
        torch.empty(shape, dtype=torch.float32, device=streams.device)
        for shape in ((floats,), (tokens, n), (tokens, n), (tokens, n, n))
    )
    return workspace, pre, post, comb


def hc_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of a hyper-connection site from the current streams, all float32 (model spec 3.3, 3.4).

    Shapes: T tokens, n streams (1..4), N hidden; on CUDA N % 8 == 0.
        streams  [T, n, N]         bfloat16 (float32 in the reference), contiguous
        fn       [2n + n*n, n*N]   float32: rows for pre, post, then comb (row-major), columns stream-major
        base     [2n + n*n]        float32
        scale    [3]               float32, of pre, post and comb
        sinkhorn_iters             >= 1; each ends on the columns
        hc_eps, norm_eps           added to pre and inside sinkhorn; added to the mean square
    Returns:
        pre   [T, n]     float32, weights of the next sublayer's `hc_collapse`
        post  [T, n]     float32, weights of this sublayer's output in `hc_expand`
        comb  [T, n, n]  float32, row = input stream, column = output stream; the columns sum to 1
    Raises: as rmsnorm. Deterministic and independent of T. Synchronises: no.
    Workspace: T * ceil(N / 160) * (round8(2n + n*n) + 4) floats, allocated here.
    Kernel: csrc/elementwise/hc_mix.cu. Reference: ops.reference.elementwise.hc_mix.
    """
    op = "elementwise.hc_mix"
    _check_mix(op, streams, fn, base, scale, sinkhorn_iters, hc_eps, norm_eps)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        return reference.hc_mix(streams, fn, base, scale, sinkhorn_iters, hc_eps, norm_eps)
    workspace, *coefficients = _new_coefficients(streams)
    if streams.shape[0]:
        call(op, impl, streams, fn, base, scale, sinkhorn_iters, hc_eps, norm_eps, workspace, *coefficients)
    pre, post, comb = coefficients
    return pre, post, comb


def hc_collapse(streams: Tensor, pre: Tensor, *, impl: str | None = None) -> Tensor:
    """sum_s pre[t, s] * streams[t, s] in float32, streams ascending, rounded once: a sublayer's input (model spec 3.2).

    Shapes: T tokens, n streams (1..4), N hidden; on CUDA N % 32 == 0 and N <= 10240.
        streams  [T, n, N]  bfloat16 (float32 in the reference), contiguous
        pre      [T, n]     float32, from the PREVIOUS sublayer's `hc_mix`
    Returns:
        [T, N] of streams' dtype
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/rmsnorm_quant.cu. Reference: ops.reference.elementwise.hc_collapse.
    """
    op = "elementwise.hc_collapse"
    tokens, n, width = _check_streams(op, streams)
    check_operand(op, "pre", pre, _F32, {"T": tokens, "n": n}, streams)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        return reference.hc_collapse(streams, pre)
    out = torch.empty((tokens, width), dtype=streams.dtype, device=streams.device)
    if tokens:
        call(op, impl, streams, pre, out)
    return out


def hc_collapse_norm(streams: Tensor, pre: Tensor, weight: Tensor, eps: float, *, impl: str | None = None) -> Tensor:
    """`rmsnorm` of `hc_collapse` in one pass, with the bits of the two ops (the collapse is rounded before the norm).

    Shapes, dtypes and limits: as hc_collapse; weight [N] bfloat16 or float32.
    Returns:
        [T, N] of streams' dtype
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/rmsnorm_quant.cu. Reference: the composition of the two reference ops.
    """
    op = "elementwise.hc_collapse_norm"
    tokens, n, width = _check_streams(op, streams)
    check_operand(op, "pre", pre, _F32, {"T": tokens, "n": n}, streams)
    _check_norm(op, streams, width, weight, eps)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        return reference.rmsnorm(reference.hc_collapse(streams, pre), weight, eps)
    out = torch.empty((tokens, width), dtype=streams.dtype, device=streams.device)
    if tokens:
        call(op, impl, streams, pre, weight, eps, out)
    return out


def hc_collapse_norm_quant(
    streams: Tensor, pre: Tensor, weight: Tensor, eps: float, *, folded: bool, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`rmsnorm_quant` of `hc_collapse` in one pass, with the bits of the separate ops.

    Shapes, dtypes and limits: as hc_collapse; weight [N] bfloat16 or float32; N % 32 == 0.
    Returns:
        x      [T, N]  of streams' dtype, the norm of the collapse
        codes  [T, N]  float8_e4m3fn
        scale  [T, N/32] uint8 E8M0 bytes, or with folded=True [T] float32 row scales
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/rmsnorm_quant.cu. Reference: the composition of the reference ops.
    """
    op = "elementwise.hc_collapse_norm_quant"
    tokens, n, width = _check_streams(op, streams)
    check_groups(op, "streams", width)
    check_operand(op, "pre", pre, _F32, {"T": tokens, "n": n}, streams)
    _check_norm(op, streams, width, weight, eps)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        x = reference.rmsnorm(reference.hc_collapse(streams, pre), weight, eps)
        return x, *_reference_quant(x, folded)
    x = torch.empty((tokens, width), dtype=streams.dtype, device=streams.device)
    codes, scale = _new_codes(streams, tokens, width, folded)
    if tokens:
        call(op, impl, streams, pre, weight, eps, x, codes, scale)
    return x, codes, scale


def hc_expand(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, out: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """Write a sublayer's output back: out[i] = post[i]*y + sum_j comb[j, i]*streams[j], one rounding (model spec 3.5).

    Shapes: T tokens, n streams (1..4), N hidden; on CUDA N % 8 == 0.
        y        [T, N]     of streams' dtype, last dim contiguous, row stride a multiple of 8
        streams  [T, n, N]  bfloat16 (float32 in the reference), contiguous
        post     [T, n]     float32, of the same sublayer's `hc_mix`
        comb     [T, n, n]  float32, row = input stream j, column = output stream i
        out      [T, n, N]  optional; may be streams
    Returns:
        [T, n, N]: out, or a new tensor. The kernel uses fused multiply-adds: at most one bf16 step from the reference.
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/hc_expand.cu. Reference: ops.reference.elementwise.hc_expand.
    """
    op = "elementwise.hc_expand"
    tokens, _, width = _check_streams(op, streams)
    check_operand(op, "y", y, (streams.dtype,), {"T": tokens, "N": width}, streams)
    _check_coefficients(op, streams, post, comb)
    out = _check_out(op, out, streams)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        return reference.hc_expand(y, streams, post, comb, out)
    if tokens:
        call(op, impl, y, streams, post, comb, out)
    return out


def _check_expand_mix(
    op: str, y: Tensor, streams: Tensor, last_pre: Tensor, last_post: Tensor, last_comb: Tensor, site: tuple
) -> None:
    _check_mix(op, streams, *site)
    tokens, n, width = streams.shape
    check_operand(op, "y", y, (streams.dtype,), {"T": tokens, "N": width}, streams)
    check_operand(op, "last_pre", last_pre, _F32, {"T": tokens, "n": n}, streams)
    check_operand(op, "last_post", last_post, _F32, {"T": tokens, "n": n}, streams)
    check_operand(op, "last_comb", last_comb, _F32, {"T": tokens, "n": n, "n ": n}, streams)


def _reference_expand_mix(
    y: Tensor, streams: Tensor, last_pre: Tensor, last_post: Tensor, last_comb: Tensor, site: tuple, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    reference.hc_expand(y, streams, last_post, last_comb, out)
    return out, reference.hc_collapse(out, last_pre), *reference.hc_mix(out, *site)


def hc_expand_mix(
    y: Tensor,
    streams: Tensor,
    last_pre: Tensor,
    last_post: Tensor,
    last_comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
    *,
    out: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything between two sublayers but the norm, with the bits of the separate ops; the streams move once.

        streams = hc_expand(y, streams, last_post, last_comb)
        x       = hc_collapse(streams, last_pre)
        pre, post, comb = hc_mix(streams, fn, base, scale, ...)

    `rmsnorm_quant` of x is the next sublayer's input (model spec 3.2).

    Shapes: T tokens, n streams (1..4), N hidden; on CUDA N % 8 == 0.
        y          [T, N]       of streams' dtype, the last sublayer's output; as in hc_expand
        streams    [T, n, N]    bfloat16 (float32 in the reference), contiguous
        last_pre   [T, n]       float32: the last sublayer's `pre`, last_post [T, n], last_comb [T, n, n]
        fn, base, scale, sinkhorn_iters, hc_eps, norm_eps: of the NEXT site, as in hc_mix
        out        [T, n, N]    optional; may be streams
    Returns:
        streams [T, n, N] (out, or a new tensor), x [T, N], and the next site's pre, post, comb
    Raises, determinism, workspace: as hc_mix.
    Kernel: csrc/elementwise/hc_expand_mix.cu. Reference: the composition of the reference ops.
    """
    op = "elementwise.hc_expand_mix"
    site = (fn, base, scale, sinkhorn_iters, hc_eps, norm_eps)
    _check_expand_mix(op, y, streams, last_pre, last_post, last_comb, site)
    out = _check_out(op, out, streams)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        return _reference_expand_mix(y, streams, last_pre, last_post, last_comb, site, out)
    x = torch.empty(y.shape, dtype=streams.dtype, device=streams.device)
    workspace, pre, post, comb = _new_coefficients(streams)
    if streams.shape[0]:
        call(op, impl, y, streams, last_pre, last_post, last_comb, *site, workspace, out, x, pre, post, comb)
    return out, x, pre, post, comb


def hc_expand_mix_norm_quant(
    y: Tensor,
    streams: Tensor,
    last_pre: Tensor,
    last_post: Tensor,
    last_comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
    norm_weight: Tensor,
    *,
    folded: bool,
    out: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`hc_expand_mix` and `rmsnorm_quant` of its x: all the work between two sublayers, with the bits of the two ops.

    Shapes, dtypes and limits: as hc_expand_mix; norm_weight [N] bfloat16 or float32, its eps is norm_eps;
    N % 32 == 0, on CUDA N <= 10240.
    Returns:
        streams [T, n, N] (out, or a new tensor); x [T, N], the next sublayer's normed input; codes [T, N] float8_e4m3fn;
        scale, [T, N/32] uint8 E8M0 bytes, or with folded=True [T] float32 row scales; the next site's pre, post, comb
    Raises, determinism, workspace: as hc_mix.
    Kernel: csrc/elementwise/hc_expand_mix.cu. Reference: the composition of the reference ops.
    """
    op = "elementwise.hc_expand_mix_norm_quant"
    site = (fn, base, scale, sinkhorn_iters, hc_eps, norm_eps)
    _check_expand_mix(op, y, streams, last_pre, last_post, last_comb, site)
    tokens, _, width = streams.shape
    check_groups(op, "streams", width)
    check_operand(op, "norm_weight", norm_weight, COMPUTE_DTYPES, {"N": width}, streams)
    out = _check_out(op, out, streams)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        out, x, *coefficients = _reference_expand_mix(y, streams, last_pre, last_post, last_comb, site, out)
        x = reference.rmsnorm(x, norm_weight, norm_eps)
        codes, codes_scale = _reference_quant(x, folded)
        pre, post, comb = coefficients
        return out, x, codes, codes_scale, pre, post, comb
    x = torch.empty(y.shape, dtype=streams.dtype, device=streams.device)
    codes, codes_scale = _new_codes(streams, tokens, width, folded)
    workspace, pre, post, comb = _new_coefficients(streams)
    if tokens:
        call(
            op, impl, y, streams, last_pre, last_post, last_comb, *site, norm_weight, workspace,
            out, x, codes, codes_scale, pre, post, comb,
        )  # fmt: skip
    return out, x, codes, codes_scale, pre, post, comb


# -- engram gate -------------------------------------------------------------------------------------------------------


def engram_gate(
    streams: Tensor,
    z: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Add the gated engram value to every stream, float32 inside (model spec 7.4).

    Shapes: T tokens, n streams (1..4), N hidden; on CUDA N % 8 == 0 and N <= 10240.
        streams   [T, n, N]      bfloat16 (float32 in the reference), contiguous
        z         [T, (n+1)*N]   of streams' dtype: n keys, then the value; as x of rmsnorm
        q_weight  [n, N]         bfloat16 on CUDA
        k_weight  [n, N]         bfloat16 on CUDA
        out       [T, n, N]      optional; may be streams
    Returns:
        [T, n, N]: out, or a new tensor
    Raises, determinism: as rmsnorm.
    Kernel: csrc/elementwise/engram_gate.cu. Reference: ops.reference.elementwise.engram_gate.
    """
    op = "elementwise.engram_gate"
    tokens, n, width = _check_streams(op, streams)
    check_operand(op, "z", z, (streams.dtype,), {"T": tokens, "(n+1)*N": (n + 1) * width}, streams)
    check_operand(op, "q_weight", q_weight, COMPUTE_DTYPES, {"n": n, "N": width}, streams)
    check_operand(op, "k_weight", k_weight, COMPUTE_DTYPES, {"n": n, "N": width}, streams)
    check_eps(op, "eps", eps)
    out = _check_out(op, out, streams)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        return reference.engram_gate(streams, z, q_weight, k_weight, eps, out)
    if tokens:
        call(op, impl, streams, z, q_weight, k_weight, eps, out)
    return out


# -- self-tests --------------------------------------------------------------------------------------------------------


def _self_test_inputs(device: torch.device) -> dict[str, Tensor]:
    """Two dozen tokens of a small model; magnitudes over many binades."""
    g = torch.Generator().manual_seed(1)
    tokens, n, width = 24, 4, 320

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype).to(device)

    x = torch.randn(tokens, width, generator=g) * torch.exp2(torch.arange(tokens) - 12.0)[:, None]
    angle = torch.rand(tokens, 32, generator=g) * 6
    return {
        "x": x.bfloat16().to(device),
        "weight": normal(width),
        "heads": normal(tokens, 3, 128),
        "positions": torch.arange(tokens, dtype=torch.int32, device=device),
        "table": torch.stack((angle.cos(), angle.sin()), -1).to(device),
        "streams": normal(tokens, n, width),
        "z": normal(tokens, (n + 1) * width),
        "q_weight": normal(n, width),
        "k_weight": normal(n, width),
        "fn": normal(2 * n + n * n, n * width, dtype=torch.float32) * (n * width) ** -0.5,
        "base": normal(2 * n + n * n, dtype=torch.float32),
        "scale": normal(3, dtype=torch.float32),
        "post": normal(tokens, n, dtype=torch.float32),
        "comb": normal(tokens, n, n, dtype=torch.float32),
    }


_ONE_STEP = 2.0**-8  # of the largest output: sums are taken in another order than the reference takes them
register_self_test(
    "elementwise.rmsnorm", _self_test_inputs, lambda i, impl: rmsnorm(i["x"], i["weight"], 1e-20, impl=impl), _ONE_STEP
)
register_self_test("elementwise.act_quant", _self_test_inputs, lambda i, impl: act_quant(i["x"], impl=impl), 0.0)
register_self_test(
    "elementwise.act_quant_folded", _self_test_inputs, lambda i, impl: act_quant_folded(i["x"], impl=impl), 0.0
)
register_self_test(
    "elementwise.rope",
    _self_test_inputs,
    lambda i, impl: rope(i["heads"], i["positions"], i["table"], impl=impl),
    0.0,
)
register_self_test(
    "elementwise.rope_quant",
    _self_test_inputs,
    lambda i, impl: rope_quant(i["heads"], i["positions"], i["table"], 3, folded=True, impl=impl),
    0.0,
)
register_self_test(
    "elementwise.hc_mix",
    _self_test_inputs,
    lambda i, impl: hc_mix(i["streams"], i["fn"], i["base"], i["scale"], 20, 1e-6, 1e-20, impl=impl),
    1e-5,
)
register_self_test(
    "elementwise.hc_collapse",
    _self_test_inputs,
    lambda i, impl: hc_collapse(i["streams"], i["post"], impl=impl),
    _ONE_STEP,
)
register_self_test(
    "elementwise.hc_expand",
    _self_test_inputs,
    lambda i, impl: hc_expand(i["x"], i["streams"], i["post"], i["comb"], impl=impl),
    _ONE_STEP,
)
register_self_test(
    "elementwise.hc_expand_mix",
    _self_test_inputs,
    lambda i, impl: hc_expand_mix(
        i["x"], i["streams"], i["post"], i["post"], i["comb"], i["fn"], i["base"], i["scale"], 20, 1e-6, 1e-20, impl=impl
    ),
    _ONE_STEP,
)
register_self_test(
    "elementwise.engram_gate",
    _self_test_inputs,
    lambda i, impl: engram_gate(i["streams"], i["z"], i["q_weight"], i["k_weight"], 1e-20, impl=impl),
    _ONE_STEP,
)
