"""The exchange in one process: shapes, checks, the loopback's stand-ins and the launcher's environment."""

from __future__ import annotations

import pytest
import torch

from mini_deepinfer.parallel import Loopback, ProcessGroup, SingleProcess, local_device, make_parallel


def test_single_process_returns_its_own_rows():
    with SingleProcess() as parallel:
        counts = parallel.gather_counts(3)
        rows = torch.arange(6).view(3, 2)
        assert counts == [3]
        assert torch.equal(parallel.all_gather(rows, counts), rows)
        assert torch.equal(parallel.reduce_scatter(rows, counts, out_dtype=torch.float32), rows.float())
        assert parallel.all_gather_object("x") == ["x"]
        parallel.barrier()
    assert parallel.step == 1


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_loopback_repeats_its_rows(num_tokens, dtype):
    parallel = Loopback(4, num_experts=16)
    counts = parallel.gather_counts(num_tokens)
    rows = torch.randint(0, 100, (num_tokens, 3)).to(torch.float32).to(dtype)
    gathered = parallel.all_gather(rows, counts)
    assert counts == [num_tokens] * 4
    assert gathered.dtype == dtype
    assert torch.equal(gathered.float(), torch.cat([rows.float()] * 4))
    partial = torch.randn(4 * num_tokens, 3)
    assert torch.equal(parallel.reduce_scatter(partial, counts), partial[:num_tokens])


def test_loopback_repeats_rows_that_lie_anywhere():
    """A part of a larger tensor need not begin, or have rows, on eight bytes."""
    rows = torch.arange(3 * 20, dtype=torch.uint8)[4:].view(4, 14)
    for part in (rows[:, :8], rows[1:, 2:10], rows.view(7, 8)):
        assert torch.equal(Loopback(2, num_experts=4).all_gather(part, [len(part)] * 2), torch.cat((part, part)))


def test_loopback_permutes_the_experts_of_stand_ins():
    parallel = Loopback(4, num_experts=16)
    ids = torch.arange(16, dtype=torch.int32).view(4, 4)
    weights = torch.rand(4, 4)
    gathered, gathered_weights = parallel.start_gather_routes(ids, weights, [4] * 4).wait()
    assert gathered.dtype == torch.int32
    assert torch.equal(gathered_weights, weights.repeat(4, 1))
    parts = [part.flatten().tolist() for part in gathered.split(4)]
    assert parts[0] == list(range(16))
    assert all(sorted(part) == list(range(16)) for part in parts)  # a permutation each
    assert len({tuple(part) for part in parts}) == 4  # and not the same one
    again = Loopback(4, num_experts=16).start_gather_routes(ids, weights, [4] * 4).wait()[0]
    assert torch.equal(gathered, again)  # fixed: every run measures the same work


def test_checks_name_rank_and_rows():
    parallel = SingleProcess()
    with pytest.raises(ValueError, match=r"all_gather: rank 0 must pass 2 rows .* got shape \[3, 1\]"):
        parallel.all_gather(torch.zeros(3, 1), [2])
    with pytest.raises(ValueError, match="one entry per rank"):
        parallel.all_gather(torch.zeros(3, 1), [2, 1])
    with pytest.raises(ValueError, match="num_tokens must be >= 0"):
        parallel.gather_counts(-1)
    with pytest.raises(ValueError, match="world and num_experts"):
        Loopback(0, 8)


def test_make_parallel_reads_the_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(make_parallel("cpu", num_experts=8), SingleProcess)
    assert isinstance(make_parallel("cpu", ep_loopback=4, num_experts=8), Loopback)
    with pytest.raises(ValueError, match=r"ep_size=4 .* torchrun --nproc-per-node 4"):
        make_parallel("cpu", ep_size=4, num_experts=8)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="ep_loopback=4 is for one process"):
        make_parallel("cpu", ep_loopback=4, num_experts=8)
    with pytest.raises(ValueError, match="RANK is not set"):
        ProcessGroup("cpu")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="RANK=2 WORLD_SIZE=2"):
        ProcessGroup("cpu")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE = 'two': must be an integer"):
        make_parallel("cpu", num_experts=8)


def test_device_comes_from_local_rank(monkeypatch):
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="LOCAL_RANK is not"):
        local_device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device("cuda") == torch.device("cuda", 1)
    assert current == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK=2 but there are 2 GPUs"):
        local_device("cuda")
    assert local_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="must be cpu or cuda"):
        local_device("meta")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="use --device cpu"):
        local_device("cuda")
