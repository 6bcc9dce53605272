"""The model: embedding into residual streams, blocks, head (model spec 3)."""

from __future__ import annotations

import dataclasses
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
from mini_deepinfer.ops._dispatch import fixed_environment
from mini_deepinfer.ops.linear import Activation, linear
from mini_deepinfer.parallel import ExpertParallel
from mini_deepinfer.stages import stage
from mini_deepinfer.weights import Weights


class HyperConnection:
    """One site's weights: how the streams are collapsed for the NEXT sublayer and how this one's output is spread (spec 3.3)."""

    def __init__(self, config: ModelConfig, layer: int, site: str, weights: Weights) -> None:
        name = f"layers.{layer}.hc_{site}"
        fn, base, scale = (weights.tensors[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        self.arguments = (fn, base, scale, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)


class Residual:
    """The residual streams [T, n, N] between two sublayers.

    pre [T, n], post [T, n], comb [T, n, n] are the coefficients of the last site; its sublayer's output y waits to be spread over the
    streams until the next site reads them, so that one pass over the streams does both (spec 3.2).
    """

    def __init__(self, streams: torch.Tensor, pre: torch.Tensor) -> None:
        self._streams, self.pre = streams, pre
        self._pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # y, post, comb

    def streams(self) -> torch.Tensor:
        """The streams with the last sublayer's output in them."""
        if self._pending is not None:
            y, post, comb = self._pending
            self._streams, self._pending = elementwise.hc_expand(y, self._streams, post, comb), None
        return self._streams

    def replace(self, streams: torch.Tensor) -> None:
        """Other streams, with everything in them (engram)."""
        self._streams, self._pending = streams, None

    def enter(
        self, site: HyperConnection, norm: torch.Tensor, profile: NumericProfile, *, folded: bool, keep_x: bool
    ) -> Activation:
        """The next sublayer's input: the streams collapsed with the LAST site's coefficients, normed and quantised.

        This site's coefficients become the current ones. folded: as in Activation.normed; keep_x False: nobody reads the input's x.
        """
        eps = site.arguments[-1]
        if self._pending is None:
            x = elementwise.hc_collapse(self._streams, self.pre)
            self.pre, self.post, self.comb = elementwise.hc_mix(self._streams, *site.arguments)
            return Activation.normed(x, norm, eps, profile, folded=folded)
        (y, post, comb), self._pending = self._pending, None
        if not profile.activation_quant:
            self._streams, x, self.pre, self.post, self.comb = elementwise.hc_expand_mix(
                y, self._streams, self.pre, post, comb, *site.arguments
            )
            return Activation.normed(x, norm, eps, profile, folded=folded)
        folded = folded and Activation.folds(y)
        self._streams, normed, codes, scale, self.pre, self.post, self.comb = elementwise.hc_expand_mix_norm_quant(
            y, self._streams, self.pre, post, comb, *site.arguments, norm, folded=folded, keep_x=keep_x
        )
        return Activation.quantised(normed, codes, scale, profile, folded=folded)

    def leave(self, y: torch.Tensor) -> None:
        """The sublayer's output y [T, N], to be spread with this site's post and comb."""
        self._pending = (y, self.post, self.comb)

    def select(self, rows: torch.Tensor) -> Residual:
        """The same state for some tokens."""
        part = Residual(self._streams[rows], self.pre[rows])
        if self._pending is not None:
            y, post, comb = self._pending
            part._pending = (y[rows], post[rows], comb[rows])
        return part


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
        self.config, self.profile, self.index = config, profile, plan.index
        self.engram = Engram(config, profile, plan, weights) if plan.engram is not None else None
        self.hc_attn = HyperConnection(config, plan.index, "attn", weights)
        self.hc_ffn = HyperConnection(config, plan.index, "ffn", weights)
        self.attn_norm = weights.tensors[f"layers.{plan.index}.attn_norm.weight"]
        self.ffn_norm = weights.tensors[f"layers.{plan.index}.ffn_norm.weight"]
        self.attn = Attention(config, profile, plan, weights, tables.for_ratio(plan.ratio))
        self.ffn = MoE(config, profile, plan, weights, parallel)

    def __call__(self, residual: Residual, step: Step) -> None:
        """Carry the residual streams through this layer."""
        if step.trace is not None:
            step.record("streams", self.index, residual.streams())
        if self.engram is not None:
            with stage("engram"):
                residual.replace(self.engram(residual.streams(), step.batch.engram_rows[self.engram.index]))
            step.record("engram_out", self.index, residual.streams())
        with stage("hc"):
            keep_x = self.attn.reads_x or step.trace is not None
            act = residual.enter(self.hc_attn, self.attn_norm, self.profile, folded=True, keep_x=keep_x)
        self._leave("attn", act, self.attn(act, step), residual, step)
        with stage("hc"):
            act = residual.enter(self.hc_ffn, self.ffn_norm, self.profile, folded=self.ffn.folded, keep_x=True)  # the router reads it
        self._leave("ffn", act, self.ffn(act, step), residual, step)

    def _leave(self, name: str, act: Activation, y: torch.Tensor, residual: Residual, step: Step) -> None:
        residual.leave(y)
        if step.trace is not None:
            step.record(f"{name}_in", self.index, act.x)
            step.record(f"{name}_out", self.index, y)
            for part, tensor in (("pre", residual.pre), ("post", residual.post), ("comb", residual.comb)):
                step.record(f"hc_{name}_{part}", self.index, tensor)


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
        self.only_kernels = self.device.type == "cuda" and profile.compute_dtype == torch.bfloat16 and profile.activation_quant
        tables = RopeTables(config, max_model_len or config.max_position_embeddings, self.device)
        self.embed = weights.tensors["embed.weight"]
        self.head, self.norm = weights.tensors["head.weight"], weights.tensors["norm.weight"]
        self.blocks = [Block(config, profile, plan, weights, tables, parallel) for plan in config.layers]

    def prefetch(self, batch: PrefillBatch) -> PrefillBatch:
        """The batch with its engram rows on their way to the device, for one that is built while an earlier step runs.

        `forward` starts what has not been started, but then the first engram layer may have to wait for its rows.
        """
        rows = list(batch.engram_rows)
        for block in self.blocks:
            if block.engram is not None:
                rows[block.engram.index] = block.engram.prefetch(batch.engram_rows, self.device)
        return dataclasses.replace(batch, engram_rows=tuple(rows))

    @torch.inference_mode()
    def forward(self, batch: PrefillBatch, trace: Trace | None = None) -> torch.Tensor:
        """Run one step, write its rows to the caches, and return float32 logits [O, V] of batch.output_rows.

        Every rank of the expert-parallel group must call this together, with zero tokens if it has none.
        trace(name, layer, tensor) receives intermediate tensors (tests and tools).
        """
        with _one_thread(self.device), fixed_environment(only_kernels=self.only_kernels):
            return self._forward(batch, trace)

    def _forward(self, batch: PrefillBatch, trace: Trace | None) -> torch.Tensor:
        config = self.config
        batch = self.prefetch(batch)
        step = Step(batch, self.caches, self.parallel.gather_counts(batch.num_tokens), trace, self.parallel.rank)
        with stage("embed"):
            ids = batch.token_ids[:, None].expand(-1, config.hc_mult)  # every stream begins with the token's row
            embedded = self.embed[ids.flatten()].to(self.profile.compute_dtype)
            streams = embedded.view(*ids.shape, embedded.shape[1])
            pre = torch.zeros(batch.num_tokens, config.hc_mult, device=self.device)
            pre[:, 0] = 1.0
            residual = Residual(streams, pre)
        for block in self.blocks:
            block(residual, step)
        self.caches.carry_windows(batch.ring_src, batch.ring_dst)  # all queries have read the rings of the step before
        with stage("head"):
            last = residual.select(batch.output_rows)
            x = elementwise.hc_collapse(last.streams(), last.pre)
            hidden = elementwise.rmsnorm(x, self.norm, config.rms_norm_eps)
            step.record("final_hidden", config.num_hidden_layers, hidden)
            return linear(hidden, self.head, self.profile, torch.float32)
