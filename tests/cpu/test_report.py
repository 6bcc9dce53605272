"""Tables and lines for people."""

from __future__ import annotations

import io

import pytest

from mini_deepinfer import report
from mini_deepinfer.stages import GATHER, OUTSIDE


def test_stage_table_sums_to_the_step():
    stages_ms = {"attention.sparse": 30.0, "moe.experts": 40.0, GATHER: 10.0, "hc": 15.0, OUTSIDE: 5.0}
    text = report.stage_table(stages_ms, beside_ms={GATHER: 30.0})
    lines = {line.rsplit(None, 2)[0].strip(): line.split() for line in text.splitlines()[2:]}
    assert lines["sparse attention core"][-2:] == ["30.000", "30.0"]
    assert lines["MoE"][-2:] == ["50.000", "50.0"]  # waiting for other ranks belongs to it ...
    assert lines[GATHER][-2:] == ["10.000", "10.0"]  # ... and has its own line
    assert lines["indexer"][-2:] == ["0.000", "0.0"]
    assert lines["step"][-2:] == ["100.000", "100.0"]  # what runs beside the stages is in no sum
    assert lines[f"beside: {GATHER}"][-2:] == ["30.000", "30.0"]
    assert "-" in report.stage_table({})  # no step, no division by zero


def test_memory_table_shows_what_is_left():
    text = report.memory_table({"weights": 3 << 30, "pages": 1 << 30}, total_bytes=10 << 30)
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["weights", "3.000"],
        ["pages", "1.000"],
        ["sum", "4.000"],
        ["device", "10.000"],
        ["free", "6.000"],
    ]
    assert "free" not in report.memory_table({"weights": 1})


def test_build_line_names_versions():
    line = report.build_line("cpu")
    assert line.startswith("mini-deepinfer ")
    assert "torch" in line and "CUDA" in line and line.endswith("cpu")


def test_commit_outside_a_checkout(monkeypatch, tmp_path):
    report.git_commit.cache_clear()
    monkeypatch.setattr(report, "_ROOT", tmp_path)
    assert report.git_commit() == ("unknown", None)
    report.git_commit.cache_clear()


def test_progress_writes_to_stderr(capsys, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with report.progress(3, desc="steps", unit="step", file=stream) as bar:
        bar.update(3)
    assert "steps: 100%" in stream.getvalue()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("size, text", [(0, "0.000"), (1 << 30, "1.000"), (3 << 29, "1.500")])
def test_gib(size, text):
    assert report.gib(size) == text
