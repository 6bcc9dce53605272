"""Cases of the dense FP8 products at the measured step's shapes. Bytes: both operands once, the result once."""

from __future__ import annotations

from typing import Any

import torch

from bench.shapes import RELEASED, STEP_TOKENS, Case
from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS
from mini_deepinfer.ops.linear import Rotation, scaled_gemm


def scaled_gemm_case(name: str, k: int, columns: int, groups: int = 1, *, rotated: bool = False) -> Case:
    """rotated: the heads of the result, as of wq_b."""
    tokens, rope_dim = STEP_TOKENS, RELEASED.qk_rope_head_dim

    def make(device: torch.device) -> dict[str, Any]:
        g = torch.Generator(device).manual_seed(1)
        angle = 6.28 * torch.rand(tokens, rope_dim // 2, generator=g, device=device)
        positions = torch.arange(tokens, dtype=torch.int32, device=device)
        rotation = Rotation(positions, torch.stack((angle.cos(), angle.sin()), -1), RELEASED.head_dim)
        return {
            "codes": (64 * torch.randn(tokens, groups, k, generator=g, device=device)).to(torch.float8_e4m3fn),
            "row_scale": torch.exp2(torch.randint(-9, -5, (tokens, groups), generator=g, device=device).float()),
            "weight": (64 * torch.randn(columns, k, generator=g, device=device)).to(torch.float8_e4m3fn),
            "weight_scale": torch.exp2(torch.randint(-12, -9, (columns,), generator=g, device=device).float()),
            "rotation": rotation if rotated else None,
        }

    def check(inputs: dict[str, Any], out: torch.Tensor) -> float:
        some = slice(0, tokens, tokens // 32)
        rotation = inputs["rotation"]
        part = {**inputs, "codes": inputs["codes"][some], "row_scale": inputs["row_scale"][some]}
        part["rotation"] = None if rotation is None else Rotation(rotation.positions[some], *rotation[1:])
        wanted = scaled_gemm(**part, impl="reference").float()
        error = float((out[some].float() - wanted).abs().max() / wanted.abs().max())
        if not error <= 2.0**-8:
            raise ValueError(f"max error {error:.3e} of the largest value over {2.0**-8:.3e}")
        return error

    return Case(
        op="linear.scaled_gemm",
        name=f"{name} T={tokens} K={k} O={columns}",
        params={"T": tokens, "K": k, "O": columns, "g": groups, "rotated": rotated, "dtype": "fp8"},
        make=make,
        run=lambda inputs, impl: scaled_gemm(**inputs, impl=impl),
        check=check,
        flops=2.0 * tokens * k * columns,
        bytes=float(tokens * k * groups + k * columns + 2 * tokens * columns),
        impls=IMPLEMENTATIONS["linear.scaled_gemm"],
    )


_Q, _N, _H = RELEASED.q_lora_rank, RELEASED.hidden_size, RELEASED.num_attention_heads * RELEASED.head_dim
_Z = RELEASED.o_groups * RELEASED.o_lora_rank

CASES: list[Case] = [
    scaled_gemm_case("wq_b, rotated", _Q, _H, rotated=True),
    scaled_gemm_case("wq_b", _Q, _H),
    scaled_gemm_case("wq_a|wkv", _N, _Q + RELEASED.head_dim),
    scaled_gemm_case("wo_a", _H // RELEASED.o_groups, _Z, RELEASED.o_groups),
    scaled_gemm_case("wo_b", _Z, _N),
    scaled_gemm_case("shared w1|w3", _N, 2 * RELEASED.moe_intermediate_size),
    scaled_gemm_case("shared w2", RELEASED.moe_intermediate_size, _N),
]
