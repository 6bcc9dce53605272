"""Wrong input to an indexer op is refused with a message that shows both sides, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mini_deepinfer.ops import indexer


def score_operands(tokens: int = 3, heads: int = 8, dim: int = 64) -> dict[str, Any]:
    return {
        "q_codes": torch.zeros(tokens, heads, dim // 2, dtype=torch.uint8),
        "q_scale": torch.full((tokens, heads, dim // 32), 127, dtype=torch.uint8),
        "weights": torch.ones(tokens, heads, dtype=torch.bfloat16),
        "keys": torch.zeros(32, dim // 2 + dim // 32, dtype=torch.uint8),
        "page_table": torch.tensor([[1, 0]], dtype=torch.int32),
        "seq_of_token": torch.zeros(tokens, dtype=torch.int32),
        "visible": torch.full((tokens,), 20, dtype=torch.int32),
        "entries_per_page": 16,
    }


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(indexer, "call", lambda op, *args: calls.append(op))
    return calls


WRONG_SCORE = [
    ("q_codes", lambda x: x.int(), TypeError, r"q_codes must be uint8 \[T, Hi, Di/2\], got int32 \[3, 8, 32\]"),
    ("q_scale", lambda x: x[:2], ValueError, r"q_scale must be uint8 \[T=3, Hi=8, Di/32=2\], got uint8 \[2, 8, 2\]"),
    ("weights", lambda x: x[:, :4], ValueError, r"weights must be bfloat16 or float32 \[T=3, Hi=8\], got bfloat16 \[3, 4\]"),
    ("keys", lambda x: x[:, :33], ValueError, r"keys must be uint8 \[S, Di/2\+Di/32=34\], got uint8 \[32, 33\]"),
    ("keys", lambda x: x[:31], ValueError, r"whole pages of entries_per_page=16 rows, got S=31"),
    ("page_table", lambda x: x.long(), TypeError, r"page_table must be int32 \[B, P\], got int64 \[1, 2\].* Cast with page_table.int\(\)"),
    ("seq_of_token", lambda x: x[None], ValueError, r"seq_of_token must be int32 \[T=3\], got int32 \[1, 3\]"),
    ("visible", lambda x: x[:0], ValueError, r"visible must be int32 \[T=3\], got int32 \[0\]"),
    ("entries_per_page", lambda x: 0, ValueError, r"entries_per_page must be at least 1, got 0"),
]


@pytest.mark.parametrize("name, change, error, message", WRONG_SCORE)
@pytest.mark.parametrize("op", ["logits", "candidate_logits"])
def test_score_operands(
    op: str, name: str, change: Callable[[Any], Any], error: type[Exception], message: str, nothing_is_launched: list[str]
) -> None:
    operands = score_operands()
    operands[name] = change(operands[name])
    rest: dict[str, Any] = {"num_cols": 20}
    if op == "candidate_logits":
        rest = {"candidates": torch.zeros(3, 2, dtype=torch.int32), "block_size": 8}
    with pytest.raises(error, match=rf"indexer\.{op}: .*{message}"):
        getattr(indexer, op)(**operands, **rest)
    assert nothing_is_launched == []


def test_score_ranges() -> None:
    with pytest.raises(ValueError, match="num_cols must not be negative, got -1"):
        indexer.logits(**score_operands(), num_cols=-1)
    with pytest.raises(ValueError, match=r"out must be bfloat16 \[T=3, n=20\], got bfloat16 \[3, 19\]"):
        indexer.logits(**score_operands(), num_cols=20, out=torch.zeros(3, 19, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"candidates must be int32 \[T=3, C\], got int32 \[2, 2\]"):
        indexer.candidate_logits(**score_operands(), candidates=torch.zeros(2, 2, dtype=torch.int32), block_size=8)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        indexer.candidate_logits(**score_operands(), candidates=torch.zeros(3, 2, dtype=torch.int32), block_size=0)


def test_keys_and_queries() -> None:
    rows, slots = torch.zeros(4, 34, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"write_keys: k must be bfloat16 or float32 \[G, Di\], got float16 \[2, 64\]"):
        indexer.write_keys(torch.zeros(2, 64, dtype=torch.float16), rows, slots)
    with pytest.raises(ValueError, match=r"rows must be uint8 \[S, Di/2\+Di/32=68\], got uint8 \[4, 34\]"):
        indexer.write_keys(torch.zeros(2, 128), rows, slots)
    with pytest.raises(ValueError, match=r"slots must be int32 \[G=2\], got int32 \[3\]"):
        indexer.write_keys(torch.zeros(2, 64), rows, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"q must have a positive multiple of 32 columns \(one scale per 32\), got 48"):
        indexer.quant_query(torch.zeros(2, 3, 48))
    q, positions = torch.zeros(2, 3, 64), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rope_quant_query: positions must be int32 \[T=2\], got int32 \[1\]"):
        indexer.rope_quant_query(q, positions[:1], torch.zeros(5, 8, 2))
    with pytest.raises(TypeError, match=r"rope_quant_query: table must be float32"):
        indexer.rope_quant_query(q, positions, torch.zeros(5, 8, 2).double())
    with pytest.raises(ValueError, match=r"rope_quant_query: q must have an even head dim of at least R=80 \(table\), got 64"):
        indexer.rope_quant_query(q, positions, torch.zeros(5, 40, 2))


def test_selection() -> None:
    scores, visible = torch.zeros(3, 16), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"topk: logits must be bfloat16 or float32 \[T, n\], got float64 \[3, 16\]"):
        indexer.topk(scores.double(), visible, 4)
    with pytest.raises(TypeError, match=r"visible must be int32 \[T=3\], got int64 \[3\].* Cast with visible.int\(\)"):
        indexer.topk(scores, visible.long(), 4)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        indexer.topk(scores, visible, 0)
    with pytest.raises(ValueError, match=r"C\*block_size=3\*8 columns for these candidates, got n=16"):
        indexer.topk(scores, None, 4, candidates=torch.zeros(3, 3, dtype=torch.int32), block_size=8)
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        indexer.candidate_blocks(scores, visible, 8, 0)
    with pytest.raises(ValueError, match="topk_blocks: num_blocks must be at least 1, got 0"):
        indexer.topk_blocks(scores, visible, 4, 8, 0)
    with pytest.raises(ValueError, match=r"topk_blocks: visible must be int32 \[T=3\], got int32 \[2\]"):
        indexer.topk_blocks(scores, visible[:2], 4, 8, 2)
    with pytest.raises(ValueError, match=r"seq_of_token must be int32 \[T=3\]"):
        indexer.cache_rows(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), visible[:2], 4)


def test_kernel_limits_name_what_runs() -> None:
    with pytest.raises(ValueError, match=r"portable kernel takes Di in \(64, 128\) and 1..64 index heads, got Di=96 and Hi=65"):
        indexer._check_kernel("indexer.logits", "portable", 65, 96)


PORTABLE = [  # what differs from work that the sm90 scores take, and the reason that is logged
    ("logits", {"heads": 33}, {}, "index heads other than at most 32 of 128"),
    ("logits", {"dim": 64}, {}, "index heads other than at most 32 of 128"),
    ("logits", {"tokens": 15}, {}, "fewer than 16 tokens a sequence"),
    ("candidate_logits", {"heads": 33}, {}, "index heads other than at most 32 of 128"),
    ("candidate_logits", {}, {"block_size": 4}, "blocks other than 8 in pages of whole blocks"),
    ("candidate_logits", {}, {"entries_per_page": 4}, "blocks other than 8 in pages of whole blocks"),
    ("candidate_logits", {}, {"candidates": 8193}, "more than 8192 candidates a token"),
    ("candidate_logits", {}, {"pages": (1 << 17) + 1}, "page tables of more than 2097152 entries"),
    ("candidate_logits", {}, {"pages": 400}, "fewer scores than the page tables have entries"),
    ("candidate_logits", {}, {"first_key": 1}, "keys that do not start on 16 bytes"),
    ("logits", {}, {}, None),
    ("candidate_logits", {}, {}, None),
    ("candidate_logits", {}, {"pages": 1 << 17, "candidates": 8192}, None),
]


@pytest.mark.parametrize("op, shape, change, reason", PORTABLE, ids=lambda x: str(x)[:40])
def test_scores_past_the_limits_of_sm90_take_the_portable_kernel_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, op: str, shape: dict[str, int], change: dict[str, int],
    reason: str | None,
) -> None:  # fmt: skip
    operands = score_operands(**{"tokens": 40, "heads": 32, "dim": 128} | shape)
    tokens = operands["weights"].shape[0]
    operands["keys"] = operands["keys"].repeat(2, 1)[change.get("first_key", 0) :][:32]
    operands["page_table"] = torch.zeros(1, change.get("pages", 2), dtype=torch.int32)
    operands["entries_per_page"] = change.get("entries_per_page", 16)
    calls: list[tuple[str, str, tuple[Any, ...]]] = []
    monkeypatch.setattr(indexer, "select", lambda *args, **kwargs: "sm90")
    monkeypatch.setattr(indexer, "call", lambda name, impl, *args: calls.append((name, impl, args)))
    indexer._log_portable.cache_clear()
    if op == "logits":
        operands["num_cols"] = 8
    else:
        operands["candidates"] = torch.zeros(tokens, change.get("candidates", 8), dtype=torch.int32)
        operands["block_size"] = change.get("block_size", 8)
    with caplog.at_level("INFO", logger=indexer.logger.name):
        for _ in range(2):
            getattr(indexer, op)(**operands)
    assert [(name, impl) for name, impl, _ in calls] == [(f"indexer.{op}", "portable" if reason else "sm90")] * 2
    wanted = [f"indexer.{op}: the portable kernel, not the sm90 one, scores {reason}"] if reason else []
    assert [record.getMessage() for record in caplog.records] == wanted


def test_limits_of_folded_scores_that_need_much_memory() -> None:
    assert indexer._why_no_folded_logits(16, 32, 128, 1, (1 << 26) + 64, 0) == "rows of scores more than 67108864 apart"
    assert indexer._why_no_folded_logits(16, 32, 128, 1, 1 << 26, 2 << 30) is None
    assert indexer._why_no_folded_logits(16, 32, 128, 1, 64, (2 << 30) + 1) == "a workspace of more than 2 GiB"
    sizes = (4096, 32, 128, torch.zeros(16), 1 << 21, 128, 2048, 8)
    assert indexer._why_no_folded_candidates(*sizes, (2 << 30) + 1) == "a workspace of more than 2 GiB"
    assert indexer._why_no_folded_candidates(*sizes, 2 << 30) is None


def test_empty_and_cpu_results() -> None:
    operands = score_operands()
    scores = indexer.logits(**operands, num_cols=24)
    assert scores.shape == (3, 24) and bool((scores[:, :20] == 0).all()) and bool(scores[:, 20:].isneginf().all())
    assert indexer.logits(**operands, num_cols=0).shape == (3, 0)
    ids, count = indexer.topk(scores, operands["visible"], 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3 and count.tolist() == [5] * 3
    ids, count = indexer.topk(scores[:0], operands["visible"][:0], 5)
    assert ids.shape == (0, 5) and count.shape == (0,)
    assert indexer.candidate_blocks(scores[:, :0], operands["visible"], 8, 2).tolist() == [[-1, -1]] * 3
    both = indexer.topk_blocks(scores, operands["visible"], 5, 8, 4)
    assert both[0].tolist() == [[0, 1, 2, 3, 4]] * 3 and both[1].tolist() == [5] * 3 and both[2].tolist() == [[0, 1, 2, -1]] * 3
    assert indexer.topk_blocks(scores[:, :0], operands["visible"], 2, 8, 1)[2].tolist() == [[-1]] * 3
    assert indexer.cache_rows(torch.tensor([[3, 17, -1]], dtype=torch.int32).repeat(3, 1), operands["page_table"],
                              operands["seq_of_token"], 16).tolist() == [[19, 1, -1]] * 3  # fmt: skip
