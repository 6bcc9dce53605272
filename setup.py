"""THE build. Kernels (torch-free .cu) are compiled by a ninja file of our own, each for the architectures its name
says, then linked with one binding file on torch's stable ABI (mini_deepinfer._C); beside it a host-only pybind11 one.

    pip install --no-build-isolation -e .        or        python setup.py build_ext --inplace

MDI_CUDA=0|1|auto        kernels off, required, or built when nvcc is found (default)
MDI_CUDA_ARCHS=90a,100a  architectures (default both)
MAX_JOBS                 compiler processes; default min(cores, free RAM / 4 GB)
CUDA_HOME                toolkit; without it nvcc on PATH, then /usr/local/cuda
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import setuptools
import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"  # fixed: survives pip's temporary folders, so a second install compiles nothing
ARCHS = ("90a", "100a")
SUFFIX_ARCH = {"sm90": "90a", "sm100": "100a"}  # a file without such a suffix is built for every architecture
GB_PER_JOB = 4
TORCH_ABI = "0x020b000000000000"  # torch 2.11, the oldest supported
NVCC_FLAGS = [
    "-std=c++17", "-O3", "-DNDEBUG", "-lineinfo", "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas",  # the host pass does not know #pragma unroll
    "-Xptxas=-v,--warn-on-spills,--warn-on-local-memory-usage",
]  # fmt: skip


def check_setuptools() -> None:
    """With --no-build-isolation pip takes the environment's setuptools, and a fresh venv's is often too old."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        raise SystemExit(
            f"setuptools >= 77 is needed, found {setuptools.__version__}: pip install -U 'setuptools>=77' wheel ninja pybind11"
        )


def choice(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name, default)
    if value not in allowed:
        raise SystemExit(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def cuda_archs() -> tuple[str, ...]:
    """MDI_CUDA_ARCHS as a tuple in build order."""
    text = os.environ.get("MDI_CUDA_ARCHS", ",".join(ARCHS))
    archs = [part.strip() for part in re.split("[,;]", text)]
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown:
        raise SystemExit(f"MDI_CUDA_ARCHS must be a comma-separated list out of {', '.join(ARCHS)}, got {text!r}")
    return tuple(arch for arch in ARCHS if arch in archs)


def max_jobs() -> int:
    """Compiler processes: MAX_JOBS, else min(cores, free memory / 4 GB)."""
    text = os.environ.get("MAX_JOBS")
    if text:
        if not text.isdigit() or int(text) < 1:
            raise SystemExit(f"MAX_JOBS must be a positive integer, got {text!r}")
        return int(text)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (match := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        free.append(int(match[1]) * 1024)
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's limit
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        used = Path("/sys/fs/cgroup/memory.current")
        free.append(int(text) - (int(used.read_text()) if used.exists() else 0))
    return max(1, min([cores, *(int(size / (GB_PER_JOB * 2**30)) for size in free)]))


def find_nvcc() -> str | None:
    """Path of nvcc. A CUDA_HOME that is set but has none means: no CUDA here."""
    home = os.environ.get("CUDA_HOME")
    if home:
        nvcc = Path(home) / "bin/nvcc"
        return str(nvcc) if nvcc.exists() else None
    default = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(default) if default.exists() else None)


def toolkit(nvcc: str) -> tuple[Path, str]:
    """(folder, version "13.0") of nvcc; nvcc may be a wrapper script, so it is asked."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", version)
    if match is None:
        raise SystemExit(f"cannot read the version of {nvcc}: {version.strip()!r}")
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull], capture_output=True, text=True)
    here = re.search(r"_HERE_=(\S+)", dry.stderr)
    return (Path(here[1]).resolve().parent if here else Path(nvcc).resolve().parent.parent), match[1]


def kernel_files(archs: tuple[str, ...]) -> list[tuple[Path, list[str]]]:
    """[(source, architectures it is compiled for)]; sources whose architecture is not built are left out."""
    plan = []
    for source in sorted(ROOT.glob("csrc/*/*.cu")):
        suffix = source.stem.rsplit("_", 1)[-1]
        wanted = [arch for arch in archs if arch == SUFFIX_ARCH.get(suffix, arch)]
        if wanted:
            plan.append((source, wanted))
    return plan


def build_kernels(nvcc: str, archs: tuple[str, ...], jobs: int) -> list[str]:
    """Compile what changed; returns the object files. Each object has its ptxas report beside it as X.o.log."""
    if shutil.which("ninja") is None:
        raise SystemExit("ninja not found: pip install ninja")
    folder = BUILD / "kernels"
    folder.mkdir(parents=True, exist_ok=True)

    def quote(path: Path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    lines = [
        "ninja_required_version = 1.3",
        f"nvcc = {quote(Path(nvcc))}",
        f"flags = {' '.join(NVCC_FLAGS)} -I{quote(ROOT / 'csrc')}",
        "rule cu",
        "  command = $nvcc -MD -MF $out.d $flags $gencode -c $in -o $out > $out.log 2>&1 || { cat $out.log; exit 1; }",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $name",
    ]
    objects = []
    for source, wanted in kernel_files(archs):
        name = source.relative_to(ROOT / "csrc").as_posix()
        out = folder / (name.replace("/", "__") + ".o")
        gencode = " ".join(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted)
        lines += [
            f"build {quote(out)}: cu {quote(source)}",
            f"  gencode = {gencode}",
            f"  name = {name} [{','.join(wanted)}]",
        ]
        objects.append(out)
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    for stale in set(folder.glob("*.o")) - set(objects):  # a renamed or removed source
        stale.unlink()
        Path(f"{stale}.log").unlink(missing_ok=True)
    subprocess.run(["ninja", "-C", str(folder), f"-j{jobs}"], check=True)
    return [str(out) for out in objects]


def git_commit() -> str:
    try:
        run = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
                             capture_output=True, text=True)  # fmt: skip
    except OSError:
        return "unknown"
    return run.stdout.strip() if run.returncode == 0 else "unknown"


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@dataclass(frozen=True)
class Toolchain:
    """What this run builds with; nvcc None: without kernels, because of `why`."""

    nvcc: str | None
    home: Path | None
    cuda_version: str | None
    archs: tuple[str, ...]
    jobs: int
    why: str


def toolchain() -> Toolchain:
    """Read the environment. Exits with the reason on a bad value, a demanded but missing toolkit, or a wrong one."""
    mode = choice("MDI_CUDA", "auto", ("0", "1", "auto"))
    archs, jobs = cuda_archs(), max_jobs()
    nvcc = None if mode == "0" else find_nvcc()
    if nvcc is None:
        if mode == "1":
            home = os.environ.get("CUDA_HOME", "")
            raise SystemExit(
                f"MDI_CUDA=1 but no nvcc was found (CUDA_HOME={home!r}): set CUDA_HOME to the CUDA toolkit, or"
                " MDI_CUDA=0 to build without kernels"
            )
        return Toolchain(None, None, None, (), jobs, "MDI_CUDA=0" if mode == "0" else "no nvcc found")
    home, version = toolkit(nvcc)
    if torch.version.cuda and version.split(".")[0] != torch.version.cuda.split(".")[0]:
        raise SystemExit(
            f"nvcc is CUDA {version} ({nvcc}) but torch {torch.__version__} was built for CUDA {torch.version.cuda}:"
            " the major versions must agree. Set CUDA_HOME to a matching toolkit, or MDI_CUDA=0 to install without"
            " kernels."
        )
    return Toolchain(nvcc, home, version, archs, jobs, "")


class BuildExt(BuildExtension):
    """Kernels first, then the two modules."""

    tools: Toolchain

    def build_extensions(self) -> None:
        tools = self.tools
        record = {
            "commit": git_commit(),
            "torch": torch.__version__,
            "torch_abi": "2.11",
            "cuda": tools.cuda_version,
            "archs": list(tools.archs),
        }
        literal = json.dumps(json.dumps(record, sort_keys=True))
        write_if_changed(BUILD / "generated/build_record.h", f"#define MDI_BUILD_RECORD {literal}\n")
        os.environ["MAX_JOBS"] = str(tools.jobs)  # for BuildExtension's own ninja
        if tools.nvcc:
            text = f"kernels for {', '.join(tools.archs)} with CUDA {tools.cuda_version}, {tools.jobs} jobs"
            self.announce(f"mini-deepinfer: {text}", level=logging.WARNING)
            for extension in self.extensions:
                if extension.name == "mini_deepinfer._C":
                    extension.extra_objects = build_kernels(tools.nvcc, tools.archs, tools.jobs)
        else:
            text = f"building WITHOUT CUDA kernels ({tools.why}); only the plain PyTorch ops will run"
            self.announce(f"mini-deepinfer: {text}", level=logging.WARNING)
        self.force = True  # relink always: setuptools does not look at extra_objects; ninja still compiles only changes
        super().build_extensions()


def extensions(tools: Toolchain) -> list[Extension]:
    import pybind11

    macros: list[tuple[str, str | None]] = [("TORCH_TARGET_VERSION", TORCH_ABI), ("TORCH_STABLE_ONLY", None)]
    include_dirs = [str(ROOT / "csrc"), str(BUILD / "generated")]
    library_dirs: list[str] = []
    if tools.home:
        macros += [("MDI_WITH_CUDA", None)] + [(f"MDI_WITH_SM{arch[:-1]}", None) for arch in tools.archs]
        include_dirs.append(str(tools.home / "include"))
        library_dirs = [str(path) for path in (tools.home / "lib64", tools.home / "lib") if path.exists()]
    flags = ["-O2", "-g0", "-std=c++17", "-fvisibility=hidden", "-Wall"]
    return [
        CppExtension(
            "mini_deepinfer._C",
            ["csrc/binding.cpp"],
            include_dirs=include_dirs,
            define_macros=macros,
            library_dirs=library_dirs,
            libraries=["cudart"] if tools.home else [],  # shared: under a CUDA torch the loader reuses torch's own runtime
            extra_compile_args=flags,
            extra_link_args=[f"-Wl,-rpath,{path}" for path in library_dirs],
            py_limited_api=True,
        ),
        Extension(
            "mini_deepinfer._host",
            ["csrc/host.cpp"],
            include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
            extra_compile_args=[*flags, "-ffp-contract=off"],
            language="c++",
        ),
    ]


if __name__ == "__main__":  # also true when pip runs this file; tests import it
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])  # this one's ninja
    check_setuptools()
    BuildExt.tools = toolchain()
    setup(ext_modules=extensions(BuildExt.tools), cmdclass={"build_ext": BuildExt})
