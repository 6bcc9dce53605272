"""What the exchange between ranks costs in a step: time on the links, how much of it the stages hide, bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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


def serial_steps(parallel: ExpertParallel, timed_step: Callable[[], float]) -> list[float]:
    """Step times with the step waiting for every exchange at once; empty where nothing is overlapped."""
    if not isinstance(parallel, ProcessGroup) or parallel.device.type != "cuda":
        return []
    parallel.overlap = False
    try:
        return [timed_step() for _ in range(NUM_SERIAL_STEPS + 1)][1:]  # the first sample is dropped
    finally:
        parallel.overlap = True


def describe_exchange(ranks: list[dict[str, Any]]) -> str:
    """Lines for people: the exchange of every rank."""
    lines = []
    for rank, own in enumerate(ranks):
        for name, time in own["exchange"].items():
            lines.append(
                f"rank {rank} {name}: busy {time['busy_ms']:.2f} ms/step, step waits {time['waited_ms']:.2f}, "
                f"{time['received_bytes'] / 1e9:.3f} GB in, {time['gb_per_s']:.0f} GB/s"
            )
    return "\n".join(lines)
