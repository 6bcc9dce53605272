"""The `cases` checkpoint exercises every feature: taking one away must change the logits far beyond any tolerance."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mini_deepinfer.model.engram import RowFetch
from mini_deepinfer.tiny_checkpoint import preset_config, write_tiny_checkpoint
from tests.golden import Runner

TOLERANCE = 1e-5  # of the float32 CPU path between two ways of computing the same thing
IDS = np.random.default_rng(0).integers(4, 512, 40)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    write_tiny_checkpoint(folder, preset_config("cases"))
    return Runner(folder, max_tokens=64)


@pytest.fixture(scope="module")
def logits(runner):
    out = runner.score(IDS)
    assert out.isfinite().all() and 1.0 < out.std() < 5.0
    return out


CONFIG_CHANGES = {
    "no clamp": {"swiglu_limit": 0.0},
    "window one shorter": {"sliding_window": 7},
    "one key fewer": {"index_topk": 4},
    "no routed scaling": {"routed_scaling_factor": 1.0},
    "no candidate filter": {"candidate_source_layer_id": None},
    "no YaRN": {"rope_scaling": None},
    "one rotary base": {"compress_rope_theta": 10000.0},
    "one Sinkhorn iteration": {"hc_sinkhorn_iters": 1},
    "one expert fewer": {"num_experts_per_tok": 1},
}
WEIGHT_CHANGES = {
    "no router bias": ("gate.bias", 0.0),
    "sink of 0": ("attn_sink", 0.0),
    "mean pooling": ("compressor.wgate", 0.0),
    "equal index heads": ("weights_proj", 1.0),
    "flat mixing base": ("hc_attn_base", 0.0),
    "flat engram key weight": ("engram.k_weight", 1.0),
    "no engram": ("engram.wkv.scale", 0),
}


@pytest.mark.parametrize("change", CONFIG_CHANGES)
def test_config_features_matter(runner, logits, change):
    runner.reload(edit_config=lambda config: dataclasses.replace(config, **CONFIG_CHANGES[change]))
    assert (runner.score(IDS) - logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("change", WEIGHT_CHANGES)
def test_weight_features_matter(runner, logits, change):
    part, value = WEIGHT_CHANGES[change]

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        changed = [tensor.fill_(value) for name, tensor in tensors.items() if part in name]
        assert changed

    runner.reload(edit_weights=edit)
    assert (runner.score(IDS) - logits).abs().max() > 100 * TOLERANCE


def test_rows_fetched_ahead(runner):
    """Model.prefetch starts every fetch once and changes nothing else of the batch; the model takes either form."""
    runner.reload()
    batch = runner.batch(IDS, 0, len(IDS))
    ahead = runner.model.prefetch(batch)
    assert len(ahead.engram_rows) == len(runner.config.engram_layer_ids) > 0
    assert all(a is b for a, b in zip(runner.model.prefetch(ahead).engram_rows, ahead.engram_rows))
    assert all(isinstance(rows, RowFetch) for rows in ahead.engram_rows)
    assert dataclasses.replace(ahead, engram_rows=batch.engram_rows) == batch
    runner.caches.poison()
    got = runner.model.forward(ahead)
    runner.caches.poison()
    assert torch.equal(got, runner.model.forward(batch))


def test_weights_that_another_model_packed(runner):
    with pytest.raises(ValueError, match=r"layers\.2\.ffn\.experts\.w2: .* a second Model needs weights of its own"):
        runner.reload(edit_weights=lambda tensors: tensors.pop("layers.2.ffn.experts.w2"))
    runner.reload()
