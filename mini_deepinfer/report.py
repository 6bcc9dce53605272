"""What a person reads at start-up and after a run: build line, memory table, stage table, progress.

Functions return text; only :func:`show` and :func:`progress` write, and they write to stderr, so that results on stdout
stay clean.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mini_deepinfer import __version__
from mini_deepinfer.stages import STAGE_GROUPS, group_times

_ROOT = Path(__file__).resolve().parent.parent


@lru_cache
def git_commit() -> tuple[str, bool | None]:
    """(commit, has uncommitted changes) of the source tree; ("unknown", None) outside a git checkout."""
    try:
        run = subprocess.run(
            ["git", "-C", str(_ROOT), "rev-parse", "--show-toplevel", "--short=12", "HEAD"],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout.split()  # fmt: skip
        if Path(run[0]).resolve() != _ROOT:  # installed inside somebody else's checkout
            return "unknown", None
        status = subprocess.run(
            ["git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown", None
    return run[1], bool(status.strip())


def device_name(device: torch.device | str) -> str:
    """The GPU's name, or "cpu"."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def build_line(device: torch.device | str = "cpu") -> str:
    """One line that says what runs: version, commit, Python, torch, CUDA, device."""
    commit, dirty = git_commit()
    cuda = torch.version.cuda or "none"
    return (
        f"mini-deepinfer {__version__} (commit {commit}{' + changes' if dirty else ''}), "
        f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {cuda}, {device_name(device)}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain columns: the first to the left, the others to the right."""
    widths = [max(len(str(line[i])) for line in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (str(cell) for cell in cells)
        return "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:]))]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def gib(num_bytes: float) -> str:
    """Bytes as GiB with three decimals."""
    return f"{num_bytes / 2**30:.3f}"


def memory_table(parts: Mapping[str, int], *, total_bytes: int | None = None) -> str:
    """Memory plan in GiB: one line per part, the sum, and what is left of total_bytes (None: unknown)."""
    rows = [[name, gib(size)] for name, size in parts.items()]
    used = sum(parts.values())
    rows.append(["sum", gib(used)])
    if total_bytes is not None:
        rows += [["device", gib(total_bytes)], ["free", gib(total_bytes - used)]]
    return table(["memory", "GiB"], rows)


def stage_table(
    stages_ms: Mapping[str, float], calls: Mapping[str, int] | None = None, beside_ms: Mapping[str, float] | None = None
) -> str:
    """Stage times of one step, grouped as in `STAGE_GROUPS`, with each stage below its group.

    Waiting for other ranks is part of "MoE" and has its own lines there. The times are own times, so they sum up to the step.
    Work beside the stages (beside_ms) comes below the sum, since the stages overlap with it.
    """
    total_ms = sum(stages_ms.values())

    def cells(name: str, ms: float, num_calls: str) -> list[str]:
        return [name, f"{ms:.3f}", f"{100 * ms / total_ms:.1f}" if total_ms > 0 else "-", num_calls]

    rows = []
    for group, group_ms in group_times(dict(stages_ms)).items():
        rows.append(cells(group, group_ms, ""))
        for name in (name for name in STAGE_GROUPS if STAGE_GROUPS[name] == group and name in stages_ms):
            rows.append(cells(f"  {name}", stages_ms[name], str(calls.get(name, "")) if calls else ""))
    rows.append(cells("step", total_ms, ""))
    rows += [cells(f"beside: {name}", ms, "") for name, ms in (beside_ms or {}).items()]
    return table(["stage", "ms/step", "%", "calls"], rows)


def show(text: str) -> None:
    """Write a block of text for the person at the terminal."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


def progress(total: int | None, *, desc: str, unit: str, disable: bool = False, **options: Any) -> tqdm:
    """A tqdm bar on stderr; without a terminal it writes a line every ten seconds instead of redrawing."""
    interval = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=total,
        desc=desc,
        unit=unit,
        disable=disable,
        mininterval=interval,
        maxinterval=max(10.0, interval),
        dynamic_ncols=True,
        **options,
    )
