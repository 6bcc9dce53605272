"""Collectives between processes: uneven counts, zero rows, every dtype, and the same number of them everywhere."""

from __future__ import annotations

import json

import pytest

from tests.dist.launch import check_all_well, run_ranks

EXCHANGE = """
import json, sys, torch
from mini_deepinfer.parallel import make_parallel
world = int(sys.argv[1])
with make_parallel("cpu", ep_size=world, num_experts=8) as parallel:
    generator = torch.Generator().manual_seed(parallel.rank)
    for step, counts in enumerate(json.loads(sys.argv[2])):
        own = counts[parallel.rank]
        assert parallel.gather_counts(own) == counts
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.bool):
            rows = torch.randint(0, 100, (own, 3, 5), generator=generator).to(torch.float32).to(dtype)
            gathered = parallel.all_gather(rows, counts)
            parts = parallel.all_gather_object(rows.to(torch.float32))
            assert gathered.dtype == dtype and gathered.shape == (sum(counts), 3, 5)
            assert torch.equal(gathered.to(torch.float32), torch.cat(parts))
        ids = parallel.all_gather_expert_ids(torch.full((own, 2), parallel.rank), counts)
        assert ids[:, 0].tolist() == [rank for rank, count in enumerate(counts) for _ in range(count)]
        for dtype in (torch.float32, torch.bfloat16):
            partial = torch.randn(sum(counts), 7, generator=generator).to(dtype)
            partials = parallel.all_gather_object(partial.to(torch.float32))
            total = partials[0].clone()
            for other in partials[1:]:
                total += other
            total = total.split(counts)[parallel.rank]
            assert torch.equal(parallel.reduce_scatter(partial, counts), total.to(dtype))
            assert torch.equal(parallel.reduce_scatter(partial, counts, out_dtype=torch.float32), total)
    parallel.barrier()
    print(json.dumps([parallel.step, parallel.num_collectives, sorted(parallel.collectives.items())]))
    try:
        parallel.all_gather(torch.zeros(99, 1), [1] * world)
    except ValueError as error:
        assert f"rank {parallel.rank} must pass 1 rows" in str(error)
"""


@pytest.mark.parametrize(
    "world, steps",
    [
        (2, [[1, 0], [3, 3], [0, 0], [0, 4]]),
        (4, [[3, 0, 5, 1], [2, 2, 2, 2], [0, 0, 0, 0], [0, 0, 0, 7]]),
    ],
)
def test_exchange(world, steps):
    results = run_ranks(EXCHANGE, world, arguments=[str(world), json.dumps(steps)])
    check_all_well(results)
    reports = {result.stdout.splitlines()[-1] for result in results}
    assert len(reports) == 1  # every rank took part in the same collectives
    assert json.loads(reports.pop())[0] == len(steps)
