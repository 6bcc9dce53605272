"""In a step of kernels alone nothing but their own checks looks at an operand: what they refuse, and in which words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mini_deepinfer.ops import attention, elementwise, indexer, moe
from mini_deepinfer.ops._dispatch import fixed_environment

pytestmark = pytest.mark.gpu


def _bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")


def _f32(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="cuda")


def _int(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32, device="cuda")


def _bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8, device="cuda")


def _sparse(window_idx: torch.Tensor, sink: torch.Tensor) -> None:
    attention.sparse(_bf16(4, 8, 512), _bytes(9, 528), window_idx, None, None, None, sink, 1.0)


def _mix(fn: torch.Tensor, post: torch.Tensor) -> None:
    site = (fn, _f32(24), _f32(3), 20, 1e-6, 1e-20)
    elementwise.hc_expand_mix(_bf16(4, 64), _bf16(4, 4, 64), _f32(4, 4), post, _f32(4, 4, 4), *site)


@pytest.mark.parametrize("run, message", [
    (lambda: elementwise.rmsnorm(_bf16(4, 64), _bf16(96), 1e-6), "elementwise.rmsnorm: weight must be .*64.*got .*96"),
    (lambda: elementwise.rmsnorm(_bf16(4, 64), _int(64), 1e-6), "elementwise.rmsnorm: weight must be .*bfloat16.*got int32"),
    (lambda: elementwise.rmsnorm(_bf16(4, 64), torch.zeros(64), 1e-6), "elementwise.rmsnorm: weight must be .*CUDA"),
    (lambda: elementwise.rope(_bf16(4, 2, 64), _int(5), _f32(9, 16, 2)), "elementwise.rope: positions must be .*4.*got .*5"),
    (lambda: _mix(_f32(24, 192), _f32(4, 4)), r"elementwise.hc_expand_mix: fn must be .*256.*got .*192"),
    (lambda: _mix(_f32(24, 256), _f32(4, 3)), r"elementwise.hc_expand_mix: \w*post must be .*4.*got .*3"),
    (lambda: attention.write_window(_bf16(4, 64), _bytes(9, 66), _int(5)), "attention.write_window: slots must be .*4.*got .*5"),
    (lambda: attention.write_window(_bf16(4, 64), _bytes(9, 64), _int(4)), "attention.write_window: rows must be .*66.*got .*64"),
    (lambda: attention.compress(_f32(4, 64), _f32(4, 64), _f32(2, 64), _f32(3, 64), _int(2, 2), torch.bfloat16),
     "attention.compress: tail_score must be .*2.*got .*3"),
    (lambda: attention.expand_rows(_bytes(9, 528), 512, out=_bf16(8, 512)), "attention.expand_rows: out must be .*9.*got .*8"),
    (lambda: attention.expand_rows(_bytes(9, 528), 512, _int(3), 3, out=_bf16(6, 512)),
     "attention.expand_rows: pages must be .*2.*got .*3"),
    (lambda: _sparse(_int(3, 16), _f32(8)), "attention.sparse: window_idx must be .*4.*got .*3"),
    (lambda: _sparse(_int(4, 16), _f32(4)), "attention.sparse: sink must be .*8.*got .*4"),
    (lambda: indexer.cache_rows(_int(4, 3), _int(1, 2).long(), _int(4), 8), "indexer.cache_rows: page_table must be int32, got int64"),
    (lambda: indexer.write_keys(_bf16(4, 128), _bytes(9, 64), _int(4)), "indexer.write_keys: rows must be .*68.*got .*64"),
    (lambda: moe.route(_bf16(4, 64), _bf16(8, 64), _f32(8).double(), 2, 1.0), "moe.route: bias must be float32, got float64"),
    (lambda: moe.combine(_bf16(8, 64), _int(4, 2), _bf16(3, 64), torch.bfloat16), "moe.combine: shared must be .*4.*got .*3"),
])  # fmt: skip
def test_a_wrong_operand_is_named(cuda: torch.device, run: Callable[[], None], message: str) -> None:
    with fixed_environment(only_kernels=True), pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        run()
    torch.cuda.synchronize()
