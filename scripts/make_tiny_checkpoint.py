#!/usr/bin/env python3
"""Write a tiny random checkpoint in the released format: make_tiny_checkpoint.py OUT [--config PRESET|FILE] [--seed N]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mini_deepinfer.tiny_checkpoint import PRESETS, preset_config, write_tiny_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--config", default="tiny", help=f"preset ({', '.join(PRESETS)}) or a config.json file")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument("--num-shards", type=int, default=2, help="safetensors files; 1 = one file without an index (default 2)")
    args = parser.parse_args()
    if args.num_shards < 1:
        parser.error(f"--num-shards must be at least 1, got {args.num_shards}")
    try:
        path = Path(args.config)
        raw = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else preset_config(args.config)
        config = write_tiny_checkpoint(args.out, raw, args.seed, args.num_shards)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    print(f"{args.out}: {config.num_hidden_layers} layers, {config.n_routed_experts} experts, {size / 2**20:.2f} MiB of weights")


if __name__ == "__main__":
    main()
