"""Everything that lives between two steps: cache rows, pages, shared prefixes and window snapshots (model spec 4.4, 9).

Four classes, from bytes up to policy:

* ``CacheGeometry``  the sizes, without memory. ``build_batch`` and the memory plan need no more than this.
* ``Caches``         the tensors. One page id covers the compressed rows and index keys of every owner layer.
* ``PageAllocator``  who holds which page: reference counts, a free list, and an LRU of cached pages nobody holds.
* ``PrefixCache``    which page holds which tokens. A hit resumes only where the windows of all layers were saved,
                     because the sliding-window rows of the cached part cannot be recomputed from anything cached.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from .config import ModelConfig

logger = logging.getLogger(__name__)


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


class PageAllocator:
    """Reference-counted pages.

    A page is held (count > 0), free, or idle: cached by content and held by nobody. Idle pages count as free and are
    taken back, least recently used first, when the free list is empty; `on_evict` then tells their owner.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"page allocator: num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] | None = None
        self._references = [0] * num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._cached: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def references(self, page: int) -> int:
        return self._references[self._checked(page)]

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each. Raises RuntimeError (and takes nothing) when fewer are free."""
        if count > self.num_free:
            raise RuntimeError(
                f"page allocator: wanted {count} pages, {self.num_free} of {self.num_pages} are free. "
                "Check num_free first or preempt a request."
            )
        pages = []
        for _ in range(count):
            if not self._free:
                self.evict(next(iter(self._idle)))
            page = self._free.popleft()
            self._references[page] = 1
            pages.append(page)
        return pages

    def acquire(self, pages: Sequence[int]) -> None:
        """One more reference on pages that are held or idle."""
        for page in pages:
            if self._references[self._checked(page)] == 0 and page not in self._idle:
                raise RuntimeError(f"page allocator: page {page} is free; its content belongs to nobody")
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference each. The last pages of a chain become the first to be evicted."""
        for page in reversed(pages):
            if self._references[self._checked(page)] == 0:
                raise RuntimeError(f"page allocator: double free of page {page}")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._cached:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def mark_cached(self, page: int) -> None:
        """The page's content is published; it becomes idle instead of free when the last holder leaves."""
        if self._references[self._checked(page)] == 0:
            raise RuntimeError(f"page allocator: page {page} is not held; only a holder may publish it")
        self._cached.add(page)

    def evict(self, page: int) -> None:
        """Take a cached page's content away; an idle page becomes free, a held one merely loses its name."""
        if page not in self._cached:
            raise RuntimeError(f"page allocator: page {page} is not cached")
        self._cached.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)
        if self.on_evict is not None:
            self.on_evict(page)

    def _checked(self, page: int) -> int:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page allocator: page must be in 0..{self.num_pages - 1}, got {page}")
        return page


@dataclass(frozen=True)
class PrefixHit:
    """What a prompt may reuse.

    `num_tokens` is 0 or a boundary with a snapshot; `shared_tokens` >= num_tokens is how far the pages alone would have
    reached: the boundary worth a snapshot when the request passes it.
    """

    num_tokens: int = 0
    pages: tuple[int, ...] = ()
    snapshot: torch.Tensor | None = None
    shared_tokens: int = 0


@dataclass
class _CachedPage:
    page: int
    parent: bytes
    tokens: bytes  # compared on a hit, so a digest collision cannot answer one text with another's rows


@dataclass
class _Snapshot:
    window: torch.Tensor
    kept: bool  # asked for, or hit at least once; the others only fill an otherwise unused budget


@dataclass
class PrefixStats:
    evicted_pages: int = 0
    snapshots: int = 0
    evicted_snapshots: int = 0


@dataclass
class PrefixCache:
    """Full pages of token ids by a hash chain, and window snapshots at some of their ends.

    The digest of a page covers the salt (model identity), all earlier pages and its own tokens; a page is published
    only when every row of it has been computed. Snapshots are dropped with their page, and otherwise bounded by
    `snapshot_budget` bytes: first those that merely used free room go, then the least recently used.
    """

    allocator: PageAllocator
    page_size: int
    salt: bytes
    snapshot_bytes: int
    snapshot_budget: int
    stats: PrefixStats = field(default_factory=PrefixStats)

    def __post_init__(self) -> None:
        self._root = hashlib.blake2b(self.salt, digest_size=16).digest()
        self._pages: dict[bytes, _CachedPage] = {}
        self._digest_of_page: dict[int, bytes] = {}
        self._snapshots: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self.allocator.on_evict = self._forget
        logger.info(
            "prefix cache: hit unit %d tokens, up to %d window snapshots of %.2f MB",
            self.page_size,
            self.max_snapshots,
            self.snapshot_bytes / 1e6,
        )

    @property
    def max_snapshots(self) -> int:
        return self.snapshot_budget // self.snapshot_bytes

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def extend_chain(self, chain: list[bytes], token_ids: np.ndarray) -> None:
        """Append to `chain` the digests of the full pages of token_ids (int64 [S]) that it does not hold yet."""
        for page in range(len(chain), len(token_ids) // self.page_size):
            parent = chain[-1] if chain else self._root
            chain.append(hashlib.blake2b(parent + self._tokens(token_ids, page), digest_size=16).digest())

    def lookup(self, chain: Sequence[bytes], token_ids: np.ndarray, limit: int) -> PrefixHit:
        """The longest reusable prefix of at most `limit` tokens. Takes no reference: acquire before allocating."""
        pages: list[int] = []
        best = 0
        parent = self._root
        for index, digest in enumerate(chain[: limit // self.page_size]):
            entry = self._pages.get(digest)
            if entry is None or entry.parent != parent or entry.tokens != self._tokens(token_ids, index):
                break
            pages.append(entry.page)
            parent = digest
            if digest in self._snapshots:
                best = index + 1
        shared = len(pages) * self.page_size
        if best == 0:
            return PrefixHit(shared_tokens=shared)
        snapshot = self._snapshots[chain[best - 1]]
        snapshot.kept = True
        self._snapshots.move_to_end(chain[best - 1])
        return PrefixHit(best * self.page_size, tuple(pages[:best]), snapshot.window, shared)

    def publish(self, chain: Sequence[bytes], token_ids: np.ndarray, index: int, page: int) -> None:
        """Page `index` of the text is complete in `page`. If the same text is cached already, `page` stays private."""
        digest = chain[index]
        if digest in self._pages:
            return
        parent = chain[index - 1] if index else self._root
        self._pages[digest] = _CachedPage(page, parent, self._tokens(token_ids, index))
        self._digest_of_page[page] = digest
        self.allocator.mark_cached(page)

    def wants_snapshot(self, digest: bytes, *, kept: bool) -> bool:
        """Whether a snapshot at the end of this page would be stored: always if asked for, else while there is room."""
        if digest in self._snapshots:
            return False
        return self.max_snapshots > 0 if kept else len(self._snapshots) < self.max_snapshots

    def add_snapshot(self, digest: bytes, window: torch.Tensor, *, kept: bool) -> None:
        """Store the windows of all layers at the end of a published page; ignored if the page is not cached."""
        if digest not in self._pages or not self.wants_snapshot(digest, kept=kept):
            return
        while len(self._snapshots) >= self.max_snapshots:
            spare = (key for key, snapshot in self._snapshots.items() if not snapshot.kept)
            victim = next(spare, next(iter(self._snapshots)))
            del self._snapshots[victim]
            self.stats.evicted_snapshots += 1
        self._snapshots[digest] = _Snapshot(window, kept)
        self.stats.snapshots += 1

    def clear(self) -> None:
        """Forget everything; pages that are held stay with their holders."""
        for page in list(self._digest_of_page):
            self.allocator.evict(page)

    def _tokens(self, token_ids: np.ndarray, index: int) -> bytes:
        return token_ids[index * self.page_size : (index + 1) * self.page_size].astype(np.int32).tobytes()

    def _forget(self, page: int) -> None:
        digest = self._digest_of_page.pop(page)
        del self._pages[digest]
        self.stats.evicted_pages += 1
        if self._snapshots.pop(digest, None) is not None:
            self.stats.evicted_snapshots += 1
