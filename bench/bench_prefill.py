#!/usr/bin/env python3
"""Measure complete prefill steps: milliseconds per step, input tokens per second and GPU, stage table, peak memory.

    torchrun --nproc-per-node 4 bench/bench_prefill.py --model DIR --prefill_batch_size 4096 --no_cuda_graph \\
        --result_jsonl results.jsonl
    python bench/bench_prefill.py --load-format dummy --ep-loopback 4        # the per-rank work of 4 GPUs on one

One request per rank has --context-len tokens, of which --cached-len are in the caches before the clock starts. Every step
computes the next --prefill_batch_size tokens through all layers and samples one token; afterwards the state is rolled
back, so that each step is the same work. Ten steps are measured after warm-up (the first sample is dropped), then two
more under the stage timers. A step of several ranks takes as long as its slowest rank. Cached tokens, loading and filling
the caches never count.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from bench.exchange import describe_exchange, exchange_times, serial_steps
from bench.result import append_row, base_row
from bench.timing import summarise
from bench.workload import Workload, fill_randomly, read_workload, single_request
from mini_deepinfer.batch import ChunkRequest, PrefillBatch, build_batch
from mini_deepinfer.config import ModelConfig, NumericProfile, check_environment
from mini_deepinfer.engram import EngramHasher, synthetic_token_map, token_map_from_folder
from mini_deepinfer.kv_cache import CacheGeometry, Caches, cache_bytes
from mini_deepinfer.model import Model
from mini_deepinfer.parallel import ExpertParallel, Loopback, local_device, make_parallel
from mini_deepinfer.report import build_line, memory_table, progress, show, stage_table
from mini_deepinfer.stages import StageTimer, stage
from mini_deepinfer.weights import dummy_weights, load_weights

NUM_STAGE_STEPS = 2


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="checkpoint folder; with --load-format dummy only its config.json is read (default: released)")
    add("--load-format", choices=["auto", "dummy"], default="auto")
    add("--prefill_batch_size", "--prefill-batch-size", type=int, default=4096, help="new tokens of a rank per step")
    add("--context-len", type=int, default=131_072, help="tokens of the request")
    add("--cached-len", type=int, help="tokens cached before the step (default: all but the new ones)")
    add("--cached-fill", choices=["auto", "prefill", "random"], default="auto",
        help="cached part: computed by the model, or random rows (auto: random with dummy weights)")  # fmt: skip
    add("--workload", type=Path, help="JSON file that fixes the requests, instead of the three lengths")
    add("--num-steps", type=int, default=10)
    add("--num-warmup", type=int, default=2)
    add("--profile", nargs="?", const="profile", type=Path, metavar="DIR", help="write torch profiler traces there")
    add("--ep-loopback", type=int, default=1, help="act as rank 0 of this many ranks in one process")
    add("--num-experts", type=int, help="with dummy weights: routed experts instead of the model's (what a small group can hold)")
    add("--no_cuda_graph", "--no-cuda-graph", action="store_true", help="run eagerly (the only mode there is)")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--activation-quant", action=argparse.BooleanOptionalAction, default=True)
    add("--wo-a", choices=["bf16", "fp8"], default="bf16")
    add("--page-size", type=int, default=256)
    add("--seed", type=int, default=0)
    add("--run-name", default="")
    add("--result_jsonl", "--result-jsonl", "--result-filename", dest="result_jsonl", type=Path, help="append the row")
    args = parser.parse_args(argv)
    if args.model is None and args.load_format == "auto":
        parser.error("--model DIR is needed unless --load-format dummy")
    if args.num_experts is not None and args.load_format != "dummy":
        parser.error("--num-experts needs --load-format dummy")
    if args.num_steps < 1 or args.num_warmup < 0:
        parser.error("--num-steps must be >= 1 and --num-warmup >= 0")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.cached_fill == "auto":
        args.cached_fill = "random" if args.load_format == "dummy" else "prefill"
    return args


def read_config(args: argparse.Namespace) -> ModelConfig:
    """The model of this run."""
    config = ModelConfig.from_folder(args.model) if args.model else ModelConfig.released()
    return dataclasses.replace(config, n_routed_experts=args.num_experts) if args.num_experts else config


@dataclass
class SavedState:
    """What a step changes besides rows that the next step overwrites: the window rings and the compressor tails."""

    rings: list[torch.Tensor]
    tails: list[torch.Tensor]


class PrefillJob:
    """Model, caches and requests of this rank; knows how to run the same step again and again."""

    def __init__(self, args: argparse.Namespace, workload: Workload, device: torch.device, parallel: ExpertParallel):
        self.device, self.parallel, self.workload = device, parallel, workload
        self.config = read_config(args)
        self.chunk = args.prefill_batch_size
        if workload.new_tokens > self.chunk:
            raise ValueError(f"workload {workload.name}: {workload.new_tokens} new tokens exceed --prefill_batch_size {self.chunk}")
        longest = max(request.context_len for request in workload.requests)
        if longest > self.config.max_position_embeddings:
            raise ValueError(
                f"workload {workload.name}: {longest} tokens exceed the model's limit of {self.config.max_position_embeddings}"
            )
        num_pages = sum(-(-request.end // args.page_size) for request in workload.requests)
        sizes: dict[str, int] = {"num_pages": num_pages, "page_size": args.page_size, "num_slots": len(workload.requests)}
        self.cache_bytes = cache_bytes(self.config, CacheGeometry.of(self.config, max_tokens=self.chunk, **sizes))
        start = time.perf_counter()
        rank, world = parallel.rank, parallel.world
        if args.load_format == "dummy":
            weights = dummy_weights(self.config, rank=rank, world=world, device=device, seed=args.seed)
            token_map = synthetic_token_map(self.config)
        else:
            weights = load_weights(args.model, self.config, rank=rank, world=world, device=device)
            token_map = token_map_from_folder(args.model, self.config)
        self.weight_bytes = weights.num_bytes
        self.caches = Caches(self.config, max_tokens=self.chunk, device=device, **sizes)
        self.hasher = EngramHasher(self.config, token_map) if self.config.engram_layer_ids else None
        profile = NumericProfile(getattr(torch, args.dtype), args.activation_quant, args.wo_a)
        self.model = Model(self.config, profile, weights, self.caches, parallel, device, max_model_len=longest)
        self.load_s = time.perf_counter() - start
        allowed = np.flatnonzero(np.asarray(token_map) >= 0)
        allowed = allowed[allowed != (-1 if self.config.image_token_id is None else self.config.image_token_id)]
        self.token_ids = [workload.token_ids(i, parallel.rank, allowed) for i in range(len(workload.requests))]
        self._next: PrefillBatch | None = None
        self.pages: list[list[int]] = []
        for request in workload.requests:
            first = sum(len(pages) for pages in self.pages)
            self.pages.append(list(range(first, first + self.caches.geometry.pages_for(request.end))))

    def _build(self, spans: list[tuple[int, int, int]], want: Any) -> PrefillBatch:
        """Tokens start..end-1 of request index, for every (index, start, end)."""
        with stage("schedule"):
            chunks = [ChunkRequest(self.token_ids[i], start, end, i, self.pages[i], want) for i, start, end in spans]
            return build_batch(self.config, chunks, self.caches.geometry, self.device, self.hasher)

    def fill(self, how: str) -> float:
        """Put the cached part into the caches; returns the seconds it took."""
        start = time.perf_counter()
        if how == "random":
            fill_randomly(self.caches, seed=self.parallel.rank)
        else:
            todo = sum(request.cached_len for request in self.workload.requests)
            with progress(todo, desc="cached part", unit="tok", disable=self.parallel.rank != 0) as bar:
                for i, request in enumerate(self.workload.requests):
                    for first in range(0, request.cached_len, self.chunk):
                        last = min(first + self.chunk, request.cached_len)
                        self.model.forward(self._build([(i, first, last)], "none"))
                        bar.update(last - first)
        self._synchronise()
        return time.perf_counter() - start

    def save(self) -> SavedState:
        """The state at the cached length."""
        rings = [window[: self.caches.geometry.chunk_row].clone() for window in self.caches.window]
        return SavedState(rings, [tail.clone() for tail in self._tails()])

    def restore(self, state: SavedState) -> None:
        """Roll back to the cached length."""
        for window, ring in zip(self.caches.window, state.rings):
            window[: ring.shape[0]].copy_(ring)
        for tail, saved in zip(self._tails(), state.tails):
            tail.copy_(saved)

    def _tails(self) -> Iterator[torch.Tensor]:
        yield from self.caches.tail_kv.values()
        yield from self.caches.tail_score.values()

    def step(self) -> torch.Tensor:
        """One complete step: forward, schedule, sample. Returns the sampled ids on the host, int64 [requests].

        The chunks of a prefill do not depend on what is sampled, so the next batch is built while the device works on this one: every
        step builds one batch and runs one.
        """
        spans = [(i, request.cached_len, request.end) for i, request in enumerate(self.workload.requests)]
        if self._next is None:
            self._next = self._build(spans, "last")
        logits = self.model.forward(self._next)
        self._next = self._build(spans, "last")
        with stage("sample"):
            if not bool(torch.isfinite(logits).all()):
                raise RuntimeError("bench_prefill: the step produced logits that are not finite")
            return logits.argmax(dim=-1).cpu()

    def timed_step(self, state: SavedState) -> tuple[float, torch.Tensor]:
        """(milliseconds, sampled ids) of one step, all ranks starting together."""
        self.restore(state)
        self._synchronise()
        self.parallel.barrier()
        start = time.perf_counter()
        ids = self.step()
        self._synchronise()
        return 1e3 * (time.perf_counter() - start), ids

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def profiled(folder: Path | None, job: PrefillJob) -> Iterator[None]:
    """The torch profiler around a block; writes one trace for this rank."""
    if folder is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if job.device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    request = job.workload.requests[0]
    name = f"prefill-ctx{request.context_len}-new{job.workload.new_tokens}-rank{job.parallel.rank}.json.gz"
    profiler.export_chrome_trace(str(folder / name))


def peak_gib(device: torch.device) -> float:
    """Peak of the device's allocator since its last reset; on the CPU the peak of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def describe(parallel: ExpertParallel) -> str:
    """How the ranks of the row came about."""
    if isinstance(parallel, Loopback):
        return f"loopback EP{parallel.world}: work of rank 0, other ranks are stand-ins, links not measured"
    return f"EP{parallel.world}/DP{parallel.world}"


def measure(args: argparse.Namespace, device: torch.device, parallel: ExpertParallel) -> dict[str, Any]:
    """Run the whole measurement; the same row on every rank."""
    chunk = args.prefill_batch_size
    workload = read_workload(args.workload) if args.workload else single_request(args.context_len, args.cached_len, chunk, args.seed)
    first = parallel.rank == 0
    job = PrefillJob(args, workload, device, parallel)
    if first:
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        show(memory_table({"weights": job.weight_bytes, **job.cache_bytes}, total_bytes=total))
        show(f"loaded in {job.load_s:.1f} s; {describe(parallel)}; cached part: {args.cached_fill}")
    fill_s = job.fill(args.cached_fill)
    state = job.save()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    samples: list[float] = []
    ids = torch.empty(0)
    count = args.num_warmup + 1 + args.num_steps  # the first sample of the window is dropped
    with progress(count, desc="steps", unit="step", disable=not first) as bar:
        for _ in range(count):
            ms, ids = job.timed_step(state)
            samples.append(ms)
            bar.update()
    peak = peak_gib(device)
    serial_ms = serial_steps(parallel, lambda: job.timed_step(state)[0])
    timer = StageTimer(device, annotate=args.profile is not None)
    received_before = parallel.received_bytes.copy()
    with profiled(args.profile, job) if args.profile else nullcontext():
        for _ in range(NUM_STAGE_STEPS):
            job.restore(state)
            parallel.barrier()
            with timer.step():
                staged_ids = job.step()
            if not torch.equal(staged_ids, ids):
                raise RuntimeError(f"bench_prefill: the same step sampled {staged_ids.tolist()} after {ids.tolist()}")
    received = {name: (n - received_before[name]) / NUM_STAGE_STEPS for name, n in parallel.received_bytes.items()}
    exchange = exchange_times(timer.stages_ms(), timer.beside_ms(), received)
    own = {"step_ms": samples[-args.num_steps :], "stages_ms": timer.stages_ms(), "peak_gib": peak}
    own |= {"exchange": exchange, "serial_ms": serial_ms}
    ranks = parallel.all_gather_object(own)
    if isinstance(parallel, Loopback):
        ranks = ranks[:1]
    step_ms = [max(times) for times in zip(*(rank["step_ms"] for rank in ranks))]
    latency = summarise(step_ms)
    if first:
        show(stage_table(timer.stages_ms(), timer.steps[-1].calls, timer.beside_ms()))
        show(describe_exchange(ranks))
    row = base_row(device, run_name=args.run_name)
    row.update(
        stage="prefill",
        params={
            "workload": workload.as_dict(),
            "page_size": args.page_size,
            "activation_quant": args.activation_quant,
            "wo_a": args.wo_a,
            "cached_fill": args.cached_fill,
            "ops": os.environ.get("MDI_OPS", ""),
            "cuda_graph": False,
        },
        dtype=args.dtype,
        iters=latency.iters,
        latency_ms=latency.as_dict(),
        checked=False,
        model=(Path(args.model).name if args.model else "released") + (f", {args.num_experts} experts" if args.num_experts else ""),
        load_format=args.load_format,
        parallel=describe(parallel),
        ep_size=parallel.world,
        loopback=isinstance(parallel, Loopback),
        input_len=max(request.context_len for request in workload.requests),
        cached_len=max(request.cached_len for request in workload.requests),
        batch_size=len(workload.requests),
        chunk=workload.new_tokens,
        prefill_tok_per_s=1e3 * workload.new_tokens / latency.median,
        stages_ms=ranks[0]["stages_ms"],
        rank_step_ms=[statistics.median(rank["step_ms"]) for rank in ranks],
        rank_stages_ms=[rank["stages_ms"] for rank in ranks],
        rank_exchange=[rank["exchange"] for rank in ranks],
        rank_peak_gib=[rank["peak_gib"] for rank in ranks],
        serial_step_ms=[max(times) for times in zip(*(rank["serial_ms"] for rank in ranks))],
        step_ms=step_ms,
        load_s=job.load_s,
        fill_s=fill_s,
        peak_gib=max(rank["peak_gib"] for rank in ranks),
    )
    parallel.barrier()  # nobody failed: only now is there a result
    return row


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_environment()
    device = local_device(args.device)
    with make_parallel(device, ep_loopback=args.ep_loopback, num_experts=read_config(args).n_routed_experts) as parallel:
        if parallel.rank == 0:
            show(build_line(device))
        row = measure(args, device, parallel)
        if parallel.rank == 0:
            if args.result_jsonl:
                append_row(args.result_jsonl, row)
            latency = row["latency_ms"]
            print(
                f"{latency['median']:.3f} ms/step (p10 {latency['p10']:.3f}, p90 {latency['p90']:.3f}), "
                f"{row['prefill_tok_per_s']:.1f} input tok/s/GPU, peak {row['peak_gib']:.2f} GiB, {row['parallel']}, "
                f"load_format {row['load_format']}, {row['gpu']}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
