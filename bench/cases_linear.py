"""Cases of the dense FP8 products at the measured step's shapes. Bytes: both operands once, the result once."""

from __future__ import annotations

from typing import Any

import torch

from bench.shapes import RELEASED, STEP_TOKENS, Case
from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS
from mini_deepinfer.ops.linear import fp8


def _case(name: str, k: int, columns: int, groups: int = 1) -> Case:
    def make(device: torch.device) -> dict[str, Any]:
        g = torch.Generator(device).manual_seed(1)
        return {
            "codes": (64 * torch.randn(STEP_TOKENS, groups, k, generator=g, device=device)).to(torch.float8_e4m3fn),
            "row_scale": torch.exp2(torch.randint(-9, -5, (STEP_TOKENS, groups), generator=g, device=device).float()),
            "weight": (64 * torch.randn(columns, k, generator=g, device=device)).to(torch.float8_e4m3fn),
            "weight_scale": torch.exp2(torch.randint(-12, -9, (columns,), generator=g, device=device).float()),
        }

    def check(inputs: dict[str, Any], out: torch.Tensor) -> float:
        some = slice(0, STEP_TOKENS, STEP_TOKENS // 32)
        part = {**inputs, "codes": inputs["codes"][some], "row_scale": inputs["row_scale"][some]}
        wanted = fp8(**part, impl="reference").float()
        error = float((out[some].float() - wanted).abs().max() / wanted.abs().max())
        if not error <= 2.0**-7:  # two roundings may differ by one ulp
            raise AssertionError(f"max error {error:.3g} of the largest value, bound {2.0**-7:.3g}")
        return error

    return Case(
        op="linear.fp8",
        name=f"{name} T={STEP_TOKENS} K={k} O={columns}",
        params={"T": STEP_TOKENS, "K": k, "O": columns, "g": groups, "dtype": "fp8"},
        make=make,
        run=lambda inputs, impl: fp8(**inputs, impl=impl),
        check=check,
        flops=2.0 * STEP_TOKENS * k * columns,
        bytes=float(STEP_TOKENS * k * groups + k * columns + 2 * STEP_TOKENS * columns),
        impls=IMPLEMENTATIONS["linear.fp8"],
    )


_Q, _N, _H = RELEASED.q_lora_rank, RELEASED.hidden_size, RELEASED.num_attention_heads * RELEASED.head_dim
_Z, _F = RELEASED.o_groups * RELEASED.o_lora_rank, RELEASED.moe_intermediate_size

CASES: list[Case] = [
    _case("wq_b", _Q, _H),
    _case("index wq_b", _Q, RELEASED.index_n_heads * RELEASED.index_head_dim),
    _case("wq_a|wkv", _N, _Q + RELEASED.head_dim),
    _case("wo_a", _H // RELEASED.o_groups, _Z, RELEASED.o_groups),
    _case("wo_b", _Z, _N),
    _case("shared w1|w3", _N, 2 * _F),
    _case("shared w2", _F, _N),
]
