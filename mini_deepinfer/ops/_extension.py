"""Loads the compiled ops (mini_deepinfer/_C*.so) and says why when it cannot.

The library is on torch's stable ABI: it needs no rebuild for another torch or Python. It carries a record of its build
(commit, torch, CUDA, architectures) that is read from the file itself, so one that does not load is diagnosed too.
"""

from __future__ import annotations

import functools
import json
import logging
import mmap
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

REBUILD = "pip install --no-build-isolation -e ."
_RECORD_MARK = b"MDI_BUILD_RECORD={"
_ARCH_OF_CAPABILITY = {(9, 0): "90a", (10, 0): "100a"}


def library_path() -> Path | None:
    """The built library beside the package, or None."""
    found = sorted(Path(__file__).resolve().parents[1].glob("_C*.so"))
    return found[0] if found else None


def read_build_record(path: Path) -> dict[str, Any] | None:
    """The build record inside a library file: keys commit, torch, torch_abi, cuda (str | None), archs (list)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(_RECORD_MARK)
        if start < 0:
            return None
        start += len(_RECORD_MARK) - 1
        text = data[start : data.find(b"\0", start)]
    try:
        return json.loads(text)
    except ValueError:
        return None


def _version(text: str, parts: int) -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split("+")[0].split(".")[:parts])


def record_problem(record: dict[str, Any] | None, torch_version: str, torch_cuda: str | None) -> str | None:
    """Why a library with this build record does not fit the running torch; None when it does."""
    if record is None:
        return f"the library holds no build record (not built by this project's setup.py): rebuild with {REBUILD}"
    if _version(torch_version, 2) < _version(record["torch_abi"], 2):
        return (
            f"built for torch >= {record['torch_abi']} (with torch {record['torch']}), found torch {torch_version}: "
            f"install torch >= {record['torch_abi']}"
        )
    if record["cuda"] and torch_cuda and _version(record["cuda"], 1) != _version(torch_cuda, 1):
        return (
            f"built for CUDA {record['cuda']}, found torch {torch_version} for CUDA {torch_cuda}: "
            f"rebuild with a CUDA {torch_cuda.split('.')[0]} toolkit: {REBUILD}"
        )
    return None


def capability_problem(built: tuple[str, ...], capability: tuple[int, int], name: str = "this GPU") -> str | None:
    """Why a build for these architectures cannot run on a GPU of this compute capability; None when it can."""
    arch = _ARCH_OF_CAPABILITY.get(tuple(capability))  # type: ignore[arg-type]
    found = f"{name} has compute capability {capability[0]}.{capability[1]}"
    have = ", ".join(f"sm_{a}" for a in built) or "no CUDA architecture"
    if arch is None:
        wanted = " and ".join(f"{major}.{minor} (sm_{a})" for (major, minor), a in _ARCH_OF_CAPABILITY.items())
        return f"{found}; the kernels support {wanted}, this build has {have}"
    if arch not in built:
        return (
            f"{found} and needs sm_{arch}, this build has {have}: "
            f"rebuild with MDI_CUDA=1 MDI_CUDA_ARCHS={','.join(sorted({*built, arch}, key=len))} {REBUILD}"
        )
    return None


@functools.cache
def _load() -> str | None:
    """Load the library once; the reason it is not usable, or None."""
    path = library_path()
    if path is None:
        return f"the extension is not built: {REBUILD}"
    problem = record_problem(read_build_record(path), torch.__version__, torch.version.cuda)
    if problem is None:
        try:
            torch.ops.load_library(str(path))
        except (OSError, RuntimeError, ImportError) as error:
            record = read_build_record(path) or {}
            problem = (
                f"{path.name} does not load ({str(error).strip().splitlines()[0]}); it was built with torch"
                f" {record.get('torch')} and CUDA {record.get('cuda')}, found torch {torch.__version__}:"
                f" rebuild with {REBUILD}"
            )
    if problem:
        log.warning("compiled ops are not available: %s", problem)
    return problem


def available() -> bool:
    """True when the compiled library is loaded (with or without CUDA kernels in it)."""
    return _load() is None


def problem() -> str | None:
    """Why the library is not usable, or None."""
    return _load()


@functools.cache
def build_record() -> dict[str, Any] | None:
    """The build record of the library file, loaded or not; None without one."""
    path = library_path()
    return read_build_record(path) if path else None


def archs() -> tuple[str, ...]:
    """Architectures of the loaded library, e.g. ("90a", "100a"); empty without one or without kernels."""
    record = build_record()
    return tuple(record["archs"]) if record and available() else ()


def device_problem(device: torch.device) -> str | None:
    """Why the compiled kernels cannot run on this CUDA device, naming it and the build; None when they can."""
    if not available():
        return problem()
    return capability_problem(archs(), torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def has_op(name: str) -> bool:
    """True when the loaded library registers mini_deepinfer::name."""
    return available() and hasattr(torch.ops.mini_deepinfer, name)
