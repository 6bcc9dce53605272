"""Random weights of the real shapes without files (`--load-format dummy`), made in the stored formats on the device.

Magnitudes are chosen so that a forward pass stays finite and does the work of a trained model: projections have a standard
deviation of 1/sqrt(K), norms are near 1, the router is nearly balanced, hyper-connections keep the streams bounded over 40
layers. Nothing is made as float first, except one slice of an FP8 matrix at a time.

Every tensor has a generator of its own, seeded from (seed, name): a value does not depend on the number of ranks. CPU and
CUDA generators differ, so the two devices hold different values.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from mini_deepinfer.config import ModelConfig
from mini_deepinfer.tensor_table import TensorSpec, expert_range, tensor_table
from mini_deepinfer.weights import EngramTable, Weights, allocate

DUMMY_TABLE_ROWS = 2**20  # height of the host table that stands in for an engram table
_SLICE_ELEMENTS = 2**24  # FP8 matrices are drawn in slices of this many bf16 values
_FP4_RMS = math.sqrt(8.5625)  # of uniformly drawn E2M1 codes
_BLOCK_RMS = math.sqrt((1.0 + 0.25) / 2)  # of scales that are s or s/2 with equal probability


def make_dummy_weights(config: ModelConfig, *, rank: int, world: int, device: torch.device, seed: int) -> Weights:
    """Weights as load_weights gives them; engram tables have `dummy_rows` set. See weights.dummy_weights."""
    experts = expert_range(config.n_routed_experts, world, rank)
    tensors, _ = allocate(config, experts, device)
    table = tensor_table(config)
    for name, tensor in tensors.items():
        spec = table.get(name)
        if spec is not None and spec.role != "block_scale":
            _fill_dense(spec, tensor, tensors, config, _generator(seed, name, device))
    for plan in config.layers:
        prefix = f"layers.{plan.index}.ffn.experts"
        stacks = {key: tensors[f"{prefix}.{key}"] for key in ("w13", "w13_scale", "w2", "w2_scale")}
        for local, expert in enumerate(experts):
            generator = _generator(seed, f"{prefix}.{expert}", device)
            for key, fan_in in (("w13", config.hidden_size), ("w2", config.moe_intermediate_size)):
                _fill_bytes(stacks[key][local], generator)
                _fill_fp4_scale(stacks[f"{key}_scale"][local], fan_in, generator)
    engram = {layer: _dummy_table(config, layer, height, seed)
              for layer, height in zip(config.engram_layer_ids, config.engram_num_embeddings)}
    return Weights(tensors, engram, experts, rank, world)


def name_seed(seed: int, name: str) -> int:
    """A generator seed that depends on both arguments only."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(name_seed(seed, name))


def _fill_dense(spec: TensorSpec, tensor: torch.Tensor, tensors: dict[str, torch.Tensor], config: ModelConfig,
                generator: torch.Generator) -> None:
    if spec.role == "fp8":
        _fill_fp8(tensor, tensors[spec.name.removesuffix("weight") + "scale"], generator)
        return
    mean, std = _plain_moments(spec, config)
    tensor.normal_(mean, std, generator=generator)
    if spec.name.endswith("_base"):  # every stream keeps mostly to itself, and new values enter at about half weight
        n = config.hc_mult
        tensor[n:2 * n] -= 1.0
        tensor[2 * n:].view(n, n).diagonal().add_(2.0)


def _plain_moments(spec: TensorSpec, config: ModelConfig) -> tuple[float, float]:
    """Mean and standard deviation of an unquantised tensor."""
    leaf = spec.name.rsplit(".", 1)[-1] if not spec.name.endswith(".weight") else spec.name.rsplit(".", 2)[-2]
    if "norm" in leaf or leaf in ("q_weight", "k_weight"):
        return 1.0, 0.05
    if leaf.startswith("hc_"):
        if leaf.endswith("_fn"):
            return 0.0, 1.0 / math.sqrt(spec.shape[1])
        return (0.3, 0.03) if leaf.endswith("_scale") else (0.0, 0.1)
    if leaf in ("embed", "attn_sink"):
        return 0.0, 1.0
    if leaf == "bias":
        return 0.0, 0.01
    return 0.0, 1.0 / math.sqrt(spec.shape[-1])  # head, router, compressor, indexer projections


def _fill_fp8(codes: torch.Tensor, scale: torch.Tensor, generator: torch.Generator) -> None:
    """codes float8_e4m3fn [O, K], scale uint8 tiles: normal values of standard deviation 1/sqrt(K), tile scales s or s/2."""
    rows, cols = codes.shape
    target = 1.0 / (math.sqrt(cols) * _BLOCK_RMS)
    exponent = math.floor(math.log2(target / 64.0))
    spread = target / 2.0**exponent  # 64..128 code units: below the format's 448 for 3.5 standard deviations and more
    step = max(1, _SLICE_ELEMENTS // cols)
    for first in range(0, rows, step):
        part = codes[first:first + step]
        values = torch.empty(part.shape, dtype=torch.bfloat16, device=codes.device)
        values.normal_(0.0, spread, generator=generator)
        part.copy_(values.clamp_(-448.0, 448.0))
    scale.random_(127 + exponent - 1, 127 + exponent + 1, generator=generator)


def _fill_bytes(target: torch.Tensor, generator: torch.Generator) -> None:
    """Uniform bytes in a contiguous uint8 tensor of a multiple of 8 bytes, eight with every draw."""
    target.view(-1).view(torch.int64).random_(-(2**63), None, generator=generator)


def _fill_fp4_scale(scale: torch.Tensor, fan_in: int, generator: torch.Generator) -> None:
    """E8M0 bytes of two neighbouring powers of two, mixed so that the mean square of code * scale is 1 / fan_in."""
    target = 1.0 / (fan_in * _FP4_RMS**2)
    low = math.floor(math.log2(target) / 2)
    share = (target / 4.0**low - 1.0) / 3.0  # of the higher one
    _fill_bytes(scale, generator)
    torch.lt(scale, min(255, round(share * 256)), out=scale)
    scale.add_(127 + low)


def _dummy_table(config: ModelConfig, layer: int, height: int, seed: int) -> EngramTable:
    """Codes with exponents -3..0 (root mean square 0.87, no NaN), scales 1 or 1/2."""
    rows, dim = min(height, DUMMY_TABLE_ROWS), config.engram_head_dim
    name = f"layers.{layer}.engram.embed"
    generator = np.random.default_rng(name_seed(seed, name))
    codes = np.frombuffer(bytearray(generator.bytes(rows * dim)), np.uint8).reshape(rows, dim)
    codes &= 0x9F
    codes |= 0x20
    scales = generator.integers(126, 128, (rows, dim // 32), dtype=np.uint8)
    return EngramTable(name, codes, scales, height, dummy_rows=rows)
