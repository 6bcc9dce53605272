"""Collectives between processes: uneven counts, zero rows, every dtype, memory reuse, and the same number of them everywhere."""

from __future__ import annotations

import json

import pytest

from tests.dist.launch import DEVICES, check_all_well, require, run_ranks

EXCHANGE = """
import json, sys, torch
from mini_deepinfer.parallel import local_device, make_parallel
world, device = int(sys.argv[1]), local_device(sys.argv[3])
with make_parallel(device, ep_size=world, num_experts=8) as parallel:
    generator = torch.Generator().manual_seed(parallel.rank)
    for step, counts in enumerate(json.loads(sys.argv[2])):
        parallel.overlap = step % 2 == 0
        own = counts[parallel.rank]
        assert parallel.gather_counts(own) == counts
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.bool):
            rows = torch.randint(0, 100, (own, 3, 5), generator=generator).to(torch.float32).to(dtype).to(device)
            gathered = parallel.all_gather(rows, counts)
            parts = parallel.all_gather_object(rows.cpu().to(torch.float32))
            assert gathered.dtype == dtype and gathered.shape == (sum(counts), 3, 5) and gathered.device == device
            assert torch.equal(gathered.cpu().to(torch.float32), torch.cat(parts))
        ids = torch.full((own, 2), parallel.rank, device=device)
        several = parallel.start_all_gather([ids, ids.new_empty(own, 0), ids[:, 0] + 1], counts)
        routes = parallel.start_gather_routes(ids, ids.float(), counts)
        ids, nothing, flat = several.wait()
        wanted = [rank for rank, count in enumerate(counts) for _ in range(count)]
        assert ids[:, 0].tolist() == wanted and flat.tolist() == [rank + 1 for rank in wanted] and nothing.shape == (sum(counts), 0)
        assert [part[:, 1].tolist() for part in routes.wait()] == [wanted, wanted]
        assert not parallel.all_agree(parallel.rank == 0) and parallel.all_agree(True)
        for dtype in (torch.float32, torch.bfloat16):
            partial = torch.randn(sum(counts), 7, generator=generator).to(dtype)
            partials = [part.split(counts)[parallel.rank] for part in parallel.all_gather_object(partial.to(torch.float32))]
            total = partials[0].clone()
            for other in partials[1:]:
                total += other
            partial = partial.to(device)
            for_others = torch.cat([part for rank, part in enumerate(partial.split(counts)) if rank != parallel.rank])
            parts = parallel.start_scatter(for_others, counts).wait()
            wanted = torch.stack([part for rank, part in enumerate(partials) if rank != parallel.rank])
            assert parts.dtype == dtype and torch.equal(parts.cpu().to(torch.float32), wanted)
            assert torch.equal(parallel.reduce_scatter(partial, counts).cpu(), total.to(dtype))
            assert torch.equal(parallel.reduce_scatter(partial, counts, out_dtype=torch.float32).cpu(), total)
    parallel.barrier()
    print(json.dumps([parallel.step, parallel.num_collectives, sorted(parallel.collectives.items())]))
    try:
        parallel.all_gather(torch.zeros(99, 1), [1] * world)
    except ValueError as error:
        assert f"rank {parallel.rank} must pass 1 rows" in str(error)
"""

# Memory is given back as early as the caller can, and written over at once, while the rows are still on their way.
REUSE = """
import sys, torch
from mini_deepinfer.parallel import local_device, make_parallel
world, device = int(sys.argv[1]), local_device(sys.argv[2])
rows, width, rounds = 700, 2048, 40
with make_parallel(device, ep_size=world, num_experts=8) as parallel:
    counts = [rows - rank for rank in range(world)]
    own = counts[parallel.rank]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    source = torch.arange(world, device=device).repeat_interleave(torch.tensor(counts, device=device)).int()
    for turn in range(rounds):
        sent = parallel.start_all_gather([torch.full((own, width), 1000 * turn + parallel.rank, dtype=torch.int32, device=device)], counts)
        torch.full((own, width), -1, dtype=torch.int32, device=device)
        torch.full((world * rows, width), -2, dtype=torch.int32, device=device)
        gathered = sent.wait()[0]
        partial = torch.cat([part for rank, part in enumerate(gathered.split(counts)) if rank != parallel.rank]) * world + parallel.rank
        back = parallel.start_scatter(partial, counts)
        wrong += (gathered != (1000 * turn + source)[:, None]).sum()
        del gathered, partial, sent
        torch.full((sum(counts) - own, width), -3, dtype=torch.int32, device=device)
        parts = back.wait()
        del back
        others = [rank for rank in range(world) if rank != parallel.rank]
        wanted = (1000 * turn + parallel.rank) * world + torch.tensor(others, device=device)
        wrong += (parts != wanted[:, None, None]).sum()
    assert int(wrong) == 0, f"{int(wrong)} wrong values"
"""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "world, steps",
    [
        (2, [[1, 0], [3, 3], [0, 0], [0, 4], [5, 2]]),
        (4, [[3, 0, 5, 1], [2, 2, 2, 2], [0, 0, 0, 0], [0, 0, 0, 7]]),
    ],
)
def test_exchange(device, world, steps):
    require(device, world)
    results = run_ranks(EXCHANGE, world, arguments=[str(world), json.dumps(steps), device])
    check_all_well(results)
    reports = {result.stdout.splitlines()[-1] for result in results}
    assert len(reports) == 1  # every rank took part in the same collectives
    assert json.loads(reports.pop())[0] == len(steps)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_is_not_reused_too_early(device):
    require(device, 2)
    check_all_well(run_ranks(REUSE, 2, arguments=["2", device]))
