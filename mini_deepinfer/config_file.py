"""Reading config.json: the nested and the flat form, spelling variants, fixed values, and refusal of unknown keys.

Every key falls in exactly one class: read into `ModelConfig`; must have the one supported value (FIXED); known to have
no effect on text inference (IGNORED, IGNORED_PREFIXES); anything else is refused, because it could change the model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_deepinfer.config import ModelConfig, RopeScaling

MODEL_TYPE = "deepseek_v41"
TEXT_MODEL_TYPES = ("deepseek_v41_text", "deepseek_v41")

# Keys with one supported value each (absent counts as supported).
FIXED: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "num_hash_layers": (0, None),
    "n_group": (1, None),
    "topk_group": (1, None),
    "gate_temp": (1.0,),
}
# Keys without effect on text inference: training, generation defaults, other modalities, bookkeeping.
IGNORED = frozenset({
    "architectures", "auto_map", "attention_dropout", "dtype", "torch_dtype", "initializer_range", "intermediate_size",
    "num_nextn_predict_layers", "transformers_version", "use_cache", "vision_config", "aligner_config", "_name_or_path",
    "is_encoder_decoder", "model_max_length", "output_attentions", "output_hidden_states", "return_dict",
    "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp",
})
IGNORED_PREFIXES = ("dspark_", "vision_", "image_")  # image_token_id is read before this applies

_QUANTIZATION: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([32, 32],),
    "scale_fmt": ("ue8m0",),
    "expert_dtype": ("fp4",),
}
_QUANTIZATION_OPTIONAL: dict[str, tuple[Any, ...]] = {"activation_scheme": ("dynamic",), "fmt": ("e4m3",)}
_QUANTIZATION_IGNORED = frozenset({"modules_to_not_convert", "ignored_layers"})  # the tensors' own dtypes decide

_TUPLES = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids",
           "engram_num_embeddings")
_FLOATS = ("routed_scaling_factor", "hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta")

# config.json of the published checkpoint, text part and the parts that are checked (model spec 1).
RELEASED_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024,
        "o_groups": 8, "rms_norm_eps": 1e-20, "max_position_embeddings": 1048576, "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 65536},
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2304,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "compress_rope_theta": 160000, "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512,
        "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092, "num_nextn_predict_layers": 3,
    },
}


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, and generation_config.json's eos_token_id. Raises FileNotFoundError, ValueError."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    config = parse_config(raw)
    return config if eos is None else dataclasses.replace(config, eos_token_id=_id_tuple("eos_token_id", eos))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: the checkpoint folder must hold {path.name}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Turn a parsed config.json into a ModelConfig. Raises ValueError naming key, value and rule."""
    _check_model_type(raw)
    values = _merge(raw)
    _check_quantization(values.pop("quantization_config", None))
    rope = _read_rope(values)
    _check_fixed(values)
    names = {f.name for f in dataclasses.fields(ModelConfig)}
    unknown = sorted(k for k in values if k not in names | set(FIXED) | IGNORED and not k.startswith(IGNORED_PREFIXES))
    if unknown:
        raise ValueError(f"config: unknown key {', '.join(unknown)}: it may change the model and is not implemented")
    picked = {k: v for k, v in values.items() if k in names}
    picked.update(rope)
    return ModelConfig(**_convert(picked))


def _check_model_type(raw: Mapping[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type != MODEL_TYPE:
        hint = " (DeepSeek-V4 has another layer structure and is not supported)" if model_type == "deepseek_v4" else ""
        raise ValueError(f"config: model_type = {model_type!r}: must be exactly {MODEL_TYPE!r}{hint}")
    text = raw.get("text_config")
    if text is None:
        return
    if not isinstance(text, Mapping):
        raise ValueError(f"config: text_config = {text!r}: must be an object")
    if text.get("model_type", MODEL_TYPE) not in TEXT_MODEL_TYPES:
        raise ValueError(f"config: text_config.model_type = {text['model_type']!r}: must be one of {TEXT_MODEL_TYPES}")


def _merge(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Top level and text_config in one dict; a key that is read must not say two things."""
    merged = {k: v for k, v in raw.items() if k not in ("model_type", "text_config")}
    for key, value in (raw.get("text_config") or {}).items():
        if key == "model_type":
            continue
        outer = merged.get(key)
        if key in merged and outer != value and outer is not None and key not in IGNORED:
            raise ValueError(f"config: {key} = {outer!r} at top level but {value!r} in text_config")
        merged[key] = value
    return merged


def _check_quantization(block: Any) -> None:
    if not isinstance(block, Mapping):
        raise ValueError(f"config: quantization_config = {block!r}: required (FP8 blocks of 32x32, FP4 experts)")
    for key, allowed in (_QUANTIZATION | _QUANTIZATION_OPTIONAL).items():
        if key not in block and key in _QUANTIZATION_OPTIONAL:
            continue
        value = block.get(key)
        value = list(value) if isinstance(value, tuple) else value
        if value not in allowed:
            raise ValueError(f"config: quantization_config.{key} = {value!r}: must be {allowed[0]!r}")
    unknown = sorted(set(block) - set(_QUANTIZATION) - set(_QUANTIZATION_OPTIONAL) - _QUANTIZATION_IGNORED)
    if unknown:
        raise ValueError(f"config: unknown key quantization_config.{', '.join(unknown)}")


def _read_rope(values: dict[str, Any]) -> dict[str, Any]:
    """Take rope_scaling / rope_parameters out of `values`: {rope_scaling, and the thetas found inside the block}."""
    blocks = {k: values.pop(k) for k in ("rope_scaling", "rope_parameters") if k in values}
    filled = {k: v for k, v in blocks.items() if v is not None}
    if len(filled) == 2 and filled["rope_scaling"] != filled["rope_parameters"]:
        raise ValueError("config: rope_scaling and rope_parameters disagree; keep one")
    if not filled:
        return {"rope_scaling": None}
    name, block = next(iter(filled.items()))
    if not isinstance(block, Mapping):
        raise ValueError(f"config: {name} = {block!r}: must be an object or null")
    block = dict(block)
    kinds = {block.pop(k) for k in ("type", "rope_type") if k in block}
    if len(kinds) != 1 or not kinds <= {"yarn", "default"}:
        raise ValueError(f"config: {name}.rope_type = {sorted(map(str, kinds))}: must be one of 'yarn', 'default'")
    found: dict[str, Any] = {}
    for theta in ("rope_theta", "compress_rope_theta"):
        if theta in block:
            found[theta] = block.pop(theta)
            if theta in values and values[theta] != found[theta]:
                raise ValueError(f"config: {theta} = {values[theta]!r} but {name}.{theta} = {found[theta]!r}")
    if kinds == {"default"}:
        found["rope_scaling"] = None
        fields: tuple[str, ...] = ()
    else:
        fields = tuple(f.name for f in dataclasses.fields(RopeScaling))
        missing = [f for f in fields if f not in block]
        if missing:
            raise ValueError(f"config: {name} lacks {', '.join(missing)} (needed for yarn)")
        found["rope_scaling"] = RopeScaling(**{f: block[f] for f in fields})
    # neutral attention factors only: the model scales neither queries nor probabilities (model spec 4.2)
    neutral = {"attention_factor": (1, 1.0, None), "mscale": (0, 1, None), "mscale_all_dim": (0, 1, None)}
    for key in sorted(set(block) - set(fields)):
        if block[key] not in neutral.get(key, ()):
            raise ValueError(f"config: {name}.{key} = {block[key]!r}: unknown or not supported")
    return found


def _check_fixed(values: Mapping[str, Any]) -> None:
    for key, allowed in FIXED.items():
        if key in values and values[key] not in allowed:
            raise ValueError(f"config: {key} = {values[key]!r}: only {allowed[0]!r} is supported")


def _id_tuple(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise ValueError(f"config: {name} = {value!r}: must be an integer or a list of integers")


def _convert(values: dict[str, Any]) -> dict[str, Any]:
    """Lists to tuples, absent markers to their one meaning, integers to floats where the field is a float."""
    missing = [f.name for f in dataclasses.fields(ModelConfig)
               if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ValueError(f"config: required key {', '.join(missing)} is missing")
    for key in _TUPLES:
        if key in values:
            if values[key] is None:
                values[key] = ()
            elif not isinstance(values[key], (list, tuple)):
                raise ValueError(f"config: {key} = {values[key]!r}: must be a list")
            values[key] = tuple(values[key])
    if "eos_token_id" in values:
        values["eos_token_id"] = _id_tuple("eos_token_id", values["eos_token_id"])
    if values.get("swiglu_limit", 0) is None:
        values["swiglu_limit"] = 0.0
    if values.get("candidate_source_layer_id", -1) == -1:
        values["candidate_source_layer_id"] = None
    layers, ratios = values["num_hidden_layers"], values["compress_ratios"]
    if isinstance(layers, int) and len(ratios) < layers:
        raise ValueError(f"config: compress_ratios has {len(ratios)} entries: needs num_hidden_layers = {layers}")
    values["compress_ratios"] = ratios[:layers] if isinstance(layers, int) else ratios
    for key in (*_FLOATS, "swiglu_limit"):
        if isinstance(values.get(key), int) and not isinstance(values[key], bool):
            values[key] = float(values[key])
    if values.get("engram_layer_ids", ()) == ():  # a model without engram may leave the rest of the block unset
        values = {k: v for k, v in values.items() if not (k.startswith("engram_") and v in (None, 0, ()))}
    if not values.get("kv_source_layer_ids"):
        values = {k: v for k, v in values.items() if not (k.startswith("index_") and v in (None, 0))}
    if values["candidate_source_layer_id"] is None:
        values = {k: v for k, v in values.items() if not (k.startswith("candidate_") and v in (None, 0, -1))}
    return values
