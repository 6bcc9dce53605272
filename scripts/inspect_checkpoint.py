#!/usr/bin/env python3
"""List a checkpoint's tensors by component, check it, and show how far its block scales spread along each row.

The spread decides whether an FP4 row's scales can be folded into one: an E2M1 value times a power of two is an exact E4M3
value over FOLD_BINADES binades, so a row whose largest and smallest scale are further apart would lose values. FP8 codes
have no such guarantee; their spread is shown for judging the folding of dense weights.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from mini_deepinfer.checkpoint import Checkpoint, check_checkpoint, find_problems
from mini_deepinfer.config import ModelConfig
from mini_deepinfer.tensor_table import tensor_table

FOLD_BINADES = 14


def row_spreads(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Largest minus smallest E8M0 byte of every row of a scale tensor [O, K/32] -> int [O]."""
    stored = checkpoint.tensors[name]
    scales = np.empty(stored.shape, np.uint8)
    checkpoint.read_into(name, scales)
    return scales.max(axis=1).astype(int) - scales.min(axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--scales", choices=("some", "all", "none"), default="some",
                        help="scale tensors to read: some = routed experts 0 and dense weights (default), all, none")
    args = parser.parse_args()
    try:
        config = ModelConfig.from_folder(args.folder)
        report = check_checkpoint(args.folder, config)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print("\n".join(report.lines()))
    owned, _ = find_problems(args.folder, config)
    by_dtype = Counter()
    for stored in owned.values():
        by_dtype[stored.dtype] += 1
    print("dtypes: " + ", ".join(f"{dtype} {count:,}" for dtype, count in sorted(by_dtype.items())))
    if args.tensors:
        for name, stored in owned.items():
            print(f"{name:<56}{stored.dtype:<9}{list(stored.shape)!s:<20}{stored.num_bytes:>15,}  {stored.path.name}")
    if args.scales != "none" and report.ok:
        print_spreads(Checkpoint(args.folder, owned), config, read_all=args.scales == "all")
    return 0 if report.ok else 1


def print_spreads(checkpoint: Checkpoint, config: ModelConfig, *, read_all: bool) -> None:
    histograms: dict[str, Counter[int]] = {}
    for name, spec in tensor_table(config).items():
        if spec.role not in ("block_scale", "row_scale") or (spec.expert is not None and spec.expert > 0 and not read_all):
            continue
        spreads, counts = np.unique(row_spreads(checkpoint, name), return_counts=True)
        histograms.setdefault(spec.component, Counter()).update(dict(zip(spreads.tolist(), counts.tolist())))
    print(f"\nscale spread per row in binades, spread:rows (FP4 rows fold exactly up to {FOLD_BINADES})")
    for component, histogram in histograms.items():
        over = sum(count for spread, count in histogram.items() if spread > FOLD_BINADES)
        verdict = "-" if component != "routed experts" else f"{over:,} rows do not fold" if over else "all rows fold"
        shown = "  ".join(f"{spread}:{count:,}" for spread, count in sorted(histogram.items()))
        print(f"  {component:<20} {verdict:<16} {shown}")


if __name__ == "__main__":
    sys.exit(main())
