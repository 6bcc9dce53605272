"""The script that measures the links gives a row for every transfer."""

from __future__ import annotations

import json

import pytest

from tests.dist.launch import DEVICES, Job, check_all_well, require


@pytest.mark.parametrize("device", DEVICES)
def test_rows(device, tmp_path):
    require(device, 2)
    arguments = ["bench/bench_links.py", "--device", device, "--num-tokens", "64", "--num-iters", "3", "--num-iters-warmup", "1"]
    check_all_well(Job([*arguments, "--result_jsonl", str(tmp_path / "links.jsonl")], 2).wait(limit_s=120))
    rows = [json.loads(line) for line in (tmp_path / "links.jsonl").read_text().splitlines()]
    received = {row["stage"]: row["received_bytes"] for row in rows}
    assert received["gather codes and scales"] == 64 * (5120 + 4)  # folded: one scale a token
    assert received["scatter partial sums"] == 64 * 5120 * 2
    assert len(rows) == (6 if device == "cuda" else 5)
    assert all(row["latency_ms"]["median"] == max(row["rank_ms"]) > 0 for row in rows)
    assert all((row["pct_of_peak"] is None) == (device == "cpu") for row in rows)  # a share of NVLink's rate, which gloo does not use
