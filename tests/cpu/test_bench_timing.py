"""How the benchmarks time: order statistics, turns, energy of a long run, and the gaps in a trace."""

from __future__ import annotations

import json

import pytest

from bench import bench_ops, device_trace, timing
from bench.timing import summarise, time_paired


def test_summary():
    latency = summarise([5.0, 1.0, 2.0, 3.0, 4.0, 9.0, 8.0, 7.0, 6.0, 10.0, 11.0])
    assert (latency.median, latency.p10, latency.p90, latency.iters) == (6.0, 2.0, 10.0, 11)
    assert summarise([1.0, 2.0]).median == 1.5
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


def test_pairs_are_timed_in_turns():
    calls: list[str] = []
    runs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = time_paired(runs, "cpu", warmup=1, iters=25)
    assert times["a"].iters == times["b"].iters == 25
    assert calls[2:24] == ["a"] * 10 + ["b"] * 10 + ["a"] * 2
    with pytest.raises(ValueError, match="iters >= 1"):
        time_paired(runs, "cpu", iters=0)


def test_energy_is_that_of_the_counted_calls(monkeypatch):
    clock = {"s": 0.0, "joule": 100.0, "calls": 0}

    def run():
        clock["calls"] += 1
        clock["s"] += 0.01
        clock["joule"] += 5.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["s"])
    energy = timing.measure_energy(run, lambda: clock["joule"], lambda: None, seconds=1.2)
    assert (energy.ms, energy.joule, energy.watt) == (pytest.approx(10.0), pytest.approx(5.0), pytest.approx(500.0))
    assert clock["calls"] == 1 + 3 + 40 + 120
    with pytest.raises(ValueError, match="seconds > 0"):
        timing.measure_energy(run, lambda: 0.0, lambda: None, seconds=0.0)


def test_energy_needs_a_gpu(capsys):
    assert bench_ops.main(["--device", "cpu", "--op", "elementwise.rmsnorm", "--energy"]) == 2
    assert "energy is measured on GPUs only" in capsys.readouterr().err


def device_event(start, duration, name, category="kernel"):
    return {"cat": category, "ts": start, "dur": duration, "name": name}


def test_gaps_are_time_in_which_no_stream_runs(tmp_path, capsys):
    events = [
        device_event(200.0, 10.0, "c"),
        device_event(100.0, 50.0, "a"),
        device_event(110.0, 20.0, "copy", "gpu_memcpy"),  # inside a, on another stream
        device_event(155.0, 5.0, "a"),
        device_event(0.0, 900.0, "launch", "cuda_runtime"),  # the host's
        {"name": "no category"},
    ]
    times = device_trace.device_time(events)
    assert (times.span_us, times.idle_us) == (110.0, 45.0)
    assert times.gaps == [device_trace.Gap(5.0, 50.0, "a", "a"), device_trace.Gap(40.0, 60.0, "a", "c")]
    assert times.kernels == {"a": (2, 55.0), "copy": (1, 20.0), "c": (1, 10.0)}
    assert device_trace.device_time(events, skip=0.5).kernels == {"a": (1, 5.0), "c": (1, 10.0)}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert device_trace.main([str(path), "--over-us", "10", "--kernels", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "idle 0.04 ms in 2 gaps; 1 gaps over 10 us" in lines[0] and len(lines) == 3
    assert "40.0 us" in lines[1] and "a and c" in lines[1] and "2 x" in lines[2]
    path.write_text("[]")
    assert device_trace.main([str(path)]) == 2 and "no Chrome trace" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no kernel"):
        device_trace.device_time([device_event(0.0, 1.0, "launch", "cuda_runtime")])
