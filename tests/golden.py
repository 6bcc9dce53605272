"""The golden checkpoint `tests/data/tiny-a` and a small runner that drives the model on it without the engine.

The outputs in golden.safetensors come from an independent implementation; tests/data/tiny-a/README.md says how they were made, what
noise a correct implementation shows, and the acceptance rules the tests apply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from mini_deepinfer.batch import ChunkRequest, build_batch
from mini_deepinfer.config import ModelConfig, NumericProfile
from mini_deepinfer.engram import EngramHasher, token_map_from_folder
from mini_deepinfer.kv_cache import Caches
from mini_deepinfer.model import Model
from mini_deepinfer.parallel import SingleProcess
from mini_deepinfer.weights import load_weights

TINY_A = Path(__file__).parent / "data" / "tiny-a"
PROMPT_LENGTHS = (1, 2, 7, 33, 100, 193)
NOISE_MEAN = {1: 0.0022, 2: 0.00053, 7: 0.00064, 33: 0.0031, 100: 0.025, 193: 0.012}
NOISE_MAX = {1: 0.035, 2: 0.0068, 7: 0.0077, 33: 0.25, 100: 0.8, 193: 0.64}
BF16_MEAN = {1: 0.0414, 2: 0.0483, 7: 0.0617, 33: 0.053, 100: 0.0815, 193: 0.108}
BF16_MAX = {1: 0.178, 2: 0.271, 7: 0.364, 33: 0.303, 100: 0.845, 193: 1.01}
AQ_MEAN = {1: 0.133, 2: 0.14, 7: 0.155, 33: 0.126, 100: 0.148, 193: 0.171}


@lru_cache(maxsize=1)
def golden() -> dict[str, torch.Tensor]:
    with safe_open(str(TINY_A / "golden.safetensors"), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open has no iterator)


class Runner:
    """One request at a time through the model: fresh caches for every prompt."""

    def __init__(
        self,
        folder: Path = TINY_A,
        dtype: torch.dtype = torch.float32,
        activation_quant: bool = False,
        wo_a: str = "bf16",
        device: str = "cpu",
        max_tokens: int = 256,
        page_size: int = 16,
    ) -> None:
        self.folder, self.device, self.max_tokens, self.page_size = folder, torch.device(device), max_tokens, page_size
        self.profile = NumericProfile(dtype, activation_quant, wo_a)
        self.reload()

    def reload(
        self,
        edit_config: Callable[[ModelConfig], ModelConfig] = lambda config: config,
        edit_weights: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
        activation_quant: bool | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Build the model from the folder again, with a change to its config, weights or profile."""
        self.config = edit_config(ModelConfig.from_folder(self.folder))
        if activation_quant is not None:
            self.profile = dataclasses.replace(self.profile, activation_quant=activation_quant)
        pages = -(-self.max_tokens // self.page_size)
        self.caches = Caches(
            self.config, num_pages=pages, page_size=self.page_size, num_slots=1, max_tokens=self.max_tokens, device=self.device
        )
        weights = load_weights(self.folder, self.config, device=self.device)
        edit_weights(weights.tensors)
        parallel = SingleProcess()
        self.model = Model(self.config, self.profile, weights, self.caches, parallel, self.device, max_model_len or self.max_tokens)
        self.hasher = EngramHasher(self.config, token_map_from_folder(self.folder, self.config)) if self.config.engram_layer_ids else None

    def batch(self, token_ids: np.ndarray, start: int, end: int, want_logits: str = "all"):
        pages = list(range(self.caches.geometry.num_pages))
        request = ChunkRequest(np.asarray(token_ids, dtype=np.int64), start, end, 0, pages, want_logits)
        return build_batch(self.config, [request], self.caches.geometry, self.device, self.hasher)

    def score(self, token_ids, chunk: int | None = None, trace=None) -> torch.Tensor:
        """float32 [len, V] logits of every position, prefilled in chunks."""
        self.caches.poison()
        token_ids = np.asarray(token_ids, dtype=np.int64)
        chunk = chunk or len(token_ids)
        parts = [
            self.model.forward(self.batch(token_ids, start, min(start + chunk, len(token_ids))), trace)
            for start in range(0, len(token_ids), chunk)
        ]
        return torch.cat(parts).cpu()

    def greedy(self, token_ids, steps: int) -> list[int]:
        """Greedy continuation by decoding one token at a time; ties to the lower id."""
        self.caches.poison()
        ids = [int(i) for i in token_ids]
        start, out = 0, []
        for _ in range(steps):
            logits = self.model.forward(self.batch(np.array(ids), start, len(ids), "last"))
            start = len(ids)
            out.append(int(logits[0].argmax()))
            ids.append(out[-1])
        return out
