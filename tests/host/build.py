"""Compiles kernel files for the CPU (cuda_on_cpu.h) into a library for ctypes; rebuilt when a source is newer."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "tests/host"


def _rewritten(source: str) -> str:
    """Dynamic shared memory becomes a pointer to the harness's buffer; `extern static` would not compile."""
    return re.sub(
        r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+|alignas\(\d+\)\s+)?([\w:]+)\s+(\w+)\[\];",
        r"\1* \2 = reinterpret_cast<\1*>(cuda_on_cpu::shared_anchor);",
        source,
    )


@functools.cache
def _library(name: str, sources: tuple[str, ...]) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    files = [HOST / f"{name}_driver.cpp", *(ROOT / source for source in sources)]
    target = ROOT / "build/host" / f"{name}.so"
    headers = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cuh"), *HOST.glob("**/*.h"), Path(__file__)]
    if not target.exists() or target.stat().st_mtime < max(path.stat().st_mtime for path in [*files, *headers]):
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++17", "-O2", "-g", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-attributes"]
        flags += ["-DMDI_CUDA_ON_CPU", f"-I{HOST}/stubs", f"-I{HOST}", f"-I{ROOT}/csrc", "-include", "cuda_on_cpu.h"]
        # one translation unit: the fibers and the kernels share the harness's state without symbol games
        unit = "".join(f'#line 1 "{path}"\n{_rewritten(path.read_text())}\n' for path in files[::-1])
        part = target.with_suffix(".part.so")
        command = [compiler, *flags, "-x", "c++", "-", "-o", str(part)]
        run = subprocess.run(command, input=unit, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"{name}: g++ failed\n{run.stderr[:8000]}")
        part.replace(target)
    return ctypes.CDLL(str(target))


def library(name: str, sources: Sequence[str]) -> ctypes.CDLL:
    """tests/host/<name>_driver.cpp together with the kernel files `sources` (paths from the repository root)."""
    return _library(name, tuple(sources))


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Address of a contiguous CPU tensor (None: a null pointer)."""
    if tensor is None:
        return ctypes.c_void_p(0)
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"pointer: needs a contiguous CPU tensor, got {tensor.device}, strides {tensor.stride()}")
    return ctypes.c_void_p(tensor.data_ptr())
