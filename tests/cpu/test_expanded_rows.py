"""Expanded KV rows: what they hold, that attention reads them like packed ones, and when a step of the model takes them."""

from __future__ import annotations

import pytest
import torch

from mini_deepinfer.model import step as step_module
from mini_deepinfer.ops import attention
from mini_deepinfer.ops.reference import attention as reference
from tests.golden import Runner, golden

DIM = 64


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return tuple(pack(torch.randn(40, DIM, generator=gen)) for pack in (reference.pack_window, reference.pack_compressed))


@pytest.mark.parametrize("kind", [0, 1])
def test_expanded_rows_hold_the_values(kind: int) -> None:
    packed = pools()[kind]
    values = (reference.unpack_window, reference.unpack_compressed)[kind](packed)
    rows = attention.expand_rows(packed, DIM)
    assert rows.dtype == torch.bfloat16 and torch.equal(reference.unpack_expanded(rows), values)
    assert torch.equal(rows.float() * 512, values)
    pages = torch.tensor([2, 0, 2, -1, 4], dtype=torch.int32)
    out = torch.full((50, DIM), 7.0, dtype=torch.bfloat16)
    assert attention.expand_rows(packed, DIM, pages, 10, out=out) is out
    assert torch.equal(out[:30], torch.cat((rows[20:30], rows[:10], rows[20:30])))
    assert bool((out[30:] == 7.0).all())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"packed": torch.zeros(4, 60, dtype=torch.uint8)}, ValueError, r"rows of 66 bytes \(window\) or 36 \(compressed\) for D=64"),
        ({"packed": torch.zeros(4, 66)}, TypeError, r"packed must be uint8"),
        ({"pages": torch.zeros(2, dtype=torch.int64)}, TypeError, r"pages must be int32 \[M\]"),
        ({"pages": torch.zeros(2, dtype=torch.int32), "page_rows": 0}, ValueError, r"page_rows must be at least 1, got 0"),
        ({"out": torch.zeros(5, DIM, dtype=torch.bfloat16)}, ValueError, r"out must be bfloat16 \[R=4, D=64\], got bfloat16 \[5, 64\]"),
    ],
)
def test_expand_rows_refuses(change: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        attention.expand_rows(**{"packed": torch.zeros(4, 66, dtype=torch.uint8), "dim": DIM, **change})


def test_attention_reads_them_like_packed_rows() -> None:
    window, compressed = pools()
    gen = torch.Generator().manual_seed(1)
    idx = [torch.randint(-1, 40, (5, lanes), generator=gen, dtype=torch.int32) for lanes in (7, 9)]
    q, sink, length = torch.randn(5, 4, DIM, generator=gen), torch.zeros(4), torch.tensor([9, 3, 0, 9, 1], dtype=torch.int32)
    wanted = attention.sparse(q, window, idx[0], compressed, idx[1], length, sink, 0.1)
    rows = attention.expand_rows(window, DIM), attention.expand_rows(compressed, DIM)
    assert torch.equal(attention.sparse(q, rows[0], idx[0], rows[1], idx[1], length, sink, 0.1), wanted)
    with pytest.raises(TypeError, match=r"compressed must be bfloat16 \[Sc, D=64\], got uint8"):
        attention.sparse(q, rows[0], idx[0], compressed, idx[1], length, sink, 0.1)


@pytest.mark.parametrize(("chunk", "expands"), [(None, True), (150, True), (50, False)])
def test_model_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, chunk: int | None, expands: bool) -> None:
    """The tiny model with a rule for the kernels that says yes: owners' rows once a step, packed rows where a chunk is short."""
    run = Runner(dtype=torch.bfloat16)
    ids = golden()["L193.input_ids"].numpy()
    wanted = run.score(ids, chunk=chunk)
    made: list[torch.Tensor] = []
    expand = attention.expand_rows
    monkeypatch.setattr(step_module.attention, "takes_expanded", lambda x: True)
    monkeypatch.setattr(attention, "expand_rows", lambda *args, **kwargs: made.append(args[0]) or expand(*args, **kwargs))
    assert torch.equal(run.score(ids, chunk=chunk), wanted)
    owners = [run.caches.compressed[plan.index] for plan in run.config.layers if plan.owns_kv]
    windows = run.caches.window
    assert len(made) == (len(owners) + len(windows) if expands else 0)
    assert {rows.data_ptr() for rows in made} == ({rows.data_ptr() for rows in owners + windows} if expands else set())


def test_no_kernel_no_expanded_rows() -> None:
    """A CPU step reads packed rows: the reference would not be faster."""
    assert not attention.takes_expanded(torch.zeros(1, dtype=torch.bfloat16))
