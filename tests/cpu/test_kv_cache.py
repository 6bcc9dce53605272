"""Pages, shared prefixes and window snapshots, without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mini_deepinfer.kv_cache import CacheGeometry, Caches, cache_bytes, page_bytes
from mini_deepinfer.prefix_cache import PageAllocator, PrefixCache
from tests.cpu.fake_model import fake_config


def prefix_cache(num_pages: int = 16, *, budget: int = 4, salt: bytes = b"model") -> PrefixCache:
    return PrefixCache(PageAllocator(num_pages), 4, salt, snapshot_bytes=10, snapshot_budget=10 * budget)


def store(cache: PrefixCache, text: list[int], *, snapshots: tuple[int, ...] = ()) -> list[int]:
    """Publish all full pages of a text as a request would, and let go of them."""
    ids, chain = np.array(text), []
    cache.extend_chain(chain, ids)
    pages = cache.allocator.allocate(len(chain))
    for index, page in enumerate(pages):
        cache.publish(chain, ids, index, page)
        if (index + 1) * 4 in snapshots:
            cache.add_snapshot(chain[index], torch.tensor([index]), kept=True)
    cache.allocator.release(pages)
    return pages


def lookup(cache: PrefixCache, text: list[int], limit: int | None = None):
    ids, chain = np.array(text), []
    cache.extend_chain(chain, ids)
    return cache.lookup(chain, ids, len(text) - 1 if limit is None else limit)


def test_allocate_release_and_double_free() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(3)
    assert pages.num_free == 1
    with pytest.raises(RuntimeError, match="wanted 2 pages, 1 of 4 are free"):
        pages.allocate(2)
    assert pages.num_free == 1
    pages.acquire(held[:1])
    pages.release(held)
    assert pages.num_free == 3
    pages.release(held[:1])
    assert pages.num_free == 4
    with pytest.raises(RuntimeError, match="double free of page"):
        pages.release(held[:1])
    with pytest.raises(RuntimeError, match="belongs to nobody"):
        pages.acquire(held[:1])
    with pytest.raises(ValueError, match="page must be in"):
        pages.release([4])


def test_idle_pages_are_reused_oldest_first_and_from_the_end_of_a_text() -> None:
    cache = prefix_cache(6)
    first = store(cache, list(range(8)))  # two pages
    second = store(cache, list(range(100, 108)))
    assert cache.allocator.num_free == 6
    taken = cache.allocator.allocate(3)
    assert taken[2] == first[1]  # two were never used; then the last page of the older text
    assert lookup(cache, list(range(9))).shared_tokens == 4
    assert lookup(cache, list(range(100, 109))).shared_tokens == 8
    assert set(cache.allocator.allocate(3)) == {first[0], *second}
    assert lookup(cache, list(range(100, 109))).shared_tokens == 0
    assert cache.stats.evicted_pages == 4


def test_a_held_page_is_never_evicted() -> None:
    cache = prefix_cache(2)
    store(cache, list(range(4)), snapshots=(4,))
    hit = lookup(cache, list(range(5)))
    cache.allocator.acquire(hit.pages)
    assert cache.allocator.num_free == 1
    cache.allocator.allocate(1)
    with pytest.raises(RuntimeError):
        cache.allocator.allocate(1)
    assert lookup(cache, list(range(5))).num_tokens == 4


def test_a_hit_needs_a_snapshot_and_leaves_one_token() -> None:
    cache = prefix_cache()
    pages = store(cache, list(range(12)), snapshots=(4, 12))
    hit = lookup(cache, list(range(12)))
    assert (hit.num_tokens, hit.shared_tokens) == (4, 8)  # 12 would leave no token to compute
    assert list(hit.pages) == pages[:1]
    assert hit.snapshot is not None
    assert hit.snapshot.tolist() == [0]
    assert lookup(cache, [*range(12), 7]).num_tokens == 12
    assert lookup(cache, [*range(11), 99, 100]).num_tokens == 4
    assert lookup(cache, [99, *range(1, 12)]).num_tokens == 0
    assert lookup(cache, list(range(4))).num_tokens == 0


def test_same_suffix_under_another_prefix_and_another_identity_do_not_hit() -> None:
    cache = prefix_cache()
    store(cache, [1, 2, 3, 4, 5, 6, 7, 8], snapshots=(4, 8))
    assert lookup(cache, [9, 2, 3, 4, 5, 6, 7, 8, 9]).num_tokens == 0
    assert lookup(cache, [5, 6, 7, 8, 9]).num_tokens == 0
    other = prefix_cache(salt=b"another")
    chains: list[list[bytes]] = [[], []]
    for chain, owner in zip(chains, (cache, other)):
        owner.extend_chain(chain, np.arange(8))
    assert not set(chains[0]) & set(chains[1])


def test_a_digest_alone_is_not_trusted() -> None:
    cache = prefix_cache()
    store(cache, list(range(4)), snapshots=(4,))
    chain: list[bytes] = []
    cache.extend_chain(chain, np.arange(4))
    assert cache.lookup(chain, np.array([9, 9, 9, 9, 9]), 4).num_tokens == 0


def test_an_evicted_page_takes_its_snapshot_and_a_republished_text_is_found_again() -> None:
    cache = prefix_cache(3)
    store(cache, list(range(8)), snapshots=(4, 8))
    held = cache.allocator.allocate(2)  # evicts the second page
    assert lookup(cache, [*range(8), 1]).num_tokens == 4
    assert cache.num_snapshots == 1
    cache.allocator.release(held)
    store(cache, list(range(8)), snapshots=(8,))
    assert lookup(cache, [*range(8), 1]).num_tokens == 8


def test_snapshot_budget() -> None:
    cache = prefix_cache(budget=2)
    assert cache.max_snapshots == 2
    ids, chain = np.arange(24), []
    cache.extend_chain(chain, ids)
    for index, page in enumerate(cache.allocator.allocate(6)):
        cache.publish(chain, ids, index, page)
    cache.add_snapshot(chain[0], torch.zeros(1), kept=True)
    cache.add_snapshot(chain[1], torch.zeros(1), kept=False)
    assert not cache.wants_snapshot(chain[2], kept=False)  # optional ones never push anything out
    cache.add_snapshot(chain[2], torch.zeros(1), kept=True)  # pushes out the optional one, though it is newer
    assert [cache.wants_snapshot(digest, kept=True) for digest in chain[:3]] == [False, True, False]
    assert cache.lookup(chain, ids, 4).num_tokens == 4  # a use: now chain[2] is the oldest
    cache.add_snapshot(chain[3], torch.zeros(1), kept=True)
    assert [cache.wants_snapshot(digest, kept=True) for digest in chain[:4]] == [False, True, True, False]
    assert cache.num_snapshots == 2


def test_a_snapshot_without_its_page_is_not_kept() -> None:
    cache = prefix_cache()
    chain: list[bytes] = []
    cache.extend_chain(chain, np.arange(4))
    cache.add_snapshot(chain[0], torch.zeros(1), kept=True)
    assert cache.num_snapshots == 0


def test_the_same_text_twice_keeps_the_first_page() -> None:
    cache = prefix_cache(4)
    ids, chain = np.arange(4), []
    cache.extend_chain(chain, ids)
    one, two = cache.allocator.allocate(2)
    cache.publish(chain, ids, 0, one)
    cache.publish(chain, ids, 0, two)
    cache.allocator.release([one, two])
    assert cache.allocator.num_cached == 1
    assert cache.allocator.num_free == 4


def test_clear() -> None:
    cache = prefix_cache(4)
    store(cache, list(range(8)), snapshots=(4,))
    cache.clear()
    assert (cache.num_snapshots, cache.allocator.num_cached, cache.allocator.num_free) == (0, 0, 4)


def test_hit_unit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="mini_deepinfer.prefix_cache"):
        prefix_cache()
    assert "hit unit 4 tokens" in caplog.text


def test_caches_shapes_and_bytes() -> None:
    config = fake_config()
    caches = Caches(config, num_pages=6, page_size=4, num_slots=3, max_tokens=10, device="cpu")
    assert len(caches.window) == 7
    assert caches.window[0].shape == (3 * 8 + 10, 32 + 1)
    assert all(pool.is_contiguous() for pool in caches.window)
    assert set(caches.compressed) == set(caches.index_keys) == {1, 4}
    assert caches.compressed[1].shape == (12, 16 + 2)
    assert caches.compressed[4].shape == (24, 16 + 2)
    assert caches.index_keys[4].shape == (24, 16 + 1)
    assert caches.tail_kv[1].shape == (3 + 1, 32)  # one row behind the slots is scratch
    assert 4 not in caches.tail_kv
    plan = cache_bytes(config, caches.geometry)
    assert sum(plan.values()) == sum(t.numel() * t.element_size() for t in caches.tensors())
    assert page_bytes(config, 4) * 6 == plan["pages"]
    assert caches.snapshot_bytes == 7 * 8 * 33


def test_geometry_refuses_a_page_that_splits_a_group() -> None:
    with pytest.raises(ValueError, match="multiple of every compress ratio"):
        CacheGeometry.of(fake_config(), num_pages=4, page_size=5, num_slots=1, max_tokens=8)
    with pytest.raises(ValueError, match="num_pages must be at least 1"):
        CacheGeometry.of(fake_config(), num_pages=0, page_size=4, num_slots=1, max_tokens=8)
    with pytest.raises(ValueError, match="int32"):
        CacheGeometry.of(fake_config(), num_pages=2**24, page_size=256, num_slots=1, max_tokens=8)


@pytest.mark.parametrize(("start", "boundary"), [(s, b) for s in (0, 3, 8, 11, 16, 20) for b in (4, 8, 12, 20, 24, 32) if b > s])
def test_snapshot_equals_the_ring_of_a_step_that_ended_there(start: int, boundary: int) -> None:
    """Rows hold their position; the step start..35 passes the boundary and overwrites the ring."""
    config = fake_config()
    caches = Caches(config, num_pages=16, page_size=4, num_slots=2, max_tokens=64, device="cpu")
    slot, first_token, end = 1, 5, 36
    for position in range(max(0, start - 8), start):
        for pool in caches.window:
            pool[slot * 8 + position % 8] = position + 1
    snapshot = caches.begin_snapshot(slot, start, boundary)
    for position in range(start, end):
        for pool in caches.window:
            pool[caches.geometry.chunk_row + first_token + position - start] = position + 1
    for pool in caches.window:
        pool[slot * 8 : slot * 8 + 8] = 255  # whatever the step left in the ring
    caches.finish_snapshot(snapshot, first_token, start, boundary)
    for position in range(max(0, boundary - 8), boundary):
        assert (snapshot[:, position % 8] == position + 1).all()
    caches.restore_snapshot(0, snapshot)
    assert torch.equal(torch.stack(caches.window)[:, :8], snapshot)
