"""Norms, rotary embedding, activation quantisation, hyper-connections, engram gate: definitions in plain PyTorch.

Every function computes in float32 and rounds once to the dtype of its input (bfloat16, or float32 where nothing is rounded).
"""

from __future__ import annotations

import torch

from mini_deepinfer.ops.reference import number_formats as formats
from mini_deepinfer.ops.reference.linear import matmul
from mini_deepinfer.ops.reference.number_formats import expand_fp4, expand_fp8

__all__ = [
    "act_quant",
    "act_quant_folded",
    "engram_gate",
    "expand_fp4",
    "expand_fp8",
    "fold_scales",
    "hc_collapse",
    "hc_expand",
    "hc_mix",
    "rmsnorm",
    "rope",
    "rope_quant",
]


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dim, one rounding at the end (model spec 3.6)."""
    value = x.to(torch.float32)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (weight.to(torch.float32) * value).to(x.dtype)


def act_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 E4M3 with one power-of-two scale per 32 columns: codes [T, K], E8M0 bytes [T, K/32] (model spec 8)."""
    return formats.quant_fp8_ue8m0(x, block=32, floor=formats.ACT_QUANT_FLOOR)


def fold_scales(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Re-express E4M3 codes [T, K] with the row's largest group scale: codes [T, K], row_scale [T] float32 (a power of two).

    Exact for every value above rowmax / 28,500; smaller ones are rounded to the nearest E4M3 value, ties to even.
    """
    exponent = scale.to(torch.int32)
    row_exponent = exponent.amax(-1, keepdim=True)
    ratio = torch.exp2((exponent - row_exponent).clamp(min=-126).to(torch.float32))
    folded = (codes.to(torch.float32) * ratio.repeat_interleave(32, -1)).to(torch.float8_e4m3fn)
    return folded, formats.decode_e8m0(row_exponent.squeeze(-1).to(torch.uint8))


def act_quant_folded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`act_quant` followed by `fold_scales`: operands of a row-scaled FP8 GEMM."""
    return fold_scales(*act_quant(x))


def rope(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate adjacent pairs of the last R dims of x [T, h, d] by the angles of table [P, R/2, (cos, sin)] (model spec 4.2)."""
    rope_dim = 2 * table.shape[1]
    cos, sin = table[positions.long()].unsqueeze(1).unbind(-1)
    if inverse:
        sin = -sin
    pairs = x[..., -rope_dim:].to(torch.float32).unflatten(-1, (-1, 2))
    real, imag = pairs.unbind(-1)
    rotated = torch.stack((real * cos - imag * sin, real * sin + imag * cos), -1).flatten(-2).to(x.dtype)
    if out is None:
        out = torch.empty_like(x)
    if out.data_ptr() != x.data_ptr():
        out[..., :-rope_dim] = x[..., :-rope_dim]
    out[..., -rope_dim:] = rotated
    return out


def rope_quant(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, groups: int, inverse: bool = False, *, folded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope`, then each of the groups of heads of x [T, h, d] quantised as a row of its own: codes [T, groups, h*d/groups]."""
    tokens, heads, dim = x.shape
    rows = rope(x, positions, table, inverse).reshape(tokens * groups, heads // groups * dim)
    codes, scale = act_quant_folded(rows) if folded else act_quant(rows)
    return codes.unflatten(0, (tokens, groups)), scale.unflatten(0, (tokens, groups))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """torch.sigmoid rounds differently in the vectorised body and the tail of a CPU tensor: a row's bits would depend on its place."""
    return 1 / (1 + torch.exp(-x))


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Row softmax then alternating normalisation of [..., n, n], ending on the columns (model spec 3.4)."""
    x = torch.softmax(logits, -1) + eps
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


def hc_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of a hyper-connection site from streams [T, n, N]: pre [T, n], post [T, n], comb [T, n, n] (model spec 3.3)."""
    num_streams = streams.shape[1]
    flat = streams.flatten(1).to(torch.float32)
    mixes = matmul(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    group = torch.tensor([0] * num_streams + [1] * num_streams + [2] * num_streams**2, device=streams.device)
    # one fused multiply-add: the product is exact in float64
    logits = (mixes.double() * scale[group].double() + base.double()).to(torch.float32)
    pre = _sigmoid(logits[:, :num_streams]) + hc_eps
    post = 2 * _sigmoid(logits[:, num_streams : 2 * num_streams])
    comb = sinkhorn(logits[:, 2 * num_streams :].unflatten(-1, (num_streams, num_streams)), sinkhorn_iters, hc_eps)
    return pre, post, comb


def hc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the streams [T, n, N] with pre [T, n]: [T, N] (model spec 3.2)."""
    acc = pre[:, 0, None] * streams[:, 0].to(torch.float32)
    for s in range(1, streams.shape[1]):
        acc = acc + pre[:, s, None] * streams[:, s].to(torch.float32)
    return acc.to(streams.dtype)


def hc_expand(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """New streams: out[i] = post[i]*y + sum_j comb[j, i]*streams[j], one rounding (model spec 3.5)."""
    value = streams.to(torch.float32)
    acc = post[:, :, None] * y[:, None].to(torch.float32)
    for j in range(streams.shape[1]):
        acc = acc + comb[:, j, :, None] * value[:, j, None]
    result = acc.to(streams.dtype)
    if out is None:
        return result
    return out.copy_(result)


def engram_gate(
    streams: torch.Tensor,
    z: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the gated engram value to every stream (model spec 7.4): z [T, (n+1)*N] holds n keys and one value."""
    num_streams, hidden = streams.shape[1:]
    value = streams.to(torch.float32)
    z = z.to(torch.float32).unflatten(-1, (num_streams + 1, hidden))
    key, addend = z[:, :num_streams], z[:, num_streams:]
    rstd = torch.rsqrt(value.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    weight = q_weight.to(torch.float32) * k_weight.to(torch.float32)
    dot = (value * weight * key).sum(-1) * rstd * hidden**-0.5
    gate = _sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp(min=1e-6)), dot))
    result = (value + gate[..., None] * addend).to(streams.dtype)
    if out is None:
        return result
    return out.copy_(result)
