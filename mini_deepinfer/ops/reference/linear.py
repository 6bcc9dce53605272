"""Matrix products of the reference path, independent of a row's neighbours.

A library GEMM may pick another kernel, and so another summation order, for another number of rows. The products here are
always made of blocks of `BLOCK_ROWS` rows, so that a token's bits do not depend on the batch, the chunk or the rank it runs in.
"""

from __future__ import annotations

import torch

from mini_deepinfer.ops.reference.number_formats import decode_e8m0

BLOCK_ROWS = 16


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [O, K] transposed, float32 result [T, O].

    On the CPU the sums are made in float64 and rounded once, and every call of the library has `BLOCK_ROWS` rows (the last block is
    padded with zeros): bitwise independent of T, and within float32 rounding of the exact product. On a GPU this is one library call in
    full float32.
    """
    if x.device.type != "cpu":
        return x.to(torch.float32) @ weight.to(torch.float32).t()
    num_rows = x.shape[0]
    padded = torch.zeros(-(-num_rows // BLOCK_ROWS) * BLOCK_ROWS, x.shape[1], dtype=torch.float64)
    padded[:num_rows] = x
    weight_t = weight.to(torch.float64).t()
    out = torch.empty(padded.shape[0], weight.shape[0], dtype=torch.float64)
    for start in range(0, padded.shape[0], BLOCK_ROWS):
        torch.mm(padded[start : start + BLOCK_ROWS], weight_t, out=out[start : start + BLOCK_ROWS])
    return out[:num_rows].to(torch.float32)


def fp8(codes: torch.Tensor, row_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Rows [T, g, K] with scales [T, g] times a weight [O, K] with scales [O], group by group: [T, O] bfloat16."""
    values = codes.to(torch.float32) * row_scale[..., None]
    weights = (weight.to(torch.float32) * weight_scale[:, None]).unflatten(0, (codes.shape[1], -1))
    return torch.cat([matmul(values[:, g], weights[g]) for g in range(codes.shape[1])], 1).to(torch.bfloat16)


def dequant_block32(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """FP8 weight [O, K] with one E8M0 byte per 32x32 tile (scale [ceil(O/32), ceil(K/32)]): exact values (model spec 2.1)."""
    rows, cols = codes.shape
    values = decode_e8m0(scale).repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :cols]
    return (codes.to(torch.float32) * values).to(dtype)
