"""Timing on the device: events with a backlog, flushed L2, warm-up, median and percentiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # more than twice the L2 of any GPU we build for
ROUND = 10  # iterations of one implementation before the next one has its turn
MAX_BACKLOG_S = 0.5
SLEEP_HZ = 2.0e9  # roughly the clock that the sleep kernel counts; too long a sleep does no harm


@dataclass(frozen=True)
class Latency:
    """Order statistics of one measurement, in milliseconds."""

    median: float
    p10: float
    p90: float
    iters: int

    def as_dict(self) -> dict[str, float]:
        """The three times, as the row's latency_ms."""
        return {"median": self.median, "p10": self.p10, "p90": self.p90}


def summarise(samples_ms: list[float]) -> Latency:
    """Median and nearest-rank percentiles. Raises ValueError without samples."""
    if not samples_ms:
        raise ValueError("timing: no samples")
    ordered = sorted(samples_ms)
    last = len(ordered) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return Latency(middle, ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


def time_paired(
    runs: Mapping[str, Callable[[], Any]],
    device: torch.device | str,
    *,
    warmup: int = 10,
    iters: int = 30,
) -> dict[str, Latency]:
    """Time several ways to do the same work in one run, in turns of ROUND iterations, so that clocks and heat are shared.

    Raises ValueError for fewer than one iteration.
    """
    if iters < 1 or warmup < 0:
        raise ValueError(f"timing: need iters >= 1 and warmup >= 0, got {iters} and {warmup}")
    device = torch.device(device)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    timer = _GpuTimer(device) if device.type == "cuda" else None
    for run in runs.values():
        for _ in range(warmup):
            run()
    while any(len(times) < iters for times in samples.values()):
        for name, run in runs.items():
            count = min(ROUND, iters - len(samples[name]))
            samples[name] += timer.measure(run, count) if timer else [_time_on_cpu(run) for _ in range(count)]
    return {name: summarise(times) for name, times in samples.items()}


@dataclass(frozen=True)
class Energy:
    """What a call costs in a long run, when the GPU has become hot and its power limit holds: milliseconds, joules, mean watts."""

    ms: float
    joule: float
    watt: float


def measure_energy(
    run: Callable[[], Any], read_joule: Callable[[], float], synchronise: Callable[[], Any], *, seconds: float = 1.2
) -> Energy:
    """Repeat `run` for about `seconds` after a third of that as warm-up. read_joule: a counter of the GPU's energy.

    L2 is not flushed. NVML's counter moves in steps of up to a tenth of a second, so short runs say little.
    """
    if seconds <= 0:
        raise ValueError(f"timing: need seconds > 0, got {seconds}")
    run()
    synchronise()
    start, probes = time.perf_counter(), 3
    for _ in range(probes):
        run()
    synchronise()
    calls_per_s = probes / max(time.perf_counter() - start, 1e-6)
    for _ in range(max(1, round(seconds / 3 * calls_per_s))):
        run()
    synchronise()
    calls = max(1, round(seconds * calls_per_s))
    before, start = read_joule(), time.perf_counter()
    for _ in range(calls):
        run()
    synchronise()
    spent_s, joule = time.perf_counter() - start, read_joule() - before
    return Energy(1e3 * spent_s / calls, joule / calls, joule / spent_s)


def energy_counter(device: torch.device) -> Callable[[], float]:
    """Reads the joules that this GPU has used, from NVML. RuntimeError without a GPU or the package nvidia-ml-py (extra "energy")."""
    if device.type != "cuda":
        raise RuntimeError("energy is measured on GPUs only")
    try:
        import pynvml
    except ImportError:
        raise RuntimeError("the energy counter needs nvidia-ml-py: pip install 'mini-deepinfer[energy]'") from None
    pynvml.nvmlInit()
    wanted = str(torch.cuda.get_device_properties(device).uuid)
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        if wanted in str(pynvml.nvmlDeviceGetUUID(handle)):
            return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    raise RuntimeError(f"NVML knows no GPU with the UUID {wanted}")


def _time_on_cpu(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


class _GpuTimer:
    """Events around each call. A sleep kernel in front keeps the launch queue full, so host gaps are not measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def measure(self, run: Callable[[], Any], count: int) -> list[float]:
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        run()
        host_s = time.perf_counter() - start
        torch.cuda.synchronize(self._device)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        backlog_s = min(MAX_BACKLOG_S, 2 * count * (host_s + 20e-6))
        torch.cuda._sleep(int(backlog_s * SLEEP_HZ))
        for begin, end in events:
            self._flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) for begin, end in events]
