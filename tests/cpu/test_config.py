"""Config parsing, its refusals, the layer plan, engine options and environment variables."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json

import pytest
import torch

from mini_deepinfer.config import EngineConfig, ModelConfig, NumericProfile, check_environment, read_env
from mini_deepinfer.config_file import RELEASED_CONFIG
from mini_deepinfer.tiny_checkpoint import preset_config
from tests.golden import TINY_A


def released(**changes):
    raw = copy.deepcopy(RELEASED_CONFIG)
    raw["text_config"].update(changes)
    return raw


def test_released_config():
    config = ModelConfig.released()
    assert (config.hidden_size, config.num_hidden_layers, len(config.compress_ratios)) == (5120, 40, 40)
    assert config.cache_bytes_per_token == 890
    assert config.eos_token_id == (1,)
    assert config.rope_scaling is not None and config.rope_scaling.factor == 16
    assert config.kv_owners == (2, 8, 14, 20)
    assert config.engram_rows_per_token == 24


def test_released_layer_plan():
    layers = ModelConfig.released().layers
    assert [p.index for p in layers if p.ratio == 0] == [0, 1]
    assert [p.index for p in layers if p.owns_kv] == [2, 8, 14, 20]
    assert [p.index for p in layers if p.owns_selection] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [p.index for p in layers if p.is_candidate_source] == [20]
    assert [p.index for p in layers if p.uses_candidates] == [24, 28, 32, 36]
    assert [p.index for p in layers if p.engram is not None] == [1, 14] and layers[14].engram == 1
    assert (layers[0].kv_owner, layers[0].index_source) == (None, None)
    assert (layers[7].kv_owner, layers[7].index_source, layers[7].index_key_owner) == (2, 2, None)
    assert (layers[27].kv_owner, layers[27].index_source) == (20, 24)
    assert (layers[36].kv_owner, layers[36].index_source, layers[36].index_key_owner) == (20, 36, 20)


def test_layer_plan_with_a_gap_and_shared_sources():
    layers = ModelConfig.from_dict(complete(preset_config("cases"))).layers
    assert [p.kv_owner for p in layers] == [None, 1, 1, None, 4, 4, 4]
    assert [p.index_source for p in layers] == [None, 1, 2, None, 4, 4, 6]
    assert [p.index_key_owner for p in layers] == [None, 1, 1, None, 4, None, 4]
    assert [p.uses_candidates for p in layers] == [False] * 6 + [True]


def complete(raw):
    """Engram constants that write_tiny_checkpoint computes are not needed to parse; any height will do."""
    raw["text_config"].setdefault("engram_num_embeddings", [1] * len(raw["text_config"].get("engram_layer_ids", [])))
    return raw


def test_tiny_a():
    config = ModelConfig.from_folder(TINY_A)
    assert (config.image_token_id, config.engram_num_embeddings) == (3, (630, 834))


def test_config_without_optional_blocks():
    raw = released(candidate_source_layer_id=None)
    for key in list(raw["text_config"]):
        if key.startswith(("engram_", "candidate_")):
            del raw["text_config"][key]
    config = ModelConfig.from_dict(raw)
    assert config.candidate_source_layer_id is None and config.engram_layer_ids == ()
    assert not any(p.uses_candidates or p.engram is not None for p in config.layers)
    assert ModelConfig.from_dict(released(candidate_source_layer_id=-1)).candidate_source_layer_id is None


def test_variant_counts():
    config = ModelConfig.from_dict(preset_config("variant"))
    assert (config.hc_mult, config.o_groups, config.swiglu_limit, config.rope_scaling) == (3, 3, 0.0, None)
    assert [p.kv_owner for p in config.layers] == [0, 0, None, 0, 4, 4]


def test_windows_only():
    raw = released(num_hidden_layers=2, kv_source_layer_ids=[], index_source_layer_ids=[], candidate_source_layer_id=-1,
                   engram_layer_ids=[], engram_num_embeddings=[])
    config = ModelConfig.from_dict(raw)
    assert config.cache_bytes_per_token == 0 and config.kv_owners == ()


def test_flat_config_is_accepted():
    raw = released()
    flat = {**raw, **raw["text_config"], "model_type": "deepseek_v41"}
    del flat["text_config"]
    assert ModelConfig.from_dict(flat) == ModelConfig.released()


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v41_text", "deepseek_v411", "deepseek_v3", None, ""])
def test_other_model_types_are_refused(model_type):
    with pytest.raises(ValueError, match=r"model_type.*deepseek_v41"):
        ModelConfig.from_dict({**released(), "model_type": model_type})


ROPE = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}


@pytest.mark.parametrize("block", [
    {"rope_scaling": {"type": "yarn", **ROPE}},
    {"rope_scaling": {"rope_type": "yarn", **ROPE}},
    {"rope_scaling": {"rope_type": "yarn", "type": "yarn", "rope_theta": 10000, **ROPE}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **ROPE}},
    {"rope_parameters": {"rope_type": "yarn", **ROPE}, "rope_scaling": None},
])
def test_rope_spellings(block):
    raw = released()
    del raw["text_config"]["rope_scaling"]
    if "rope_theta" in (block.get("rope_parameters") or {}):
        del raw["text_config"]["rope_theta"]
    raw["text_config"].update(block)
    assert ModelConfig.from_dict(raw) == ModelConfig.released()


def test_rope_null_means_no_yarn():
    assert ModelConfig.from_dict(released(rope_scaling=None)).rope_scaling is None
    assert ModelConfig.from_dict(released(rope_scaling={"type": "default"})).rope_scaling is None


@pytest.mark.parametrize(("block", "message"), [
    ({"type": "linear", "factor": 2}, "rope_type"),
    ({"factor": 2}, "rope_type"),
    ({"type": "yarn", "factor": 16}, "lacks beta_fast"),
    ({"type": "yarn", **ROPE, "mscale": 0.7}, "mscale = 0.7"),
    ({"type": "yarn", **ROPE, "truncate": False}, "truncate"),
    ({"type": "yarn", **ROPE, "rope_theta": 5000}, "rope_theta = 10000 .*5000"),
    ({"type": "yarn", **ROPE, "factor": 0.5}, "factor = 0.5"),
    ({"type": "yarn", **ROPE, "beta_fast": 0.5}, "beta_fast"),
    ("yarn", "must be an object"),
])
def test_rope_refusals(block, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(released(rope_scaling=block))


@pytest.mark.parametrize(("changes", "message"), [
    ({"hidden_size": 5119}, "hidden_size = 5119: must be a multiple of 32"),
    ({"hidden_size": "5120"}, "hidden_size = '5120': must be an integer"),
    ({"hidden_size": True}, "hidden_size = True"),
    ({"head_dim": 500}, "head_dim = 500: must be a multiple of 32"),
    ({"moe_intermediate_size": 2300}, "moe_intermediate_size = 2300"),
    ({"index_head_dim": 100}, "index_head_dim = 100"),
    ({"o_groups": 7}, "o_groups = 7: must divide num_attention_heads = 64"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63: must be a multiple of 2"),
    ({"qk_rope_head_dim": 256}, "qk_rope_head_dim = 256: must not exceed index_head_dim = 128"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
    ({"n_routed_experts": 4}, "num_experts_per_tok = 6: must not exceed n_routed_experts = 4"),
    ({"compress_ratios": [0] * 39}, "39 entries.*num_hidden_layers = 40"),
    ({"compress_ratios": [0, 0, -1] + [2] * 37}, r"compress_ratios\[2\] = -1"),
    ({"kv_source_layer_ids": [0, 2, 8, 14, 20]}, "layer 0 has compress ratio 0"),
    ({"kv_source_layer_ids": [8, 14, 20]}, "layer 2 .*no KV source"),
    ({"kv_source_layer_ids": [2, 8, 14, 40]}, "kv_source_layer_ids = 40"),
    ({"kv_source_layer_ids": [2, 8, 14]}, "layer 20 has ratio 1 but reads the cache of layer 14 with ratio 2"),
    ({"kv_source_layer_ids": [8, 2, 14, 20]}, "ascending"),
    ({"index_source_layer_ids": [2, 14, 20]}, "layer 8 reads the cache of layer 8 and needs an index source in 8..8"),
    ({"index_source_layer_ids": [1, 2, 8, 14, 20]}, "layer 1 has compress ratio 0"),
    ({"candidate_source_layer_id": 24}, "candidate_source_layer_id = 24: must be in both"),
    ({"candidate_source_layer_id": 41}, "candidate_source_layer_id = 41"),
    ({"candidate_topk_blocks": 64}, "candidate_topk_blocks = 64.*index_topk = 512"),
    ({"engram_num_embeddings": [384006168]}, "engram_num_embeddings"),
    ({"engram_layer_ids": [14, 1]}, "engram_layer_ids"),
    ({"engram_pad_token_id": 129280}, "engram_pad_token_id = 129280"),
    ({"engram_head_dim": 100}, "engram_head_dim = 100"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"swiglu_limit": -1}, "swiglu_limit = -1"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
    ({"eos_token_id": "1"}, "eos_token_id"),
    ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid': only 'sqrtsoftplus'"),
    ({"topk_method": "greedy"}, "topk_method"),
    ({"norm_topk_prob": False}, "norm_topk_prob"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_bias": True}, "attention_bias"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ({"first_k_dense_replace": 3}, "first_k_dense_replace = 3"),
    ({"n_shared_experts": 2}, "n_shared_experts = 2"),
    ({"use_hadamard": True}, "unknown key use_hadamard"),
    ({"model_type": "deepseek_v4_text"}, "text_config.model_type"),
])
def test_refusals_name_field_and_rule(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(released(**changes))


@pytest.mark.parametrize("missing", ["hidden_size", "compress_ratios", "vocab_size", "sliding_window"])
def test_missing_required_keys(missing):
    raw = released()
    del raw["text_config"][missing]
    with pytest.raises(ValueError, match=f"required key {missing}"):
        ModelConfig.from_dict(raw)


def test_two_levels_that_disagree():
    with pytest.raises(ValueError, match="bos_token_id = 0 at top level but 5"):
        ModelConfig.from_dict(released(bos_token_id=5))


def test_candidate_pool_boundary():
    # 3 * 4 - 3 = 9 entries are certain
    base = {"candidate_topk_blocks": 3, "candidate_block_size": 4}
    assert ModelConfig.from_dict(released(index_topk=9, **base)).index_topk == 9
    with pytest.raises(ValueError, match="candidate_topk_blocks"):
        ModelConfig.from_dict(released(index_topk=10, **base))


@pytest.mark.parametrize(("key", "value"), [
    ("quant_method", "bitsandbytes"), ("weight_block_size", [128, 128]), ("scale_fmt", "float"), ("expert_dtype", "fp8"),
    ("activation_scheme", "static"), ("fmt", "e5m2"), ("kv_cache_scheme", {}),
])
def test_quantization_config_is_checked(key, value):
    raw = released()
    raw["quantization_config"][key] = value
    with pytest.raises(ValueError, match=f"quantization_config.{key}"):
        ModelConfig.from_dict(raw)


def test_quantization_config_is_required():
    raw = released()
    del raw["quantization_config"]
    with pytest.raises(ValueError, match="quantization_config"):
        ModelConfig.from_dict(raw)


def test_from_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RELEASED_CONFIG))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.released()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_id == (1, 7)


def test_numeric_profile():
    assert NumericProfile(torch.bfloat16).activation_quant
    with pytest.raises(ValueError, match="compute_dtype"):
        NumericProfile(torch.float16)
    with pytest.raises(ValueError, match="wo_a"):
        NumericProfile(torch.bfloat16, wo_a="fp4")


def test_engine_flags_round_trip():
    parser = argparse.ArgumentParser()
    EngineConfig.add_arguments(parser, max_num_seqs=4)
    assert EngineConfig.from_args(parser.parse_args([])) == EngineConfig(max_num_seqs=4)
    args = parser.parse_args(["--model", "x", "--no-enable-prefix-caching", "--num-pages", "12", "--max-model-len", "auto",
                              "--ep-size", "4", "--load-format", "dummy", "--dtype", "float32"])
    config = EngineConfig.from_args(args)
    assert config.changed() == {"model": "x", "enable_prefix_caching": False, "num_pages": 12, "ep_size": 4,
                                "load_format": "dummy", "dtype": "float32", "max_num_seqs": 4}
    assert config.profile() == NumericProfile(torch.float32)
    assert EngineConfig(wo_a="fp8", batch_invariant=True).profile() == NumericProfile(torch.bfloat16, True, "fp8", True)
    flags = {action.dest for action in parser._actions}
    assert {f.name for f in dataclasses.fields(EngineConfig)} <= flags
    assert all(action.help for action in parser._actions)


@pytest.mark.parametrize(("changes", "message"), [
    ({"dtype": "float16"}, "dtype = 'float16'"), ({"max_num_seqs": 0}, "max_num_seqs = 0"),
    ({"num_pages": 0}, "num_pages = 0"), ({"load_format": "gguf"}, "load_format"), ({"replay": "bounded"}, "replay"),
    ({"ep_size": 2, "ep_loopback": 4}, "ep_loopback"), ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
    ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens"),
])
def test_engine_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)


def test_engine_options_against_the_model():
    config = ModelConfig.released()
    EngineConfig(page_size=4).check_model(config)
    with pytest.raises(ValueError, match="page_size = 5"):
        EngineConfig(page_size=5).check_model(config)
    with pytest.raises(ValueError, match="ep_size = 385"):
        EngineConfig(ep_size=385).check_model(config)


def test_environment(monkeypatch):
    for name in ("MDI_OPS", "MDI_LOG", "MDI_SYNC", "MDI_LOG_OPS", "MDI_CUDA_ARCHS", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    assert check_environment()["MDI_OPS"] == {}
    monkeypatch.setenv("MDI_OPS", "attention.sparse=portable, indexer.logits=reference")
    assert read_env("MDI_OPS") == {"attention.sparse": "portable", "indexer.logits": "reference"}
    monkeypatch.setenv("MDI_OPS", "reference")
    assert read_env("MDI_OPS") == {"*": "reference"}
    monkeypatch.setenv("MDI_CUDA_ARCHS", "90a,100f")
    assert read_env("MDI_CUDA_ARCHS") == ("90a", "100f")
    monkeypatch.setenv("MDI_SYNC", "")
    assert read_env("MDI_SYNC") is False


@pytest.mark.parametrize(("name", "value"), [
    ("MDI_SYNC", "yes"), ("MDI_LOG", "loud"), ("MDI_OPS", "a=b,a=c"), ("MDI_OPS", "a="), ("MAX_JOBS", "0"),
    ("MDI_CUDA_ARCHS", "hopper"),
])
def test_bad_environment_raises(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} = "):
        check_environment()


def test_unknown_environment_variable_raises(monkeypatch):
    monkeypatch.setenv("MDI_OPTS", "reference")
    with pytest.raises(ValueError, match="MDI_OPTS"):
        check_environment()
