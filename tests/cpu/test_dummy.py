"""Dummy weights: the same dictionary as a loaded checkpoint, independent of the rank count, with usable magnitudes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from mini_deepinfer import dummy_weights as dummy_module
from mini_deepinfer.batch import ChunkRequest, build_batch
from mini_deepinfer.config import ModelConfig, NumericProfile
from mini_deepinfer.engram import EngramHasher, synthetic_token_map
from mini_deepinfer.kv_cache import Caches
from mini_deepinfer.model import Model
from mini_deepinfer.ops.reference import number_formats
from mini_deepinfer.parallel import SingleProcess
from mini_deepinfer.weights import dummy_weights, load_weights
from tests.golden import TINY_A


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_folder(TINY_A)


@pytest.fixture(scope="module")
def weights(config):
    return dummy_weights(config, seed=1)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_same_dictionary_as_a_checkpoint(config, weights):
    loaded = load_weights(TINY_A, config, progress=False)
    assert {k: (v.dtype, v.shape) for k, v in weights.tensors.items()} == {
        k: (v.dtype, v.shape) for k, v in loaded.tensors.items()}
    assert list(weights.engram) == list(loaded.engram) and weights.num_bytes == loaded.num_bytes


@pytest.mark.parametrize("world", [2, 3, 4])
def test_independent_of_the_number_of_ranks(config, weights, world):
    for rank in range(world):
        part = dummy_weights(config, rank=rank, world=world, seed=1)
        for name, tensor in part.tensors.items():
            whole = weights.tensors[name]
            whole = whole[part.experts.start:part.experts.stop] if ".ffn.experts." in name else whole
            assert torch.equal(as_bytes(tensor), as_bytes(whole)), name


def test_seed_and_position_matter(config, weights):
    other = dummy_weights(config, seed=2).tensors
    same = dummy_weights(config, seed=1).tensors
    for name in ("embed.weight", "layers.3.ffn.experts.w13", "layers.3.attn.wq_b.weight"):
        assert torch.equal(as_bytes(same[name]), as_bytes(weights.tensors[name]))
        assert not torch.equal(as_bytes(other[name]), as_bytes(weights.tensors[name]))
    stack = weights.tensors["layers.3.ffn.experts.w13"]
    assert not torch.equal(stack[0], stack[1])
    assert not torch.equal(stack, weights.tensors["layers.4.ffn.experts.w13"])


def test_no_nan_codes_or_scales(weights):
    for name, tensor in weights.tensors.items():
        if name.endswith("scale") and tensor.dtype == torch.uint8:
            assert tensor.max() < 255 and tensor.min() > 0, name
            assert int(tensor.max()) - int(tensor.min()) <= 1, name  # little spread: folding per row stays exact
        elif tensor.dtype != torch.uint8:
            assert tensor.float().isfinite().all(), name


def test_projections_have_unit_gain(weights):
    tensors = weights.tensors
    for name, codes in tensors.items():
        if codes.dtype == torch.float8_e4m3fn and codes.numel() > 60_000:
            scale = number_formats.decode_e8m0(tensors[name.removesuffix("weight") + "scale"])
            values = codes.float() * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
            assert 0.85 < values.std() * math.sqrt(codes.shape[1]) < 1.15, name
    for key, fan_in in (("w13", 256), ("w2", 128)):
        for layer in (0, 7):
            prefix = f"layers.{layer}.ffn.experts.{key}"
            values = number_formats.dequant_mxfp4(tensors[prefix], tensors[f"{prefix}_scale"])
            assert 0.95 < values.std() * math.sqrt(fan_in) < 1.05, prefix


@pytest.mark.parametrize("fan_in", [32, 64, 128, 2304, 5120, 8192])
def test_fp4_scale_mixture(fan_in):
    scale = torch.empty(4096, dtype=torch.uint8)
    dummy_module._fill_fp4_scale(scale, fan_in, torch.Generator().manual_seed(0))
    mean_square = (number_formats.decode_e8m0(scale) ** 2).mean() * 8.5625
    assert 0.95 < mean_square * fan_in < 1.05


def test_engram_stand_in(config, weights, monkeypatch):
    table = weights.engram[4]
    assert (table.num_rows, table.dummy_rows) == (834, 834)
    codes, scales = table.gather(torch.arange(834))
    assert number_formats.dequant_fp8_ue8m0(codes, scales).isfinite().all()
    monkeypatch.setattr(dummy_module, "DUMMY_TABLE_ROWS", 100)
    small = dummy_weights(config, seed=1).engram[4]
    assert (small.num_rows, small.dummy_rows) == (834, 100)
    assert torch.equal(small.gather(torch.tensor([733]))[0], small.gather(torch.tensor([33]))[0])
    with pytest.raises(ValueError, match="834 rows"):
        small.gather(torch.tensor([834]))


def test_synthetic_token_map(config):
    token_map = synthetic_token_map(config)
    hasher = EngramHasher(config, token_map)
    assert int(token_map.max()) + 1 == config.engram_compressed_vocab_size
    assert hasher.row_ids([511, 0, 3], 0, 3).shape == (3, 2, 6)


def test_other_shapes():
    config = dataclasses.replace(ModelConfig.from_folder(TINY_A), hc_mult=2, engram_layer_ids=(), engram_num_embeddings=())
    weights = dummy_weights(config)
    assert weights.tensors["layers.0.hc_attn_base"].shape == (8,) and not weights.engram


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_finite_and_the_router_balanced(config, weights, dtype):
    config = dataclasses.replace(config, image_token_id=None)
    cpu = torch.device("cpu")
    caches = Caches(config, num_pages=8, page_size=16, num_slots=1, max_tokens=128, device=cpu)
    model = Model(config, NumericProfile(dtype), weights, caches, SingleProcess(), cpu, max_model_len=128)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 128)
    hasher = EngramHasher(config, synthetic_token_map(config))
    batch = build_batch(config, [ChunkRequest(ids, 0, 128, 0, list(range(8)), "all")], caches.geometry, cpu, hasher)
    seen: dict[tuple[str, int], torch.Tensor] = {}
    logits = model.forward(batch, lambda name, layer, tensor: seen.update({(name, layer): tensor.clone()}))
    assert logits.isfinite().all() and 0.5 < logits.std() < 2.0
    for layer in range(config.num_hidden_layers):
        size = seen["streams", layer].float().square().mean().sqrt()
        assert 0.5 < size < 4.0, layer
        load = torch.bincount(seen["router_ids", layer].flatten().long(), minlength=config.n_routed_experts)
        assert load.min() > 0 and load.max() < 2.5 * load.float().mean(), (layer, load.tolist())
