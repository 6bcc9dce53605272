"""What the op benchmarks measure: the Case, the released model's shapes, and the draws behind the peers' figures.

Every ``bench/cases_<stage>.py`` holds ``CASES: list[Case]``; ``bench_ops.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mini_deepinfer.config import ModelConfig

RELEASED = ModelConfig.released()
STEP_TOKENS = 4096  # new tokens of the measured step
CONTEXT_TOKENS = 131_072  # its context
EP_RANKS = 4
LOCAL_EXPERTS = RELEASED.n_routed_experts // EP_RANKS
LOCAL_ROWS = STEP_TOKENS * RELEASED.num_experts_per_tok  # routed rows of one rank with balanced experts


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    make    inputs on a device, the same for every implementation
    run     call the op with an implementation by force
    check   the maximal error of an output against the reference; raises if it is over its bound
    flops, bytes   the floor: useful operations and the bytes that must move at least
    """

    op: str
    name: str
    params: dict[str, Any]
    make: Callable[[torch.device], dict[str, Any]]
    run: Callable[[dict[str, Any], str], Any]
    check: Callable[[dict[str, Any], Any], float]
    flops: float
    bytes: float
    impls: tuple[str, ...]


def strata_rows(num_tokens: int, num_picks: int, num_rows: int, generator: torch.Generator, *, shared_by: int = 1) -> torch.Tensor:
    """int32 [T, K] ascending: one row of each of K equal strata of the pool, as the peers were measured.

    With shared_by = n, a draw is, with probability 3/4, the one that n neighbouring queries share.
    """
    width = num_rows // num_picks
    if width < 1:
        raise ValueError(f"strata_rows: need at least one row per pick, got {num_rows} rows for {num_picks} picks")
    own = torch.randint(width, (num_tokens, num_picks), generator=generator)
    if shared_by > 1:
        groups = -(-num_tokens // shared_by)
        common = torch.randint(width, (groups, num_picks), generator=generator).repeat_interleave(shared_by, 0)
        take = torch.rand(num_tokens, num_picks, generator=generator) < 0.75
        own = torch.where(take, common[:num_tokens], own)
    return (own + torch.arange(num_picks) * width).to(torch.int32)


def uneven_offsets(num_experts: int, num_rows: int, generator: torch.Generator, *, spread: float = 0.5) -> torch.Tensor:
    """int32 [E + 1]: num_rows drawn multinomially over experts with probabilities softmax(spread * N(0, 1)); 0: equal ones."""
    weights = torch.softmax(spread * torch.randn(num_experts, generator=generator), 0)
    picks = torch.multinomial(weights, num_rows, replacement=True, generator=generator)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    offsets[1:] = torch.bincount(picks, minlength=num_experts).cumsum(0)
    return offsets
