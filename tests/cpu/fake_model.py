"""A stand-in for the model that lives on indices alone.

It stores what it is told to store, through the batch's own index tensors, in the real caches, and derives logits from
what the indices lead back to. A wrong row, a lost tail, a stale ring or a page of another request changes the logits of
the token, so scheduler, caches and batch are tested without any arithmetic of the real model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from mini_deepinfer.batch import PrefillBatch
from mini_deepinfer.kv_cache import Caches

VOCAB = 97
DIM = 32
MASK = (1 << 40) - 1


@dataclass(frozen=True)
class FakePlan:
    index: int
    ratio: int
    kv_owner: int | None
    owns_kv: bool


def fake_config(ratios: tuple[int, ...] = (0, 2, 2, 0, 1, 1, 1), owners: tuple[int, ...] = (1, 4), window: int = 8) -> SimpleNamespace:
    layers = []
    for index, ratio in enumerate(ratios):
        owner = max([o for o in owners if o <= index], default=None) if ratio else None
        layers.append(FakePlan(index, ratio, owner, index in owners))
    return SimpleNamespace(
        layers=tuple(layers),
        num_hidden_layers=len(ratios),
        sliding_window=window,
        head_dim=DIM,
        index_head_dim=DIM,
        engram_layer_ids=(),
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        eos_token_id=(96,),
        image_token_id=95,
        bos_token_id=0,
    )


def mix(*values: torch.Tensor) -> torch.Tensor:
    """A hash of int64 tensors, 40 bits."""
    state = torch.full_like(values[0], 0x9E3779B9)
    for value in values:
        state = ((state ^ value) * 0x5BD1E995 + 0x7F4A7C15) & MASK
        state = state ^ (state >> 17)
    return state


def to_rows(value: torch.Tensor, width: int) -> torch.Tensor:
    """int64 [M] -> uint8 [M, width], the value in the first 8 bytes."""
    rows = torch.zeros(len(value), width, dtype=torch.uint8)
    rows[:, :8] = value.contiguous().view(torch.uint8).view(-1, 8)
    return rows


def from_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, :8].clone(memory_format=torch.contiguous_format).view(torch.int64).view(-1)


class FakeModel:
    """forward(batch) -> float32 [O, VOCAB], with the data flow of the real layers."""

    def __init__(self, config: SimpleNamespace, caches: Caches) -> None:
        self.config = config
        self.caches = caches
        self.num_forwards = 0

    def forward(self, batch: PrefillBatch) -> torch.Tensor:
        self.num_forwards += 1
        caches = self.caches
        positions = batch.positions.long()
        state = mix(batch.token_ids, positions)
        for plan in self.config.layers:
            pool = caches.window[plan.index]
            pool[batch.window_rows.long()] = to_rows(state, pool.shape[1])
            if plan.owns_kv:
                self._compress(plan, batch, state)
            lanes = batch.window_idx.long()
            seen = from_rows(pool[lanes.clamp(min=0).view(-1)]).view(lanes.shape)
            order = torch.arange(lanes.shape[1]) + 1
            gathered = torch.where(lanes >= 0, mix(seen, order.expand_as(seen)), 0).sum(1) & MASK
            if plan.ratio:
                gathered = mix(gathered, self._read_compressed(plan, batch))
            state = mix(state, gathered, torch.full_like(state, plan.index))
            pool[batch.ring_dst] = pool[batch.ring_src]
        picked = state[batch.output_rows]
        vocab = torch.arange(VOCAB)
        return (mix(picked[:, None] + vocab, vocab.expand(len(picked), -1)) % 100003).float() / 1000

    def _compress(self, plan: FakePlan, batch: PrefillBatch, state: torch.Tensor) -> None:
        caches, compress, ratio = self.caches, batch.compress[plan.ratio], plan.ratio
        source = state
        if ratio > 1:
            tail = caches.tail_kv[plan.index].view(torch.int64)[:, 0]
            source = torch.cat([state, tail])
        members = source[compress.group_rows.long()]
        value = mix(*members.unbind(1), compress.positions.long())
        rows = caches.compressed[plan.index]
        rows[compress.rows.long()] = to_rows(value, rows.shape[1])
        keys = caches.index_keys[plan.index]
        keys[compress.rows.long()] = to_rows(value ^ 0x5555, keys.shape[1])
        if ratio > 1:
            caches.tail_kv[plan.index].view(torch.int64)[batch.compress[ratio].tail_dst, 0] = state[compress.tail_src]

    def _read_compressed(self, plan: FakePlan, batch: PrefillBatch) -> torch.Tensor:
        assert plan.kv_owner is not None
        per_page = self.caches.geometry.page_size // plan.ratio
        entry = torch.arange(batch.max_visible[plan.ratio])
        visible = (batch.positions.long() + 1) // plan.ratio
        row = batch.page_table.long()[batch.seq_of_token.long()][:, entry // per_page] * per_page + entry % per_page
        out = torch.zeros(batch.num_tokens, dtype=torch.int64)
        for rows in (self.caches.compressed[plan.kv_owner], self.caches.index_keys[plan.kv_owner]):
            value = from_rows(rows[row.reshape(-1)]).view(row.shape)
            value = mix(value, entry.expand_as(value))
            out = mix(out, torch.where(entry < visible[:, None], value, 0).sum(1) & MASK)
        return out
