"""`env --self-test` on this GPU: every kernel that the build holds for it is within its bound."""

from __future__ import annotations

import torch

from mini_deepinfer import environment
from mini_deepinfer.ops import _dispatch


def test_every_kernel_passes(cuda: torch.device) -> None:
    rows = environment.self_test(cuda)
    assert {(row["op"], row["impl"]) for row in rows} == {(op, impl) for op, impls in _dispatch.IMPLEMENTATIONS.items() for impl in impls}
    assert [row for row in rows if row["status"] in ("differs", "failed")] == []
    assert {row["op"] for row in rows if row["status"] == "ok"} == set(_dispatch.IMPLEMENTATIONS)
