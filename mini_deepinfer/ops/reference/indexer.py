"""Index keys and queries, scores, candidate blocks and top-k: definitions in plain PyTorch (model spec 4.4, 5)."""

from __future__ import annotations

import torch

from mini_deepinfer.ops.reference import number_formats as formats
from mini_deepinfer.ops.reference.attention import scatter_rows
from mini_deepinfer.ops.reference.elementwise import rope
from mini_deepinfer.ops.reference.number_formats import dequant_mxfp4

NEG_INF = float("-inf")


def pack_keys(k: torch.Tensor) -> torch.Tensor:
    """[G, Di] -> [G, Di/2 + Di/32] bytes: E2M1 codes then E8M0 scales (model spec 4.4)."""
    return torch.cat(formats.quant_mxfp4(k), -1)


def unpack_keys(rows: torch.Tensor) -> torch.Tensor:
    """[..., Di/2 + Di/32] bytes -> exact float32 values [..., Di]."""
    half = rows.shape[-1] * 16 // 17
    return dequant_mxfp4(rows[..., :half], rows[..., half:])


def write_keys(k: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    scatter_rows(rows, slots, pack_keys(k))


def rope_quant_query(q: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quant_query(rope(q, positions, table))


def quant_query(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hi, Di] -> packed codes [T, Hi, Di/2], E8M0 bytes [T, Hi, Di/32]."""
    return formats.quant_mxfp4(q)


def topk_blocks(
    logits: torch.Tensor, visible: torch.Tensor, k: int, block_size: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk and candidate_blocks of the same scores."""
    return (*topk(logits, visible, k), candidate_blocks(logits, visible, block_size, num_blocks))


def cache_rows(
    ids: torch.Tensor, page_table: torch.Tensor, seq_of_token: torch.Tensor, entries_per_page: int
) -> torch.Tensor:
    """Physical cache row of logical entry ids [T, k] of each token's sequence; -1 stays -1."""
    entry = ids.clamp(min=0).long()
    page = page_table[seq_of_token.long()[:, None], entry // entries_per_page]
    rows = page.long() * entries_per_page + entry % entries_per_page
    return torch.where(ids >= 0, rows, -1).to(torch.int32)


def score(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Index score of every (token, key) pair (model spec 5.3).

    query [T, Hi, Di] float32, weights [T, Hi] in the compute dtype, keys [n, Di] or [T, n, Di] float32 -> [T, n].
    Rounding points: dot, relu(dot) * w, and the sum over heads, each to the dtype of `weights`. The float32 sum over heads is taken
    in a fixed order: four partial sums c = 0..3, each over heads 8j + 2c and 8j + 2c + 1 for ascending j, then (p0 + p1) + (p2 + p3).
    """
    dtype = weights.dtype
    dot = torch.matmul(query, keys.transpose(-1, -2)).to(dtype)
    heads = torch.relu(dot).to(torch.float32) * weights.to(torch.float32)[..., None]
    heads = heads.to(dtype).to(torch.float32)
    heads = torch.nn.functional.pad(heads, (0, 0, 0, -heads.shape[1] % 8)).unflatten(1, (-1, 4, 2))
    partial = torch.zeros_like(heads[:, 0, :, 0])
    for j in range(heads.shape[1]):
        for i in range(2):
            partial = partial + heads[:, j, :, i]
    return ((partial[:, 0] + partial[:, 1]) + (partial[:, 2] + partial[:, 3])).to(dtype)


def logits(
    q_codes: torch.Tensor,
    q_scale: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    seq_of_token: torch.Tensor,
    visible: torch.Tensor,
    entries_per_page: int,
    num_cols: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of every visible entry of each token's sequence [T, num_cols]; columns at or past visible[t] are -inf."""
    if out is None:
        out = torch.empty(weights.shape[0], num_cols, dtype=weights.dtype, device=weights.device)
    query = dequant_mxfp4(q_codes, q_scale)
    out.fill_(NEG_INF)
    columns = torch.arange(num_cols, device=out.device)
    for seq in seq_of_token.unique().tolist():
        tokens = (seq_of_token == seq).nonzero().squeeze(1)
        used = min(int(visible[tokens].max()), num_cols)
        rows = page_table[seq, columns[:used] // entries_per_page].long() * entries_per_page + columns[:used] % entries_per_page
        key = unpack_keys(keys[rows])
        step = max(1, (1 << 24) // max(1, used * weights.shape[1]))
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            value = score(query[part], weights[part], key)
            out[part, :used] = torch.where(columns[:used] < visible[part, None], value, NEG_INF)
    return out


def candidate_logits(
    q_codes: torch.Tensor,
    q_scale: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    seq_of_token: torch.Tensor,
    visible: torch.Tensor,
    entries_per_page: int,
    candidates: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Scores of the entries of each token's candidate blocks [T, C * block_size]; -inf where there is no visible entry."""
    entries = candidates.long()[:, :, None] * block_size + torch.arange(block_size, device=candidates.device)
    entries = torch.where(candidates[:, :, None] >= 0, entries, -1).flatten(1)
    entries = torch.where(entries < visible[:, None], entries, -1)
    out = torch.full(entries.shape, NEG_INF, dtype=weights.dtype, device=weights.device)
    query = dequant_mxfp4(q_codes, q_scale)
    rows = cache_rows(entries, page_table, seq_of_token, entries_per_page)
    step = max(1, (1 << 23) // max(1, entries.shape[1] * query.shape[2]))
    for start in range(0, out.shape[0], step):
        part = slice(start, start + step)
        taken = rows[part]
        packed = torch.where(taken[..., None] >= 0, keys[taken.clamp(min=0).long()], 0)
        value = score(query[part], weights[part], unpack_keys(packed.to(torch.uint8)))
        out[part] = torch.where(taken >= 0, value, NEG_INF)
    return out


def _usable(values: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Scores as float32 with NaN and invisible columns at -inf."""
    values = values.to(torch.float32)
    values = torch.where(torch.isnan(values), NEG_INF, values)
    if visible is None:
        return values
    return torch.where(torch.arange(values.shape[1], device=values.device) < visible[:, None], values, NEG_INF)


def _best(values: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the k best values of each row, ascending, -1 behind; ties to the lower column; -inf never taken."""
    order = torch.sort(values, dim=1, descending=True, stable=True)
    width = min(k, values.shape[1])
    ids = torch.where(order.values[:, :width] > NEG_INF, order.indices[:, :width], torch.iinfo(torch.int32).max)
    ids = ids.sort(1).values
    ids = torch.where(ids == torch.iinfo(torch.int32).max, -1, ids).to(torch.int32)
    return torch.nn.functional.pad(ids, (0, k - width), value=-1)


def candidate_blocks(logits: torch.Tensor, visible: torch.Tensor, block_size: int, num_blocks: int) -> torch.Tensor:
    """The best blocks of `block_size` entries by their largest score, the newest visible block always among them (spec 5.5)."""
    values = _usable(logits, visible)
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % block_size), value=NEG_INF)
    best = values.unflatten(1, (-1, block_size)).amax(-1)
    last = torch.div(visible - 1, block_size, rounding_mode="floor").long()
    forced = (torch.arange(best.shape[1], device=best.device) == last[:, None]) & (visible > 0)[:, None]
    return _best(torch.where(forced, float("inf"), best), num_blocks)


def topk(
    logits: torch.Tensor,
    visible: torch.Tensor | None,
    k: int,
    candidates: torch.Tensor | None = None,
    block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best columns of every row, ascending, -1 behind, and how many there are (model spec 5.4)."""
    ids = _best(_usable(logits, visible), k)
    count = (ids >= 0).sum(1).to(torch.int32)
    if candidates is not None:
        column = ids.clamp(min=0).long()
        entry = torch.gather(candidates.long(), 1, column // block_size) * block_size + column % block_size
        ids = torch.where(ids >= 0, entry, -1).to(torch.int32)
    return ids, count
