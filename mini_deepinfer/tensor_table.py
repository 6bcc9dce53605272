"""Every tensor of the checkpoint's text part, derived from the config (model spec 2).

One table serves the loader, the checker, the dummy loader and the writer of tiny checkpoints: name, stored dtype, shape
and component of each tensor, in layer order. Nothing else in the package spells a checkpoint tensor's shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mini_deepinfer.config import LayerPlan, ModelConfig

# Bytes per element of the safetensors dtypes that occur. I8 holds two FP4 codes per byte, low nibble first.
DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}

# What a complete checkpoint holds besides the text part (model spec 2.3).
SKIP_PREFIXES = ("mtp.", "vision.", "aligner.")
SKIP_NAMES = frozenset({"image_start", "image_end", "image_newline"})
SKIP_PATTERN = re.compile(r"layers\.\d+\.ffn\.gate\.bias_vl")  # router bias of image tokens

COMPONENTS = ("attention", "compressor", "indexer", "router", "hyper-connections", "norms", "shared experts",
              "routed experts", "engram tables", "engram projections", "embed", "head")

BLOCK = 32  # side of an FP8 weight's scale tile, and columns per FP4 or engram scale


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor.

    role     what the numbers are: fp8 | block_scale | fp4 | row_scale | plain | engram | engram_scale
    expert   expert id of a routed expert's tensor, else None
    loaded   False for tensors that belong to the text layers but are not used for text (bias_vl)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    component: str
    role: str = "plain"
    layer: int | None = None
    expert: int | None = None
    loaded: bool = True

    @property
    def num_bytes(self) -> int:
        """Stored size in bytes."""
        total = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            total *= extent
        return total


def is_skipped(name: str) -> bool:
    """Whether a tensor name is outside the text model by the explicit list above."""
    return name.startswith(SKIP_PREFIXES) or name in SKIP_NAMES or SKIP_PATTERN.fullmatch(name) is not None


def tensor_table(config: ModelConfig) -> dict[str, TensorSpec]:
    """All text tensors of a checkpoint with this config by name, globals first, then layer by layer."""
    return {spec.name: spec for spec in _all_specs(config)}


def component_totals(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """component -> (tensors, bytes), in the order of COMPONENTS (model spec 2.3)."""
    totals = {name: [0, 0] for name in COMPONENTS}
    for spec in _all_specs(config):
        totals[spec.component][0] += 1
        totals[spec.component][1] += spec.num_bytes
    return {name: (count, size) for name, (count, size) in totals.items()}


def expert_range(num_experts: int, world: int, rank: int) -> range:
    """Experts of one rank: contiguous; the first num_experts % world ranks hold one more. Raises ValueError."""
    if not (world >= 1 and 0 <= rank < world):
        raise ValueError(f"expert_range: rank = {rank} must be in 0..world-1, world = {world}")
    if world > num_experts:
        raise ValueError(f"expert_range: world = {world} must not exceed the {num_experts} experts")
    size, rest = divmod(num_experts, world)
    first = rank * size + min(rank, rest)
    return range(first, first + size + (rank < rest))


def _all_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield TensorSpec("embed.weight", "BF16", (vocab, hidden), "embed")
    yield TensorSpec("head.weight", "BF16", (vocab, hidden), "head")
    yield TensorSpec("norm.weight", "BF16", (hidden,), "norms")
    for plan in config.layers:
        yield from _layer_specs(config, plan)


def _layer_specs(config: ModelConfig, plan: LayerPlan) -> Iterator[TensorSpec]:
    i, hidden, heads, n = plan.index, config.hidden_size, config.num_attention_heads, config.hc_mult
    prefix = f"layers.{i}."

    def plain(name: str, shape: tuple[int, ...], component: str, dtype: str = "BF16", *,
              loaded: bool = True) -> TensorSpec:
        return TensorSpec(prefix + name, dtype, shape, component, layer=i, loaded=loaded)

    def fp8(name: str, rows: int, cols: int, component: str) -> Iterator[TensorSpec]:
        tiles = (-(-rows // BLOCK), -(-cols // BLOCK))
        yield TensorSpec(f"{prefix}{name}.weight", "F8_E4M3", (rows, cols), component, "fp8", i)
        yield TensorSpec(f"{prefix}{name}.scale", "F8_E8M0", tiles, component, "block_scale", i)

    def fp4(name: str, rows: int, cols: int, expert: int) -> Iterator[TensorSpec]:
        full = f"{prefix}ffn.experts.{expert}.{name}"
        yield TensorSpec(f"{full}.weight", "I8", (rows, cols // 2), "routed experts", "fp4", i, expert)
        yield TensorSpec(f"{full}.scale", "F8_E8M0", (rows, cols // BLOCK), "routed experts", "row_scale", i, expert)

    # attention (every layer)
    per_group = heads * config.head_dim // config.o_groups
    yield from fp8("attn.wq_a", config.q_lora_rank, hidden, "attention")
    yield plain("attn.q_norm.weight", (config.q_lora_rank,), "attention")
    yield from fp8("attn.wq_b", heads * config.head_dim, config.q_lora_rank, "attention")
    yield from fp8("attn.wkv", config.head_dim, hidden, "attention")
    yield plain("attn.kv_norm.weight", (config.head_dim,), "attention")
    yield from fp8("attn.wo_a", config.o_groups * config.o_lora_rank, per_group, "attention")
    yield from fp8("attn.wo_b", hidden, config.o_groups * config.o_lora_rank, "attention")
    yield plain("attn.attn_sink", (heads,), "attention", "F32")
    if plan.owns_kv:
        yield plain("attn.compressor.wkv.weight", (config.head_dim, hidden), "compressor")
        if plan.ratio > 1:  # a group of one token needs no pooling weights
            yield plain("attn.compressor.wgate.weight", (config.head_dim, hidden), "compressor")
        yield plain("attn.compressor.norm.weight", (config.head_dim,), "compressor")
        yield plain("attn.indexer.wk.weight", (config.index_head_dim, config.head_dim), "indexer")
        yield plain("attn.indexer.k_norm.weight", (config.index_head_dim,), "indexer")
    if plan.owns_selection:
        yield from fp8("attn.indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank, "indexer")
        yield plain("attn.indexer.weights_proj.weight", (config.index_n_heads, hidden), "indexer")

    # norms and hyper-connections
    yield plain("attn_norm.weight", (hidden,), "norms")
    yield plain("ffn_norm.weight", (hidden,), "norms")
    for site in ("attn", "ffn"):
        yield plain(f"hc_{site}_fn", (2 * n + n * n, n * hidden), "hyper-connections", "F32")
        yield plain(f"hc_{site}_base", (2 * n + n * n,), "hyper-connections", "F32")
        yield plain(f"hc_{site}_scale", (3,), "hyper-connections", "F32")

    # mixture of experts
    inner = config.moe_intermediate_size
    yield plain("ffn.gate.weight", (config.n_routed_experts, hidden), "router")
    yield plain("ffn.gate.bias", (config.n_routed_experts,), "router", "F32")
    yield plain("ffn.gate.bias_vl", (config.n_routed_experts,), "router", "F32", loaded=False)
    for name, rows, cols in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
        yield from fp8(f"ffn.shared_experts.{name}", rows, cols, "shared experts")
    for expert in range(config.n_routed_experts):
        yield from fp4("w1", inner, hidden, expert)
        yield from fp4("w3", inner, hidden, expert)
        yield from fp4("w2", hidden, inner, expert)

    if plan.engram is not None:
        rows, dim = config.engram_num_embeddings[plan.engram], config.engram_head_dim
        yield TensorSpec(f"{prefix}engram.embed.weight", "F8_E4M3", (rows, dim), "engram tables", "engram", i)
        yield TensorSpec(f"{prefix}engram.embed.scale", "F8_E8M0", (rows, dim // BLOCK), "engram tables",
                         "engram_scale", i)
        yield from fp8("engram.wkv", (n + 1) * hidden, config.engram_rows_per_token * dim, "engram projections")
        yield plain("engram.q_weight", (n, hidden), "engram projections")
        yield plain("engram.k_weight", (n, hidden), "engram projections")
