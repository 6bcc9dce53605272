"""Checkpoints shared by the tests of several ranks."""

from __future__ import annotations

import copy

import pytest

from mini_deepinfer.tiny_checkpoint import PRESETS, write_tiny_checkpoint


@pytest.fixture(scope="session")
def cases_folder(tmp_path_factory):
    """Every feature at the smallest size, 8 experts."""
    folder = tmp_path_factory.mktemp("cases")
    write_tiny_checkpoint(folder, PRESETS["cases"])
    return folder


@pytest.fixture(scope="session")
def six_experts_folder(tmp_path_factory):
    """The same with 6 experts: 4 ranks hold 2, 2, 1 and 1 of them."""
    folder = tmp_path_factory.mktemp("six_experts")
    config = copy.deepcopy(PRESETS["cases"])
    config["text_config"]["n_routed_experts"] = 6
    write_tiny_checkpoint(folder, config)
    return folder
