"""The loopback's stand-ins on a GPU: rows that are written beside the step's stream."""

from __future__ import annotations

import pytest
import torch

from mini_deepinfer.parallel import Loopback

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [3, 700], ids=["small", "beside the step"])
def test_loopback_memory_is_not_reused_too_early(cuda: torch.device, rows: int) -> None:
    """Memory is given back as early as the caller can, and written over at once, while the rows are still on their way."""
    world, width = 4, 2048
    parallel = Loopback(world, num_experts=8, device=cuda)
    counts = parallel.gather_counts(rows)
    wrong = torch.zeros((), dtype=torch.int64, device=cuda)
    for turn in range(30):
        own = torch.full((rows, width), turn, dtype=torch.int32, device=cuda)
        sent = parallel.start_all_gather([own, own[:, 0].float()], counts)
        del own
        torch.full((rows, width), -1, dtype=torch.int32, device=cuda)
        torch.full((world * rows, width), -2, dtype=torch.int32, device=cuda)
        gathered, first = sent.wait()
        del sent
        assert gathered.shape == (world * rows, width) and first.shape == (world * rows,) and first.dtype == torch.float32
        wrong += (gathered != turn).sum() + (first != turn).sum()
    assert int(wrong) == 0, f"{int(wrong)} wrong values"


def test_loopback_rows_can_be_captured(cuda: torch.device) -> None:
    """Decode steps are graphs: what runs beside the step belongs to them."""
    parallel = Loopback(4, num_experts=8, device=cuda)
    own = torch.zeros(700, 2048, dtype=torch.int32, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sent = parallel.start_all_gather([own], [700] * 4)
        square = own * own
        gathered = sent.wait()[0] + square.repeat(4, 1)
    for value in (3, 5):
        own.fill_(value)
        graph.replay()
        assert bool((gathered == value + value * value).all())
