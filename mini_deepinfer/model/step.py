"""What the layers of one forward pass share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mini_deepinfer.batch import PrefillBatch
from mini_deepinfer.kv_cache import Caches
from mini_deepinfer.model.engram import RowFetch
from mini_deepinfer.ops import indexer

Trace = Callable[[str, int, torch.Tensor], None]


@dataclass
class Selection:
    """The compressed rows one index source chose, kept for its reuse layers.

    ids [T, K] logical entries ascending (-1 behind), rows [T, K] the same as rows of the owner's cache, count [T].
    """

    ids: torch.Tensor
    rows: torch.Tensor
    count: torch.Tensor


@dataclass
class Step:
    """One forward pass: its batch, the caches it reads and writes, and what a layer hands to later layers."""

    batch: PrefillBatch
    caches: Caches
    counts: list[int]  # tokens of every expert-parallel rank
    trace: Trace | None = None
    rank: int = 0
    engram_rows: dict[int, RowFetch] = field(default_factory=dict)  # by layer, on their way to the device
    selections: dict[int, Selection] = field(default_factory=dict)  # by index source layer
    candidates: torch.Tensor | None = None  # [T, C] blocks, from the candidate source; None: every entry is a candidate
    _visible: dict[int, torch.Tensor] = field(default_factory=dict)

    def visible(self, ratio: int) -> torch.Tensor:
        """int32 [T]: compressed entries a token may see, (pos + 1) // ratio."""
        if ratio not in self._visible:
            self._visible[ratio] = torch.div(self.batch.positions + 1, ratio, rounding_mode="floor").to(torch.int32)
        return self._visible[ratio]

    def cache_rows(self, ids: torch.Tensor, ratio: int) -> torch.Tensor:
        """Physical cache rows of logical entries [T, K]."""
        entries_per_page = self.caches.geometry.page_size // ratio
        return indexer.cache_rows(ids, self.batch.page_table, self.batch.seq_of_token, entries_per_page)

    def record(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        """Hand an intermediate tensor to the trace, when there is one."""
        if self.trace is not None:
            self.trace(name, layer, tensor)
