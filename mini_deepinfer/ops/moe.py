"""MoE ops: router, row permutation, grouped expert products, SwiGLU with quantisation, combine (model spec 6).

Letters: T tokens, N hidden, E experts, k picks per token, M routed rows (at most T * k), K and O columns and outputs of a
product, F expert hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops._dispatch import call, register_self_test, select
from mini_deepinfer.ops._operands import COMPUTE_DTYPES, check_operand
from mini_deepinfer.ops.packed_weight import BINADES, PackedWeight, pack_weight
from mini_deepinfer.ops.reference import moe as reference
from mini_deepinfer.ops.reference import number_formats

_PERMUTE_BLOCK_SLOTS = 2048  # kPermuteBlockSlots of csrc/moe/moe.h: slots of one block, sizes the workspace
_MAX_FOLD_HIDDEN = 8192  # F of swiglu_fold


def route(x: Tensor, weight: Tensor, bias: Tensor, k: int, scaling: float, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Choose k experts for every token by sqrt(softplus(x W^T)) + bias, ties to the lower id (model spec 6.1).

    Shapes: T tokens, N hidden, E experts.
        x       [T, N]  bfloat16 or float32, contiguous
        weight  [E, N]  bfloat16 or float32, contiguous; the kernel takes bfloat16
        bias    [E]     float32, for the selection only
        k       int     1 <= k <= E (kernel: k <= 32, E <= 512, N a multiple of 32)
    Returns:
        ids     [T, k]  int32, ascending
        weights [T, k]  float32: score / (sum + 1e-20) * scaling, the sum in order of selection
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or k
        RuntimeError           not contiguous, or past the kernel's limits
    Deterministic; a token's result does not depend on T. Synchronises: no. Workspace: none. NaN: counts as the largest
    score and makes the token's weights NaN.
    Kernels: csrc/moe/route_sm90.cu (E <= 384, more go to the portable one), route.cu; same bits. Reference: ops.reference.moe.route.
    """
    op = "moe.route"
    check_operand(op, "x", x, COMPUTE_DTYPES, {"T": None, "N": None})
    t, n = x.shape
    check_operand(op, "weight", weight, COMPUTE_DTYPES, {"E": None, "N": n}, x)
    e = weight.shape[0]
    check_operand(op, "bias", bias, (torch.float32,), {"E": e}, x)
    if not 1 <= k <= e:
        raise ValueError(f"{op}: k must be in 1..E={e}, got {k}")
    impl = select(op, x, impl=impl)
    if impl == "reference":
        return reference.route(x, weight, bias, k, scaling)
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"{op}: weight must be bfloat16 for the {impl} kernel, got float32. Cast with weight.bfloat16().")
    ids = x.new_empty(t, k, dtype=torch.int32)
    weights = x.new_empty(t, k, dtype=torch.float32)
    if t:
        call(op, impl, x, weight, bias, float(scaling), ids, weights)
    return ids, weights


def permute(ids: Tensor, first_expert: int, num_local: int, *, impl: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of this rank's experts, expert-major, inside an expert in ascending flat slot t * k + j.

    Shapes: T tokens, k picks.
        ids           [T, k]  int32, contiguous; experts outside first_expert .. first_expert + num_local - 1 get no row
        num_local     int     0 <= num_local (kernel: <= 1024, T * k < 2^31)
    Returns:
        row_of_slot   [T, k]           int32, -1 = another rank's expert
        slot_of_row   [T * k]          int32, -1 at and past offsets[-1]
        offsets       [num_local + 1]  int32, rows offsets[e] .. offsets[e+1] - 1 belong to local expert e
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or range
        RuntimeError           not contiguous, or past the kernel's limits
    Deterministic. Synchronises: no. Workspace: num_local int32 per 2,048 slots.
    Kernel: csrc/moe/permute.cu. Reference: ops.reference.moe.permute.
    """
    op = "moe.permute"
    check_operand(op, "ids", ids, (torch.int32,), {"T": None, "k": None})
    if first_expert < 0 or num_local < 0:
        raise ValueError(f"{op}: first_expert and num_local must be >= 0, got {first_expert} and {num_local}")
    impl = select(op, ids, impl=impl)
    if impl == "reference":
        return reference.permute(ids, first_expert, num_local)
    row_of_slot, slot_of_row, offsets, counts = _permute_outputs(ids, num_local)
    call(op, impl, ids, first_expert, num_local, row_of_slot, slot_of_row, offsets, counts)
    return row_of_slot, slot_of_row, offsets


def _permute_outputs(ids: Tensor, num_local: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """row_of_slot, slot_of_row, offsets and the workspace, uninitialised."""
    slots = ids.numel()
    slot_of_row = ids.new_empty(slots, dtype=torch.int32)
    offsets = ids.new_empty(num_local + 1, dtype=torch.int32)
    blocks = max(1, -(-slots // _PERMUTE_BLOCK_SLOTS))
    return torch.empty_like(ids), slot_of_row, offsets, ids.new_empty(blocks, num_local, dtype=torch.int32)


def dispatch(
    ids: Tensor, weights: Tensor, first_expert: int, num_local: int, *, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`permute`, and what the expert products want to know of every row, in the same launch.

    Shapes: T tokens, k picks; ids, first_expert and num_local as in permute.
        weights       [T, k]   float32 routing weights
    Returns:
        row_of_slot, slot_of_row, offsets   as permute
        token_of_row  [T * k]  int32, the token of each row; 0 at and past offsets[-1]
        row_weight    [T * k]  float32, the routing weight of each row; 0 at and past offsets[-1]
    Raises, determinism, kernel: as permute. Reference: ops.reference.moe.permute, the rest is read off its result.
    """
    op = "moe.permute"
    check_operand(op, "ids", ids, (torch.int32,), {"T": None, "k": None})
    t, k = ids.shape
    check_operand(op, "weights", weights, (torch.float32,), {"T": t, "k": k}, ids)
    if first_expert < 0 or num_local < 0:
        raise ValueError(f"{op}: first_expert and num_local must be >= 0, got {first_expert} and {num_local}")
    impl = select(op, ids, impl=impl)
    if impl == "reference":
        row_of_slot, slot_of_row, offsets = reference.permute(ids, first_expert, num_local)
        slot = slot_of_row.clamp(min=0)
        live = slot_of_row >= 0
        token_of_row = torch.div(slot, max(k, 1), rounding_mode="floor").to(torch.int32) * live
        return row_of_slot, slot_of_row, offsets, token_of_row, weights.flatten()[slot.long()] * live
    row_of_slot, slot_of_row, offsets, counts = _permute_outputs(ids, num_local)
    token_of_row = torch.empty_like(slot_of_row)
    row_weight = ids.new_empty(ids.numel(), dtype=torch.float32)
    outs = (row_of_slot, slot_of_row, offsets, token_of_row, row_weight)
    call("moe.dispatch", impl, ids, weights, first_expert, num_local, *outs, counts)
    return outs


def _product(
    op: str, weight: Tensor | PackedWeight, weight_scale: Tensor | None, a: Tensor, impl: str | None, compute_dtype: torch.dtype
) -> tuple[str, PackedWeight | tuple[Tensor, Tensor]]:
    """The implementation of grouped_gemm for a weight, and the weight in the form that it reads: sm90 packed, the others stored."""
    chosen = select("moe.grouped_gemm", a, impl=impl, compute_dtype=compute_dtype)
    if isinstance(weight, PackedWeight):
        if weight_scale is not None:
            raise ValueError(f"{op}: weight_scale must be None with a PackedWeight, which holds its scales")
        return chosen, weight if chosen == "sm90" else weight.unpack()
    if weight_scale is None:
        raise ValueError(f"{op}: weight_scale must be a tensor [E, O, K/32] with a stored weight, got None")
    if chosen != "sm90" or impl is None:
        return "portable" if chosen == "sm90" else chosen, (weight, weight_scale)
    packed = pack_weight(weight, weight_scale)
    if packed is None:
        raise RuntimeError(f"{op}: impl 'sm90' needs weight scales within {BINADES} binades in every row; use impl='portable'")
    return chosen, packed


def grouped_gemm(
    a: Tensor,
    a_scale: Tensor | None,
    weight: Tensor | PackedWeight,
    weight_scale: Tensor | None,
    offsets: Tensor,
    a_rows: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    impl: str | None = None,
) -> Tensor:
    """Row i of expert e (offsets[e] <= i < offsets[e+1]) times the MXFP4 weight of e, one rounding (model spec 6.2).

    Shapes: M rows of the product, K columns, E experts, O outputs; K and O multiples of 32.
        a             [M or any, K]     float8_e4m3fn, contiguous; bfloat16 or float32 when a_scale is None
        a_scale       [like a, K/32]    uint8 E8M0; None = unquantised activations (reference only)
        weight        [E, O, K/2]       uint8, two E2M1 codes a byte, even column in the low nibble, contiguous; or a PackedWeight
        weight_scale  [E, O, K/32]      uint8 E8M0, contiguous; None with a PackedWeight
        offsets       [E + 1]           int32, ascending from 0, offsets[E] <= M; on the device, never read by the host
        a_rows        [M]               int32, row of `a` for every row of the product; None = the same row
        out           [M, O]            optional; its dtype wins over out_dtype
    Returns:
        [M, O] out_dtype; rows at or past offsets[E] are not written (uninitialised when `out` is not given)
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device
        RuntimeError           not contiguous or not 16-byte aligned on CUDA; GPU or build cannot run it
    Deterministic; a row does not depend on its neighbours. Synchronises: no. Workspace: sm90 the gathered rows, M * K bytes. NaN:
    codes 0x7f and 0xff and scale byte 255 make their outputs NaN; weights of experts without rows are never read.
    sm90 runs for packed weights (pack_weight, once at the load); a stored one takes the portable kernel. With impl="sm90" a stored
    weight is packed, and with another product a packed one unpacked, for this call: right, slow, and it synchronises.
    sm90 multiplies in FP8 with one scale per row on both sides (docs/numerics.md): activations below rowmax / 28,500 are
    rounded, sums are promoted to fp32 every 128 columns. Weights whose scales spread too far for it cannot be packed.
    Kernels: csrc/moe/grouped_gemm_sm90.cu (with fold.cu), grouped_gemm.cu. Reference: ops.reference.moe.grouped_gemm.
    """
    op = "moe.grouped_gemm"
    check_operand(op, "a", a, COMPUTE_DTYPES if a_scale is None else (torch.float8_e4m3fn,), {"rows": None, "K": None})
    rows, k = a.shape
    if isinstance(weight, PackedWeight):
        e, o = weight.largest.shape
        check_operand(op, "weight.words", weight.words, (torch.int32,), {"E": e, "O": o, "K/8": k // 8}, a)
    else:
        check_operand(op, "weight", weight, (torch.uint8,), {"E": None, "O": None, "K/2": k // 2}, a)
        e, o = weight.shape[:2]
    if k % 32 or o % 32 or k == 0:
        raise ValueError(f"{op}: K and O must be multiples of 32, got K={k}, O={o}")
    if a_scale is not None:
        check_operand(op, "a_scale", a_scale, (torch.uint8,), {"rows": rows, "K/32": k // 32}, a)
    if weight_scale is not None:
        check_operand(op, "weight_scale", weight_scale, (torch.uint8,), {"E": e, "O": o, "K/32": k // 32}, a)
    check_operand(op, "offsets", offsets, (torch.int32,), {"E+1": e + 1}, a)
    if a_rows is not None:
        check_operand(op, "a_rows", a_rows, (torch.int32,), {"M": None}, a)
    m = rows if a_rows is None else a_rows.shape[0]
    if out is not None:
        check_operand(op, "out", out, COMPUTE_DTYPES, {"M": m, "O": o}, a)
        out_dtype = out.dtype
    if a_scale is None and impl is None:
        impl = "reference"  # no kernel multiplies unquantised activations
    impl, operand = _product(op, weight, weight_scale, a, impl, out_dtype)
    if impl == "reference" and not isinstance(operand, PackedWeight):
        return reference.grouped_gemm(a, a_scale, *operand, offsets, a_rows, out, out_dtype)
    if a_scale is None:
        raise RuntimeError(f"{op}: implementation {impl!r} needs a_scale (E4M3 activations); use impl='reference'")
    if out is None:
        out = a.new_empty(m, o, dtype=out_dtype)
    if not (m and e and o):
        return out
    if isinstance(operand, PackedWeight):
        folded = _empty_folded(m, k, a)
        call(op, impl, a, a_scale, operand.words, operand.shifts, operand.largest, offsets, a_rows, out, *folded)
    else:
        call(op, impl, a, a_scale, *operand, offsets, a_rows, out)
    return out


def swiglu(gu: Tensor, row_weight: Tensor | None, limit: float, num_rows: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weight, rounded (model spec 6.2).

    Shapes: M rows, F expert hidden, a multiple of 32.
        gu          [M, 2F]  bfloat16 or float32, contiguous: gate, then up
        row_weight  [M]      float32 or None
        limit       float    0 = no clamp; the gate is clamped from above only
        num_rows    [1]      int32 on the device or None: rows at or past it are not computed
    Returns:
        h           [M, F]   of gu's dtype; rows at or past num_rows are uninitialised (the reference computes them)
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape, device or limit
        RuntimeError           not contiguous, GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none. NaN passes the clamps.
    Kernel: csrc/moe/swiglu_quant.cu. Reference: ops.reference.moe.swiglu.
    """
    op = "moe.swiglu_quant"
    m, f = _check_swiglu(op, gu, row_weight, limit, num_rows)
    impl = select(op, gu, impl=impl)
    if impl == "reference":
        return reference.swiglu(gu, row_weight, limit, num_rows)
    h = gu.new_empty(m, f)
    if m:
        call(op, impl, gu, row_weight, float(limit), num_rows, None, None, h)
    return h


def swiglu_quant(
    gu: Tensor, row_weight: Tensor | None, limit: float, num_rows: Tensor | None = None, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """`swiglu`, then quantised 1x32 (model spec 6.2, 8).

    Operands, errors and guarantees as `swiglu`.
    Returns:
        codes [M, F] float8_e4m3fn and scale [M, F/32] uint8 E8M0; a group with NaN gets scale byte 255
    Kernel: csrc/moe/swiglu_quant.cu. Reference: ops.reference.moe.swiglu_quant.
    """
    op = "moe.swiglu_quant"
    m, f = _check_swiglu(op, gu, row_weight, limit, num_rows)
    impl = select(op, gu, impl=impl)
    if impl == "reference":
        return reference.swiglu_quant(gu, row_weight, limit, num_rows)
    codes = gu.new_empty(m, f, dtype=torch.float8_e4m3fn)
    scale = gu.new_empty(m, f // 32, dtype=torch.uint8)
    if m:
        call(op, impl, gu, row_weight, float(limit), num_rows, codes, scale, None)
    return codes, scale


def swiglu_quant_folded(gu: Tensor, limit: float, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """`swiglu` and `elementwise.act_quant_folded` of its result in one pass, with the bits of the two ops (model spec 6.2, 8).

    Shapes: M rows, F hidden, a multiple of 32; gu and limit as in swiglu.
    Returns:
        codes     [M, F]  float8_e4m3fn
        row_scale [M]     float32, a power of two (NaN when the row of h holds NaN or Inf)
    Raises, determinism: as swiglu.
    Kernel: csrc/moe/swiglu_quant.cu (F <= 8192; wider rows take the two ops). Reference: the two ops'.
    """
    op = "moe.swiglu_quant"
    m, f = _check_swiglu(op, gu, None, limit, None)
    impl = select(op, gu, impl=impl)
    if impl == "reference" or f > _MAX_FOLD_HIDDEN:
        h = swiglu(gu, None, limit, impl=impl)
        return elementwise.act_quant_folded(h, impl="reference" if impl == "reference" else None)
    codes = gu.new_empty(m, f, dtype=torch.float8_e4m3fn)
    row_scale = gu.new_empty(m, dtype=torch.float32)
    if m:
        call("moe.swiglu_quant_folded", impl, gu, float(limit), codes, row_scale)
    return codes, row_scale


def _check_swiglu(op: str, gu: Tensor, row_weight: Tensor | None, limit: float, num_rows: Tensor | None) -> tuple[int, int]:
    """Checks the operands of the SwiGLU ops; returns M and F."""
    check_operand(op, "gu", gu, COMPUTE_DTYPES, {"M": None, "2F": None})
    m, f = gu.shape[0], gu.shape[1] // 2
    if gu.shape[1] % 64 or f == 0:
        raise ValueError(f"{op}: gu must have 2F columns, F a multiple of 32, got {gu.shape[1]}")
    if row_weight is not None:
        check_operand(op, "row_weight", row_weight, (torch.float32,), {"M": m}, gu)
    if num_rows is not None:
        check_operand(op, "num_rows", num_rows, (torch.int32,), {"1": 1}, gu)
    if not limit >= 0:
        raise ValueError(f"{op}: limit must be >= 0 (0 = no clamp), got {limit}")
    return m, f


def takes_packed_weights(tensor: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether the expert products on `tensor`'s device read their weights packed (pack_weight)."""
    return select("moe.grouped_gemm", tensor, compute_dtype=compute_dtype) == "sm90"


def takes_folded_rows(weight: Tensor | PackedWeight, compute_dtype: torch.dtype) -> bool:
    """Whether the first product of `experts` wants its tokens folded: codes with one scale per row (docs/numerics.md)."""
    return isinstance(weight, PackedWeight) and takes_packed_weights(weight.words, compute_dtype)


def _empty_folded(m: int, k: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rows for a product over folded operands, uninitialised: codes [M, K rounded up to 128] uint8, scales [M] float32."""
    return like.new_empty(m, -(-k // 128) * 128, dtype=torch.uint8), like.new_empty(m, dtype=torch.float32)


def _folded_gemm(folded: Tensor, row_scale: Tensor, weight: PackedWeight, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """grouped_gemm of rows that are folded and in the order of the product."""
    out = folded.new_empty(folded.shape[0], weight.largest.shape[1], dtype=out_dtype)
    call("moe.folded_gemm", "sm90", folded, row_scale, weight.words, weight.shifts, weight.largest, offsets, out)
    return out


def _placed_gemm(
    codes: Tensor, code_scale: Tensor, row_of_slot: Tensor, weight: Tensor | PackedWeight, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """grouped_gemm of folded tokens [T, K] with one scale each [T], rows where row_of_slot [T, k] says: [T * k, O]."""
    op = "moe.experts"
    (t, k), picks = codes.shape, row_of_slot.shape[1]
    check_operand(op, "codes", codes, (torch.float8_e4m3fn,), {"T": t, "N": k})
    check_operand(op, "scale", code_scale, (torch.float32,), {"T": t}, codes)
    check_operand(op, "row_of_slot", row_of_slot, (torch.int32,), {"T": t, "k": picks}, codes)
    if not isinstance(weight, PackedWeight) or not takes_folded_rows(weight, out_dtype):
        raise RuntimeError(f"{op}: rows with one scale each are for the sm90 product (takes_folded_rows); pass E8M0 scales [T, N/32]")
    if not (t and picks and weight.largest.numel()):
        return codes.new_empty(t * picks, weight.largest.shape[1], dtype=out_dtype)
    folded, row_scale = _empty_folded(t * picks, k, codes)
    call("moe.place_rows", "portable", codes, code_scale, row_of_slot, folded, row_scale)
    return _folded_gemm(folded, row_scale, weight, offsets, out_dtype)


def experts(
    codes: Tensor,
    scale: Tensor | None,
    w13: Tensor | PackedWeight,
    w13_scale: Tensor | None,
    w2: Tensor | PackedWeight,
    w2_scale: Tensor | None,
    offsets: Tensor,
    token_of_row: Tensor,
    row_weight: Tensor,
    limit: float,
    *,
    row_of_slot: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> Tensor:
    """The routed rows through their experts: grouped_gemm, swiglu_quant, grouped_gemm (model spec 6.2).

    Shapes: T tokens, M rows, E experts, N hidden, F expert hidden; operands as in the three ops.
        codes, scale  [T, N], [T, N/32]  quantised tokens; scale None: unquantised, and nothing is quantised between;
                      scale [T] float32: tokens that are folded already (elementwise.act_quant_folded), where takes_folded_rows says so
        w13           [E, 2F, N/2] with its scale or packed, gate rows then up rows;  w2 [E, N, F/2] with its scale or packed
        token_of_row  [M] int32, row_weight [M] float32 (dispatch)
        row_of_slot   [T, k] int32 (dispatch), M = T * k; needed for folded tokens only
    Returns:
        y             [M, N] out_dtype; rows at or past offsets[-1] are not written
    The sm90 products share their work: SwiGLU writes the folded rows that the second one reads, with the bits of the
    three ops one after the other. Folding is a function of the row, so folded tokens give the bits of the others.
    `impl` is the products'. Raises, kernels, references: those of the three ops; csrc/moe/place_rows.cu.
    """
    if scale is not None and scale.dtype == torch.float32:
        if row_of_slot is None or impl not in (None, "sm90"):
            raise ValueError(f"moe.experts: folded tokens need row_of_slot and the sm90 product, got {row_of_slot} and impl={impl!r}")
        gate_up = _placed_gemm(codes, scale, row_of_slot, w13, offsets, out_dtype)
    else:
        gate_up = grouped_gemm(codes, scale, w13, w13_scale, offsets, token_of_row, out_dtype=out_dtype, impl=impl)
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    bound = offsets[-1:]
    if m and scale is not None and f <= _MAX_FOLD_HIDDEN:
        _, operand = _product("moe.experts", w2, w2_scale, codes, impl, out_dtype)
        if isinstance(operand, PackedWeight) and select("moe.swiglu_quant", gate_up) == "portable":
            folded, row_scale = _empty_folded(m, f, codes)
            call("moe.swiglu_fold", "portable", gate_up, row_weight, float(limit), bound, folded, row_scale)
            return _folded_gemm(folded, row_scale, operand, offsets, out_dtype)
        w2, w2_scale = (operand, None) if isinstance(operand, PackedWeight) else operand
    if scale is None:
        h, h_scale = swiglu(gate_up, row_weight, limit, bound), None
    else:
        h, h_scale = swiglu_quant(gate_up, row_weight, limit, bound)
    return grouped_gemm(h, h_scale, w2, w2_scale, offsets, None, out_dtype=out_dtype, impl=impl)


def combine(y: Tensor, row_of_slot: Tensor, shared: Tensor | None, out_dtype: torch.dtype, *, impl: str | None = None) -> Tensor:
    """Float32 sum of each token's expert rows in slot order, then the shared expert, one rounding (model spec 6.2).

    Shapes: M expert rows, T tokens, k picks, N hidden (kernel: a multiple of 8, k <= 32).
        y            [M, N]  bfloat16 or float32, contiguous; rows no slot names are never read
        row_of_slot  [T, k]  int32, -1 = no row here
        shared       [T, N]  dtype of y, or None
    Returns:
        [T, N] out_dtype; a token without rows gets shared, or 0
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device
        RuntimeError           not contiguous, GPU or build cannot run it
    Deterministic. Synchronises: no. Workspace: none.
    Kernel: csrc/moe/combine.cu. Reference: ops.reference.moe.combine.
    """
    op = "moe.combine"
    t, n = _check_combine(op, y, row_of_slot, shared)
    if out_dtype not in COMPUTE_DTYPES:
        raise TypeError(f"{op}: out_dtype must be bfloat16 or float32, got {out_dtype}")
    impl = select(op, y, impl=impl)
    if impl == "reference":
        return reference.combine(y, row_of_slot, shared, out_dtype)
    out = y.new_empty(t, n, dtype=out_dtype)
    if t and n:
        call(op, impl, y, row_of_slot, shared, out)
    return out


def combine_parts(y: Tensor, row_of_slot: Tensor, parts: Tensor, rank: int, shared: Tensor | None, *, impl: str | None = None) -> Tensor:
    """`combine` of this rank's tokens with what the other ranks have for them (model spec 6.2): all ranks' sums in rank order, then
    the shared expert.

    Shapes: P other ranks, 0 or more; T tokens of this rank; y, row_of_slot and shared as in combine.
        parts  [P, T, N]  dtype of y, contiguous: the other ranks' sums in rank order
        rank   int        0..P, this rank's place among them
    Returns:
        [T, N] of y's dtype, float32 sums and one rounding; this rank's sum is rounded to y's dtype first, as the others' were
    Raises: as combine, and ValueError for a rank outside 0..P. Determinism: as combine. Dispatched as moe.combine.
    Kernel: csrc/moe/combine.cu. Reference: ops.reference.moe.combine_parts.
    """
    op = "moe.combine_parts"
    t, n = _check_combine(op, y, row_of_slot, shared)
    check_operand(op, "parts", parts, (y.dtype,), {"P": None, "T": t, "N": n}, y)
    if not 0 <= rank <= parts.shape[0]:
        raise ValueError(f"{op}: rank must be in 0..P={parts.shape[0]}, got {rank}")
    impl = select("moe.combine", y, impl=impl)
    if impl == "reference":
        return reference.combine_parts(y, row_of_slot, parts, rank, shared)
    out = y.new_empty(t, n)
    if t and n:
        call(op, impl, y, row_of_slot, parts, rank, shared, out)
    return out


def _check_combine(op: str, y: Tensor, row_of_slot: Tensor, shared: Tensor | None) -> tuple[int, int]:
    """Checks the operands that the combining ops have in common; returns T and N."""
    check_operand(op, "y", y, COMPUTE_DTYPES, {"M": None, "N": None})
    check_operand(op, "row_of_slot", row_of_slot, (torch.int32,), {"T": None, "k": None}, y)
    t, n = row_of_slot.shape[0], y.shape[1]
    if shared is not None:
        check_operand(op, "shared", shared, (y.dtype,), {"T": t, "N": n}, y)
    return t, n


# -- self-tests --------------------------------------------------------------------------------------------------------


def _self_test_inputs(device: torch.device) -> dict[str, Tensor]:
    """A small layer: 40 tokens on 5 experts, one of them without rows, widths that are no multiple of a tile."""
    g = torch.Generator().manual_seed(0)
    tokens, n, f, experts, k = 40, 352, 96, 5, 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    x = normal(tokens, n).bfloat16()
    codes, scale = number_formats.quant_fp8_ue8m0(x)
    weight, weight_scale = number_formats.quant_mxfp4(normal(experts, 2 * f, n) * n**-0.5)
    ids = torch.rand(tokens, experts - 1, generator=g).topk(k, dim=1).indices.sort(dim=1).values.int()
    row_of_slot, slot_of_row, offsets = reference.permute(ids, 0, experts)
    inputs = {"x": x, "gate": normal(16, n).bfloat16() * n**-0.5, "bias": normal(16) * 0.1, "ids": ids, "codes": codes}
    inputs |= {"scale": scale, "weight": weight, "weight_scale": weight_scale, "offsets": offsets}
    inputs |= {"a_rows": (slot_of_row // k).int(), "row_of_slot": row_of_slot, "gu": normal(80, 2 * f).bfloat16() * 3}
    inputs |= {"row_weight": torch.rand(80, generator=g), "y": normal(80, n).bfloat16(), "shared": normal(tokens, n).bfloat16()}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _self_test_gemm(i: dict[str, Tensor], impl: str) -> Tensor:
    return grouped_gemm(i["codes"], i["scale"], i["weight"], i["weight_scale"], i["offsets"], i["a_rows"], impl=impl)


register_self_test("moe.grouped_gemm", _self_test_inputs, _self_test_gemm, bound=2.0**-7)
register_self_test("moe.route", _self_test_inputs, lambda i, impl: route(i["x"], i["gate"], i["bias"], 3, 1.5, impl=impl), bound=1e-4)
register_self_test("moe.permute", _self_test_inputs, lambda i, impl: permute(i["ids"], 1, 3, impl=impl), bound=0.0)
register_self_test(
    "moe.swiglu_quant",
    _self_test_inputs,
    lambda i, impl: swiglu(i["gu"], i["row_weight"], 10.0, impl=impl),
    bound=2.0**-8,
)
register_self_test(
    "moe.combine",
    _self_test_inputs,
    lambda i, impl: combine(i["y"], i["row_of_slot"], i["shared"], torch.float32, impl=impl),
    bound=0.0,
)
