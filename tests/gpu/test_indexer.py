"""Indexer ops on the GPU: bit for bit the reference, whatever the batch, the page layout and the number of ties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops import indexer
from mini_deepinfer.ops._dispatch import IMPLEMENTATIONS, call
from mini_deepinfer.ops.reference import indexer as reference
from mini_deepinfer.ops.reference import number_formats as nf
from tests.inputs import Canary, generator, normal, page_table
from tests.numerics import assert_bitwise

NEG_INF = float("-inf")


def impls(op: str) -> list[str]:
    return list(IMPLEMENTATIONS[op])


@pytest.fixture(params=impls("indexer.logits"))
def logits_impl(request: pytest.FixtureRequest, cuda: torch.device) -> str:
    return runnable("indexer.logits", request.param)


@pytest.fixture(params=impls("indexer.candidate_logits"))
def candidate_impl(request: pytest.FixtureRequest, cuda: torch.device) -> str:
    return runnable("indexer.candidate_logits", request.param)


@pytest.fixture(params=impls("indexer.topk"))
def topk_impl(request: pytest.FixtureRequest, cuda: torch.device) -> str:
    return runnable("indexer.topk", request.param)


def runnable(op: str, impl: str) -> str:
    capability = {"sm90": (9, 0), "sm100": (10, 0)}.get(impl)
    if capability is not None and torch.cuda.get_device_capability() != capability:
        pytest.skip(f"{op} {impl}: needs sm_{capability[0]}{capability[1]}")
    return impl


# -- keys and queries ------------------------------------------------------------------------------------------------


def awkward_values(g: torch.Generator, rows: int, dim: int) -> Tensor:
    """Gaussian rows, with zero groups, exact ties of the E2M1 grid, tiny and huge groups, NaN and Inf."""
    x = torch.randn(rows, dim, generator=g)
    x[0] = 0.0
    x[1, :32] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.0]).repeat(2)
    x[2] *= 2.0**-120
    x[3] *= 2.0**100
    x[4] *= 2.0**-140
    x[5, 7] = float("nan")
    x[6, dim - 1] = float("inf")
    x[7, :32], x[7, 32:] = 1000.0, 0.1
    return x.bfloat16()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [8, 77, 1000])
def test_write_keys(cuda: torch.device, rows: int, dim: int) -> None:
    g = generator(rows + dim)
    k = awkward_values(g, rows, dim)
    slots = torch.randperm(rows + 50, generator=g)[:rows].int()
    slots[::9] = -1
    pool = torch.full((rows + 50, dim // 2 + dim // 32), 0x5A, dtype=torch.uint8)
    out = Canary(tuple(pool.shape), torch.uint8, cuda)
    out.tensor.copy_(pool)
    indexer.write_keys(k.to(cuda), out.tensor, slots.to(cuda), impl="portable")
    reference.write_keys(k, pool, slots)
    out.check()
    assert_bitwise(out.tensor, pool, "write_keys")


@pytest.mark.parametrize("shape", [(0, 32, 128), (1, 8, 64), (9, 32, 128), (515, 64, 128)])
def test_quant_query(cuda: torch.device, shape: tuple[int, int, int]) -> None:
    g = generator(shape[0])
    q = normal(g, *shape)
    if shape[0] > 1:
        q = awkward_values(g, shape[0] * shape[1], shape[2]).view(shape)
    codes, scale = indexer.quant_query(q.to(cuda), impl="portable")
    wanted = nf.quant_mxfp4(q)
    assert_bitwise(codes, wanted[0], "codes")
    assert_bitwise(scale, wanted[1], "scale")


@pytest.mark.parametrize(
    ("shape", "rope_dim"), [((0, 32, 128), 64), ((1, 8, 64), 64), ((9, 3, 128), 64), ((515, 32, 128), 32), ((77, 5, 64), 8)]
)
def test_rope_quant_query(cuda: torch.device, shape: tuple[int, int, int], rope_dim: int) -> None:
    g = generator(shape[1])
    q = normal(g, *shape)
    if shape[0] > 1:
        q = awkward_values(g, shape[0] * shape[1], shape[2]).view(shape)
    positions = torch.randint(0, 90, (shape[0],), generator=g).int()
    angle = 6 * torch.rand(90, rope_dim // 2, generator=g)
    table = torch.stack((angle.cos(), angle.sin()), -1)
    q_gpu = q.to(cuda)
    codes, scale = indexer.rope_quant_query(q_gpu, positions.to(cuda), table.to(cuda), impl="portable")
    wanted = reference.rope_quant_query(q, positions, table)
    assert_bitwise(codes, wanted[0], "codes")
    assert_bitwise(scale, wanted[1], "scale")
    assert_bitwise(q_gpu, q, "q")


def test_quantiser_every_value(cuda: torch.device) -> None:
    """Every finite bf16 value next to a larger one, so that each falls into every place between two codes."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[every.isfinite()].view(-1, 1).repeat(1, 32)
    for peak in (1.0, 1.5, 3.0):
        x[:, 31] = (x[:, 0].float() * peak).to(torch.bfloat16)
        q = torch.cat((x, x.flip(0)), 1).view(-1, 1, 64)
        codes, scale = indexer.quant_query(q.to(cuda), impl="portable")
        wanted = nf.quant_mxfp4(q)
        assert_bitwise(codes, wanted[0], "codes")
        assert_bitwise(scale, wanted[1], "scale")
    ladder = torch.linspace(-6.5, 6.5, 64 * 500).view(-1, 1, 64)
    ladder[..., 31], ladder[..., 63] = 6.0, -4.0
    codes, scale = indexer.quant_query(ladder.bfloat16().to(cuda), impl="portable")
    wanted = nf.quant_mxfp4(ladder.bfloat16())
    assert_bitwise(codes, wanted[0], "codes")
    assert_bitwise(scale, wanted[1], "scale")


def test_quantiser_ties_and_groups(cuda: torch.device) -> None:
    """Ties go to the even code, and a group of 32 does not see its neighbour."""
    x = torch.zeros(1, 1, 64)
    x[0, 0, :11] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, 5.5])
    codes, scale = indexer.quant_query(x.bfloat16().to(cuda), impl="portable")
    values = nf.dequant_mxfp4(codes.cpu(), scale.cpu())[0, 0, :11]
    assert values.tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -0.0, -2, 6]
    x[0, 0, :32], x[0, 0, 32:] = 1000.0, 0.1
    codes, scale = indexer.quant_query(x.bfloat16().to(cuda), impl="portable")
    assert (nf.dequant_mxfp4(codes.cpu(), scale.cpu())[0, 0, 32:] - 0.1).abs().max() < 0.025


# -- scores ----------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """Operands of a score op on the CPU; cache rows that nobody sees are NaN."""

    q_codes: Tensor
    q_scale: Tensor
    weights: Tensor
    keys: Tensor
    page_table: Tensor
    seq_of_token: Tensor
    visible: Tensor
    entries_per_page: int

    def operands(self, device: torch.device | str = "cpu", tokens: Any = slice(None)) -> tuple[Any, ...]:
        per_token = (self.q_codes[tokens], self.q_scale[tokens], self.weights[tokens])
        rest = (self.keys, self.page_table, self.seq_of_token[tokens], self.visible[tokens])
        return (*(x.contiguous().to(device) for x in (*per_token, *rest)), self.entries_per_page)


def scene(
    seq_of_token: list[int],
    visible: list[int],
    *,
    heads: int = 32,
    dim: int = 128,
    entries_per_page: int = 128,
    seed: int = 0,
    spread: float = 0.0,
    entries: int | None = None,
) -> Scene:
    """spread: standard deviation, in binades, of the magnitude of a group of 32 (0 = plain Gaussian rows)."""
    g = generator(seed)
    num_seqs = max(seq_of_token) + 1
    pages = max(1, -(-(entries or max(visible)) // entries_per_page))
    table = page_table(g, num_seqs, pages, num_seqs * pages + 3)
    pool = torch.full(((num_seqs * pages + 3) * entries_per_page, dim // 2 + dim // 32), 0xFF, dtype=torch.uint8)

    def values(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=g)
        if spread:
            x = x.unflatten(-1, (-1, 32)) * torch.exp2(torch.randn(*shape[:-1], shape[-1] // 32, 1, generator=g) * spread)
            x = x.flatten(-2)
        return x.bfloat16()

    for seq in range(num_seqs):
        seen = max((v for s, v in zip(seq_of_token, visible, strict=True) if s == seq), default=0)
        entry = torch.arange(seen)
        rows = table[seq, entry // entries_per_page].long() * entries_per_page + entry % entries_per_page
        pool[rows] = reference.pack_keys(values(seen, dim))
    codes, scale = nf.quant_mxfp4(values(len(visible), heads, dim))
    weights = normal(g, len(visible), heads, scale=2.0**-6)
    return Scene(
        codes, scale, weights, pool, table, torch.tensor(seq_of_token, dtype=torch.int32), torch.tensor(visible, dtype=torch.int32),
        entries_per_page,
    )  # fmt: skip


def causal(first: int, tokens: int, ratio: int) -> list[int]:
    """Visible entries of positions first .. first + tokens - 1."""
    return [(first + i + 1) // ratio for i in range(tokens)]


@pytest.mark.parametrize("heads, dim", [(8, 64), (8, 128), (16, 128), (32, 64), (32, 128), (64, 64), (64, 128), (24, 128), (1, 64)])
@pytest.mark.parametrize("tokens, columns", [(1, 1), (3, 64), (17, 200), (65, 1000)])
def test_logits_shapes(cuda: torch.device, logits_impl: str, heads: int, dim: int, tokens: int, columns: int) -> None:
    s = scene([0] * tokens, causal(columns - tokens, tokens, 1) if columns > tokens else [columns] * tokens, heads=heads, dim=dim)
    out = indexer.logits(*s.operands(cuda), columns, impl=logits_impl)
    assert_bitwise(out, reference.logits(*s.operands(), columns), "logits")


@pytest.mark.parametrize("entries_per_page", [2, 24, 64, 100, 128, 256])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_logits_pages_and_ratios(cuda: torch.device, logits_impl: str, ratio: int, entries_per_page: int) -> None:
    """Positions start odd, the first token may see nothing, three sequences of unequal length share the launch."""
    lengths, starts = (70, 33, 129), (0, 501, 2043)
    visible = [v for length, start in zip(lengths, starts, strict=True) for v in causal(start, length, ratio)]
    owners = [seq for seq, length in enumerate(lengths) for _ in range(length)]
    s = scene(owners, visible, entries_per_page=entries_per_page)
    width = max(visible) + 5
    out = indexer.logits(*s.operands(cuda), width, impl=logits_impl)
    assert_bitwise(out, reference.logits(*s.operands(), width), "logits")


def test_logits_of_forty_two_token_sequences(cuda: torch.device, logits_impl: str) -> None:
    visible = [v for seq in range(40) for v in (seq * 29, seq * 29 + 1)]
    s = scene([seq for seq in range(40) for _ in range(2)], visible)
    out = indexer.logits(*s.operands(cuda), max(visible), impl=logits_impl)
    assert_bitwise(out, reference.logits(*s.operands(), max(visible)), "logits")


def test_logits_of_interleaved_sequences(cuda: torch.device, logits_impl: str) -> None:
    """Neighbouring tokens of different sequences, and a sequence that comes back."""
    s = scene([0, 1, 0, 2, 2, 1, 0, 0, 1, 2] * 5, [10 * (t % 13) for t in range(50)])
    out = indexer.logits(*s.operands(cuda), 130, impl=logits_impl)
    assert_bitwise(out, reference.logits(*s.operands(), 130), "logits")


@pytest.mark.parametrize("spread", [0.7, 3.0])
def test_logits_of_uneven_scales(cuda: torch.device, logits_impl: str, spread: float) -> None:
    """Scales that differ much inside a row; where the exact dot fits fp32 the result is bitwise, else within a rounding."""
    s = scene([0] * 48, causal(900, 48, 1), spread=spread)
    out = indexer.logits(*s.operands(cuda), 948, impl=logits_impl).cpu()
    wanted = reference.logits(*s.operands(), 948)
    if spread < 1.0:
        assert_bitwise(out, wanted, "logits")
    else:
        seen = wanted > NEG_INF
        assert torch.equal(seen, out > NEG_INF)
        error = (out[seen].float() - wanted[seen].float()).abs()
        assert error.max() <= 2.0**-8 * wanted[seen].float().abs().max()
        assert (error > 0).float().mean() < 0.01


@pytest.mark.parametrize("wide", ["key", "query", "weight"])
def test_logits_of_one_row_with_wide_scales(cuda: torch.device, logits_impl: str, wide: str) -> None:
    """One row that a folded form cannot hold, among rows that fold: that row and its neighbours stay exact."""
    s = scene([0] * 40 + [1] * 24, causal(400, 64, 1))
    if wide == "key":
        row = int(s.page_table[0, 1]) * 128 + 5  # entry 133
        s.keys[row, 64] += 6
    elif wide == "query":
        s.q_scale[21, 7, 2] -= 7
    else:
        s.weights[50, 3] = 2.0**-90
    out = indexer.logits(*s.operands(cuda), 470, impl=logits_impl)
    assert_bitwise(out, reference.logits(*s.operands(), 470), "logits")


def test_logits_do_not_depend_on_the_batch(cuda: torch.device, logits_impl: str) -> None:
    visible = causal(3000, 150, 1)
    s = scene([0] * 100 + [1] * 50, visible)
    whole = indexer.logits(*s.operands(cuda), 3200, impl=logits_impl)
    for tokens in (slice(0, 1), slice(17, 18), slice(93, 150), slice(40, 107)):
        part = indexer.logits(*s.operands(cuda, tokens), 3200, impl=logits_impl)
        assert_bitwise(part, whole[tokens], f"tokens {tokens}")
    for _ in range(20):
        assert_bitwise(indexer.logits(*s.operands(cuda), 3200, impl=logits_impl), whole, "another run")


def test_logits_write_nothing_outside(cuda: torch.device, logits_impl: str) -> None:
    s = scene([0] * 21, causal(250, 21, 1))
    for width in (271, 300, 129):
        out = Canary((21, width), torch.bfloat16, cuda)
        indexer.logits(*s.operands(cuda), width, out=out.tensor, impl=logits_impl)
        out.check()
        assert_bitwise(out.tensor, reference.logits(*s.operands(), width), f"{width} columns")
    wide = torch.full((21, 512), 7.0, dtype=torch.bfloat16, device=cuda)
    indexer.logits(*s.operands(cuda), 271, out=wide[:, 64:335], impl=logits_impl)
    assert_bitwise(wide[:, 64:335], reference.logits(*s.operands(), 271), "strided output")
    assert bool((wide[:, :64] == 7).all()) and bool((wide[:, 335:] == 7).all())


def test_logits_of_nothing(cuda: torch.device, logits_impl: str) -> None:
    s = scene([0, 0, 1], [0, 0, 0], entries=10)
    assert bool((indexer.logits(*s.operands(cuda), 100, impl=logits_impl) == NEG_INF).all())
    assert indexer.logits(*s.operands(cuda), 0, impl=logits_impl).shape == (3, 0)
    assert indexer.logits(*s.operands(cuda, slice(0, 0)), 100, impl=logits_impl).shape == (0, 100)


def test_zero_weights_and_queries_give_positive_zero(cuda: torch.device, logits_impl: str) -> None:
    s = scene([0] * 5, [100] * 5)
    s.weights[:3] = -0.0
    s.q_codes[3:] = 0
    out = indexer.logits(*s.operands(cuda), 100, impl=logits_impl)
    assert_bitwise(out, torch.zeros(5, 100, dtype=torch.bfloat16), "zero scores")


@pytest.mark.parametrize("heads, dim", [(8, 64), (16, 128), (32, 128), (64, 128), (24, 128)])
@pytest.mark.parametrize("block_size", [8, 5])
def test_candidate_logits(cuda: torch.device, candidate_impl: str, heads: int, dim: int, block_size: int) -> None:
    visible = [1000, 999, 5, 0, 700, 8, 64]
    s = scene([0, 0, 1, 1, 2, 2, 2], visible, heads=heads, dim=dim, entries_per_page=64)
    held = s.keys[:, dim // 2] != 0xFF
    held[torch.arange(len(held)) % 3 > 0] = False
    s.keys[held, dim // 2 :] += 30  # scale bytes too large, and too small, for the short expansion of the keys
    held = held.roll(1) & (s.keys[:, dim // 2] != 0xFF)
    s.keys[held, dim // 2 :] -= 117
    candidates = torch.full((7, 60), -1, dtype=torch.int32)
    g = generator(3)
    for t, v in enumerate(visible):
        blocks = -(-v // block_size)
        picked = torch.randperm(blocks, generator=g)[: min(60, blocks)].sort().values
        candidates[t, : len(picked)] = picked.int()
    candidates[0, 7] = -1  # a hole
    out = indexer.candidate_logits(*s.operands(cuda), candidates.to(cuda), block_size, impl=candidate_impl)
    wanted = reference.candidate_logits(*s.operands(), candidates, block_size)
    assert_bitwise(out, wanted, "candidate_logits")
    for _ in range(20):
        again = indexer.candidate_logits(*s.operands(cuda), candidates.to(cuda), block_size, impl=candidate_impl)
        assert_bitwise(again, out, "another run")


def test_candidate_logits_of_more_keys_than_shared_memory_holds(cuda: torch.device, candidate_impl: str) -> None:
    """25,000 key blocks: sm90 takes them in rounds. Neighbours share candidates, one token takes every 132nd block."""
    visible = [200_000 - 3 * i for i in range(40)]
    s = scene([0] * 40, visible)
    g = generator(4)
    candidates = torch.stack([torch.randperm(25_000 - 16, generator=g)[:640].sort().values for _ in range(40)]).int()
    candidates[20:30] = candidates[20]
    candidates[30, :180] = torch.arange(180) * 132
    candidates[30, 180:] = -1
    candidates[31, -1] = 24_999
    on_gpu = (*s.operands(cuda), candidates.to(cuda), 8)
    out = indexer.candidate_logits(*on_gpu, impl=candidate_impl)
    picked = torch.tensor([0, 19, 20, 29, 30, 31, 39])
    wanted = reference.candidate_logits(*s.operands(tokens=picked), candidates[picked], 8)
    assert_bitwise(out[picked.to(cuda)], wanted, "candidate_logits")
    for _ in range(5):
        assert_bitwise(indexer.candidate_logits(*on_gpu, impl=candidate_impl), out, "another run")


def test_candidate_logits_of_many_long_sequences(cuda: torch.device, candidate_impl: str) -> None:
    """Eight sequences with page tables of 131,072 entries: sm90 goes through the tokens in seven rounds."""
    num_seqs, entries, per_page, tokens = 8, 131_072, 128, 64
    g = generator(9)
    keys = reference.pack_keys(normal(g, 4096, 128)).repeat(num_seqs * entries // 4096, 1)
    table = torch.randperm(num_seqs * entries // per_page, generator=g).int().view(num_seqs, -1)
    codes, scale = nf.quant_mxfp4(normal(g, tokens, 32, 128))
    owner, visible = torch.arange(tokens).int() % num_seqs, entries - torch.arange(tokens).int()
    candidates = torch.stack([torch.randperm(entries // 8 - 8, generator=g)[:2048].sort().values for _ in range(tokens)]).int()
    candidates[:, -1] = (visible - 1) // 8
    operands = (codes, scale, normal(g, tokens, 32, scale=2.0**-6), keys, table, owner, visible)
    assert tokens * 2048 * 8 >= num_seqs * entries and num_seqs * entries <= indexer.FOLDED_MAX_ENTRIES  # what sm90 takes
    on_gpu = (*(x.to(cuda) for x in operands), per_page, candidates.to(cuda), 8)
    out = indexer.candidate_logits(*on_gpu, impl=candidate_impl)
    few = [x if x is keys or x is table else x[:9] for x in operands]
    assert_bitwise(out[:9], reference.candidate_logits(*few, per_page, candidates[:9], 8), "the first tokens")
    assert_bitwise(out, indexer.candidate_logits(*on_gpu, impl="portable"), "against the portable kernel")


def test_folded_scores_refuse_what_they_do_not_take(cuda: torch.device) -> None:
    """The ops give such work to the portable kernel before; the kernels do not fall back by themselves."""
    runnable("indexer.logits", "sm90")
    wide, small = scene([0] * 40, [300] * 40, heads=33), scene([0] * 40, [300] * 40)
    out, none = torch.zeros(40, 304, dtype=torch.bfloat16, device=cuda), torch.zeros(0, dtype=torch.uint8, device=cuda)
    blocks = torch.arange(38, device=cuda).int().repeat(40, 1)
    much = torch.zeros(1, (1 << 14) + 1, dtype=torch.int32, device=cuda)  # page table of more than 2^21 entries
    for s, message in ((wide, "at most 32 heads of 128"), (small, "workspace must hold")):
        with pytest.raises(RuntimeError, match=message):
            call("indexer.logits", "sm90", *s.operands(cuda), none, out)
        with pytest.raises(RuntimeError, match=message):
            call("indexer.candidate_logits", "sm90", *s.operands(cuda), blocks, 8, none, out)
    operands = small.operands(cuda)
    with pytest.raises(RuntimeError, match="blocks of 8"):
        call("indexer.candidate_logits", "sm90", *operands, blocks.repeat(1, 2), 4, none, out)
    with pytest.raises(RuntimeError, match="at most 2097152 entries"):
        call("indexer.candidate_logits", "sm90", *operands[:4], much, *operands[5:], blocks, 8, none, out)


def test_candidate_scores_have_the_bits_of_the_dense_scores(
    cuda: torch.device, logits_impl: str, candidate_impl: str
) -> None:
    """More than 16,384 visible entries: the pool of 2,048 blocks of 8 prunes, and selection from it is the reference's."""
    visible = [20_001, 16_385, 16_384, 20_000, 17_333]
    s = scene([0, 0, 1, 1, 1], visible)
    operands, on_gpu = s.operands(), s.operands(cuda)
    dense = indexer.logits(*on_gpu, 20_001, impl=logits_impl)
    blocks = indexer.candidate_blocks(dense, on_gpu[6], 8, 2048)
    assert_bitwise(blocks, reference.candidate_blocks(dense.cpu(), operands[6], 8, 2048), "candidate_blocks")
    scores = indexer.candidate_logits(*on_gpu, blocks, 8, impl=candidate_impl)
    entry = (blocks.long()[:, :, None] * 8 + torch.arange(8, device=cuda)).flatten(1)
    there = (blocks[:, :, None] >= 0).expand(-1, -1, 8).flatten(1) & (entry < on_gpu[6][:, None])
    taken = torch.where(there, torch.gather(dense, 1, entry.clamp(0, 20_000)), NEG_INF)
    assert_bitwise(scores, taken, "candidate scores")
    ids, count = indexer.topk(scores, None, 512, candidates=blocks, block_size=8)
    wanted, wanted_count = reference.topk(taken.cpu(), None, 512, blocks.cpu(), 8)
    assert_bitwise(ids, wanted, "ids")
    assert_bitwise(count, wanted_count, "count")
    assert bool((blocks[0] >= 0).all()) and int(blocks[0, -1]) == 2500  # the newest block is in


@pytest.mark.big
def test_logits_and_topk_past_2_31_elements(cuda: torch.device, logits_impl: str, topk_impl: str) -> None:
    """2,049 rows x 1,048,576 columns: row 2,048 starts at element 2^31."""
    tokens, columns = 2049, 1 << 20
    g = generator(18)
    s = scene([0] * tokens, [64] * tokens)
    s.visible = torch.tensor([64] * (tokens - 2) + [columns - 1, columns], dtype=torch.int32)
    s.entries_per_page, pages = 128, columns // 128
    s.page_table = torch.randperm(pages, generator=g).int()[None]
    s.keys = reference.pack_keys(normal(g, 4096, 128)).repeat(columns // 4096, 1)
    operands = s.operands(cuda)
    out = indexer.logits(*operands, columns, impl=logits_impl)
    last = indexer.logits(*s.operands(cuda, slice(tokens - 2, tokens)), columns, impl="portable")
    assert_bitwise(out[-2:], last, "the last two rows alone")
    some = slice(columns - 1000, columns)  # against the reference on a slice of the entries
    first_page = (columns - 1000) // 128 * 128
    shifted = list(s.operands("cpu", slice(tokens - 1, tokens)))
    shifted[4] = s.page_table[:, first_page // 128 :].contiguous()
    shifted[6] = torch.tensor([columns - first_page], dtype=torch.int32)
    wanted = reference.logits(*shifted, columns - first_page)
    assert_bitwise(out[-1:, some], wanted[:, -1000:], "row 2048 against the reference")
    assert bool((out[:-2, 64:] == NEG_INF).all())
    planted = torch.tensor([0, 65_536, 779_424, columns - 1], device=cuda)
    out[-1, planted] = 1000.0
    ids, count = indexer.topk(out, operands[6], 512, impl=topk_impl)
    wanted_ids, wanted_count = reference.topk(out[-3:].cpu(), s.visible[-3:], 512)
    assert_bitwise(ids[-3:], wanted_ids, "ids")
    assert_bitwise(count[-3:], wanted_count, "count")
    assert set(planted.tolist()) <= set(ids[-1].tolist())
    blocks = indexer.candidate_blocks(out, operands[6], 8, 2048)
    assert_bitwise(blocks[-2:], reference.candidate_blocks(out[-2:].cpu(), s.visible[-2:], 8, 2048), "blocks")


@pytest.mark.big
def test_candidate_logits_past_2_31_elements(cuda: torch.device, candidate_impl: str) -> None:
    """131,080 tokens x 2,048 blocks of 8: token 131,072 starts at element 2^31. The sm90 kernel's workspace still fits."""
    copies, entries = 16_385, 20_001
    s = scene([0] * 8, [entries - 3 * i for i in range(8)])
    g = generator(19)
    candidates = torch.stack([torch.randperm(2500, generator=g)[:2048].sort().values for _ in range(8)]).int().to(cuda)
    codes, scale, weights, keys, table, owner, visible, per_page = s.operands(cuda)
    per_token = [t.repeat(copies, *[1] * (t.dim() - 1)) for t in (codes, scale, weights, owner, visible, candidates)]
    out = indexer.candidate_logits(*per_token[:3], keys, table, *per_token[3:5], per_page, per_token[5], 8, impl=candidate_impl)
    assert out.numel() > 2**31
    few = indexer.candidate_logits(codes, scale, weights, keys, table, owner, visible, per_page, candidates, 8, impl="portable")
    for copy in (0, 8192, 16_383, 16_384):
        assert_bitwise(out[8 * copy : 8 * copy + 8], few, f"tokens from {8 * copy} on")


# -- selection -------------------------------------------------------------------------------------------------------

KINDS = ("normal", "four values", "one value", "mostly -inf", "nan and inf", "ascending", "negative", "signed zeros", "index scores")


def score_rows(g: torch.Generator, kind: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, columns, generator=g)
    if kind == "four values":
        x = torch.randint(0, 4, (rows, columns), generator=g) - 1.5
    elif kind == "one value":
        x = torch.full((rows, columns), 0.25)
    elif kind == "mostly -inf":
        x[torch.rand(rows, columns, generator=g) < 0.95] = NEG_INF
    elif kind == "nan and inf":
        x[torch.rand(rows, columns, generator=g) < 0.3] = float("nan")
        x[torch.rand(rows, columns, generator=g) < 0.01] = float("inf")
    elif kind == "ascending":
        x = x.sort(1).values
    elif kind == "negative":
        x = -x.abs() - 1
    elif kind == "signed zeros":
        x = torch.where(x > 0, 0.0, -0.0)
        x[:, ::97] = 1.0
    elif kind == "index scores":
        x = x.abs() * torch.linspace(0.2, 3.0, columns).sin().abs()  # smooth along the row: neighbours alike
    return x.to(dtype)


def check_topk(x: Tensor, visible: Tensor | None, k: int, device: torch.device, impl: str) -> None:
    ids, count = indexer.topk(x.to(device), None if visible is None else visible.to(device), k, impl=impl)
    wanted, wanted_count = reference.topk(x, visible, k)
    assert_bitwise(ids, wanted, f"ids, k={k}")
    assert_bitwise(count, wanted_count, "count")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 63, 513, 4095, 4096, 4097, 16_384, 50_001, 64_000, 65_536, 131_072, 300_000])
def test_topk(cuda: torch.device, topk_impl: str, kind: str, columns: int, dtype: torch.dtype) -> None:
    g = generator(columns)
    rows = 5 if columns <= 16_384 else 2
    x = score_rows(g, kind, rows, columns, dtype)
    for k in (1, 512, 2048):
        check_topk(x, None, k, cuda, topk_impl)
        check_topk(x, torch.randint(0, columns + 1, (rows,), generator=g, dtype=torch.int32), k, cuda, topk_impl)


def test_topk_of_every_short_length(cuda: torch.device, topk_impl: str) -> None:
    """Visible lengths 0..1,100 against k = 512: fewer, exactly as many, and more than k."""
    x = score_rows(generator(1), "normal", 1101, 1104, torch.bfloat16)
    x[7::11, ::3] = float("nan")
    check_topk(x, torch.arange(1101, dtype=torch.int32), 512, cuda, topk_impl)


def test_topk_over_a_million_columns(cuda: torch.device, topk_impl: str) -> None:
    for kind in ("normal", "four values", "one value"):
        x = score_rows(generator(2), kind, 2, 1_048_576 + 3, torch.bfloat16)
        check_topk(x, torch.tensor([1_048_576, 1_048_579], dtype=torch.int32), 512, cuda, topk_impl)


def test_topk_takes_strided_and_unaligned_rows(cuda: torch.device, topk_impl: str) -> None:
    x = score_rows(generator(3), "normal", 4, 9001, torch.bfloat16)
    on_gpu = x.to(cuda)
    for part in (slice(1, 9000), slice(8, 8008)):
        ids, count = indexer.topk(on_gpu[:, part], None, 512, impl=topk_impl)
        wanted, wanted_count = reference.topk(x[:, part], None, 512)
        assert_bitwise(ids, wanted, "ids")
        assert_bitwise(count, wanted_count, "count")


@pytest.mark.parametrize("kind", ["one value", "four values", "normal"])
def test_topk_gives_one_set_in_twenty_runs(cuda: torch.device, topk_impl: str, kind: str) -> None:
    x = score_rows(generator(4), kind, 300, 20_000, torch.bfloat16).to(cuda)
    first = indexer.topk(x, None, 512, impl=topk_impl)[0]
    if kind == "one value":
        assert torch.equal(first.cpu(), torch.arange(512, dtype=torch.int32).expand(300, -1))
    for _ in range(20):
        assert_bitwise(indexer.topk(x, None, 512, impl=topk_impl)[0], first, "another run")


def test_topk_writes_nothing_outside(cuda: torch.device) -> None:
    x = score_rows(generator(5), "normal", 9, 700, torch.bfloat16).to(cuda)
    ids, count = Canary((9, 512), torch.int32, cuda), Canary((9,), torch.int32, cuda)
    call("indexer.topk", "portable", x, None, None, 0, ids.tensor, count.tensor)
    ids.check()
    count.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 12, 1000, 20_001, 131_072])
def test_candidate_blocks(cuda: torch.device, kind: str, columns: int, dtype: torch.dtype) -> None:
    g = generator(columns + 1)
    x = score_rows(g, kind, 3, columns, dtype)
    for block_size, num_blocks in ((8, 2048), (4, 2), (5, 100)):
        visible = torch.randint(0, columns + 1, (3,), generator=g, dtype=torch.int32)
        blocks = indexer.candidate_blocks(x.to(cuda), visible.to(cuda), block_size, num_blocks, impl="portable")
        wanted = reference.candidate_blocks(x, visible, block_size, num_blocks)
        assert_bitwise(blocks, wanted, f"blocks of {block_size}, visible {visible.tolist()}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 1000, 16_383, 65_536, 131_072, 524_224, 524_300])
def test_topk_blocks(cuda: torch.device, kind: str, columns: int, dtype: torch.dtype) -> None:
    """Both from one reading are what each op gives; up to 524,224 columns of bf16 (528 KiB of maxima would be more)."""
    g = generator(columns + 2)
    x = score_rows(g, kind, 3 if columns <= 131_072 else 2, columns, dtype)
    visible = torch.randint(columns // 2, columns + 1, (x.shape[0],), generator=g, dtype=torch.int32)
    stride = -(-columns // 64) * 64
    on_gpu = torch.empty(x.shape[0], stride, dtype=dtype, device=cuda)[:, :columns].copy_(x)
    for k, block_size, num_blocks in ((512, 8, 2048), (16, 4, 3), (900, 8, 1)):
        got = indexer.topk_blocks(on_gpu, visible.to(cuda), k, block_size, num_blocks, impl="portable")
        wanted = reference.topk_blocks(x, visible, k, block_size, num_blocks)
        for tensor, right, name in zip(got, wanted, ("ids", "count", "blocks"), strict=True):
            assert_bitwise(tensor, right, f"{name}, k={k}, {num_blocks} blocks of {block_size}")


@pytest.mark.big
def test_topk_blocks_past_2_31_elements(cuda: torch.device) -> None:
    """4,100 rows of 524,224 columns, the most that one reading takes: row 4,097 starts behind element 2^31."""
    tokens, columns = 4100, 524_224
    at = [0, 4095, 4096, 4099]
    x = torch.zeros(tokens, columns, dtype=torch.bfloat16, device=cuda)
    visible = torch.full((tokens,), 64, dtype=torch.int32)
    visible[at] = torch.tensor([columns, 9, columns - 5, columns], dtype=torch.int32)
    small = score_rows(generator(9), "normal", 4, columns, torch.bfloat16)
    x[at] = small.to(cuda)
    got = indexer.topk_blocks(x, visible.to(cuda), 512, 8, 2048, impl="portable")
    wanted = reference.topk_blocks(small, visible[at], 512, 8, 2048)
    for tensor, right, name in zip(got, wanted, ("ids", "count", "blocks"), strict=True):
        assert_bitwise(tensor[at], right, name)
    assert bool((got[0][1:4095, :64] == torch.arange(64, device=cuda)).all()) and bool((got[2][1:4095, 8:] == -1).all())


def test_topk_blocks_writes_nothing_outside(cuda: torch.device) -> None:
    x = score_rows(generator(8), "normal", 9, 20_000, torch.bfloat16).to(cuda)
    visible = torch.tensor([0, 1, 7, 8, 9, 4097, 9999, 19_999, 20_000], dtype=torch.int32)
    canaries = Canary((9, 512), torch.int32, cuda), Canary((9,), torch.int32, cuda), Canary((9, 2048), torch.int32, cuda)
    call("indexer.topk_blocks", "portable", x, visible.to(cuda), 8, *(canary.tensor for canary in canaries))
    for canary, right in zip(canaries, reference.topk_blocks(x.cpu(), visible, 512, 8, 2048), strict=True):
        canary.check()
        assert_bitwise(canary.tensor, right, "short rows")


# scores, block 4, keep 2 blocks, top 5: entries of the pool and the picks at every visible length
BLOCK_SCORES = [5.0, 1.0, 0.0, 0.0, 9.0, 8.0, 7.0, 6.0, -3.0, -4.0, -5.0, -6.0]
BLOCK_TABLE: dict[int, tuple[list[int], list[int]]] = {
    0: ([], []),
    1: ([0], [0]),
    4: ([0, 1, 2, 3], [0, 1, 2, 3]),
    5: ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    8: ([0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 5, 6, 7]),
    9: ([4, 5, 6, 7, 8], [4, 5, 6, 7, 8]),
    10: ([4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8]),
    12: ([4, 5, 6, 7, 8, 9, 10, 11], [4, 5, 6, 7, 8]),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_candidate_pool_table(cuda: torch.device, device: str) -> None:
    """The newest block is always in (from visible - 1, not visible), its partial tail too, and nothing fills short rows."""
    where = cuda if device == "cuda" else torch.device("cpu")
    visible = torch.tensor(list(BLOCK_TABLE), dtype=torch.int32, device=where)
    scores = torch.tensor(BLOCK_SCORES, device=where).repeat(len(visible), 1)
    blocks = indexer.candidate_blocks(scores, visible, 4, 2)
    entry = (blocks.long()[:, :, None] * 4 + torch.arange(4, device=where)).flatten(1)
    there = (blocks >= 0).repeat_interleave(4, 1) & (entry < visible[:, None])
    pool = torch.where(there, torch.gather(scores, 1, entry.clamp(min=0)), NEG_INF)
    ids, count = indexer.topk(pool, None, 5, candidates=blocks, block_size=4)
    for row, (candidates, picks) in enumerate(BLOCK_TABLE.values()):
        assert entry[row][there[row]].tolist() == candidates
        assert ids[row].tolist() == picks + [-1] * (5 - len(picks))
        assert int(count[row]) == len(picks)


def test_cache_rows(cuda: torch.device) -> None:
    g = generator(6)
    table = page_table(g, 3, 50, 200)
    ids = torch.randint(-1, 50 * 24, (77, 513), generator=g, dtype=torch.int32)
    owner = torch.randint(0, 3, (77,), generator=g, dtype=torch.int32)
    rows = indexer.cache_rows(ids.to(cuda), table.to(cuda), owner.to(cuda), 24, impl="portable")
    assert_bitwise(rows, reference.cache_rows(ids, table, owner, 24), "cache_rows")
