"""The build: choices from the environment, refusals, the build record, and what the built library holds."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mini_deepinfer import engine, engine_parts
from mini_deepinfer.ops import _dispatch, _extension
from tests.golden import TINY_A

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> ModuleType:
    pytest.importorskip("setuptools")
    return load(ROOT / "setup.py", "mdi_setup")


@pytest.fixture(scope="module")
def usage() -> ModuleType:
    return load(ROOT / "scripts/resource_usage.py", "mdi_resource_usage")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MDI_CUDA", "MDI_CUDA_ARCHS", "MAX_JOBS", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)


def fake_nvcc(folder: Path, release: str) -> Path:
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.99'\n")
    nvcc.chmod(0o755)
    return folder


# -- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value, message", [
    ("MDI_CUDA", "yes", "MDI_CUDA must be one of 0, 1, auto, got 'yes'"),
    ("MDI_CUDA_ARCHS", "90", "MDI_CUDA_ARCHS must be a comma-separated list out of 90a, 100a, got '90'"),
    ("MDI_CUDA_ARCHS", "90a,", "got '90a,'"),
    ("MDI_CUDA_ARCHS", "", "got ''"),
    ("MAX_JOBS", "0", "MAX_JOBS must be a positive integer, got '0'"),
    ("MAX_JOBS", "many", "got 'many'"),
])  # fmt: skip
def test_bad_values_stop_the_build(build, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=re.escape(message)):
        build.toolchain()


def test_arch_list_and_files(build, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.cuda_archs() == ("90a", "100a")
    monkeypatch.setenv("MDI_CUDA_ARCHS", "100a;90a")
    assert build.cuda_archs() == ("90a", "100a")
    monkeypatch.setenv("MDI_CUDA_ARCHS", "90a")
    assert build.cuda_archs() == ("90a",)
    for archs in (("90a",), ("100a",), ("90a", "100a")):
        for source, wanted in build.kernel_files(archs):
            if source.stem.endswith("_sm90"):
                assert wanted == ["90a"]
            elif source.stem.endswith("_sm100"):
                assert wanted == ["100a"]
            else:
                assert wanted == list(archs)


def test_without_kernels_and_why(build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    tools = build.toolchain()
    assert tools.nvcc is None and tools.archs == () and tools.why == "no nvcc found"
    monkeypatch.setenv("MDI_CUDA", "1")
    with pytest.raises(SystemExit, match=r"MDI_CUDA=1 but no nvcc was found \(CUDA_HOME='/nonexistent'\)"):
        build.toolchain()
    monkeypatch.setenv("MDI_CUDA", "0")
    assert build.toolchain().why == "MDI_CUDA=0"


def test_another_cuda_major_is_refused(build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path, "12.4")))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(SystemExit, match=r"nvcc is CUDA 12.4 .* was built for CUDA 13.0: the major versions must agree"):
        build.toolchain()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert build.toolchain().cuda_version == "12.4"
    monkeypatch.setattr(torch.version, "cuda", None)  # a CPU torch fits any toolkit
    assert build.toolchain().cuda_version == "12.4"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("MDI_CUDA", "0")
    assert build.toolchain().nvcc is None


def test_jobs_follow_memory(build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    assert build.max_jobs() == 3
    monkeypatch.delenv("MAX_JOBS")
    cores = len(os.sched_getaffinity(0))
    assert 1 <= build.max_jobs() <= cores
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr(Path, "read_text", lambda path, *args, **kwargs: "MemAvailable:   8388608 kB\n")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/proc/meminfo")
    assert build.max_jobs() == 2  # 64 cores, 8 GiB


@pytest.mark.slow
def test_install_without_nvcc_says_so_and_imports(tmp_path: Path) -> None:
    """A copy of the tree, CUDA_HOME=/nonexistent: builds without kernels, says why, imports, and records it."""
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    shutil.copytree(ROOT / "mini_deepinfer", tree / "mini_deepinfer", ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    env = {**os.environ, "CUDA_HOME": "/nonexistent"}
    run = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "building WITHOUT CUDA kernels (no nvcc found)" in run.stdout + run.stderr
    code = (
        "import torch; from mini_deepinfer.ops import _extension as e, elementwise\n"
        "assert e.available() and e.archs() == () and e.build_record()['cuda'] is None\n"
        "print(e.device_problem.__name__, e.capability_problem(e.archs(), (9, 0)))\n"
        "print(elementwise.expand_fp4(torch.zeros(2, 16).byte(), torch.zeros(2, 1).byte()).shape)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "this build has no CUDA architecture" in run.stdout and "torch.Size([2, 32])" in run.stdout


# -- the built library -----------------------------------------------------------------------------------------------

needs_library = pytest.mark.skipif(_extension.library_path() is None, reason="the extension is not built")


@needs_library
def test_record_fits_and_ops_are_registered() -> None:
    record = _extension.build_record()
    assert record and set(record) == {"commit", "torch", "torch_abi", "cuda", "archs"}
    assert _extension.available(), _extension.problem()
    assert _extension.has_op("elementwise_expand_fp8") and not _extension.has_op("elementwise_expand_fp16")


@needs_library
def test_architectures_in_the_library(usage) -> None:
    tool = usage.find_cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump and nvdisasm")
    run = subprocess.run([str(tool), "--list-elf", str(_extension.library_path())], capture_output=True, text=True)
    found = set(re.findall(r"\.sm_(\w+)\.cubin", run.stdout))
    assert found == set(_extension.archs()), run.stdout + run.stderr


@needs_library
def test_library_needs_neither_libcuda_nor_cuda_torch() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    run = subprocess.run([readelf, "-d", str(_extension.library_path())], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.+?)\]", run.stdout)
    assert not [name for name in needed if name.startswith(("libcuda.so", "libtorch_cuda", "libtorch_python", "libpython"))]


# -- the build record against the running torch and GPU ----------------------------------------------------------------

RECORD = {"commit": "abc", "torch": "2.13.0", "torch_abi": "2.11", "cuda": "13.0", "archs": ["90a", "100a"]}


@pytest.mark.parametrize("torch_version, torch_cuda, message", [
    ("2.11.0+cu130", "13.0", None),
    ("2.15.1", None, None),
    ("3.0.0a1", "13.2", None),
    ("2.10.1+cu130", "13.0", r"built for torch >= 2.11 \(with torch 2.13.0\), found torch 2.10.1\+cu130"),
    ("2.13.0+cu128", "12.8", r"built for CUDA 13.0, found torch 2.13.0\+cu128 for CUDA 12.8: rebuild with a CUDA 12"),
])  # fmt: skip
def test_record_against_torch(torch_version: str, torch_cuda: str | None, message: str | None) -> None:
    problem = _extension.record_problem(RECORD, torch_version, torch_cuda)
    assert problem is None if message is None else re.search(message, problem or "")


def test_no_record() -> None:
    assert "no build record" in str(_extension.record_problem(None, "2.13.0", None))


def test_record_is_read_from_any_file(tmp_path: Path) -> None:
    library = tmp_path / "_C.abi3.so"
    library.write_bytes(b"\x7fELF\0\0MDI_BUILD_RECORD=" + b'{"torch": "2.13.0", "archs": []}' + b"\0rest")
    assert _extension.read_build_record(library) == {"torch": "2.13.0", "archs": []}
    library.write_bytes(b"nothing here")
    assert _extension.read_build_record(library) is None


@pytest.mark.parametrize("archs, capability, message", [
    (("90a", "100a"), (9, 0), None),
    (("90a", "100a"), (10, 0), None),
    (("90a",), (10, 0), r"needs sm_100a, this build has sm_90a: rebuild with MDI_CUDA=1 MDI_CUDA_ARCHS=90a,100a"),
    (("90a", "100a"), (8, 0), r"compute capability 8\.0; the kernels support 9\.0 \(sm_90a\) and 10\.0 \(sm_100a\)"),
    (("90a", "100a"), (10, 3), r"compute capability 10\.3"),
    ((), (9, 0), r"needs sm_90a, this build has no CUDA architecture"),
])  # fmt: skip
def test_capability(archs, capability, message: str | None) -> None:
    problem = _extension.capability_problem(archs, capability, "Pretended GPU")
    assert problem is None if message is None else re.search(f"Pretended GPU has .*{message}", problem or "")


def test_a_library_that_does_not_load_is_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "_C.abi3.so"
    broken.write_bytes(b"not a library MDI_BUILD_RECORD=" + str(RECORD).replace("'", '"').encode() + b"\0")
    monkeypatch.setattr(_extension, "library_path", lambda: broken)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _extension._load.cache_clear()
    try:
        assert re.search(r"_C.abi3.so does not load .* built with torch 2.13.0 and CUDA 13.0", _extension.problem() or "")
    finally:
        _extension._load.cache_clear()


def test_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on a GPU that the build does not know ends before it reads a weight, unless only references would run."""
    monkeypatch.setattr(_extension, "available", lambda: True)
    monkeypatch.setattr(_extension, "archs", lambda: ("90a", "100a"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretended GPU")
    monkeypatch.setattr(engine, "local_device", lambda wanted: torch.device(wanted, 0))
    monkeypatch.setattr(engine_parts, "read_weights", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(RuntimeError, match=r"Pretended GPU has compute capability 7.5"):
        engine.LLM(TINY_A, device="cuda", page_size=16)
    gpu = torch.device("cuda", 0)
    _dispatch.check_device(torch.device("cpu"), torch.bfloat16)
    _dispatch.check_device(gpu, torch.float32)
    monkeypatch.setenv("MDI_OPS", "reference")
    _dispatch.check_device(gpu, torch.bfloat16)
    monkeypatch.setenv("MDI_OPS", "attention.sparse=reference")
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5"):
        _dispatch.check_device(gpu, torch.bfloat16)
    monkeypatch.setenv("MDI_OPS", "attention.spars=portable")
    with pytest.raises(ValueError, match=r"unknown op 'attention\.spars'"):
        _dispatch.check_device(torch.device("cpu"), torch.bfloat16)


# -- the ptxas report ------------------------------------------------------------------------------------------------

LOG = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function '_Z4goodv' for 'sm_90a'
ptxas info    : Function properties for _Z4goodv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function '_Z3badv' for 'sm_100a'
    24 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""


def test_ptxas_log(usage) -> None:
    report = usage.parse_log("moe/x_sm90.cu", LOG)
    good, bad = report.kernels
    assert (good.arch, good.registers, good.smem, good.spill_stores) == ("sm_90a", 32, 1024, 0)
    assert (bad.arch, bad.registers, bad.stack, bad.spill_stores, bad.spill_loads) == ("sm_100a", 255, 24, 20, 16)
    problems = report.problems()
    assert len(problems) == 2 and "_Z3badv: spills 20 bytes stored" in problems[0] and "C7510" in problems[1]
    assert usage.parse_log("x", LOG.split("\n", 1)[1].split("ptxas info    : Compiling entry function '_Z3")[0]).problems() == []


def test_declared_sass(usage, tmp_path: Path) -> None:
    source = tmp_path / "x_sm90.cu"
    source.write_text("// A kernel.\n// SASS: HGMMA QGMMA\n#include <x>\n// SASS: NOTTHIS\n")
    assert usage.declared_sass(source) == ["HGMMA", "QGMMA"]
