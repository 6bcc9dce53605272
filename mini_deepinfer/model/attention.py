"""The attention sublayer: projections, window and compressed KV, selection, sparse attention, output projection (model spec 4)."""

from __future__ import annotations

import torch

from mini_deepinfer.config import LayerPlan, ModelConfig, NumericProfile
from mini_deepinfer.model.indexer import Indexer
from mini_deepinfer.model.step import Step
from mini_deepinfer.ops import attention, elementwise, reference
from mini_deepinfer.ops.linear import Activation, Fp8Weight, fp8_grouped_linear, fp8_linear, grouped_linear, linear
from mini_deepinfer.stages import stage
from mini_deepinfer.weights import Weights


class Compressor:
    """Pools r consecutive tokens to one latent row and writes it to the compressed cache (model spec 4.3)."""

    def __init__(
        self, config: ModelConfig, profile: NumericProfile, plan: LayerPlan, weights: Weights, table: torch.Tensor
    ) -> None:
        self.config, self.profile, self.plan, self.table = config, profile, plan, table
        name = f"layers.{plan.index}.attn.compressor"
        self.wkv = weights.tensors[f"{name}.wkv.weight"]
        self.wgate = weights.tensors[f"{name}.wgate.weight"] if plan.ratio > 1 else None
        self.norm = weights.tensors[f"{name}.norm.weight"]

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Latent rows [G, D] of the groups that x [T, N] completes, before their rotary embedding."""
        group, caches, layer = step.batch.compress[self.plan.ratio], step.caches, self.plan.index
        kv = linear(x, self.wkv, self.profile, torch.float32)
        if self.wgate is None:
            pooled = attention.compress(kv, None, None, None, group.group_rows, x.dtype)
        else:
            score = linear(x, self.wgate, self.profile, torch.float32)
            tail_kv, tail_score = caches.tail_kv[layer], caches.tail_score[layer]
            pooled = attention.compress(kv, score, tail_kv, tail_score, group.group_rows, x.dtype)
            tail_kv[group.tail_dst] = kv[group.tail_src]  # after the groups that needed the old tails
            tail_score[group.tail_dst] = score[group.tail_src]
        latent = elementwise.rmsnorm(pooled, self.norm, self.config.rms_norm_eps)
        roped = elementwise.rope(latent[:, None], group.positions, self.table)[:, 0]
        attention.write_compressed(roped, caches.compressed[layer], group.rows)
        return latent


class Attention:
    """One attention sublayer. K = V: one row of `head_dim` serves all heads."""

    def __init__(
        self, config: ModelConfig, profile: NumericProfile, plan: LayerPlan, weights: Weights, table: torch.Tensor
    ) -> None:
        self.config, self.profile, self.plan, self.table = config, profile, plan, table
        name = f"layers.{plan.index}.attn"
        tensors = weights.tensors
        self.q_norm, self.kv_norm = tensors[f"{name}.q_norm.weight"], tensors[f"{name}.kv_norm.weight"]
        self.sink = tensors[f"{name}.attn_sink"]

        def fp8(*parts: str) -> Fp8Weight:
            operands = [(tensors[f"{name}.{part}.weight"], tensors[f"{name}.{part}.scale"]) for part in parts]
            return Fp8Weight.stack(operands, f"{name}.{'|'.join(parts)}")

        self.wq_a_wkv, self.wq_b, self.wo_b = fp8("wq_a", "wkv"), fp8("wq_b"), fp8("wo_b")
        self.wo_a: Fp8Weight | torch.Tensor  # spec 4.7: FP8 under the production profile, else exact [g, O, K] in the compute dtype
        if profile.wo_a == "fp8":
            self.wo_a = fp8("wo_a")
        else:
            wo_a = (tensors[f"{name}.wo_a.weight"], tensors[f"{name}.wo_a.scale"])
            self.wo_a = reference.linear.dequant_block32(*wo_a, profile.compute_dtype).unflatten(0, (config.o_groups, -1))
        self.compressor = Compressor(config, profile, plan, weights, table) if plan.owns_kv else None
        self.indexer = Indexer(config, profile, plan, weights, table) if plan.owns_kv or plan.owns_selection else None

    @property
    def reads_x(self) -> bool:
        """Whether a call reads the values of its input, not only their folded form."""
        return self.indexer is not None or self.wq_a_wkv.folded is None

    def __call__(self, act: Activation, step: Step) -> torch.Tensor:
        """The normed input [T, N] to [T, N]."""
        config, plan, batch = self.config, self.plan, step.batch
        window = step.caches.window[plan.index]
        with stage("attention.project"):
            low_rank, kv = fp8_linear(act, self.wq_a_wkv).split((config.q_lora_rank, config.head_dim), 1)
            query = Activation.normed(low_rank, self.q_norm, config.rms_norm_eps, self.profile, folded=True)
            q = fp8_linear(query, self.wq_b).view(act.shape[0], config.num_attention_heads, config.head_dim)
            attention.write_normed_window(
                kv, self.kv_norm, config.rms_norm_eps, batch.positions, self.table, window, batch.window_rows
            )
        if self.compressor is not None and self.indexer is not None:
            with stage("attention.compress"):
                latent = self.compressor(act.x, step)
                self.indexer.write_keys(latent, step)
            with stage("attention.sparse"):
                step.expand(plan, config, q)
        if plan.owns_selection and self.indexer is not None:
            step.selections[plan.index] = self.indexer.select(act.x, query, step)
        compressed = rows = count = None
        if plan.kv_owner is not None and plan.index_source is not None:
            compressed, selection = step.caches.compressed[plan.kv_owner], step.selections[plan.index_source]
            rows, count = selection.rows, selection.count
            if step.expanded is not None:
                compressed = step.expanded
        if (compressed is None or compressed is step.expanded) and step.expands_windows(q):  # one call's rows are all of one form
            with stage("attention.sparse"):
                window = attention.expand_rows(window, config.head_dim)
        scale = config.head_dim**-0.5
        z = self._grouped_output(q, window, batch.window_idx, compressed, rows, count, self.sink, scale, batch.positions, self.table)
        with stage("attention.output"):
            return fp8_linear(Activation(z, self.profile), self.wo_b)

    def _grouped_output(self, q: torch.Tensor, *operands) -> torch.Tensor:
        """Sparse attention of q [T, H, D] and the grouped projection of its output: [T, groups * rank] (spec 4.5 to 4.7)."""
        groups = self.config.o_groups
        if isinstance(self.wo_a, torch.Tensor):
            with stage("attention.sparse"):
                o = attention.sparse_rope(q, *operands)
            with stage("attention.output"):
                return grouped_linear(o.unflatten(1, (groups, -1)).flatten(2), self.wo_a, self.profile).flatten(1)
        folded = Activation.folds(q) and self.wo_a.folded is not None
        with stage("attention.sparse"):
            rows = attention.sparse_rope_quant(q, *operands, groups=groups, folded=folded)
        with stage("attention.output"):
            return fp8_grouped_linear(*rows, self.wo_a, q.dtype, self.profile)
