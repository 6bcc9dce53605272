"""Ops on the residual streams: hyper-connections, engram gate."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import call, select
from mini_deepinfer.ops._operands import COMPUTE_DTYPES, check_eps, check_groups, check_operand, check_out
from mini_deepinfer.ops.elementwise.rows import check_norm, new_codes, reference_quant
from mini_deepinfer.ops.reference import elementwise as reference

_F32 = (torch.float32,)


def _check_streams(op: str, streams: Tensor) -> tuple[int, int, int]:
    check_operand(op, "streams", streams, COMPUTE_DTYPES, {"T": None, "n": None, "N": None})
    tokens, num_streams, width = streams.shape
    if not 1 <= num_streams <= 4:
        raise ValueError(f"{op}: streams must have n = 1..4 streams, got n={num_streams}")
    return tokens, num_streams, width


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
        streams.new_empty(shape, dtype=torch.float32)
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
    out = streams.new_empty(tokens, width)
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
    check_norm(op, streams, width, weight, eps)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        return reference.rmsnorm(reference.hc_collapse(streams, pre), weight, eps)
    out = streams.new_empty(tokens, width)
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
    check_norm(op, streams, width, weight, eps)
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        x = reference.rmsnorm(reference.hc_collapse(streams, pre), weight, eps)
        return x, *reference_quant(x, folded)
    x = streams.new_empty(tokens, width)
    codes, scale = new_codes(streams, tokens, width, folded)
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
    out = check_out(op, out, streams, "T", "n", "N")
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
    out = check_out(op, out, streams, "T", "n", "N")
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        return _reference_expand_mix(y, streams, last_pre, last_post, last_comb, site, out)
    x = streams.new_empty(y.shape)
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
    keep_x: bool = True,
    out: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`hc_expand_mix` and `rmsnorm_quant` of its x: all the work between two sublayers, with the bits of the two ops.

    Shapes, dtypes and limits: as hc_expand_mix; norm_weight [N] bfloat16 or float32, its eps is norm_eps;
    N % 32 == 0, on CUDA N <= 10240.
    Returns:
        streams [T, n, N] (out, or a new tensor); x [T, N], the next sublayer's normed input, or None if keep_x is False (the
        kernel then does not write it); codes [T, N] float8_e4m3fn; scale, [T, N/32] uint8 E8M0 bytes, or with folded=True
        [T] float32 row scales; the next site's pre, post, comb
    Raises, determinism, workspace: as hc_mix.
    Kernels: csrc/elementwise/hc_expand_mix_sm90.cu (n = 4, other n go to the portable one), hc_expand_mix.cu; same bits.
    Reference: the composition of the reference ops.
    """
    op = "elementwise.hc_expand_mix_norm_quant"
    site = (fn, base, scale, sinkhorn_iters, hc_eps, norm_eps)
    _check_expand_mix(op, y, streams, last_pre, last_post, last_comb, site)
    tokens, _, width = streams.shape
    check_groups(op, "streams", width)
    check_operand(op, "norm_weight", norm_weight, COMPUTE_DTYPES, {"N": width}, streams)
    out = check_out(op, out, streams, "T", "n", "N")
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        out, x, *coefficients = _reference_expand_mix(y, streams, last_pre, last_post, last_comb, site, out)
        x = reference.rmsnorm(x, norm_weight, norm_eps)
        codes, codes_scale = reference_quant(x, folded)
        pre, post, comb = coefficients
        return out, x if keep_x else None, codes, codes_scale, pre, post, comb
    x = streams.new_empty(y.shape)
    codes, codes_scale = new_codes(streams, tokens, width, folded)
    workspace, pre, post, comb = _new_coefficients(streams)
    if tokens:
        call(
            op, impl, y, streams, last_pre, last_post, last_comb, *site, norm_weight, keep_x, workspace,
            out, x, codes, codes_scale, pre, post, comb,
        )  # fmt: skip
    return out, x if keep_x else None, codes, codes_scale, pre, post, comb


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
    out = check_out(op, out, streams, "T", "n", "N")
    impl = select(op, streams, impl=impl)
    if impl == "reference":
        return reference.engram_gate(streams, z, q_weight, k_weight, eps, out)
    if tokens:
        call(op, impl, streams, z, q_weight, k_weight, eps, out)
    return out
