"""The table of stored tensors against the published inventory."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from mini_deepinfer.config import ModelConfig
from mini_deepinfer.tensor_table import component_totals, expert_range, is_skipped, tensor_table
from tests.golden import TINY_A

released_table = functools.cache(lambda: tensor_table(ModelConfig.released()))

RELEASED = {  # model spec 2.3
    "attention": (520, 5_069_721_600),
    "compressor": (11, 36_704_256),
    "indexer": (32, 45_130_752),
    "router": (120, 157_409_280),
    "hyper-connections": (240, 157_295_040),
    "norms": (81, 829_440),
    "shared experts": (240, 1_416_960_000),
    "routed experts": (92_160, 288_777_830_400),
    "engram tables": (4, 202_758_032_400),
    "engram projections": (8, 315_043_840),
    "embed": (1, 1_323_827_200),
    "head": (1, 1_323_827_200),
}


def test_released_inventory():
    config = ModelConfig.released()
    assert component_totals(config) == RELEASED
    table = released_table()
    assert len(table) == 93_418
    assert sum(spec.num_bytes for spec in table.values()) == 501_382_611_408
    counts: dict[str, int] = {}
    for spec in table.values():
        counts[spec.dtype] = counts.get(spec.dtype, 0) + 1
    assert counts["I8"] == 384 * 40 * 3 and counts["F32"] == 40 * 9


@pytest.mark.parametrize(("name", "dtype", "shape"), [
    ("layers.0.attn.wq_a.scale", "F8_E8M0", (40, 160)),
    ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
    ("layers.39.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
    ("layers.39.ffn.experts.383.w1.scale", "F8_E8M0", (2304, 160)),
    ("layers.0.ffn.experts.0.w2.scale", "F8_E8M0", (5120, 72)),
    ("layers.2.attn.compressor.wgate.weight", "BF16", (512, 5120)),
    ("layers.36.attn.indexer.weights_proj.weight", "BF16", (32, 5120)),
    ("layers.14.engram.embed.weight", "F8_E4M3", (384_016_682, 256)),
    ("layers.14.engram.embed.scale", "F8_E8M0", (384_016_682, 8)),
    ("layers.1.engram.wkv.weight", "F8_E4M3", (25_600, 6_144)),
    ("layers.5.hc_ffn_fn", "F32", (24, 20_480)),
])
def test_released_entries(name, dtype, shape):
    spec = released_table()[name]
    assert (spec.dtype, spec.shape) == (dtype, shape)


@pytest.mark.parametrize("name", [
    "layers.20.attn.compressor.wgate.weight",  # one token per group: nothing to weigh
    "layers.24.attn.indexer.wk.weight",  # reads the keys of layer 20
    "layers.3.attn.indexer.wq_b.weight",
    "layers.2.engram.embed.weight",
])
def test_tensors_that_must_not_exist(name):
    assert name not in released_table()


def test_matches_the_golden_index():
    names = json.loads((TINY_A / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(tensor_table(ModelConfig.from_folder(TINY_A))) == set(names)


def test_skip_list_is_exact():
    for name in ("mtp.0.main_proj.weight", "vision.blocks.0.norm1.weight", "aligner.w1.weight", "image_start", "image_end",
                 "image_newline", "layers.7.ffn.gate.bias_vl"):
        assert is_skipped(name)
    for name in ("image_start2", "image_token", "mtp", "visions.x", "layers.7.ffn.gate.bias", "layers.x.ffn.gate.bias_vl",
                 "ffn.gate.bias_vl", "layers.7.ffn.gate.bias_vl2"):
        assert not is_skipped(name)


def test_only_bias_vl_is_not_loaded():
    table = released_table()
    assert {name.rsplit(".", 1)[-1] for name, spec in table.items() if not spec.loaded} == {"bias_vl"}


def test_other_stream_counts():
    config = dataclasses.replace(ModelConfig.from_folder(TINY_A), hc_mult=2)
    table = tensor_table(config)
    assert table["layers.0.hc_attn_fn"].shape == (8, 512)
    assert table["layers.1.engram.wkv.weight"].shape == (3 * 256, 384)


@pytest.mark.parametrize(("experts", "world"), [(384, 4), (6, 4), (7, 3), (5, 5), (1, 1)])
def test_expert_ranges_cover_all(experts, world):
    ranges = [expert_range(experts, world, rank) for rank in range(world)]
    assert [e for r in ranges for e in r] == list(range(experts))
    sizes = [len(r) for r in ranges]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("experts", "world", "rank"), [(4, 5, 0), (4, 2, 2), (4, 2, -1), (4, 0, 0)])
def test_expert_range_refusals(experts, world, rank):
    with pytest.raises(ValueError, match="expert_range"):
        expert_range(experts, world, rank)
