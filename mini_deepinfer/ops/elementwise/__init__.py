"""Elementwise ops: number formats, norms, quantisation and rotary embedding, hyper-connections, engram gate."""

import mini_deepinfer.ops.elementwise.self_tests  # noqa: F401 (registers them)
from mini_deepinfer.ops.elementwise.number_formats import expand_fp4, expand_fp8
from mini_deepinfer.ops.elementwise.rows import act_quant, act_quant_folded, fold_scales, rmsnorm, rmsnorm_quant, rope, rope_quant
from mini_deepinfer.ops.elementwise.streams import (
    engram_gate,
    hc_collapse,
    hc_collapse_norm,
    hc_collapse_norm_quant,
    hc_expand,
    hc_expand_mix,
    hc_expand_mix_norm_quant,
    hc_mix,
)

__all__ = [
    "act_quant",
    "act_quant_folded",
    "engram_gate",
    "expand_fp4",
    "expand_fp8",
    "fold_scales",
    "hc_collapse",
    "hc_collapse_norm",
    "hc_collapse_norm_quant",
    "hc_expand",
    "hc_expand_mix",
    "hc_expand_mix_norm_quant",
    "hc_mix",
    "rmsnorm",
    "rmsnorm_quant",
    "rope",
    "rope_quant",
]
