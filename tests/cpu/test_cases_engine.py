"""Known ways to get state, chunking, reuse and scheduling wrong, on the real model in float32 on the CPU.

Row-invariant products make the comparisons exact: a token's logits must not depend, in any bit, on how its prompt was cut,
on what ran beside it, or on where its rows came from.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch

from mini_deepinfer.batch import ChunkRequest, build_batch
from mini_deepinfer.config import ModelConfig
from mini_deepinfer.engine import LLM
from mini_deepinfer.engram import EngramHasher, engram_layouts
from mini_deepinfer.kv_cache import CacheGeometry
from mini_deepinfer.ops import reference
from tests.cpu.tiny_engine import (
    assert_all_returned,
    checkpoint,
    edited_checkpoint,
    greedy,
    make_llm,
    prompt,
    run,
)


@cache
def shared_llm(budget: int = 64, prefix: bool = False) -> LLM:
    """One engine per budget for tests that leave nothing behind."""
    return make_llm(max_num_batched_tokens=budget, enable_prefix_caching=prefix)


@cache
def cold(tokens: tuple[int, ...], new: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and logits of a prompt alone, in one chunk, without reuse."""
    outputs, logits = run(shared_llm(), [list(tokens)], new)
    return outputs[0].token_ids, logits[0]


def assert_cold(output, logits: torch.Tensor, tokens: list[int], new: int) -> None:
    wanted_tokens, wanted_logits = cold(tuple(tokens), new)
    assert output.token_ids == wanted_tokens
    assert torch.equal(logits, wanted_logits)


# ------------------------------------------------------------------ state across chunks: compressor


KV = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [1.0, 5.0], [2.0, 2.0]])
GATE = torch.tensor([[0.0, 0.0], [math.log(3), 0.0], [0.0, math.log(3)], [0.0, 0.0], [9.0, 9.0]])


def compositions(total: int) -> list[list[int]]:
    return [
        [b - a for a, b in zip((0, *cut), (*cut, total))] for size in range(total) for cut in itertools.combinations(range(1, total), size)
    ]


@pytest.mark.parametrize("split", compositions(5), ids=str)
def test_ratio_2_groups_in_every_split_of_five_tokens(split: list[int]) -> None:
    config = ModelConfig.from_folder(checkpoint())
    geometry = CacheGeometry.of(config, num_pages=4, page_size=4, num_slots=2, max_tokens=8)
    hasher = _hasher()
    tail_kv, tail_score = torch.full((2, 2), float("nan")), torch.full((2, 2), float("nan"))
    start, groups, positions, rows = 0, [], [], []
    for count in split:
        request = ChunkRequest(np.arange(10, 15), start, start + count, 1, [3, 1])
        batch = build_batch(config, [request], geometry, "cpu", hasher)
        plan = batch.compress[2]
        kv, gate = KV[start : start + count], GATE[start : start + count]
        groups.append(reference.attention.compress(kv, gate, tail_kv, tail_score, plan.group_rows, torch.float32))
        positions += plan.positions.tolist()
        rows += plan.rows.tolist()
        tail_kv[plan.tail_dst], tail_score[plan.tail_dst] = kv[plan.tail_src], gate[plan.tail_src]
        start += count
    got = torch.cat(groups)
    assert got.shape == (2, 2)  # token 4 publishes nothing
    assert (got - torch.tensor([[0.25, 1.0], [2.0, 2.0]])).abs().max() <= 1e-6
    assert positions == [0, 2]
    assert rows == [6, 7]
    assert torch.equal(tail_kv[1], KV[4])


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 22])
def test_any_chunk_size_gives_the_same_logits(budget: int) -> None:
    tokens = prompt(23)
    outputs, logits = run(shared_llm(budget), [tokens], 4)
    assert_cold(outputs[0], logits[0], tokens, 4)


def test_rows_that_move_between_batch_places() -> None:
    """The first request ends first, so the others move up in the batch."""
    texts = [prompt(n, seed=n) for n in (5, 8, 11)]
    llm = shared_llm(3)
    requests = [llm.add_request(text, greedy(new)) for text, new in zip(texts, (1, 3, 5))]
    outputs = {}
    while llm.has_work:
        outputs |= {output.index: output for output in llm.step()}
    for request, text, new in zip(requests, texts, (1, 3, 5)):
        assert outputs[request].token_ids == cold(tuple(text), new)[0]


# ------------------------------------------------------------------ state across chunks: engram history


def _hasher() -> EngramHasher:
    return shared_llm().hasher  # type: ignore[return-value]


ENGRAM_IDS = [3, 0, 4, 4, 2, 0]
ENGRAM_ROWS = [
    [8, 15, 24, 50, 60, 102],
    [0, 15, 32, 45, 73, 105],
    [3, 14, 33, 41, 76, 104],
    [4, 19, 37, 59, 81, 91],
    [4, 19, 38, 55, 67, 98],
    [0, 18, 31, 48, 82, 95],
]


@pytest.mark.parametrize("cuts", [[6], [3, 3], [1] * 6, [2, 1, 3]])
def test_engram_rows_for_every_cut(cuts: list[int]) -> None:
    config = dataclasses.replace(
        ModelConfig.from_folder(checkpoint()),
        engram_vocab_size=11, engram_n_heads=2, engram_compressed_vocab_size=5, engram_pad_token_id=1,
        engram_num_embeddings=(engram_layouts([1], 4, 2, 11, 5)[0].num_rows,), image_token_id=None,
    )  # fmt: skip
    hasher = EngramHasher(config, np.minimum(np.arange(config.vocab_size), 4).astype(np.int32))
    geometry = CacheGeometry.of(config, num_pages=4, page_size=4, num_slots=2, max_tokens=8)
    rows, start = [], 0
    for count in cuts:
        request = ChunkRequest(np.array(ENGRAM_IDS), start, start + count, 0, [0, 1])
        rows += build_batch(config, [request], geometry, "cpu", hasher).engram_rows[0].tolist()
        start += count
    assert rows == ENGRAM_ROWS


def _open_engram(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.engram.q_weight"] *= 4


@cache
def engram_llm(budget: int, prefix: bool) -> LLM:
    return make_llm(_engram_folder(), max_num_batched_tokens=budget, enable_prefix_caching=prefix)


@cache
def _engram_folder():
    return edited_checkpoint(_open_engram)


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_engram_history_crosses_chunks(budget: int) -> None:
    tokens = prompt(12)
    wanted, wanted_logits = run(engram_llm(64, False), [tokens])
    got, logits = run(engram_llm(budget, False), [tokens])
    assert got[0].token_ids == wanted[0].token_ids
    assert torch.equal(logits[0], wanted_logits[0])


@pytest.mark.parametrize("shared", [4, 8])
def test_engram_history_crosses_a_prefix_hit(shared: int) -> None:
    tokens = prompt(12)
    llm = engram_llm(64, True)
    llm.prefix_cache.clear()
    run(llm, [tokens[:shared] + prompt(3, seed=9)])
    got, logits = run(llm, [tokens])
    wanted, wanted_logits = run(engram_llm(64, False), [tokens])
    assert got[0].cached_tokens == shared
    assert torch.equal(logits[0], wanted_logits[0])
    assert got[0].token_ids == wanted[0].token_ids


def test_engram_history_matters() -> None:
    """The comparisons above would see a lost history: other older tokens change the logits of the last one."""
    llm = engram_llm(64, False)
    one = prompt(12)
    changed = [*one[:9], one[9] + 1, *one[10:]]
    logits = [llm.score([text])[0][-1] for text in (one, changed)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


# ------------------------------------------------------------------ windows


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 33])
def test_window_after_a_prefix_hit(length: int) -> None:
    prefix = prompt(length, seed=1)
    for suffix in (1, 2, 9):
        llm = shared_llm(64, prefix=True)
        llm.prefix_cache.clear()
        one, two = prefix + prompt(suffix, seed=2), prefix + prompt(suffix, seed=3)
        run(llm, [one], 1)
        run(llm, [prompt(60, seed=4)], 1)  # another one in between
        outputs, logits = run(llm, [two], 2)
        assert outputs[0].cached_tokens == length // 4 * 4 > 0
        assert_cold(outputs[0], logits[0], two, 2)


@pytest.mark.parametrize("budget", [1, 7, 8, 9, 15, 16, 17, 40, 41])
def test_chunk_size_against_window_size(budget: int) -> None:
    tokens = prompt(41)
    outputs, logits = run(shared_llm(budget), [tokens], 2)
    assert_cold(outputs[0], logits[0], tokens, 2)


def test_one_window_layer_sees_exactly_its_window() -> None:
    folder = edited_checkpoint(
        num_hidden_layers=1, compress_ratios=[0], kv_source_layer_ids=[], index_source_layer_ids=[],
        candidate_source_layer_id=None, engram_layer_ids=[], engram_num_embeddings=[],
    )  # fmt: skip
    llm = make_llm(folder)
    tokens = prompt(30)
    base = llm.score([tokens])[0]
    for p in (0, 5, 11):
        changed = [*tokens[:p], tokens[p] + 1, *tokens[p + 1 :]]
        differs = (llm.score([changed])[0] != base).any(dim=1)
        assert differs.nonzero().view(-1).tolist() == list(range(p, p + 8))


# ------------------------------------------------------------------ candidates


@pytest.mark.parametrize("budget", [3, 13])
def test_candidate_filter_in_small_chunks(budget: int) -> None:
    """60 tokens are 60 entries of ratio 1: far more than the 2 blocks of 4 that the filter keeps."""
    tokens = prompt(60, seed=8)
    whole = shared_llm().score([tokens])[0]
    assert torch.equal(shared_llm(budget).score([tokens])[0], whole)
    _, logits = run(shared_llm(), [tokens[:40]], 1)
    assert torch.equal(logits[0][0], whole[39])


# ------------------------------------------------------------------ unwritten memory


@pytest.mark.parametrize("length", [1, 63, 64, 65, 66, 127, 128, 129])
def test_unwritten_rows_are_never_read(length: int) -> None:
    tokens = prompt(length, seed=length)
    llm = shared_llm(150)
    results = []
    for byte in (0x00, 0xFF, 0x7F):
        llm.caches.poison(byte)
        results.append(llm.score([tokens])[0])
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# ------------------------------------------------------------------ neighbours


def test_neighbours_and_order_change_nothing() -> None:
    texts = [prompt(n, seed=n) for n in (5, 17, 40)]
    for order in itertools.permutations(range(3)):
        outputs, logits = run(shared_llm(), [texts[i] for i in order], 3)
        for place, i in enumerate(order):
            assert_cold(outputs[place], logits[place], texts[i], 3)


@pytest.mark.parametrize("length", [5, 17, 40])
def test_eight_copies_of_a_prompt(length: int) -> None:
    tokens = prompt(length, seed=length)
    llm = make_llm(max_num_seqs=8, max_num_batched_tokens=50)
    outputs, logits = run(llm, [tokens] * 8, 3)
    for output, row in zip(outputs, logits):
        assert_cold(output, row, tokens, 3)


def _no_index_weights(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.endswith("indexer.weights_proj.weight"):
            tensors[name].zero_()


def test_equal_index_scores_give_one_selection() -> None:
    """With all scores equal the rule decides: the lowest entries, and the newest block among the candidates."""
    llm = make_llm(edited_checkpoint(_no_index_weights))
    tokens = prompt(40)
    chosen = []
    for _ in range(20):
        seen: dict[tuple[str, int], torch.Tensor] = {}
        request = ChunkRequest(np.array(tokens), 0, 40, 0, list(range(10)), "all")
        batch = build_batch(llm.config, [request], llm.caches.geometry, "cpu", llm.hasher)

        def keep(name: str, layer: int, tensor: torch.Tensor, seen: dict = seen) -> None:
            seen[name, layer] = tensor.clone()

        logits = llm.model.forward(batch, trace=keep)  # type: ignore[call-arg]
        chosen.append((logits, seen))
    names = [key for key in chosen[0][1] if key[0] == "selection"]
    assert names
    for logits, seen in chosen[1:]:
        assert torch.equal(logits, chosen[0][0])
        assert all(torch.equal(seen[name], chosen[0][1][name]) for name in names)


# ------------------------------------------------------------------ decode


def test_decode_equals_prefill_at_every_step() -> None:
    tokens = prompt(3, seed=5)
    llm = make_llm()
    outputs, logits = run(llm, [tokens], 40)
    generated = outputs[0].token_ids
    computed = 3 + 40 - 1
    for plan in llm.config.layers:
        if plan.owns_kv:
            for rows in (llm.caches.compressed[plan.index], llm.caches.index_keys[plan.index]):
                assert int((rows != 0).any(dim=1).sum()) == computed // plan.ratio
    for step in range(40):
        _, again = run(shared_llm(), [tokens + generated[:step]], 1)
        assert torch.equal(again[0][0], logits[0][step])


# ------------------------------------------------------------------ preemption


@pytest.mark.parametrize(("lengths", "prefix"), [((20, 20, 20, 20), False), ((20, 20, 20, 20), True), ((21, 20, 19, 18), True)])
def test_preempted_requests_answer_as_if_alone(lengths: tuple[int, ...], prefix: bool) -> None:
    texts = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    llm = make_llm(num_pages=13, max_model_len=52, enable_prefix_caching=prefix)
    preempted_at: list[int] = []
    original = llm.scheduler._preempt

    def spy(request):
        preempted_at.append(request.num_tokens)
        original(request)

    llm.scheduler._preempt = spy  # type: ignore[method-assign]
    outputs, _ = run(llm, texts, 20)
    assert llm.stats()["preemptions"] == len(preempted_at) >= 3
    assert any(n % 4 == 1 for n in preempted_at)
    for output, text in zip(outputs, texts):
        assert output.token_ids == cold(tuple(text), 20)[0]
    assert_all_returned(llm)


# ------------------------------------------------------------------ prefix keys


@pytest.mark.parametrize("shared", [4, 5, 6, 7, 8, 9])
def test_shared_prefix_of_any_length(shared: int) -> None:
    llm = shared_llm(64, prefix=True)
    llm.prefix_cache.clear()
    one = prompt(14, seed=1)
    two = one[:shared] + prompt(7, seed=2)
    two[shared] = one[shared] + 1
    run(llm, [one])
    outputs, logits = run(llm, [two])
    assert outputs[0].cached_tokens == shared // 4 * 4
    assert llm.stats()["hit_unit"] == 4
    assert_cold(outputs[0], logits[0], two, 4)


def test_same_suffix_under_other_prefixes() -> None:
    llm = shared_llm(64, prefix=True)
    llm.prefix_cache.clear()
    suffix = prompt(8, seed=1)
    for seed in range(3):
        text = prompt(8, seed=100 + seed) + suffix
        outputs, logits = run(llm, [text])
        assert outputs[0].cached_tokens == 0
        assert_cold(outputs[0], logits[0], text, 4)


def test_a_prompt_sent_again_hits_up_to_its_last_page() -> None:
    llm = shared_llm(64, prefix=True)
    llm.prefix_cache.clear()
    for length, cached in ((16, 12), (17, 16), (19, 16)):
        text = prompt(length, seed=length)
        assert run(llm, [text])[0][0].cached_tokens == 0
        outputs, logits = run(llm, [text])
        assert outputs[0].cached_tokens == cached
        assert_cold(outputs[0], logits[0], text, 4)


# ------------------------------------------------------------------ abort


def test_abort_in_the_middle_of_a_group_leaves_nothing_behind() -> None:
    """Chunks of 7 leave the carry half full; test_scheduler.py does the same two hundred times without arithmetic."""
    llm = make_llm(max_num_seqs=1, max_num_batched_tokens=7, num_pages=16, max_model_len=60, enable_prefix_caching=True)
    long, short = prompt(30, seed=1), prompt(9, seed=2)
    wanted_long, wanted_short = cold(tuple(long), 2)[0], cold(tuple(short), 2)[0]
    for _ in range(4):
        llm.prefix_cache.clear()
        request = llm.add_request(long, greedy(2))
        llm.step()
        llm.step()
        output = llm.abort(request)
        assert output is not None
        assert output.finish_reason == "abort"
        assert_all_returned(llm)
        assert llm.generate([short], greedy(2))[0].token_ids == wanted_short
        again = llm.generate([long], greedy(2))[0]
        assert again.token_ids == wanted_long
        assert again.cached_tokens <= 14
        assert_all_returned(llm)


def test_a_step_touches_only_its_own_pages_and_slots() -> None:
    """Two requests are parked in slots 0 and 1, with an open group each; a third one runs in pages 8..15."""
    llm = make_llm(num_pages=24, max_model_len=64)
    llm.caches.poison(0x5A)
    for seed in range(2):
        llm.add_request(prompt(7, seed=seed), greedy(30))
    llm.step()
    live = ChunkRequest(np.array(prompt(30, seed=5)), 0, 30, 2, list(range(8, 16)), "last")
    caches, per_page = llm.caches, llm.caches.geometry.page_size
    before = [tensor.clone() for tensor in caches.tensors()]
    for start, end in ((0, 11), (11, 12), (12, 29), (29, 30)):
        chunk = dataclasses.replace(live, start=start, end=end)
        llm.model.forward(build_batch(llm.config, [chunk], caches.geometry, "cpu", llm.hasher))
    windows, *others = zip(before, caches.tensors())
    for slot in (0, 1, 3):
        ring = slice(slot * 8, slot * 8 + 8)
        assert torch.equal(windows[0][:, ring], windows[1][:, ring])
    for old, new in others:
        if old.dtype == torch.uint8:  # paged rows: only pages 8..15 change
            entries = per_page * 24 // len(old)
            own = slice(8 * per_page // entries, 16 * per_page // entries)
            assert not torch.equal(old[own], new[own])
            old, new = old.clone(), new.clone()
            old[own], new[own] = 0, 0
            assert torch.equal(old, new)
        else:  # tails: only slot 2
            assert torch.equal(old[[0, 1, 3]], new[[0, 1, 3]])


# ------------------------------------------------------------------ layer plan


def test_layer_plan_and_cache_counts() -> None:
    llm = make_llm()
    assert llm.config.compress_ratios == (0, 2, 2, 0, 1, 1, 1)
    assert set(llm.caches.compressed) == set(llm.caches.index_keys) == {1, 4}
    assert set(llm.caches.tail_kv) == {1}
    gates = {block.index: block.attn.compressor.wgate for block in llm.model.blocks if block.attn.compressor is not None}
    assert gates[1] is not None
    assert gates[4] is None  # ratio 1: nothing to weigh
    tokens = prompt(6, seed=3)
    outputs, logits = run(llm, [tokens], 4)  # positions 6, 7, 8: the first and third publish no ratio-2 group
    text = tokens + outputs[0].token_ids
    whole = llm.score([text])[0]
    assert torch.equal(logits[0], whole[5:9])
