"""Weights in memory: the dense tensors and this rank's experts on the device, engram tables memory-mapped on the host.

Formats stay as stored (model spec 2): float8_e4m3fn weights with uint8 E8M0 scales, packed FP4 experts, bf16, float32.
Peak memory while loading is the weights plus one staging buffer per reader thread.
"""

from __future__ import annotations

import importlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from mini_deepinfer.checkpoint import Checkpoint, CheckpointReport, check_checkpoint, open_checkpoint
from mini_deepinfer.config import ModelConfig
from mini_deepinfer.tensor_table import TensorSpec, expert_range, tensor_table

_host: Any
try:
    _host = importlib.import_module("mini_deepinfer._host")
except ImportError:  # not built: numpy gathers the rows
    _host = None

__all__ = ["CheckpointReport", "EngramTable", "Weights", "check_checkpoint", "dummy_weights", "load_weights"]

TORCH_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8, "I8": torch.uint8, "BF16": torch.bfloat16,
                "F32": torch.float32}
_STAGING_BYTES = 64 * 2**20
_NAN_SCALE = 255  # E8M0 byte


class EngramTable:
    """Row-quantised embedding table in host memory (model spec 7.4).

    codes   uint8 [rows, head_dim]       E4M3
    scales  uint8 [rows, head_dim / 32]  E8M0
    num_rows is the height ids are checked against. `dummy_rows` is None for a real table; for dummy weights it is the
    height of the stand-in, and row id i reads row i % dummy_rows.
    """

    def __init__(self, name: str, codes: np.ndarray, scales: np.ndarray, num_rows: int,
                 dummy_rows: int | None = None) -> None:
        self.name = name
        self.num_rows = num_rows
        self.dummy_rows = dummy_rows
        self._codes = codes
        self._scales = scales

    @property
    def head_dim(self) -> int:
        """Columns of one row."""
        return self._codes.shape[1]

    def gather(self, row_ids: torch.Tensor | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Read rows: row_ids int64 [M] -> (codes uint8 [M, head_dim], scales uint8 [M, head_dim / 32]) on the CPU.

        Raises TypeError for another dtype, ValueError for an id outside the table or a row with a NaN scale.
        """
        ids = row_ids.numpy() if isinstance(row_ids, torch.Tensor) else np.asarray(row_ids)
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise TypeError(f"{self.name}: row_ids must be int64 [M], got {ids.dtype} {list(ids.shape)}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_rows):
            raise ValueError(f"{self.name}: row ids {ids.min()}..{ids.max()} leave the table of {self.num_rows} rows")
        if self.dummy_rows is not None:
            ids = ids % self.dummy_rows
        codes, scales = _gather_rows(self._codes, ids), _gather_rows(self._scales, ids)
        if scales.size and scales.max() == _NAN_SCALE:
            row = int(ids[(scales == _NAN_SCALE).any(axis=1)][0])
            raise ValueError(f"{self.name}: row {row} has scale byte 255 (NaN); the checkpoint is damaged")
        return torch.from_numpy(codes), torch.from_numpy(scales)


def _gather_rows(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if _host is not None and hasattr(_host, "gather_rows"):
        return _host.gather_rows(table, np.ascontiguousarray(ids), min(16, os.cpu_count() or 1))
    return table[ids]


@dataclass
class Weights:
    """Everything a rank computes with.

    tensors  by checkpoint name; this rank's routed experts are stacked per layer as
             layers.{i}.ffn.experts.w13 uint8 [E_local, 2F, N/2] (rows 0..F-1 = w1, F..2F-1 = w3), .w13_scale uint8
             [E_local, 2F, N/32], .w2 uint8 [E_local, N, F/2], .w2_scale uint8 [E_local, N, F/32]; model.moe takes them
             out where it packs them (ops/packed_weight.py)
    engram   layer -> table
    experts  ids of the experts held here
    """

    tensors: dict[str, torch.Tensor]
    engram: dict[int, EngramTable]
    experts: range
    rank: int
    world: int

    @property
    def num_bytes(self) -> int:
        """Device bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def load_weights(folder: str | Path, config: ModelConfig, *, rank: int = 0, world: int = 1,
                 device: str | torch.device = "cpu", progress: bool = True) -> Weights:
    """Load a checkpoint folder for one rank of an expert-parallel group.

    The folder is checked completely (names, dtypes, shapes, file sizes) before a weight is read; then only the dense
    tensors and this rank's experts are read. Raises CheckpointError (a ValueError) listing every problem,
    FileNotFoundError, and ValueError naming a tensor whose scales hold a NaN byte.
    """
    device, experts = torch.device(device), expert_range(config.n_routed_experts, world, rank)
    with open_checkpoint(folder, config) as checkpoint:
        tensors, places = allocate(config, experts, device)
        _read_all(checkpoint, places, device, show=progress and rank == 0)
        engram = {}
        for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings):
            name = f"layers.{layer}.engram.embed"
            codes, scales = checkpoint.map_rows(f"{name}.weight"), checkpoint.map_rows(f"{name}.scale")
            engram[layer] = EngramTable(name, codes, scales, rows)
    return Weights(tensors, engram, experts, rank, world)


def dummy_weights(config: ModelConfig, *, rank: int = 0, world: int = 1, device: str | torch.device = "cpu",
                  seed: int = 0) -> Weights:
    """Random weights of the real shapes without files; see dummy_weights.py."""
    from mini_deepinfer.dummy_weights import make_dummy_weights

    return make_dummy_weights(config, rank=rank, world=world, device=torch.device(device), seed=seed)


def allocate(config: ModelConfig, experts: range,
             device: torch.device) -> tuple[dict[str, torch.Tensor], list[tuple[TensorSpec, torch.Tensor]]]:
    """Uninitialised tensors of one rank, and for every stored tensor the (contiguous) part that it fills."""
    tensors: dict[str, torch.Tensor] = {}
    places: list[tuple[TensorSpec, torch.Tensor]] = []
    for spec in tensor_table(config).values():
        if not spec.loaded or spec.role in ("engram", "engram_scale"):
            continue
        if spec.expert is None:
            tensors[spec.name] = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
            places.append((spec, tensors[spec.name]))
        elif spec.expert in experts:
            places.append((spec, _expert_part(tensors, spec, experts, device)))
    return tensors, places


def _expert_part(tensors: dict[str, torch.Tensor], spec: TensorSpec, experts: range,
                 device: torch.device) -> torch.Tensor:
    prefix, _, matrix, kind = spec.name.rsplit(".", 3)  # layers.{i}.ffn.experts | expert | w1 w2 w3 | weight scale
    stacked = f"{prefix}.{'w2' if matrix == 'w2' else 'w13'}{'_scale' if kind == 'scale' else ''}"
    rows, cols = spec.shape
    height = rows if matrix == "w2" else 2 * rows
    if stacked not in tensors:
        tensors[stacked] = torch.empty((len(experts), height, cols), dtype=torch.uint8, device=device)
    first = rows if matrix == "w3" else 0
    return tensors[stacked][(spec.expert or 0) - experts.start, first:first + rows]


def _read_all(checkpoint: Checkpoint, places: list[tuple[TensorSpec, torch.Tensor]], device: torch.device, *,
              show: bool) -> None:
    """Read every place with a few threads (disk order); the first error ends the load."""
    places = sorted(places, key=lambda p: (checkpoint.tensors[p[0].name].path, checkpoint.tensors[p[0].name].offset))
    total = sum(spec.num_bytes for spec, _ in places)
    staging = threading.local()

    def read(place: tuple[TensorSpec, torch.Tensor]) -> int:
        spec, target = place
        flat = target.view(torch.uint8).reshape(-1)
        if device.type == "cpu":
            pieces = [(0, flat)]
        else:
            if not hasattr(staging, "buffer"):
                staging.buffer = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
            pieces = [(at, flat[at:at + _STAGING_BYTES]) for at in range(0, spec.num_bytes, _STAGING_BYTES)]
        for start, piece in pieces:
            host = piece if device.type == "cpu" else staging.buffer[:piece.numel()]
            checkpoint.read_into(spec.name, host.numpy(), start)
            if spec.dtype == "F8_E8M0" and bool((host == _NAN_SCALE).any()):
                raise ValueError(f"{spec.name} in {checkpoint.tensors[spec.name].path.name}: scale byte 255 (NaN)")
            if host is not piece:
                piece.copy_(host)
        return spec.num_bytes

    with (ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool,
          tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=not show) as bar):
        futures = [pool.submit(read, place) for place in places]
        try:
            for future in futures:
                bar.update(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
