"""How large the caches are made, decided and refused before a weight is read (docs/architecture.md, "State")."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch

from .config import EngineConfig, ModelConfig
from .decode_shapes import lengths_up_to, sizes_up_to, why_not
from .kv_cache import CacheGeometry, cache_bytes, page_bytes, window_bytes
from .ops.attention import EXPAND_READS
from .ops.linear import INVARIANT_ROWS
from .tensor_table import component_totals

MAX_SNAPSHOTS = 128  # window snapshots the prefix cache may keep: 2.7 MB each for the released model
CPU_CACHE_SHARE = 0.25  # of the free memory; a CPU run is for tiny models and shares the machine
GPU_RESERVE_BYTES = 2 * 2**30  # context, libraries, allocator slack
GRAPH_BASE_BYTES = 2**27  # the libraries' workspaces on the capturing stream, ends of the pool's segments, the driver's first graph
GRAPH_LAUNCHES_PER_LAYER = 48  # 38 in a decode step of the released model, 86 with padded products (batch_invariant)
GRAPH_LAUNCH_BYTES = 2**13  # what the driver keeps of a captured launch: 5.2 KiB over 20 shapes of the released model on an H200
# Components whose FP8 weights are re-expressed on a GPU when the model is made; both forms are there for a moment.
PREPARED_COMPONENTS = ("attention", "indexer", "shared experts", "engram projections")


@dataclass(frozen=True)
class CachePlan:
    """Sizes of one rank. `parts` is the memory table: bytes by name; `free_bytes` what the device has for all of it."""

    num_pages: int
    max_model_len: int
    snapshot_budget: int
    parts: dict[str, int]
    free_bytes: int


def free_memory(device: torch.device) -> int:
    """Bytes this process may still take on the device (CPU: free physical memory)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def workspace_bytes(config: ModelConfig, max_num_batched_tokens: int, max_model_len: int, world: int) -> int:
    """Upper estimate of what a step needs beside weights and caches, bf16.

    Per token: four copies of the streams, q and attention output twice, the routed rows of `world` ranks spread over as
    many, one row of index scores over the longest request with its selection, and the KV rows that attention may read
    expanded (model/step.py): those of an owner, and two of a layer's window.
    """
    streams = 4 * config.hc_mult * config.hidden_size * 2
    attention = 4 * config.num_attention_heads * config.head_dim * 2
    routed = config.num_experts_per_tok * (6 * config.moe_intermediate_size + 3 * config.hidden_size) * 2
    exchange = world * config.hidden_size * 6
    compresses = any(config.compress_ratios)
    scores = 2 * max_model_len * 2 if compresses else 0
    expanded = (2 + (config.index_topk // EXPAND_READS if compresses else 0)) * config.head_dim * 2
    per_token = streams + attention + routed + exchange + scores + expanded
    return max_num_batched_tokens * per_token + config.vocab_size * 4 * 64


def graph_bytes(config: ModelConfig, options: EngineConfig, max_model_len: int, world: int) -> int:
    """Upper estimate of what the CUDA graphs of all decode steps hold.

    Nothing a captured step computes outlives its capture except its logits, and all graphs share one memory pool, so shapes of one
    number of rows that differ in length reuse the memory of the longest. Between numbers of rows no reuse is assumed: what a small
    step gives back may be too short for a larger one. So: for every captured number of rows the workspace of a step of the longest
    length and its head's output; the logits of every shape; the launches as the driver keeps them.
    The released model, 16 requests of up to 131,072 tokens, loopback of four ranks on an H200: 704 MiB planned, 260 taken; with
    batch_invariant 1,195 and 410.
    """
    sizes = sizes_up_to(min(options.max_num_seqs, options.max_num_batched_tokens))
    num_lengths = len(lengths_up_to(max_model_len))
    logits = 4 * config.vocab_size  # of a row
    held = sum(workspace_bytes(config, size, max_model_len, world) + (1 + num_lengths) * size * logits for size in sizes)
    if options.batch_invariant:  # the padded products of a step, one after the other and of the same size in every shape
        held += INVARIANT_ROWS * (logits + 8 * config.num_attention_heads * config.head_dim)
    launches = len(sizes) * num_lengths * GRAPH_LAUNCHES_PER_LAYER * config.num_hidden_layers * (2 if options.batch_invariant else 1)
    return GRAPH_BASE_BYTES + held + launches * GRAPH_LAUNCH_BYTES


@lru_cache(maxsize=4)
def _prepared_bytes(config: ModelConfig) -> int:
    totals = component_totals(config)
    return sum(totals[name][1] for name in PREPARED_COMPONENTS)


def plan_caches(
    config: ModelConfig, options: EngineConfig, device: torch.device, *, weight_bytes: int, free_bytes: int, world: int
) -> CachePlan:
    """Choose num_pages and max_model_len where they are automatic.

    Raises:
        ValueError  the plan cannot fit, with the numbers; max_model_len beyond the model's limit
    """
    limit = config.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > limit:
        raise ValueError(f"engine: max_model_len must be at most the model's {limit}, got {options.max_model_len}")
    lengths = [options.max_model_len] if options.max_model_len is not None else _halvings(limit, options.page_size)
    for length in lengths:
        plan = _plan(config, options, device, length, weight_bytes, free_bytes, world)
        needed = -(-length // options.page_size)
        if options.num_pages is not None and options.max_model_len is None:
            needed = 1  # explicit pages bound the automatic length, not the other way round
        if plan.num_pages >= needed and sum(plan.parts.values()) <= free_bytes:
            return plan
    gib = {name: f"{size / 2**30:.3f}" for name, size in plan.parts.items()}
    raise ValueError(
        f"engine: max_model_len={plan.max_model_len} with max_num_batched_tokens={options.max_num_batched_tokens} and "
        f"max_num_seqs={options.max_num_seqs} does not fit: {needed} pages of {options.page_size} tokens wanted, "
        f"{plan.num_pages} possible; GiB planned {gib} of {free_bytes / 2**30:.3f} GiB free on {device}. Lower these "
        "options, set num_pages, turn cuda_graph off, or use more expert-parallel ranks."
    )


def _halvings(longest: int, page_size: int) -> list[int]:
    lengths = [longest]
    while lengths[-1] > page_size:
        lengths.append(max(page_size, lengths[-1] // 2))
    return lengths


def _plan(
    config: ModelConfig,
    options: EngineConfig,
    device: torch.device,
    length: int,
    weight_bytes: int,
    free_bytes: int,
    world: int,
) -> CachePlan:
    geometry = CacheGeometry.of(
        config,
        num_pages=1,
        page_size=options.page_size,
        num_slots=options.max_num_seqs,
        max_tokens=options.max_num_batched_tokens,
    )
    fixed = cache_bytes(config, geometry)
    snapshots = MAX_SNAPSHOTS * window_bytes(config, config.sliding_window) if options.enable_prefix_caching else 0
    parts = {
        "weights": weight_bytes,
        "window rows": fixed["window"] + fixed["tails"],
        "window snapshots (at most)": snapshots,
        "workspace (estimate)": workspace_bytes(config, options.max_num_batched_tokens, length, world),
    }
    if device.type == "cuda":
        parts["prepared weights"] = _prepared_bytes(config)
        parts["reserve"] = GPU_RESERVE_BYTES
    processes = 1 if options.ep_loopback > 1 else world
    if options.cuda_graph and why_not(device, options.profile(), processes) is None:
        parts["decode graphs (at most)"] = graph_bytes(config, options, length, world)
    per_page = page_bytes(config, options.page_size)
    wanted = options.max_num_seqs * geometry.pages_for(length)
    if options.num_pages is not None:
        num_pages = options.num_pages
    else:
        room = free_bytes - sum(parts.values())
        if device.type == "cpu":
            room = min(room, int(CPU_CACHE_SHARE * free_bytes))
        most = 2**31 // options.page_size - 1  # rows are indexed with int32
        num_pages = max(0, min(wanted, most, room // per_page if per_page else wanted))
    if options.max_model_len is None and options.num_pages is not None:
        length = min(length, num_pages * options.page_size)
    parts["pages"] = num_pages * per_page
    return CachePlan(num_pages, length, snapshots, parts, free_bytes)
