"""A test of the golden test: each of these single mistakes must push the logits out of its acceptance rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from mini_deepinfer.model import attention as attention_module
from mini_deepinfer.model import transformer
from mini_deepinfer.ops import attention, elementwise, reference
from mini_deepinfer.ops.linear import Activation
from tests.golden import NOISE_MEAN, Runner, golden


def config_edit(**changes) -> Callable[[pytest.MonkeyPatch, Runner], None]:
    def apply(patch: pytest.MonkeyPatch, run: Runner) -> None:
        run.reload(lambda config: dataclasses.replace(config, **changes))

    return apply


def weight_edit(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[pytest.MonkeyPatch, Runner], None]:
    def apply(patch: pytest.MonkeyPatch, run: Runner) -> None:
        run.reload(edit_weights=edit)

    return apply


def each(tensors: dict[str, torch.Tensor], suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    names = [name for name in tensors if name.endswith(suffix)]
    if not names:
        raise KeyError(suffix)
    for name in names:
        tensors[name] = change(tensors[name])


def no_inverse_rope(patch: pytest.MonkeyPatch, run: Runner) -> None:
    original = reference.attention.rope

    def rope(x, positions, table, inverse=False, out=None):
        return x if inverse else original(x, positions, table, out=out)

    patch.setattr(reference.attention, "rope", rope)


def comb_transposed(patch: pytest.MonkeyPatch, run: Runner) -> None:
    original = reference.elementwise.hc_expand
    patch.setattr(reference.elementwise, "hc_expand", lambda y, s, post, comb, out=None: original(y, s, post, comb.transpose(1, 2), out))


def own_pre_mix(patch: pytest.MonkeyPatch, run: Runner) -> None:
    """Every site collapses with its own coefficients instead of the last site's."""

    def enter(residual, site, norm, profile, *, folded, keep_x):
        streams = residual.streams()
        residual.pre, residual.post, residual.comb = elementwise.hc_mix(streams, *site.arguments)
        return Activation.normed(elementwise.hc_collapse(streams, residual.pre), norm, 1e-20, profile, folded=folded)

    patch.setattr(transformer.Residual, "enter", enter)


def mean_pooling(patch: pytest.MonkeyPatch, run: Runner) -> None:
    original = attention.compress

    def compress(kv, score, tail_kv, tail_score, group_rows, out_dtype):
        zero = None if score is None else torch.zeros_like(score)
        zero_tail = None if tail_score is None else torch.zeros_like(tail_score)
        return original(kv, zero, tail_kv, zero_tail, group_rows, out_dtype)

    patch.setattr(attention_module.attention, "compress", compress)


def nibbles_swapped(tensors: dict[str, torch.Tensor]) -> None:
    for suffix in ("experts.w13", "experts.w2"):
        each(tensors, suffix, lambda packed: (packed >> 4) | (packed << 4))


def window_not_quantised(patch: pytest.MonkeyPatch, run: Runner) -> None:
    """Keys of the window rows as computed, not as the FP8 cache holds them."""
    exact: dict[int, torch.Tensor] = {}
    original_write, original_unpack = reference.attention.write_window, reference.attention.unpack_window

    def write(kv, rows, slots):
        original_write(kv, rows, slots)
        exact["kv"] = torch.zeros(rows.shape[0], kv.shape[1])
        exact["kv"][slots.long()] = kv

    def gather(rows, index, length, unpack):
        keys, valid = original_gather(rows, index, length, unpack)
        if unpack is original_unpack:
            keys = torch.where(valid[..., None], exact["kv"][index.clamp(min=0).long()], 0.0)
        return keys, valid

    original_gather = reference.attention._gather
    patch.setattr(reference.attention, "write_window", write)
    patch.setattr(reference.attention, "_gather", gather)


def no_candidates(patch: pytest.MonkeyPatch, run: Runner) -> None:
    run.reload(lambda config: dataclasses.replace(config, candidate_topk_blocks=1024))


MISTAKES: dict[str, tuple[int, Callable[[pytest.MonkeyPatch, Runner], None]]] = {
    "no attention sink": (33, weight_edit(lambda t: each(t, "attn_sink", lambda s: torch.full_like(s, -1e9)))),
    "sink is zero": (33, weight_edit(lambda t: each(t, "attn_sink", torch.zeros_like))),
    "window one short": (33, config_edit(sliding_window=15)),
    "no YaRN": (33, config_edit(rope_scaling=None)),
    "base theta on compressed layers": (33, config_edit(compress_rope_theta=10000.0)),
    "no index selection": (100, config_edit(index_topk=128, candidate_topk_blocks=1024)),
    "candidates ignored": (193, no_candidates),
    "gate bias ignored": (33, weight_edit(lambda t: each(t, "gate.bias", torch.zeros_like))),
    "no routed scaling": (33, config_edit(routed_scaling_factor=1.0)),
    "no SwiGLU clamp": (33, config_edit(swiglu_limit=0.0)),
    "one Sinkhorn iteration": (33, config_edit(hc_sinkhorn_iters=1)),
    "comb transposed": (33, comb_transposed),
    "own pre-mix": (33, own_pre_mix),
    "no inverse RoPE": (33, no_inverse_rope),
    "mean pooling": (33, mean_pooling),
    "nibbles swapped": (33, weight_edit(nibbles_swapped)),
    "window rows not quantised": (33, window_not_quantised),
    "engram k_weight ignored": (33, weight_edit(lambda t: each(t, "engram.k_weight", torch.ones_like))),
    "engram pad id": (33, config_edit(engram_pad_token_id=7)),
    "activation quantisation on": (33, lambda patch, run: run.reload(activation_quant=True)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_caught(name, monkeypatch):
    length, inject = MISTAKES[name]
    run = Runner()
    inject(monkeypatch, run)
    logits = run.score(golden()[f"L{length}.input_ids"].numpy())
    mean = (logits - golden()[f"L{length}.f32.logits"]).abs().mean()
    assert mean > max(1e-4, 3 * NOISE_MEAN[length]), f"mean |diff| {mean:.4f} would be accepted"
