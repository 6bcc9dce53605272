"""Which tokens run next: continuous batching with chunked prefill over the paged caches.

Every step first gives one token to each decoding request, then fills the token budget with prompt chunks, oldest
request first. Pages are taken as tokens need them. When they run out, the request that arrived last gives its pages and
slot back and starts again later from its tokens, which by the caches' exactness does not change what it produces. The
oldest request can take everybody's pages and was let in only if it fits alone, so there is always progress.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from .batch import ChunkRequest, WantLogits
from .kv_cache import Caches
from .prefix_cache import PageAllocator, PrefixCache, PrefixHit
from .sampler import SamplingParams

FinishReason = Literal["stop", "length", "error", "abort"]
UNKNOWN_ID = -2  # in place of a sampled id that the tokenizer does not know; -1 stands for logits that are not finite


@dataclass(eq=False)
class Request:
    """One prompt and its continuation. Changed by the scheduler only."""

    prompt_tokens: int
    params: SamplingParams
    max_total: int  # prompt and continuation never exceed this
    stop_ids: frozenset[int]
    score: bool = False  # logits of every prompt token instead of a continuation
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # int64 [max_total]
    num_tokens: int = 0
    num_computed: int = 0
    arrival: int = -1
    slot: int = -1  # >= 0 exactly while running
    pages: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)  # digests of its full pages
    num_published: int = 0  # pages offered to the prefix cache
    cached_tokens: int = 0  # reused at the first admission
    num_preemptions: int = 0
    last_step: int = 0
    snapshot_at: set[int] = field(default_factory=set)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens : self.num_tokens].tolist()

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens > self.prompt_tokens and self.num_computed == self.num_tokens - 1


@dataclass
class Chunk:
    """Tokens start..end-1 of a running request in the planned step."""

    request: Request
    start: int
    end: int
    # boundary -> rings of all layers, to be completed after the forward pass
    snapshots: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def want_logits(self) -> WantLogits:
        if self.request.score:
            return "all"
        return "last" if self.end == self.request.num_tokens else "none"

    def as_input(self) -> ChunkRequest:
        request = self.request
        return ChunkRequest(request.tokens[: request.num_tokens], self.start, self.end, request.slot, request.pages, self.want_logits)


@dataclass
class SchedulerStats:
    steps: int = 0
    prompt_tokens: int = 0  # computed, recomputed ones included
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class Scheduler:
    """Requests from `add` to finished. One step is `plan`, the forward pass, `complete`.

    Raises:
        ValueError  a token budget above what the caches' chunk area holds, or below 1
    """

    def __init__(self, caches: Caches, allocator: PageAllocator, prefix_cache: PrefixCache | None, max_num_batched_tokens: int) -> None:
        if not 1 <= max_num_batched_tokens <= caches.geometry.max_tokens:
            raise ValueError(
                f"scheduler: max_num_batched_tokens must be in 1..{caches.geometry.max_tokens} (max_tokens of the "
                f"caches), got {max_num_batched_tokens}"
            )
        self.caches = caches
        self.geometry = caches.geometry
        self.allocator = allocator
        self.prefix_cache = prefix_cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # by arrival
        self.stats = SchedulerStats()
        self._free_slots = list(range(caches.geometry.num_slots - 1, -1, -1))
        self._arrivals = itertools.count()
        self._prefill_goes_first = False
        self._preempted = False  # in the step being planned

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def refusal(self, request: Request) -> str | None:
        """Why this request can never run here, with the numbers; None if it can."""
        longest = request.prompt_tokens if request.score else request.max_total - 1  # the last token is never computed
        needed = self.geometry.pages_for(max(longest, 1))
        if needed > self.allocator.num_pages:
            num_new = request.max_total - request.prompt_tokens
            return (
                f"request of {request.prompt_tokens} prompt tokens and up to {num_new} new ones needs {needed} pages "
                f"of {self.geometry.page_size} tokens; the cache has {self.allocator.num_pages}. Raise num_pages or "
                "lower max_tokens."
            )
        return None

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never fit."""
        reason = self.refusal(request)
        if reason is not None:
            raise ValueError(reason)
        request.arrival = next(self._arrivals)
        self.waiting.append(request)

    def abort(self, request: Request, reason: FinishReason = "abort", error: str | None = None) -> bool:
        """End a request now, whatever its state; pages and slot are free on return. False if it had ended already."""
        if request.finish_reason is not None:
            return False
        if request.slot >= 0:
            self._stop_running(request)
        else:
            self.waiting.remove(request)
        self._finish(request, reason, error)
        return True

    # ---------------------------------------------------------------- planning

    def plan(self) -> list[Chunk]:
        """Choose the chunks of the next step and take their pages and slots. Empty only without work."""
        self.stats.steps += 1
        self._preempted = False
        chunks: dict[Request, Chunk] = {}
        parts = [self._plan_decodes, self._plan_prefills]
        for part in reversed(parts) if self._prefill_goes_first else parts:
            part(chunks)
        # If decodes alone filled the step, prompts go first in the next one: neither can starve the other.
        has_prefill = any(not request.is_decoding for request in itertools.chain(self.running, self.waiting))
        self._prefill_goes_first = has_prefill and all(request.is_decoding for request in chunks)
        planned = sorted(chunks.values(), key=lambda chunk: chunk.request.arrival)
        for chunk in planned:
            chunk.request.last_step = self.stats.steps
            self._begin_snapshots(chunk)
        return planned

    def _plan_decodes(self, chunks: dict[Request, Chunk]) -> None:
        decodes = [request for request in self.running if request.is_decoding]
        for request in sorted(decodes, key=lambda r: (r.last_step, r.arrival)):
            self._grow(request, chunks)

    def _plan_prefills(self, chunks: dict[Request, Chunk]) -> None:
        for request in [request for request in self.running if not request.is_decoding]:
            self._grow(request, chunks)
        if not self._preempted:  # or the request that just gave its pages back would take them again
            self._admit(chunks)

    def _left(self, chunks: dict[Request, Chunk]) -> int:
        return self.max_num_batched_tokens - sum(chunk.end - chunk.start for chunk in chunks.values())

    def _grow(self, request: Request, chunks: dict[Request, Chunk]) -> None:
        """Plan the request's next tokens, as many as budget and pages allow, preempting younger requests for one."""
        budget = self._left(chunks)
        if request.slot < 0 or budget < 1:  # no slot: it has been preempted a moment ago
            return
        start, page_size = request.num_computed, self.geometry.page_size
        while self.geometry.pages_for(start + 1) > len(request.pages) + self.allocator.num_free:
            victim = self.running[-1]
            if victim.arrival <= request.arrival:
                return  # everybody else is older: wait for their pages
            self._preempt(victim)
            chunks.pop(victim, None)
        reachable = (len(request.pages) + self.allocator.num_free) * page_size
        end = min(request.num_tokens, start + budget, reachable)
        missing = self.geometry.pages_for(end) - len(request.pages)
        if missing > 0:
            request.pages += self.allocator.allocate(missing)
        chunks[request] = Chunk(request, start, end)

    def _admit(self, chunks: dict[Request, Chunk]) -> None:
        """Start waiting requests in order, as long as there are slots, budget, and pages for all their tokens beside
        what the running requests still need for theirs and one more page each."""
        while self.waiting and self._free_slots and self._left(chunks) > 0:
            request = self.waiting[0]
            hit = self._lookup(request)
            spoken_for = sum(self.allocator.references(page) == 0 for page in hit.pages)
            for other in self.running:
                spoken_for += 1 + max(0, self.geometry.pages_for(other.num_tokens) - len(other.pages))
            needed = self.geometry.pages_for(request.num_tokens) - len(hit.pages)
            if needed > self.allocator.num_free - spoken_for:
                return
            self.waiting.popleft()
            self._start_running(request, hit)
            self._grow(request, chunks)

    def _lookup(self, request: Request) -> PrefixHit:
        if self.prefix_cache is None or request.score:  # a scored prompt needs the logits of every token
            return PrefixHit()
        tokens = request.tokens[: request.num_tokens]
        self.prefix_cache.extend_chain(request.chain, tokens)
        return self.prefix_cache.lookup(request.chain, tokens, request.num_tokens - 1)

    def _start_running(self, request: Request, hit: PrefixHit) -> None:
        self.allocator.acquire(hit.pages)
        request.pages = list(hit.pages)
        request.slot = self._free_slots.pop()
        request.num_computed = hit.num_tokens
        request.num_published = len(hit.pages)
        if hit.snapshot is not None:
            self.caches.restore_snapshot(request.slot, hit.snapshot)
        self.stats.prefix_hits += hit.num_tokens > 0
        if request.num_preemptions == 0:
            request.cached_tokens = hit.num_tokens
            self.stats.cached_tokens += hit.num_tokens
        # Worth a snapshot: where this prompt sent again resumes, its end, and where it leaves a text seen before.
        page_size = self.geometry.page_size
        ends = (request.prompt_tokens - 1, request.prompt_tokens, hit.shared_tokens)
        request.snapshot_at = {end // page_size * page_size for end in ends} - {0}
        self.running.append(request)
        self.running.sort(key=lambda r: r.arrival)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.allocator.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages, request.slot = [], -1

    def _preempt(self, request: Request) -> None:
        """Back to the queue, ahead of younger requests, with nothing but its tokens."""
        self._stop_running(request)
        request.num_computed = request.num_published = 0
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self._preempted = True
        place = sum(other.arrival < request.arrival for other in self.waiting)
        self.waiting.insert(place, request)

    def _begin_snapshots(self, chunk: Chunk) -> None:
        """Keep what snapshots inside this chunk need from the ring that the step is going to overwrite."""
        cache, request, page_size = self.prefix_cache, chunk.request, self.geometry.page_size
        if cache is None:
            return
        cache.extend_chain(request.chain, request.tokens[: chunk.end])
        room = cache.max_snapshots - cache.num_snapshots
        for boundary in range(chunk.start // page_size * page_size + page_size, chunk.end + 1, page_size):
            kept = boundary in request.snapshot_at
            if (kept or len(chunk.snapshots) < room) and cache.wants_snapshot(request.chain[boundary // page_size - 1], kept=kept):
                chunk.snapshots[boundary] = self.caches.begin_snapshot(request.slot, chunk.start, boundary)

    # ---------------------------------------------------------------- after the forward pass

    def complete(self, chunks: Sequence[Chunk], sampled: Sequence[int | None]) -> list[Request]:
        """Account for a finished step; sampled[i] is chunk i's next token (None where none was asked for,
        negative where none could be chosen). Returns the requests that ended; one aborted in the meantime is passed
        over."""
        ended: list[Request] = []
        first_token = 0
        for chunk, token in zip(chunks, sampled):
            request = chunk.request
            if request.slot >= 0 and request.num_computed == chunk.start and request.finish_reason is None:
                self._count(chunk)
                request.num_computed = chunk.end
                self._publish(chunk, first_token)
                if chunk.end == request.num_tokens:
                    reason, error = self._advance(request, token)
                    if reason is not None:
                        self._stop_running(request)
                        self._finish(request, reason, error)
                        ended.append(request)
            first_token += chunk.end - chunk.start
        return ended

    def _count(self, chunk: Chunk) -> None:
        if not chunk.request.is_decoding:
            self.stats.prompt_tokens += chunk.end - chunk.start

    def _publish(self, chunk: Chunk, first_token: int) -> None:
        """Offer the pages that this chunk completed, and their snapshots, to the prefix cache."""
        cache, request, page_size = self.prefix_cache, chunk.request, self.geometry.page_size
        if cache is None:
            return
        tokens = request.tokens[: request.num_tokens]
        while (request.num_published + 1) * page_size <= request.num_computed:
            cache.publish(request.chain, tokens, request.num_published, request.pages[request.num_published])
            request.num_published += 1
        for boundary, snapshot in chunk.snapshots.items():
            self.caches.finish_snapshot(snapshot, first_token, chunk.start, boundary)
            cache.add_snapshot(request.chain[boundary // page_size - 1], snapshot, kept=boundary in request.snapshot_at)

    def _advance(self, request: Request, token: int | None) -> tuple[FinishReason | None, str | None]:
        """Append a sampled token. Returns why the request ends with it, if it does."""
        if request.score:
            return "length", None
        if token is None or token < 0:
            why = "the chosen id has no token in the tokenizer" if token == UNKNOWN_ID else "the logits are not finite"
            return "error", f"cannot continue after {request.num_tokens} tokens: {why}"
        request.tokens[request.num_tokens] = token
        request.num_tokens += 1
        self.stats.generated_tokens += 1
        if token in request.stop_ids:
            return "stop", None
        num_new = request.num_tokens - request.prompt_tokens
        if num_new >= request.params.max_tokens or request.num_tokens >= request.max_total:
            return "length", None
        return None, None

    def _finish(self, request: Request, reason: FinishReason, error: str | None) -> None:
        request.finish_reason, request.error = reason, error
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
