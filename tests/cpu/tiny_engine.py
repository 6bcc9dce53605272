"""Engines on the smallest checkpoint with every feature (window 8, page 4, ratios 2 and 1, candidates, engram)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mini_deepinfer.engine import LLM, Prompt, RequestOutput
from mini_deepinfer.sampler import SamplingParams
from mini_deepinfer.tiny_checkpoint import preset_config, write_tiny_checkpoint

_keep: list[tempfile.TemporaryDirectory] = []


def new_folder() -> Path:
    _keep.append(tempfile.TemporaryDirectory(prefix="tiny-"))
    return Path(_keep[-1].name)


@cache
def checkpoint(preset: str = "cases") -> Path:
    folder = new_folder()
    write_tiny_checkpoint(folder, preset_config(preset), num_shards=1)
    return folder


def edited_checkpoint(edit_weights: Callable[[dict[str, torch.Tensor]], None] | None = None, **text_config: Any) -> Path:
    """A checkpoint with other text_config values, then other weights."""
    raw = preset_config("cases")
    raw["text_config"].update(text_config)
    folder = new_folder()
    write_tiny_checkpoint(folder, raw, num_shards=1)
    if edit_weights is not None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        edit_weights(tensors)
        save_file(tensors, path)
    return folder


def make_llm(folder: Path | None = None, **options: Any) -> LLM:
    """float32 on the CPU, page 4, and room for everything unless said otherwise."""
    defaults = {
        "dtype": "float32", "device": "cpu", "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
    }  # fmt: skip
    return LLM(folder or checkpoint(), **(defaults | options))


def greedy(new: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new, ignore_eos=True, **fields)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Text tokens without the special ones."""
    return np.random.default_rng(seed).integers(10, 500, length).tolist()


def run(llm: LLM, prompts: list[Prompt], new: int = 4) -> tuple[list[RequestOutput], list[torch.Tensor]]:
    """Outputs, and per prompt the logits [new, V] its tokens were chosen from."""
    rows: dict[int, list[torch.Tensor]] = {}
    original = llm._next_tokens

    def spy(chunks, logits):
        row = 0
        for chunk in chunks:
            if chunk.want_logits == "last":
                rows.setdefault(llm._ids[chunk.request], []).append(logits[row].clone())
                row += 1
        return original(chunks, logits)

    llm._next_tokens = spy  # type: ignore[method-assign]
    try:
        outputs = llm.generate(prompts, greedy(new))
    finally:
        llm._next_tokens = original  # type: ignore[method-assign]
    for output in outputs:
        assert output.error is None, output.error
    return outputs, [torch.stack(rows[key]) for key in sorted(rows)]


def assert_all_returned(llm: LLM) -> None:
    stats = llm.stats()
    assert stats["free_pages"] == stats["num_pages"]
    assert stats["free_slots"] == llm.options.max_num_seqs
