"""The command line: flags, one bad request among good ones, exit status, strict output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mini_deepinfer import cli
from mini_deepinfer.tiny_checkpoint import PRESETS, write_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ["--device", "cpu", "--page-size", "8", "--num-pages", "64", "--max-num-batched-tokens", "16", "--max-num-seqs", "4"]
LINES = [
    '{"prompt_token_ids": [0, 5, 9, 17, 33]}',
    '{"prompt": "hello world"}',
    "nonsense",
    '{"prompt_token_ids": [0, 99999]}',
    '{"prompt_token_ids": []}',
    '{"prompt_token_ids": [0, 7], "max_tokens": 2}',
    '{"prompt_token_ids": [0, NaN]}',
    '{"prompt": "a", "prompt_token_ids": [1]}',
    '{"prompt_token_ids": [4], "temprature": 1}',
    "",
    '{"prompt_token_ids": ' + str(list(range(4, 204)) * 2) + "}",
]
GOOD = [0, 1, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cases")
    write_tiny_checkpoint(path, PRESETS["cases"])
    return path


@pytest.fixture
def requests_file(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def strict(line: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the output")

    return json.loads(line, parse_constant=refuse)


def test_generate(folder, requests_file, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    command = ["generate", "--model", str(folder), "--input", str(requests_file), "--output", str(out), "--max-tokens", "4"]
    assert cli.main([*command, "--ignore-eos", *ENGINE]) == 0
    rows = [strict(line) for line in out.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(len(LINES)))
    for row in rows:
        assert tuple(row) == cli.OUTPUT_KEYS
        if row["index"] in GOOD:
            assert row["error"] is None and row["finish_reason"] == "length"
            assert len(row["token_ids"]) == (2 if row["index"] == 5 else 4)
            assert isinstance(row["text"], str)
        else:
            assert row["finish_reason"] == "error" and row["error"] and row["token_ids"] == []
    assert "malformed line" in rows[2]["error"]
    assert "99999" in rows[3]["error"]
    assert "NaN is not JSON" in rows[6]["error"]
    assert "exactly one of the keys" in rows[7]["error"]
    assert "temprature" in rows[8]["error"]
    assert "400 tokens" in rows[10]["error"]
    assert "generate: 3 of 11 requests done" in capsys.readouterr().err
    first = out.read_bytes()
    assert cli.main([*command, "--ignore-eos", *ENGINE]) == 0
    assert out.read_bytes() == first


def test_score(folder, requests_file, tmp_path):
    out = tmp_path / "out.safetensors"
    command = ["score", "--model", str(folder), "--input", str(requests_file), "--output", str(out)]
    assert cli.main([*command, "--dtype", "float32", "--activation-quant", "off", *ENGINE]) == 0
    with safe_open(str(out), "pt") as file:
        assert sorted(file.keys()) == [f"logits.{index}" for index in GOOD]
        logits = file.get_tensor("logits.0")
        metadata = file.metadata()
    assert logits.dtype == torch.float32 and logits.shape == (5, 512)
    assert bool(torch.isfinite(logits).all())
    assert "99999" in metadata["error.3"] and len(metadata) == len(LINES) - len(GOOD)
    # the score of a prompt ends where its greedy continuation begins
    generated = tmp_path / "out.jsonl"
    command = ["generate", "--model", str(folder), "--input", str(requests_file), "--output", str(generated)]
    assert cli.main([*command, "--dtype", "float32", "--activation-quant=off", "--max-tokens", "1", *ENGINE]) == 0
    row = strict(generated.read_text().splitlines()[0])
    assert row["token_ids"] == [int(logits[-1].argmax())]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "/nonexistent"], "config.json"),
        ([], "--model DIR is needed"),
        (["--model", "FOLDER", "--page-size", "7"], "page_size"),
        (["--model", "FOLDER", "--ep-loopback", "9"], "ep_loopback"),
        (["--model", "FOLDER", "--temperature", "-1"], "temperature"),
        (["--model", "FOLDER", "--max-tokens", "0"], "max_tokens"),
        (["--model", "FOLDER", "--output", "/nonexistent/out"], "--output"),
        (["--model", "FOLDER", "--input", "/nonexistent/in"], "/nonexistent/in"),
    ],
)
def test_usage_errors(folder, requests_file, tmp_path, capsys, arguments, message):
    out = tmp_path / "out.jsonl"
    fixed = ["generate", "--input", str(requests_file), "--output", str(out), "--device", "cpu"]
    assert cli.main([*fixed, *[str(folder) if a == "FOLDER" else a for a in arguments]]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments", [["generate", "--no-such-flag"], ["generate", "--mod", "x"], ["nope"], [], ["score", "--dtype", "float16"]]
)
def test_unknown_flags_are_refused(arguments):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2


def test_unknown_environment_variable_is_refused(folder, monkeypatch, capsys):
    monkeypatch.setenv("MDI_OPTS", "reference")
    assert cli.main(["check", "--model", str(folder)]) == 2
    assert "MDI_OPTS" in capsys.readouterr().err


def test_engine_failure_is_not_a_result(folder, requests_file, tmp_path, monkeypatch):
    from mini_deepinfer.engine import LLM

    def fail(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(LLM, "step", fail)
    out = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="the device is gone"):
        cli.main(["generate", "--model", str(folder), "--input", str(requests_file), "--output", str(out), *ENGINE])
    assert list(tmp_path.iterdir()) == [requests_file]


def test_check(folder, tmp_path, capsys):
    assert cli.main(["check", "--model", str(folder), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "routed experts" in text and "n_routed_experts" in text and "max_model_len" in text
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes()[:-100] if path.name.startswith("model-00001") else path.read_bytes())
    assert cli.main(["check", "--model", str(broken), "--device", "cpu"]) == 1
    assert "PROBLEM" in capsys.readouterr().out
    (broken / "tokenizer.json").unlink()
    assert cli.main(["check", "--model", str(broken), "--device", "cpu"]) == 1
    assert "tokenizer.json" in capsys.readouterr().out


def test_check_of_the_released_shapes(capsys):
    assert cli.main(["check", "--load-format", "dummy", "--ep-size", "4", "--device", "cpu"]) == 0
    assert "n_routed_experts               384" in capsys.readouterr().out


def test_env(capsys):
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert "extension" in text and "attention.sparse" in text
    if not torch.cuda.is_available():
        assert cli.main(["env", "--self-test"]) == 0
        assert "needs a CUDA GPU" in capsys.readouterr().out


def test_starts_its_own_ranks(folder, requests_file, tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    command = ["generate", "--model", str(folder), "--input", str(requests_file), "--max-tokens", "3", *ENGINE]
    assert cli.main([*command, "--output", str(one)]) == 0
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "mini_deepinfer", *command, "--output", str(two), "--ep-size", "2"]
    done = subprocess.run(run, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert two.read_bytes() == one.read_bytes()
