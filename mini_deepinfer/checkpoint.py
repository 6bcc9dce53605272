"""A checkpoint folder on disk: index, safetensors headers, checks before anything is read, raw reads by name.

The index names the one owner of every tensor; a tensor of the same name in another shard is never read.
Nothing here knows about devices or ranks (weights.py does).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mini_deepinfer.config import ModelConfig
from mini_deepinfer.tensor_table import (
    COMPONENTS,
    TensorSpec,
    component_totals,
    expert_range,
    is_skipped,
    tensor_table,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100 * 2**20  # limit of the safetensors format
_MAX_LISTED = 10  # problems spelled out in one message


class CheckpointError(ValueError):
    """The folder does not hold the checkpoint that its config.json describes. `problems` lists every finding."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        self.problems = problems
        rest = len(problems) - _MAX_LISTED
        lines = problems[:_MAX_LISTED] + ([f"... and {rest} more"] if rest > 0 else [])
        super().__init__("\n  ".join([f"checkpoint {folder}: {len(problems)} problem(s); nothing was loaded", *lines]))


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor's bytes are: `offset` is absolute in the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class Checkpoint:
    """The tensors of a checked folder, readable by name. Thread-safe; `close` (or `with`) releases the files."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder = folder
        self.tensors = tensors
        self._files = {path: os.open(path, os.O_RDONLY) for path in sorted({t.path for t in tensors.values()})}

    def read_into(self, name: str, out: np.ndarray, start: int = 0) -> None:
        """Fill `out` (uint8, contiguous) with the tensor's bytes from `start` on. Raises OSError on a short read."""
        stored = self.tensors[name]
        view, position = out.data.cast("B"), stored.offset + start
        while len(view):
            done = os.preadv(self._files[stored.path], [view], position)
            if done <= 0:
                raise OSError(f"{stored.path}: ended at byte {position} while reading {name}; was the file changed?")
            view, position = view[done:], position + done

    def map_rows(self, name: str) -> np.ndarray:
        """Memory-map a 2-D one-byte tensor: uint8 [rows, width], read-only, without read-ahead."""
        stored = self.tensors[name]
        first = stored.offset - stored.offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._files[stored.path], stored.offset + stored.num_bytes - first,
                           access=mmap.ACCESS_READ, offset=first)
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)  # rows are read at random: read-ahead would multiply the traffic
        flat = np.frombuffer(mapped, np.uint8, stored.num_bytes, stored.offset - first)
        return flat.reshape(stored.shape)

    def close(self) -> None:
        """Close the files; memory maps stay valid."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the only file. Raises FileNotFoundError, CheckpointError."""
    index = folder / INDEX_NAME
    if not index.is_file():
        single = folder / SINGLE_NAME
        if not single.is_file():
            raise FileNotFoundError(f"{folder} holds neither {INDEX_NAME} nor {SINGLE_NAME}: no checkpoint")
        tensors, problems = read_header(single)
        if not tensors and problems:
            raise CheckpointError(folder, problems)
        return dict.fromkeys(tensors, SINGLE_NAME)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in weight_map.items()):
            raise TypeError("weight_map must map names to file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(folder, [f"{INDEX_NAME} cannot be read: {error!r}"]) from None
    outside = sorted({v for v in weight_map.values() if Path(v).name != v or v in ("", ".", "..")})
    if outside:
        raise CheckpointError(folder, [f"{INDEX_NAME} names files outside the folder: {', '.join(outside)}"])
    return weight_map


def read_header(path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors a safetensors file declares, and what is wrong with the file. Reads the header only."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER_BYTES):
            return {}, [f"{path.name} is truncated or not safetensors: header of {length} bytes, file of {size}"]
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return {}, [f"{path.name} has a header that is not JSON"]
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(x) for x in entry["shape"])
            begin, end = (int(x) for x in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            problems.append(f"{path.name}: header entry of {name} is malformed")
            continue
        stored = StoredTensor(name, path, dtype, shape, 8 + length + begin, end - begin)
        tensors[name] = stored
        if begin < 0 or end < begin or stored.offset + stored.num_bytes > size:
            problems.append(f"{path.name} is truncated: {name} ends at byte {stored.offset + stored.num_bytes} "
                            f"but the file has {size}")
    return tensors, problems


def find_problems(folder: str | Path, config: ModelConfig) -> tuple[dict[str, StoredTensor], list[str]]:
    """Compare a folder with the tensor table: (owner of every tensor of the table, what is wrong). Headers only."""
    folder = Path(folder)
    weight_map, table = read_weight_map(folder), tensor_table(config)
    owned: dict[str, StoredTensor] = {}
    problems: list[str] = []
    unknown = {name for name in weight_map if name not in table and not is_skipped(name)}
    headers: dict[str, dict[str, StoredTensor]] = {}
    broken: set[str] = set()
    for file_name in sorted({weight_map[n] for n in table if n in weight_map}):
        if not (folder / file_name).is_file():
            problems.append(f"{file_name} is missing ({sum(v == file_name for v in weight_map.values())} tensors)")
            broken.add(file_name)
            continue
        headers[file_name], faults = read_header(folder / file_name)
        problems += faults
        if faults and not headers[file_name]:
            broken.add(file_name)
        unknown |= {name for name in headers[file_name] if name not in table and not is_skipped(name)}
    for name, spec in table.items():
        owner = weight_map.get(name)
        if owner is None:
            if spec.loaded:
                problems.append(f"{name} is missing: wanted {spec.dtype} {list(spec.shape)}")
        elif owner not in broken:
            stored = headers[owner].get(name)
            if stored is None:
                problems.append(f"{name} is missing: the index places it in {owner}, which does not hold it")
            else:
                owned[name] = stored
                problems += _compare(spec, stored)
    problems += [f"{name} is unknown: no tensor of this model and not on the skip list" for name in sorted(unknown)]
    return owned, problems


def _compare(spec: TensorSpec, stored: StoredTensor) -> list[str]:
    if (stored.dtype, stored.shape) != (spec.dtype, spec.shape):
        return [f"{spec.name} in {stored.path.name}: wanted {spec.dtype} {list(spec.shape)}, "
                f"got {stored.dtype} {list(stored.shape)}"]
    if stored.num_bytes != spec.num_bytes:
        return [f"{spec.name} in {stored.path.name}: wanted {spec.num_bytes} bytes, got {stored.num_bytes}"]
    return []


def open_checkpoint(folder: str | Path, config: ModelConfig) -> Checkpoint:
    """Check the whole folder, then open it. Raises CheckpointError with every problem; nothing is read before."""
    owned, problems = find_problems(folder, config)
    if problems:
        raise CheckpointError(Path(folder), problems)
    return Checkpoint(Path(folder), owned)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a model needs, from the config alone.

    weights_per_rank        expert-parallel world -> device bytes of the largest rank
    cache_per_token         paged cache (compressed KV and index keys)
    window_per_request      ring buffers of the sliding window, all layers
    host_tables             engram tables, memory-mapped on the host
    """

    weights_per_rank: dict[int, int]
    cache_per_token: float
    window_per_request: int
    host_tables: int


def memory_plan(config: ModelConfig, worlds: tuple[int, ...] = (1, 4)) -> MemoryPlan:
    """Weights per rank for every expert-parallel size in `worlds` that the model allows, caches and host tables."""
    totals = component_totals(config)
    experts, tables = totals["routed experts"][1], totals["engram tables"][1]
    unused = sum(4 * config.n_routed_experts for _ in config.layers)  # bias_vl
    dense = sum(size for _, size in totals.values()) - experts - tables - unused
    weights = {world: dense + experts // config.n_routed_experts * len(expert_range(config.n_routed_experts, world, 0))
               for world in worlds if world <= config.n_routed_experts}
    window = config.num_hidden_layers * config.sliding_window * (config.head_dim + config.head_dim // 32)
    return MemoryPlan(weights, config.cache_bytes_per_token, window, tables)


@dataclass(frozen=True)
class CheckpointReport:
    """What `check_checkpoint` found: (tensors, bytes) per component, and the number of skipped tensors."""

    folder: Path
    found: dict[str, tuple[int, int]]
    expected: dict[str, tuple[int, int]]
    skipped: int
    plan: MemoryPlan
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the checkpoint can be loaded."""
        return not self.problems

    def lines(self) -> list[str]:
        """The report as text lines."""
        out = [f"{'component':<20}{'tensors':>9}{'bytes':>18}"]
        for name, (count, size) in self.found.items():
            wanted = self.expected[name]
            note = "" if (count, size) == wanted else f"   wanted {wanted[0]:,} tensors, {wanted[1]:,} bytes"
            out.append(f"{name:<20}{count:>9,}{size:>18,}{note}")
        count, size = (sum(column) for column in zip(*self.found.values()))
        out.append(f"{'total':<20}{count:>9,}{size:>18,}")
        out.append(f"skipped tensors (other modalities, drafts): {self.skipped:,}")
        for world, size in self.plan.weights_per_rank.items():
            out.append(f"weights per rank, {world} rank(s): {size / 2**30:.3f} GiB")
        out.append(f"paged cache: {self.plan.cache_per_token:g} bytes per token; window: "
                   f"{self.plan.window_per_request / 2**20:.2f} MiB per request")
        out.append(f"host tables (memory-mapped): {self.plan.host_tables / 2**30:.3f} GiB")
        out += [f"PROBLEM {problem}" for problem in self.problems]
        return out


def check_checkpoint(folder: str | Path, config: ModelConfig) -> CheckpointReport:
    """Check names, dtypes, shapes and file sizes from the headers, without reading a weight.

    Problems are reported, not raised; FileNotFoundError when there is no index and no single file.
    """
    owned, problems = find_problems(folder, config)
    table = tensor_table(config)
    found = {name: [0, 0] for name in COMPONENTS}
    for name, stored in owned.items():
        found[table[name].component][0] += 1
        found[table[name].component][1] += stored.num_bytes
    skipped = sum(1 for name in read_weight_map(Path(folder)) if is_skipped(name) and name not in table)
    return CheckpointReport(Path(folder), {k: (c, s) for k, (c, s) in found.items()}, component_totals(config), skipped,
                            memory_plan(config), problems)
