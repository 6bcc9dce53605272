"""The writer of tiny checkpoints: valid, deterministic, small, correctly quantised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mini_deepinfer.checkpoint import check_checkpoint
from mini_deepinfer.config import ModelConfig
from mini_deepinfer.engram import EngramHasher, token_map_from_folder
from mini_deepinfer.ops.reference import number_formats
from mini_deepinfer.tiny_checkpoint import (
    PRESETS,
    preset_config,
    quantise_blocks,
    random_tensors,
    train_tokenizer,
    write_tiny_checkpoint,
)
from mini_deepinfer.tokenizer import Tokenizer
from mini_deepinfer.weights import load_weights

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_complete(tmp_path, preset):
    config = write_tiny_checkpoint(tmp_path, preset_config(preset), seed=3)
    assert config == ModelConfig.from_folder(tmp_path)
    report = check_checkpoint(tmp_path, config)
    assert report.ok and report.skipped == 0
    weights = load_weights(tmp_path, config, progress=False)
    for name, tensor in weights.tensors.items():
        if tensor.dtype != torch.uint8:
            assert tensor.float().isfinite().all(), name
    assert Tokenizer.from_folder(tmp_path, config).decode([300, 301, 302])
    if config.engram_layer_ids:
        hasher = EngramHasher(config, token_map_from_folder(tmp_path, config))
        rows = hasher.row_ids(list(range(4, 512)), 0, 508)
        weights.engram[1].gather(rows[:, 0].reshape(-1))
    if preset != "cases-gpu":
        assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 5e6


def test_cases_preset_has_the_intended_schedule(tmp_path):
    config = write_tiny_checkpoint(tmp_path, preset_config("cases"))
    assert config.kv_owners == (1, 4) and config.sliding_window == 8 and config.index_topk == 5
    assert (config.n_routed_experts, config.num_experts_per_tok, config.engram_layer_ids) == (8, 2, (1,))
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sum("compressor.wkv" in n for n in names) == 2 and sum("compressor.wgate" in n for n in names) == 1
    assert sum("indexer.wk." in n for n in names) == 2 and sum("indexer.weights_proj" in n for n in names) == 4


def test_deterministic_in_the_seed(tmp_path):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny_checkpoint(tmp_path / folder, preset_config("cases"), seed=seed)
    read = {f: {p.name: p.read_bytes() for p in (tmp_path / f).iterdir()} for f in "abc"}
    assert read["a"] == read["b"]
    assert read["a"]["tokenizer.json"] == read["c"]["tokenizer.json"]
    assert read["a"]["model-00001-of-00002.safetensors"] != read["c"]["model-00001-of-00002.safetensors"]


def test_rewriting_leaves_no_old_shards(tmp_path):
    write_tiny_checkpoint(tmp_path, preset_config("cases"), num_shards=4)
    write_tiny_checkpoint(tmp_path, preset_config("cases"), num_shards=1)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors*")) == ["model.safetensors"]


def test_block_quantisation():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    weight[:32, :32] *= 1e-3
    codes, scale = quantise_blocks(weight)
    value = number_formats.decode_e8m0(scale).repeat_interleave(32, 0).repeat_interleave(32, 1)
    back = codes.float() * value
    assert scale.shape == (2, 3) and scale[0, 0] < scale[1, 1]
    # e4m3 keeps 4 significant bits; below its normal range the step is 2^-9 scales
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, value * 2.0**-10)).all()
    tile_max = codes.float().abs().view(2, 32, 3, 32).amax((1, 3))
    assert ((tile_max > 224 * 0.96) & (tile_max <= 448)).all()  # the smallest power of two that fits


def test_scales_have_spread(tmp_path):
    tensors = random_tensors(ModelConfig.from_dict({**preset_config("variant")}), 0)
    scale = tensors["layers.0.ffn.experts.0.w1.scale"].view(torch.uint8)
    assert scale.unique().numel() >= 3 and scale.max() < 255


def test_tokenizer_is_exact():
    tokenizer = train_tokenizer(400)
    assert tokenizer.get_vocab_size() == 400
    assert [tokenizer.token_to_id(t) for t in ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|pad|>", "<|image|>")] == [
        0, 1, 2, 3]
    for size in (100, 100_000):
        with pytest.raises(ValueError, match=f"vocab_size = {size}"):
            train_tokenizer(size)


def test_unknown_preset():
    with pytest.raises(ValueError, match="no preset 'huge'; there are tiny, cases"):
        preset_config("huge")


def test_script(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "make_tiny_checkpoint.py"), str(tmp_path / "out")]
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--config", "cases", "--seed", "5"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "7 layers" in done.stdout, done.stderr
    config = ModelConfig.from_folder(tmp_path / "out")
    assert check_checkpoint(tmp_path / "out", config).ok
    wrong = subprocess.run([*command, "--config", "nope"], env=env, capture_output=True, text=True)
    assert wrong.returncode == 2 and "no preset 'nope'" in wrong.stderr
    inspect = [sys.executable, str(ROOT / "scripts" / "inspect_checkpoint.py"), str(tmp_path / "out")]
    shown = subprocess.run(inspect, env=env, capture_output=True, text=True)
    assert shown.returncode == 0 and "routed experts" in shown.stdout and "binades" in shown.stdout, shown.stderr
