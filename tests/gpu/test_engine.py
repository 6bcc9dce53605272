"""The engine on the GPU: scheduling, prefix cache and preemption must not change a request's tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mini_deepinfer import LLM, SamplingParams
from tests.golden import TINY_A, golden

pytestmark = pytest.mark.gpu

PREEMPTING_PAGES = 28  # the four prompts fit, their answers do not
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def engine(**options) -> LLM:
    defaults = {"page_size": 16, "num_pages": 64, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return LLM(str(TINY_A), device="cuda", **{"batch_invariant": True, **defaults, **options})


def prompts() -> list[list[int]]:
    return [[int(i) for i in golden()[f"L{length}.input_ids"]] for length in (7, 33, 100, 193)]


def tokens(outputs) -> list[list[int]]:
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


@pytest.fixture
def alone(cuda: torch.device) -> list[list[int]]:
    """Each prompt by itself, in one chunk."""
    llm = engine(max_num_batched_tokens=256, enable_prefix_caching=False)
    return [tokens(llm.generate([prompt], GREEDY))[0] for prompt in prompts()]


def test_together(alone):
    """Continuous batching with chunked prefill, in two orders."""
    llm = engine(enable_prefix_caching=False)
    assert tokens(llm.generate(prompts(), GREEDY)) == alone
    assert tokens(llm.generate(prompts()[::-1], GREEDY)) == alone[::-1]


def test_prefix_hits(alone):
    llm = engine()
    assert tokens(llm.generate(prompts(), GREEDY)) == alone
    again = llm.generate(prompts(), GREEDY)
    assert tokens(again) == alone
    assert [output.cached_tokens > 0 for output in again] == [False, True, True, True]


def test_preemption(cuda):
    """Too few pages for what all four grow to."""
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    roomy = engine(max_num_batched_tokens=256, enable_prefix_caching=False)
    want = [tokens(roomy.generate([prompt], long))[0] for prompt in prompts()]
    llm = engine(num_pages=PREEMPTING_PAGES, enable_prefix_caching=False)
    assert tokens(llm.generate(prompts(), long)) == want
    assert llm.stats()["preemptions"] > 0


def test_score_is_the_golden_model(cuda):
    logits = LLM(str(TINY_A), device="cuda", activation_quant=False, page_size=16, num_pages=32, max_model_len=256).score([prompts()[1]])[0]
    want = golden()["L33.f32.logits"].numpy()
    assert np.abs(logits.cpu().numpy() - want).mean() <= 2 * 0.053


def test_chunks_of_a_prompt_queue_up(cuda):
    """A step that chooses no token does not wait: the host plans the next chunk while the GPU works on this one."""
    llm = engine(max_num_batched_tokens=32)
    llm.generate(prompts()[:1], GREEDY)  # everything is loaded
    llm.add_request(prompts()[3], GREEDY)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(193 // 32):
            assert llm.step() == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert llm.scheduler.running[0].num_computed == 192


# ------------------------------------------------------------------ decode graphs


def logits_of(llm: LLM, prompts, params) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens per prompt, and the logits of every step in order."""
    seen: list[torch.Tensor] = []
    original = llm._next_tokens

    def spy(chunks, logits):
        seen.append(logits.clone())
        return original(chunks, logits)

    llm._next_tokens = spy  # type: ignore[method-assign]
    return tokens(llm.generate(prompts, params)), seen


@pytest.mark.parametrize("first_length", [16, 64, 2048])
def test_graphs_change_no_bit(cuda, monkeypatch, first_length):
    """Every logit of every step, over several shapes: requests end at different steps, contexts cross the lengths of the shapes."""
    monkeypatch.setattr("mini_deepinfer.decode_shapes.FIRST_LENGTH", first_length)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (20, 9, 14, 30)]
    plain, graphs = engine(cuda_graph=False), engine()
    assert plain.graphs is None and graphs.graphs is not None
    want, want_logits = logits_of(plain, prompts(), params)
    for _ in range(2):  # the second time nothing runs eagerly
        replays = graphs.graphs.num_replays
        got, logits = logits_of(graphs, prompts(), params)
        assert got == want
        assert len(logits) == len(want_logits) and all(torch.equal(a, b) for a, b in zip(logits, want_logits))
        assert graphs.graphs.num_replays > replays + 10
        graphs.prefix_cache.clear()  # or the second time starts from cached pages: other steps
    assert len({size for size, _ in graphs.graphs.shapes}) == 3


def test_replays_touch_nothing_else_and_never_wait(cuda):
    """3, 5, 6 and 7 live requests in captures of 4 and 8, two parked ones in the first and last page and slot."""
    from mini_deepinfer.batch import ChunkRequest, build_batch

    llm = engine(max_num_seqs=9, num_pages=64, max_model_len=112, enable_prefix_caching=False)
    caches, model, graphs = llm.caches, llm.model, llm.graphs
    caches.poison(0x3A)
    geometry = caches.geometry
    text = [golden()["L193.input_ids"].numpy()[shift : shift + 112].astype(np.int64) for shift in range(9)]
    parked = [ChunkRequest(text[7], 0, 3, 0, [0]), ChunkRequest(text[8], 0, 3, 8, [63])]
    pages = [list(range(1 + 8 * i, 8 + 8 * i)) for i in range(7)]
    for request in (*parked, *(ChunkRequest(text[i], 0, 20 + i, 1 + i, pages[i]) for i in range(7))):
        model.forward(build_batch(llm.config, [request], geometry, cuda, llm.hasher))
    position = [20 + i for i in range(7)]
    windows, *others = caches.tensors()
    state = [windows[:, : geometry.chunk_row], *(other if other.dtype == torch.uint8 else other[:-1] for other in others)]
    start = [tensor.clone() for tensor in state]
    plan = [live for live in (3, 5, 6, 7) for _ in range(12)]

    def steps(forward) -> list[torch.Tensor]:
        for tensor, old in zip(state, start):
            tensor.copy_(old)
        at, seen = list(position), []
        for live in plan:
            seen.append(forward([ChunkRequest(text[i], at[i], at[i] + 1, 1 + i, pages[i]) for i in range(live)]).clone())
            at = [place + (i < live) for i, place in enumerate(at)]
        return seen

    want = steps(lambda requests: model.forward(build_batch(llm.config, requests, geometry, cuda, llm.hasher)))
    after = [tensor.clone() for tensor in state]
    steps(graphs.forward)
    assert [size for size, _ in graphs.shapes] == [4, 8]
    replays = graphs.num_replays
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = steps(graphs.forward)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert graphs.num_replays == replays + len(plan)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    for tensor, plain in zip(state, after):
        assert torch.equal(tensor, plain)  # what the live requests wrote, and everybody else's bytes


def test_without_batch_invariance(cuda):
    """The library may choose another kernel for the padded rows: the same text within rounding, here the same first tokens."""
    plain, graphs = (LLM(str(TINY_A), device="cuda", page_size=16, num_pages=64, max_model_len=256, cuda_graph=on) for on in (False, True))
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    (want, want_logits), (got, logits) = logits_of(plain, prompts()[:3], short), logits_of(graphs, prompts()[:3], short)
    assert graphs.graphs.num_replays > 0
    assert [row[0] for row in got] == [row[0] for row in want]
    assert (logits[0] - want_logits[0]).abs().max() == 0  # the prefill step is eager in both


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_graphs_hold_no_more_than_the_plan_reserves(cuda, monkeypatch, batch_invariant):
    """Every number of rows and every length is captured; the allocator's part is measured, the driver keeps its launches elsewhere."""
    from mini_deepinfer.cache_plan import graph_bytes

    monkeypatch.setattr("mini_deepinfer.decode_shapes.FIRST_LENGTH", 64)
    llm = engine(max_num_seqs=8, num_pages=128, enable_prefix_caching=False, batch_invariant=batch_invariant)
    work = [prompts()[index] for index in (0, 0, 0, 0, 3, 3, 3, 3)]
    params = [SamplingParams(max_tokens=4 * (1 + index), ignore_eos=True) for index in range(8)]
    graphs, llm.graphs = llm.graphs, None
    llm.generate(work, params)  # what eager steps need is there
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    llm.graphs = graphs
    for count in range(1, 9):
        for first in (0, 4):
            llm.generate((work[first:] + work[:first])[:count], params[:count])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert not graphs.failed and {size for size, _ in graphs.shapes} == {1, 2, 4, 8} and len(graphs.lengths) == 2
    held = torch.cuda.memory_reserved() - before
    assert 0 < held <= graph_bytes(llm.config, llm.options, llm.max_model_len, 1)
