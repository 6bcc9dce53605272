"""What this installation is and what it can run: the data behind `python -m mini_deepinfer env`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from typing import Any

import torch

from mini_deepinfer import __version__
from mini_deepinfer.ops import _dispatch, _extension


def _host_problem() -> str | None:
    try:
        importlib.import_module("mini_deepinfer._host")
    except ImportError as error:
        return f"mini_deepinfer._host does not load ({error}): {_extension.REBUILD}"
    return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "problem": _extension.device_problem(torch.device("cuda", index)),
    }


def _implementation(op: str) -> str:
    """What an op would run on the current GPU with bfloat16, or why nothing does."""
    if not torch.cuda.is_available():
        return "reference"
    probe = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    try:
        return _dispatch.select(op, probe)
    except (RuntimeError, ValueError) as error:
        return f"none: {error}"


def report() -> dict[str, Any]:
    """Versions, build record, GPUs and the implementation every op would take here. No GPU or extension needed.

    Keys: mini_deepinfer, python, platform, torch, torch_cuda, extension {path, loaded, problem, record}, host_problem,
    gpus [{index, name, capability, memory_gib, problem}], ops {op: implementation}, env {MDI_* variable: value}.
    """
    load_ops()
    path = _extension.library_path()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "mini_deepinfer": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "extension": {
            "path": str(path) if path else None,
            "loaded": _extension.available(),
            "problem": _extension.problem(),
            "record": _extension.build_record(),
        },
        "host_problem": _host_problem(),
        "gpus": [_gpu(index) for index in range(count)],
        "ops": {op: _implementation(op) for op in _dispatch.IMPLEMENTATIONS},
        "env": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MDI_")},
    }


def load_ops() -> None:
    """Import every op module, so that their self-tests are registered."""
    for stage in dict.fromkeys(op.split(".")[0] for op in _dispatch.IMPLEMENTATIONS):
        name = f"mini_deepinfer.ops.{stage}"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def self_test(device: torch.device | None = None) -> list[dict[str, Any]]:
    """Run the self-test of every op and compiled implementation on a CUDA device (default: the current one).

    Returns one row for each: op, impl, against (what it was compared with), difference, bound, status, detail.
    status: "ok" | "differs" | "failed" (it raised) | "not run" (detail says why).
    """
    load_ops()
    rows = []
    have_gpu = torch.cuda.is_available()
    if device is None and have_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
    for op, test in _dispatch.SELF_TESTS.items():
        for impl in _dispatch.IMPLEMENTATIONS[op]:
            row: dict[str, Any] = {"op": op, "impl": impl, "against": None, "difference": None, "bound": test.bound}
            reason = _dispatch.why_not(op, impl, device) if device is not None else "needs a CUDA GPU"
            if device is None or reason is not None:
                rows.append({**row, "status": "not run", "detail": reason})
                continue
            try:
                against, difference = _dispatch.run_self_test(op, impl, device)
            except (RuntimeError, ValueError, TypeError) as error:
                rows.append({**row, "status": "failed", "detail": str(error)})
                continue
            status = "ok" if difference <= test.bound else "differs"
            rows.append({**row, "against": against, "difference": difference, "status": status, "detail": ""})
    return rows
