"""Kernel files run on the CPU, one fiber per CUDA thread (tests/host/cuda_on_cpu.h): index logic without a GPU."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from mini_deepinfer.ops.reference import number_formats as nf
from tests.host.build import library, pointer
from tests.inputs import Canary, generator, integers, random_bytes
from tests.numerics import assert_bitwise


def test_harness_collectives() -> None:
    out = torch.zeros(2, 96, 5, dtype=torch.int32)
    library("collectives", []).run_reductions(2, pointer(out))
    t = torch.arange(96, dtype=torch.int32)
    for block in out:
        assert torch.equal(block[:, 0], torch.full((96,), 95 * 96 // 2, dtype=torch.int32))
        assert torch.equal(block[:, 1], torch.full((96,), 48, dtype=torch.int32))
        for warp in range(3):
            bits = sum(1 << lane for lane in range(32) if (32 * warp + lane) % 3 == 0)
            assert set((block[32 * warp : 32 * warp + 32, 2].long() & 0xFFFFFFFF).tolist()) == {bits}
        assert torch.equal(block[:, 3], torch.where(t % 32 == 0, t, t - 1))
        assert torch.equal(block[:, 4], torch.full((96,), 8, dtype=torch.int32))


def test_harness_tensor_core_tile() -> None:
    g = generator(3)
    a, b = integers(g, 16, 16), integers(g, 16, 8)
    d = torch.empty(16, 8)
    library("collectives", []).run_tile_product(pointer(a), pointer(b), pointer(d))
    assert torch.equal(d, a.float() @ b.float())


def _run_stuck(errors: Path) -> None:
    faulthandler.disable()  # the abort is expected
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    library("collectives", []).run_stuck()


def test_harness_reports_a_barrier_nobody_completes(tmp_path: Path) -> None:
    library("collectives", [])
    process = multiprocessing.get_context("fork").Process(target=_run_stuck, args=(tmp_path / "errors",))
    process.start()
    process.join(60)
    assert process.exitcode not in (0, None)
    assert "block (0,0,0) is stuck: 0:warp 1:block" in (tmp_path / "errors").read_text()


@pytest.mark.parametrize("kind, m, k", [("fp8", 256, 256), ("fp4", 256, 512), ("fp8", 1, 32), ("fp4", 3, 96), ("fp4", 0, 64)])
def test_expand(kind: str, m: int, k: int) -> None:
    g = generator(m)
    codes, scale = random_bytes(g, m, k if kind == "fp8" else k // 2), random_bytes(g, m, k // 32)
    if m == 256:  # every code under every scale
        every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        codes, scale = every.repeat(256, 1), every[:, None].repeat(1, k // 32)
    out = Canary((m, k), torch.bfloat16, "cpu")
    run = library("expand", ["csrc/elementwise/expand.cu"]).expand
    run(int(kind == "fp4"), ctypes.c_int64(m), ctypes.c_int64(k), pointer(codes), pointer(scale), pointer(out.tensor))
    out.check()
    assert_bitwise(out.tensor, getattr(nf, f"expand_{kind}")(codes, scale))
