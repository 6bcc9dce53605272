"""The whole model on the GPU: against the golden outputs, against the CPU, and against itself cut up in other ways."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mini_deepinfer.config import NumericProfile
from mini_deepinfer.model.moe import MoE
from mini_deepinfer.model.step import Step
from mini_deepinfer.ops import attention, reference
from mini_deepinfer.ops.linear import Activation
from mini_deepinfer.ops.moe import takes_packed_weights
from mini_deepinfer.ops.packed_weight import PackedWeight
from mini_deepinfer.parallel import Loopback
from mini_deepinfer.tensor_table import expert_range
from mini_deepinfer.weights import EngramTable, load_weights
from tests.golden import AQ_MEAN, BF16_MAX, BF16_MEAN, PROMPT_LENGTHS, TINY_A, Runner, golden

pytestmark = pytest.mark.gpu


@lru_cache(maxsize=4)
def runner(device: str, activation_quant: bool = True, batch_invariant: bool = False) -> Runner:
    run = Runner(dtype=torch.bfloat16, activation_quant=activation_quant, device=device)
    if batch_invariant:
        run.profile = NumericProfile(torch.bfloat16, activation_quant, batch_invariant=True)
        run.reload()
    return run


def prompt(length: int) -> np.ndarray:
    return golden()[f"L{length}.input_ids"].numpy()


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_golden_bfloat16(cuda, length):
    want = golden()[f"L{length}.f32.logits"]
    logits = runner("cuda", activation_quant=False).score(prompt(length))
    diff = (logits - want).abs()
    assert diff.mean() <= 2 * BF16_MEAN[length]
    assert diff.max() <= 2 * BF16_MAX[length]
    best = want.topk(2).values
    sure = best[:, 0] - best[:, 1] > 1.0
    assert torch.equal(logits.argmax(-1)[sure], want.argmax(-1)[sure])


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_golden_activation_quantisation(cuda, length):
    logits = runner("cuda").score(prompt(length))
    assert (logits - golden()[f"L{length}.bf16_aq.logits"].float()).abs().mean() <= 1.5 * AQ_MEAN[length]


def test_golden_wo_a_fp8(cuda):
    """The production profile: as far from the CPU in the same profile as the reference profile is."""
    profile = {"dtype": torch.bfloat16, "activation_quant": True, "wo_a": "fp8"}
    diff = (Runner(device="cuda", **profile).score(prompt(100)) - Runner(device="cpu", **profile).score(prompt(100))).abs()
    assert diff.mean() <= 1.5 * AQ_MEAN[100]


@pytest.mark.parametrize("activation_quant", [False, True])
def test_blocks_teacher_forced_against_the_cpu(cuda, activation_quant):
    """Every block on the CPU's input: a wrong kernel cannot hide behind the noise of earlier layers."""
    cpu, gpu = runner("cpu", activation_quant), runner("cuda", activation_quant)
    inputs, outputs = {}, {}

    class Recorder:
        def __init__(self, block) -> None:
            self.index, self.engram, self.block = block.index, block.engram, block

        def __call__(self, residual, step):
            inputs[self.index] = (residual.streams(), residual.pre)
            self.block(residual, step)
            outputs[self.index] = (residual.streams(), residual.pre)

    got = {}

    class Forced(Recorder):
        def __call__(self, residual, step):
            streams, residual.pre = (part.cuda() for part in inputs[self.index])
            residual.replace(streams)
            self.block(residual, step)
            got[self.index] = (residual.streams(), residual.pre)

    for run, wrapper in ((cpu, Recorder), (gpu, Forced)):
        blocks = run.model.blocks
        run.model.blocks = [wrapper(block) for block in blocks]
        try:
            run.score(prompt(100))
        finally:
            run.model.blocks = blocks
    for index, (streams, pre) in outputs.items():
        update = streams.float() - inputs[index][0].float()
        error = got[index][0].cpu().float() - streams.float()
        relative = error.norm(dim=(1, 2)) / update.norm(dim=(1, 2))
        # Unquantised, tokens agree to bf16 rounding. Quantised, the bf16 ulp in which the two sides differ turns about 4 % of the FP8
        # codes by one step of 6 to 12 %, that is some 2 % of an update; the exact check is the one of the single ops.
        median, high = (6e-2, 0.2) if activation_quant else (6e-3, 8e-2)
        assert relative.median() <= median, f"block {index}: median {relative.median():.2e}"
        assert relative.quantile(0.9) <= high, f"block {index}: 90 % {relative.quantile(0.9):.2e}"
        assert (got[index][1].cpu() - pre).abs().median() <= (2e-3 if activation_quant else 1e-4)


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 64])
def test_chunked_is_unchunked(cuda, chunk):
    """Bitwise in batch-invariant mode; only library GEMMs look at the number of rows otherwise."""
    run = runner("cuda", batch_invariant=True)
    length = 33 if chunk == 1 else 193
    assert torch.equal(run.score(prompt(length), chunk=chunk), run.score(prompt(length)))


@pytest.mark.parametrize("chunk", [None, 150])
def test_expanded_rows_change_nothing(cuda, monkeypatch, chunk):
    """Bitwise. A step expands the rows of its owners once, and its layers' windows; the second chunk of 43 tokens reads packed rows."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only the Hopper kernels read expanded rows")
    run, made = runner("cuda"), []
    expand = attention.expand_rows
    monkeypatch.setattr(attention, "expand_rows", lambda *args, **kwargs: made.append(args[0]) or expand(*args, **kwargs))
    got = run.score(prompt(193), chunk=chunk)
    owners = sum(plan.owns_kv for plan in run.config.layers)
    assert sum(packed.shape[1] == 288 for packed in made) == owners
    assert sum(packed.shape[1] == 528 for packed in made) == len(run.config.layers)
    made.clear()
    monkeypatch.setenv("MDI_OPS", "attention.expand_rows=reference")
    assert torch.equal(run.score(prompt(193), chunk=chunk), got)
    assert made == []


def test_decode_is_prefill(cuda):
    run = runner("cuda", batch_invariant=True)
    ids = [int(i) for i in prompt(7)]
    for step, token in enumerate(run.greedy(ids, 24)):
        assert token == int(run.score(ids)[-1].argmax()), f"step {step}"
        ids.append(token)


def test_repeatable(cuda):
    run = runner("cuda")
    first = run.score(prompt(193))
    for _ in range(5):
        assert torch.equal(run.score(prompt(193)), first)


def test_no_host_synchronisation(cuda):
    """A step never waits for the device: not in attention, selection, routing or the engram fetch."""
    run = runner("cuda")
    run.score(prompt(100))
    batch = run.batch(prompt(100), 0, 100)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.model.forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_fetched_a_step_ahead(cuda, monkeypatch):
    """Bitwise; and the step finds them: nothing is left to gather."""
    run = runner("cuda", batch_invariant=True)
    expected = run.score(prompt(193), chunk=100)
    run.caches.poison()
    gathered = []
    gather = EngramTable.gather
    monkeypatch.setattr(EngramTable, "gather", lambda table, ids: gathered.append(len(ids)) or gather(table, ids))
    first, second = (run.model.prefetch(run.batch(prompt(193), *span)) for span in ((0, 100), (100, 193)))
    got = [run.model.forward(batch) for batch in (first, second)]
    assert torch.equal(torch.cat(got).cpu(), expected)
    assert len(gathered) == 2 * len(run.config.engram_layer_ids)


@pytest.mark.parametrize("world", [2, 4])
def test_loopback_does_rank_zeros_work(cuda, world):
    """Own tokens get exactly the experts that rank 0 of the group holds, plus the shared expert."""
    config = runner("cuda").config
    profile = NumericProfile(torch.bfloat16, True)
    weights = load_weights(TINY_A, config, rank=0, world=world, device="cuda")
    full = load_weights(TINY_A, config, device="cuda")
    parallel = Loopback(world, config.n_routed_experts, cuda)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(37, config.hidden_size, generator=g).bfloat16().cuda()
    moe = MoE(config, profile, config.layers[3], weights, parallel)
    packs = takes_packed_weights(moe.gate.weight, torch.bfloat16)  # it takes the memory of the stored weights
    assert isinstance(moe.w13, PackedWeight) == packs == ("layers.3.ffn.experts.w13" not in weights.tensors)
    counts = parallel.gather_counts(37)
    got = moe(Activation(x, profile), Step(SimpleNamespace(padding=None), None, counts))
    ids, route_weights = moe.gate(x)
    codes, scale = Activation(x, profile).groups()
    local = len(expert_range(config.n_routed_experts, world, 0))
    row_of_slot, slot_of_row, offsets = reference.moe.permute(ids, 0, local)
    slot = slot_of_row.clamp(min=0).long()
    prefix = "layers.3.ffn.experts."
    gate_up = reference.moe.grouped_gemm(
        codes, scale, full.tensors[prefix + "w13"][:local], full.tensors[prefix + "w13_scale"][:local], offsets, (slot // 3).int()
    )
    h = reference.moe.swiglu_quant(gate_up, route_weights.flatten()[slot], config.swiglu_limit)
    y = reference.moe.grouped_gemm(*h, full.tensors[prefix + "w2"][:local], full.tensors[prefix + "w2_scale"][:local], offsets)
    want = reference.moe.combine(y, row_of_slot, moe._shared(Activation(x, profile)), torch.bfloat16)
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error <= 1e-2, f"relative error {error:.2e}"
