"""Small fixed inputs of the elementwise ops for `env --self-test`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import register_self_test
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


def _expand_self_test(device: torch.device) -> dict[str, Tensor]:
    """Every byte under 32 scales spread over the range, the subnormal and the NaN one included."""
    every = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)
    scale = torch.cat((every[::9], every[-1:]))[:, None]
    rows = every.repeat(scale.shape[0], 1)
    return {"codes": rows, "fp8_scale": scale.repeat(1, 8), "fp4_scale": scale.repeat(1, 16)}


register_self_test(
    "elementwise.expand_fp8",
    _expand_self_test,
    lambda inputs, impl: expand_fp8(inputs["codes"], inputs["fp8_scale"], impl=impl),
    bound=0.0,
)
register_self_test(
    "elementwise.expand_fp4",
    _expand_self_test,
    lambda inputs, impl: expand_fp4(inputs["codes"], inputs["fp4_scale"], impl=impl),
    bound=0.0,
)


def _self_test_inputs(device: torch.device) -> dict[str, Tensor]:
    """Two dozen tokens of a small model; magnitudes over many binades."""
    g = torch.Generator().manual_seed(1)
    tokens, n, width = 24, 4, 320

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype).to(device)

    x = torch.randn(tokens, width, generator=g) * torch.exp2(torch.arange(tokens) - 12.0)[:, None]
    codes, codes_scale = act_quant(x.bfloat16())
    angle = torch.rand(tokens, 32, generator=g) * 6
    return {
        "x": x.bfloat16().to(device),
        "codes": codes.to(device),
        "codes_scale": codes_scale.to(device),
        "weight": normal(width),
        "heads": normal(tokens, 3, 128),
        "positions": torch.arange(tokens, dtype=torch.int32, device=device),
        "table": torch.stack((angle.cos(), angle.sin()), -1).to(device),
        "streams": normal(tokens, n, width),
        "z": normal(tokens, (n + 1) * width),
        "q_weight": normal(n, width),
        "k_weight": normal(n, width),
        "fn": normal(2 * n + n * n, n * width, dtype=torch.float32) * (n * width) ** -0.5,
        "base": normal(2 * n + n * n, dtype=torch.float32),
        "scale": normal(3, dtype=torch.float32),
        "post": normal(tokens, n, dtype=torch.float32),
        "comb": normal(tokens, n, n, dtype=torch.float32),
    }


def _site(i: dict[str, Tensor]) -> dict[str, Any]:
    return {"fn": i["fn"], "base": i["base"], "scale": i["scale"], "sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}


def _values(*outputs: Tensor) -> tuple[Tensor, ...]:
    """Folded codes as the values they stand for: a scale may be the next one where a norm differs in its last bit."""
    *first, codes, row_scale = outputs
    return *first, codes.float() * row_scale[:, None]


def _expand_mix_norm_quant(i: dict[str, Tensor], impl: str) -> tuple[Tensor, ...]:
    last = (i["post"], i["post"], i["comb"])
    outputs = hc_expand_mix_norm_quant(i["x"], i["streams"], *last, **_site(i), norm_weight=i["weight"], folded=True, impl=impl)
    out, x, codes, scale, *mix = outputs
    return out, *mix, *_values(*(() if x is None else (x,)), codes, scale)


_ONE_STEP = 2.0**-8  # of the largest output: sums are taken in another order than the reference takes them
_ONE_CODE = 2.0**-4  # of the largest output, where it is E4M3
for _name, _run, _bound in (
    ("rmsnorm", lambda i, impl: rmsnorm(i["x"], i["weight"], 1e-20, impl=impl), _ONE_STEP),
    ("rmsnorm_quant", lambda i, impl: _values(*rmsnorm_quant(i["x"], i["weight"], 1e-20, folded=True, impl=impl)), _ONE_CODE),
    ("act_quant", lambda i, impl: act_quant(i["x"], impl=impl), 0.0),
    ("act_quant_folded", lambda i, impl: act_quant_folded(i["x"], impl=impl), 0.0),
    ("fold_scales", lambda i, impl: fold_scales(i["codes"], i["codes_scale"], impl=impl), 0.0),
    ("rope", lambda i, impl: rope(i["heads"], i["positions"], i["table"], impl=impl), 0.0),
    ("rope_quant", lambda i, impl: rope_quant(i["heads"], i["positions"], i["table"], 3, folded=True, impl=impl), 0.0),
    ("hc_mix", lambda i, impl: hc_mix(i["streams"], **_site(i), impl=impl), 1e-5),
    ("hc_collapse", lambda i, impl: hc_collapse(i["streams"], i["post"], impl=impl), _ONE_STEP),
    ("hc_collapse_norm", lambda i, impl: hc_collapse_norm(i["streams"], i["post"], i["weight"], 1e-20, impl=impl), 2 * _ONE_STEP),
    (
        "hc_collapse_norm_quant",
        lambda i, impl: _values(*hc_collapse_norm_quant(i["streams"], i["post"], i["weight"], 1e-20, folded=True, impl=impl)),
        _ONE_CODE,
    ),
    ("hc_expand", lambda i, impl: hc_expand(i["x"], i["streams"], i["post"], i["comb"], impl=impl), _ONE_STEP),
    (
        "hc_expand_mix",
        lambda i, impl: hc_expand_mix(i["x"], i["streams"], i["post"], i["post"], i["comb"], **_site(i), impl=impl),
        _ONE_STEP,
    ),
    ("hc_expand_mix_norm_quant", _expand_mix_norm_quant, _ONE_CODE),
    ("engram_gate", lambda i, impl: engram_gate(i["streams"], i["z"], i["q_weight"], i["k_weight"], 1e-20, impl=impl), _ONE_STEP),
):
    register_self_test(f"elementwise.{_name}", _self_test_inputs, _run, _bound)
