"""Model configuration and layer plan. The engine's options and environment variables are importable from here as well.

`ModelConfig` holds the text model exactly as the checkpoint's config.json names it (model spec 1); every rule is
checked when the object is made, so whoever has a `ModelConfig` has a consistent one. `config.layers` is the only place
that knows which kind a layer is. Reading the JSON spelling variants is in `config_file.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_deepinfer.engine_config import EngineConfig, NumericProfile
from mini_deepinfer.env_variables import ENVIRONMENT, EnvVariable, check_environment, read_env
from mini_deepinfer.field_checks import check_float, check_int, fail

__all__ = ["ENVIRONMENT", "EngineConfig", "EnvVariable", "LayerPlan", "ModelConfig", "NumericProfile", "RopeScaling",
           "check_environment", "read_env"]


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the compressed layers' rotary table (model spec 4.2)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_float("rope_scaling.factor", self.factor, 1.0, open_low=False)
        check_float("rope_scaling.beta_slow", self.beta_slow, 0.0)
        check_float("rope_scaling.beta_fast", self.beta_fast, 0.0)
        if self.beta_fast < self.beta_slow:
            fail("rope_scaling.beta_fast", self.beta_fast, f"must be at least beta_slow = {self.beta_slow}")
        check_int("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings, 1, 2**31 - 1)


@dataclass(frozen=True)
class LayerPlan:
    """What one layer owns and what it reads (model spec 1, table of layer kinds).

    ratio               0 = window only; r > 0 = one compressed entry for r tokens
    kv_owner            layer whose compressed cache this layer attends to (None for ratio 0)
    owns_kv             this layer has a compressor and writes compressed KV and index keys
    index_source        layer whose selection this layer uses (itself when owns_selection)
    owns_selection      this layer has an index query and selects
    index_key_owner     layer whose index keys are scored here (None unless owns_selection)
    is_candidate_source this layer publishes the candidate blocks
    uses_candidates     this layer scores only the candidate blocks
    engram              position of this layer in engram_layer_ids, None without engram
    """

    index: int
    ratio: int
    kv_owner: int | None
    owns_kv: bool
    index_source: int | None
    owns_selection: bool
    index_key_owner: int | None
    is_candidate_source: bool
    uses_candidates: bool
    engram: int | None


# field: (low, high, multiple). The multiples are the quantisation blocks (32) and the FP4 group pairs.
_INT_RULES: dict[str, tuple[int, int, int]] = {
    "vocab_size": (1, 2**31 - 1, 1),
    "hidden_size": (32, 2**20, 32),
    "num_hidden_layers": (1, 4096, 1),
    "num_attention_heads": (1, 4096, 1),
    "head_dim": (32, 4096, 32),
    "qk_rope_head_dim": (2, 4096, 2),
    "q_lora_rank": (32, 2**20, 32),
    "o_lora_rank": (32, 2**20, 32),
    "o_groups": (1, 4096, 1),
    "n_routed_experts": (1, 65535, 1),
    "n_shared_experts": (1, 1, 1),
    "num_experts_per_tok": (1, 64, 1),
    "moe_intermediate_size": (32, 2**20, 32),
    "sliding_window": (1, 2**20, 1),
    "index_n_heads": (1, 4096, 1),
    "index_head_dim": (32, 4096, 32),
    "index_topk": (1, 2**20, 1),
    "candidate_topk_blocks": (1, 2**20, 1),
    "candidate_block_size": (1, 2**16, 1),
    "hc_mult": (1, 64, 1),
    "hc_sinkhorn_iters": (1, 1000, 1),
    "engram_max_ngram_size": (2, 16, 1),
    "engram_vocab_size": (2, 2**31 - 1, 1),
    "engram_n_heads": (1, 256, 1),
    "engram_head_dim": (32, 65536, 32),
    "engram_compressed_vocab_size": (1, 2**31 - 1, 1),
    "max_position_embeddings": (1, 2**31 - 1, 1),
}
_FLOAT_RULES: dict[str, tuple[float, bool]] = {  # field: (low, low is excluded)
    "routed_scaling_factor": (0.0, True),
    "swiglu_limit": (0.0, False),
    "hc_eps": (0.0, False),
    "rms_norm_eps": (0.0, False),
    "rope_theta": (1.0, True),
    "compress_rope_theta": (1.0, True),
}


@dataclass(frozen=True)
class ModelConfig:
    """The text model's dimensions and schedule, field names as in config.json's text_config (model spec 1).

    swiglu_limit 0.0 means no clamp; candidate_source_layer_id None means that every reindex layer scores all entries;
    rope_scaling None means no YaRN; compress_ratios has exactly num_hidden_layers entries (draft layers are cut off).
    Raises ValueError naming the field, its value and the rule.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.0
    swiglu_limit: float = 0.0
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    index_n_heads: int = 1
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = None
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16_000_000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 1
    max_position_embeddings: int = 1_048_576
    bos_token_id: int = 0
    eos_token_id: tuple[int, ...] = (1,)
    pad_token_id: int | None = 2
    image_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high, multiple) in _INT_RULES.items():
            check_int(name, getattr(self, name), low, high, multiple)
        for name, (limit, open_low) in _FLOAT_RULES.items():
            check_float(name, getattr(self, name), limit, open_low=open_low)
        self._check_widths()
        self._check_schedule()
        self._check_engram()
        self._check_token_ids()

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed config.json (nested text_config or flat). Raises ValueError or TypeError naming the key."""
        from mini_deepinfer.config_file import parse_config

        return parse_config(raw)

    @staticmethod
    def from_folder(path: str | Path) -> ModelConfig:
        """Read PATH/config.json; generation_config.json's eos_token_id, when there is one, takes precedence."""
        from mini_deepinfer.config_file import read_config

        return read_config(Path(path))

    @staticmethod
    def released() -> ModelConfig:
        """The published DeepSeek-V4.1-Flash configuration."""
        from mini_deepinfer.config_file import RELEASED_CONFIG, parse_config

        return parse_config(RELEASED_CONFIG)

    @functools.cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """One LayerPlan per layer."""
        return _plan_layers(self)

    @property
    def kv_owners(self) -> tuple[int, ...]:
        """Layers that own a compressed cache and index keys, ascending."""
        return tuple(p.index for p in self.layers if p.owns_kv)

    @property
    def engram_rows_per_token(self) -> int:
        """Table rows read per token and engram layer: (max n-gram - 1) * heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def cache_bytes_per_token(self) -> float:
        """Bytes of paged cache (compressed KV and index keys) per token: 890 as released (model spec 9.1)."""
        row = self.head_dim // 2 + self.head_dim // 16 + self.index_head_dim // 2 + self.index_head_dim // 32
        return sum(row / self.layers[i].ratio for i in self.kv_owners)

    def _check_widths(self) -> None:
        for name in ("head_dim", "index_head_dim"):
            if self.qk_rope_head_dim > getattr(self, name):
                fail("qk_rope_head_dim", self.qk_rope_head_dim, f"must not exceed {name} = {getattr(self, name)}")
        if self.num_attention_heads % self.o_groups:
            fail("o_groups", self.o_groups, f"must divide num_attention_heads = {self.num_attention_heads}")
        if self.num_experts_per_tok > self.n_routed_experts:
            fail("num_experts_per_tok", self.num_experts_per_tok,
                  f"must not exceed n_routed_experts = {self.n_routed_experts}")

    def _check_schedule(self) -> None:
        if len(self.compress_ratios) != self.num_hidden_layers:
            fail("compress_ratios", self.compress_ratios,
                  f"needs one entry per layer, num_hidden_layers = {self.num_hidden_layers}")
        for i, ratio in enumerate(self.compress_ratios):
            check_int(f"compress_ratios[{i}]", ratio, 0, 1024)
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            ids = getattr(self, name)
            for i in ids:
                check_int(name, i, 0, self.num_hidden_layers - 1)
                if self.compress_ratios[i] == 0:
                    fail(name, list(ids), f"layer {i} has compress ratio 0: it has nothing to own or select")
            if list(ids) != sorted(set(ids)):
                fail(name, list(ids), "must be ascending without repeats")
        for plan in self.layers:
            if plan.ratio == 0:
                continue
            i, owner, source = plan.index, plan.kv_owner, plan.index_source
            if owner is None:
                fail("kv_source_layer_ids", list(self.kv_source_layer_ids),
                      f"layer {i} (ratio {plan.ratio}) has no KV source at or before it")
            elif self.compress_ratios[owner] != plan.ratio:
                fail("compress_ratios", list(self.compress_ratios),
                      f"layer {i} has ratio {plan.ratio} but reads the cache of layer {owner} with ratio "
                      f"{self.compress_ratios[owner]}")
            elif source is None or source < owner:
                fail("index_source_layer_ids", list(self.index_source_layer_ids),
                      f"layer {i} reads the cache of layer {owner} and needs an index source in {owner}..{i}")
        self._check_candidates()

    def _check_candidates(self) -> None:
        source = self.candidate_source_layer_id
        if source is None:
            return
        check_int("candidate_source_layer_id", source, 0, self.num_hidden_layers - 1)
        plan = self.layers[source]
        if not (plan.owns_kv and plan.owns_selection):
            fail("candidate_source_layer_id", source,
                  "must be in both kv_source_layer_ids and index_source_layer_ids (an index source that owns its KV)")
        blocks, size = self.candidate_topk_blocks, self.candidate_block_size
        if blocks * size - (size - 1) < self.index_topk:
            fail("candidate_topk_blocks", blocks,
                  f"{blocks} blocks of candidate_block_size = {size}, the newest of which may hold one entry, cannot "
                  f"supply index_topk = {self.index_topk} entries; need blocks * size - (size - 1) >= index_topk")

    def _check_engram(self) -> None:
        ids, heights = self.engram_layer_ids, self.engram_num_embeddings
        if len(ids) != len(heights):
            fail("engram_num_embeddings", list(heights),
                  f"needs one height per layer of engram_layer_ids = {list(ids)}")
        if list(ids) != sorted(set(ids)):
            fail("engram_layer_ids", list(ids), "must be ascending without repeats")
        for i in ids:
            check_int("engram_layer_ids", i, 0, self.num_hidden_layers - 1)
        for height in heights:
            check_int("engram_num_embeddings", height, 1, 2**40)
        if ids:
            check_int("engram_pad_token_id", self.engram_pad_token_id, 0, self.vocab_size - 1)

    def _check_token_ids(self) -> None:
        check_int("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)
        for i in self.eos_token_id:
            check_int("eos_token_id", i, 0, self.vocab_size - 1)
        for name in ("pad_token_id", "image_token_id"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, self.vocab_size - 1)


def _plan_layers(config: ModelConfig) -> tuple[LayerPlan, ...]:
    plans: list[LayerPlan] = []
    kv_owner: int | None = None
    index_source: int | None = None
    candidate_owner: int | None = None  # set once the candidate source has been passed
    for i, ratio in enumerate(config.compress_ratios):
        owns_kv = i in config.kv_source_layer_ids
        owns_selection = i in config.index_source_layer_ids
        kv_owner = i if owns_kv else kv_owner
        index_source = i if owns_selection else index_source
        live = ratio > 0
        plans.append(LayerPlan(
            index=i, ratio=ratio,
            kv_owner=kv_owner if live else None, owns_kv=owns_kv,
            index_source=index_source if live else None, owns_selection=owns_selection,
            index_key_owner=kv_owner if owns_selection else None,
            is_candidate_source=i == config.candidate_source_layer_id,
            uses_candidates=owns_selection and candidate_owner is not None and candidate_owner == kv_owner,
            engram=config.engram_layer_ids.index(i) if i in config.engram_layer_ids else None))
        if i == config.candidate_source_layer_id:
            candidate_owner = kv_owner
    return tuple(plans)
