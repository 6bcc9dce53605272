"""Model configuration, layer plan, numeric profile, engine options and environment variables.

`ModelConfig` holds the text model exactly as the checkpoint's config.json names it (model spec 1); every rule is
checked when the object is made, so whoever has a `ModelConfig` has a consistent one. `config.layers` is the only place
that knows which kind a layer is. Reading the JSON spelling variants is in `config_file.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


def _fail(name: str, value: object, rule: str) -> None:
    raise ValueError(f"config: {name} = {value!r}: {rule}")


def _check_int(name: str, value: object, low: int, high: int, multiple: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(name, value, "must be an integer")
    elif not low <= value <= high:
        _fail(name, value, f"must be in {low}..{high}")
    elif value % multiple:
        _fail(name, value, f"must be a multiple of {multiple}")


def _check_float(name: str, value: object, low: float, *, open_low: bool = True) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _fail(name, value, "must be a finite number")
    elif value < low or (open_low and value == low):
        _fail(name, value, f"must be {'>' if open_low else '>='} {low}")


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the compressed layers' rotary table (model spec 4.2)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_float("rope_scaling.factor", self.factor, 1.0, open_low=False)
        _check_float("rope_scaling.beta_slow", self.beta_slow, 0.0)
        _check_float("rope_scaling.beta_fast", self.beta_fast, 0.0)
        if self.beta_fast < self.beta_slow:
            _fail("rope_scaling.beta_fast", self.beta_fast, f"must be at least beta_slow = {self.beta_slow}")
        _check_int("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings, 1, 2**31 - 1)


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
            _check_int(name, getattr(self, name), low, high, multiple)
        for name, (limit, open_low) in _FLOAT_RULES.items():
            _check_float(name, getattr(self, name), limit, open_low=open_low)
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
                _fail("qk_rope_head_dim", self.qk_rope_head_dim, f"must not exceed {name} = {getattr(self, name)}")
        if self.num_attention_heads % self.o_groups:
            _fail("o_groups", self.o_groups, f"must divide num_attention_heads = {self.num_attention_heads}")
        if self.num_experts_per_tok > self.n_routed_experts:
            _fail("num_experts_per_tok", self.num_experts_per_tok,
                  f"must not exceed n_routed_experts = {self.n_routed_experts}")

    def _check_schedule(self) -> None:
        if len(self.compress_ratios) != self.num_hidden_layers:
            _fail("compress_ratios", self.compress_ratios,
                  f"needs one entry per layer, num_hidden_layers = {self.num_hidden_layers}")
        for i, ratio in enumerate(self.compress_ratios):
            _check_int(f"compress_ratios[{i}]", ratio, 0, 1024)
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            ids = getattr(self, name)
            for i in ids:
                _check_int(name, i, 0, self.num_hidden_layers - 1)
                if self.compress_ratios[i] == 0:
                    _fail(name, list(ids), f"layer {i} has compress ratio 0: it has nothing to own or select")
            if list(ids) != sorted(set(ids)):
                _fail(name, list(ids), "must be ascending without repeats")
        for plan in self.layers:
            if plan.ratio == 0:
                continue
            i, owner, source = plan.index, plan.kv_owner, plan.index_source
            if owner is None:
                _fail("kv_source_layer_ids", list(self.kv_source_layer_ids),
                      f"layer {i} (ratio {plan.ratio}) has no KV source at or before it")
            elif self.compress_ratios[owner] != plan.ratio:
                _fail("compress_ratios", list(self.compress_ratios),
                      f"layer {i} has ratio {plan.ratio} but reads the cache of layer {owner} with ratio "
                      f"{self.compress_ratios[owner]}")
            elif source is None or source < owner:
                _fail("index_source_layer_ids", list(self.index_source_layer_ids),
                      f"layer {i} reads the cache of layer {owner} and needs an index source in {owner}..{i}")
        self._check_candidates()

    def _check_candidates(self) -> None:
        source = self.candidate_source_layer_id
        if source is None:
            return
        _check_int("candidate_source_layer_id", source, 0, self.num_hidden_layers - 1)
        plan = self.layers[source]
        if not (plan.owns_kv and plan.owns_selection):
            _fail("candidate_source_layer_id", source,
                  "must be in both kv_source_layer_ids and index_source_layer_ids (an index source that owns its KV)")
        blocks, size = self.candidate_topk_blocks, self.candidate_block_size
        if blocks * size - (size - 1) < self.index_topk:
            _fail("candidate_topk_blocks", blocks,
                  f"{blocks} blocks of candidate_block_size = {size}, the newest of which may hold one entry, cannot "
                  f"supply index_topk = {self.index_topk} entries; need blocks * size - (size - 1) >= index_topk")

    def _check_engram(self) -> None:
        ids, heights = self.engram_layer_ids, self.engram_num_embeddings
        if len(ids) != len(heights):
            _fail("engram_num_embeddings", list(heights),
                  f"needs one height per layer of engram_layer_ids = {list(ids)}")
        if list(ids) != sorted(set(ids)):
            _fail("engram_layer_ids", list(ids), "must be ascending without repeats")
        for i in ids:
            _check_int("engram_layer_ids", i, 0, self.num_hidden_layers - 1)
        for height in heights:
            _check_int("engram_num_embeddings", height, 1, 2**40)
        if ids:
            _check_int("engram_pad_token_id", self.engram_pad_token_id, 0, self.vocab_size - 1)

    def _check_token_ids(self) -> None:
        _check_int("bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)
        for i in self.eos_token_id:
            _check_int("eos_token_id", i, 0, self.vocab_size - 1)
        for name in ("pad_token_id", "image_token_id"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, self.vocab_size - 1)


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


@dataclass(frozen=True)
class NumericProfile:
    """How the model rounds: compute dtype of activations, activation quantisation (model spec 8), format of wo_a.

    wo_a "bf16" dequantises wo_a to the compute dtype (reference profile), "fp8" runs it as an FP8 product. batch_invariant makes every
    library GEMM on a GPU one of a fixed number of rows, so that a row's bits do not depend on its batch (on a CPU that always holds).
    """

    compute_dtype: torch.dtype
    activation_quant: bool = True
    wo_a: str = "bf16"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.compute_dtype not in (torch.float32, torch.bfloat16):
            _fail("compute_dtype", self.compute_dtype, "must be torch.float32 or torch.bfloat16")
        if self.wo_a not in ("bf16", "fp8"):
            _fail("wo_a", self.wo_a, "must be 'bf16' or 'fp8'")


def _option(default: Any, help_text: str, *, choices: tuple[str, ...] = (), low: int | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices, "low": low})


@dataclass(frozen=True)
class EngineConfig:
    """Everything that can be chosen when an engine starts. Command-line flags are made from these fields.

    A bool field `x` becomes `--x` / `--no-x`; an int field with default None accepts `auto`.
    Raises ValueError naming the option, its value and the rule.
    """

    model: str = _option("", "checkpoint folder: config.json, model.safetensors.index.json, shards, tokenizer.json")
    dtype: str = _option("bfloat16", "compute dtype; float32 runs the reference operations",
                         choices=("bfloat16", "float32"))
    activation_quant: bool = _option(True, "quantise GEMM inputs to FP8 per 32 columns")
    wo_a: str = _option("bf16", "format of the wo_a product", choices=("bf16", "fp8"))
    batch_invariant: bool = _option(False, "on a GPU, library GEMMs of a fixed row count: bits independent of the batch")
    device: str = _option("auto", "device: cuda when there is one, else cpu", choices=("auto", "cpu", "cuda"))
    max_num_batched_tokens: int = _option(4096, "tokens in one step (prefill chunk)", low=1)
    max_num_seqs: int = _option(16, "requests in one step", low=1)
    page_size: int = _option(256, "tokens per cache page, a multiple of every compress ratio", low=1)
    num_pages: int | None = _option(None, "cache pages; auto = what fits in memory", low=1)
    max_model_len: int | None = _option(None, "longest request in tokens; auto = what fits", low=1)
    enable_prefix_caching: bool = _option(True, "share the cache pages of equal prefixes")
    replay: str = _option("full", "work after a prefix hit: full = exact", choices=("full",))
    load_format: str = _option("auto", "auto = read the checkpoint; dummy = random weights of the real shapes",
                               choices=("auto", "dummy"))
    ep_size: int = _option(1, "expert-parallel ranks, one process each", low=1)
    ep_loopback: int = _option(1, "act as rank 0 of this many ranks in one process (measurement)", low=1)
    seed: int = _option(0, "seed of sampling and of dummy weights", low=0)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, choices, low = getattr(self, f.name), f.metadata["choices"], f.metadata["low"]
            if choices and value not in choices:
                _fail(f.name, value, f"must be one of {', '.join(choices)}")
            if isinstance(f.default, bool) and not isinstance(value, bool):
                _fail(f.name, value, "must be true or false")
            if low is not None and not (f.default is None and value is None):
                _check_int(f.name, value, low, 2**31 - 1)
        if self.ep_size > 1 and self.ep_loopback > 1:
            _fail("ep_loopback", self.ep_loopback, f"cannot be combined with ep_size = {self.ep_size}")

    def check_model(self, config: ModelConfig) -> None:
        """Refuse options that do not fit the model. Raises ValueError."""
        for ratio in sorted({r for r in config.compress_ratios if r > 0}):
            if self.page_size % ratio:
                _fail("page_size", self.page_size, f"must be a multiple of every compress ratio; the model has {ratio}")
        for name in ("ep_size", "ep_loopback"):
            if getattr(self, name) > config.n_routed_experts:
                _fail(name, getattr(self, name), f"must not exceed n_routed_experts = {config.n_routed_experts}")

    def profile(self) -> NumericProfile:
        """The numeric profile these options ask for."""
        return NumericProfile(getattr(torch, self.dtype), self.activation_quant, self.wo_a)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, **defaults: Any) -> None:
        """Add one flag per field; `defaults` replaces the default of single fields."""
        for f in dataclasses.fields(cls):
            flag, default = "--" + f.name.replace("_", "-"), defaults.get(f.name, f.default)
            shown = "auto" if default is None else default
            text = f.metadata["help"] + (f" (default {shown})" if shown != "" else "")
            if isinstance(f.default, bool):
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
            elif isinstance(f.default, int) or f.default is None:
                kind = _int_or_auto if f.default is None else int
                parser.add_argument(flag, type=kind, default=default, help=text)
            else:
                parser.add_argument(flag, choices=f.metadata["choices"] or None, default=default, help=text)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EngineConfig:
        """The options of a parsed command line (attributes that are no fields are left alone)."""
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)})

    def changed(self) -> dict[str, Any]:
        """The options that differ from their default, for the start-up line."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}


def _int_or_auto(text: str) -> int | None:
    return None if text == "auto" else int(text)


@dataclass(frozen=True)
class EnvVariable:
    """One environment variable: `parse` turns its text into a value or raises ValueError saying what is allowed."""

    default: Any
    parse: Callable[[str], Any]
    help: str


def _parse_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _parse_level(text: str) -> int:
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if text.lower() not in levels:
        raise ValueError(f"must be one of {', '.join(levels)}")
    return levels[text.lower()]


def _parse_ops(text: str) -> dict[str, str]:
    """`reference` -> {"*": "reference"}; `attention.sparse=portable,indexer.logits=reference` -> per op."""
    chosen: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, separator, impl = item.rpartition("=")
        name = op.strip() if separator else "*"
        if not name or not impl.strip() or name in chosen:
            raise ValueError("must be IMPLEMENTATION or OP=IMPLEMENTATION,... with every op at most once")
        chosen[name] = impl.strip()
    return chosen


def _parse_archs(text: str) -> tuple[str, ...]:
    archs = tuple(part.strip() for part in text.split(",") if part.strip())
    if not archs or not all(a.rstrip("af").isdigit() for a in archs):
        raise ValueError("must be a comma-separated list such as 90a,100a")
    return archs


def _parse_jobs(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("must be a positive integer")
    return int(text)


ENVIRONMENT: dict[str, EnvVariable] = {
    "MDI_LOG": EnvVariable(logging.INFO, _parse_level, "log level: debug, info, warning or error"),
    "MDI_LOG_OPS": EnvVariable(False, _parse_switch, "1 = log every op with its shapes before the launch"),
    "MDI_OPS": EnvVariable({}, _parse_ops, "force implementations: reference, or attention.sparse=portable,..."),
    "MDI_SYNC": EnvVariable(False, _parse_switch, "1 = synchronise and check for errors after every op"),
    "MDI_CUDA_ARCHS": EnvVariable(("90a", "100a"), _parse_archs, "build: GPU architectures to compile for"),
    "MAX_JOBS": EnvVariable(None, _parse_jobs, "build: parallel compiler jobs"),
}


def read_env(name: str) -> Any:
    """The parsed value of one variable of ENVIRONMENT (unset or empty: its default). Raises ValueError naming it."""
    variable, text = ENVIRONMENT[name], os.environ.get(name, "")
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name} = {text!r}: {error}") from None


def check_environment() -> dict[str, Any]:
    """Parse every variable and refuse MDI_* names that do not exist (a misspelt one would silently do nothing)."""
    unknown = sorted(k for k in os.environ if k.startswith("MDI_") and k not in ENVIRONMENT)
    if unknown:
        raise ValueError(f"unknown environment variable {', '.join(unknown)}; known: {', '.join(ENVIRONMENT)}")
    return {name: read_env(name) for name in ENVIRONMENT}
