"""Packed KV rows, compressor pooling and sparse attention: definitions in plain PyTorch (model spec 4.3 to 4.6)."""

from __future__ import annotations

import torch

from mini_deepinfer.ops.reference import number_formats as formats
from mini_deepinfer.ops.reference.elementwise import rmsnorm, rope, rope_quant

BLOCK_SLOTS = 64
_TOKENS_PER_PASS = 128
KEY_FACTOR = 512.0  # an expanded row holds the values divided by it


def window_bytes(dim: int) -> int:
    """Bytes of a packed window row."""
    return dim + dim // 32


def compressed_bytes(dim: int) -> int:
    """Bytes of a packed compressed row."""
    return dim // 2 + dim // 16


def scatter_rows(rows: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """rows[slots[i]] = packed[i] for every slot >= 0."""
    keep = slots >= 0
    rows[slots[keep].long()] = packed[keep]


def pack_window(kv: torch.Tensor) -> torch.Tensor:
    """[T, D] -> [T, D + D/32] bytes: E4M3 codes then E8M0 scales (model spec 4.4)."""
    codes, scale = formats.quant_fp8_ue8m0(kv, block=32, floor=formats.ACT_QUANT_FLOOR)
    return torch.cat((codes.view(torch.uint8), scale), -1)


def unpack_window(rows: torch.Tensor) -> torch.Tensor:
    """[..., D + D/32] bytes -> exact float32 values [..., D]."""
    dim = rows.shape[-1] * 32 // 33
    return formats.dequant_fp8_ue8m0(rows[..., :dim], rows[..., dim:])


def pack_compressed(latent: torch.Tensor) -> torch.Tensor:
    """[G, D] -> [G, D/2 + D/16] bytes: E2M1 codes then E4M3 scales (model spec 4.4)."""
    return torch.cat(formats.quant_nvfp4(latent), -1)


def unpack_compressed(rows: torch.Tensor) -> torch.Tensor:
    """[..., D/2 + D/16] bytes -> exact float32 values [..., D]."""
    half = rows.shape[-1] * 8 // 9
    return formats.dequant_nvfp4(rows[..., :half], rows[..., half:])


def expand_rows(packed: torch.Tensor, pages: torch.Tensor | None, page_rows: int, out: torch.Tensor) -> None:
    """Packed rows as expanded rows (ops.attention.expand_rows), row by row or page by page."""
    index = torch.arange(out.shape[0], device=out.device)
    if pages is not None:
        index = pages.long()[index // page_rows] * page_rows + index % page_rows
    there = (index >= 0) & (index < packed.shape[0])
    rows = packed[index[there]]
    values = unpack_window(rows) if packed.shape[1] == window_bytes(out.shape[1]) else unpack_compressed(rows)
    out[there] = (values / KEY_FACTOR).to(out.dtype)


def unpack_expanded(rows: torch.Tensor) -> torch.Tensor:
    """[..., D] expanded rows -> exact float32 values [..., D]."""
    return rows.float() * KEY_FACTOR


def write_window(kv: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    scatter_rows(rows, slots, pack_window(kv))


def write_normed_window(
    x: torch.Tensor, weight: torch.Tensor, eps: float, positions: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
) -> None:
    write_window(rope(rmsnorm(x, weight, eps)[:, None], positions, table)[:, 0], rows, slots)


def write_compressed(latent: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    scatter_rows(rows, slots, pack_compressed(latent))


def compress(
    kv: torch.Tensor,
    score: torch.Tensor | None,
    tail_kv: torch.Tensor | None,
    tail_score: torch.Tensor | None,
    group_rows: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Pool r tokens to one row: softmax of the scores over the group, channel by channel, in float32 (model spec 4.3)."""
    index = group_rows.long()
    if score is None:
        return kv[index[:, 0]].to(out_dtype)
    if tail_kv is not None and tail_score is not None:
        kv, score = torch.cat((kv, tail_kv)), torch.cat((score, tail_score))
    weight = torch.softmax(score[index].to(torch.float32), 1)
    pooled = weight[:, 0] * kv[index[:, 0]]
    for i in range(1, index.shape[1]):
        pooled = pooled + weight[:, i] * kv[index[:, i]]
    return pooled.to(out_dtype)


def sparse(
    q: torch.Tensor,
    window: torch.Tensor,
    window_idx: torch.Tensor,
    compressed: torch.Tensor | None,
    compressed_idx: torch.Tensor | None,
    compressed_len: torch.Tensor | None,
    sink: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [T, H, D] over packed or expanded rows chosen by index; K = V (model spec 4.5, 4.6)."""
    if out is None:
        out = torch.empty_like(q)
    for start in range(0, q.shape[0], _TOKENS_PER_PASS):
        part = slice(start, start + _TOKENS_PER_PASS)
        keys, valid = _gather(window, window_idx[part], None, unpack_window)
        if compressed is not None and compressed_idx is not None and compressed_idx.shape[1]:
            length = None if compressed_len is None else compressed_len[part]
            more_keys, more_valid = _gather(compressed, compressed_idx[part], length, unpack_compressed)
            keys, valid = torch.cat((keys, more_keys), 1), torch.cat((valid, more_valid), 1)
        out[part] = _softmax_blocks(q[part], keys, valid, sink, softmax_scale)
    return out


def sparse_rope(
    q: torch.Tensor,
    window: torch.Tensor,
    window_idx: torch.Tensor,
    compressed: torch.Tensor | None,
    compressed_idx: torch.Tensor | None,
    compressed_len: torch.Tensor | None,
    sink: torch.Tensor,
    softmax_scale: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sparse` of the rotated q [T, H, D], and the rotation taken off its output (model spec 4.2, 4.7)."""
    q = rope(q, positions, table)
    out = sparse(q, window, window_idx, compressed, compressed_idx, compressed_len, sink, softmax_scale, out)
    return rope(out, positions, table, inverse=True, out=out)


def sparse_rope_quant(
    q: torch.Tensor,
    window: torch.Tensor,
    window_idx: torch.Tensor,
    compressed: torch.Tensor | None,
    compressed_idx: torch.Tensor | None,
    compressed_len: torch.Tensor | None,
    sink: torch.Tensor,
    softmax_scale: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    groups: int,
    folded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sparse` of the rotated q [T, H, D], then `rope_quant` of its output: codes [T, groups, H*D/groups] and their scales."""
    q = rope(q, positions, table)
    o = sparse(q, window, window_idx, compressed, compressed_idx, compressed_len, sink, softmax_scale)
    return rope_quant(o, positions, table, groups, inverse=True, folded=folded)


def _gather(rows, index, length, unpack):
    valid = index >= 0
    if length is not None:
        valid = valid & (torch.arange(index.shape[1], device=index.device) < length[:, None])
    picked = rows[torch.where(valid, index, 0).long()]
    # a skipped lane reads nothing: its (arbitrary) row is replaced by zeros before it is decoded
    picked = torch.where(valid[..., None], picked, torch.zeros((), dtype=rows.dtype, device=rows.device))
    return (unpack if rows.dtype == torch.uint8 else unpack_expanded)(picked), valid


def _softmax_blocks(q, keys, valid, sink, softmax_scale):
    """The one-pass softmax over blocks of 64 slots; see model spec 4.6 for the rounding points."""
    query = q.to(torch.float32)
    tokens, heads, _ = query.shape
    row_max = torch.full((tokens, heads, 1), -1e30, device=q.device)
    total = torch.zeros(tokens, heads, 1, device=q.device)
    acc = torch.zeros_like(query)
    for start in range(0, keys.shape[1], BLOCK_SLOTS):
        block, mask = keys[:, start : start + BLOCK_SLOTS], valid[:, None, start : start + BLOCK_SLOTS]
        score = torch.bmm(query, block.transpose(1, 2)) * softmax_scale
        score = torch.where(mask, score, float("-inf"))
        new_max = torch.maximum(row_max, score.amax(-1, keepdim=True))
        alpha = torch.exp(row_max - new_max)
        p = torch.exp(score - new_max)
        total = total * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + torch.bmm(p.to(q.dtype).to(torch.float32), block)
        row_max = new_max
    total = total + torch.exp(torch.clamp(sink.to(torch.float32)[None, :, None] - row_max, max=88.0))
    empty = ~valid.any(1)[:, None, None]
    return torch.where(empty, torch.zeros_like(acc), acc / total).to(q.dtype)
