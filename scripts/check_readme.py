#!/usr/bin/env python3
"""Run the commands that README.md promises: every ```bash block after a line ``<!-- run -->``, in order, in one folder.

``python scripts/check_readme.py [FILE...] [--list]``. A block that fails or takes longer than --timeout ends with status 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^<!-- run -->\n+```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path) -> list[tuple[int, str]]:
    """(line number, commands) of every marked block. Raises ValueError for a marker without a block."""
    text = path.read_text(encoding="utf-8")
    found = [(text[: match.start(1)].count("\n") + 1, match[1]) for match in BLOCK.finditer(text)]
    markers = len(re.findall(r"^<!-- run -->$", text, re.MULTILINE))
    if markers != len(found):
        raise ValueError(f"{path}: {markers} markers <!-- run -->, but {len(found)} of them stand before a bash block")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "README.md"])
    parser.add_argument("--timeout", type=float, default=300, help="seconds per block")
    parser.add_argument("--list", action="store_true", help="print the blocks, run nothing")
    args = parser.parse_args()
    failed = 0
    for path in args.files:
        for line, commands in blocks(path):
            where = f"{path.name}:{line}"
            if args.list:
                print(f"# {where}\n{commands}")
                continue
            start = time.monotonic()
            try:
                run = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=ROOT, timeout=args.timeout)
                status = f"exit status {run.returncode}" if run.returncode else ""
            except subprocess.TimeoutExpired:
                status = f"not done after {args.timeout:.0f} s"
            failed += bool(status)
            print(f"{'FAIL' if status else 'ok'}  {where} ({time.monotonic() - start:.1f} s) {status}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
