"""Sampling: greedy ties, nucleus, and noise that belongs to the request alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mini_deepinfer.sampler import SamplingParams, sample, uniform

GREEDY = SamplingParams()


def draw(logits: torch.Tensor, params: SamplingParams, seed: int, steps: range) -> list[int]:
    return [int(sample(logits[None], [params], [seed], [step])[0]) for step in steps]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.zeros(3, 50)
    logits[1, [7, 30, 49]] = 2.0
    logits[2, 49] = -1.0
    assert sample(logits, [GREEDY] * 3, [0] * 3, [0] * 3).tolist() == [0, 7, 0]


def test_bad_rows_are_marked_and_leave_the_others_alone() -> None:
    logits = torch.zeros(4, 5)
    logits[0, 2] = float("nan")
    logits[1] = float("-inf")
    logits[2, :4] = float("-inf")
    hot = SamplingParams(temperature=1.0)
    assert sample(logits, [GREEDY, hot, hot, GREEDY], [0] * 4, [0] * 4).tolist() == [-1, -1, 4, 0]


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 7), [], [], []).shape == (0,)


def test_noise_depends_on_seed_and_step_only() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 1000)
    params = SamplingParams(temperature=0.9, top_p=0.95)
    one = [int(sample(logits[i : i + 1], [params], [i], [3])[0]) for i in range(6)]
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]):
        torch.manual_seed(order[0])
        mixed = [params if i % 2 else dataclasses.replace(params, temperature=0.9) for i in order]
        assert sample(logits[order], mixed, order, [3] * 6).tolist() == [one[i] for i in order]
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(seed, step) for seed in range(10) for step in range(10)}) == 100
    assert abs(uniform(0, 0) - 0.011546044524023846) < 1e-15 or 0 <= uniform(0, 0) < 1


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    counts = torch.bincount(torch.tensor(draw(logits, SamplingParams(temperature=1.0), 11, range(4000))), minlength=4)
    assert (counts / 4000 - torch.tensor([0.5, 0.25, 0.15, 0.1])).abs().max() < 0.03


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    seen = set(draw(logits, SamplingParams(temperature=1.0, top_p=0.7), 3, range(500)))
    assert seen == {1, 3}
    assert set(draw(logits, SamplingParams(temperature=1.0, top_p=1e-9), 3, range(50))) == {1}
    assert set(draw(torch.zeros(8), SamplingParams(temperature=1.0, top_p=0.26), 3, range(300))) == {0, 1, 2}


def test_a_small_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([3e4, -3e4, 2.9999e4, 0.0])
    assert set(draw(logits, SamplingParams(temperature=1e-6), 0, range(50))) == {0}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, "temperature"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"temperature": "hot"}, TypeError, "temperature"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"top_p": 1.1}, ValueError, "top_p"),
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"max_tokens": 2.5}, TypeError, "max_tokens"),
        ({"seed": -1}, ValueError, "seed"),
        ({"stop_token_ids": (-1,)}, ValueError, "stop_token_ids"),
        ({"stop": ("",)}, ValueError, "stop"),
    ],
)
def test_parameters_are_checked(fields: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**fields)


def test_parameters_are_frozen_and_normalised() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3])  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_p = 0.5  # type: ignore[misc]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="logits must be"):
        sample(torch.zeros(2, 5), [GREEDY], [0], [0])
