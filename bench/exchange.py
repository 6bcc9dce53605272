"""What the exchange between ranks costs in a step: time on the links, how much of it the stages hide, bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from mini_deepinfer.parallel import ExpertParallel, ProcessGroup
from mini_deepinfer.stages import GATHER, SCATTER

NUM_SERIAL_STEPS = 5


def exchange_times(
    stages_ms: Mapping[str, float], beside_ms: Mapping[str, float], received_bytes: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """By direction: busy_ms from the start of a transfer to its end (waiting for slower ranks included), waited_ms in which the
    step stood still for it, hidden_ms the rest, received_bytes of other ranks' rows, and gb_per_s of them while busy."""
    times = {}
    for name in (GATHER, SCATTER):
        busy, received = beside_ms.get(name, 0.0), received_bytes.get(name, 0.0)
        if busy > 0 and received > 0:
            waited = stages_ms.get(name, 0.0)
            times[name] = {"busy_ms": busy, "waited_ms": waited, "hidden_ms": max(0.0, busy - waited),
                           "received_bytes": received, "gb_per_s": received / busy / 1e6}  # fmt: skip
    return times


def serial_steps(
    parallel: ExpertParallel, timed_step: Callable[[], tuple[float, torch.Tensor]], wanted_ids: torch.Tensor | None
) -> list[float]:
    """Times of steps that wait for every exchange at once; empty where nothing is overlapped. RuntimeError for other results."""
    if not isinstance(parallel, ProcessGroup) or parallel.device.type != "cuda":
        return []
    parallel.overlap = False
    try:
        steps = [timed_step() for _ in range(NUM_SERIAL_STEPS + 1)][1:]  # the first sample is dropped
        if wanted_ids is None or not all(torch.equal(ids, wanted_ids) for _, ids in steps):
            raise RuntimeError("bench_prefill: a step without overlap sampled other tokens")
        return [ms for ms, _ in steps]
    finally:
        parallel.overlap = True


def describe_exchange(ranks: list[dict[str, Any]]) -> str:
    """Lines for people: every rank's step and exchange."""
    lines = []
    for rank, own in enumerate(ranks):
        lines.append(f"rank {rank}: {median(own['step_ms']):.2f} ms/step, peak {own['peak_gib']:.2f} GiB"
                     + (f"; {median(own['serial_ms']):.2f} ms/step without overlap" if own["serial_ms"] else ""))  # fmt: skip
        for name, time in own["exchange"].items():
            lines.append(
                f"  {name}: busy {time['busy_ms']:.2f} ms/step, step waits {time['waited_ms']:.2f}, "
                f"{time['received_bytes'] / 1e9:.3f} GB in, {time['gb_per_s']:.0f} GB/s"
            )
    return "\n".join(lines)
