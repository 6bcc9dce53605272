#!/usr/bin/env python3
"""Measure complete prefill steps: milliseconds per step, input tokens per second and GPU, stage table, peak memory.

    torchrun --nproc-per-node 4 bench/bench_prefill.py --model DIR --prefill_batch_size 4096 --no_cuda_graph \\
        --result_jsonl results.jsonl
    python bench/bench_prefill.py --load-format dummy --ep-loopback 4        # the per-rank work of 4 GPUs on one
    python bench/bench_prefill.py --load-format dummy --ep-loopback 4 --suite contexts --workload 8x512@0 \\
        --ablate attention.sparse=portable --ablate moe.grouped_gemm=portable,moe.swiglu_quant=reference

One request per rank has --context-len tokens, of which --cached-len are in the caches before the clock starts. Every step
computes the next --prefill_batch_size tokens through all layers and samples one token; afterwards the state is rolled
back, so that each step is the same work. Ten steps are measured after warm-up (the first sample is dropped), then two
more under the stage timers. A step of several ranks takes as long as its slowest rank. Cached tokens, loading and filling
the caches never count.

--workload and --suite measure other requests instead, several in one process: the weights are loaded once. --ablate runs
every workload again with the named implementations (a list as in MDI_OPS), in turns with the plain run, so that both see
the same clocks; its row holds the plain run's median as "baseline". Every row is one workload with one choice of
implementations.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from bench.exchange import describe_exchange, exchange_times, serial_steps
from bench.options import add_run_options, parse_run_options
from bench.result import append_row, base_row, result_line
from bench.timing import summarise
from bench.workload import SUITES, Workload, fill_randomly, parse_workload, single_request
from mini_deepinfer.batch import ChunkRequest, PrefillBatch, build_batch
from mini_deepinfer.config import ModelConfig, NumericProfile, check_environment
from mini_deepinfer.engram import EngramHasher, synthetic_token_map, token_map_from_folder
from mini_deepinfer.kv_cache import CacheGeometry, Caches, cache_bytes
from mini_deepinfer.model import Model
from mini_deepinfer.ops._dispatch import check_device, select
from mini_deepinfer.parallel import ExpertParallel, Loopback, SingleProcess, local_device, make_parallel
from mini_deepinfer.report import build_line, memory_table, progress, show, stage_table
from mini_deepinfer.stages import StageTimer, stage
from mini_deepinfer.weights import dummy_weights, load_weights

NUM_STAGE_STEPS = 2
TURN = 5  # steps of one choice of implementations before the next one has its turn


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser)
    add = parser.add_argument
    add("--prefill_batch_size", "--prefill-batch-size", type=int,
        help="new tokens of a rank per step (default 4096, or the largest workload's if that is more)")  # fmt: skip
    add("--context-len", type=int, default=131_072, help="tokens of the request")
    add("--cached-len", type=int, help="tokens cached before the step (default: all but the new ones)")
    add("--cached-fill", choices=["auto", "prefill", "random"], default="auto",
        help="cached part: computed by the model, or random rows (auto: random with dummy weights)")  # fmt: skip
    add("--workload", action="append", default=[], metavar="FILE|SPEC",
        help="requests instead of the three lengths: a JSON file or [COUNTx]NEW@CACHED, e.g. 8x512@0; may be repeated")  # fmt: skip
    add("--suite", action="append", default=[], choices=sorted(SUITES), help="a named list of workloads; may be repeated")
    add("--ablate", action="append", default=[], metavar="OP=IMPL[,..]",
        help="run every workload again with these implementations, in turns with the plain run; may be repeated")  # fmt: skip
    add("--num-steps", type=int, default=10)
    add("--num-warmup", type=int, default=2)
    add("--profile", nargs="?", const="profile", type=Path, metavar="DIR", help="write torch profiler traces there")
    add("--num-experts", type=int, help="with dummy weights: routed experts instead of the model's (what a small group can hold)")
    add("--no_cuda_graph", "--no-cuda-graph", action="store_true", help="as always: prefill steps run eagerly")
    add("--activation-quant", action=argparse.BooleanOptionalAction, default=True)
    add("--wo-a", choices=["bf16", "fp8"], default="bf16")
    args = parse_run_options(parser, argv)
    if args.num_experts is not None and args.load_format != "dummy":
        parser.error("--num-experts needs --load-format dummy")
    if args.num_steps < 1 or args.num_warmup < 0:
        parser.error("--num-steps must be >= 1, --num-warmup >= 0")
    if args.num_experts is not None and args.num_experts < 1:
        parser.error(f"--num-experts must be >= 1, got {args.num_experts}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.cached_fill == "auto":
        args.cached_fill = "random" if args.load_format == "dummy" else "prefill"
    try:
        args.workloads = choose_workloads(args)
        for ablation in args.ablate:
            with implementations(ablation):
                select("attention.sparse", torch.empty(0))  # refuses a wrong name before anything is loaded
    except ValueError as error:
        parser.error(str(error))
    return args


def read_config(args: argparse.Namespace) -> ModelConfig:
    """The model of this run."""
    config = ModelConfig.from_folder(args.model) if args.model else ModelConfig.released()
    return dataclasses.replace(config, n_routed_experts=args.num_experts) if args.num_experts else config


def choose_workloads(args: argparse.Namespace) -> list[Workload]:
    """The workloads to measure; fixes args.prefill_batch_size. Raises ValueError for a wrong or too large one."""
    specs = list(dict.fromkeys([*args.workload, *(spec for suite in args.suite for spec in SUITES[suite])]))
    workloads = [parse_workload(spec, args.seed) for spec in specs]
    chunk = args.prefill_batch_size
    if chunk is None:
        chunk = args.prefill_batch_size = max([4096, *(workload.new_tokens for workload in workloads)])
    for workload in workloads:
        if workload.new_tokens > chunk:
            raise ValueError(f"workload {workload.name}: {workload.new_tokens} new tokens exceed --prefill_batch_size {chunk}")
    return workloads or [single_request(args.context_len, args.cached_len, chunk, args.seed)]


@contextmanager
def implementations(ablation: str) -> Iterator[str]:
    """MDI_OPS with the choices of `ablation` ("op=impl,..", "" = none) over those it has; yields its text."""
    before = os.environ.get("MDI_OPS", "")
    if before.strip() == "reference" and ablation:
        raise ValueError("--ablate: MDI_OPS=reference leaves nothing to switch off")
    if ablation.strip() == "reference" or not before:
        text = ablation or before
    else:
        replaced = {item.partition("=")[0].strip() for item in ablation.split(",")}
        kept = [item for item in before.split(",") if item.partition("=")[0].strip() not in replaced]
        text = ",".join([*kept, *([ablation] if ablation else [])])
    os.environ["MDI_OPS"] = text
    try:
        yield text
    finally:
        os.environ["MDI_OPS"] = before


@dataclass
class SavedState:
    """What a step changes besides rows that the next step overwrites: the window rings and the compressor tails."""

    rings: list[torch.Tensor]
    tails: list[torch.Tensor]


class Loaded:
    """What all workloads share: configuration, weights in the model, engram hash."""

    def __init__(self, args: argparse.Namespace, device: torch.device, parallel: ExpertParallel) -> None:
        self.config = read_config(args)
        self.device, self.parallel = device, parallel
        limit = self.config.max_position_embeddings
        for workload in args.workloads:
            if workload.context_len > limit:
                raise ValueError(f"workload {workload.name}: {workload.context_len} tokens exceed the model's limit of {limit}")
        start = time.perf_counter()
        rank, world = parallel.rank, parallel.world
        if args.load_format == "dummy":
            weights = dummy_weights(self.config, rank=rank, world=world, device=device, seed=args.seed)
            token_map = synthetic_token_map(self.config)
        else:
            weights = load_weights(args.model, self.config, rank=rank, world=world, device=device)
            token_map = token_map_from_folder(args.model, self.config)
        self.weight_bytes = weights.num_bytes
        self.hasher = EngramHasher(self.config, token_map) if self.config.engram_layer_ids else None
        profile = NumericProfile(getattr(torch, args.dtype), args.activation_quant, args.wo_a)
        longest = max(workload.context_len for workload in args.workloads)
        caches = make_caches(self.config, args.workloads[0], args, device)  # every job brings its own
        self.model = Model(self.config, profile, weights, caches, parallel, device, max_model_len=longest)
        self.load_s = time.perf_counter() - start
        allowed = np.flatnonzero(np.asarray(token_map) >= 0)
        self.allowed_ids = allowed[allowed != (-1 if self.config.image_token_id is None else self.config.image_token_id)]


def cache_sizes(workload: Workload, args: argparse.Namespace) -> dict[str, int]:
    """Pages for the requests of a workload, a slot for each, and a chunk of --prefill_batch_size tokens."""
    num_pages = sum(-(-request.end // args.page_size) for request in workload.requests)
    sizes = {"num_pages": num_pages, "page_size": args.page_size, "num_slots": len(workload.requests)}
    return sizes | {"max_tokens": args.prefill_batch_size}


def make_caches(config: ModelConfig, workload: Workload, args: argparse.Namespace, device: torch.device) -> Caches:
    return Caches(config, device=device, **cache_sizes(workload, args))


class PrefillJob:
    """The caches and requests of one workload on this rank; knows how to run the same step again and again."""

    def __init__(self, args: argparse.Namespace, loaded: Loaded, workload: Workload) -> None:
        self.config, self.model, self.hasher = loaded.config, loaded.model, loaded.hasher
        self.device, self.parallel, self.workload = loaded.device, loaded.parallel, workload
        self.chunk = args.prefill_batch_size
        self.cache_bytes = cache_bytes(self.config, CacheGeometry.of(self.config, **cache_sizes(workload, args)))
        self.caches = self.model.caches = make_caches(self.config, workload, args, self.device)
        self.token_ids = [workload.token_ids(i, self.parallel.rank, loaded.allowed_ids) for i in range(len(workload.requests))]
        self.host_ms: dict[str, list[float]] = {"build": [], "launch": []}  # what a step takes of the host
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
        start = time.perf_counter()
        logits = self.model.forward(self._next)
        launched = time.perf_counter()
        self._next = self._build(spans, "last")
        self.host_ms["launch"].append(1e3 * (launched - start))
        self.host_ms["build"].append(1e3 * (time.perf_counter() - launched))
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
def profiled(folder: Path | None, job: PrefillJob, suffix: str) -> Iterator[None]:
    """The torch profiler around a block; writes one trace for this rank."""
    if folder is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if job.device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    name = f"prefill-ctx{job.workload.context_len}-new{job.workload.new_tokens}-rank{job.parallel.rank}{suffix}.json.gz"
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


@dataclass
class Run:
    """One workload with one choice of implementations."""

    ablation: str
    step_ms: list[float] = field(default_factory=list)
    host_ms: dict[str, list[float]] = field(default_factory=lambda: {"build": [], "launch": []})
    ids: torch.Tensor | None = None
    peak_gib: float = 0.0
    timer: StageTimer | None = None
    exchange: dict[str, dict[str, float]] = field(default_factory=dict)  # exchange_times
    serial_ms: list[float] = field(default_factory=list)


def run_turn(run: Run, job: PrefillJob, state: SavedState, num_warmup: int, num_steps: int, advance: Callable[[], Any]) -> None:
    """num_warmup steps, one that is dropped, num_steps that count."""
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    for values in job.host_ms.values():
        values.clear()
    for step in range(num_warmup + 1 + num_steps):
        ms, ids = job.timed_step(state)
        if step > num_warmup:
            run.step_ms.append(ms)
        if run.ids is not None and not torch.equal(run.ids, ids):
            raise RuntimeError(f"bench_prefill: the same step sampled {ids.tolist()} after {run.ids.tolist()}")
        run.ids = ids
        advance()
    for name, values in job.host_ms.items():
        run.host_ms[name] += values[num_warmup + 1 :]
    run.peak_gib = max(run.peak_gib, peak_gib(job.device))


def time_stages(run: Run, job: PrefillJob, state: SavedState, folder: Path | None, suffix: str) -> None:
    """A few more steps under the stage timers, and the profiler if there is a folder for its traces."""
    run.timer = StageTimer(job.device, annotate=folder is not None)
    received_before = job.parallel.received_bytes.copy()
    with profiled(folder, job, suffix) if folder else nullcontext():
        for _ in range(NUM_STAGE_STEPS):
            job.restore(state)
            job.parallel.barrier()
            with run.timer.step():
                ids = job.step()
            if run.ids is None or not torch.equal(ids, run.ids):
                raise RuntimeError(f"bench_prefill: the same step sampled {ids.tolist()} under the timers, not {run.ids}")
    received = {name: (n - received_before[name]) / NUM_STAGE_STEPS for name, n in job.parallel.received_bytes.items()}
    run.exchange = exchange_times(run.timer.stages_ms(), run.timer.beside_ms(), received)


def measure(args: argparse.Namespace, loaded: Loaded, workload: Workload) -> list[dict[str, Any]]:
    """Measure one workload, plain and with every ablation; the same rows on every rank."""
    device, parallel = loaded.device, loaded.parallel
    first = parallel.rank == 0
    job = PrefillJob(args, loaded, workload)
    if first:
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        show(f"workload {workload.name}; {describe(parallel)}; cached part: {args.cached_fill}")
        show(memory_table({"weights": loaded.weight_bytes, **job.cache_bytes}, total_bytes=total))
    fill_s = job.fill(args.cached_fill)
    state = job.save()
    runs = [Run(ablation) for ablation in ["", *args.ablate]]
    turn = args.num_steps if len(runs) == 1 else TURN
    turns = [min(turn, args.num_steps - done) for done in range(0, args.num_steps, turn)]
    count = len(runs) * (args.num_warmup + len(turns) + args.num_steps)
    with progress(count, desc="steps", unit="step", disable=not first) as bar:
        for index, num_steps in enumerate(turns):
            for run in runs:
                with implementations(run.ablation):
                    run_turn(run, job, state, args.num_warmup if index == 0 else 0, num_steps, bar.update)
    runs[0].serial_ms = serial_steps(parallel, lambda: job.timed_step(state), runs[0].ids)
    rows: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        with implementations(run.ablation) as ops:
            time_stages(run, job, state, args.profile, f"-ablate{index}" if index else "")
        row = result_row(args, loaded, job, run, ops) | {"fill_s": fill_s}
        if rows:
            row["baseline"] = {"name": "no ablation", "latency_ms": rows[0]["latency_ms"]["median"]}
        rows.append(row)
    parallel.barrier()  # nobody failed: only now is there a result
    return rows


def result_row(args: argparse.Namespace, loaded: Loaded, job: PrefillJob, run: Run, ops: str) -> dict[str, Any]:
    """The row of one run, from what all ranks measured."""
    parallel, workload = job.parallel, job.workload
    if run.timer is None:
        raise ValueError("bench_prefill: a run without stage timers has no row")
    host_ms = {name: statistics.median(values) for name, values in run.host_ms.items()}
    own = {"step_ms": run.step_ms, "stages_ms": run.timer.stages_ms(), "peak_gib": run.peak_gib}
    own |= {"exchange": run.exchange, "serial_ms": run.serial_ms}
    ranks = parallel.all_gather_object(own)
    if isinstance(parallel, Loopback):
        ranks = ranks[:1]
    step_ms = [max(times) for times in zip(*(rank["step_ms"] for rank in ranks))]
    latency = summarise(step_ms)
    if parallel.rank == 0:
        show(stage_table(run.timer.stages_ms(), run.timer.steps[-1].calls, run.timer.beside_ms()))
        if parallel.world > 1 and not isinstance(parallel, Loopback):
            show(describe_exchange(ranks))
    row = base_row(job.device, run_name=args.run_name)
    row.update(
        stage="prefill",
        params={
            "workload": workload.as_dict(),
            "page_size": args.page_size,
            "activation_quant": args.activation_quant,
            "wo_a": args.wo_a,
            "cached_fill": args.cached_fill,
            "ops": ops,
            "ablate": run.ablation,
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
        input_len=workload.context_len,
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
        host_ms=host_ms,
        load_s=loaded.load_s,
        peak_gib=max(rank["peak_gib"] for rank in ranks),
    )
    return row


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_environment()
    device = local_device(args.device)
    check_device(device, getattr(torch, args.dtype))
    config = read_config(args)
    failed = 0
    with make_parallel(device, ep_loopback=args.ep_loopback, num_experts=config.n_routed_experts) as parallel:
        if parallel.rank == 0:
            show(build_line(device))
        loaded = Loaded(args, device, parallel)
        if parallel.rank == 0:
            show(f"loaded in {loaded.load_s:.1f} s")
        alone = isinstance(parallel, (SingleProcess, Loopback))  # ranks in step end together; one process can go on
        for workload in args.workloads:
            try:
                rows = measure(args, loaded, workload)
            except (RuntimeError, ValueError) as error:
                if not alone or len(args.workloads) == 1:
                    raise
                failed += 1
                show(f"bench_prefill: workload {workload.name} failed: {error}")
                rows = []
            for row in rows if parallel.rank == 0 else []:
                if args.result_jsonl:
                    append_row(args.result_jsonl, row)
                name, ablation = row["params"]["workload"]["name"], row["params"]["ablate"]
                what = f"workload {name}, {ablation}" if ablation else f"workload {name}"
                speed = f"{row['prefill_tok_per_s']:.1f} input tok/s/GPU"
                print(result_line(row, what, "ms/step", speed, f"peak {row['peak_gib']:.2f} GiB"), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the next workload's sizes differ
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
