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
        ids = torch.empty(x.shape[0], config.index_topk, dtype=torch.int32, device=x.device)
        count = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
        blocks = None
        if plan.is_candidate_source:
            blocks = torch.empty(x.shape[0], config.candidate_topk_blocks, dtype=torch.int32, device=x.device)
        candidates = step.candidates if plan.uses_candidates else None
        columns = width if candidates is None else candidates.shape[1] * config.candidate_block_size
        rows = max(1, LOGITS_BYTES // max(1, columns * x.element_size()))
        for start in range(0, x.shape[0], rows):
            part = slice(start, start + rows)
            self._select_rows(part, codes, scale, weights, visible, width, candidates, ids, count, blocks, step)
        step.record("selection", plan.index, ids)
        if blocks is not None:
            step.candidates = blocks
            step.record("candidates", plan.index, blocks)
        return Selection(ids, step.cache_rows(ids, plan.ratio), count)

    def _select_rows(self, part, codes, scale, weights, visible, width, candidates, ids, count, blocks, step) -> None:
        """Score and select one chunk of queries into ids, count and blocks."""
        config, batch = self.config, step.batch
        keys = step.caches.index_keys[self.key_owner]
        entries_per_page = step.caches.geometry.page_size // self.plan.ratio
        where = (keys, batch.page_table, batch.seq_of_token[part], visible[part], entries_per_page)
        with stage("indexer.logits"):
            if candidates is None:
                scores = indexer.logits(codes[part], scale[part], weights[part], *where, width)
            else:
                scores = indexer.candidate_logits(
                    codes[part], scale[part], weights[part], *where, candidates[part], config.candidate_block_size
                )
        k, block_size = config.index_topk, config.candidate_block_size
        with stage("indexer.topk"):
            if candidates is not None:
                ids[part], count[part] = indexer.topk(scores, None, k, candidates=candidates[part], block_size=block_size)
                return
            step.record("index_scores", self.plan.index, scores)
            if blocks is None:
                ids[part], count[part] = indexer.topk(scores, visible[part], k)
            else:  # the candidate source
                ids[part], count[part], blocks[part] = indexer.topk_blocks(
                    scores, visible[part], k, block_size, config.candidate_topk_blocks
                )
