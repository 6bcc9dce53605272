"""What can be chosen when an engine starts: numeric profile and engine options, with their command-line flags."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mini_deepinfer.field_checks import check_int, fail

if TYPE_CHECKING:
    from mini_deepinfer.config import ModelConfig


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
            fail("compute_dtype", self.compute_dtype, "must be torch.float32 or torch.bfloat16")
        if self.wo_a not in ("bf16", "fp8"):
            fail("wo_a", self.wo_a, "must be 'bf16' or 'fp8'")


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
    cuda_graph: bool = _option(True, "on a GPU, decode steps are CUDA graphs (one process only)")
    seed: int = _option(0, "seed of sampling and of dummy weights", low=0)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, choices, low = getattr(self, f.name), f.metadata["choices"], f.metadata["low"]
            if choices and value not in choices:
                fail(f.name, value, f"must be one of {', '.join(choices)}")
            if isinstance(f.default, bool) and not isinstance(value, bool):
                fail(f.name, value, "must be true or false")
            if low is not None and not (f.default is None and value is None):
                check_int(f.name, value, low, 2**31 - 1)
        if self.ep_size > 1 and self.ep_loopback > 1:
            fail("ep_loopback", self.ep_loopback, f"cannot be combined with ep_size = {self.ep_size}")

    def check_model(self, config: ModelConfig) -> None:
        """Refuse options that do not fit the model. Raises ValueError."""
        for ratio in sorted({r for r in config.compress_ratios if r > 0}):
            if self.page_size % ratio:
                fail("page_size", self.page_size, f"must be a multiple of every compress ratio; the model has {ratio}")
        for name in ("ep_size", "ep_loopback"):
            if getattr(self, name) > config.n_routed_experts:
                fail(name, getattr(self, name), f"must not exceed n_routed_experts = {config.n_routed_experts}")

    def profile(self) -> NumericProfile:
        """The numeric profile these options ask for."""
        return NumericProfile(getattr(torch, self.dtype), self.activation_quant, self.wo_a, self.batch_invariant)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, **defaults: Any) -> None:
        """Add one flag per field; `defaults` replaces the default of single fields."""
        for f in dataclasses.fields(cls):
            flag, default = "--" + f.name.replace("_", "-"), defaults.get(f.name, f.default)
            shown = "auto" if default is None else default
            text = f.metadata["help"] + (f" (default {shown})" if shown != "" else "")
            if isinstance(f.default, bool):
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
                if "_" in f.name:
                    parser.add_argument("--no_" + f.name, dest=f.name, action="store_false", help=argparse.SUPPRESS)
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
