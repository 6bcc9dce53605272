"""What a rank of the model tests does: poison memory, answer and score the prompts, save what rank 0 saw."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from safetensors.torch import save_file

from mini_deepinfer.engine import LLM
from mini_deepinfer.sampler import SamplingParams

POISONED = (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn)


def poison_memory(llm: LLM) -> None:
    """Fill the caches and all memory that is fresh from now on with NaN patterns: a row that nobody wrote cannot pass for zero."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args, **options) -> torch.Tensor:
            tensor = make(*args, **options)
            if tensor.dtype in POISONED and tensor.dim():
                tensor.view(torch.uint8).fill_(0xFF)
            return tensor

        return call

    llm.caches.poison()
    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)  # type: ignore[method-assign]


def answer(llm: LLM, prompts: list[list[int]], out: str) -> None:
    """Four tokens for every prompt and all scores, in `out`; the last line printed counts the collectives."""
    with llm.parallel:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
        assert [output.error for output in outputs] == [None] * len(prompts), outputs
        scores = llm.score(prompts)
        if llm.parallel.rank == 0:
            result = {f"ids.{output.index}": torch.tensor(output.token_ids) for output in outputs}
            save_file(result | {f"score.{index}": score.cpu().contiguous() for index, score in enumerate(scores)}, out)
        print(json.dumps(sorted(llm.parallel.collectives.items())))
