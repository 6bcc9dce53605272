#!/usr/bin/env python3
"""Traces of prefill steps, and what a torch profiler trace says of the device: how long it stood idle, the gaps, the time of every kernel.

    python bench/device_trace.py profile/prefill-...-steady.json.gz --over-us 10 --kernels 20

A gap is time in which nothing runs on the device, on no stream: no kernel, no copy.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mini_deepinfer.report import show

if TYPE_CHECKING:
    from bench.prefill_job import PrefillJob, SavedState

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
CHAINED_STEPS = 3  # of a steady trace


@dataclass(frozen=True)
class Gap:
    """Idle time of the device, in microseconds, when it began, and what ran before and after it."""

    us: float
    at_us: float  # from the beginning of what was looked at
    before: str
    after: str


@dataclass(frozen=True)
class DeviceTime:
    """The device's side of a trace, in microseconds. kernels: name -> (calls, time)."""

    span_us: float
    idle_us: float
    gaps: list[Gap]
    kernels: dict[str, tuple[int, float]]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, plain or gzipped. Raises ValueError for a file that is none."""
    packed = path.read_bytes()
    trace = json.loads(gzip.decompress(packed) if path.suffix == ".gz" else packed)
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise ValueError(f"device_trace: {path} is no Chrome trace (no traceEvents)")
    return trace["traceEvents"]


def device_time(events: Iterable[dict[str, Any]], *, skip: float = 0.0) -> DeviceTime:
    """Gaps and kernel times behind the first part of the trace: skip 0.25 leaves out a quarter of it. ValueError without any."""
    work = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") in DEVICE_CATEGORIES)
    if work:
        first = work[0][0] + skip * (work[-1][0] - work[0][0])
        work = [item for item in work if item[0] >= first]
    if not work:
        raise ValueError("device_trace: no kernel in this trace")
    kernels: dict[str, tuple[int, float]] = {}
    gaps: list[Gap] = []
    end, last = work[0][0], ""
    for start, duration, name in work:
        calls, total = kernels.get(name, (0, 0.0))
        kernels[name] = calls + 1, total + duration
        if start > end:
            gaps.append(Gap(start - end, end - work[0][0], last, name))
        if start + duration >= end:
            end, last = start + duration, name
    return DeviceTime(end - work[0][0], sum(gap.us for gap in gaps), gaps, kernels)


def describe(times: DeviceTime, *, over_us: float, num_kernels: int = 0) -> str:
    """Lines for people: the sum, the gaps longer than over_us, the kernels that take longest."""
    long = [gap for gap in times.gaps if gap.us > over_us]
    lines = [
        f"device: {times.span_us / 1e3:.2f} ms, idle {times.idle_us / 1e3:.2f} ms in {len(times.gaps)} gaps; "
        f"{len(long)} gaps over {over_us:g} us take {sum(gap.us for gap in long) / 1e3:.2f} ms"
    ]
    lines += [f"  {gap.us:8.1f} us at {gap.at_us / 1e3:.2f} ms between {gap.before[:60]} and {gap.after[:60]}" for gap in long]
    longest = sorted(times.kernels.items(), key=lambda item: -item[1][1])[:num_kernels]
    lines += [f"  {total / 1e3:9.3f} ms {calls:6d} x {total / calls:8.1f} us  {name[:90]}" for name, (calls, total) in longest]
    return "\n".join(lines)


@contextmanager
def profiled(folder: Path, job: PrefillJob, suffix: str, *, host: bool = True) -> Iterator[Path]:
    """The torch profiler around a block; writes one trace for this rank, to the path it yields. host False: of the GPU alone."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = job.device.type == "cuda"
    activities = [ProfilerActivity.CPU] * (host or not on_gpu) + [ProfilerActivity.CUDA] * on_gpu
    folder.mkdir(parents=True, exist_ok=True)
    name = f"prefill-ctx{job.workload.context_len}-new{job.workload.new_tokens}-rank{job.parallel.rank}{suffix}.json.gz"
    with profile(activities=activities) as profiler:
        yield folder / name
    profiler.export_chrome_trace(str(folder / name))


def profile_chain(job: PrefillJob, state: SavedState, folder: Path) -> None:
    """A trace of a few chained steps; on a GPU without the host's side, which would slow the launches, and with a list of the gaps.

    The first step follows nothing, so the list leaves it out.
    """
    with profiled(folder, job, "-steady", host=False) as path:
        job.chain(state, CHAINED_STEPS)
    if job.device.type == "cuda" and job.parallel.rank == 0:
        show(describe(device_time(read_trace(path), skip=1 / CHAINED_STEPS), over_us=10.0))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="trace of the torch profiler (.json, .json.gz)")
    parser.add_argument("--over-us", type=float, default=10.0, help="list gaps that are longer")
    parser.add_argument("--skip", type=float, default=0.0, help="leave out this part of the trace, e.g. 0.25")
    parser.add_argument("--kernels", type=int, default=20, help="list that many kernels")
    args = parser.parse_args(argv)
    try:
        print(describe(device_time(read_trace(args.trace), skip=args.skip), over_us=args.over_us, num_kernels=args.kernels))
    except (OSError, ValueError) as error:
        print(f"device_trace: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
