"""The model: embedding into residual streams, blocks, head (model spec 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mini_deepinfer.batch import PrefillBatch
from mini_deepinfer.config import LayerPlan, ModelConfig, NumericProfile
from mini_deepinfer.kv_cache import Caches
from mini_deepinfer.model.attention import Attention
from mini_deepinfer.model.engram import Engram
from mini_deepinfer.model.moe import MoE
from mini_deepinfer.model.rope import RopeTables
from mini_deepinfer.model.step import Step, Trace
from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops.linear import linear
from mini_deepinfer.parallel import ExpertParallel
from mini_deepinfer.stages import stage
from mini_deepinfer.weights import Weights


class HyperConnection:
    """One site's coefficients: how the streams are collapsed for the NEXT sublayer and how this one's output is spread (spec 3.3)."""

    def __init__(self, config: ModelConfig, layer: int, site: str, weights: Weights) -> None:
        self.config = config
        name = f"layers.{layer}.hc_{site}"
        self.fn, self.base, self.scale = (weights.tensors[f"{name}_{part}"] for part in ("fn", "base", "scale"))

    def __call__(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams [T, n, N] to pre [T, n], post [T, n], comb [T, n, n], float32."""
        config = self.config
        return elementwise.hc_mix(
            streams, self.fn, self.base, self.scale, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        )


class Block:
    """One layer: engram where the schedule has one, attention, experts (spec 3.2)."""

    def __init__(
        self,
        config: ModelConfig,
        profile: NumericProfile,
        plan: LayerPlan,
        weights: Weights,
        tables: RopeTables,
        parallel: ExpertParallel,
    ) -> None:
        self.config, self.index = config, plan.index
        self.engram = Engram(config, profile, plan, weights) if plan.engram is not None else None
        self.hc_attn = HyperConnection(config, plan.index, "attn", weights)
        self.hc_ffn = HyperConnection(config, plan.index, "ffn", weights)
        self.attn_norm = weights.tensors[f"layers.{plan.index}.attn_norm.weight"]
        self.ffn_norm = weights.tensors[f"layers.{plan.index}.ffn_norm.weight"]
        self.attn = Attention(config, profile, plan, weights, tables.for_ratio(plan.ratio))
        self.ffn = MoE(config, profile, plan, weights, parallel)

    def __call__(self, streams: torch.Tensor, pre: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """streams [T, n, N] and the collapse coefficients of the previous sublayer; the same two for the next block."""
        step.record("streams", self.index, streams)
        if self.engram is not None:
            with stage("engram"):
                streams = self.engram(streams, step.engram_rows[self.index])
            step.record("engram_out", self.index, streams)
        streams, pre = self._sublayer("attn", self.hc_attn, self.attn_norm, self.attn, streams, pre, step)
        return self._sublayer("ffn", self.hc_ffn, self.ffn_norm, self.ffn, streams, pre, step)

    def _sublayer(self, name, site, norm, body, streams, pre, step) -> tuple[torch.Tensor, torch.Tensor]:
        """The streams are collapsed with the PREVIOUS sublayer's coefficients; this site's are handed on."""
        with stage("hc"):
            next_pre, post, comb = site(streams)
            x = elementwise.rmsnorm(elementwise.hc_collapse(streams, pre), norm, self.config.rms_norm_eps)
        y = body(x, step)
        for part, tensor in (("in", x), ("out", y)):
            step.record(f"{name}_{part}", self.index, tensor)
        for part, tensor in (("pre", next_pre), ("post", post), ("comb", comb)):
            step.record(f"hc_{name}_{part}", self.index, tensor)
        with stage("hc"):
            return elementwise.hc_expand(y, streams, post, comb), next_pre


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU the library splits sums over its threads: with one thread the bits do not depend on how many there are."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Model:
    """The text model of one rank. Weights are prepared for the device once; the caches belong to the model's engine."""

    def __init__(
        self,
        config: ModelConfig,
        profile: NumericProfile,
        weights: Weights,
        caches: Caches,
        parallel: ExpertParallel,
        device: torch.device | str,
        max_model_len: int | None = None,
    ) -> None:
        self.config, self.profile, self.caches, self.parallel = config, profile, caches, parallel
        self.device = torch.device(device)
        tables = RopeTables(config, max_model_len or config.max_position_embeddings, self.device)
        self.embed = weights.tensors["embed.weight"]
        self.head, self.norm = weights.tensors["head.weight"], weights.tensors["norm.weight"]
        self.blocks = [Block(config, profile, plan, weights, tables, parallel) for plan in config.layers]

    @torch.inference_mode()
    def forward(self, batch: PrefillBatch, trace: Trace | None = None) -> torch.Tensor:
        """Run one step, write its rows to the caches, and return float32 logits [O, V] of batch.output_rows.

        Every rank of the expert-parallel group must call this together, with zero tokens if it has none.
        trace(name, layer, tensor) receives intermediate tensors (tests and tools).
        """
        with _one_thread(self.device):
            return self._forward(batch, trace)

    def _forward(self, batch: PrefillBatch, trace: Trace | None) -> torch.Tensor:
        config = self.config
        step = Step(batch, self.caches, self.parallel.gather_counts(batch.num_tokens), trace)
        for block in self.blocks:
            if block.engram is not None:
                step.engram_rows[block.index] = block.engram.prefetch(batch.engram_rows, self.device)
        with stage("embed"):
            embedded = self.embed[batch.token_ids].to(self.profile.compute_dtype)
            streams = embedded[:, None].repeat(1, config.hc_mult, 1)
            pre = torch.zeros(batch.num_tokens, config.hc_mult, device=self.device)
            pre[:, 0] = 1.0
        for block in self.blocks:
            streams, pre = block(streams, pre, step)
        with stage("head"):
            rows = batch.output_rows
            x = elementwise.hc_collapse(streams[rows], pre[rows])
            hidden = elementwise.rmsnorm(x, self.norm, config.rms_norm_eps)
            step.record("final_hidden", config.num_hidden_layers, hidden)
            return linear(hidden, self.head, self.profile, torch.float32)
