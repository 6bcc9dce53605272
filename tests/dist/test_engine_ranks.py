"""Several ranks, each with its own prompts and experts: the answers of one process, in step to the last collective."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cpu.tiny_engine import checkpoint, edited_checkpoint, greedy, make_llm, prompt

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 120  # a hang, not slowness: a quiet machine needs ten seconds


def launch(world: int, folder: Path, prompts: list[list[int]], new: list[int], out: Path) -> list[dict]:
    job = json.dumps({"world": world, "prompts": prompts, "new": new})
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}",
        str(Path(__file__).parent / "engine_rank.py"), str(folder), str(out), job,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-8000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)]


def check(world: int, folder: Path, lengths: list[int], new: list[int], out: Path) -> None:
    prompts = [prompt(n, seed=n) for n in lengths]
    llm = make_llm(folder)
    wanted = [o.token_ids for o in llm.generate(prompts, [greedy(n) for n in new])]
    scores = llm.score(prompts[:2])
    ranks = launch(world, folder, prompts, new, out)
    for rank, result in enumerate(ranks):
        assert result["indices"] == list(range(len(prompts)))
        assert result["token_ids"] == wanted
        assert result["collectives"] == ranks[0]["collectives"]
        assert result["steps"] == ranks[0]["steps"]
        for got, whole in zip(torch.load(out / f"rank{rank}.pt"), scores):
            assert torch.equal(got, whole)


def test_two_ranks_with_uneven_work(tmp_path: Path) -> None:
    """Rank 0 is done long before rank 1."""
    check(2, checkpoint(), [1, 40, 5], [1, 15, 3], tmp_path)


def _everything_to_the_first_experts(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("ffn.gate.bias"):
            tensor.zero_()
            tensor[:2] = 1000.0


@pytest.mark.slow
def test_four_ranks_fewer_prompts_and_one_busy_expert_rank(tmp_path: Path) -> None:
    folder = edited_checkpoint(_everything_to_the_first_experts)
    check(4, folder, [9, 17], [4, 2], tmp_path)
