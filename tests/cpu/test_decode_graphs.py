"""Padded decode steps: the bits of the unpadded ones, and nothing of anybody else touched. Replays themselves: tests/gpu/test_engine.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mini_deepinfer import cli
from mini_deepinfer.batch import ChunkRequest, FixedBatch, build_batch, decode_arrays, engram_rows
from mini_deepinfer.config import EngineConfig, NumericProfile
from mini_deepinfer.decode_graphs import DecodeGraphs
from mini_deepinfer.decode_shapes import lengths_up_to, sizes_up_to, why_not
from mini_deepinfer.stages import StageTimer
from tests.cpu.tiny_engine import make_llm, prompt, run

SLOTS = 9  # 7 live requests and 2 parked ones


def padded(llm, **options) -> DecodeGraphs:
    return DecodeGraphs(llm.model, llm.hasher, max_seqs=8, max_len=llm.max_model_len, capture=False, **options)


def test_shapes():
    assert [sizes_up_to(n) for n in (1, 2, 3, 8, 12, 16)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12], [1, 2, 4, 8, 16]]
    assert lengths_up_to(100) == [100]
    assert lengths_up_to(2048) == [2048]
    assert lengths_up_to(131_072) == [2048, 8192, 32_768, 131_072]
    assert lengths_up_to(140_000) == [2048, 8192, 32_768, 131_072, 140_000]


@pytest.mark.parametrize("live", [1, 3, 5, 6, 7])
def test_padding_changes_nothing(live: int):
    """Live requests of several lengths, two parked ones in the first and the last page and in the first and last slot, both with
    an open group: 12 padded steps have the bits of 12 plain ones, and leave the parked ones' bytes alone."""
    llm = make_llm(num_pages=64, max_model_len=64, max_num_seqs=SLOTS)
    geometry, width = llm.caches.geometry, llm.caches.geometry.window
    llm.caches.poison(0x5A)
    parked = [ChunkRequest(np.array(prompt(3, seed=50)), 0, 3, 0, [0]), ChunkRequest(np.array(prompt(3, seed=51)), 0, 3, SLOTS - 1, [63])]
    texts = [np.array(prompt(24 + i, seed=i)) for i in range(live)]
    starts = [5 + i for i in range(live)]
    pages = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(live)]
    prefill = [ChunkRequest(text, 0, start, 1 + i, pages[i]) for i, (text, start) in enumerate(zip(texts, starts))]
    for request in (*parked, *prefill):
        llm.model.forward(build_batch(llm.config, [request], geometry, "cpu", llm.hasher))

    def step(index: int) -> list[ChunkRequest]:
        return [ChunkRequest(text, start + index, start + index + 1, 1 + i, pages[i]) for i, (text, start) in enumerate(zip(texts, starts))]

    def state() -> list[torch.Tensor]:
        windows, *others = llm.caches.tensors()
        return [windows[:, : geometry.chunk_row]] + [o if o.dtype == torch.uint8 else o[:-1] for o in others]

    before = [tensor.clone() for tensor in state()]
    graphs = padded(llm)
    got = [graphs.forward(step(index)).clone() for index in range(12)]
    after = [tensor.clone() for tensor in state()]
    for tensor, old in zip(state(), before):
        tensor.copy_(old)
    for index in range(12):
        want = llm.model.forward(build_batch(llm.config, step(index), geometry, "cpu", llm.hasher))
        assert torch.equal(got[index], want)
    for tensor, padded_one in zip(state(), after):
        assert torch.equal(tensor, padded_one)  # what the live requests wrote, and everybody else's bytes
    for slot in (0, SLOTS - 1):
        ring = slice(slot * width, (slot + 1) * width)
        assert torch.equal(before[0][:, ring], after[0][:, ring])
    for old, new in zip(before[1:], after[1:]):
        if old.dtype == torch.uint8:
            entries = len(old) // 64
            assert torch.equal(old[:entries], new[:entries])
            assert torch.equal(old[-entries:], new[-entries:])
        else:
            assert torch.equal(old[0], new[0])
            assert torch.equal(old[-1], new[-1])


def test_rows_without_a_token_get_no_expert():
    llm = make_llm(num_pages=16, max_model_len=32)
    graphs = padded(llm)
    text = np.array(prompt(12))
    llm.model.forward(build_batch(llm.config, [ChunkRequest(text, 0, 10, 0, [0, 1, 2])], llm.caches.geometry, "cpu", llm.hasher))
    requests = [ChunkRequest(text, 10, 11, 0, [0, 1, 2])]
    graphs.forward(requests)
    graphs.sizes = [4]
    graphs.forward(requests)
    seen = {}

    def trace(name: str, layer: int, tensor: torch.Tensor) -> None:
        if name == "router_ids":
            seen[layer] = tensor  # the tensor that the experts see, after the step

    llm.model.forward(graphs._shapes[4, 32].batch.batch, trace)
    assert len(seen) == llm.config.num_hidden_layers
    for ids in seen.values():
        assert bool((ids[0] >= 0).all()) and bool((ids[1:] == -1).all())


def test_engine_with_padded_steps():
    """The engine's tokens and logits are those without fixed shapes, whatever joins and leaves between the steps."""
    prompts = [prompt(length, seed=length) for length in (3, 9, 17, 30, 6)]
    want, want_logits = run(make_llm(max_num_seqs=4), prompts, 7)
    llm = make_llm(max_num_seqs=4)
    llm.graphs = padded(llm)
    got, logits = run(llm, prompts, 7)
    assert [output.token_ids for output in got] == [output.token_ids for output in want]
    assert all(torch.equal(a, b) for a, b in zip(logits, want_logits))
    assert len(llm.graphs.shapes) >= 2


def test_what_fits(monkeypatch):
    llm = make_llm(num_pages=64, max_model_len=64)
    graphs = padded(llm)
    one = ChunkRequest(np.array(prompt(64)), 5, 6, 0, list(range(16)))
    assert graphs.sizes == [1, 2, 4, 8] and graphs.lengths == [64]
    assert graphs.fits([one]) and graphs.fits([one] * 8)
    assert not graphs.fits([]) and not graphs.fits([one] * 9)
    for change in ({"end": 7}, {"want_logits": "all"}, {"want_logits": "none"}, {"start": 64, "end": 65}):
        assert not graphs.fits([one, dataclasses.replace(one, **change)])
    with StageTimer("cpu").step():
        assert not graphs.fits([one])


def test_a_capture_that_fails_costs_nothing_but_the_graphs(monkeypatch, caplog):
    prompts = [prompt(length, seed=length) for length in (5, 9)]
    want, want_logits = run(make_llm(), prompts, 5)
    llm = make_llm()
    graphs = llm.graphs = padded(llm)
    graphs.capture = True

    class Fails:
        def __init__(self, *args, **kwargs) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Fails)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    got, logits = run(llm, prompts, 5)
    assert [output.token_ids for output in got] == [output.token_ids for output in want]
    assert all(torch.equal(a, b) for a, b in zip(logits, want_logits))
    assert graphs.failed and len(graphs.shapes) == 1 and graphs.num_replays == 0
    assert caplog.text.count("capturing 2 requests up to") == 1


def test_a_step_that_fails_is_captured_when_it_runs(monkeypatch):
    """Out of memory in the first step of a shape must not leave the shape without graphs for good."""
    llm = make_llm(num_pages=16, max_model_len=32)
    graphs = padded(llm)
    graphs.capture = True
    forward, captured = llm.model.forward, []

    def fails(batch):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graphs, "_capture", lambda shape, name: captured.append(name))
    requests = [ChunkRequest(np.array(prompt(12)), 10, 11, 0, [0, 1, 2])]
    monkeypatch.setattr(llm.model, "forward", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.forward(requests)
    assert captured == []
    monkeypatch.setattr(llm.model, "forward", forward)
    graphs.forward(requests)
    assert captured == ["1 requests up to 32 tokens"]
    graphs.failed = True
    graphs.forward(requests)
    assert len(captured) == 1


def test_a_step_is_cut_where_engram_rows_are_used(monkeypatch):
    """One graph per piece; a replay fills the rows of a layer before the piece that uses them, and after the one before."""
    events: list[str] = []
    llm = make_llm(num_pages=16, max_model_len=32)
    graphs = padded(llm)
    graphs.capture = True

    class Graph:
        def replay(self) -> None:
            events.append(f"replay {graphs._shapes[2, 32].graphs.index(self)}")

    class Capture:
        open = 0

        def __init__(self, graph, pool, capture_error_mode) -> None:
            assert isinstance(graph, Graph)

        def __enter__(self) -> None:
            assert Capture.open == 0, "captures never overlap"
            Capture.open += 1

        def __exit__(self, *error) -> None:
            Capture.open -= 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    text = np.array(prompt(12))
    requests = [ChunkRequest(text, 10, 11, slot, list(range(3 * slot, 3 * slot + 3))) for slot in range(2)]
    graphs.forward(requests)
    shape = graphs._shapes[2, 32]
    assert Capture.open == 0 and len(shape.rows) >= 1 and len(shape.graphs) == 1 + len(shape.rows)
    assert all(rows.before_use is None for rows in shape.rows)
    for index, rows in enumerate(shape.rows):
        monkeypatch.setattr(rows, "fill", lambda ids, i=index: events.append(f"fill {i} {list(ids.shape)}"))
    assert graphs.forward(requests).shape == (2, llm.config.vocab_size)
    per_token = (llm.config.engram_max_ngram_size - 1) * llm.config.engram_n_heads
    assert events == ["replay 0"] + [e for i in range(len(shape.rows)) for e in (f"fill {i} {[2, per_token]}", f"replay {i + 1}")]
    assert graphs.num_replays == 1


def test_the_largest_counts_of_a_shape():
    """Widths that are fixed for a shape are those of its longest request."""
    llm = make_llm(num_pages=64, max_model_len=64)
    graphs = padded(llm)
    shape = graphs._make(4, 50)
    assert shape.batch.batch.max_visible == {1: 50, 2: 25}
    assert shape.batch.batch.page_table.shape == (4, 13)
    arrays = decode_arrays([], llm.caches.geometry, 4, 13)
    assert (arrays["rows.2"] == -1).all() and (arrays["window_rows"] == -1).all() and arrays["padding"].all()
    assert (arrays["tail_dst.2"] == llm.caches.geometry.scratch_tail(2)).all() and arrays["tail_dst.1"].size == 0


@pytest.mark.parametrize(
    "device, profile, processes, env, reason",
    [
        ("cpu", {}, 1, {}, "they need a GPU"),
        ("cuda", {"compute_dtype": torch.float32}, 1, {}, "reference operations"),
        ("cuda", {"activation_quant": False}, 1, {}, "reference operations"),
        ("cuda", {}, 4, {}, "4 expert-parallel ranks"),
        ("cuda", {}, 1, {"MDI_OPS": "indexer.topk=reference"}, "MDI_OPS asks for reference"),
        ("cuda", {}, 1, {"MDI_OPS": "reference"}, "MDI_OPS asks for reference"),
        ("cuda", {}, 1, {"MDI_SYNC": "1"}, "MDI_SYNC=1"),
        ("cuda", {}, 1, {"MDI_OPS": "attention.sparse=portable"}, None),
    ],
)
def test_why_not(device, profile, processes, env, reason, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    got = why_not(torch.device(device), NumericProfile(**({"compute_dtype": torch.bfloat16} | profile)), processes)
    assert got is None if reason is None else reason in got


def test_off_on_a_cpu(caplog):
    with caplog.at_level("INFO"):
        assert make_llm().graphs is None
    assert "without CUDA graphs: they need a GPU" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        assert make_llm(cuda_graph=False).graphs is None
    assert "CUDA graphs" not in caplog.text


@pytest.mark.parametrize("seed", range(5))
def test_engram_rows_of_all_requests_at_once(seed: int):
    """Joined texts hash as each request by itself, also where the history begins before the text or holds image tokens."""
    llm = make_llm()
    rng = np.random.default_rng(seed)
    requests = []
    for slot in range(6):
        text = np.array(prompt(40, seed=10 * seed + slot))
        if llm.config.image_token_id is not None:
            text[rng.integers(0, 40, 4)] = llm.config.image_token_id
        start = int(rng.integers(0, 6))
        requests.append(ChunkRequest(text, start, start + int(rng.integers(1, 5)), slot, list(range(12))))
    rows = engram_rows(llm.config, requests, llm.hasher)
    want = torch.cat([llm.hasher.row_ids(r.token_ids, r.start, r.end) for r in requests])
    assert len(rows) == len(llm.config.engram_layer_ids)
    for layer, got in enumerate(rows):
        assert torch.equal(got, want[:, layer])
    assert all(part.shape == (0, want.shape[2]) for part in engram_rows(llm.config, [], llm.hasher))


@pytest.mark.parametrize(
    "flags, on", [([], True), (["--no_cuda_graph"], False), (["--no-cuda-graph"], False), (["--cuda-graph", "off"], False)]
)
def test_the_flag(flags, on):
    arguments = cli.build_parser().parse_args(cli._on_off(["generate", "--model", "m", "--input", "i", "--output", "o", *flags]))
    assert EngineConfig.from_args(arguments).cuda_graph is on


def test_prepared_indices_are_those_of_the_step():
    """Whatever comes after a step: the same requests one token on, fewer, others, other pages, the end of a page or of the shape."""
    geometry = make_llm(num_pages=64, max_model_len=64).caches.geometry
    texts = [np.array(prompt(40, seed=seed)) for seed in range(4)]
    device = torch.device("cpu")

    def request(slot: int, start: int, first_page: int | None = None, num_pages: int | None = None) -> ChunkRequest:
        first = 10 * slot if first_page is None else first_page
        return ChunkRequest(texts[slot], start, start + 1, slot, list(range(first, first + (num_pages or geometry.pages_for(start + 1)))))

    steps = [[request(0, start), request(1, start + 3)] for start in range(2, 9)]  # page 4: both meet page ends
    steps += [[request(0, 9)], [request(0, 10), request(2, 5)], [request(2, 6), request(0, 11)]]
    steps += [[request(2, 7, first_page=40), request(0, 12)]]
    steps += [[request(0, start, num_pages=8), request(3, start, num_pages=8)] for start in range(26, 32)]
    ahead = FixedBatch(geometry, 4, 32, device, ())
    for step in steps:
        ahead.fill(step)
        plain = FixedBatch(geometry, 4, 32, device, ())
        plain.fill(step)
        assert torch.equal(ahead._buffer, plain._buffer)
        ahead.prepare(step)
    assert ahead.num_prepared == 3 + 5  # not the first of each run, and not where a request had no page for its next token
    assert plain.num_prepared == 0
