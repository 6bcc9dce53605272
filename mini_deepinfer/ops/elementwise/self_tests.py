"""Small fixed inputs of the elementwise ops for `env --self-test`."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import register_self_test
from mini_deepinfer.ops.elementwise.number_formats import expand_fp4, expand_fp8
from mini_deepinfer.ops.elementwise.rows import act_quant, act_quant_folded, rmsnorm, rope, rope_quant
from mini_deepinfer.ops.elementwise.streams import engram_gate, hc_collapse, hc_expand, hc_expand_mix, hc_mix


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
    angle = torch.rand(tokens, 32, generator=g) * 6
    return {
        "x": x.bfloat16().to(device),
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


_ONE_STEP = 2.0**-8  # of the largest output: sums are taken in another order than the reference takes them
register_self_test(
    "elementwise.rmsnorm", _self_test_inputs, lambda i, impl: rmsnorm(i["x"], i["weight"], 1e-20, impl=impl), _ONE_STEP
)
register_self_test("elementwise.act_quant", _self_test_inputs, lambda i, impl: act_quant(i["x"], impl=impl), 0.0)
register_self_test(
    "elementwise.act_quant_folded", _self_test_inputs, lambda i, impl: act_quant_folded(i["x"], impl=impl), 0.0
)
register_self_test(
    "elementwise.rope",
    _self_test_inputs,
    lambda i, impl: rope(i["heads"], i["positions"], i["table"], impl=impl),
    0.0,
)
register_self_test(
    "elementwise.rope_quant",
    _self_test_inputs,
    lambda i, impl: rope_quant(i["heads"], i["positions"], i["table"], 3, folded=True, impl=impl),
    0.0,
)
register_self_test(
    "elementwise.hc_mix",
    _self_test_inputs,
    lambda i, impl: hc_mix(i["streams"], i["fn"], i["base"], i["scale"], 20, 1e-6, 1e-20, impl=impl),
    1e-5,
)
register_self_test(
    "elementwise.hc_collapse",
    _self_test_inputs,
    lambda i, impl: hc_collapse(i["streams"], i["post"], impl=impl),
    _ONE_STEP,
)
register_self_test(
    "elementwise.hc_expand",
    _self_test_inputs,
    lambda i, impl: hc_expand(i["x"], i["streams"], i["post"], i["comb"], impl=impl),
    _ONE_STEP,
)
register_self_test(
    "elementwise.hc_expand_mix",
    _self_test_inputs,
    lambda i, impl: hc_expand_mix(
        i["x"], i["streams"], i["post"], i["post"], i["comb"], i["fn"], i["base"], i["scale"], 20, 1e-6, 1e-20, impl=impl
    ),
    _ONE_STEP,
)
register_self_test(
    "elementwise.engram_gate",
    _self_test_inputs,
    lambda i, impl: engram_gate(i["streams"], i["z"], i["q_weight"], i["k_weight"], 1e-20, impl=impl),
    _ONE_STEP,
)
