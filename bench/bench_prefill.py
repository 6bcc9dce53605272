#!/usr/bin/env python3
"""Measure complete prefill steps: milliseconds per step, input tokens per second and GPU, stage table, peak memory.

    torchrun --nproc-per-node 4 bench/bench_prefill.py --model DIR --prefill_batch_size 4096 --no_cuda_graph \\
        --result_jsonl results.jsonl
    python bench/bench_prefill.py --load-format dummy --ep-loopback 4        # the per-rank work of 4 GPUs on one
    python bench/bench_prefill.py --load-format dummy --ep-loopback 4 --suite contexts --workload 8x512@0 \\
        --ablate attention.sparse=portable --ablate moe.route=portable,moe.swiglu_quant=reference

One request per rank has --context-len tokens, of which --cached-len are in the caches before the clock starts. Every step
computes the next --prefill_batch_size tokens through all layers and samples one token; afterwards the state is rolled
back, so that each step is the same work. Ten steps are measured after warm-up (the first sample is dropped), then as many
that follow each other without a pause, as the chunks of one prompt do ("chained"), then two under the stage timers. A step of
several ranks takes as long as its slowest rank. Cached tokens, loading and filling the caches never count. --profile writes
two traces: "-steady" of chained steps (bench/device_trace.py lists its gaps and kernels), and one with the stages as ranges, whose
host side is slower than a step's own.

--workload and --suite measure other requests instead, several in one process: the weights are loaded once. --ablate runs
every workload again with the named implementations (a list as in MDI_OPS), in turns with the plain run, so that both see
the same clocks; its row holds the plain run's median as "baseline". Every row is one workload with one choice of
implementations. Expert weights stay packed as they were loaded, so the portable product would unpack them in every step: for
that one set MDI_OPS, which the load sees too.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.device_trace import profile_chain, profiled
from bench.exchange import describe_exchange, exchange_times, serial_steps
from bench.options import add_run_options, parse_run_options
from bench.prefill_job import Loaded, PrefillJob, SavedState, read_config
from bench.result import append_row, base_row, result_line
from bench.timing import summarise
from bench.workload import SUITES, Workload, parse_workload, single_request
from mini_deepinfer.config import check_environment
from mini_deepinfer.ops._dispatch import check_device, select
from mini_deepinfer.parallel import ExpertParallel, Loopback, SingleProcess, local_device, make_parallel
from mini_deepinfer.report import build_line, memory_table, progress, show, stage_table
from mini_deepinfer.stages import StageTimer

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
    chained_ms: float | None = None  # of the plain run


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
    """A few more steps under the stage timers. With a folder the same once more for a trace: the profiler would slow the timed ones."""
    received_before = job.parallel.received_bytes.copy()
    run.timer = stage_steps(run, job, state, annotate=False)
    received = {name: (n - received_before[name]) / NUM_STAGE_STEPS for name, n in job.parallel.received_bytes.items()}
    run.exchange = exchange_times(run.timer.stages_ms(), run.timer.beside_ms(), received)
    if folder is not None:
        with profiled(folder, job, suffix):
            stage_steps(run, job, state, annotate=True)


def stage_steps(run: Run, job: PrefillJob, state: SavedState, *, annotate: bool) -> StageTimer:
    """Steps under a new timer, which it returns. annotate: with the stages as ranges of the profiler."""
    timer = StageTimer(job.device, annotate=annotate)
    for _ in range(NUM_STAGE_STEPS):
        job.restore(state)
        job.parallel.barrier()
        with timer.step():
            ids = job.step()
        if run.ids is None or not torch.equal(ids, run.ids):
            raise RuntimeError(f"bench_prefill: the same step sampled {ids.tolist()} under the timers, not {run.ids}")
    return timer


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
    runs[0].chained_ms = job.chain(state, args.num_steps)
    runs[0].serial_ms = serial_steps(parallel, lambda: job.timed_step(state), runs[0].ids)
    if args.profile:
        profile_chain(job, state, args.profile)
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
    own |= {"exchange": run.exchange, "serial_ms": run.serial_ms, "chained_ms": run.chained_ms}
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
        chained_step_ms=None if run.chained_ms is None else max(rank["chained_ms"] for rank in ranks),
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
