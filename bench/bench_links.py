#!/usr/bin/env python3
"""Measure the links between the ranks of one host with the transfers of a prefill step, and nothing else running.

    torchrun --nproc-per-node 2 bench/bench_links.py --result_jsonl results/links.jsonl

One row per transfer: `latency_ms` of the slowest rank, and `gb_per_s` of other ranks' data that a rank receives. The sizes are
those of one layer of bench_prefill.py: the folded codes, scales and routes of --num-tokens tokens in, their partial sums out. "library" is
the plain collective of the same direction, on the step's stream.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from bench.result import append_row, base_row
from bench.timing import Latency, summarise
from mini_deepinfer.config import ModelConfig, check_environment
from mini_deepinfer.parallel import ExpertParallel, ProcessGroup, all_gather_into, local_device
from mini_deepinfer.report import show, table

NVLINK_GB_PER_S = 450.0  # H100/H200, per direction, all 18 links of a GPU


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=4096, help="tokens of a rank")
    parser.add_argument("--num-iters", type=int, default=30)
    parser.add_argument("--num-iters-warmup", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--run-name", default="")
    parser.add_argument("--result_jsonl", "--result-jsonl", dest="result_jsonl", type=Path, help="append the rows")
    args = parser.parse_args(argv)
    if min(args.num_tokens, args.num_iters) < 1 or args.num_iters_warmup < 0:
        parser.error("--num-tokens and --num-iters must be >= 1, --num-iters-warmup >= 0")
    return args


def transfers(num_tokens: int, device: torch.device, parallel: ExpertParallel) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> (what to time, bytes of other ranks' data that this rank receives)."""
    config = ModelConfig.released()
    n, k, world = config.hidden_size, config.num_experts_per_tok, parallel.world
    counts = [num_tokens] * world
    codes = torch.randint(0, 120, (num_tokens, n), dtype=torch.uint8, device=device)
    scale = torch.rand(num_tokens, device=device)
    ids = torch.randint(0, 96, (num_tokens, k), dtype=torch.int32, device=device)
    weights = torch.rand(num_tokens, k, device=device)
    partial = torch.randn(world * num_tokens, n, device=device).bfloat16()
    for_others = partial[num_tokens:]
    gathered = torch.empty(world * num_tokens, n, dtype=torch.uint8, device=device)
    scattered = torch.empty(num_tokens, n, dtype=torch.bfloat16, device=device)
    small = torch.zeros(64, dtype=torch.uint8, device=device)
    small_gathered = small.repeat(world)
    others = world - 1

    def size(*tensors: torch.Tensor) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    runs: dict[str, tuple[Callable[[], Any], int]] = {
        "gather codes and scales": (lambda: parallel.start_all_gather([codes, scale], counts).wait(), others * size(codes, scale)),
        "gather routes": (lambda: parallel.start_gather_routes(ids, weights, counts).wait(), others * size(ids, weights)),
        "scatter partial sums": (lambda: parallel.start_scatter(for_others, counts).wait(), others * size(scattered)),
        "library all_gather of codes": (lambda: all_gather_into(gathered, codes), others * size(codes)),
        "library reduce_scatter of sums": (lambda: dist.reduce_scatter_tensor(scattered, partial), others * size(scattered)),
        "library all_gather, 64 bytes": (lambda: all_gather_into(small_gathered, small), others * 64),
    }
    if device.type != "cuda":  # gloo has no reduce-scatter of bfloat16
        del runs["library reduce_scatter of sums"]
    return runs


def time_together(run: Callable[[], Any], args: argparse.Namespace, device: torch.device, parallel: ExpertParallel) -> Latency:
    """Times of this rank for a transfer that all ranks begin together."""
    for _ in range(args.num_iters_warmup):
        run()
    if device.type == "cpu":
        samples = []
        for _ in range(args.num_iters):
            start = time.perf_counter()
            run()
            samples.append(1e3 * (time.perf_counter() - start))
        return summarise(samples)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(args.num_iters)]
    torch.cuda.synchronize(device)
    parallel.barrier()
    torch.cuda._sleep(20_000_000)  # about 10 ms: the host gets ahead of the device
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return summarise([start.elapsed_time(end) for start, end in events])


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check_environment()
    device = local_device(args.device)
    with ProcessGroup(device) as parallel:
        lines = []
        for name, (run, received) in transfers(args.num_tokens, device, parallel).items():
            ranks = parallel.all_gather_object(time_together(run, args, device, parallel))
            slowest = max(ranks, key=lambda latency: latency.median)
            gb_per_s = received / slowest.median / 1e6
            row = base_row(device, run_name=args.run_name)
            row.update(op="links", stage=name, params={"num_tokens": args.num_tokens, "world": parallel.world}, iters=slowest.iters)
            row.update(latency_ms=slowest.as_dict(), rank_ms=[latency.median for latency in ranks], received_bytes=received)
            on_links = device.type == "cuda"  # gloo has no peak
            row.update(gb_per_s=gb_per_s, pct_of_peak=100 * gb_per_s / NVLINK_GB_PER_S if on_links else None, checked=False)
            if parallel.rank == 0 and args.result_jsonl:
                append_row(args.result_jsonl, row)
            times = [f"{ms:.4f}" for ms in (slowest.median, slowest.p10, slowest.p90)]
            lines.append([name, *times, f"{received / 1e6:.2f}", f"{gb_per_s:.0f}"])
        if parallel.rank == 0:
            show(table(["transfer", "ms", "p10", "p90", "MB in", "GB/s in"], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
