"""Faults that real engines had, as tests of the model and its operations on the CPU. Case numbers as in docs/cases.md."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from mini_deepinfer.config import ModelConfig, RopeScaling
from mini_deepinfer.model.rope import rope_frequencies
from mini_deepinfer.ops import reference
from mini_deepinfer.tiny_checkpoint import preset_config, write_tiny_checkpoint
from tests.golden import Runner

PROMPT = np.array([0, 17, 300, 42, 9, 9, 123, 77, 5, 200, 81, 33, 34, 35, 400, 8, 61, 62, 63, 64, 65, 7, 250, *range(100, 117)])
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cases")
    write_tiny_checkpoint(path, preset_config("cases"), seed=3)
    return path


def make(folder, **options) -> Runner:
    return Runner(folder, activation_quant=True, page_size=4, **options)


def scaled(tensors, name: str, factor: float) -> None:
    """Scale a stored weight by a power of two through its E8M0 scales."""
    tensors[name] = tensors[name] + round(math.log2(factor))


# Scores, blocks of 4, keep 2 blocks, top 5: what is picked at every visible length.
BLOCK_SCORES = [5.0, 1.0, 0.0, 0.0, 9.0, 8.0, 7.0, 6.0, -3.0, -4.0, -5.0, -6.0]
BLOCK_PICKS = {
    0: [], 1: [0], 4: [0, 1, 2, 3], 5: [0, 1, 2, 3, 4], 8: [0, 4, 5, 6, 7],
    9: [4, 5, 6, 7, 8], 10: [4, 5, 6, 7, 8], 12: [4, 5, 6, 7, 8],
}  # fmt: skip


def test_c07_candidate_table():
    """The newest block is always a candidate (from visible - 1, not visible), with its partial tail; nothing fills short rows."""
    visible = torch.tensor(list(BLOCK_PICKS), dtype=torch.int32)
    scores = torch.tensor(BLOCK_SCORES).repeat(len(visible), 1)
    blocks = reference.indexer.candidate_blocks(scores, visible, 4, 2)
    entry = blocks.long()[:, :, None] * 4 + torch.arange(4)
    seen = (blocks[:, :, None] >= 0) & (entry < visible[:, None, None])
    pool = torch.gather(scores, 1, entry.clamp(0, 11).flatten(1)).where(seen.flatten(1), float("-inf"))
    ids, count = reference.indexer.topk(pool, None, 5, blocks, 4)
    for row, wanted in enumerate(BLOCK_PICKS.values()):
        assert ids[row].tolist() == wanted + [-1] * (5 - len(wanted))
        assert count[row] == len(wanted)


def test_c12_hyper_connection_axis():
    """comb[input, output] is summed over its first index."""
    comb, residual = torch.tensor([[[0.7, 0.2], [0.3, 0.8]]]), torch.tensor([[[1.0, 10.0], [2.0, 20.0]]])
    out = reference.elementwise.hc_expand(torch.zeros(1, 2), residual, torch.zeros(1, 2), comb)
    torch.testing.assert_close(out, torch.tensor([[[1.3, 13.0], [1.8, 18.0]]]))


def test_c12_lagged_pre_mix(folder):
    """Every collapse uses the coefficients of the sublayer before: the first uses stream 0 alone."""
    run, seen = make(folder), []
    run.score(PROMPT[:9], trace=lambda name, layer, tensor: seen.append((name, layer, tensor.clone())))
    trace = {(name, layer): tensor for name, layer, tensor in seen}
    pre = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(9, 1)
    for block in run.model.blocks:
        layer = block.index
        streams = trace.get(("engram_out", layer), trace["streams", layer])
        x = reference.elementwise.rmsnorm(reference.elementwise.hc_collapse(streams, pre), block.attn_norm, 1e-20)
        torch.testing.assert_close(trace["attn_in", layer], x, rtol=0, atol=0)
        pre = trace["hc_ffn_pre", layer]
    own = reference.elementwise.hc_collapse(trace["streams", 3], trace["hc_attn_pre", 3])
    lagged = reference.elementwise.hc_collapse(trace["streams", 3], trace["hc_ffn_pre", 2])
    assert (own - lagged).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("factor", [2, 4])
def test_c13_no_per_head_query_norm(folder, factor):
    """Scaling one head's query rows changes the logits: a V4 per-head norm would undo it."""

    def edit(tensors):
        for layer in (0, 3):  # rows of head 1: head_dim rows, tiles of 32
            scale = tensors[f"layers.{layer}.attn.wq_b.scale"]
            scale[2:4] = scale[2:4] + round(math.log2(factor))

    plain, changed = make(folder), make(folder)
    changed.reload(edit_weights=edit)
    diff = (plain.score(PROMPT) - changed.score(PROMPT)).abs().max()
    assert diff > 100 * TOLERANCE


def test_c14_frequencies():
    """Window-only layers use the plain base; compressed layers their own base with YaRN, at every length."""
    window = rope_frequencies(8, 10000.0, None)
    torch.testing.assert_close(window, torch.tensor([1, 0.1, 0.01, 0.001]))
    yarn = rope_frequencies(8, 160000.0, RopeScaling(16, 32, 1, 65536))
    torch.testing.assert_close(yarn, torch.tensor([1, 0.05, 0.00171875, 0.000046875]))


def test_c14_released_yarn_table():
    config = ModelConfig.released()
    table = rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
    want = {0: 1.0, 7: 0.0727107748, 8: 0.0500000007, 15: 0.00363553851, 16: 0.00226562493, 20: 2.96977785e-4, 24: 1.95312532e-5}
    for index, value in want.items():
        assert table[index].item() == pytest.approx(value, rel=3e-7)


def test_c14_length_does_not_matter(folder):
    """The option's maximum length changes no bit (200,000 positions against 64)."""
    short, long = make(folder, max_tokens=64), make(folder, max_tokens=64)
    long.reload(max_model_len=200000)
    assert torch.equal(short.score(PROMPT), long.score(PROMPT))


def test_c15_swiglu_clamp_values():
    """The gate is clamped from above only, up on both sides."""
    gate_up = torch.tensor([[20.0, 20.0], [20.0, -20.0], [-20.0, 20.0], [3.0, 4.0]])
    h = reference.moe.swiglu(gate_up, None, 10.0, None)
    torch.testing.assert_close(h[:, 0], torch.tensor([99.99546, -99.99546, -4.1223e-07, 11.43089]), rtol=1e-5, atol=0)
    nan = reference.moe.swiglu(torch.tensor([[float("nan"), 1.0], [1.0, float("nan")]]), None, 10.0, None)
    assert torch.isnan(nan).all()


@pytest.mark.parametrize("part", ["routed", "shared"])
def test_c15_clamp_reaches_both_kinds_of_expert(folder, part):
    def edit(tensors):
        for layer in range(7):
            if part == "routed":
                tensors[f"layers.{layer}.ffn.experts.w13_scale"] = tensors[f"layers.{layer}.ffn.experts.w13_scale"] + 4
            else:
                for w in ("w1", "w3"):
                    scaled(tensors, f"layers.{layer}.ffn.shared_experts.{w}.scale", 16)

    limited, unlimited = make(folder), make(folder)
    limited.reload(edit_weights=edit)
    unlimited.reload(lambda config: dataclasses.replace(config, swiglu_limit=0.0), edit_weights=edit)
    assert (limited.score(PROMPT) - unlimited.score(PROMPT)).abs().max() > 100 * TOLERANCE


def test_c24_zero_embedding(folder):
    """A token whose embedding is all zeros: finite logits, and its zero groups quantise to exactly zero."""

    def edit(tensors):
        tensors["embed.weight"][5] = 0

    run = make(folder)
    run.reload(edit_weights=edit)
    assert torch.isfinite(run.score(np.array([5, 5, 5, 1]))).all()


def test_c33_experts_without_tokens(folder):
    """Two experts take every token; the other experts' weights are NaN and must never be read."""

    def bias(tensors):
        for layer in range(7):
            tensors[f"layers.{layer}.ffn.gate.bias"] = torch.tensor([100.0, 100.0] + [0.0] * 6)

    def poisoned(tensors):
        bias(tensors)
        for layer in range(7):
            for name in ("w13_scale", "w2_scale"):
                tensors[f"layers.{layer}.ffn.experts.{name}"][2:] = 255

    clean, nan = make(folder), make(folder)
    clean.reload(edit_weights=bias)
    nan.reload(edit_weights=poisoned)
    got = nan.score(PROMPT)
    assert torch.isfinite(got).all()
    assert torch.equal(got, clean.score(PROMPT))


@pytest.mark.parametrize("preset", ["variant", "cases"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wo_a", ["bf16", "fp8"])
def test_presets_run_and_chunks_agree(tmp_path, preset, dtype, wo_a):
    """Other layer counts, ratios, streams and head counts; both profiles of wo_a."""
    write_tiny_checkpoint(tmp_path, preset_config(preset), seed=5)
    config = ModelConfig.from_folder(tmp_path)
    page = math.lcm(4, *(r for r in config.compress_ratios if r))
    run = Runner(tmp_path, dtype, True, wo_a, page_size=page)
    whole = run.score(PROMPT)
    assert torch.isfinite(whole).all()
    for chunk in (1, 7):
        assert torch.equal(run.score(PROMPT, chunk=chunk), whole)
