#!/usr/bin/env python3
"""Time single ops at the model's shapes: ``python bench/bench_ops.py --op attention.sparse --check``.

Loads ``bench/cases_*.py``. For every case all implementations are timed in turns in the same run; each gets a line with
the floor (peak rates of the datasheet) beside it, and a row in --result-filename. With --check every implementation is
compared with the reference first, and one that fails is not timed. --energy adds a long run of each implementation and the
energy of a call in it: a step that runs at the GPU's power limit takes as long as the energy of its calls. Exit status 1 if a
check failed or a case raised.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.result import append_row, base_row
from bench.shapes import Case
from bench.timing import Energy, Latency, energy_counter, measure_energy, time_paired
from mini_deepinfer.report import build_line, show, table

# Dense datasheet peaks: TFLOP/s by operand format, and TB/s.
PEAKS: dict[str, dict[str, float]] = {
    "H100": {"bf16": 989, "fp8": 1979, "tb_per_s": 3.35},
    "H200": {"bf16": 989, "fp8": 1979, "tb_per_s": 4.8},
    "B200": {"bf16": 2250, "fp8": 4500, "tb_per_s": 8.0},
}


def load_cases(folder: Path) -> list[Case]:
    """All cases of FOLDER/cases_*.py, in file order."""
    cases: list[Case] = []
    for path in sorted(folder.glob("cases_*.py")):
        spec = importlib.util.spec_from_file_location(f"bench.{path.stem}", path)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"bench_ops: cannot load {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        cases += module.CASES
    return cases


def peaks_of(device: torch.device) -> dict[str, float] | None:
    """Datasheet peaks of the GPU, None if it is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peaks for key, peaks in PEAKS.items() if key in name), None)


def floor_ms(case: Case, peaks: dict[str, float]) -> float:
    """Lower bound of the case: work at peak rate or bytes at peak bandwidth, whichever takes longer.

    The operand format is params["dtype"]; everything narrower than bf16 counts at the FP8 rate.
    """
    rate = peaks["fp8"] if str(case.params.get("dtype", "bf16")).startswith(("fp8", "fp4", "e4m3", "int8")) else None
    return max(case.flops / ((rate or peaks["bf16"]) * 1e9), case.bytes / (peaks["tb_per_s"] * 1e9))


def run_case(
    case: Case, impls: list[str], device: torch.device, args: argparse.Namespace, read_joule: Callable[[], float] | None = None
) -> list[dict[str, Any]]:
    """Check and time one case; the rows of the implementations that passed. Raises if one fails its check.

    read_joule: the GPU's energy counter, for rows with the energy of a call.
    """
    inputs = case.make(device)
    errors: dict[str, float] = {}
    failures: list[str] = []
    if args.check:
        for impl in impls:
            try:
                errors[impl] = float(case.check(inputs, case.run(inputs, impl)))
            except Exception as error:
                failures.append(f"{case.op} {case.name} {impl}: {error}")
        impls = [impl for impl in impls if impl in errors]
    runs = {impl: (lambda impl=impl: case.run(inputs, impl)) for impl in impls}
    latencies: dict[str, Latency] = {}
    if runs and not args.check_only:
        latencies = time_paired(runs, device, warmup=args.num_iters_warmup, iters=args.num_iters)
    rows = [_row(case, impl, latencies, errors, device, args.run_name) for impl in latencies]
    if read_joule is not None:
        for row in rows:
            energy = measure_energy(runs[row["impl"]], read_joule, lambda: torch.cuda.synchronize(device))
            row["energy"] = dataclasses.asdict(energy)
    if args.check_only:
        for impl in impls:
            show(f"checked {case.op} {case.name} {impl}: max error {errors[impl]:.3e}")
    if failures:
        raise CheckError("\n".join(failures), rows)
    return rows


class CheckError(Exception):
    """Some implementations differ from the reference; the rows of the others are kept."""

    def __init__(self, text: str, rows: list[dict[str, Any]]) -> None:
        super().__init__(text)
        self.rows = rows


def _row(
    case: Case, impl: str, latencies: dict[str, Latency], errors: dict[str, float], device: torch.device, run_name: str
) -> dict[str, Any]:
    latency = latencies[impl]
    peaks = peaks_of(device)
    floor = floor_ms(case, peaks) if peaks else None
    others = [name for name in latencies if name != impl]
    row = base_row(device, run_name=run_name)
    row.update(
        op=case.op,
        name=case.name,
        impl=impl,
        params=case.params,
        dtype=str(case.params.get("dtype", "bf16")),
        iters=latency.iters,
        latency_ms=latency.as_dict(),
        tflops=case.flops / latency.median / 1e9,
        gb_per_s=case.bytes / latency.median / 1e6,
        floor_ms=floor,
        pct_of_peak=100 * floor / latency.median if floor is not None else None,
        baseline={"name": others[-1], "latency_ms": latencies[others[-1]].median} if others else None,
        checked=impl in errors,
        max_err=errors.get(impl),
    )
    return row


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The table of a run."""
    lines = []
    for row in rows:
        baseline = row["baseline"]
        ratio = f"{baseline['latency_ms'] / row['latency_ms']['median']:.2f}x {baseline['name']}" if baseline else "-"
        lines.append(
            [
                f"{row['op']} {row['name']}",
                row["impl"],
                f"{row['latency_ms']['median']:.4f}",
                f"{row['latency_ms']['p10']:.4f}",
                f"{row['latency_ms']['p90']:.4f}",
                "-" if row["floor_ms"] is None else f"{row['floor_ms']:.4f}",
                "-" if row["pct_of_peak"] is None else f"{row['pct_of_peak']:.1f}",
                f"{row['tflops']:.1f}",
                f"{row['gb_per_s']:.0f}",
                ratio,
                f"{row['max_err']:.2e}" if row["checked"] else "unchecked",
            ]
        )
    header = ["op", "impl", "median ms", "p10", "p90", "floor", "% peak", "TFLOP/s", "GB/s", "against", "max error"]
    show(table(header, lines))
    energies = [(row, Energy(**row["energy"])) for row in rows if "energy" in row]
    if energies:
        lines = [[f"{row['op']} {row['name']}", row["impl"], f"{e.ms:.4f}", f"{1e3 * e.joule:.1f}", f"{e.watt:.0f}"] for row, e in energies]
        show(table(["op, long run", "impl", "ms", "mJ a call", "W"], lines))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", help="op or prefix of ops, e.g. attention or attention.sparse; repeatable")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--impl", action="append", help="only these implementations; repeatable")
    parser.add_argument("--check", action="store_true", help="compare with the reference before timing")
    parser.add_argument("--check-only", action="store_true", help="compare, do not time")
    parser.add_argument("--energy", action="store_true", help="also the energy of a call in a run of over a second (needs nvidia-ml-py)")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--num-iters", type=int, default=30)
    parser.add_argument("--num-iters-warmup", type=int, default=10)
    parser.add_argument("--run-name", default="")
    parser.add_argument("--result-filename", type=Path, help="append one JSON row per implementation")
    args = parser.parse_args(argv)
    args.check = args.check or args.check_only
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [
        case
        for case in load_cases(Path(__file__).resolve().parent)
        if args.case in case.name and (not args.op or any(case.op == op or case.op.startswith(op + ".") for op in args.op))
    ]
    if args.list:
        for case in cases:
            print(f"{case.op}  {case.name}  {','.join(case.impls)}  {case.params}")
        return 0
    if not cases:
        show("bench_ops: no case matches; --list shows them all")
        return 2
    if args.device == "cuda" and not torch.cuda.is_available():
        show("bench_ops: no GPU; --device cpu runs the reference implementations")
        return 2
    device = torch.device(args.device)
    try:
        read_joule = energy_counter(device) if args.energy else None
    except RuntimeError as error:
        show(f"bench_ops: --energy: {error}")
        return 2
    show(build_line(device))
    rows: list[dict[str, Any]] = []
    failed = 0
    for case in cases:
        impls = [impl for impl in case.impls if not args.impl or impl in args.impl]
        if device.type == "cpu":
            impls = [impl for impl in impls if impl == "reference"]
        if not impls:
            continue
        try:
            new_rows = run_case(case, impls, device, args, read_joule)
        except CheckError as error:
            failed += 1
            show(f"CHECK FAILED: {error}")
            new_rows = error.rows
        except Exception:
            failed += 1
            show(f"FAILED: {case.op} {case.name}\n{traceback.format_exc()}")
            continue
        rows += new_rows
        if args.result_filename:
            for row in new_rows:
                append_row(args.result_filename, row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rows:
        print_rows(rows)
    if failed:
        show(f"bench_ops: {failed} of {len(cases)} cases failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
