"""From an engine's options to its parts: memory plan, tokenizer, weights, caches, and the lines it prints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from . import report
from .cache_plan import CachePlan, free_memory, plan_caches
from .checkpoint import memory_plan
from .config import EngineConfig, ModelConfig
from .engram import NO_TOKEN, EngramHasher, synthetic_token_map, token_map_from_folder
from .kv_cache import Caches
from .parallel import ExpertParallel
from .tokenizer import Tokenizer
from .weights import Weights, dummy_weights, load_weights


def plan_memory(config: ModelConfig, options: EngineConfig, device: torch.device, world: int) -> CachePlan:
    """The plan of one of `world` ranks for what is free on the device now. Raises ValueError where it cannot fit."""
    weight_bytes = memory_plan(config, (world,)).weights_per_rank[world]
    return plan_caches(config, options, device, weight_bytes=weight_bytes, free_bytes=free_memory(device), world=world)


def make_caches(config: ModelConfig, options: EngineConfig, num_pages: int, device: torch.device) -> Caches:
    return Caches(
        config,
        num_pages=num_pages,
        page_size=options.page_size,
        num_slots=options.max_num_seqs,
        max_tokens=options.max_num_batched_tokens,
        device=device,
    )


def read_tokenizer(config: ModelConfig, options: EngineConfig) -> tuple[Tokenizer | None, EngramHasher | None, np.ndarray | None]:
    """Tokenizer, engram hash and the ids that have a token. Dummy weights need none of the checkpoint's files."""
    folder = Path(options.model)
    has_tokenizer = bool(options.model) and (folder / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_folder(folder, config) if has_tokenizer else None
    if not config.engram_layer_ids:
        return tokenizer, None, None
    dummy = options.load_format == "dummy"
    token_map = synthetic_token_map(config) if dummy else token_map_from_folder(folder, config)
    return tokenizer, EngramHasher(config, token_map), token_map != NO_TOKEN


def read_weights(config: ModelConfig, options: EngineConfig, parallel: ExpertParallel, device: torch.device) -> Weights:
    """This rank's weights, from the checkpoint or random."""
    if options.load_format == "dummy":
        return dummy_weights(config, rank=parallel.rank, world=parallel.world, device=device, seed=options.seed)
    return load_weights(options.model, config, rank=parallel.rank, world=parallel.world, device=device)


def show_start(config: ModelConfig, options: EngineConfig, device: torch.device, plan: CachePlan) -> None:
    """Build, options, memory table and cache sizes, for people."""
    lines = [
        report.build_line(device),
        "options " + ", ".join(f"{name}={value}" for name, value in options.changed().items()),
        report.memory_table(plan.parts, total_bytes=plan.free_bytes),
        f"cache: {plan.num_pages} pages of {options.page_size} tokens, max_model_len {plan.max_model_len}; prefix cache "
        + (f"on, hit unit {options.page_size} tokens" if options.enable_prefix_caching else "off"),
    ]
    report.show("\n".join(lines))
