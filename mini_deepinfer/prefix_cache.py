"""Who holds which page, and which page holds which tokens (model spec 9.3).

* ``PageAllocator``  reference counts, a free list, and an LRU of cached pages nobody holds.
* ``PrefixCache``    pages by content. A hit resumes only where the windows of all layers were saved, because the
                     sliding-window rows of the cached part cannot be recomputed from anything cached.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

logger = logging.getLogger(__name__)


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
