"""Tiny random checkpoints in the released format: config, tokenizer, FP8/FP4 shards with an index (model spec 2).

The tests and the CPU demonstration run on these. The weights are spread widely enough that every part of the model changes
the logits (clamped experts, uneven router, open engram gates), and not so widely that bf16 rounding decides the output.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from mini_deepinfer.checkpoint import INDEX_NAME, SINGLE_NAME
from mini_deepinfer.config import ModelConfig
from mini_deepinfer.dummy_weights import name_seed
from mini_deepinfer.engram import compress_vocabulary, engram_layouts
from mini_deepinfer.ops.reference import number_formats
from mini_deepinfer.tensor_table import BLOCK, TensorSpec, tensor_table

SPECIAL_TOKENS = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|pad|>", "<|image|>", "<|User|>", "<|Assistant|>")

_QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
                 "scale_fmt": "ue8m0", "expert_dtype": "fp4"}


def _preset(**text: Any) -> dict[str, Any]:
    common = {
        "model_type": "deepseek_v41_text", "vocab_size": 512, "num_key_value_heads": 1, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_shared_experts": 1, "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
        "num_nextn_predict_layers": 0,
    }
    return {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "dtype": "bfloat16",
            "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 3, "tie_word_embeddings": False,
            "quantization_config": copy.deepcopy(_QUANTIZATION), "text_config": {**common, **text}}


_ENGRAM = {"engram_layer_ids": [1], "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 32,
           "engram_vocab_size": 101, "engram_pad_token_id": 2}
_CASES: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 32,
    "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "sliding_window": 8, "compress_ratios": [0, 2, 2, 0, 1, 1, 1],
    "kv_source_layer_ids": [1, 4], "index_source_layer_ids": [1, 2, 4, 6], "index_n_heads": 4, "index_head_dim": 64,
    "index_topk": 5, "candidate_source_layer_id": 4, "candidate_topk_blocks": 2, "candidate_block_size": 4, "hc_mult": 4,
    "max_position_embeddings": 256, **_ENGRAM,
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 64},
}
PRESETS: dict[str, dict[str, Any]] = {
    # quick on a CPU, experts divide by 4 ranks
    "tiny": _preset(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=4, head_dim=64, qk_rope_head_dim=32, q_lora_rank=64,
        o_lora_rank=32, o_groups=2, n_routed_experts=16, num_experts_per_tok=2, moe_intermediate_size=64,
        sliding_window=32, compress_ratios=[0, 2, 2, 1, 1, 1], kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3, 5], index_n_heads=4, index_head_dim=64, index_topk=32, candidate_source_layer_id=3,
        candidate_topk_blocks=8, candidate_block_size=8, hc_mult=4, max_position_embeddings=65536, **_ENGRAM,
        rope_scaling={"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                      "original_max_position_embeddings": 4096}),
    # every feature at the smallest size: all edges are reached with a few dozen tokens
    "cases": _preset(**_CASES),
    # the same schedule with the row widths of the CUDA kernels
    "cases-gpu": _preset(**{**_CASES, "hidden_size": 256, "head_dim": 512, "qk_rope_head_dim": 64, "o_lora_rank": 64,
                            "q_lora_rank": 128, "moe_intermediate_size": 128, "index_head_dim": 128,
                            "engram_head_dim": 64}),
    # what the released model does not use: ratio 4, 3 streams, 3 groups of 2 heads, no YaRN, no clamp, no candidates,
    # no engram, a layer without sparse attention in the middle
    "variant": _preset(
        hidden_size=96, num_hidden_layers=6, num_attention_heads=6, head_dim=64, qk_rope_head_dim=16, q_lora_rank=32,
        o_lora_rank=32, o_groups=3, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=96, sliding_window=12,
        compress_ratios=[4, 4, 0, 4, 1, 1], kv_source_layer_ids=[0, 4], index_source_layer_ids=[0, 3, 4], index_n_heads=3,
        index_head_dim=32, index_topk=7, candidate_source_layer_id=None, hc_mult=3, max_position_embeddings=512,
        rope_scaling=None, swiglu_limit=None),
}


def preset_config(name: str) -> dict[str, Any]:
    """A copy of one of PRESETS as a config.json dict. Raises ValueError listing the names."""
    if name not in PRESETS:
        raise ValueError(f"tiny checkpoint: no preset {name!r}; there are {', '.join(PRESETS)}")
    return copy.deepcopy(PRESETS[name])


def write_tiny_checkpoint(folder: str | Path, config: Mapping[str, Any], seed: int = 0, num_shards: int = 2) -> ModelConfig:
    """Write a complete checkpoint folder and return its config.

    config is a config.json dict (nested text_config); engram_compressed_vocab_size and engram_num_embeddings are computed
    from the tokenizer and the hash primes and overwritten. num_shards == 1 writes one file without an index.
    Deterministic in (config, seed). Raises ValueError for a config that cannot be (config.py's rules) or too large a
    vocabulary for the embedded training text.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raw = copy.deepcopy(dict(config))
    text = raw.get("text_config", raw)
    tokenizer = train_tokenizer(text["vocab_size"])
    if text.get("engram_layer_ids"):
        _complete_engram(text, tokenizer)
    model = ModelConfig.from_dict(raw)
    _write_json(folder / "config.json", raw)
    _write_json(folder / "generation_config.json", {"bos_token_id": model.bos_token_id, "do_sample": False,
                                                    "eos_token_id": list(model.eos_token_id)})
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1],
        "pad_token": SPECIAL_TOKENS[2], "add_bos_token": False, "clean_up_tokenization_spaces": False,
        "model_max_length": model.max_position_embeddings})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_shards(folder, random_tensors(model, seed), num_shards)
    return model


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _complete_engram(text: dict[str, Any], tokenizer: RawTokenizer) -> None:
    count = tokenizer.get_vocab_size()
    texts = tokenizer.decode_batch([[i] for i in range(count)], skip_special_tokens=False)
    classes = int(compress_vocabulary(texts, [tokenizer.id_to_token(i) for i in range(count)]).max()) + 1
    layouts = engram_layouts(text["engram_layer_ids"], text["engram_max_ngram_size"], text["engram_n_heads"],
                             text["engram_vocab_size"], classes)
    text["engram_compressed_vocab_size"] = classes
    text["engram_num_embeddings"] = [layout.num_rows for layout in layouts]


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE_NAME, folder / INDEX_NAME):
        old.unlink(missing_ok=True)
    if num_shards == 1:
        save_file(tensors, folder / SINGLE_NAME)
        return
    names = list(tensors)
    per_shard = -(-len(names) // num_shards)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * per_shard:(shard + 1) * per_shard]
        save_file({name: tensors[name] for name in part}, folder / file_name)
        weight_map.update(dict.fromkeys(part, file_name))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the table in its stored dtype (I8 as int8, F8_E8M0 as float8_e8m0fnu), deterministic per name."""
    out: dict[str, torch.Tensor] = {}
    for spec in tensor_table(config).values():
        if spec.role in ("block_scale", "row_scale", "engram_scale"):
            continue  # made together with the weight before it
        generator = torch.Generator().manual_seed(name_seed(seed, spec.name))
        scale_name = spec.name.removesuffix("weight") + "scale"
        if spec.role == "plain":
            out[spec.name] = _plain(spec, config, generator).to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)
            continue
        if spec.role == "fp8":
            codes, scale = quantise_blocks(_matrix(spec.name, spec.shape[0], spec.shape[1], generator))
        elif spec.role == "fp4":
            codes, scale = number_formats.quant_mxfp4(_matrix(spec.name, spec.shape[0], spec.shape[1] * 2, generator))
            codes = codes.view(torch.int8)
        else:
            codes, scale = number_formats.quant_fp8_ue8m0(torch.randn(spec.shape, generator=generator))
        out[spec.name], out[scale_name] = codes, scale.view(torch.float8_e8m0fnu)
    return out


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [O, K], multiples of 32 -> (float8_e4m3fn [O, K], uint8 E8M0 [O/32, K/32]): the scale first, then the codes."""
    rows, cols = weight.shape
    tiles = weight.view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
    scale, value = number_formats.ceilpow2_scale(tiles.abs().amax((1, 3)), 1.0 / number_formats.FP8_MAX, 1e-30)
    return number_formats.encode_e4m3(tiles / value[:, None, :, None]).view(rows, cols), scale


# Gain over the neutral 1/sqrt(K) of a projection, by name; 1 where nothing is said. Gates and clamps are reached (w1, w3) while
# one sublayer changes the streams by a small part only (wo_b, w2): a rounding flip must not grow into another output.
_GAINS = {"wo_b": 0.5, "head": 2.5, "w1": 3.0, "w3": 3.0, "w2": 0.05}
_ROW_SPREAD = 0.25  # of the logarithm of a row's size: gives the scales something to do


def _matrix(name: str, rows: int, cols: int, generator: torch.Generator) -> torch.Tensor:
    gain = _GAINS.get(name.removesuffix(".weight").rsplit(".", 1)[-1], 1.0)
    sizes = torch.exp(_ROW_SPREAD * torch.randn(rows, 1, generator=generator) - _ROW_SPREAD**2)
    return torch.randn(rows, cols, generator=generator) * sizes * (gain / math.sqrt(cols))


def _plain(spec: TensorSpec, config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    leaf = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf.endswith("norm") or leaf in ("q_weight", "k_weight"):
        return 1.0 + 0.2 * torch.randn(spec.shape, generator=generator)
    if leaf in ("hc_attn_scale", "hc_ffn_scale"):
        return 0.5 + 0.1 * torch.randn(spec.shape, generator=generator)
    if leaf.endswith("_base") or leaf == "embed":
        return (2.0 if leaf == "embed" else 1.0) * torch.randn(spec.shape, generator=generator)
    if leaf == "attn_sink":
        return 0.5 + torch.randn(spec.shape, generator=generator)
    if leaf in ("bias", "bias_vl"):
        return (0.5 if leaf == "bias" else 2.0) * torch.randn(spec.shape, generator=generator)
    return _matrix(spec.name, spec.shape[0], spec.shape[1], generator)


def train_tokenizer(vocab_size: int) -> RawTokenizer:
    """A byte-level BPE tokenizer of exactly vocab_size tokens; SPECIAL_TOKENS have the first ids.

    Raises ValueError when vocab_size is below the alphabet or above what the embedded text supports.
    """
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), min_frequency=1)
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"tiny checkpoint: vocab_size = {vocab_size}: the embedded text gives "
                         f"{tokenizer.get_vocab_size()} tokens; choose that or another size")
    return tokenizer


TRAINING_TEXT = """\
The ferry left the island at six in the morning, long before the first shop had opened. On deck a girl counted gulls;
her father counted coins. "Seven," said the girl. "Seven!" said the father, and both of them laughed, because neither had
seen the other's sum. The sea was flat and grey, the sky was flat and grey, and the line between them could not be found.

A café on the pier sells tea, coffee and naïve paintings of the harbour. The owner, who was once a clockmaker, repairs
the espresso machine with tweezers and a loupe. He says that water and time have the same habit: they go where there is
least resistance, and they never come back by the way they went. THE SIGN OVER THE DOOR SAYS: OPEN WHEN LIT.

def count(words):
    total = 0
    for word in words:
        total = total + len(word)
    return total

In winter the island has 312 inhabitants, in summer 4,075. The school has two rooms, one teacher and nineteen children.
They learn that 2 + 2 = 4, that 3 x 7 = 21, that a kilometre is a thousand metres, and that the Moon pulls the water
twice a day. They also learn to tie eleven knots. The Moon, the Water, the Knots: these are the three chapters of their
reading book. the moon, the water, the knots. Each chapter ends with a question that has no answer in the book.

Question: what does the tide leave behind? Answer: shells, wood, rope, a boot, sometimes a letter in a bottle. Question:
what does the tide take away? Answer: footprints, castles, names written with a stick, and everything that was not tied
down. El niño, Ångström, déjà vu, façade, Übergang, Straße, 你好, мир, and other words from other shores.
"""
