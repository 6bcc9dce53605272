"""What a prefill step is measured on: requests of fixed lengths whose token ids follow from a seed, and caches filled with
rows that were never computed."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mini_deepinfer.kv_cache import Caches


@dataclass(frozen=True)
class Request:
    """One request of every rank: of context_len tokens, the first cached_len are cached, and the step computes the
    next new_tokens."""

    context_len: int
    cached_len: int
    new_tokens: int

    def __post_init__(self) -> None:
        if self.cached_len < 0 or self.new_tokens < 1 or self.end > self.context_len:
            raise ValueError(
                "workload: need cached_len >= 0, new_tokens >= 1 and cached_len + new_tokens <= context_len, got "
                f"cached_len={self.cached_len} new_tokens={self.new_tokens} context_len={self.context_len}"
            )

    @property
    def end(self) -> int:
        """Tokens of the request after the step."""
        return self.cached_len + self.new_tokens


@dataclass(frozen=True)
class Workload:
    """The requests of one step; every rank runs the same lengths. The first shared_prefix_len token ids of a request
    are the same on all ranks, the others differ."""

    name: str
    seed: int
    shared_prefix_len: int
    requests: tuple[Request, ...]

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("workload: needs at least one request")

    @property
    def new_tokens(self) -> int:
        """New tokens of a rank in one step."""
        return sum(request.new_tokens for request in self.requests)

    @property
    def context_len(self) -> int:
        """Tokens of the longest request."""
        return max(request.context_len for request in self.requests)

    def token_ids(self, index: int, rank: int, allowed: np.ndarray) -> np.ndarray:
        """int64 [context_len]: the ids of request `index` on a rank, drawn from `allowed` int64 [n]."""
        length = self.requests[index].context_len
        shared = np.random.default_rng([self.seed, index]).choice(allowed, length)
        own = np.random.default_rng([self.seed, index, rank + 1]).choice(allowed, length)
        return np.where(np.arange(length) < self.shared_prefix_len, shared, own).astype(np.int64)

    def as_dict(self) -> dict[str, Any]:
        """The workload file's content."""
        return asdict(self)


def single_request(context_len: int, cached_len: int | None, new_tokens: int, seed: int) -> Workload:
    """One request per rank; cached_len None: all but the new tokens. Its cached part is the same on all ranks."""
    if cached_len is None:
        cached_len = context_len - new_tokens
    return Workload("single", seed, max(cached_len, 0), (Request(context_len, cached_len, new_tokens),))


# Workloads that are measured together, as parse_workload reads them: contexts of one chunk, chunk sizes at the full context, and
# one chunk of several short requests instead of one long one.
SUITES: dict[str, tuple[str, ...]] = {
    "contexts": ("4096@126976", "4096@32768", "4096@8192", "4096@0"),
    "chunks": ("2048@126976", "4096@126976", "8192@122880"),
    "packed": ("4096@0", "8x512@0", "64x64@0", "8x512@7680"),
}
SUITES["all"] = tuple(dict.fromkeys(spec for specs in SUITES.values() for spec in specs))


def parse_workload(text: str, seed: int) -> Workload:
    """A workload file, or `[COUNTx]NEW@CACHED`: COUNT equal requests of NEW tokens behind CACHED cached ones, e.g. 8x512@7680.

    Raises ValueError saying what is allowed.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)@(\d+)", text)
    if match is None:
        if not Path(text).is_file():
            raise ValueError(f"workload {text!r}: must be a JSON file or [COUNTx]NEW@CACHED such as 4096@126976 or 8x512@0")
        return read_workload(text)
    count, new_tokens, cached_len = int(match[1] or 1), int(match[2]), int(match[3])
    return Workload(text, seed, cached_len, (Request(cached_len + new_tokens, cached_len, new_tokens),) * count)


def read_workload(path: str | Path) -> Workload:
    """Read a JSON workload file. Raises ValueError naming a missing, unknown or wrong field."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        requests = tuple(Request(**{key: _integer(key, value) for key, value in item.items()}) for item in raw["requests"])
        known = {"name", "seed", "shared_prefix_len", "requests"}
        if unknown := sorted(set(raw) - known):
            raise ValueError(f"unknown field {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        seed, prefix = _integer("seed", raw["seed"]), _integer("shared_prefix_len", raw["shared_prefix_len"])
        return Workload(str(raw["name"]), seed, prefix, requests)
    except KeyError as error:
        raise ValueError(f"{path}: missing field {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a workload file: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def fill_randomly(caches: Caches, seed: int) -> None:
    """Plausible rows in every cache: codes of normal values, scales near one. No NaN, whatever is read."""
    generator = torch.Generator(caches.device).manual_seed(seed)

    def bytes_between(rows: torch.Tensor, first: int, last: int, low: int, high: int) -> None:
        rows[:, first:last].random_(low, high, generator=generator)

    for window in caches.window:
        dim = window.shape[1] * 32 // 33
        for part in window.split(65536):
            values = torch.empty(part.shape[0], dim, device=caches.device).normal_(0, 100, generator=generator)
            part[:, :dim] = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        bytes_between(window, dim, window.shape[1], 119, 122)  # E8M0 around 2^-7: values around 1
    for rows in caches.compressed.values():
        half = rows.shape[1] * 8 // 9
        bytes_between(rows, 0, half, 0, 256)
        bytes_between(rows, half, rows.shape[1], 0x28, 0x34)  # E4M3 from 0.25 to 0.75
    for rows in caches.index_keys.values():
        half = rows.shape[1] * 16 // 17
        bytes_between(rows, 0, half, 0, 256)
        bytes_between(rows, half, rows.shape[1], 125, 128)  # E8M0 from 1/4 to 1
    for tail in (*caches.tail_kv.values(), *caches.tail_score.values()):
        tail.normal_(generator=generator)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return value
