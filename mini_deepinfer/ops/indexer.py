"""Indexer ops: FP4 index keys and queries, scores, candidate blocks, top-k (model spec 4.4 and 5).

Letters: T tokens, B sequences, G new groups, S cache rows, Hi index heads, Di index head dim, P pages per sequence,
C candidate blocks, K picks, n score columns. "cd" is the compute dtype: bfloat16, or float32 in the reference.
An index key row is Di/2 bytes of E2M1 codes (even element in the low nibble), then Di/32 E8M0 bytes.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import call, register_self_test, select
from mini_deepinfer.ops._operands import COMPUTE_DTYPES, check_groups, check_operand, check_rotary
from mini_deepinfer.ops.reference import indexer as reference

logger = logging.getLogger(__name__)

# for callers that read packed rows
pack_keys, unpack_keys = reference.pack_keys, reference.unpack_keys

KERNEL_HEAD_DIMS = (64, 128)
KERNEL_MAX_HEADS = 64
# What the sm90 scores take (csrc/indexer/indexer.h); the portable kernel does the rest, which is logged once for every reason.
FOLDED_MAX_HEADS, FOLDED_HEAD_DIM = 32, 128  # rows that they fold to int8
FOLDED_MIN_TOKENS_PER_SEQ = 16  # shorter ones would fold more keys than they score
FOLDED_MAX_WORKSPACE = 2 << 30
FOLDED_MAX_STRIDE = 1 << 26
FOLDED_BLOCK, FOLDED_MAX_CANDIDATES = 8, 8192
FOLDED_MAX_ENTRIES = 1 << 21  # of all page tables: the candidates' keys are taken in rounds, and each goes through all tokens


def _check_positive(op: str, name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{op}: {name} must be at least 1, got {value}")


def _check_kernel(op: str, impl: str, num_heads: int, head_dim: int) -> None:
    if head_dim not in KERNEL_HEAD_DIMS or not 1 <= num_heads <= KERNEL_MAX_HEADS:
        raise ValueError(
            f"{op}: the {impl} kernel takes Di in {KERNEL_HEAD_DIMS} and 1..{KERNEL_MAX_HEADS} index heads, got Di={head_dim} and "
            f"Hi={num_heads}. MDI_OPS={op}=reference runs the plain PyTorch op."
        )


def write_keys(k: Tensor, rows: Tensor, slots: Tensor, *, impl: str | None = None) -> None:
    """Quantise index keys to FP4 with one power-of-two scale per 32 and store them in the cache (model spec 4.4).

    Shapes: G keys, S cache rows, Di % 32 == 0.
        k      [G, Di]             cd, after RoPE
        rows   [S, Di/2 + Di/32]   uint8, written in place
        slots  [G]                 int32 cache rows, -1 = store nothing; each row at most once
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device
        RuntimeError           not contiguous on CUDA; GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none. A group with NaN or Inf gets scale byte 255 and decodes to NaN.
    Kernel: csrc/indexer/quantise.cu. Reference: ops.reference.indexer.write_keys.
    """
    op = "indexer.write_keys"
    check_operand(op, "k", k, COMPUTE_DTYPES, {"G": None, "Di": None})
    groups, head_dim = k.shape
    check_groups(op, "k", head_dim)
    check_operand(op, "rows", rows, (torch.uint8,), {"S": None, "Di/2+Di/32": head_dim // 2 + head_dim // 32}, k)
    check_operand(op, "slots", slots, (torch.int32,), {"G": groups}, k)
    impl = select(op, k, impl=impl)
    if groups == 0:
        return
    if impl == "reference":
        reference.write_keys(k, rows, slots)
        return
    _check_kernel(op, impl, 1, head_dim)
    call(op, impl, k, rows, slots)


def quant_query(q: Tensor, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Quantise index queries to FP4 with one power-of-two scale per 32 (model spec 4.4, 5.2).

    Shapes: T tokens, Hi heads, Di % 32 == 0.
        q  [T, Hi, Di]  cd, after RoPE
    Returns:
        codes  [T, Hi, Di/2]   uint8, two E2M1 codes a byte, even element low
        scale  [T, Hi, Di/32]  uint8, E8M0 bytes
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape
        RuntimeError           not contiguous on CUDA; GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none. A group with NaN or Inf gets scale byte 255 and decodes to NaN.
    Kernel: csrc/indexer/quantise.cu. Reference: ops.reference.indexer.quant_query.
    """
    op = "indexer.quant_query"
    impl = _select_query(op, q, impl)
    if impl == "reference":
        return reference.quant_query(q)
    codes, scale = _new_query(q)
    if codes.numel():
        call(op, impl, q, codes, scale)
    return codes, scale


def rope_quant_query(q: Tensor, positions: Tensor, table: Tensor, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Rotary embedding of the last R columns (`elementwise.rope`), then `quant_query` (model spec 4.4): one pass with the bits of both.

    Shapes: T tokens, Hi heads, Di % 32 == 0, R rotary dims, P positions; on CUDA R % 8 == 0.
        q          [T, Hi, Di]   cd, the projection; not changed
        positions  [T]           int32, 0 <= positions[t] < P (not checked on CUDA: that would wait for the GPU)
        table      [P, R/2, 2]   float32, (cos, sin)
    Returns, raises, determinism: as quant_query.
    Kernel: csrc/indexer/quantise.cu. Reference: ops.reference.indexer.rope_quant_query.
    """
    op = "indexer.rope_quant_query"
    impl = _select_query(op, q, impl)
    check_rotary(op, "q", q, positions, table)
    if impl == "reference":
        return reference.rope_quant_query(q, positions, table)
    codes, scale = _new_query(q)
    if codes.numel():
        call(op, impl, q, positions, table, codes, scale)
    return codes, scale


def _select_query(op: str, q: Tensor, impl: str | None) -> str:
    """The implementation that quantises q, after the checks of q."""
    check_operand(op, "q", q, COMPUTE_DTYPES, {"T": None, "Hi": None, "Di": None})
    check_groups(op, "q", q.shape[2])
    impl = select(op, q, impl=impl)
    if impl != "reference":
        _check_kernel(op, impl, 1, q.shape[2])
    return impl


def _new_query(q: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, head_dim = q.shape
    codes = q.new_empty((tokens, heads, head_dim // 2), dtype=torch.uint8)
    return codes, q.new_empty((tokens, heads, head_dim // 32), dtype=torch.uint8)


def _check_score(
    op: str,
    q_codes: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    seq_of_token: Tensor,
    visible: Tensor,
    entries_per_page: int,
) -> tuple[int, int, int]:
    """Operands shared by logits and candidate_logits -> (T, Hi, Di)."""
    check_operand(op, "q_codes", q_codes, (torch.uint8,), {"T": None, "Hi": None, "Di/2": None})
    tokens, heads, head_dim = q_codes.shape[0], q_codes.shape[1], q_codes.shape[2] * 2
    check_groups(op, "q_codes", head_dim)
    check_operand(op, "q_scale", q_scale, (torch.uint8,), {"T": tokens, "Hi": heads, "Di/32": head_dim // 32}, q_codes)
    check_operand(op, "weights", weights, COMPUTE_DTYPES, {"T": tokens, "Hi": heads}, q_codes)
    check_operand(op, "keys", keys, (torch.uint8,), {"S": None, "Di/2+Di/32": head_dim // 2 + head_dim // 32}, q_codes)
    check_operand(op, "page_table", page_table, (torch.int32,), {"B": None, "P": None}, q_codes)
    check_operand(op, "seq_of_token", seq_of_token, (torch.int32,), {"T": tokens}, q_codes)
    check_operand(op, "visible", visible, (torch.int32,), {"T": tokens}, q_codes)
    _check_positive(op, "entries_per_page", entries_per_page)
    if keys.shape[0] % entries_per_page:
        raise ValueError(f"{op}: keys must hold whole pages of entries_per_page={entries_per_page} rows, got S={keys.shape[0]}")
    return tokens, heads, head_dim


def _logits_workspace_bytes(tokens: int, num_seqs: int, num_cols: int) -> int:
    """Scratch of the sm90 scores (queries and keys as int8), checked against the kernel's own sum."""
    blocks, tiles = -(-tokens // 16), num_seqs * -(-num_cols // 64)
    return blocks * (66 * 1024 + 1) + tiles * (8448 + 1) + 4 * num_seqs + 6 * 1024


def _candidate_workspace_bytes(tokens: int, num_seqs: int, entries: int, candidates: int) -> int:
    """Scratch of the sm90 candidate scores (queries as int8, candidates by SM), checked against the kernel's own sum."""
    blocks = num_seqs * -(-entries // FOLDED_BLOCK)
    return tokens * (4160 + 4 * (candidates + 3) + 2 * (blocks // 100 + 513) + 1) + blocks + 4 * num_seqs + 8 * 256


def _why_no_folded_rows(heads: int, head_dim: int, workspace: int) -> str | None:
    if heads > FOLDED_MAX_HEADS or head_dim != FOLDED_HEAD_DIM:
        return f"index heads other than at most {FOLDED_MAX_HEADS} of {FOLDED_HEAD_DIM}"
    return f"a workspace of more than {FOLDED_MAX_WORKSPACE >> 30} GiB" if workspace > FOLDED_MAX_WORKSPACE else None


def _why_no_folded_logits(tokens: int, heads: int, head_dim: int, num_seqs: int, stride: int, workspace: int) -> str | None:
    """Why the portable kernel scores this instead of the sm90 one; None where that one does."""
    if tokens < FOLDED_MIN_TOKENS_PER_SEQ * num_seqs:
        return f"fewer than {FOLDED_MIN_TOKENS_PER_SEQ} tokens a sequence"
    if stride > FOLDED_MAX_STRIDE:
        return f"rows of scores more than {FOLDED_MAX_STRIDE} apart"
    return _why_no_folded_rows(heads, head_dim, workspace)


def _why_no_folded_candidates(
    tokens: int, heads: int, head_dim: int, keys: Tensor, entries: int, entries_per_page: int, candidates: int, block_size: int,
    workspace: int,
) -> str | None:  # fmt: skip
    """Why the portable kernel scores this instead of the sm90 one; None where that one does. entries: of all page tables."""
    if block_size != FOLDED_BLOCK or entries_per_page % FOLDED_BLOCK:
        return f"blocks other than {FOLDED_BLOCK} in pages of whole blocks"
    if candidates > FOLDED_MAX_CANDIDATES:
        return f"more than {FOLDED_MAX_CANDIDATES} candidates a token"
    if entries > FOLDED_MAX_ENTRIES:
        return f"page tables of more than {FOLDED_MAX_ENTRIES} entries"
    if tokens * candidates * block_size < entries:
        return "fewer scores than the page tables have entries"  # it would fold more keys than it scores
    if keys.data_ptr() % 16:
        return "keys that do not start on 16 bytes"
    return _why_no_folded_rows(heads, head_dim, workspace)


@functools.cache
def _log_portable(op: str, reason: str) -> None:
    logger.info("%s: the portable kernel, not the sm90 one, scores %s", op, reason)


def logits(
    q_codes: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    seq_of_token: Tensor,
    visible: Tensor,
    entries_per_page: int,
    num_cols: int,
    *,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Index scores of every visible entry of each token's sequence (model spec 5.3).

    Shapes: T tokens of B sequences, Hi heads, n = num_cols columns.
        q_codes, q_scale  [T, Hi, Di/2], [T, Hi, Di/32]  uint8 from quant_query
        weights           [T, Hi]   cd, already times 2^-6; may be negative
        keys              [S, Di/2 + Di/32]  uint8 rows; S is a whole number of pages
        page_table        [B, P]    int32: entry j of sequence s is row page_table[s, j // epp] * epp + j % epp
        seq_of_token      [T]       int32
        visible           [T]       int32, entries at or past visible[t] are masked; at most P * entries_per_page
        out               [T, n]    cd, optional, last dimension contiguous
    Returns:
        [T, n] cd: bf16(sum_h f32(bf16(relu(bf16(q_h . k_j)) * w_h))); columns at or past visible[t] are -inf. The row stride is
        padded to a multiple of 64 when out is not given.
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or range
        RuntimeError           not contiguous on CUDA; GPU or build cannot run it
    Deterministic, and a token's scores do not depend on the batch. The head sum's order is fixed (csrc/indexer/score_tile.cuh).
    Synchronises: no. Rows that nobody sees may hold anything. A token without visible entries gets a row of -inf.
    Workspace: none (portable); sm90 about 4.1 KiB a token and 132 bytes a sequence and column. Same bits from every kernel.
    sm90 takes at most 32 heads of 128, at least 16 tokens a sequence, rows at most 2^26 apart and 2 GiB of workspace; the portable
    kernel runs instead for other work, which is logged once.
    Kernels: csrc/indexer/logits.cu, logits_sm90.cu. Reference: ops.reference.indexer.logits.
    """
    op = "indexer.logits"
    tokens, heads, head_dim = _check_score(
        op, q_codes, q_scale, weights, keys, page_table, seq_of_token, visible, entries_per_page
    )
    if num_cols < 0:
        raise ValueError(f"{op}: num_cols must not be negative, got {num_cols}")
    if out is None:  # rows start on 128 bytes: topk reads them with 16-byte loads; the padding is never read
        out = weights.new_empty((tokens, -(-num_cols // 64) * 64))[:, :num_cols]
    else:
        check_operand(op, "out", out, (weights.dtype,), {"T": tokens, "n": num_cols}, weights)
    impl = select(op, weights, impl=impl)
    if out.numel() == 0:
        return out
    operands = (q_codes, q_scale, weights, keys, page_table, seq_of_token, visible, entries_per_page)
    if impl == "reference":
        return reference.logits(*operands, num_cols, out)
    _check_kernel(op, impl, heads, head_dim)
    if impl != "sm90":
        call(op, impl, *operands, out)
        return out
    num_seqs = page_table.shape[0]
    size = _logits_workspace_bytes(tokens, num_seqs, num_cols)
    if reason := _why_no_folded_logits(tokens, heads, head_dim, num_seqs, out.stride(0), size):
        _log_portable(op, reason)
        call(op, "portable", *operands, out)
    else:
        call(op, impl, *operands, weights.new_empty(size, dtype=torch.uint8), out)
    return out


def candidate_blocks(
    logits: Tensor, visible: Tensor, block_size: int, num_blocks: int, *, impl: str | None = None
) -> Tensor:
    """The num_blocks best blocks of block_size entries by their largest score (model spec 5.5).

    Shapes: T tokens, n columns.
        logits   [T, n]  cd or float32, last dimension contiguous
        visible  [T]     int32, columns at or past visible[t] do not count
    Returns:
        [T, num_blocks] int32, ascending, -1 behind. The newest visible block, (visible - 1) // block_size, is always in; other
        blocks only with a score above -inf; ties to the lower block. A token without visible entries gets only -1.
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or range
        RuntimeError           GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none. NaN counts as -inf.
    Kernel: csrc/indexer/topk.cu, select_row.cuh. Reference: ops.reference.indexer.candidate_blocks.
    """
    op = "indexer.candidate_blocks"
    check_operand(op, "logits", logits, COMPUTE_DTYPES, {"T": None, "n": None})
    tokens, columns = logits.shape
    check_operand(op, "visible", visible, (torch.int32,), {"T": tokens}, logits)
    _check_positive(op, "block_size", block_size)
    _check_positive(op, "num_blocks", num_blocks)
    impl = select(op, logits, impl=impl, compute_dtype=torch.bfloat16)
    if tokens == 0 or columns == 0:
        return torch.full((tokens, num_blocks), -1, dtype=torch.int32, device=logits.device)
    if impl == "reference":
        return reference.candidate_blocks(logits, visible, block_size, num_blocks)
    blocks = logits.new_empty((tokens, num_blocks), dtype=torch.int32)
    call(op, impl, logits, visible, block_size, blocks)
    return blocks


def candidate_logits(
    q_codes: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    seq_of_token: Tensor,
    visible: Tensor,
    entries_per_page: int,
    candidates: Tensor,
    block_size: int,
    *,
    impl: str | None = None,
) -> Tensor:
    """Index scores of the entries of each token's candidate blocks, and of nothing else (model spec 5.5).

    Shapes: as logits; C candidate blocks.
        candidates  [T, C]  int32 block ids, -1 = none
    Returns:
        [T, C * block_size] cd: column c * block_size + i is entry candidates[t, c] * block_size + i, with the bits logits gives
        it; -inf where the block is -1 or the entry is not visible
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or range
        RuntimeError           not contiguous on CUDA; GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none (portable); sm90 about 5.6 KiB and 4 bytes a candidate for every token. Same
    bits from every kernel. sm90 takes at most 32 heads of 128, 8,192 candidates of 8 entries in pages of whole blocks, 2^21 entries
    in all page tables but not more than it scores, keys on 16 bytes and 2 GiB of workspace; the portable kernel runs instead for
    other work, which is logged once.
    Kernels: csrc/indexer/candidate_logits.cu, candidate_logits_sm90.cu. Reference: ops.reference.indexer.candidate_logits.
    """
    op = "indexer.candidate_logits"
    tokens, heads, head_dim = _check_score(
        op, q_codes, q_scale, weights, keys, page_table, seq_of_token, visible, entries_per_page
    )
    check_operand(op, "candidates", candidates, (torch.int32,), {"T": tokens, "C": None}, q_codes)
    _check_positive(op, "block_size", block_size)
    impl = select(op, weights, impl=impl)
    out = weights.new_empty((tokens, candidates.shape[1] * block_size))
    if out.numel() == 0:
        return out
    operands = (q_codes, q_scale, weights, keys, page_table, seq_of_token, visible, entries_per_page, candidates, block_size)
    if impl == "reference":
        return reference.candidate_logits(*operands)
    _check_kernel(op, impl, heads, head_dim)
    if impl != "sm90":
        call(op, impl, *operands, out)
        return out
    num_seqs, entries, per_token = page_table.shape[0], page_table.shape[1] * entries_per_page, candidates.shape[1]
    size = _candidate_workspace_bytes(tokens, num_seqs, entries, per_token)
    if reason := _why_no_folded_candidates(
        tokens, heads, head_dim, keys, num_seqs * entries, entries_per_page, per_token, block_size, size
    ):
        _log_portable(op, reason)
        call(op, "portable", *operands, out)
    else:
        call(op, impl, *operands, weights.new_empty(size, dtype=torch.uint8), out)
    return out


def topk(
    logits: Tensor,
    visible: Tensor | None,
    k: int,
    candidates: Tensor | None = None,
    block_size: int = 0,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best columns of every row, ties to the lower column (model spec 5.4).

    Shapes: T tokens, n columns, K = k picks.
        logits      [T, n]  bfloat16 or float32, last dimension contiguous
        visible     [T]     int32 or None; columns at or past visible[t] are ignored
        k           int     >= 1
        candidates  [T, C]  int32 or None, with C * block_size == n: column c stands for entry
                            candidates[t, c // block_size] * block_size + c % block_size
    Returns:
        ids    [T, K]  int32, ascending where the candidates are; the tail of a short row is -1
        count  [T]     int32, how many ids the row has
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or range
        RuntimeError           GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none. NaN counts as -inf; -inf is never taken; -0 equals +0.
    Kernel: csrc/indexer/topk.cu, select_row.cuh. Reference: ops.reference.indexer.topk.
    """
    op = "indexer.topk"
    check_operand(op, "logits", logits, COMPUTE_DTYPES, {"T": None, "n": None})
    tokens, columns = logits.shape
    if visible is not None:
        check_operand(op, "visible", visible, (torch.int32,), {"T": tokens}, logits)
    _check_positive(op, "k", k)
    if candidates is not None:
        check_operand(op, "candidates", candidates, (torch.int32,), {"T": tokens, "C": None}, logits)
        _check_positive(op, "block_size", block_size)
        if candidates.shape[1] * block_size != columns:
            raise ValueError(
                f"{op}: logits must have C*block_size={candidates.shape[1]}*{block_size} columns for these candidates, "
                f"got n={columns}"
            )
    impl = select(op, logits, impl=impl, compute_dtype=torch.bfloat16)
    if tokens == 0 or columns == 0:
        ids = torch.full((tokens, k), -1, dtype=torch.int32, device=logits.device)
        return ids, torch.zeros(tokens, dtype=torch.int32, device=logits.device)
    if impl == "reference":
        return reference.topk(logits, visible, k, candidates, block_size)
    ids = logits.new_empty((tokens, k), dtype=torch.int32)
    count = logits.new_empty(tokens, dtype=torch.int32)
    call(op, impl, logits, visible, candidates, block_size, ids, count)
    return ids, count


def topk_blocks(
    logits: Tensor, visible: Tensor, k: int, block_size: int, num_blocks: int, *, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """topk without candidates and candidate_blocks of the same scores, which are read once (model spec 5.4, 5.5).

    Shapes: T tokens, n columns, K = k picks.
        logits   [T, n]  cd or float32, last dimension contiguous
        visible  [T]     int32, columns at or past visible[t] do not count
    Returns:
        ids     [T, K]           int32, as topk
        count   [T]              int32
        blocks  [T, num_blocks]  int32, as candidate_blocks
    Raises, NaN, ties: as the two ops. Deterministic. Synchronises: no. Workspace: none.
    Kernel: csrc/indexer/topk.cu (one reading: bfloat16 rows on 16 bytes, blocks of 8). Reference: ops.reference.indexer.topk_blocks.
    """
    op = "indexer.topk_blocks"
    check_operand(op, "logits", logits, COMPUTE_DTYPES, {"T": None, "n": None})
    tokens, columns = logits.shape
    check_operand(op, "visible", visible, (torch.int32,), {"T": tokens}, logits)
    for name, value in (("k", k), ("block_size", block_size), ("num_blocks", num_blocks)):
        _check_positive(op, name, value)
    impl = select(op, logits, impl=impl, compute_dtype=torch.bfloat16)
    if tokens == 0 or columns == 0:
        ids, count = topk(logits, visible, k, impl=impl)
        return ids, count, candidate_blocks(logits, visible, block_size, num_blocks, impl=impl)
    if impl == "reference":
        return reference.topk_blocks(logits, visible, k, block_size, num_blocks)
    ids = logits.new_empty((tokens, k), dtype=torch.int32)
    count = logits.new_empty(tokens, dtype=torch.int32)
    blocks = logits.new_empty((tokens, num_blocks), dtype=torch.int32)
    call(op, impl, logits, visible, block_size, ids, count, blocks)
    return ids, count, blocks


def cache_rows(
    ids: Tensor, page_table: Tensor, seq_of_token: Tensor, entries_per_page: int, *, impl: str | None = None
) -> Tensor:
    """Logical entry ids of each token's sequence -> physical cache rows.

    Shapes: T tokens, K picks, B sequences, P pages.
        ids           [T, K]  int32, -1 stays -1
        page_table    [B, P]  int32
        seq_of_token  [T]     int32
    Returns:
        [T, K] int32: page_table[seq, id // entries_per_page] * entries_per_page + id % entries_per_page
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or range
        RuntimeError           not contiguous on CUDA; GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none.
    Kernel: csrc/indexer/quantise.cu. Reference: ops.reference.indexer.cache_rows.
    """
    op = "indexer.cache_rows"
    check_operand(op, "ids", ids, (torch.int32,), {"T": None, "K": None})
    check_operand(op, "page_table", page_table, (torch.int32,), {"B": None, "P": None}, ids)
    check_operand(op, "seq_of_token", seq_of_token, (torch.int32,), {"T": ids.shape[0]}, ids)
    _check_positive(op, "entries_per_page", entries_per_page)
    impl = select(op, ids, impl=impl)
    if ids.numel() == 0:
        return torch.empty_like(ids)
    if impl == "reference":
        return reference.cache_rows(ids, page_table, seq_of_token, entries_per_page)
    rows = torch.empty_like(ids)
    call(op, impl, ids, page_table, seq_of_token, entries_per_page, rows)
    return rows


# -- self-tests ------------------------------------------------------------------------------------------------------


def _self_test_inputs(device: torch.device) -> dict[str, Tensor]:
    """Two sequences of 300 and 40 entries; forty tokens, enough for the kernels that fold, one of which sees nothing."""
    gen = torch.Generator().manual_seed(0)
    tokens, heads, dim = 40, 32, 128

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).bfloat16()

    q, k, angle = normal(tokens, heads, dim), normal(640, dim), torch.randn(tokens, 32, generator=gen)
    codes, scale = reference.quant_query(q)
    seq = torch.arange(tokens) // 32
    operands = {"q": q, "k": k, "codes": codes, "scale": scale, "weights": normal(tokens, heads) * 2.0**-6, "keys": pack_keys(k)}
    operands |= {"positions": torch.arange(tokens).int(), "table": torch.stack((angle.cos(), angle.sin()), -1)}
    operands |= {"slots": torch.randperm(640, generator=gen).int() - 1, "rows": torch.zeros(640, dim // 2 + dim // 32, dtype=torch.uint8)}
    operands |= {"pages": torch.tensor([[3, 0, 8, 1, 9], [2, 7, 4, 5, 6]]).int(), "seq": seq.int()}
    operands |= {"visible": torch.where(seq == 0, 261 + torch.arange(tokens), torch.arange(tokens) - 32).int()}
    operands |= {"candidates": torch.arange(2, 30).int().repeat(tokens, 1), "scores": normal(tokens, 320)}
    operands |= {"ids": torch.randint(-1, 300, (tokens, 20), generator=gen).int()}
    return {name: operand.to(device) for name, operand in operands.items()}


def _operands(i: dict[str, Tensor]) -> dict[str, Any]:
    names = {"q_codes": "codes", "q_scale": "scale", "weights": "weights", "keys": "keys", "page_table": "pages", "seq_of_token": "seq"}
    return {name: i[key] for name, key in names.items()} | {"visible": i["visible"], "entries_per_page": 64}


def _run_write_keys(i: dict[str, Tensor], impl: str) -> Tensor:
    write_keys(i["k"], i["rows"], i["slots"], impl=impl)
    return i["rows"]


for _name, _run, _bound in (
    ("write_keys", _run_write_keys, 0.0),
    ("quant_query", lambda i, impl: quant_query(i["q"], impl=impl), 0.0),
    ("rope_quant_query", lambda i, impl: rope_quant_query(i["q"], i["positions"], i["table"], impl=impl), 0.0),
    ("logits", lambda i, impl: logits(**_operands(i), num_cols=310, impl=impl), 2.0**-7),  # a library sums the heads in another order
    ("candidate_blocks", lambda i, impl: candidate_blocks(i["scores"], i["visible"], 8, 7, impl=impl), 0.0),
    ("candidate_logits", lambda i, impl: candidate_logits(**_operands(i), candidates=i["candidates"], block_size=8, impl=impl), 2.0**-7),
    ("topk", lambda i, impl: topk(i["scores"], i["visible"], 16, impl=impl), 0.0),
    ("topk_blocks", lambda i, impl: topk_blocks(i["scores"], i["visible"], 16, 8, 7, impl=impl), 0.0),
    ("cache_rows", lambda i, impl: cache_rows(i["ids"], i["pages"], i["seq"], 64, impl=impl), 0.0),
):
    register_self_test(f"indexer.{_name}", _self_test_inputs, _run, _bound)
