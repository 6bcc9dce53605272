"""The scheduler over real caches with the index-only model: what is planned, and that planning never changes a token."""

from __future__ import annotations

import numpy as np
import pytest

from mini_deepinfer.batch import build_batch
from mini_deepinfer.kv_cache import Caches
from mini_deepinfer.prefix_cache import PageAllocator, PrefixCache
from mini_deepinfer.sampler import SamplingParams
from mini_deepinfer.scheduler import Request, Scheduler
from tests.cpu.fake_model import VOCAB, FakeModel, fake_config


class Loop:
    """Scheduler, caches and fake model, greedy."""

    def __init__(self, *, pages: int = 64, budget: int = 64, seqs: int = 4, prefix: bool = False, snapshots: int = 64) -> None:
        self.config = fake_config()
        self.caches = Caches(self.config, num_pages=pages, page_size=4, num_slots=seqs, max_tokens=budget, device="cpu")
        self.caches.poison()
        self.allocator = PageAllocator(pages)
        unit = self.caches.snapshot_bytes
        self.prefix = PrefixCache(self.allocator, 4, b"", unit, unit * snapshots) if prefix else None
        self.scheduler = Scheduler(self.caches, self.allocator, self.prefix, budget)
        self.model = FakeModel(self.config, self.caches)

    def add(self, tokens: list[int], new: int = 1, stop: tuple[int, ...] = ()) -> Request:
        buffer = np.zeros(len(tokens) + new, dtype=np.int64)
        buffer[: len(tokens)] = tokens
        params = SamplingParams(max_tokens=new)
        request = Request(len(tokens), params, len(buffer), frozenset(stop), False, buffer, len(tokens))
        self.scheduler.add(request)
        return request

    def step(self) -> list[tuple[Request, int, int]]:
        chunks = self.scheduler.plan()
        assert sum(c.end - c.start for c in chunks) <= self.scheduler.max_num_batched_tokens
        batch = build_batch(self.config, [c.as_input() for c in chunks], self.caches.geometry, "cpu")
        rows = iter(self.model.forward(batch).argmax(1).tolist())
        self.scheduler.complete(chunks, [next(rows) if c.want_logits == "last" else None for c in chunks])
        return [(c.request, c.start, c.end) for c in chunks]

    def run(self, limit: int = 2000) -> None:
        while self.scheduler.has_work:
            assert self.step(), "a step without tokens although there is work"
            limit -= 1
            assert limit > 0, "no end"
        assert self.allocator.num_free == self.allocator.num_pages
        assert self.scheduler.num_free_slots == self.caches.geometry.num_slots


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def alone(tokens: list[int], new: int) -> list[int]:
    loop = Loop()
    request = loop.add(tokens, new)
    loop.run()
    return request.generated


def test_chunks_fill_the_budget_in_order() -> None:
    loop = Loop(budget=8)
    first, second = loop.add(text(13, 0), 2), loop.add(text(4, 1), 2)
    assert loop.step() == [(first, 0, 8)]
    assert loop.step() == [(first, 8, 13), (second, 0, 3)]
    assert loop.step() == [(first, 13, 14), (second, 3, 4)]  # a decode token first, then the rest of the prompt
    assert first.finish_reason == "length"
    assert loop.step() == [(second, 4, 5)]
    assert not loop.scheduler.has_work


def test_slots_bound_the_running_requests() -> None:
    loop = Loop(seqs=2)
    requests = [loop.add(text(3, i), 3) for i in range(5)]
    loop.step()
    assert [r.slot >= 0 for r in requests] == [True, True, False, False, False]
    loop.run()
    assert all(len(r.generated) == 3 for r in requests)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 64])
def test_neither_decodes_nor_prompts_starve(budget: int) -> None:
    loop = Loop(budget=budget, seqs=4)
    requests = [loop.add(text(9, i), 12) for i in range(4)]
    waits = dict.fromkeys(requests, 0)
    while loop.scheduler.has_work:
        active = {request for request, _, _ in loop.step()}
        for request in requests:
            decoding = request.finish_reason is None and request.is_decoding
            waits[request] = 0 if request in active or not decoding else waits[request] + 1
            assert waits[request] <= 2 * 4 + 9
    assert [r.generated for r in requests] == [alone(text(9, i), 12) for i in range(4)]


def test_a_prompt_is_not_held_up_by_decodes_that_fill_the_budget() -> None:
    loop = Loop(budget=2, seqs=3)
    loop.add(text(2, 0), 60)
    loop.add(text(2, 1), 60)
    loop.step()
    loop.step()
    late = loop.add(text(6, 2), 1)
    for _ in range(8):
        loop.step()
    assert late.finish_reason == "length"


def test_stop_token_and_length() -> None:
    tokens = text(6, 3)
    plain = alone(tokens, 8)
    loop = Loop()
    request = loop.add(tokens, 8, stop=(plain[2],))
    loop.run()
    assert request.generated == plain[: plain.index(plain[2]) + 1]
    assert request.finish_reason == "stop"


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    loop = Loop(pages=4)
    with pytest.raises(ValueError, match=r"12 prompt tokens and up to 6 new ones needs 5 pages of 4 tokens.*has 4"):
        loop.add(text(12, 0), 6)
    loop.add(text(12, 0), 5)  # the last new token is never computed
    loop.run()


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("pages", [10, 12, 13, 17, 22])
def test_preemption_never_changes_the_output(pages: int, prefix: bool) -> None:
    texts = [text(20, seed) for seed in range(4)]
    wanted = [alone(t, 20) for t in texts]
    loop = Loop(pages=pages, prefix=prefix)
    requests = [loop.add(t, 20) for t in texts]
    loop.run()
    assert [r.generated for r in requests] == wanted
    assert all(r.finish_reason == "length" for r in requests)
    assert (loop.scheduler.stats.preemptions > 0) == (pages > 10)  # with 10 pages one runs at a time


@pytest.mark.parametrize("seed", range(8))
def test_random_arrivals_aborts_and_preemptions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prefix = bool(seed % 2)
    loop = Loop(pages=14, budget=int(rng.integers(1, 12)), seqs=3, prefix=prefix, snapshots=int(rng.integers(1, 8)))
    base = text(24, 77)
    live: list[tuple[Request, list[int], int]] = []
    for _ in range(40):
        if rng.random() < 0.5:
            shared = int(rng.integers(0, 16))
            tokens = base[:shared] + text(int(rng.integers(1, 12)), int(rng.integers(1000)))
            new = int(rng.integers(1, 16))
            live.append((loop.add(tokens, new), tokens, new))
        if live and rng.random() < 0.1:
            victim = live[int(rng.integers(len(live)))][0]
            loop.scheduler.abort(victim)
        if loop.scheduler.has_work:
            loop.step()
    loop.run()
    for request, tokens, new in live:
        expected = alone(tokens, new)
        if request.finish_reason == "abort":
            assert request.generated == expected[: len(request.generated)]
        else:
            assert request.generated == expected


def test_preempted_requests_go_back_ahead_of_younger_ones() -> None:
    loop = Loop(pages=8, seqs=4)
    requests = [loop.add(text(9, i), 16) for i in range(4)]
    loop.run()
    assert loop.scheduler.stats.preemptions > 0
    assert [r.generated for r in requests] == [alone(text(9, i), 16) for i in range(4)]


def test_abort_in_every_state_returns_everything() -> None:
    loop = Loop(budget=7, seqs=1, pages=16)
    running, waiting = loop.add(text(30, 0), 4), loop.add(text(5, 1), 4)
    loop.step()
    assert loop.allocator.num_free < 16
    assert loop.scheduler.abort(waiting)
    assert loop.scheduler.abort(running)
    assert not loop.scheduler.abort(running)
    assert (loop.allocator.num_free, loop.scheduler.num_free_slots) == (16, 1)
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")


def test_abort_between_plan_and_complete() -> None:
    """The late result of a chunk must find no owner: no page comes back to life, nothing is published."""
    loop = Loop(budget=8, prefix=True)
    request = loop.add(text(20, 0), 4)
    chunks = loop.scheduler.plan()
    loop.scheduler.abort(request)
    assert loop.scheduler.complete(chunks, [None]) == []
    assert loop.allocator.num_free == 64
    assert loop.allocator.num_cached == 0


def test_pages_of_an_aborted_prompt_are_cached_only_as_far_as_computed() -> None:
    loop = Loop(budget=7, prefix=True)
    tokens = text(30, 0)
    first = loop.add(tokens, 4)
    loop.step()
    loop.step()
    loop.scheduler.abort(first)
    assert loop.allocator.num_cached == 3  # 14 tokens computed: three pages of 4
    again = loop.add(tokens, 4)
    loop.run()
    assert again.cached_tokens <= 14
    assert again.generated == alone(tokens, 4)


def test_two_hundred_aborts_leave_nothing_behind() -> None:
    loop = Loop(budget=7, seqs=1, pages=16, prefix=True)
    long, short = text(30, 1), text(9, 2)
    wanted_long, wanted_short = alone(long, 2), alone(short, 2)
    for _ in range(200):
        assert loop.prefix is not None
        loop.prefix.clear()
        request = loop.add(long, 2)
        loop.step()
        loop.step()
        assert loop.scheduler.abort(request)
        assert (loop.allocator.num_free, loop.scheduler.num_free_slots) == (16, 1)
        small = loop.add(short, 2)
        loop.run()
        again = loop.add(long, 2)
        loop.run()
        assert (small.generated, again.generated) == (wanted_short, wanted_long)
        assert again.cached_tokens <= 14


@pytest.mark.parametrize("shared", [4, 5, 6, 7, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("budget", [3, 64])
def test_prefix_hit_equals_cold(shared: int, budget: int) -> None:
    prefix, other = text(shared, 5), text(50, 6)
    for suffix in (1, 2, 9):
        loop = Loop(budget=budget, prefix=True)
        one, two = prefix + text(suffix, 7), prefix + text(suffix, 8)
        two[shared] = (one[shared] + 1) % VOCAB
        loop.add(one, 3)
        loop.run()
        loop.add(other, 2)
        loop.run()
        hit = loop.add(two, 6)
        loop.run()
        assert hit.generated == alone(two, 6)
        assert hit.cached_tokens % 4 == 0
        assert hit.cached_tokens == shared // 4 * 4  # short texts: a snapshot at every page


def test_without_room_only_the_asked_for_boundaries_are_kept() -> None:
    loop = Loop(prefix=True, snapshots=2)
    tokens = text(24, 1)
    loop.add(tokens, 1)
    loop.run()
    again = loop.add(tokens, 1)
    loop.run()
    assert again.cached_tokens == 20  # the last boundary strictly before the end
    longer = loop.add([*tokens, 5], 1)
    loop.run()
    assert longer.cached_tokens == 24


def test_a_shared_prefix_seen_twice_gets_a_snapshot_where_it_ends() -> None:
    loop = Loop(prefix=True, snapshots=3)
    prefix = text(16, 1)
    requests = []
    for seed in (2, 3, 4):
        requests.append(loop.add([*prefix, seed, *text(20, seed)], 1))
        loop.run()
    assert requests[1].cached_tokens < 16
    assert requests[2].cached_tokens == 16


def test_a_cold_start_needs_all_pages_of_the_prompt() -> None:
    loop = Loop(pages=10, budget=16)
    loop.add(text(16, 0), 8)
    late = loop.add(text(24, 1), 2)
    loop.step()
    assert late.slot < 0
    loop.run()
    assert loop.scheduler.stats.preemptions == 0


def test_budget_beyond_the_caches_is_refused() -> None:
    caches = Caches(fake_config(), num_pages=4, page_size=4, num_slots=1, max_tokens=8, device="cpu")
    with pytest.raises(ValueError, match=r"must be in 1\.\.8"):
        Scheduler(caches, PageAllocator(4), None, 9)
