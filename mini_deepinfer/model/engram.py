"""The engram sublayer: hashed n-gram rows, projected and gated into every stream (model spec 7.4)."""

from __future__ import annotations

import torch

from mini_deepinfer.config import LayerPlan, ModelConfig, NumericProfile
from mini_deepinfer.model.step import Step
from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops.linear import Activation, Fp8Weight, fp8_linear
from mini_deepinfer.weights import Weights


class Engram:
    """Looks up this layer's table rows of every token and adds their gated projection to the streams."""

    def __init__(self, config: ModelConfig, profile: NumericProfile, plan: LayerPlan, weights: Weights) -> None:
        self.config, self.profile = config, profile
        self.index = plan.engram if plan.engram is not None else 0
        name = f"layers.{plan.index}.engram"
        self.table = weights.engram[plan.index]
        self.wkv = Fp8Weight(weights.tensors[f"{name}.wkv.weight"], weights.tensors[f"{name}.wkv.scale"], f"{name}.wkv")
        self.q_weight, self.k_weight = weights.tensors[f"{name}.q_weight"], weights.tensors[f"{name}.k_weight"]

    def __call__(self, streams: torch.Tensor, step: Step) -> torch.Tensor:
        """streams [T, n, N] to new streams."""
        row_ids = step.batch.engram_rows[self.index]
        codes, scale = self.table.gather(row_ids.flatten())
        codes = codes.to(streams.device, non_blocking=True).view(row_ids.shape[0], -1)
        scale = scale.to(streams.device, non_blocking=True).view(row_ids.shape[0], -1)
        rows = elementwise.expand_fp8(codes, scale).to(streams.dtype)
        z = fp8_linear(Activation(rows, self.profile.activation_quant), self.wkv)
        return elementwise.engram_gate(streams, z, self.q_weight, self.k_weight, self.config.rms_norm_eps)
