"""Start ranks as processes, with a hard limit on their time. No launcher in between, so that what ends a rank is the package."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent.parent


# Where the rows are decides who carries them. The gloo tests run anywhere.
DEVICES = [pytest.param("cpu", id="gloo"), pytest.param("cuda", id="nccl")]


def limit(seconds: float) -> float:
    """How long to wait for a job: `seconds`, or DIST_TEST_LIMIT_S if that is less (where machine time is short)."""
    return min(seconds, float(os.environ.get("DIST_TEST_LIMIT_S", "inf")))


def require(device: str, world: int) -> None:
    """Skip where this machine has no GPU for every rank."""
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs for NCCL, found {torch.cuda.device_count()}")


@dataclass
class Ended:
    """How one process ended."""

    status: int
    stdout: str
    stderr: str
    seconds: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**extra: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"} | extra


class Job:
    """`world` ranks of one Python command line; only those in `ranks` are started."""

    def __init__(self, arguments: Sequence[str], world: int, *, ranks: Sequence[int] | None = None, port: int | None = None) -> None:
        port = port or free_port()
        self._start = time.monotonic()
        self._files = []
        self.processes = []
        for rank in range(world) if ranks is None else ranks:
            files = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115 (closed in wait)
            env = environment(RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=str(port), LOCAL_RANK=str(rank))
            command = [sys.executable, *arguments]
            self.processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=files[0], stderr=files[1]))
            self._files.append(files)

    def wait(self, limit_s: float) -> list[Ended]:
        """The ends of all ranks; AssertionError (after killing them) if one is still running at the limit."""
        limit_s = limit(limit_s)
        ended: dict[int, float] = {}
        deadline = self._start + limit_s
        while len(ended) < len(self.processes) and time.monotonic() < deadline:
            for index, process in enumerate(self.processes):
                if index not in ended and process.poll() is not None:
                    ended[index] = time.monotonic() - self._start
            time.sleep(0.02)
        late = [index for index in range(len(self.processes)) if index not in ended]
        for index in late:
            self.processes[index].kill()
            self.processes[index].wait()
        results = []
        for index, files in enumerate(self._files):
            texts = []
            for file in files:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
                file.close()
            results.append(Ended(self.processes[index].returncode, texts[0], texts[1], ended.get(index, limit_s)))
        assert not late, f"ranks {late} were still running after {limit_s} s\n" + "\n".join(r.stderr[-3000:] for r in results)
        return results


def run_ranks(code: str, world: int, *, arguments: Sequence[str] = (), limit_s: float = 120.0, **options) -> list[Ended]:
    """Run Python code on every rank."""
    return Job(["-c", code, *arguments], world, **options).wait(limit_s)


def check_all_well(results: list[Ended]) -> None:
    assert [result.status for result in results] == [0] * len(results), "\n".join(result.stderr[-3000:] for result in results)


def read_outputs(results: list[Ended], path: Path) -> dict[str, torch.Tensor]:
    """The tensors that rank 0 of a job saved, after checking that all ranks ended well and took part in the same collectives."""
    check_all_well(results)
    assert len({result.stdout.splitlines()[-1] for result in results}) == 1
    return load_file(path)
