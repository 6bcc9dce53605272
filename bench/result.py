"""Result rows: one strict JSON object per line, with enough beside the figure to know what it describes."""

from __future__ import annotations

import json
import math
import os
import subprocess
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mini_deepinfer.report import device_name, git_commit

SCHEMA = 1


@lru_cache
def driver_version() -> str:
    """The NVIDIA driver, "none" without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "none"


def base_row(device: torch.device | str, *, run_name: str = "") -> dict[str, Any]:
    """The fields every row has."""
    device = torch.device(device)
    commit, dirty = git_commit()
    arch = "cpu"
    if device.type == "cuda":
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return {
        "schema": SCHEMA,
        "time_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit,
        "dirty": dirty,
        "gpu": device_name(device),
        "driver": driver_version() if device.type == "cuda" else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "arch": arch,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "run_name": run_name,
    }


def append_row(path: str | Path, row: dict[str, Any]) -> None:
    """Append one row in one write. Raises ValueError naming the field of a NaN or an infinity: JSON has neither."""
    _refuse_non_finite(row, "")
    line = json.dumps(row, allow_nan=False) + "\n"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)


def result_line(row: dict[str, Any], what: str, unit: str, *figures: str) -> str:
    """One row of a whole step for the reader: what was measured, its time, further figures, where."""
    latency, baseline = row["latency_ms"], row.get("baseline")
    time = f"{latency['median']:.3f} {unit} (p10 {latency['p10']:.3f}, p90 {latency['p90']:.3f})"
    if baseline:
        time += f", {latency['median'] / baseline['latency_ms']:.3f}x of {baseline['name']}"
    return f"{what}: {', '.join([time, *figures, row['parallel'], 'load_format ' + row['load_format'], row['gpu']])}"


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a file. Raises ValueError naming the line that is not a JSON object."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not strict JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: wanted a JSON object, got {type(row).__name__}")
        rows.append(row)
    return rows


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_non_finite(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_non_finite(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_non_finite(item, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"result row: field {where} is {value}; a result that is not a number is not a result")
