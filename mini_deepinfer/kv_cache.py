"""The tensors that live between two steps: cache rows, compressor tails, window rings and their snapshots (model spec 4.4, 9).

* ``CacheGeometry``  the sizes, without memory. ``build_batch`` and the memory plan need no more than this.
* ``Caches``         the tensors. One page id covers the compressed rows and index keys of every owner layer.

Who holds which page, and which page holds which tokens: prefix_cache.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .config import ModelConfig


def window_row_bytes(head_dim: int) -> int:
    """Bytes of a window row: D e4m3 codes and one E8M0 byte per 32 (model spec 4.4)."""
    return head_dim + head_dim // 32


def compressed_row_bytes(head_dim: int) -> int:
    """Bytes of a compressed row: D FP4 codes, two a byte, and one E4M3 byte per 16 (model spec 4.4)."""
    return head_dim // 2 + head_dim // 16


def index_key_bytes(index_head_dim: int) -> int:
    """Bytes of an index key: Di FP4 codes, two a byte, and one E8M0 byte per 32 (model spec 4.4)."""
    return index_head_dim // 2 + index_head_dim // 32


@dataclass(frozen=True)
class CacheGeometry:
    """Sizes of the caches of one rank; no memory behind it.

    Raises:
        ValueError  a size below 1, a page that splits a compressed group, or more rows than an int32 index reaches
    """

    num_pages: int
    page_size: int  # tokens
    num_slots: int  # requests that may run at once
    max_tokens: int  # tokens of one step
    window: int  # W
    ratios: tuple[int, ...]  # the different ratios > 0 of the model, ascending

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "num_slots", "max_tokens", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"caches: {name} must be at least 1, got {getattr(self, name)}")
        for ratio in self.ratios:
            if self.page_size % ratio:
                raise ValueError(
                    f"caches: page_size must be a multiple of every compress ratio {list(self.ratios)}, got "
                    f"{self.page_size} (a page must not split a group). Choose a multiple of {ratio}."
                )
        if self.window_rows >= 2**31 or self.num_pages * self.page_size >= 2**31:
            raise ValueError(
                f"caches: row indices are int32, got {self.window_rows} window rows and "
                f"{self.num_pages * self.page_size} token rows. Lower num_pages, num_slots or max_tokens."
            )

    @classmethod
    def of(
        cls, config: ModelConfig, *, num_pages: int, page_size: int, num_slots: int, max_tokens: int
    ) -> CacheGeometry:
        ratios = tuple(sorted({plan.ratio for plan in config.layers if plan.ratio > 0}))
        return cls(num_pages, page_size, num_slots, max_tokens, config.sliding_window, ratios)

    @property
    def chunk_row(self) -> int:
        """First row of the running chunk in a window pool; the rings of the slots lie before it."""
        return self.num_slots * self.window

    @property
    def window_rows(self) -> int:
        return self.chunk_row + self.max_tokens

    def scratch_tail(self, ratio: int) -> int:
        """The tail row behind those of all slots: what a fixed number of tail copies has too many goes there, nobody reads it."""
        return self.num_slots * (ratio - 1)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def page_bytes(config: ModelConfig, page_size: int) -> int:
    """Bytes of one page over all owner layers (890 B a token for the released model, model spec 9.1)."""
    row = compressed_row_bytes(config.head_dim) + index_key_bytes(config.index_head_dim)
    return sum(page_size // plan.ratio * row for plan in config.layers if plan.owns_kv)


def window_bytes(config: ModelConfig, num_rows: int) -> int:
    """Bytes of num_rows window rows in every layer; with num_rows = W the size of one snapshot."""
    return len(config.layers) * num_rows * window_row_bytes(config.head_dim)


def cache_bytes(config: ModelConfig, geometry: CacheGeometry) -> dict[str, int]:
    """Memory plan: bytes by kind, without allocating."""
    tails = sum(geometry.scratch_tail(plan.ratio) + 1 for plan in config.layers if plan.owns_kv and plan.ratio > 1)
    return {
        "window": window_bytes(config, geometry.window_rows),
        "pages": geometry.num_pages * page_bytes(config, geometry.page_size),
        "tails": 2 * tails * config.head_dim * 4,
    }


class Caches:
    """The cache tensors of one rank.

    Letters: W sliding window, D head dim, Di index head dim, r compression ratio of the owner.
        window[layer]       uint8 [num_slots*W + max_tokens, D + D/32]      rings (row slot*W + pos%W), then the chunk
        compressed[owner]   uint8 [num_pages*page_size/r, D/2 + D/16]
        index_keys[owner]   uint8 [num_pages*page_size/r, Di/2 + Di/32]
        tail_kv[owner]      float32 [num_slots*(r-1) + 1, D]                only owners with r > 1; the last row is scratch
        tail_score[owner]   float32 [num_slots*(r-1) + 1, D]
    All memory starts as zeros; nothing in it is ever read before the step that wrote it (tests poison it).

    Raises:
        ValueError  impossible geometry (see CacheGeometry)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_tokens: int,
        device: torch.device | str,
    ) -> None:
        self.geometry = CacheGeometry.of(
            config, num_pages=num_pages, page_size=page_size, num_slots=num_slots, max_tokens=max_tokens
        )
        self.device = torch.device(device)
        dim = config.head_dim

        def rows(num_rows: int, row_bytes: int) -> torch.Tensor:
            return torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=self.device)

        # One allocation for the windows of all layers, so that a snapshot is one strided copy.
        self._windows = torch.zeros(
            len(config.layers), self.geometry.window_rows, window_row_bytes(dim), dtype=torch.uint8, device=self.device
        )
        self.window: list[torch.Tensor] = list(self._windows.unbind(0))
        self.compressed: dict[int, torch.Tensor] = {}
        self.index_keys: dict[int, torch.Tensor] = {}
        self.tail_kv: dict[int, torch.Tensor] = {}
        self.tail_score: dict[int, torch.Tensor] = {}
        for plan in config.layers:
            if not plan.owns_kv:
                continue
            entries = num_pages * page_size // plan.ratio
            self.compressed[plan.index] = rows(entries, compressed_row_bytes(dim))
            self.index_keys[plan.index] = rows(entries, index_key_bytes(config.index_head_dim))
            if plan.ratio > 1:
                shape = (self.geometry.scratch_tail(plan.ratio) + 1, dim)
                self.tail_kv[plan.index] = torch.zeros(shape, dtype=torch.float32, device=self.device)
                self.tail_score[plan.index] = torch.zeros(shape, dtype=torch.float32, device=self.device)

    @property
    def snapshot_bytes(self) -> int:
        layers, _, row_bytes = self._windows.shape
        return layers * self.geometry.window * row_bytes

    def tensors(self) -> list[torch.Tensor]:
        groups = (self.compressed, self.index_keys, self.tail_kv, self.tail_score)
        return [self._windows] + [tensor for group in groups for tensor in group.values()]

    def poison(self, byte: int = 0xFF) -> None:
        """Fill every byte, e.g. with NaN patterns (0xFF is NaN as e4m3, E8M0, E4M3 scale and float32). For tests."""
        for tensor in self.tensors():
            tensor.view(torch.uint8).fill_(byte)

    def carry_windows(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """After a step, in every layer: the last rows of each chunk become the ring of its request (batch.ring_src, ring_dst)."""
        self._windows[:, dst] = self._windows[:, src]

    def begin_snapshot(self, slot: int, start: int, boundary: int) -> torch.Tensor:
        """Before the step of tokens start.. : the rows of the old ring that a snapshot at `boundary` still needs.

        Returns a new uint8 tensor [layers, W, D + D/32], complete only after `finish_snapshot`. Needed because the step
        overwrites the ring with its last W tokens, which may lie past the boundary.
        """
        width = self.geometry.window
        ring = self._windows[:, slot * width : (slot + 1) * width]
        return ring.clone() if start > 0 and boundary - start < width else torch.zeros_like(ring)

    def finish_snapshot(self, snapshot: torch.Tensor, first_token: int, start: int, boundary: int) -> None:
        """After the step: take positions start..boundary-1 (the last W of them) from the chunk area.

        first_token is the request's first token in the step. Uses slices only, so it never synchronises.
        """
        width = self.geometry.window
        position = max(start, boundary - width)
        while position < boundary:  # at most two runs: the ring wraps once
            ring = position % width
            count = min(boundary - position, width - ring)
            row = self.geometry.chunk_row + first_token + position - start
            snapshot[:, ring : ring + count].copy_(self._windows[:, row : row + count])
            position += count

    def restore_snapshot(self, slot: int, snapshot: torch.Tensor) -> None:
        """Make the ring of `slot` what it was at the snapshot's boundary, in every layer."""
        width = self.geometry.window
        self._windows[:, slot * width : (slot + 1) * width].copy_(snapshot)
