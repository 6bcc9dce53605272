"""Rotary tables (model spec 4.2): one without YaRN for window-only layers, one with YaRN for every layer that compresses."""

from __future__ import annotations

import math

import torch

from mini_deepinfer.config import ModelConfig, RopeScaling


def rope_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """float32 [R/2] angular frequencies. They depend on the config only, never on a length in use."""
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    freq = 1.0 / theta**exponent
    if scaling is None:
        return freq

    def correction(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), rope_dim - 1)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freq / scaling.factor * ramp + freq * (1 - ramp)


def rope_table(frequencies: torch.Tensor, num_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [num_positions, R/2, 2]: cos and sin of f32(pos) * f32(frequency), the product rounded to float32."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    table = torch.empty(num_positions, frequencies.shape[0], 2)
    for start in range(0, num_positions, 65536):  # built on the CPU: the same bits on every device
        angle = positions[start : start + 65536, None] * frequencies
        table[start : start + 65536, :, 0] = torch.cos(angle)
        table[start : start + 65536, :, 1] = torch.sin(angle)
    return table.to(device)


class RopeTables:
    """The two tables of a model, chosen by a layer's ratio."""

    def __init__(self, config: ModelConfig, num_positions: int, device: torch.device) -> None:
        window = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, None)
        compressed = rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
        ratios = set(config.compress_ratios)
        self._window = rope_table(window, num_positions, device) if 0 in ratios else None
        self._compressed = rope_table(compressed, num_positions, device) if ratios - {0} else None

    def for_ratio(self, ratio: int) -> torch.Tensor:
        """float32 [num_positions, R/2, 2]"""
        table = self._compressed if ratio > 0 else self._window
        if table is None:
            raise ValueError(f"rope: the model has no layer of ratio {ratio}")
        return table
