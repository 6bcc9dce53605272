"""Command-line options that the benchmarks of whole steps share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Which model, on what, and where the rows go."""
    add = parser.add_argument
    add("--model", help="checkpoint folder; with --load-format dummy only its config.json is read (default: released)")
    add("--load-format", choices=["auto", "dummy"], default="auto")
    add("--ep-loopback", type=int, default=1, help="act as rank 0 of this many ranks in one process")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--page-size", type=int, default=256)
    add("--seed", type=int, default=0)
    add("--run-name", default="")
    add("--result_jsonl", "--result-jsonl", "--result-filename", dest="result_jsonl", type=Path, help="append the rows")


def parse_run_options(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parse, and refuse what no benchmark can run."""
    args = parser.parse_args(argv)
    if not args.model and args.load_format == "auto":
        parser.error("--model DIR is needed unless --load-format dummy")
    if args.ep_loopback < 1:
        parser.error(f"--ep-loopback must be >= 1, got {args.ep_loopback}")
    return args
