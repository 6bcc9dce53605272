"""build_batch against a plain loop over tokens, and the caches through it: any chunking gives the same logits."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from mini_deepinfer.batch import ChunkRequest, build_batch
from mini_deepinfer.kv_cache import CacheGeometry, Caches
from tests.cpu.fake_model import VOCAB, FakeModel, fake_config


def loop_batch(requests: list[ChunkRequest], geometry: CacheGeometry) -> dict:
    """The definition of every index, one token at a time."""
    width, chunk_row = geometry.window, geometry.num_slots * geometry.window
    total = sum(r.end - r.start for r in requests)
    out: dict = {"token_ids": [], "positions": [], "seq": [], "window": [], "ring": {}, "out": []}
    groups = {r: [] for r in geometry.ratios}
    tails = {r: {} for r in geometry.ratios}
    first = 0
    for seq, request in enumerate(requests):
        for pos in range(request.start, request.end):
            token = first + pos - request.start
            out["token_ids"].append(int(request.token_ids[pos]))
            out["positions"].append(pos)
            out["seq"].append(seq)
            lanes = []
            for q in range(max(0, pos - width + 1), pos + 1):
                here = chunk_row + first + q - request.start
                lanes.append(here if q >= request.start else request.slot * width + q % width)
            out["window"].append(lanes + [-1] * (width - len(lanes)))
            if pos >= request.end - width:
                out["ring"][request.slot * width + pos % width] = chunk_row + token
            for ratio in geometry.ratios:
                if (pos + 1) % ratio == 0:
                    members = []
                    for i, q in enumerate(range(pos + 1 - ratio, pos + 1)):
                        carried = total + request.slot * (ratio - 1) + i
                        members.append(first + q - request.start if q >= request.start else carried)
                    start = pos + 1 - ratio
                    page = request.pages[start // geometry.page_size]
                    row = page * (geometry.page_size // ratio) + start % geometry.page_size // ratio
                    groups[ratio].append((members, start, row))
                if pos >= request.end // ratio * ratio:
                    tails[ratio][request.slot * (ratio - 1) + pos % ratio] = token
            if request.want_logits == "all" or (request.want_logits == "last" and pos == request.end - 1):
                out["out"].append(token)
        first += request.end - request.start
    return out | {"groups": groups, "tails": tails}


@pytest.mark.parametrize("seed", range(40))
def test_matches_the_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ratios = [(2, 1), (2,), (4, 2, 1), (1,), ()][seed % 5]
    window = int(rng.integers(1, 10))
    config = fake_config(ratios=(0, *ratios), owners=tuple(range(1, 1 + len(ratios))), window=window)
    geometry = CacheGeometry.of(config, num_pages=64, page_size=4, num_slots=6, max_tokens=200)
    free = list(rng.permutation(64))
    slots = list(rng.permutation(6))
    requests = []
    for _ in range(int(rng.integers(0, 6))):
        start = int(rng.integers(0, 20)) if rng.random() < 0.7 else 0
        end = start + int(rng.integers(1, 20))
        pages = [int(free.pop()) for _ in range(geometry.pages_for(end))]
        ids = rng.integers(0, VOCAB, end + 3)
        want = ["last", "all", "none"][int(rng.integers(3))]
        requests.append(ChunkRequest(ids, start, end, int(slots.pop()), pages, want))  # type: ignore[arg-type]
    batch = build_batch(config, requests, geometry, "cpu")
    want = loop_batch(requests, geometry)
    assert batch.num_tokens == len(want["token_ids"])
    assert batch.num_seqs == len(requests)
    assert batch.token_ids.tolist() == want["token_ids"]
    assert batch.positions.tolist() == want["positions"]
    assert batch.seq_of_token.tolist() == want["seq"]
    assert batch.window_idx.tolist() == want["window"]
    assert batch.window_rows.tolist() == [geometry.chunk_row + t for t in range(batch.num_tokens)]
    assert dict(zip(batch.ring_dst.tolist(), batch.ring_src.tolist())) == want["ring"]
    assert batch.output_rows.tolist() == want["out"]
    for row, request in enumerate(requests):
        count = geometry.pages_for(request.end)
        assert batch.page_table[row, :count].tolist() == list(request.pages[:count])
    for ratio in geometry.ratios:
        plan = batch.compress[ratio]
        got = list(zip(plan.group_rows.tolist(), plan.positions.tolist(), plan.rows.tolist()))
        assert got == want["groups"][ratio]
        assert dict(zip(plan.tail_dst.tolist(), plan.tail_src.tolist())) == want["tails"][ratio]
        assert batch.max_visible[ratio] == max([r.end // ratio for r in requests], default=0)
    for name in ("positions", "seq_of_token", "page_table", "window_rows", "window_idx"):
        assert getattr(batch, name).dtype == torch.int32
    for name in ("token_ids", "ring_src", "ring_dst", "output_rows"):
        assert getattr(batch, name).dtype == torch.int64


def run_chunked(chunks: list[int], ids: np.ndarray, *, slot: int, pages: list[int], poison: int = 0xFF) -> torch.Tensor:
    config = fake_config()
    caches = Caches(config, num_pages=32, page_size=4, num_slots=3, max_tokens=64, device="cpu")
    caches.poison(poison)
    model = FakeModel(config, caches)
    logits, start = [], 0
    for count in chunks:
        request = ChunkRequest(ids, start, start + count, slot, pages, "all")
        logits.append(model.forward(build_batch(config, [request], caches.geometry, "cpu")))
        start += count
    assert start == len(ids)
    return torch.cat(logits)


def splits(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 22, 40])
def test_any_chunking_gives_the_same_logits(size: int) -> None:
    ids = np.random.default_rng(0).integers(0, VOCAB, 41)
    whole = run_chunked([41], ids, slot=0, pages=list(range(11)))
    pages = [int(p) for p in np.random.default_rng(size).permutation(32)[:11]]
    assert torch.equal(run_chunked(splits(41, size), ids, slot=2, pages=pages, poison=size), whole)


def test_random_chunking_with_neighbours() -> None:
    config = fake_config()
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, VOCAB, n) for n in (5, 17, 40, 23)]
    alone = [run_chunked([len(t)], t, slot=0, pages=list(range(10)))[-1] for t in texts]
    caches = Caches(config, num_pages=40, page_size=4, num_slots=4, max_tokens=64, device="cpu")
    caches.poison()
    model = FakeModel(config, caches)
    done, last = [0] * 4, [None] * 4
    while min(d - len(t) for d, t in zip(done, texts)) < 0:
        order = [i for i in rng.permutation(4) if done[i] < len(texts[i]) and rng.random() < 0.7]
        requests = []
        for i in order:
            end = min(len(texts[i]), done[i] + int(rng.integers(1, 8)))
            requests.append(ChunkRequest(texts[i], done[i], end, int(i), [int(p) for p in range(i, 40, 4)], "last"))
            done[i] = end
        for i, row in zip(order, model.forward(build_batch(config, requests, caches.geometry, "cpu"))):
            last[i] = row
    for got, want in zip(last, alone):
        assert torch.equal(got, want)


def test_empty_step() -> None:
    config = fake_config()
    geometry = CacheGeometry.of(config, num_pages=4, page_size=4, num_slots=2, max_tokens=8)
    batch = build_batch(config, [], geometry, "cpu")
    assert (batch.num_tokens, batch.num_seqs) == (0, 0)
    assert batch.window_idx.shape == (0, 8)
    assert batch.compress[2].group_rows.shape == (0, 2)
    assert batch.max_visible == {1: 0, 2: 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 5, "end": 5}, "start < end"),
        ({"end": 99}, "start < end"),
        ({"slot": 2}, "slot must be below 2"),
        ({"pages": [0]}, "need 2 pages"),
        ({"pages": [0, 4]}, "pages must be in"),
        ({"end": 9, "pages": [0, 1, 2]}, "max_tokens=8"),
        ({"want_logits": "some"}, "last, all or none"),
    ],
)
def test_refuses(change: dict, message: str) -> None:
    config = fake_config()
    geometry = CacheGeometry.of(config, num_pages=4, page_size=4, num_slots=2, max_tokens=8)
    fields = {"token_ids": np.arange(20), "start": 0, "end": 7, "slot": 0, "pages": [0, 1]}
    with pytest.raises(ValueError, match=message):
        build_batch(config, [ChunkRequest(**(fields | change))], geometry, "cpu")


def test_two_requests_in_one_slot_are_refused() -> None:
    config = fake_config()
    geometry = CacheGeometry.of(config, num_pages=4, page_size=4, num_slots=2, max_tokens=8)
    request = ChunkRequest(np.arange(20), 0, 2, 0, [0])
    with pytest.raises(ValueError, match="own slot"):
        build_batch(config, [request, request], geometry, "cpu")


def test_a_long_step_is_built_in_milliseconds() -> None:
    config = fake_config(window=128)
    geometry = CacheGeometry.of(config, num_pages=600, page_size=256, num_slots=16, max_tokens=4096)
    ids = np.arange(131072) % VOCAB
    request = ChunkRequest(ids, 126976, 131072, 3, list(range(512)))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        build_batch(config, [request], geometry, "cpu")
        best = min(best, time.perf_counter() - begin)
    assert best < 0.05  # a few ms on an idle core
