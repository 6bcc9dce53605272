"""Matrix products of the reference path, independent of a row's neighbours.

A library GEMM may pick another kernel, and so another summation order, for another number of rows. The products here are
always made of blocks of `BLOCK_ROWS` rows, so that a token's bits do not depend on the batch, the chunk or the rank it runs in.
"""

from __future__ import annotations

import torch

from mini_deepinfer.ops.reference.number_formats import decode_e8m0

BLOCK_ROWS = 16


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [O, K] transposed, operands taken to float32, float32 result [T, O].

    On the CPU every call of the library has `BLOCK_ROWS` rows (the last block is padded with zeros): bitwise independent of T.
    On a GPU this is one library call in full float32.
    """
    x = x.to(torch.float32)
    weight_t = weight.to(torch.float32).t()
    num_rows = x.shape[0]
    if x.device.type != "cpu":
        return x @ weight_t
    out = torch.empty(num_rows, weight.shape[0], dtype=torch.float32)
    x = x.contiguous()
    full = num_rows - num_rows % BLOCK_ROWS
    for start in range(0, full, BLOCK_ROWS):
        torch.mm(x[start : start + BLOCK_ROWS], weight_t, out=out[start : start + BLOCK_ROWS])
    if full < num_rows:
        block = torch.zeros(BLOCK_ROWS, x.shape[1], dtype=torch.float32)
        block[: num_rows - full] = x[full:]
        out[full:] = torch.mm(block, weight_t)[: num_rows - full]
    return out


def dequant_block32(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """FP8 weight [O, K] with one E8M0 byte per 32x32 tile (scale [ceil(O/32), ceil(K/32)]): exact values (model spec 2.1)."""
    rows, cols = codes.shape
    values = decode_e8m0(scale).repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :cols]
    return (codes.to(torch.float32) * values).to(dtype)
