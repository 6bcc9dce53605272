"""Shared test set-up: which tests need a GPU, and the devices they get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mini_deepinfer.ops import _extension

GPU_TESTS = Path(__file__).parent / "gpu"


def _no_gpu_reason() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    return _extension.device_problem(torch.device("cuda", torch.cuda.current_device()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything in tests/gpu and everything marked gpu skips with its reason where it cannot run."""
    reason = None
    for item in items:
        if GPU_TESTS in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu"):
            reason = reason if reason is not None else _no_gpu_reason() or ""
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def cuda() -> torch.device:
    """The current CUDA device, with its index."""
    return torch.device("cuda", torch.cuda.current_device())
