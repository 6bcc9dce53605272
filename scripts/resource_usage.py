"""Registers, stack, spills and shared memory of every kernel, from the ptxas logs the build left in build/kernels.

    python scripts/resource_usage.py [--strict] [--build DIR] [--no-sass]

--strict exits non-zero on spills, on a stack frame (local memory), and on ptxas's quiet notes about lost speed: C7508
("setmaxnreg ignored"), C7510, C7517 and C7519 (wgmma serialised or fenced by the compiler).

Each csrc/*/*.cu whose head comment declares `// SASS: HGMMA` (or QGMMA, UTCHMMA, HMMA, several separated by spaces)
must hold those instructions in its compiled code: ptxas deletes an instruction whose operands it can prove constant.
Needs cuobjdump and nvdisasm, of the toolkit or from pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERIOUS_NOTES = ("C7508", "C7510", "C7517", "C7519")


@dataclass
class Kernel:
    """One kernel compiled for one architecture."""

    source: str
    arch: str
    mangled: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    smem: int = 0
    name: str = ""


@dataclass
class Report:
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # "source: text"

    def problems(self) -> list[str]:
        """What --strict refuses."""
        found = []
        for k in self.kernels:
            if k.spill_stores or k.spill_loads:
                found.append(
                    f"{k.source} {k.arch} {k.name}: spills {k.spill_stores} bytes stored, {k.spill_loads} loaded"
                )
            elif k.stack:
                found.append(f"{k.source} {k.arch} {k.name}: {k.stack} bytes of stack (local memory)")
        found += [note for note in self.notes if any(code in note for code in SERIOUS_NOTES)]
        return found


def parse_log(source: str, text: str) -> Report:
    """Kernels and notes in the ptxas output of one object."""
    report = Report()
    kernel: Kernel | None = None
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)' for '([^']+)'", line):
            kernel = Kernel(source, match[2], match[1], name=match[1])
            report.kernels.append(kernel)
        elif kernel and (
            match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        ):
            # the same line also describes device functions that were not inlined: the worst one counts
            kernel.stack = max(kernel.stack, int(match[1]))
            kernel.spill_stores = max(kernel.spill_stores, int(match[2]))
            kernel.spill_loads = max(kernel.spill_loads, int(match[3]))
        elif kernel and (match := re.search(r"Used (\d+) registers", line)):
            kernel.registers = int(match[1])
            if smem := re.search(r"(\d+) bytes smem", line):
                kernel.smem = int(smem[1])
        elif re.search(r"\(C7\d{3}\)|warning", line, re.IGNORECASE):
            report.notes.append(f"{source}: {line.strip()}")
    return report


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    run = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True)
    out = run.stdout.splitlines()
    if run.returncode != 0 or len(out) != len(names):
        return names
    short = [re.sub(r"\(anonymous namespace\)::|^void ", "", name) for name in out]
    return [
        re.sub(r"\((?!.*<).*\)$", "", name) if "<" not in name else re.sub(r">\(.*\)$", ">", name) for name in short
    ]


def read_logs(folder: Path) -> Report:
    """All logs of a build folder. Raises FileNotFoundError when nothing was built there."""
    objects = sorted(folder.glob("*.cu.o"))
    if not objects:
        raise FileNotFoundError(f"no compiled kernels in {folder}: python setup.py build_ext --inplace")
    report = Report()
    for obj in objects:
        source = obj.name.removesuffix(".o").replace("__", "/", 1)
        part = parse_log(source, Path(f"{obj}.log").read_text())
        report.kernels += part.kernels
        report.notes += part.notes
    for kernel, name in zip(report.kernels, demangle([k.mangled for k in report.kernels]), strict=True):
        kernel.name = name
    return report


def declared_sass(source: Path) -> list[str]:
    """Instructions that the head comment of a .cu says must be in its code."""
    wanted: list[str] = []
    for line in source.read_text().splitlines():
        if not line.startswith("//"):
            break
        if match := re.match(r"//\s*SASS:\s*(.+)", line):
            wanted += re.findall(r"[A-Z0-9]+", match[1])
    return wanted


def find_cuobjdump() -> Path | None:
    site = Path(sysconfig.get_paths()["purelib"])
    folders = [site / "nvidia/cu13/bin", Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin"]
    folders += [site / "triton/backends/nvidia/bin"]
    if on_path := shutil.which("cuobjdump"):
        folders.insert(0, Path(on_path).parent)
    for folder in folders:
        if (folder / "cuobjdump").exists() and ((folder / "nvdisasm").exists() or shutil.which("nvdisasm")):
            return folder / "cuobjdump"
    return None


def missing_sass(folder: Path) -> tuple[list[str], int]:
    """(complaints, number of files checked): files without an instruction that they declare."""
    sources = [(s, w) for s in sorted(ROOT.glob("csrc/*/*.cu")) if (w := declared_sass(s))]
    objects = [(s, w, folder / (s.relative_to(ROOT / "csrc").as_posix().replace("/", "__") + ".o")) for s, w in sources]
    objects = [(s, w, o) for s, w, o in objects if o.exists()]  # an architecture that is not built has no object
    if not objects:
        return [], 0
    tool = find_cuobjdump()
    if tool is None:
        return ["cuobjdump or nvdisasm not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"], 0
    env = {**os.environ, "PATH": os.pathsep.join([str(tool.parent), os.environ.get("PATH", "")])}
    complaints = []
    for source, wanted, obj in objects:
        run = subprocess.run([str(tool), "-sass", str(obj)], capture_output=True, text=True, env=env)
        if run.returncode != 0:
            complaints.append(f"{source.name}: cuobjdump failed: {run.stderr.strip()}")
            continue
        for instruction in wanted:
            if not re.search(rf"\b{instruction}\b", run.stdout):
                complaints.append(f"{source.relative_to(ROOT)}: no {instruction} in the compiled code")
    return complaints, len(objects)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/kernels", help="folder of objects and logs")
    parser.add_argument(
        "--strict", action="store_true", help="fail on spills, local memory, lost-speed notes, missing SASS"
    )
    parser.add_argument("--no-sass", action="store_true", help="leave out the instruction check")
    args = parser.parse_args()
    try:
        report = read_logs(args.build)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{'source':36} {'arch':8} {'regs':>4} {'stack':>5} {'spill':>9} {'smem':>6}  kernel")
    for k in report.kernels:
        spill = f"{k.spill_stores}/{k.spill_loads}"
        print(f"{k.source:36} {k.arch:8} {k.registers:4} {k.stack:5} {spill:>9} {k.smem:6}  {k.name}")
    for note in report.notes:
        print(f"note: {note}")
    problems = report.problems()
    if not args.no_sass:
        complaints, checked = missing_sass(args.build)
        print(f"SASS: {checked} files checked, {len(complaints)} complaints")
        problems += complaints
    for problem in problems:
        print(f"{'ERROR' if args.strict else 'warning'}: {problem}", file=sys.stderr)
    return 1 if args.strict and problems else 0


if __name__ == "__main__":
    sys.exit(main())
