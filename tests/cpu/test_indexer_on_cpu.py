"""The portable indexer kernels themselves, run on the CPU (tests/host/cuda_on_cpu.h) and compared with the reference bit for bit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops.reference import indexer as reference
from tests.host.build import library, pointer
from tests.inputs import far_apart, generator, index_key_rows, normal, page_table, untouched
from tests.numerics import assert_bitwise

NEG_INF = float("-inf")


def kernel_file(name: str) -> ctypes.CDLL:
    sources = [f"csrc/indexer/{name}.cu"]
    if name == "candidate_logits_sm90":
        sources.append("csrc/indexer/candidate_logits.cu")  # its second pass
    return library(f"indexer_{name}", sources)


def test_quantise() -> None:
    g = generator(1)
    k = normal(g, 50, 128)
    k[0], k[1, 3], k[2] = 0.0, float("nan"), k[2] * 2.0**90
    slots = torch.randperm(60, generator=g)[:50].int()
    slots[::7] = -1
    rows, wanted = torch.full((60, 68), 0x5A, dtype=torch.uint8), torch.full((60, 68), 0x5A, dtype=torch.uint8)
    kernel_file("quantise").quantise(
        ctypes.c_int64(50), 128, pointer(k), pointer(rows), ctypes.c_void_p(rows.data_ptr() + 64), ctypes.c_int64(68),
        ctypes.c_int64(68), pointer(slots), ctypes.c_int64(60),
    )  # fmt: skip
    reference.write_keys(k, wanted, slots)
    assert_bitwise(rows, wanted, "rows")


def test_rope_quant_query() -> None:
    g = generator(2)
    q = normal(g, 7, 5, 128)
    q[0], q[1, 3, 100], q[2] = 0.0, float("nan"), q[2] * 2.0**90
    positions = torch.randint(0, 20, (7,), generator=g).int()
    angle = 6 * torch.rand(20, 32, generator=g)
    table = torch.stack((angle.cos(), angle.sin()), -1)
    codes, scale = torch.empty(7, 5, 64, dtype=torch.uint8), torch.empty(7, 5, 4, dtype=torch.uint8)
    kernel_file("quantise").rope_quant_query(
        ctypes.c_int64(7), 5, 128, 64, pointer(q), pointer(positions), pointer(table), pointer(codes), pointer(scale)
    )
    wanted = reference.rope_quant_query(q, positions, table)
    assert_bitwise(codes, wanted[0], "codes")
    assert_bitwise(scale, wanted[1], "scale")


def score(
    operands: tuple[Tensor, ...], per_page: int, columns: int, candidates: Tensor | None = None, name: str = "candidate_logits"
) -> Tensor:
    q_codes, q_scale, weights, keys, table, owner, visible = operands
    tokens, heads, dim = q_codes.shape[0], q_codes.shape[1], q_codes.shape[2] * 2
    num_candidates = 0 if candidates is None else candidates.shape[1]
    out = torch.full((tokens, columns), 7.0, dtype=torch.bfloat16)
    kernel_file("logits" if candidates is None else name).logits(
        tokens, heads, dim, columns, per_page, table.shape[1], table.shape[0], pointer(q_codes), pointer(q_scale), pointer(weights),
        pointer(keys), pointer(table), pointer(owner), pointer(visible), pointer(candidates), num_candidates, 8, pointer(out),
    )  # fmt: skip
    return out


@pytest.mark.parametrize("heads, dim, per_page", [(32, 128, 64), (16, 128, 10), (64, 64, 64), (20, 128, 128)])
def test_logits(heads: int, dim: int, per_page: int) -> None:
    """One long and two short sequences, tokens that see nothing, and candidates with a hole."""
    g = generator(heads)
    owner = torch.tensor([0] * 9 + [1, 1, 2], dtype=torch.int32)
    visible = torch.tensor([0, 1, 63, 64, 65, 100, 129, 130, 128, 0, 7, 30], dtype=torch.int32)
    pages = -(-130 // per_page)
    keys = index_key_rows(g, 3 * pages * per_page, dim)
    table = page_table(g, 3, pages, 3 * pages)
    used = torch.zeros(keys.shape[0], dtype=torch.bool)
    for seq, seen in ((0, 130), (1, 7), (2, 30)):
        entry = torch.arange(seen)
        used[table[seq, entry // per_page].long() * per_page + entry % per_page] = True
    keys[::5, dim // 2 :] += 30  # the scale bytes of some rows are too large, of others too small, for one multiply (candidates)
    keys[1::5, dim // 2 :] -= 117
    keys[~used] = 0xFF  # rows that nobody sees decode to NaN
    weights = normal(g, len(owner), heads, scale=2.0**-6)
    operands = (*reference.quant_query(normal(g, len(owner), heads, dim)), weights, keys, table, owner, visible)
    assert_bitwise(score(operands, per_page, 131), reference.logits(*operands, per_page, 131), "logits")
    candidates = torch.tensor([0, 3, -1, 4, 7, 8, 12, 16, -1], dtype=torch.int32).repeat(len(owner), 1)
    wanted = reference.candidate_logits(*operands, per_page, candidates, 8)
    assert_bitwise(score(operands, per_page, 72, candidates), wanted, "candidate_logits")
    if dim == 128 and per_page % 8 == 0:
        assert_bitwise(score(operands, per_page, 72, candidates, "candidate_logits_sm90"), wanted, "candidate_logits_sm90")


def select(x: torch.Tensor, visible: torch.Tensor, k: int, num_blocks: int) -> list[torch.Tensor]:
    """The kernels' ids, count and blocks of 8: k = 0 or num_blocks = 0 leaves that part out."""
    rows, columns = x.shape
    ids, count = torch.full((rows, max(k, 1)), -7, dtype=torch.int32), torch.full((rows,), -7, dtype=torch.int32)
    blocks = torch.full((rows, max(num_blocks, 1)), -7, dtype=torch.int32)
    picks = (pointer(ids), pointer(count)) if k else (pointer(None), pointer(None))
    scores = (ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.stride(0)))
    args = (rows, columns, k, int(x.dtype == torch.float32), *scores, pointer(visible), 8, pointer(None), 0)
    kernel_file("topk").topk(*args, *picks, num_blocks, pointer(blocks if num_blocks else None))
    return ([ids, count] if k else []) + ([blocks] if num_blocks else [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("kind", ["normal", "one value", "nan", "alike", "zeros"])
def test_selection(kind: str, dtype: torch.dtype) -> None:
    """Every way through the kernels: all vectors kept; a bound from the vectors' maxima, and from those of 4 vectors; too many
    vectors at it (neighbours alike: a second bound; one value: the exact path); float32 and odd rows (the exact path)."""
    g = generator(2)
    for columns, k, num_blocks in ((700, 512, 20), (9001, 16, 40), (8200, 300, 1024), (20_000, 64, 300), (36_864, 16, 2048)):
        if dtype == torch.float32 and columns > 9001:
            continue
        x = torch.randn(2, columns, generator=g)
        if kind == "one value":
            x = torch.full((2, columns), -0.25)
        elif kind == "nan":
            x[torch.rand(2, columns, generator=g) < 0.5] = float("nan")
            x[torch.rand(2, columns, generator=g) < 0.3] = NEG_INF
        elif kind == "alike":
            x = x.abs() * torch.linspace(0.2, 30.0, columns).sin().abs()
        elif kind == "zeros":
            x = torch.where(x > 2.5, x, torch.where(x > 0, 0.0, -0.0))
        x = x.to(dtype)
        visible = torch.tensor([columns, columns - columns // 3], dtype=torch.int32)
        wanted = [*reference.topk(x, visible, k), reference.candidate_blocks(x, visible, 8, num_blocks)]
        for got, part in ((select(x, visible, k, 0), wanted[:2]), (select(x, visible, 0, num_blocks), wanted[2:])):
            for tensor, right in zip(got, part, strict=True):
                assert_bitwise(tensor, right, f"{columns} columns, k={k}, {num_blocks} blocks")
        for tensor, right in zip(select(x, visible, k, num_blocks), wanted, strict=True):
            assert_bitwise(tensor, right, f"both of {columns} columns")


def test_selection_of_short_rows() -> None:
    """Nothing visible, one column, a whole vector and one more; picks as entries of candidate blocks."""
    g = generator(3)
    visible = torch.tensor([0, 1, 7, 8, 9, 64, 72], dtype=torch.int32)
    x = normal(g, len(visible), 72).bfloat16()
    for tensor, right in zip(
        select(x, visible, 12, 3), [*reference.topk(x, visible, 12), reference.candidate_blocks(x, visible, 8, 3)], strict=True
    ):
        assert_bitwise(tensor, right, "short rows")
    candidates = torch.arange(9, dtype=torch.int32).repeat(len(visible), 1) * 5 + 3
    ids, count = torch.full((len(visible), 12), -7, dtype=torch.int32), torch.full((len(visible),), -7, dtype=torch.int32)
    args = (len(visible), 72, 12, 0, pointer(x), ctypes.c_int64(72), pointer(None), 8, pointer(candidates), 9)
    kernel_file("topk").topk(*args, pointer(ids), pointer(count), 0, pointer(None))
    wanted = reference.topk(x, None, 12, candidates, 8)
    assert_bitwise(ids, wanted[0], "ids")
    assert_bitwise(count, wanted[1], "count")


def test_rows_further_than_2_31_elements_apart() -> None:
    x, visible = normal(generator(4), 3, 9008).bfloat16(), torch.tensor([9001, 700, 9008], dtype=torch.int32)
    far = far_apart(x, 2**30)
    for k, num_blocks in ((300, 40), (300, 0), (0, 40)):
        for got, wanted in zip(select(far, visible, k, num_blocks), select(x, visible, k, num_blocks), strict=True):
            assert_bitwise(got, wanted, f"k={k}, {num_blocks} blocks")


def test_keys_past_2_31_bytes() -> None:
    """Keys are written to and scored from a page at the end of a pool of more than 2^31 bytes."""
    g, per_page, last = generator(6), 64, 2**31 // 68 // 64 + 1
    pool = untouched((last + 1) * per_page * 68).view(-1, 68)
    k = normal(g, 60, 128)
    slots = last * per_page + torch.arange(60, dtype=torch.int32)
    kernel_file("quantise").quantise(
        ctypes.c_int64(60), 128, pointer(k), pointer(pool), ctypes.c_void_p(pool.data_ptr() + 64), ctypes.c_int64(68),
        ctypes.c_int64(68), pointer(slots), ctypes.c_int64(len(pool)),
    )  # fmt: skip
    near = reference.pack_keys(k)
    assert_bitwise(pool[slots.long()], near, "keys")
    operands = (*reference.quant_query(normal(g, 4, 32, 128)), normal(g, 4, 32, scale=2.0**-6))
    owner, visible = torch.zeros(4, dtype=torch.int32), torch.tensor([60, 33, 1, 60], dtype=torch.int32)
    candidates = torch.tensor([[0, 2, 5, 7]], dtype=torch.int32).repeat(4, 1)
    far, near = (
        (*operands, keys, torch.tensor([[page]], dtype=torch.int32), owner, visible)
        for keys, page in ((pool, last), (torch.cat((near, near[:4])), 0))
    )
    assert_bitwise(score(far, per_page, 60), score(near, per_page, 60), "logits")
    for name in ("candidate_logits", "candidate_logits_sm90"):
        assert_bitwise(score(far, per_page, 32, candidates, name), score(near, per_page, 32, candidates, name), name)


@pytest.mark.parametrize("heads", [8, 20, 32])
def test_folded_candidate_logits(heads: int) -> None:
    """The int8 candidate scores: all rows fold; then a few blocks and one token do not and are scored by the second pass."""
    g = generator(heads)
    owner = torch.tensor([0, 0, 1, 0, 1, 1], dtype=torch.int32)
    visible = torch.tensor([130, 100, 7, 1, 5, 64], dtype=torch.int32)
    keys, table = index_key_rows(g, 4 * 136, 128), page_table(g, 2, 2, 4)
    weights = normal(g, len(owner), heads, scale=2.0**-6)
    codes, scale = reference.quant_query(normal(g, len(owner), heads, 128))
    candidates = torch.arange(40, dtype=torch.int32).repeat(len(owner), 1)
    candidates[:, 17::9] = -1
    for wide in (False, True):
        if wide:
            keys[::37, 66] += 6
            scale[1, 3, 2] += 9
            weights[3, 1] = float("inf")
        operands = (codes, scale, weights, keys, table, owner, visible)
        wanted = reference.candidate_logits(*operands, 136, candidates, 8)
        got = score(operands, 136, 320, candidates, "candidate_logits_sm90")
        assert_bitwise(got, wanted, f"scores, wide={wide}")


def test_candidate_logits_in_rounds() -> None:
    """More key blocks (500) than the 3 thread blocks of the harness hold at once (3 * 151), lists longer than a warp, and a token
    whose candidates all lie in one thread block's shared memory."""
    g = generator(5)
    owner, visible = torch.tensor([0, 1, 1, 0], dtype=torch.int32), torch.tensor([2000, 1999, 1201, 1600], dtype=torch.int32)
    keys, table = index_key_rows(g, 2 * 2000, 128), page_table(g, 2, 1, 2)
    weights = normal(g, 4, 8, scale=2.0**-6)
    operands = (*reference.quant_query(normal(g, 4, 8, 128)), weights, keys, table, owner, visible)
    candidates = torch.stack([torch.randperm(250, generator=g)[:120].sort().values for _ in range(4)]).int()
    candidates[3, :66] = torch.arange(0, 198, 3)
    candidates[3, 66:] = -1
    wanted = reference.candidate_logits(*operands, 2000, candidates, 8)
    assert_bitwise(score(operands, 2000, 960, candidates, "candidate_logits_sm90"), wanted, "scores")


def test_candidate_logits_of_a_block_named_often() -> None:
    """More tokens than a thread block holds at once, and one list that is longer than its place in shared memory."""
    g = generator(6)
    tokens = 30
    owner, visible = torch.zeros(tokens, dtype=torch.int32), torch.arange(64 - tokens, 64, dtype=torch.int32) + 1
    keys, table = index_key_rows(g, 64, 128), page_table(g, 1, 1, 1)
    weights = normal(g, tokens, 8, scale=2.0**-6)
    operands = (*reference.quant_query(normal(g, tokens, 8, 128)), weights, keys, table, owner, visible)
    candidates = torch.full((tokens, 240), -1, dtype=torch.int32)
    candidates[:, :8] = torch.arange(8)
    candidates[-1] = 7
    wanted = reference.candidate_logits(*operands, 64, candidates, 8)
    assert_bitwise(score(operands, 64, 1920, candidates, "candidate_logits_sm90"), wanted, "scores")
