"""What the layers of one forward pass share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mini_deepinfer.batch import PrefillBatch
from mini_deepinfer.config import LayerPlan, ModelConfig
from mini_deepinfer.kv_cache import Caches
from mini_deepinfer.ops import attention, indexer

Trace = Callable[[str, int, torch.Tensor], None]


@dataclass
class Selection:
    """The compressed rows one index source chose, kept for its reuse layers.

    ids [T, K] logical entries ascending (-1 behind), rows [T, K] the same as rows of the owner's cache or of Step.expanded, count [T].
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
    selections: dict[int, Selection] = field(default_factory=dict)  # by index source layer
    candidates: torch.Tensor | None = None  # [T, C] blocks, from the candidate source; None: every entry is a candidate
    expanded: torch.Tensor | None = None  # rows of the latest KV owner, page by page of the page table; None: read its cache
    _scratch: torch.Tensor | None = None  # that all owners of the step are expanded to
    _visible: dict[int, torch.Tensor] = field(default_factory=dict)

    def visible(self, ratio: int) -> torch.Tensor:
        """int32 [T]: compressed entries a token may see, (pos + 1) // ratio."""
        if ratio not in self._visible:
            self._visible[ratio] = torch.div(self.batch.positions + 1, ratio, rounding_mode="floor").to(torch.int32)
        return self._visible[ratio]

    def expands_windows(self, x: torch.Tensor) -> bool:
        """Whether attention reads window rows expanded where it does not read packed compressed rows. x: as for `expand`."""
        return self.caches.geometry.window_rows <= 2 * self.batch.num_tokens and attention.takes_expanded(x)

    def expand(self, plan: LayerPlan, config: ModelConfig, x: torch.Tensor) -> None:
        """After a KV owner wrote its rows: expand what the step's sequences hold of them, if its queries read every row often enough.

        Shapes alone decide, and expanded rows give the bits of packed ones. x: any tensor in the compute dtype.
        """
        self.expanded = None
        geometry, batch = self.caches.geometry, self.batch
        page_rows = geometry.page_size // plan.ratio
        most_rows = batch.num_tokens * config.index_topk // attention.EXPAND_READS
        num_rows = batch.page_table.numel() * page_rows
        if num_rows > most_rows or not self.expands_windows(x):
            return
        if self._scratch is None:
            largest = batch.page_table.numel() * (geometry.page_size // geometry.ratios[0])
            self._scratch = x.new_empty(min(largest, most_rows), config.head_dim, dtype=torch.bfloat16)
        packed, pages = self.caches.compressed[plan.index], batch.page_table.flatten()
        self.expanded = attention.expand_rows(packed, config.head_dim, pages, page_rows, out=self._scratch[:num_rows])

    def cache_rows(self, ids: torch.Tensor, ratio: int) -> torch.Tensor:
        """Where logical entries [T, K] lie: rows of the latest KV owner's cache, or of `expanded`."""
        table = self.batch.page_table
        if self.expanded is not None:
            table = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view(table.shape)
        return indexer.cache_rows(ids, table, self.batch.seq_of_token, self.caches.geometry.page_size // ratio)

    def record(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        """Hand an intermediate tensor to the trace, when there is one."""
        if self.trace is not None:
            self.trace(name, layer, tensor)
