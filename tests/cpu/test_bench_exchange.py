"""What the step benchmark says of the exchange between ranks."""

from __future__ import annotations

import pytest
import torch

from bench.exchange import NUM_SERIAL_STEPS, describe_exchange, exchange_times, serial_steps
from mini_deepinfer.parallel import ProcessGroup, SingleProcess
from mini_deepinfer.stages import GATHER, SCATTER


def test_hidden_is_what_the_step_does_not_wait_for():
    times = exchange_times({GATHER: 1.0, SCATTER: 9.0, "hc": 5.0}, {GATHER: 4.0, SCATTER: 8.0}, {GATHER: 2e9, SCATTER: 4e9})
    assert times[GATHER] == {"busy_ms": 4.0, "waited_ms": 1.0, "hidden_ms": 3.0, "received_bytes": 2e9, "gb_per_s": 500.0}
    assert times[SCATTER]["hidden_ms"] == 0.0 and times[SCATTER]["gb_per_s"] == 500.0
    assert exchange_times({"hc": 5.0}, {}, {}) == {}  # one process
    assert exchange_times({}, {GATHER: 4.0}, {GATHER: 0.0}) == {}


def fake_group() -> ProcessGroup:
    group = ProcessGroup.__new__(ProcessGroup)  # no ranks: only what serial_steps looks at
    group.device, group.overlap = torch.device("cuda", 0), True
    return group


def test_serial_steps_switch_overlap_off_and_on_again():
    group, ids, seen = fake_group(), torch.tensor([3]), []

    def timed_step():
        seen.append(group.overlap)
        return float(len(seen)), ids

    assert serial_steps(group, timed_step, ids) == [float(n) for n in range(2, NUM_SERIAL_STEPS + 2)]
    assert seen == [False] * (NUM_SERIAL_STEPS + 1) and group.overlap
    with pytest.raises(RuntimeError, match="without overlap sampled other tokens"):
        serial_steps(group, lambda: (1.0, ids + 1), ids)
    assert group.overlap
    assert serial_steps(SingleProcess(), timed_step, ids) == []


def test_every_rank_has_its_lines():
    exchange = exchange_times({GATHER: 1.0}, {GATHER: 4.0}, {GATHER: 2e9})
    own = {"step_ms": [3.0, 1.0, 2.0], "peak_gib": 7.5, "serial_ms": [4.0], "exchange": exchange}
    lines = describe_exchange([own, own | {"serial_ms": [], "exchange": {}}]).splitlines()
    assert lines[0] == "rank 0: 2.00 ms/step, peak 7.50 GiB; 4.00 ms/step without overlap"
    assert lines[1] == "  moe.gather: busy 4.00 ms/step, step waits 1.00, 2.000 GB in, 500 GB/s"
    assert lines[2] == "rank 1: 2.00 ms/step, peak 7.50 GiB"
