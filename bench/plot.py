#!/usr/bin/env python3
"""Draw result rows: stage bars of end-to-end runs, and speed against context length.

``python bench/plot.py results.jsonl --output stages.png``. Needs matplotlib (the ``plot`` extra).
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.result import read_rows
from mini_deepinfer.stages import GATHER, GROUPS, SCATTER, group_times

COLOURS = ("#2f6f9f", "#7fb3d5", "#e0a030", "#c0504d", "#9a9a9a")
WAITING, WAITING_COLOUR = "waiting for other ranks", "#5a2a2a"
LABEL_WIDTH = 26  # characters of a bar's label in a line


def label_of(row: dict[str, Any]) -> str:
    """What tells this bar from the others."""
    name = row["run_name"] or row["commit"][:7]
    return f"{name}\n{row['gpu']}\n{row['parallel']}"


def draw_stages(rows: list[dict[str, Any]], axes: Any) -> None:
    """One stacked bar per row, bottom to top in the order of the stage table; what rank 0 waits for others on top."""
    stacks = [stack_of(row) for row in rows]
    names = [name for name in (*GROUPS, WAITING) if name != WAITING or any(stack[WAITING] for stack in stacks)]
    for position, (row, stack) in enumerate(zip(rows, stacks)):
        bottom = 0.0
        for name, colour in zip(names, (*COLOURS, WAITING_COLOUR)):
            axes.bar(position, stack[name], bottom=bottom, color=colour, label=name if position == 0 else None)
            bottom += stack[name]
        axes.text(position, bottom, f"{bottom:.0f} ms\n{row['prefill_tok_per_s']:.0f} tok/s", ha="center", va="bottom")
    labels = ["\n".join(textwrap.fill(line, LABEL_WIDTH) for line in label_of(row).splitlines()) for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylabel("ms per step")
    axes.margins(y=0.15)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def stack_of(row: dict[str, Any]) -> dict[str, float]:
    """Height of every piece of a bar: the rows of the stage table, without the time in which rank 0 waited for others."""
    waited = sum(row["stages_ms"].get(name, 0.0) for name in (GATHER, SCATTER))
    groups = group_times({name: ms for name, ms in row["stages_ms"].items() if name not in (GATHER, SCATTER)})
    return groups | {WAITING: waited}


def draw_lengths(rows: list[dict[str, Any]], axes: Any) -> None:
    """Input tokens per second against context length, one line per label."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault(label_of(row).replace("\n", ", "), []).append((row["input_len"], row["prefill_tok_per_s"]))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points)), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("input tok/s per GPU")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSONL files")
    parser.add_argument("--kind", choices=["stages", "lengths"], default="stages")
    parser.add_argument("--output", type=Path, required=True, help="picture to write (.png, .svg, .pdf)")
    args = parser.parse_args(argv)
    rows = [row for path in args.results for row in read_rows(path) if row.get("stages_ms")]
    if not rows:
        print("plot: no row with a stage table in these files", file=sys.stderr)
        return 2
    try:
        import matplotlib
    except ImportError:
        print("plot: matplotlib is missing: pip install 'mini-deepinfer[plot]'", file=sys.stderr)
        return 2
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(5.0, 1.9 * len(rows) + 2), 5), layout="constrained")
    (draw_stages if args.kind == "stages" else draw_lengths)(rows, axes)
    figure.savefig(args.output, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
