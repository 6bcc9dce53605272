"""The benchmarks on a CPU: rows are strict and complete, checks come first, steps are the same work."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bench import bench_decode, bench_ops, bench_prefill, device_trace, plot, prefill_job
from bench.result import append_row, base_row, read_rows
from bench.shapes import EP_RANKS, LOCAL_EXPERTS, LOCAL_ROWS, Case, strata_rows, uneven_offsets
from bench.workload import SUITES, parse_workload, read_workload, single_request
from mini_deepinfer.decode_graphs import DecodeGraphs
from mini_deepinfer.stages import STAGE_GROUPS
from mini_deepinfer.tiny_checkpoint import PRESETS, write_tiny_checkpoint

ROW_FIELDS = {"schema", "time_utc", "commit", "dirty", "gpu", "driver", "cuda", "torch", "arch", "world_size", "run_name"}
OP_FIELDS = ROW_FIELDS | {
    "op", "params", "dtype", "iters", "latency_ms", "tflops", "gb_per_s", "pct_of_peak", "baseline", "checked", "max_err",
}  # fmt: skip
STEP_FIELDS = ROW_FIELDS | {
    "stage", "params", "dtype", "iters", "latency_ms", "checked", "model", "load_format", "input_len", "batch_size", "chunk",
    "prefill_tok_per_s", "stages_ms", "load_s", "peak_gib", "parallel", "loopback", "rank_step_ms", "step_ms",
}  # fmt: skip
SMALL = ["--device", "cpu", "--prefill_batch_size", "24", "--context-len", "96", "--page-size", "8", "--num-steps", "2",
         "--num-warmup", "0", "--no_cuda_graph"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cases")
    write_tiny_checkpoint(path, PRESETS["cases"])
    return path


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_rows_are_strict_json(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = base_row("cpu", run_name="x")
    assert set(row) == ROW_FIELDS
    append_row(path, row)
    append_row(path, row)
    assert read_rows(path) == [row, row]
    with pytest.raises(ValueError, match=r"field latency_ms.median is nan"):
        append_row(path, row | {"latency_ms": {"median": float("nan")}})
    assert len(read_rows(path)) == 2
    path.write_text('{"a": NaN}\n')
    with pytest.raises(ValueError, match="NaN is not JSON"):
        read_rows(path)


def test_draws():
    generator = torch.Generator().manual_seed(0)
    rows = strata_rows(64, 32, 1024, generator, shared_by=8)
    assert rows.shape == (64, 32) and rows.dtype == torch.int32
    assert torch.equal(rows // 32, torch.arange(32).expand(64, 32))  # one of each stratum, ascending
    shared = (rows.view(8, 8, 32) == rows.view(8, 8, 32)[:, :1]).float().mean()
    assert 0.5 < shared < 0.8
    offsets = uneven_offsets(LOCAL_EXPERTS, LOCAL_ROWS, generator)
    assert offsets[0] == 0 and offsets[-1] == LOCAL_ROWS == 24_576 and LOCAL_EXPERTS * EP_RANKS == 384
    assert bool((offsets.diff() > 0).all()) and offsets.diff().max() > 2 * LOCAL_ROWS / LOCAL_EXPERTS
    even = uneven_offsets(LOCAL_EXPERTS, LOCAL_ROWS, generator, spread=0.0)
    assert even[-1] == LOCAL_ROWS and even.diff().min() > 180 and even.diff().max() < 340  # 256 +- 16
    with pytest.raises(ValueError, match="at least one row per pick"):
        strata_rows(1, 32, 16, generator)


def _case(error: float = 0.0) -> Case:
    def check(inputs, output):
        if error > 0.5:
            raise ValueError(f"max error {error} over its bound 0.5")
        return error

    return Case(
        op="fake.add", name="n64", params={"n": 64}, make=lambda device: {"x": torch.zeros(64, device=device)},
        run=lambda inputs, impl: inputs["x"] + 1, check=check, flops=64.0, bytes=512.0, impls=("portable", "reference"),
    )  # fmt: skip


def test_bench_ops(monkeypatch, tmp_path, capsys):
    path = tmp_path / "ops.jsonl"
    monkeypatch.setattr(bench_ops, "load_cases", lambda folder: [_case(0.25)])
    command = ["--device", "cpu", "--num-iters", "3", "--num-iters-warmup", "1", "--result-filename", str(path)]
    assert bench_ops.main([*command, "--op", "fake", "--check"]) == 0
    (row,) = read_rows(path)
    assert set(row) >= OP_FIELDS
    assert row["impl"] == "reference" and row["checked"] and row["max_err"] == 0.25 and row["iters"] == 3
    assert "fake.add n64" in capsys.readouterr().err
    assert bench_ops.main(command) == 0
    assert read_rows(path)[1]["checked"] is False and read_rows(path)[1]["max_err"] is None
    assert bench_ops.main([*command, "--op", "fak"]) == 2  # a prefix is a whole stage or op
    monkeypatch.setattr(bench_ops, "load_cases", lambda folder: [_case(0.75)])
    assert bench_ops.main([*command, "--check"]) == 1
    assert len(read_rows(path)) == 2  # what fails its check is not measured
    assert "over its bound" in capsys.readouterr().err


def test_floor():
    case = _case()
    peaks = {"bf16": 1000.0, "fp8": 2000.0, "tb_per_s": 4.0}
    assert bench_ops.floor_ms(case, peaks) == pytest.approx(512 / 4e9)


def test_real_cases_load():
    """Whatever cases there are name their op, and can be listed without a GPU."""
    assert bench_ops.main(["--list"]) in (0, 2)


def test_workload_file(tmp_path):
    path = tmp_path / "workload.json"
    raw = {"name": "w", "seed": 3, "shared_prefix_len": 8, "requests": [{"context_len": 20, "cached_len": 12, "new_tokens": 8}] * 2}
    path.write_text(json.dumps(raw))
    workload = read_workload(path)
    assert workload.new_tokens == 16 and json.loads(json.dumps(workload.as_dict())) == raw
    allowed = np.arange(4, 100)
    ids = [workload.token_ids(0, rank, allowed) for rank in (0, 0, 1)]
    assert np.array_equal(ids[0], ids[1])
    assert np.array_equal(ids[0][:8], ids[2][:8]) and not np.array_equal(ids[0][8:], ids[2][8:])
    assert ids[0].min() >= 4
    for change, message in [
        ({"seed": "x"}, "seed must be an integer"),
        ({"sed": 1}, "unknown field sed"),
        ({"requests": [{"context_len": 20, "cached_len": 16, "new_tokens": 8}]}, "cached_len"),
        ({"requests": []}, "at least one request"),
        ({"requests": [{"context": 20}]}, "not a workload file"),
    ]:
        path.write_text(json.dumps(raw | change))
        with pytest.raises(ValueError, match=message):
            read_workload(path)
    with pytest.raises(ValueError, match="cached_len >= 0"):
        single_request(64, None, 128, 0)


@pytest.mark.parametrize("mode", ["one", "loopback", "workload"])
def test_bench_prefill(mode, folder, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    arguments = ["--model", str(folder), "--result_jsonl", str(path), *SMALL]
    if mode == "loopback":
        arguments += ["--load-format", "dummy", "--ep-loopback", "4"]
    if mode == "workload":
        request = {"context_len": 40, "cached_len": 25, "new_tokens": 11}
        workload = {"name": "two", "seed": 1, "shared_prefix_len": 0, "requests": [request, request]}
        (tmp_path / "workload.json").write_text(json.dumps(workload))
        arguments += ["--workload", str(tmp_path / "workload.json"), "--profile", str(tmp_path / "traces")]
    assert bench_prefill.main(arguments) == 0
    (row,) = read_rows(path)
    assert set(row) >= STEP_FIELDS
    assert set(row["stages_ms"]) <= set(STAGE_GROUPS) and "attention.sparse" in row["stages_ms"]
    assert row["loopback"] == (mode == "loopback")
    assert row["parallel"].startswith("loopback EP4" if mode == "loopback" else "EP1/DP1")
    assert row["params"]["cached_fill"] == ("random" if mode == "loopback" else "prefill")
    assert len(row["step_ms"]) == row["iters"] == 2 and len(row["rank_step_ms"]) == 1 and row["chained_step_ms"] > 0
    assert row["chunk"] == (22 if mode == "workload" else 24)
    assert row["prefill_tok_per_s"] == pytest.approx(1e3 * row["chunk"] / row["latency_ms"]["median"])
    printed = capsys.readouterr()
    assert "input tok/s/GPU" in printed.out and "sparse attention core" in printed.err
    if mode == "loopback":
        assert "loopback" in printed.out  # every row it prints says so
    if mode == "workload":
        names = sorted(path.name for path in (tmp_path / "traces").iterdir())
        assert len(names) == 2 and names[0].endswith("rank0-steady.json.gz") and names[1].endswith("rank0.json.gz")
        assert device_trace.read_trace(tmp_path / "traces" / names[0])


def test_workload_specs(tmp_path):
    one, eight = parse_workload("4096@126976", 3), parse_workload("8x512@7680", 3)
    assert [(r.context_len, r.cached_len, r.new_tokens) for r in one.requests] == [(131_072, 126_976, 4096)]
    assert len(eight.requests) == 8 and eight.new_tokens == 4096 and eight.context_len == 8192
    for text in ("4096", "x512@0", "8x@0", "no.json"):
        with pytest.raises(ValueError, match=r"must be a JSON file or \[COUNTx\]NEW@CACHED"):
            parse_workload(text, 0)
    with pytest.raises(ValueError, match="at least one request"):
        parse_workload("0x512@0", 0)
    for spec in SUITES["all"]:
        assert parse_workload(spec, 0).context_len <= 131_072


def test_bench_prefill_suite(folder, tmp_path, capsys, monkeypatch):
    """Several workloads and choices of implementations in one process: a row each, ablated ones next to their plain run."""
    monkeypatch.setenv("MDI_OPS", "indexer.topk=reference")
    path = tmp_path / "rows.jsonl"
    arguments = ["--model", str(folder), "--load-format", "dummy", "--result_jsonl", str(path), *SMALL]
    specs = ["24@72", "24@0", "4x6@0", "12@40"]
    ablations = ["attention.sparse=reference", "moe.route=reference,indexer.topk=reference"]
    for flag, values in (("--workload", specs), ("--ablate", ablations)):
        arguments += [part for value in values for part in (flag, value)]
    assert bench_prefill.main(arguments) == 0
    rows = read_rows(path)
    assert [row["params"]["workload"]["name"] for row in rows] == [spec for spec in specs for _ in range(3)]
    assert [row["params"]["ablate"] for row in rows] == ["", *ablations] * 4
    assert rows[1]["params"]["ops"] == "indexer.topk=reference,attention.sparse=reference"
    assert rows[2]["params"]["ops"] == ablations[1]  # its choice replaces the environment's for the same op
    assert [row["chunk"] for row in rows[::3]] == [24, 24, 24, 12]
    assert [row["batch_size"] for row in rows[::3]] == [1, 1, 4, 1]
    for row in rows:
        assert set(row) >= STEP_FIELDS and len(row["step_ms"]) == row["iters"] == 2
        assert row["host_ms"]["build"] > 0 and row["host_ms"]["launch"] > 0
    assert [row["chained_step_ms"] is not None for row in rows] == [True, False, False] * 4
    assert "baseline" not in rows[3] and rows[4]["baseline"]["latency_ms"] == rows[3]["latency_ms"]["median"]
    assert capsys.readouterr().out.count("ms/step") == 12


def test_bench_prefill_goes_on_after_a_failure(folder, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    fill = prefill_job.fill_randomly

    def fail_once(caches, seed):
        if caches.geometry.num_slots == 2:
            raise RuntimeError("out of memory")
        fill(caches, seed=seed)

    monkeypatch.setattr(prefill_job, "fill_randomly", fail_once)
    arguments = ["--model", str(folder), "--load-format", "dummy", "--result_jsonl", str(path), *SMALL]
    assert bench_prefill.main([*arguments, "--workload", "2x8@0", "--workload", "8@0"]) == 1
    assert [row["params"]["workload"]["name"] for row in read_rows(path)] == ["8@0"]
    assert "workload 2x8@0 failed: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--ablate", "attention.spars=portable"], "unknown op 'attention.spars'"),
        (["--ablate", "attention.sparse=sm91"], "no implementation 'sm91'"),
        (["--ablate", "attention.sparse"], "must be op=implementation"),
        (["--workload", "48@0"], "48 new tokens exceed --prefill_batch_size 24"),
        (["--workload", "nothing"], "must be a JSON file"),
        (["--load-format", "dummy", "--num-experts", "0"], "--num-experts must be >= 1, got 0"),
        (["--ep-loopback", "0"], "--ep-loopback must be >= 1, got 0"),
    ],
)
def test_bench_prefill_refuses_options(wrong, message, folder, capsys):
    with pytest.raises(SystemExit):
        bench_prefill.main(["--model", str(folder), *SMALL, *wrong])
    assert message in capsys.readouterr().err


def test_bench_prefill_refuses(folder, tmp_path):
    with pytest.raises(ValueError, match="limit of 256"):
        bench_prefill.main(["--model", str(folder), *SMALL, "--context-len", "512"])
    with pytest.raises(SystemExit):
        bench_prefill.main(SMALL)


def test_bench_decode(folder, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    arguments = ["--model", str(folder), "--device", "cpu", "--page-size", "8", "--batch-size", "1", "2", "--num-repeats", "1"]
    arguments += ["--prompt-len", "5", "--output-len", "2", "3", "--context-len", "30", "--num-steps", "2", "--result_jsonl", str(path)]
    assert bench_decode.main(arguments) == 0
    rows = read_rows(path)
    assert [(row["params"]["kind"], row["batch_size"], row["output_len"]) for row in rows] == [
        (kind, batch, new) for batch in (1, 2) for kind, new in (("answers", 2), ("answers", 3), ("steps", 1))
    ]
    for row in rows:
        assert set(row) >= ROW_FIELDS | {"latency_ms", "iters", "input_len", "output_tok_per_s", "same_tokens", "loopback", "model"}
        assert row["stage"] == "decode" and row["params"]["cuda_graph"] is False and row["same_tokens"] is None
        assert row["output_tok_per_s"] == pytest.approx(1e3 * row["batch_size"] * row["output_len"] / row["latency_ms"]["median"])
        assert row["iters"] == (2 if row["params"]["kind"] == "steps" else 1)
    assert capsys.readouterr().out.count("output tok/s") == 6
    with pytest.raises(SystemExit):
        bench_decode.main(["--device", "cpu"])
    with pytest.raises(SystemExit):
        bench_decode.main([*arguments, "--batch-size", "0"])


def test_bench_decode_pairs_modes(folder):
    """With graphs (here: padded steps) every measurement runs both ways."""
    arguments = ["--device", "cpu", "--page-size", "8", "--batch-size", "3", "--context-len", "30", "--num-steps", "2"]
    args = bench_decode.parse_args(["--model", str(folder), *arguments])
    llm = bench_decode.open_engine(args)
    graphs = llm.graphs = DecodeGraphs(llm.model, llm.hasher, max_seqs=4, max_len=llm.max_model_len, capture=False)
    rows = bench_decode.measure(args, llm)
    assert [row["params"]["cuda_graph"] for row in rows] == [True, False]
    assert rows[0]["same_tokens"] and rows[0]["baseline"]["latency_ms"] == rows[1]["latency_ms"]["median"]
    assert graphs.shapes == [(4, 34)] and llm.graphs is graphs
    graphs.failed = True  # a capture failed: its steps are eager and must not become a row of graphs
    with pytest.raises(RuntimeError, match="capturing failed"):
        bench_decode.measure(args, llm)


def test_bench_decode_is_for_one_process(folder, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        bench_decode.parse_args(["--model", str(folder)])
    assert "one process, but WORLD_SIZE=2" in capsys.readouterr().err


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.jsonl"
    row = base_row("cpu") | {"stages_ms": {"hc": 1.0, "moe.experts": 2.0}, "prefill_tok_per_s": 10.0}
    row |= {"parallel": "EP1/DP1", "input_len": 96}
    append_row(path, row)
    for kind in ("stages", "lengths"):
        out = tmp_path / f"{kind}.png"
        assert plot.main([str(path), "--kind", kind, "--output", str(out)]) == 0
        assert out.stat().st_size > 1000
    path.write_text("")
    assert plot.main([str(path), "--output", str(tmp_path / "no.png")]) == 2
