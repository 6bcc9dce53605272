"""One step's indices, built on the CPU with numpy and copied to the device once.

Everything a layer needs to find its rows is decided here, from positions alone: which rows the window of a token
covers, which tokens complete a compressed group and where its row goes, what is carried over to the next chunk.
Positions are absolute and groups are paired absolutely (model spec 9.2), so a chunk may end anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from .config import ModelConfig
    from .engram import EngramHasher
    from .kv_cache import CacheGeometry

WantLogits = Literal["last", "all", "none"]


@dataclass(frozen=True)
class ChunkRequest:
    """Tokens start..end-1 of one request, to be computed in this step."""

    token_ids: np.ndarray  # int64 [>= end], the whole request so far: the engram hash looks back past start
    start: int
    end: int
    slot: int
    pages: Sequence[int]  # physical pages of the request in order, enough for `end` tokens
    want_logits: WantLogits = "last"


@dataclass(frozen=True)
class CompressPlan:
    """Compressed groups of one ratio r that this step completes (G of them), and the tails it leaves (spec 4.3)."""

    group_rows: torch.Tensor  # int32 [G, r], v < T: token v of the step, v >= T: row v-T of the tail buffers
    positions: torch.Tensor  # int32 [G], j*r: where the group is rotated
    rows: torch.Tensor  # int32 [G], physical cache row
    tail_src: torch.Tensor  # int64 [m], tokens of the step that wait for the rest of their group
    tail_dst: torch.Tensor  # int64 [m], their rows in the tail buffers; written after the groups have been read


@dataclass(frozen=True)
class PrefillBatch:
    """One step of T tokens of B sequences, on the model's device. T == 0 is legal: a rank without work."""

    num_tokens: int
    num_seqs: int
    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int32 [T]
    seq_of_token: torch.Tensor  # int32 [T]
    page_table: torch.Tensor  # int32 [B, P]; entries past a sequence's pages are 0 and behind every `visible`
    window_rows: torch.Tensor  # int32 [T], where the window rows of this step are written
    window_idx: torch.Tensor  # int32 [T, W], positions max(0, pos-W+1)..pos ascending as pool rows, -1 behind
    ring_src: torch.Tensor  # int64 [m], after the step, in every layer: pool[ring_dst] = pool[ring_src]
    ring_dst: torch.Tensor  # int64 [m]
    compress: dict[int, CompressPlan]  # by ratio, every ratio > 0 of the model
    max_visible: dict[int, int]  # by ratio, the largest number of entries any token of the step sees
    output_rows: torch.Tensor  # int64 [O], tokens whose logits are wanted
    engram_rows: tuple[Any, ...]  # per engram layer, CPU int64 [T, rows per token], or the RowFetch that brings them (Model.prefetch)
    padding: torch.Tensor | None = None  # bool [T, 1], rows of a FixedBatch without a token; None: every row has one


def build_batch(
    config: ModelConfig,
    requests: Sequence[ChunkRequest],
    geometry: CacheGeometry,
    device: torch.device | str,
    hasher: EngramHasher | None = None,
) -> PrefillBatch:
    """Build the step of these chunks, in this order.

    Raises:
        ValueError  an empty chunk, too few tokens or pages, a slot outside the caches or used twice, more than
                    max_tokens tokens, or a model with engram layers and no hasher
    """
    _check(config, requests, geometry, hasher)
    arrays = _arrays(requests, geometry)
    arrays["token_ids"] = _concatenate([request.token_ids[request.start : request.end] for request in requests])
    layout = Layout(arrays)
    device = torch.device(device)
    tensors = layout.unpack(layout.pack(arrays, device).to(device, non_blocking=True))
    longest = max([0] + [request.end for request in requests])
    return _assemble(tensors, geometry, longest, engram_rows(config, requests, hasher))


def _assemble(tensors: dict[str, torch.Tensor], geometry: CacheGeometry, longest: int, rows: tuple[Any, ...]) -> PrefillBatch:
    """The batch of these tensors. longest: tokens of the longest request after the step, or more."""
    return PrefillBatch(
        num_tokens=len(tensors["token_ids"]),
        num_seqs=len(tensors["page_table"]),
        compress={
            ratio: CompressPlan(
                group_rows=tensors[f"group_rows.{ratio}"],
                positions=tensors[f"group_positions.{ratio}"],
                rows=tensors[f"rows.{ratio}"],
                tail_src=tensors[f"tail_src.{ratio}"],
                tail_dst=tensors[f"tail_dst.{ratio}"],
            )
            for ratio in geometry.ratios
        },
        max_visible={ratio: longest // ratio for ratio in geometry.ratios},
        engram_rows=rows,
        **{name: tensor for name, tensor in tensors.items() if "." not in name},
    )


def _arrays(requests: Sequence[ChunkRequest], geometry: CacheGeometry) -> dict[str, np.ndarray]:
    """The index tensors of a batch as numpy arrays, by field name; "field.r" for the fields of a CompressPlan. Not the tokens."""
    num_seqs, width, page_size = len(requests), geometry.window, geometry.page_size
    start = np.array([request.start for request in requests], dtype=np.int64)
    end = np.array([request.end for request in requests], dtype=np.int64)
    slot = np.array([request.slot for request in requests], dtype=np.int64)
    length = end - start
    first = np.cumsum(length) - length  # first token of each sequence in the step
    num_tokens = int(length.sum())
    seq, offset = _ragged(length)
    positions = start[seq] + offset

    pages = np.zeros((num_seqs, max([1] + [geometry.pages_for(request.end) for request in requests])), dtype=np.int32)
    for row, request in enumerate(requests):
        count = geometry.pages_for(request.end)
        pages[row, :count] = request.pages[:count]

    arrays: dict[str, np.ndarray] = {
        "positions": positions.astype(np.int32),
        "seq_of_token": seq.astype(np.int32),
        "page_table": pages,
        "window_rows": np.arange(geometry.chunk_row, geometry.chunk_row + num_tokens, dtype=np.int32),
        "window_idx": _window_idx(positions, seq, start, length, first, slot, geometry),
    }

    kept = np.minimum(length, width)  # the last tokens of each chunk become its ring
    ring_seq, ring_offset = _ragged(kept)
    ring_token = (length - kept)[ring_seq] + ring_offset
    arrays["ring_src"] = geometry.chunk_row + first[ring_seq] + ring_token
    arrays["ring_dst"] = slot[ring_seq] * width + (start[ring_seq] + ring_token) % width

    for ratio in geometry.ratios:
        group_seq, group = _ragged(end // ratio - start // ratio)
        group = group + (start // ratio)[group_seq]  # absolute pairing: group j holds positions j*r..j*r+r-1
        member = group[:, None] * ratio + np.arange(ratio)
        here = (first - start)[group_seq, None] + member
        carried = num_tokens + slot[group_seq, None] * (ratio - 1) + np.arange(ratio)
        arrays[f"group_rows.{ratio}"] = np.where(member >= start[group_seq, None], here, carried).astype(np.int32)
        arrays[f"group_positions.{ratio}"] = (group * ratio).astype(np.int32)
        per_page = page_size // ratio
        physical = pages[group_seq, group // per_page].astype(np.int64) * per_page + group % per_page
        arrays[f"rows.{ratio}"] = physical.astype(np.int32)
        waiting = np.minimum(end % ratio, length)  # tokens of this chunk in the group it leaves open
        tail_seq, tail_offset = _ragged(waiting)
        tail_position = (end - waiting)[tail_seq] + tail_offset
        arrays[f"tail_src.{ratio}"] = (first - start)[tail_seq] + tail_position
        arrays[f"tail_dst.{ratio}"] = slot[tail_seq] * (ratio - 1) + tail_position % ratio

    wanted = np.array([{"last": 1, "all": request.end - request.start, "none": 0}[request.want_logits]
                       for request in requests], dtype=np.int64)  # fmt: skip
    out_seq, out_offset = _ragged(wanted)
    arrays["output_rows"] = (first + length - wanted)[out_seq] + out_offset

    return arrays


def decode_arrays(requests: Sequence[ChunkRequest], geometry: CacheGeometry, size: int, num_pages: int) -> dict[str, np.ndarray]:
    """The arrays of a step of one token per request, padded to `size` rows and page tables of `num_pages` columns. The tokens are 0:
    nothing else depends on them.

    A row without a token writes nothing: its window slot is -1, it sees no window row, and what must have a target (ring
    and tail copies have no "none") goes to a row that nobody reads: its own chunk row, the scratch row behind the tails.
    The same holds for the groups and tails of a row with a token that completes no group, or leaves none open.
    """
    arrays = _arrays(requests, geometry)
    live = len(requests)
    rest = np.arange(live, size)
    padded: dict[str, np.ndarray] = {"padding": (np.arange(size) >= live)[:, None], "token_ids": np.zeros(size, dtype=np.int64)}

    def pad(name: str, fill: Any) -> None:
        """Rows without a token get `fill`, one value or one per row."""
        source = arrays[name]
        padded[name] = np.empty((size, *source.shape[1:]), dtype=source.dtype)
        padded[name][:live], padded[name][live:] = source, fill

    pages = np.zeros((size, num_pages), dtype=np.int32)
    pages[:live, : arrays["page_table"].shape[1]] = arrays["page_table"]
    padded["page_table"] = pages
    pad("positions", 0)
    for name in ("window_rows", "window_idx"):
        pad(name, -1)
    for name in ("ring_src", "ring_dst"):
        pad(name, geometry.chunk_row + rest)
    for name in ("seq_of_token", "output_rows"):
        pad(name, rest)
    end = arrays["positions"].astype(np.int64) + 1
    for ratio in geometry.ratios:
        complete, waiting = np.flatnonzero(end % ratio == 0), np.flatnonzero(end % ratio)
        groups = np.repeat(np.arange(size, dtype=np.int32)[:, None], ratio, axis=1)
        own = arrays[f"group_rows.{ratio}"]
        groups[complete] = np.where(own >= live, own + (size - live), own)  # the tails lie behind all rows of the step
        padded[f"group_rows.{ratio}"] = groups
        for name, fill in ((f"group_positions.{ratio}", 0), (f"rows.{ratio}", -1)):
            padded[name] = np.full(size, fill, dtype=np.int32)
            padded[name][complete] = arrays[name]
        num_tails = size if ratio > 1 else 0  # groups of one leave no tail
        padded[f"tail_src.{ratio}"] = np.arange(num_tails, dtype=np.int64)
        padded[f"tail_dst.{ratio}"] = np.full(num_tails, geometry.scratch_tail(ratio), dtype=np.int64)
        if num_tails:
            padded[f"tail_dst.{ratio}"][waiting] = arrays[f"tail_dst.{ratio}"]
    return padded


_Place = tuple[int, int, list[int]]  # slot, position, pages of a request


class FixedBatch:
    """A decode step whose tensors stay where they are: `size` rows, requests of up to `longest` tokens.

    `batch` is what the model gets; `fill` writes a step of at most `size` requests into its tensors. What comes after a step is nearly
    always the same requests one token further: `prepare` builds that while the GPU works, and `fill` then only adds the tokens.
    """

    def __init__(self, geometry: CacheGeometry, size: int, longest: int, device: torch.device, rows: tuple[Any, ...]) -> None:
        self.geometry, self.size, self.device = geometry, size, device
        self.num_pages = geometry.pages_for(longest)
        arrays = decode_arrays([], geometry, size, self.num_pages)
        self._layout = Layout(arrays)
        self._buffer = self._layout.pack(arrays, device).to(device)
        self.batch = _assemble(self._layout.unpack(self._buffer), geometry, longest, rows)
        self._prepared: tuple[list[_Place], dict[str, np.ndarray]] | None = None
        self.num_prepared = 0  # steps that found their arrays built

    def fill(self, requests: Sequence[ChunkRequest]) -> None:
        """One token of each request. Enqueues one copy; the rows that the last step left are overwritten."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == self._places(requests, 0):
            arrays = prepared[1]
            self.num_prepared += 1
        else:
            arrays = decode_arrays(requests, self.geometry, self.size, self.num_pages)
        arrays["token_ids"][: len(requests)] = [request.token_ids[request.start] for request in requests]
        self._buffer.copy_(self._layout.pack(arrays, self.device), non_blocking=True)

    def prepare(self, requests: Sequence[ChunkRequest]) -> None:
        """After a step of these requests: build the arrays of the next one, if it stays in the shape and in the pages they have."""
        places = self._places(requests, 1)
        if all(len(pages) * self.geometry.page_size > start for _, start, pages in places):
            nobody = np.zeros(0, dtype=np.int64)  # the tokens are not known yet
            ahead = [ChunkRequest(nobody, start, start + 1, slot, pages) for slot, start, pages in places]
            self._prepared = places, decode_arrays(ahead, self.geometry, self.size, self.num_pages)

    def _places(self, requests: Sequence[ChunkRequest], further: int) -> list[_Place]:
        """Slot, position of the token and its pages, of every request `further` tokens on."""
        geometry = self.geometry
        ends = [min(geometry.pages_for(request.end + further), self.num_pages) for request in requests]
        return [(request.slot, request.start + further, list(request.pages[:end])) for request, end in zip(requests, ends)]


def _ragged(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For the concatenation of runs of these lengths: run of every element, and its index inside the run."""
    run = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    return run, np.arange(len(run), dtype=np.int64) - (np.cumsum(lengths) - lengths)[run]


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64, copy=False) if parts else np.zeros(0, dtype=np.int64)


def _window_idx(
    positions: np.ndarray,
    seq: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    first: np.ndarray,
    slot: np.ndarray,
    geometry: CacheGeometry,
) -> np.ndarray:
    """int32 [T, W]. Each sequence gets a line of pool rows for positions start-W+1..end-1; a token's lanes are W
    neighbours on that line, so the table is a copy of overlapping views and not T*W index arithmetic."""
    width = geometry.window
    if len(positions) == 0:
        return np.zeros((0, width), dtype=np.int32)
    line_seq, line_offset = _ragged(length + width - 1)
    position = start[line_seq] - (width - 1) + line_offset
    in_chunk = geometry.chunk_row + first[line_seq] + position - start[line_seq]
    in_ring = slot[line_seq] * width + position % width
    line = np.where(position >= start[line_seq], in_chunk, in_ring).astype(np.int32)
    lanes = np.lib.stride_tricks.sliding_window_view(line, width)
    table = lanes[np.arange(len(positions)) + seq * (width - 1)]
    early = np.flatnonzero(positions < width - 1)  # their first lanes lie before the text: move the others to the front
    if len(early):
        lane = np.arange(width) + (width - 1 - positions[early])[:, None]
        shifted = np.take_along_axis(table[early], np.minimum(lane, width - 1), axis=1)
        table[early] = np.where(lane < width, shifted, -1)
    return table


def engram_rows(config: ModelConfig, requests: Sequence[ChunkRequest], hasher: EngramHasher | None) -> tuple[torch.Tensor, ...]:
    """Table rows of the step's tokens: per engram layer a CPU int64 [T, rows per token]."""
    num_layers = len(config.engram_layer_ids)
    if num_layers == 0 or hasher is None:
        return ()
    # One call for all requests: each brings the tokens its hashes look back at; what lies before a text counts as dead.
    texts: list[np.ndarray] = []
    dead: list[np.ndarray] = []
    for request in requests:
        history = min(hasher.history, request.start)
        text, missing = request.token_ids[request.start - history : request.end], hasher.history - history
        texts += [np.repeat(text[:1], missing), text]
        dead += [np.arange(missing + len(text)) < missing]
    wanted = [np.arange(hasher.history + request.end - request.start) >= hasher.history for request in requests]
    joined = _concatenate(texts)
    rows = hasher.row_ids(joined, 0, len(joined), np.concatenate(dead) if dead else None).numpy()
    own = np.flatnonzero(np.concatenate(wanted)) if wanted else np.zeros(0, dtype=np.int64)
    return tuple(torch.from_numpy(rows[own, layer]) for layer in range(num_layers))


class Layout:
    """Where every array of a step lies in one buffer: one (pinned, asynchronous) copy instead of one per array."""

    ALIGN = 256
    DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.bool_): torch.bool}

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}  # first byte, bytes, dtype, shape
        self._size = 0
        for name, array in arrays.items():
            self._places[name] = (self._size, array.nbytes, self.DTYPES[array.dtype], array.shape)
            self._size += -(-array.nbytes // self.ALIGN) * self.ALIGN

    def pack(self, arrays: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        """uint8 [bytes] on the CPU, pinned if it goes to a GPU. The arrays have the shapes of those the layout was made for."""
        staging = torch.zeros(self._size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        host = staging.numpy()
        for name, array in arrays.items():
            first, num_bytes, _, _ = self._places[name]
            host[first : first + num_bytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return staging

    def unpack(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as views of a buffer, wherever it is."""
        return {
            name: buffer[first : first + num_bytes].view(dtype).view(shape)
            for name, (first, num_bytes, dtype, shape) in self._places.items()
        }


def _check(
    config: ModelConfig, requests: Sequence[ChunkRequest], geometry: CacheGeometry, hasher: EngramHasher | None
) -> None:
    if config.engram_layer_ids and hasher is None:
        raise ValueError(f"build_batch: layers {list(config.engram_layer_ids)} have an engram; pass its EngramHasher")
    slots = [request.slot for request in requests]
    if len(set(slots)) != len(slots):
        raise ValueError(f"build_batch: every request needs its own slot, got {slots}")
    for row, request in enumerate(requests):
        if not 0 <= request.start < request.end <= len(request.token_ids):
            raise ValueError(
                f"build_batch: request {row}: wanted 0 <= start < end <= {len(request.token_ids)} token ids, got "
                f"start={request.start}, end={request.end}"
            )
        if not 0 <= request.slot < geometry.num_slots:
            raise ValueError(f"build_batch: request {row}: slot must be below {geometry.num_slots}, got {request.slot}")
        needed = geometry.pages_for(request.end)
        if len(request.pages) < needed:
            raise ValueError(
                f"build_batch: request {row}: {request.end} tokens need {needed} pages of {geometry.page_size}, "
                f"got {len(request.pages)}"
            )
        used = request.pages[:needed]
        if min(used) < 0 or max(used) >= geometry.num_pages:
            raise ValueError(
                f"build_batch: request {row}: pages must be in 0..{geometry.num_pages - 1}, got {list(used)}"
            )
        if request.want_logits not in ("last", "all", "none"):
            raise ValueError(
                f"build_batch: request {row}: want_logits must be last, all or none, got {request.want_logits!r}"
            )
    num_tokens = sum(request.end - request.start for request in requests)
    if num_tokens > geometry.max_tokens:
        raise ValueError(
            f"build_batch: step must have at most max_tokens={geometry.max_tokens} tokens, got {num_tokens}"
        )
