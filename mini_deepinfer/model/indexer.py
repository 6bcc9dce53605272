"""Index keys, scores and the selection of compressed rows (model spec 5)."""

from __future__ import annotations

import torch

from mini_deepinfer.config import LayerPlan, ModelConfig, NumericProfile
from mini_deepinfer.model.step import Selection, Step
from mini_deepinfer.ops import elementwise, indexer
from mini_deepinfer.ops.linear import Activation, Fp8Weight, fp8_linear, linear
from mini_deepinfer.stages import stage
from mini_deepinfer.weights import Weights

LOGITS_BYTES = 512 << 20  # scores held at once: queries are scored in chunks of rows that fit


class Indexer:
    """Scores the compressed entries of a layer's KV owner and picks the `index_topk` best for every token.

    A layer may own keys (it owns the compressed cache), queries (it selects), or both.
    """

    def __init__(
        self, config: ModelConfig, profile: NumericProfile, plan: LayerPlan, weights: Weights, table: torch.Tensor
    ) -> None:
        self.config, self.profile, self.plan, self.table = config, profile, plan, table
        name = f"layers.{plan.index}.attn.indexer"
        if plan.owns_kv:
            self.wk = weights.tensors[f"{name}.wk.weight"]
            self.k_norm = weights.tensors[f"{name}.k_norm.weight"]
        if plan.owns_selection:
            self.wq_b = Fp8Weight(weights.tensors[f"{name}.wq_b.weight"], weights.tensors[f"{name}.wq_b.scale"], f"{name}.wq_b")
            self.key_owner = plan.index_key_owner if plan.index_key_owner is not None else plan.index
            self.weights_proj = weights.tensors[f"{name}.weights_proj.weight"]

    def write_keys(self, latent: torch.Tensor, step: Step) -> None:
        """Index keys of this step's compressed groups: latent [G, D] before its rotary embedding (spec 5.1)."""
        group = step.batch.compress[self.plan.ratio]
        key = elementwise.rmsnorm(linear(latent, self.wk, self.profile), self.k_norm, self.config.rms_norm_eps)
        key = elementwise.rope(key[:, None], group.positions, self.table)[:, 0]
        indexer.write_keys(key, step.caches.index_keys[self.plan.index], group.rows)

    def select(self, x: torch.Tensor, query: Activation, step: Step) -> Selection:
        """The selection of every token (spec 5.2 to 5.5): x [T, N] normed layer input, query the quantised low-rank query."""
        config, plan, batch = self.config, self.plan, step.batch
        visible, width = step.visible(plan.ratio), batch.max_visible[plan.ratio]
        if width <= config.index_topk and step.trace is None:  # everything visible is selected; scores would change nothing
            ids = torch.arange(config.index_topk, dtype=torch.int32, device=x.device)[None]
            ids = torch.where(ids < visible[:, None], ids, -1)
            return Selection(ids, step.cache_rows(ids, plan.ratio), visible)
        with stage("indexer.logits"):
            q = fp8_linear(query, self.wq_b).view(x.shape[0], config.index_n_heads, config.index_head_dim)
            codes, scale = indexer.rope_quant_query(q, batch.positions, self.table)
            factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
            weights = linear(x, self.weights_proj, self.profile) * factor  # in float32, rounded once
        candidates = step.candidates if plan.uses_candidates else None
        columns = width if candidates is None else candidates.shape[1] * config.candidate_block_size
        rows = max(1, LOGITS_BYTES // max(1, columns * x.element_size()))
        chunks = [slice(start, start + rows) for start in range(0, max(1, x.shape[0]), rows)]  # one even for no tokens
        parts = [self._select_rows(chunk, codes, scale, weights, visible, width, candidates, step) for chunk in chunks]
        ids, count, *blocks = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts))
        step.record("selection", plan.index, ids)
        if plan.is_candidate_source:
            (step.candidates,) = blocks
            step.record("candidates", plan.index, step.candidates)
        return Selection(ids, step.cache_rows(ids, plan.ratio), count)

    def _select_rows(self, chunk, codes, scale, weights, visible, width, candidates, step) -> tuple[torch.Tensor, ...]:
        """Score and select one chunk of queries: ids, count, and blocks of the candidate source."""
        config, batch = self.config, step.batch
        keys = step.caches.index_keys[self.key_owner]
        entries_per_page = step.caches.geometry.page_size // self.plan.ratio
        where = (keys, batch.page_table, batch.seq_of_token[chunk], visible[chunk], entries_per_page)
        operands = (codes[chunk], scale[chunk], weights[chunk], *where)
        k, block_size = config.index_topk, config.candidate_block_size
        if candidates is not None:
            with stage("indexer.logits"):
                scores = indexer.candidate_logits(*operands, candidates[chunk], block_size)
            with stage("indexer.topk"):
                return indexer.topk(scores, None, k, candidates=candidates[chunk], block_size=block_size)
        with stage("indexer.logits"):
            scores = indexer.logits(*operands, width)
        step.record("index_scores", self.plan.index, scores)
        with stage("indexer.topk"):
            if self.plan.is_candidate_source:
                return indexer.topk_blocks(scores, visible[chunk], k, block_size, config.candidate_topk_blocks)
            return indexer.topk(scores, visible[chunk], k)
