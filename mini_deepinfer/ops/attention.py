"""Attention ops: packed KV rows, compressor pooling and sparse attention over the caches (model spec 4.3 to 4.6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops._dispatch import call, register_self_test, select
from mini_deepinfer.ops._operands import COMPUTE_DTYPES, check_eps, check_groups, check_operand, check_out, check_rotary, dtype_name
from mini_deepinfer.ops.reference import attention as reference

KERNEL_HEAD_DIM = 512  # the only D the compiled sparse attention takes
MAX_HEADS = 128
MAX_ROPE_DIM = 64  # of the Hopper kernels that rotate
EXPAND_READS = 8  # lanes that read a row, on average, from which on the model expands the rows first; it bounds their memory
CODE_HEADS = 8  # heads of a row that the Hopper kernels quantise


def _write_rows(op: str, name: str, values: Tensor, rows: Tensor, slots: Tensor, bytes_per_32: int, impl: str | None) -> str | None:
    """Checks shared by the two row writers. Returns the implementation, None when there is nothing to write."""
    check_operand(op, name, values, COMPUTE_DTYPES, {"rows": None, "D": None}, values)
    count, dim = values.shape
    check_groups(op, name, dim)
    check_operand(op, "rows", rows, (torch.uint8,), {"S": None, "row bytes": dim // 32 * bytes_per_32}, values)
    check_operand(op, "slots", slots, (torch.int32,), {"rows": count}, values)
    return select(op, values, impl=impl) if count else None


def write_window(kv: Tensor, rows: Tensor, slots: Tensor, *, impl: str | None = None) -> None:
    """Quantise window keys to FP8 rows and store them by slot (model spec 4.4).

    Shapes: T tokens, S pool rows, D head dim, D % 32 == 0.
        kv     [T, D]           bfloat16 or float32, after RoPE; last dim contiguous, row stride a multiple of 8
        rows   [S, D + D/32]    uint8, contiguous: D E4M3 codes, then D/32 E8M0 scale bytes; written in place
        slots  [T]              int32, destination row; negative = skip. Two equal slots: one of the two rows, unspecified
    Returns: None. Rows without a slot are left as they are.
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device
        RuntimeError           strides or alignment on CUDA; GPU or build cannot run it
    Deterministic for distinct slots. Synchronises: no. NaN or Inf: the scale byte of its group is 255 (decodes to NaN).
    Kernel: csrc/attention/write_rows.cu. Reference: ops.reference.attention.write_window.
    """
    op = "attention.write_window"
    chosen = _write_rows(op, "kv", kv, rows, slots, 33, impl)
    if chosen == "reference":
        reference.write_window(kv, rows, slots)
    elif chosen is not None:
        call(op, chosen, kv, rows, slots)


def write_normed_window(
    x: Tensor, weight: Tensor, eps: float, positions: Tensor, table: Tensor, rows: Tensor, slots: Tensor, *, impl: str | None = None
) -> None:
    """RMSNorm, rotary embedding of the last R columns, then `write_window` (model spec 4.4): one pass with the bits of the three.

    Shapes: T tokens, S pool rows, D head dim, D % 32 == 0, R rotary dims, P positions; on CUDA D <= 512 and R % 8 == 0.
        x          [T, D]         bfloat16 or float32, the projection; last dim contiguous, row stride a multiple of 8
        weight     [D]            bfloat16 or float32, of the norm
        eps        float          added to the mean square
        positions  [T]            int32, 0 <= positions[t] < P (not checked on CUDA: that would wait for the GPU)
        table      [P, R/2, 2]    float32, (cos, sin)
        rows       [S, D + D/32]  uint8, contiguous; written in place
        slots      [T]            int32, destination row; negative = skip
    Returns, raises, determinism: as write_window.
    Kernel: csrc/attention/write_rows.cu. Reference: ops.reference.attention.write_normed_window.
    """
    op = "attention.write_normed_window"
    chosen = _write_rows(op, "x", x, rows, slots, 33, impl)
    check_operand(op, "weight", weight, COMPUTE_DTYPES, {"D": x.shape[1]}, x)
    check_rotary(op, "x", x, positions, table)
    check_eps(op, "eps", eps)
    if chosen == "reference":
        reference.write_normed_window(x, weight, eps, positions, table, rows, slots)
    elif chosen is not None:
        call(op, chosen, x, weight, eps, positions, table, rows, slots)


def write_compressed(latent: Tensor, rows: Tensor, slots: Tensor, *, impl: str | None = None) -> None:
    """Quantise compressed latents to FP4 rows and store them by slot (model spec 4.4).

    Shapes: G groups, S pool rows, D head dim, D % 32 == 0.
        latent  [G, D]            bfloat16 or float32, after RoPE; last dim contiguous, row stride a multiple of 8
        rows    [S, D/2 + D/16]   uint8, contiguous: D/2 bytes of E2M1 pairs (even element in the low nibble), then
                                  D/16 E4M3 scales; written in place
        slots   [G]               int32, destination row; negative = skip. Two equal slots: one of the two, unspecified
    Returns: None. Rows without a slot are left as they are.
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device
        RuntimeError           strides or alignment on CUDA; GPU or build cannot run it
    Deterministic for distinct slots. Synchronises: no. NaN: the scale of its group is NaN; Inf saturates.
    Kernel: csrc/attention/write_rows.cu. Reference: ops.reference.attention.write_compressed.
    """
    op = "attention.write_compressed"
    chosen = _write_rows(op, "latent", latent, rows, slots, 18, impl)
    if chosen == "reference":
        reference.write_compressed(latent, rows, slots)
    elif chosen is not None:
        call(op, chosen, latent, rows, slots)


def expand_rows(
    packed: Tensor, dim: int, pages: Tensor | None = None, page_rows: int = 1, *, out: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """The values of packed rows as `sparse` can read them without decoding: for rows that many queries read.

    Shapes: S pool rows, D head dim, M pages.
        packed     [S, D + D/32] or [S, D/2 + D/16]  uint8, contiguous: window or compressed rows (model spec 4.4)
        dim        D
        pages      [M]           int32 or None: page i of the result is page pages[i] of `packed`
        page_rows  rows of a page; without pages it has no meaning
        out        [R, D]        bfloat16, contiguous, optional
    Returns:
        [R, D] bfloat16, R = M * page_rows, or S without pages: the values divided by 512, as the kernels' tiles have them. Exact
        above 2^-117. Rows outside `packed` are left as they are in out.
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device
        RuntimeError           strides or alignment on CUDA; GPU or build cannot run it
    Deterministic. Synchronises: no. NaN codes or scales give NaN in their group of columns, or in eight of them.
    Kernel (D = 512): csrc/attention/expand_rows.cu. Reference: ops.reference.attention.expand_rows.
    """
    op = "attention.expand_rows"
    check_groups(op, "packed", dim)
    check_operand(op, "packed", packed, (torch.uint8,), {"S": None, "row bytes": None}, packed)
    window_bytes, compressed_bytes = reference.window_bytes(dim), reference.compressed_bytes(dim)
    if packed.shape[1] not in (window_bytes, compressed_bytes):
        raise ValueError(
            f"{op}: packed must have rows of {window_bytes} bytes (window) or {compressed_bytes} (compressed) for D={dim}, "
            f"got {list(packed.shape)}"
        )
    num_rows = packed.shape[0]
    if pages is not None:
        check_operand(op, "pages", pages, (torch.int32,), {"M": None}, packed)
        if page_rows < 1:
            raise ValueError(f"{op}: page_rows must be at least 1, got {page_rows}")
        num_rows = pages.shape[0] * page_rows
    if out is None:
        out = packed.new_empty(num_rows, dim, dtype=torch.bfloat16)
    check_operand(op, "out", out, (torch.bfloat16,), {"R": num_rows, "D": dim}, packed)
    chosen = select(op, packed, impl=impl) if num_rows else None
    if chosen == "reference":
        reference.expand_rows(packed, pages, page_rows, out)
    elif chosen is not None:
        _check_head_dim(op, dim)
        call(op, chosen, packed, pages, page_rows, out)
    return out


def takes_expanded(q: Tensor) -> bool:
    """Whether the kernels chosen for q read expanded rows, and can make them. MDI_OPS=attention.expand_rows=reference: no."""
    return select("attention.sparse", q) == "sm90" and select("attention.expand_rows", q) != "reference"


def compress(
    kv: Tensor,
    score: Tensor | None,
    tail_kv: Tensor | None,
    tail_score: Tensor | None,
    group_rows: Tensor,
    out_dtype: torch.dtype,
    *,
    impl: str | None = None,
) -> Tensor:
    """Pool r tokens to one row: softmax of the scores over the group, channel by channel, in float32 (model spec 4.3).

    Shapes: T tokens, G groups, r tokens per group, D head dim.
        kv          [T, D]      float32
        score       [T, D]      float32; None (then r must be 1): the row itself, rounded
        tail_kv     [tail, D]   float32 or None: rows kept from the step before
        tail_score  [tail, D]   float32 or None, together with tail_kv
        group_rows  [G, r]      int32; v < T is row v of kv, v >= T is row v - T of the tail
        out_dtype   bfloat16 or float32
    Returns:
        [G, D] out_dtype
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or combination
        RuntimeError           strides or alignment on CUDA; GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none. NaN propagates. Rows outside kv and the tail are the caller's error.
    Kernel: csrc/attention/compress.cu. Reference: ops.reference.attention.compress.
    """
    op = "attention.compress"
    check_operand(op, "kv", kv, (torch.float32,), {"T": None, "D": None}, kv)
    tokens, dim = kv.shape
    check_operand(op, "group_rows", group_rows, (torch.int32,), {"G": None, "r": None}, kv)
    groups, ratio = group_rows.shape
    if out_dtype not in COMPUTE_DTYPES:
        raise TypeError(f"{op}: out_dtype must be bfloat16 or float32, got {dtype_name(out_dtype)}")
    if ratio < 1 or (score is None and ratio != 1):
        raise ValueError(f"{op}: score must be given unless r = 1, got group_rows {list(group_rows.shape)} and no score")
    if (tail_kv is None) != (tail_score is None):
        raise ValueError(f"{op}: tail_kv and tail_score must be given together, got only one of them")
    if score is not None:
        check_operand(op, "score", score, (torch.float32,), {"T": tokens, "D": dim}, kv)
    if tail_kv is not None and tail_score is not None:
        check_operand(op, "tail_kv", tail_kv, (torch.float32,), {"tail": None, "D": dim}, kv)
        check_operand(op, "tail_score", tail_score, (torch.float32,), {"tail": tail_kv.shape[0], "D": dim}, kv)
    if groups == 0:
        return kv.new_empty(0, dim, dtype=out_dtype)
    chosen = select(op, kv, impl=impl, compute_dtype=out_dtype)
    if chosen == "reference":
        return reference.compress(kv, score, tail_kv, tail_score, group_rows, out_dtype)
    out = kv.new_empty(groups, dim, dtype=torch.bfloat16)
    call(op, chosen, kv, score, tail_kv, tail_score, group_rows, out)
    return out


def sparse(
    q: Tensor,
    window: Tensor,
    window_idx: Tensor,
    compressed: Tensor | None,
    compressed_idx: Tensor | None,
    compressed_len: Tensor | None,
    sink: Tensor,
    softmax_scale: float,
    *,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of every token over its own window and picked compressed rows, K = V (model spec 4.5, 4.6).

    Shapes: T tokens, H heads, D head dim, W window lanes, K picks, Sw and Sc pool rows.
        q               [T, H, D]            bfloat16 or float32; heads and dims contiguous, any token stride % 8 == 0
        window          [Sw, D + D/32]       uint8, packed FP8 rows; or [Sw, D] bfloat16, those of `expand_rows`
        window_idx      [T, W]               int32, row of `window`; negative = skip, anywhere
        compressed      [Sc, D/2 + D/16]     uint8, packed FP4 rows, or None; or [Sc, D] bfloat16 with such a window
        compressed_idx  [T, K]               int32, row of `compressed`; negative = skip, anywhere; None with compressed
        compressed_len  [T]                  int32 or None (= K): lanes at or past it are ignored whatever they hold
        sink            [H]                  float32, a scaled logit; only in the softmax denominator
        softmax_scale   float                multiplies q.k in float32, before the running maximum
        out             [T, H, D]            like q, contiguous, optional; must not overlap q
    Returns:
        [T, H, D] of q's dtype; a token without a valid lane gives exactly 0
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or combination; D or H that no kernel takes
        RuntimeError           strides or alignment on CUDA; GPU or build cannot run it
    The slots are the window lanes, then the compressed lanes, in blocks of 64; a row may be listed more than once.
    Skipped lanes are never read through; the kernels also skip rows outside the pool. Probabilities are rounded to q's
    dtype for the product with the values, not for their sum. Deterministic, and independent of the other tokens.
    Synchronises: no. Workspace: none. NaN in a valid lane makes its heads NaN. Expanded rows give the bits of the packed ones.
    Kernels (D = 512, H a multiple of 4 up to 128): csrc/attention/sparse_sm90.cu, csrc/attention/sparse_split_sm90.cu (few
    tokens; the same bits), csrc/attention/sparse.cu. The model calls `sparse_rope` or `sparse_rope_quant`.
    Reference: ops.reference.attention.sparse.
    """
    op = "attention.sparse"
    _check_sparse(op, q, window, window_idx, compressed, compressed_idx, compressed_len, sink)
    out = check_out(op, out, q, "T", "H", "D")
    if q.shape[0] == 0:
        return out
    chosen = _select_sparse(op, q, window, impl)
    if chosen == "reference":
        return reference.sparse(q, window, window_idx, compressed, compressed_idx, compressed_len, sink, softmax_scale, out)
    _check_kernel_sizes(op, q)
    call(op, chosen, q, window, window_idx, compressed, compressed_idx, compressed_len, sink, softmax_scale, out)
    return out


def _check_sparse(
    op: str,
    q: Tensor,
    window: Tensor,
    window_idx: Tensor,
    compressed: Tensor | None,
    compressed_idx: Tensor | None,
    compressed_len: Tensor | None,
    sink: Tensor,
) -> None:
    """The operands that all forms of sparse attention share."""
    check_operand(op, "q", q, COMPUTE_DTYPES, {"T": None, "H": None, "D": None}, q)
    tokens, heads, dim = q.shape
    if dim == 0 or dim % 32:
        raise ValueError(f"{op}: q must have D a positive multiple of 32, got D={dim}")
    expanded = window.dtype == torch.bfloat16
    dtype = window.dtype if expanded else torch.uint8

    def row(packed_bytes: int) -> dict[str, int]:
        return {"D": dim} if expanded else {"row bytes": packed_bytes}

    check_operand(op, "window", window, (dtype,), {"Sw": None, **row(reference.window_bytes(dim))}, q)
    check_operand(op, "window_idx", window_idx, (torch.int32,), {"T": tokens, "W": None}, q)
    if (compressed is None) != (compressed_idx is None):
        raise ValueError(f"{op}: compressed and compressed_idx must be given together, got only one of them")
    if compressed is not None and compressed_idx is not None:
        check_operand(op, "compressed", compressed, (dtype,), {"Sc": None, **row(reference.compressed_bytes(dim))}, q)
        check_operand(op, "compressed_idx", compressed_idx, (torch.int32,), {"T": tokens, "K": None}, q)
    if compressed_len is not None:
        if compressed is None:
            raise ValueError(f"{op}: compressed_len needs compressed and compressed_idx, got neither")
        check_operand(op, "compressed_len", compressed_len, (torch.int32,), {"T": tokens}, q)
    check_operand(op, "sink", sink, (torch.float32,), {"H": heads}, q)


def _select_sparse(op: str, q: Tensor, window: Tensor, impl: str | None) -> str:
    chosen = select("attention.sparse", q, impl=impl)
    if chosen == "portable" and window.dtype != torch.uint8:
        raise ValueError(f"{op}: the portable kernel reads packed rows (uint8), got expanded ones ({dtype_name(window.dtype)})")
    return chosen


def _check_head_dim(op: str, dim: int) -> None:
    if dim != KERNEL_HEAD_DIM:
        raise ValueError(f"{op}: the CUDA kernel takes D={KERNEL_HEAD_DIM}, got D={dim}. MDI_OPS={op}=reference runs any size (slow).")


def _check_kernel_sizes(op: str, q: Tensor) -> None:
    _, heads, dim = q.shape
    if dim != KERNEL_HEAD_DIM or heads % 4 or not 4 <= heads <= MAX_HEADS:
        raise ValueError(
            f"{op}: the CUDA kernels take D={KERNEL_HEAD_DIM} and H a multiple of 4 from 4 to {MAX_HEADS}, got D={dim} H={heads}. "
            f"MDI_OPS=attention.sparse=reference runs any size (slow)."
        )


def _rotates(chosen: str, table: Tensor) -> bool:
    """Whether the kernels of an implementation of attention.sparse rotate what they read and write."""
    rope_dim = 2 * table.shape[1]
    return chosen == "sm90" and rope_dim % 8 == 0 and rope_dim <= MAX_ROPE_DIM


def sparse_rope(
    q: Tensor,
    window: Tensor,
    window_idx: Tensor,
    compressed: Tensor | None,
    compressed_idx: Tensor | None,
    compressed_len: Tensor | None,
    sink: Tensor,
    softmax_scale: float,
    positions: Tensor,
    table: Tensor,
    *,
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """`sparse` between `elementwise.rope` of q and the inverse of its output (model spec 4.2, 4.5 to 4.7), with the bits of the three.

    Shapes: as sparse; R rotary dims (the last R of D), P positions.
        q          [T, H, D]    not rotated; may be rotated in place: do not use it afterwards
        positions  [T]          int32, 0 <= positions[t] < P (not checked on CUDA: that would wait for the GPU)
        table      [P, R/2, 2]  float32, (cos, sin)
        the others              as in sparse
    Returns:
        [T, H, D] of q's dtype: out, or a new tensor
    Raises: as sparse, also for positions and table. Determinism: as sparse.
    Dispatched as attention.sparse. The Hopper kernels rotate q and the output themselves (R a multiple of 8 up to 64,
    csrc/attention/sparse_output_sm90.cuh); otherwise the separate ops run. Reference: ops.reference.attention.sparse_rope.
    """
    op = "attention.sparse_rope"
    _check_sparse(op, q, window, window_idx, compressed, compressed_idx, compressed_len, sink)
    check_rotary(op, "q", q, positions, table)
    out = check_out(op, out, q, "T", "H", "D")
    if q.shape[0] == 0:
        return out
    operands = (window, window_idx, compressed, compressed_idx, compressed_len, sink, softmax_scale)
    chosen = _select_sparse(op, q, window, impl)
    if chosen == "reference":
        return reference.sparse_rope(q, *operands, positions, table, out)
    _check_kernel_sizes(op, q)
    if _rotates(chosen, table):
        call(op, chosen, q, *operands, positions, table, out)
        return out
    q = elementwise.rope(q, positions, table, out=q)
    sparse(q, *operands, out=out, impl=chosen)
    return elementwise.rope(out, positions, table, inverse=True, out=out)


def sparse_rope_quant(
    q: Tensor,
    window: Tensor,
    window_idx: Tensor,
    compressed: Tensor | None,
    compressed_idx: Tensor | None,
    compressed_len: Tensor | None,
    sink: Tensor,
    softmax_scale: float,
    positions: Tensor,
    table: Tensor,
    *,
    groups: int,
    folded: bool,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`sparse` of the rotated q, then `elementwise.rope_quant` of its output by the inverse rotation (model spec 4.7, 8): the same bits.

    Shapes: as sparse_rope; g groups of heads, K = H*D/g.
        groups     g, divides H; K % 32 == 0
        folded     one scale for each row of K columns, or one for each 32 columns
        the others as in sparse_rope
    Returns:
        codes  [T, g, K]     float8_e4m3fn
        scale  [T, g, K/32]  uint8 E8M0 bytes, or with folded=True [T, g] float32 row scales
    Raises: as sparse, also for positions, table and groups. Determinism: as sparse.
    Dispatched as attention.sparse. The Hopper kernels do all of it for folded rows of eight heads and R as in sparse_rope; otherwise
    the separate ops run. Reference: ops.reference.attention.sparse_rope_quant.
    """
    op = "attention.sparse_rope_quant"
    _check_sparse(op, q, window, window_idx, compressed, compressed_idx, compressed_len, sink)
    check_rotary(op, "q", q, positions, table)
    tokens, heads, dim = q.shape
    if groups < 1 or heads % groups or heads // groups * dim % 32:
        raise ValueError(f"{op}: groups must divide the H={heads} heads of q, got {groups}")
    operands = (window, window_idx, compressed, compressed_idx, compressed_len, sink, softmax_scale)
    chosen = _select_sparse(op, q, window, impl)
    if chosen == "reference":
        return reference.sparse_rope_quant(q, *operands, positions, table, groups=groups, folded=folded)
    _check_kernel_sizes(op, q)
    if _rotates(chosen, table) and folded and heads == groups * CODE_HEADS:
        codes = q.new_empty((tokens, groups, heads // groups * dim), dtype=torch.float8_e4m3fn)
        row_scale = q.new_empty((tokens, groups), dtype=torch.float32)
        if tokens:
            call(op, chosen, q, *operands, positions, table, codes, row_scale)
        return codes, row_scale
    q = elementwise.rope(q, positions, table, out=q)
    o = sparse(q, *operands, impl=chosen)
    return elementwise.rope_quant(o, positions, table, groups, inverse=True, folded=folded)


# -- self-tests ------------------------------------------------------------------------------------------------------


def _self_test_inputs(device: torch.device) -> dict[str, Any]:
    """Five tokens: full, with holes, short, window only, empty; 68 heads, so that the second head block is ragged."""
    tokens, heads, dim, window, picks = 5, 68, KERNEL_HEAD_DIM, 128, 200
    gen = torch.Generator().manual_seed(0)
    pools = [pack(torch.randn(300, dim, generator=gen).bfloat16()) for pack in (reference.pack_window, reference.pack_compressed)]
    lanes = [torch.randint(300, (tokens, count), generator=gen, dtype=torch.int32) for count in (window, picks)]
    lanes[0][1, ::3] = lanes[1][1, ::5] = -1
    lanes[0][4] = -1
    lengths = torch.tensor([picks, picks, 70, 0, 0], dtype=torch.int32)
    q = torch.randn(tokens, heads, dim, generator=gen).bfloat16()
    operands = {"q": q, "window": pools[0], "window_idx": lanes[0], "compressed": pools[1], "compressed_idx": lanes[1]}
    operands |= {"compressed_len": lengths, "sink": torch.randn(heads, generator=gen)}
    angle = 6.28 * torch.rand(9, MAX_ROPE_DIM // 2, generator=gen)
    operands |= {"positions": torch.tensor([8, 0, 3, 3, 5], dtype=torch.int32), "table": torch.stack((angle.cos(), angle.sin()), -1)}
    return {name: operand.to(device) for name, operand in operands.items()}


def _self_test_run(inputs: dict[str, Any], impl: str) -> tuple[Tensor, Tensor]:
    common = {"softmax_scale": KERNEL_HEAD_DIM**-0.5, "impl": impl}
    plain = {name: operand for name, operand in inputs.items() if name not in ("positions", "table")}
    return sparse(**plain, **common), sparse_rope(**{**inputs, "q": inputs["q"].clone()}, **common)


register_self_test("attention.sparse", _self_test_inputs, _self_test_run, bound=2.0**-7)


def _writer_inputs(device: torch.device) -> dict[str, Tensor]:
    """Nine rows over many binades; one is not stored. float32 rows and scores for the compressor, one of its groups begins in a tail."""
    gen = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    angle = normal(9, 32)
    operands = {"x": (normal(9, 512) * torch.exp2(torch.arange(9.0) - 4)[:, None]).bfloat16(), "weight": normal(512).bfloat16()}
    operands |= {"positions": torch.arange(9).int(), "table": torch.stack((angle.cos(), angle.sin()), -1)}
    operands |= {"slots": torch.tensor([11, 0, -1, 3, 9, 1, 2, 5, 7]).int(), "rows": torch.zeros(12, 528, dtype=torch.uint8)}
    operands |= {"kv": normal(8, 512), "score": normal(8, 512), "tail_kv": normal(2, 512), "tail_score": normal(2, 512)}
    operands |= {"groups": torch.tensor([[9, 0], [1, 2], [3, 4]]).int()}
    return {name: operand.to(device) for name, operand in operands.items()}


def _run_window(i: dict[str, Tensor], impl: str) -> Tensor:
    write_window(i["x"], i["rows"], i["slots"], impl=impl)
    return i["rows"]


def _run_normed_window(i: dict[str, Tensor], impl: str) -> Tensor:
    """As values: where the norm differs in its last bit, a code may be the next one."""
    write_normed_window(i["x"], i["weight"], 1e-20, i["positions"], i["table"], i["rows"], i["slots"], impl=impl)
    return reference.unpack_window(i["rows"])


def _run_compressed(i: dict[str, Tensor], impl: str) -> Tensor:
    rows = i["rows"][:, :288].contiguous()
    write_compressed(i["x"], rows, i["slots"], impl=impl)
    return rows


def _run_compress(i: dict[str, Tensor], impl: str) -> Tensor:
    return compress(i["kv"], i["score"], i["tail_kv"], i["tail_score"], i["groups"], torch.bfloat16, impl=impl)


def _run_expand(i: dict[str, Tensor], impl: str) -> tuple[Tensor, Tensor]:
    """Two pages of window rows in the other order, and compressed rows."""
    write_window(i["x"], i["rows"], i["slots"], impl="reference")
    compressed = i["rows"][:, :288].contiguous()
    write_compressed(i["x"], compressed, i["slots"], impl="reference")
    pages = torch.tensor([1, 0], dtype=torch.int32, device=i["x"].device)
    return expand_rows(i["rows"], KERNEL_HEAD_DIM, pages, 6, impl=impl), expand_rows(compressed, KERNEL_HEAD_DIM, impl=impl)


register_self_test("attention.expand_rows", _writer_inputs, _run_expand, bound=0.0)
register_self_test("attention.write_window", _writer_inputs, _run_window, bound=0.0)
register_self_test("attention.write_normed_window", _writer_inputs, _run_normed_window, bound=2.0**-4)
register_self_test("attention.write_compressed", _writer_inputs, _run_compressed, bound=0.0)
register_self_test("attention.compress", _writer_inputs, _run_compress, bound=2.0**-7)
