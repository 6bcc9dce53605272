#!/usr/bin/env python3
"""Measure decoding: completed output tokens per second of the engine, and the time of single decode steps at a context length.

    python bench/bench_decode.py --model DIR --batch-size 1 4 16 --prompt-len 512 --output-len 64 256 --result_jsonl decode.jsonl
    python bench/bench_decode.py --load-format dummy --ep-loopback 4 --batch-size 1 4 16 --context-len 32768

--output-len: the engine answers --batch-size prompts of --prompt-len random tokens with that many tokens each. Goodput is the
tokens of the answers that were completed, per second from the first prompt's arrival to the last answer, prefill included.
--context-len: steps of one token per request behind so many cached tokens, which are random rows; indices, forward pass and the
chosen tokens' way to the host are in the time of a step.
On a GPU everything runs with and without CUDA graphs, in turns over the same weights (--no_cuda_graph: only without). The first
run of every pair is dropped: it captures the graphs. With --batch-invariant both must give the same tokens. One process only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from bench.options import add_run_options, parse_run_options
from bench.result import append_row, base_row, result_line
from bench.timing import summarise
from bench.workload import fill_randomly
from mini_deepinfer.batch import ChunkRequest, build_batch
from mini_deepinfer.config import check_environment
from mini_deepinfer.engine import LLM
from mini_deepinfer.env_variables import read_env
from mini_deepinfer.sampler import SamplingParams
from mini_deepinfer.stages import stage


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser)
    add = parser.add_argument
    add("--batch-size", type=int, nargs="+", default=[1, 4, 16], help="requests at once")
    add("--prompt-len", type=int, default=512, help="tokens of a prompt, with --output-len")
    add("--output-len", type=int, nargs="+", default=[], help="tokens of every answer")
    add("--context-len", type=int, nargs="+", default=[], help="cached tokens of single steps")
    add("--num-steps", type=int, default=20, help="single steps that are measured")
    add("--num-repeats", type=int, default=2, help="times that a batch of prompts is answered and measured")
    add("--no_cuda_graph", "--no-cuda-graph", action="store_true", help="measure without CUDA graphs only")
    add("--batch-invariant", action="store_true", help="library GEMMs of a fixed row count: the same tokens with and without graphs")
    add("--max-num-batched-tokens", type=int, default=4096, help="tokens in one prefill step")
    args = parse_run_options(parser, argv)
    if not args.output_len and not args.context_len:
        args.output_len = [128]
    sizes = [*args.batch_size, *args.output_len, *args.context_len, args.prompt_len, args.num_steps, args.num_repeats]
    if min(sizes) < 1:
        parser.error("batch sizes, lengths and counts must be at least 1")
    if (read_env("WORLD_SIZE") or 1) > 1:  # every rank would write rows of its own share, named as the whole
        parser.error(f"decoding is measured in one process, but WORLD_SIZE={read_env('WORLD_SIZE')}; --ep-loopback does a rank's work")
    return args


def open_engine(args: argparse.Namespace) -> LLM:
    """An engine with pages for the largest batch at its longest."""
    longest = max([args.prompt_len + new for new in args.output_len] + [cached + args.num_steps + 2 for cached in args.context_len])
    most = max(args.batch_size)
    return LLM(
        args.model or "", load_format=args.load_format, device=args.device, dtype=args.dtype, page_size=args.page_size,
        num_pages=most * -(-longest // args.page_size), max_model_len=longest, max_num_seqs=most, ep_loopback=args.ep_loopback,
        max_num_batched_tokens=max(args.max_num_batched_tokens, most), enable_prefix_caching=False, seed=args.seed,
        batch_invariant=args.batch_invariant, cuda_graph=not args.no_cuda_graph,
    )  # fmt: skip


def random_text(llm: LLM, length: int, seed: int) -> np.ndarray:
    """int64 [length] of ids that a prompt may hold."""
    known = np.ones(llm.config.vocab_size, dtype=bool) if llm._known_ids is None else llm._known_ids.copy()
    if llm.config.image_token_id is not None and llm.config.image_token_id < len(known):
        known[llm.config.image_token_id] = False
    return np.random.default_rng([seed, length]).choice(np.flatnonzero(known), length).astype(np.int64)


class InTurns:
    """Runs the same thing with and without the engine's graphs, in turns; the first run of each is dropped."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.graphs = llm, llm.graphs
        self.modes = [True, False] if llm.graphs is not None else [False]

    def __call__(self, run: Callable[[], tuple[list[float], Any]], repeats: int) -> dict[bool, tuple[list[float], Any]]:
        """run() gives samples and an answer. Per mode: all samples, the last answer. RuntimeError if a capture failed."""
        samples: dict[bool, list[float]] = {mode: [] for mode in self.modes}
        answers: dict[bool, Any] = {}
        for repeat in range(1 + repeats):
            for mode in self.modes:
                self.llm.graphs = self.graphs if mode else None
                times, answers[mode] = run()
                if mode and self.graphs is not None and self.graphs.failed:
                    raise RuntimeError("bench_decode: capturing failed, see the warning above; --no_cuda_graph measures eager steps")
                if repeat:
                    samples[mode] += times
        self.llm.graphs = self.graphs
        return {mode: (samples[mode], answers[mode]) for mode in self.modes}


def answer_prompts(llm: LLM, args: argparse.Namespace, batch_size: int, new_tokens: int) -> tuple[list[float], list[list[int]]]:
    """Milliseconds for all answers together, and the answers. Raises RuntimeError if one is not completed."""
    prompts = [random_text(llm, args.prompt_len, args.seed + index).tolist() for index in range(batch_size)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    ms = 1e3 * (time.perf_counter() - start)
    for output in outputs:
        if output.finish_reason != "length" or len(output.token_ids) != new_tokens:
            raise RuntimeError(f"bench_decode: an answer ended early: {output.finish_reason}, {output.error}")
    return [ms], [output.token_ids for output in outputs]


def single_steps(llm: LLM, args: argparse.Namespace, batch_size: int, cached: int) -> tuple[list[float], list[list[int]]]:
    """Milliseconds of every step but the first, and the chosen tokens. All runs start from the same random rows."""
    fill_randomly(llm.caches, seed=args.seed)
    per_request = llm.caches.geometry.pages_for(cached + args.num_steps + 2)
    texts = [random_text(llm, cached + args.num_steps + 2, args.seed + index) for index in range(batch_size)]
    pages = [list(range(index * per_request, (index + 1) * per_request)) for index in range(batch_size)]
    samples, chosen = [], []
    for step in range(1 + args.num_steps):
        if llm.caches.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        requests = [ChunkRequest(text, cached + step, cached + step + 1, slot, pages[slot]) for slot, text in enumerate(texts)]
        if llm.graphs is not None:
            logits = llm.graphs.forward(requests)
        else:
            with stage("schedule"):
                batch = build_batch(llm.config, requests, llm.caches.geometry, llm.caches.device, llm.hasher)
            logits = llm.model.forward(batch)
        chosen.append(logits.argmax(dim=-1).tolist())
        samples.append(1e3 * (time.perf_counter() - start))
    return samples[1:], chosen


def result_row(args: argparse.Namespace, llm: LLM, kind: str, cuda_graph: bool, batch_size: int, samples: list[float]) -> dict[str, Any]:
    latency = summarise(samples)
    device = llm.caches.device
    row = base_row(device, run_name=args.run_name)
    loopback = args.ep_loopback > 1
    row.update(
        stage="decode",
        params={
            "kind": kind,
            "cuda_graph": cuda_graph,
            "batch_invariant": args.batch_invariant,
            "page_size": args.page_size,
            "max_num_batched_tokens": llm.options.max_num_batched_tokens,
            "seed": args.seed,
        },
        dtype=args.dtype,
        iters=latency.iters,
        latency_ms=latency.as_dict(),
        checked=False,
        model=Path(args.model).name if args.model else "released",
        load_format=args.load_format,
        ep_size=args.ep_loopback,
        loopback=loopback,
        parallel=f"loopback EP{args.ep_loopback}: work of rank 0, other ranks are stand-ins" if loopback else "EP1/DP1",
        batch_size=batch_size,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    )
    return row


def measure(args: argparse.Namespace, llm: LLM) -> list[dict[str, Any]]:
    """All rows, printed and appended to the file as they come."""
    rows = []
    in_turns = InTurns(llm)

    def add(results: dict[bool, tuple[list[float], Any]], kind: str, batch_size: int, tokens: int, **fields: Any) -> None:
        answers = [answer for _, answer in results.values()]
        same = all(answer == answers[0] for answer in answers) if len(answers) > 1 else None  # None: nothing to compare with
        if args.batch_invariant and same is False:
            raise RuntimeError(f"bench_decode: {kind}, {batch_size} requests: other tokens with graphs than without")
        for cuda_graph, (samples, _) in results.items():
            row = result_row(args, llm, kind, cuda_graph, batch_size, samples) | fields
            row["output_tok_per_s"] = 1e3 * tokens / row["latency_ms"]["median"]
            row["same_tokens"] = same
            if cuda_graph:
                plain = summarise(results[False][0])
                row["baseline"] = {"name": "no CUDA graph", "latency_ms": plain.median}
            if args.result_jsonl:
                append_row(args.result_jsonl, row)
            rows.append(row)
            what = f"{row['input_len']} cached" if kind == "steps" else f"{row['input_len']} + {row['output_len']} tokens"
            what = f"{kind}: {batch_size} x {what}, {'graph' if cuda_graph else 'eager'}"
            print(result_line(row, what, "ms", f"{row['output_tok_per_s']:.1f} output tok/s"), flush=True)

    for batch_size in args.batch_size:
        for new_tokens in args.output_len:
            results = in_turns(lambda b=batch_size, n=new_tokens: answer_prompts(llm, args, b, n), args.num_repeats)  # type: ignore[misc]
            add(results, "answers", batch_size, batch_size * new_tokens, input_len=args.prompt_len, output_len=new_tokens)
        for cached in args.context_len:
            results = in_turns(lambda b=batch_size, c=cached: single_steps(llm, args, b, c), 1)  # type: ignore[misc]
            add(results, "steps", batch_size, batch_size, input_len=cached, output_len=1)
    return rows


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_environment()
    llm = open_engine(args)
    with llm.parallel:
        measure(args, llm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
