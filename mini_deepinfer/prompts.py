"""What a prompt may be, and its token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .config import ModelConfig
from .sampler import SamplingParams
from .tokenizer import Tokenizer, check_prompt_ids

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class PromptReader:
    """Checks the prompts of one engine. known_ids: bool [V], ids that have a token; None = all."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    known_ids: np.ndarray | None
    max_model_len: int

    def read(self, prompt: Prompt, params: SamplingParams, *, score: bool) -> tuple[np.ndarray, SamplingParams]:
        """Token ids int64 [S] of a prompt, and its parameters. score: its own logits are wanted, no new token.

        Raises TypeError or ValueError saying what is wrong.
        """
        if isinstance(prompt, Mapping):
            fields = {key: value for key, value in prompt.items() if key != "prompt"}
            known = [field.name for field in dataclasses.fields(SamplingParams)]
            if "prompt" not in prompt or set(fields) - set(known):
                raise ValueError(f"prompt: a mapping has the keys prompt and {', '.join(known)}; got {sorted(prompt)}")
            prompt, params = prompt["prompt"], dataclasses.replace(params, **fields)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt: text needs the checkpoint's tokenizer.json; give token ids")
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, (Sequence, np.ndarray, torch.Tensor)):
            ids = check_prompt_ids(prompt, self.config)  # type: ignore[arg-type]
        else:
            raise TypeError(f"prompt: must be text, token ids or a mapping, got {type(prompt).__name__}")
        tokens = np.array(ids, dtype=np.int64)
        if self.known_ids is not None and not self.known_ids[tokens].all():
            raise ValueError(f"prompt: token id {tokens[~self.known_ids[tokens]][0]} has no token in the tokenizer")
        longest = self.max_model_len if score else self.max_model_len - 1
        if len(tokens) > longest:
            what = "" if score else " (one place is for the first new token)"
            raise ValueError(f"prompt: {len(tokens)} tokens; max_model_len={self.max_model_len} allows {longest}{what}")
        if params.stop and self.tokenizer is None:
            raise ValueError("prompt: stop strings need the checkpoint's tokenizer.json; use stop_token_ids")
        return tokens, params


def as_list(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a call. Raises TypeError for a single one."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        raise TypeError("prompts must be a list of prompts; put a single prompt in a list")
    return list(prompts)
