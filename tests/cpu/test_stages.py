"""Stage timers: own times, groups, no cost and no state when off."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from mini_deepinfer import stages
from mini_deepinfer.stages import GATHER, GROUPS, OUTSIDE, SCATTER, STAGE_GROUPS, StageTimer, beside, group_times, stage


def test_own_times_sum_to_the_step():
    timer = StageTimer("cpu")
    for _ in range(3):
        with timer.step():
            with stage("moe.dispatch"):
                time.sleep(0.01)
                with stage(GATHER), beside(GATHER):
                    time.sleep(0.02)
            with stage("hc"):
                time.sleep(0.005)
            with stage("hc"):
                time.sleep(0.005)
            time.sleep(0.003)
    times = timer.stages_ms()
    assert set(times) == {"moe.dispatch", GATHER, "hc", OUTSIDE}
    assert times["moe.dispatch"] < times[GATHER]  # the inner stage is not counted twice
    assert times[GATHER] >= 20
    assert set(timer.beside_ms()) == {GATHER}
    assert timer.beside_ms()[GATHER] >= 20  # and what ran beside is in no sum
    assert timer.steps[0].calls == {"moe.dispatch": 1, GATHER: 1, "hc": 2, OUTSIDE: 1}
    for step in timer.steps:
        assert sum(step.stages_ms.values()) == pytest.approx(step.total_ms)
    assert timer.total_ms() >= 43


def test_groups_cover_every_stage_once():
    assert set(STAGE_GROUPS.values()) == set(GROUPS)
    groups = group_times(dict.fromkeys(STAGE_GROUPS, 1.0))
    assert sum(groups.values()) == len(STAGE_GROUPS)
    assert list(groups) == list(GROUPS)
    assert STAGE_GROUPS[GATHER] == STAGE_GROUPS[SCATTER] == "MoE"


def test_every_stage_of_the_package_is_known():
    root = Path(stages.__file__).parent
    used = {name for path in root.rglob("*.py") for name in re.findall(r'\bstage\("([^"]+)"\)', path.read_text())}
    assert len(used) > 5
    assert used <= set(STAGE_GROUPS)


def test_off_means_nothing_happens():
    assert stage("hc") is stage("no such stage") is beside("hc")  # the shared null context: not even the name is looked at
    start = time.perf_counter()
    for _ in range(20_000):
        with stage("hc"):
            pass
    assert time.perf_counter() - start < 1.0


def test_unknown_stage_is_refused_while_recording():
    timer = StageTimer("cpu")
    with pytest.raises(ValueError, match="unknown stage 'nope'"), timer.step(), stage("nope"):
        pass
    assert timer.steps == []  # a step that raised leaves nothing behind
    with timer.step():
        pass
    assert len(timer.steps) == 1


def test_one_timer_at_a_time():
    outer, inner = StageTimer("cpu"), StageTimer("cpu")
    with pytest.raises(RuntimeError, match="already recording"), outer.step(), inner.step():
        pass
    assert stage("hc") is stage("embed")


def test_annotated_stages_appear_in_a_profile():
    timer = StageTimer("cpu", annotate=True)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        timer.step(),
        stage("attention.sparse"),
    ):
        torch.zeros(4).add_(1)
    assert "attention.sparse" in {event.key for event in profiler.key_averages()}


def test_medians_over_steps():
    timer = StageTimer("cpu")
    assert timer.total_ms() == 0.0
    timer.steps = [
        stages.StepTimes(3.0, {"hc": 1.0, OUTSIDE: 2.0}, {}),
        stages.StepTimes(5.0, {"hc": 3.0, OUTSIDE: 2.0}, {}),
        stages.StepTimes(9.0, {"hc": 5.0, "embed": 2.0, OUTSIDE: 2.0}, {}),
    ]
    assert timer.stages_ms() == {"hc": 3.0, "embed": 0.0, OUTSIDE: 2.0}
    assert timer.total_ms() == 5.0
