"""From logits to the next token: greedy, or temperature and top-p with reproducible noise.

A sampled token depends on the request's logits, its parameters, its seed and its own step, and on nothing else: every
row is handled by itself and takes its one random number from a counter-based generator keyed by (seed, step).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    temperature     0 = greedy (ties to the lower token id)
    top_p           keep the most likely tokens whose probabilities sum to at least this
    seed            None: the engine's seed
    max_tokens      most tokens to generate
    stop_token_ids  end after one of these tokens, besides the model's own end-of-text ids
    stop            end before one of these strings (needs a tokenizer)
    ignore_eos      do not end at the model's end-of-text ids

    Raises TypeError or ValueError naming the field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"SamplingParams: {name} must be a number, got {value!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"SamplingParams: temperature must be finite and >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams: top_p must be in (0, 1], got {self.top_p}")
        _check_int("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"SamplingParams: stop must hold non-empty strings, got {self.stop!r}")


def _check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"SamplingParams: {name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"SamplingParams: {name} must be >= {low}, got {value}")


def uniform(seed: int, step: int) -> float:
    """The random number in [0, 1) of a request's step; the same on every machine."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=step)).random())


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], steps: Sequence[int]
) -> torch.Tensor:
    """Next token of every row.

    logits [B, V] float32; params, seeds and steps [B] (steps: tokens this request has generated so far). Returns int64
    [B] on the same device; -1 for a row with a NaN or without any finite logit. Synchronises: no.
    """
    if logits.dim() != 2 or not len(logits) == len(params) == len(seeds) == len(steps):
        raise ValueError(
            f"sample: logits must be [B, V] with B = {len(params)} params, {len(seeds)} seeds and {len(steps)} steps, "
            f"got {list(logits.shape)}"
        )
    if len(params) == 0:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    best, tokens = logits.max(dim=1)
    tokens = logits.argmax(dim=1)  # the first of equal values, which max does not promise
    for row, (param, seed, step) in enumerate(zip(params, seeds, steps)):
        if param.temperature > 0:
            tokens[row] = _sample_row(logits[row], param, uniform(seed, step))
    return torch.where(best.isfinite(), tokens, -1)


def _sample_row(logits: torch.Tensor, param: SamplingParams, noise: float) -> torch.Tensor:
    """logits [V] -> int64 []. Inverse of the cumulative distribution over tokens from likely to unlikely."""
    scaled = (logits.double() - logits.max()) / param.temperature
    ordered, order = scaled.sort(descending=True, stable=True)
    cumulative = ordered.exp().cumsum(0)
    if param.top_p < 1:  # the nucleus ends with the first token that reaches top_p
        last = torch.searchsorted(cumulative, param.top_p * cumulative[-1:])
        total = cumulative[last.clamp(max=len(order) - 1)]
    else:
        total = cumulative[-1:]
    picked = torch.searchsorted(cumulative, noise * total, right=True).clamp(max=len(order) - 1)
    return order[picked[0]]
