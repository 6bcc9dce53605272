"""A rank that raises, dies, hangs or never starts ends the job: non-zero, in time, with a message that names it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from tests.dist.launch import DEVICES, ROOT, Job, check_all_well, environment, free_port, limit, require, run_ranks

# sys.argv[1] says what happens to rank 1 in its second step, sys.argv[2] where the rows are. The result line comes after
# everything else. On a GPU the surviving rank has a collective in flight that will never end.
STEPS = """
import os, signal, sys, time, torch
from mini_deepinfer.parallel import ProcessGroup, local_device
what, device = sys.argv[1], local_device((sys.argv + ["cpu"])[2])
options = {"start_timeout_s": 3.0} if what == "missing" else {}
if what == "hang":
    options = {"step_timeout_s": 3.0 if device.type == "cpu" else 8.0}
with ProcessGroup(device, **options) as parallel:
    for step in range(1, 5):
        counts = parallel.gather_counts(parallel.rank + 1)
        if step == 2 and parallel.rank == (0 if what == "kill0" else 1):
            if what == "raise":
                raise ValueError("boom")
            if what == "exit":
                sys.exit(3)
            if what in ("kill", "kill0"):
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hang":
                time.sleep(60)
        parallel.all_gather(torch.zeros(parallel.rank + 1, 4, device=device), counts)
    parallel.barrier()
    if parallel.rank == 0:
        print("RESULT")
"""


@pytest.mark.parametrize("device", DEVICES)
def test_no_failure(device):
    require(device, 2)
    results = run_ranks(STEPS, 2, arguments=["none", device])
    check_all_well(results)
    assert results[0].stdout.endswith("RESULT\n")  # NCCL may have introduced itself before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "what, world, ended, survivors_say",
    [
        ("raise", 2, {1: 1}, "rank 1 failed at step 2: ValueError: boom"),
        ("exit", 2, {1: 3}, "rank 1 failed at step 2: SystemExit: 3"),
        ("kill", 4, {1: -9}, "died without a word, at step"),
        ("kill", 2, {1: -9}, "died without a word, at step"),
        ("kill0", 2, {0: -9}, "rank 0 (pid {pid}) died without a word, at step"),
    ],
)
def test_a_rank_ends(device, what, world, ended, survivors_say):
    require(device, world)
    job = Job(["-c", STEPS, what, device], world)
    results = job.wait(limit_s=120)
    first_end = results[min(ended)].seconds
    assert max(result.seconds for result in results) - first_end < 30
    text = survivors_say.format(pid=job.processes[0].pid)
    for rank, result in enumerate(results):
        assert result.status == ended.get(rank, 1), result.stderr
        assert "RESULT" not in result.stdout
        if rank not in ended:
            assert f"mini_deepinfer: rank {rank} ends: " in result.stderr
            assert text in result.stderr
            assert f"rank {min(ended)}" in result.stderr
    if what == "raise":  # and the rank itself shows where
        assert "Traceback" in results[1].stderr


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_hangs(device):
    require(device, 2)
    job = Job(["-c", STEPS, "hang", device], 2)
    results = job.wait(limit_s=120)
    assert [result.status for result in results] == [1, 1]
    if device == "cpu":
        assert "all_gather at step 2 has waited 3 s for rank 1 (collective 3 of 4)" in results[0].stderr
    else:  # the host does not wait for a GPU's collective: it meets the hanging rank at the beginning of the next step
        assert "gather_counts at step 3 has waited 8 s for rank 1 (collective 3 of 5)" in results[0].stderr


@pytest.mark.parametrize("device", DEVICES)
def test_torchrun_ends_too(device):
    require(device, 2)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python",
        sys.executable, "-c", STEPS, "kill", device,
    ]  # fmt: skip
    run = subprocess.run(command, env=environment(), cwd=ROOT, timeout=limit(120), capture_output=True, text=True)
    assert run.returncode != 0
    assert "RESULT" not in run.stdout
    assert "local_rank: 1" in run.stderr and "-9" in run.stderr  # its report names the rank and the signal


def test_a_process_is_missing():
    results = run_ranks(STEPS, 3, arguments=["missing"], ranks=[0, 2], limit_s=120)
    assert [result.status for result in results] == [1, 1]
    assert "rank 0 waited in vain for rank(s) [1] of WORLD_SIZE=3" in results[0].stderr
    assert "rank 2 waited in vain for " in results[1].stderr  # rank 0, which hosts the store, may have given up before


def test_rank_zero_is_missing():
    results = run_ranks(STEPS, 2, arguments=["missing"], ranks=[1], limit_s=120)
    assert results[0].status == 1
    assert "rank 1 found no store at 127.0.0.1:" in results[0].stderr


@pytest.mark.parametrize("device", DEVICES)
def test_two_jobs_at_once(device):
    require(device, 2)
    jobs = [Job(["-c", STEPS, "none", device], 2) for _ in range(2)]
    for job in jobs:
        results = job.wait(limit_s=120)
        check_all_well(results)
        assert results[0].stdout.endswith("RESULT\n")


def test_port_is_taken():
    port = free_port()
    first = Job(["-c", STEPS, "hang"], 2, ranks=[0], port=port)  # waits for its rank 1, and listens
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    second = run_ranks(STEPS, 2, arguments=["none"], ranks=[0], port=port, limit_s=120)
    assert second[0].status == 1
    assert f"cannot listen on MASTER_PORT={port}; is the port taken?" in second[0].stderr
    for process in first.processes:
        process.kill()
    first.wait(limit_s=120)
