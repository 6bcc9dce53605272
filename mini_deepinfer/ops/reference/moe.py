"""Router, row permutation, expert products, SwiGLU and combine: definitions in plain PyTorch (model spec 6)."""

from __future__ import annotations

import torch

from mini_deepinfer.ops.reference.decoded import decoded
from mini_deepinfer.ops.reference.elementwise import act_quant
from mini_deepinfer.ops.reference.linear import matmul
from mini_deepinfer.ops.reference.number_formats import dequant_fp8_ue8m0, dequant_mxfp4


def sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(x)): x itself above 20, log1p(exp(x)) below."""
    return torch.sqrt(torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20)))))


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, k: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts per token: ids [T, k] ascending, weights [T, k] float32 (model spec 6.1). Ties go to the lower id."""
    scores = sqrt_softplus(matmul(x, weight))
    picked = torch.sort(scores + bias.to(torch.float32), dim=1, descending=True, stable=True).indices[:, :k]
    value = torch.gather(scores, 1, picked)
    total = value[:, 0]
    for j in range(1, k):  # in the order of selection
        total = total + value[:, j]
    value = value / (total[:, None] + 1e-20) * scaling
    order = picked.sort(1)
    return order.values.to(torch.int32), torch.gather(value, 1, order.indices)


def permute(ids: torch.Tensor, first_expert: int, num_local: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expert-major order of the slots routed to experts first_expert .. first_expert + num_local - 1.

    Returns row_of_slot [T, k] (-1: another rank's expert), slot_of_row [T * k] (-1 behind the last row), offsets [num_local + 1].
    """
    flat = ids.flatten().long() - first_expert
    local = (flat >= 0) & (flat < num_local)
    order = torch.sort(torch.where(local, flat, num_local), stable=True).indices
    counts = torch.bincount(flat[local], minlength=num_local)
    offsets = torch.zeros(num_local + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = counts.cumsum(0)
    rank = torch.arange(flat.shape[0], device=ids.device)
    row_of_slot = torch.empty_like(flat).scatter_(0, order, rank)
    row_of_slot = torch.where(local, row_of_slot, -1).to(torch.int32).view(ids.shape)
    slot_of_row = torch.where(rank < offsets[-1], order, -1).to(torch.int32)
    return row_of_slot, slot_of_row, offsets


def grouped_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    offsets: torch.Tensor,
    a_rows: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Row i of expert e (offsets[e] <= i < offsets[e+1]) times the MXFP4 weight of e; float32 sum, one rounding (spec 6.2).

    Rows at or past offsets[-1] are not written.
    """
    num_rows = a.shape[0] if a_rows is None else a_rows.shape[0]
    if out is None:
        out = torch.empty(num_rows, weight.shape[1], dtype=out_dtype, device=a.device)
    bounds = offsets.tolist()
    for expert in range(weight.shape[0]):
        begin, end = bounds[expert], bounds[expert + 1]
        if begin == end:
            continue
        rows = slice(begin, end) if a_rows is None else a_rows[begin:end].long()
        value = a[rows].to(torch.float32) if a_scale is None else dequant_fp8_ue8m0(a[rows], a_scale[rows])
        matrix = decoded(weight[expert], weight_scale[expert], 2 * weight[expert].numel(), dequant_mxfp4)
        out[begin:end] = matmul(value, matrix).to(out.dtype)
    return out


def swiglu(gu: torch.Tensor, row_weight: torch.Tensor | None, limit: float, num_rows: torch.Tensor | None = None) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) * row_weight, rounded (model spec 6.2).

    gu [M, 2F] holds gate then up. limit 0 means no clamp. Rows at or past num_rows[0] are unspecified (here: computed as they are).
    """
    gate, up = gu.to(torch.float32).chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)  # clamp keeps NaN
    h = gate / (1 + torch.exp(-gate)) * up
    if row_weight is not None:
        h = h * row_weight.to(torch.float32)[:, None]
    return h.to(gu.dtype)


def swiglu_quant(
    gu: torch.Tensor, row_weight: torch.Tensor | None, limit: float, num_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """swiglu, then quantised 1x32."""
    return act_quant(swiglu(gu, row_weight, limit, num_rows))


def combine(
    y: torch.Tensor, row_of_slot: torch.Tensor, shared: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Sum of each token's expert rows in slot order, float32, then the shared expert, one rounding. Only local rows are read."""
    tokens, k = row_of_slot.shape
    acc = torch.zeros(tokens, y.shape[1], dtype=torch.float32, device=y.device)
    for j in range(k):
        row = row_of_slot[:, j].long()
        taken = (row >= 0).nonzero().squeeze(1)
        acc[taken] += y[row[taken]].to(torch.float32)
    if shared is not None:
        acc = acc + shared.to(torch.float32)
    return acc.to(out_dtype)


def combine_parts(
    y: torch.Tensor, row_of_slot: torch.Tensor, parts: torch.Tensor, rank: int, shared: torch.Tensor | None
) -> torch.Tensor:
    """The sums of all ranks in rank order, float32, then the shared expert, one rounding. This rank's is rounded first, as theirs were."""
    own = combine(y, row_of_slot, None, y.dtype)
    acc = torch.zeros(own.shape, dtype=torch.float32, device=y.device)
    for part in (*parts[:rank], own, *parts[rank:]):
        acc = acc + part.to(torch.float32)
    if shared is not None:
        acc = acc + shared.to(torch.float32)
    return acc.to(y.dtype)
