"""Named stages of a step: timers, profiler ranges and the stage table.

``with stage("attention.sparse"):`` marks a piece of the step. Outside a :class:`StageTimer` it costs one global read.
Inside one it measures the stage (CUDA events on a GPU, ``perf_counter`` on a CPU) and, with ``annotate=True``, opens
the range of the same name for the torch profiler and for NVTX. Stages may nest: a stage's time is its own time without
the stages inside it, so the sum over all stages never counts anything twice. ``beside(name)`` times work on another stream
that the stages overlap with.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

GATHER, SCATTER = "moe.gather", "moe.scatter"  # waiting for other ranks' rows; see beside() for the links themselves
OUTSIDE = "(no stage)"

# Stage -> row of the printed stage table. Every name that stage() accepts is here.
STAGE_GROUPS: dict[str, str] = {
    "attention.sparse": "sparse attention core",
    "attention.project": "other attention",
    "attention.compress": "other attention",
    "attention.output": "other attention",
    "indexer.logits": "indexer",
    "indexer.topk": "indexer",
    "moe.route": "MoE",
    "moe.dispatch": "MoE",
    "moe.experts": "MoE",
    "moe.shared": "MoE",
    "moe.combine": "MoE",
    GATHER: "MoE",
    SCATTER: "MoE",
    "embed": "HC, norms, other",
    "engram": "HC, norms, other",
    "hc": "HC, norms, other",
    "head": "HC, norms, other",
    "sample": "HC, norms, other",
    "schedule": "HC, norms, other",
    OUTSIDE: "HC, norms, other",
}
GROUPS: tuple[str, ...] = ("sparse attention core", "other attention", "indexer", "MoE", "HC, norms, other")

_NO_STAGE: AbstractContextManager[None] = nullcontext()
_active: StageTimer | None = None


def stage(name: str) -> AbstractContextManager[Any]:
    """Mark a stage of the running step; does nothing unless a :class:`StageTimer` is recording.

    Raises ValueError (while recording) for a name that is not in ``STAGE_GROUPS``.
    """
    timer = _active
    return _NO_STAGE if timer is None else _Range(timer, name)


def beside(name: str) -> AbstractContextManager[Any]:
    """Mark work that runs beside the stages, on the current stream: its whole time is kept apart from the stages' own times."""
    timer = _active
    return _NO_STAGE if timer is None else timer._beside_range(name)


def recording() -> bool:
    """Whether a :class:`StageTimer` is recording."""
    return _active is not None


def group_times(stages_ms: dict[str, float]) -> dict[str, float]:
    """Sum stage times into the rows of the stage table, in its order; communication is part of the row "MoE"."""
    groups = dict.fromkeys(GROUPS, 0.0)
    for name, ms in stages_ms.items():
        groups[STAGE_GROUPS[name]] += ms
    return groups


@dataclass
class StepTimes:
    """What one recorded step took: its own time and the own time of every stage, in milliseconds."""

    total_ms: float
    stages_ms: dict[str, float]
    calls: dict[str, int]
    beside_ms: dict[str, float] = field(default_factory=dict)  # from start to end, whatever the stages did meanwhile


@dataclass
class _Interval:
    name: str
    start: Any
    end: Any = None
    inner: list[_Interval] = field(default_factory=list)


class StageTimer:
    """Record the stages of one or more steps.

    ``with timer.step(): ...`` around each step; afterwards ``timer.steps`` holds one :class:`StepTimes` per step. The
    step waits for the device once, at its end. Only one timer records at a time (RuntimeError otherwise).
    """

    def __init__(self, device: torch.device | str, *, annotate: bool = False) -> None:
        self.device = torch.device(device)
        self.annotate = annotate
        self.steps: list[StepTimes] = []
        self._stack: list[_Interval] = []
        self._beside: list[_Interval] = []
        self._events: list[torch.cuda.Event] = []
        self._num_used = 0
        on_gpu = self.device.type == "cuda"
        self._now: Callable[[], Any] = self._record_event if on_gpu else time.perf_counter
        self._nvtx = annotate and on_gpu

    def _record_event(self) -> torch.cuda.Event:
        if self._num_used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._num_used]
        self._num_used += 1
        event.record()
        return event

    def _elapsed_ms(self, interval: _Interval) -> float:
        if self.device.type == "cuda":
            return interval.start.elapsed_time(interval.end)
        return 1e3 * (interval.end - interval.start)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one step. If the step raises, nothing is kept of it."""
        global _active
        if _active is not None:
            raise RuntimeError("stages: a StageTimer is already recording; end its step first")
        self._num_used = 0
        whole = _Interval(OUTSIDE, self._now())
        self._stack, self._beside = [whole], []
        _active = self
        try:
            yield
        finally:
            _active = None
        whole.end = self._now()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        stages_ms: dict[str, float] = defaultdict(float)
        calls: dict[str, int] = defaultdict(int)
        total_ms = self._add_own_times(whole, stages_ms, calls)
        beside_ms: dict[str, float] = defaultdict(float)
        for interval in self._beside:
            beside_ms[interval.name] += self._elapsed_ms(interval)
        self.steps.append(StepTimes(total_ms, dict(stages_ms), dict(calls), dict(beside_ms)))

    @contextmanager
    def _beside_range(self, name: str) -> Iterator[None]:
        interval = _Interval(name, self._now())
        yield
        interval.end = self._now()
        self._beside.append(interval)

    def _add_own_times(self, interval: _Interval, stages_ms: dict[str, float], calls: dict[str, int]) -> float:
        total_ms = self._elapsed_ms(interval)
        inner_ms = sum(self._add_own_times(inner, stages_ms, calls) for inner in interval.inner)
        stages_ms[interval.name] += total_ms - inner_ms
        calls[interval.name] += 1
        return total_ms

    def stages_ms(self) -> dict[str, float]:
        """Median over the recorded steps of every stage's time (0 in a step without that stage)."""
        names = sorted({name for step in self.steps for name in step.stages_ms})
        return {name: median(step.stages_ms.get(name, 0.0) for step in self.steps) for name in names}

    def beside_ms(self) -> dict[str, float]:
        """Median over the recorded steps of the time of what ran beside the stages, by name."""
        names = sorted({name for step in self.steps for name in step.beside_ms})
        return {name: median(step.beside_ms.get(name, 0.0) for step in self.steps) for name in names}

    def total_ms(self) -> float:
        """Median time of the recorded steps; 0.0 if there is none."""
        return median(step.total_ms for step in self.steps) if self.steps else 0.0


class _Range:
    """The context of one running stage."""

    def __init__(self, timer: StageTimer, name: str) -> None:
        if name not in STAGE_GROUPS:
            raise ValueError(f"stages: unknown stage {name!r}; known: {', '.join(STAGE_GROUPS)}")
        self._timer = timer
        self._name = name
        self._record: Any = None

    def __enter__(self) -> None:
        timer = self._timer
        if timer.annotate:
            self._record = torch.profiler.record_function(self._name)
            self._record.__enter__()
        if timer._nvtx:
            torch.cuda.nvtx.range_push(self._name)
        interval = _Interval(self._name, timer._now())
        timer._stack[-1].inner.append(interval)
        timer._stack.append(interval)

    def __exit__(self, *error: object) -> None:
        timer = self._timer
        timer._stack.pop().end = timer._now()
        if timer._nvtx:
            torch.cuda.nvtx.range_pop()
        if self._record is not None:
            self._record.__exit__(*error)
