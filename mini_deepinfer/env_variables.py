"""Every environment variable the package reads, in one table; a wrong value raises instead of being ignored."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class EnvVariable:
    """One environment variable: `parse` turns its text into a value or raises ValueError saying what is allowed."""

    default: Any
    parse: Callable[[str], Any]
    help: str


def _parse_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _parse_level(text: str) -> int:
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if text.lower() not in levels:
        raise ValueError(f"must be one of {', '.join(levels)}")
    return levels[text.lower()]


def _parse_ops(text: str) -> dict[str, str]:
    """`reference` -> {"*": "reference"}; `attention.sparse=portable,indexer.logits=reference` -> per op.

    Which ops and implementations exist is checked where they are known (ops/_dispatch.py).
    """
    if text.strip() == "reference":
        return {"*": "reference"}
    chosen: dict[str, str] = {}
    for item in text.split(","):
        op, _, impl = (piece.strip() for piece in item.partition("="))
        if not op or not impl:
            raise ValueError(f"{item.strip()!r} must be op=implementation (or MDI_OPS=reference alone)")
        if op in chosen:
            raise ValueError(f"{op} is given twice")
        chosen[op] = impl
    return chosen


def _parse_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be an integer; start the ranks with torchrun") from None


def _parse_archs(text: str) -> tuple[str, ...]:
    archs = tuple(part.strip() for part in text.split(",") if part.strip())
    if not archs or not all(a.rstrip("af").isdigit() for a in archs):
        raise ValueError("must be a comma-separated list such as 90a,100a")
    return archs


def _parse_cuda(text: str) -> str:
    if text not in ("0", "1", "auto"):
        raise ValueError("must be 0, 1 or auto")
    return text


def _parse_jobs(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError("must be a positive integer")
    return int(text)


ENVIRONMENT: dict[str, EnvVariable] = {
    "MDI_LOG": EnvVariable(logging.INFO, _parse_level, "log level: debug, info, warning or error"),
    "MDI_LOG_OPS": EnvVariable(False, _parse_switch, "1 = log every op with its shapes before the launch"),
    "MDI_OPS": EnvVariable({}, _parse_ops, "force implementations: reference, or attention.sparse=portable,..."),
    "MDI_SYNC": EnvVariable(False, _parse_switch, "1 = synchronise and check for errors after every op"),
    "MDI_CUDA": EnvVariable("auto", _parse_cuda, "build: 0 = without kernels, 1 = kernels required, auto = if nvcc is found"),
    "MDI_CUDA_ARCHS": EnvVariable(("90a", "100a"), _parse_archs, "build: GPU architectures to compile for"),
    "MDI_TORCH": EnvVariable("torch>=2.11", str, "scripts: the torch that a new .venv gets"),
    "RANK": EnvVariable(None, _parse_integer, "set by the launcher: rank of this process"),
    "WORLD_SIZE": EnvVariable(None, _parse_integer, "set by the launcher: number of ranks"),
    "LOCAL_RANK": EnvVariable(None, _parse_integer, "set by the launcher: GPU of this process"),
    "MASTER_PORT": EnvVariable(None, _parse_integer, "set by the launcher: port of rank 0's store (MASTER_ADDR its host)"),
    "MAX_JOBS": EnvVariable(None, _parse_jobs, "build: parallel compiler jobs"),
}


def read_env(name: str) -> Any:
    """The parsed value of one variable of ENVIRONMENT (unset or empty: its default). Raises ValueError naming it."""
    variable, text = ENVIRONMENT[name], os.environ.get(name, "")
    if not text:
        return variable.default
    return _parsed(name, text)


@lru_cache(maxsize=64)
def _parsed(name: str, text: str) -> Any:
    """Parsed once per text: ops read their variables at every call. Nobody may change the value."""
    try:
        return ENVIRONMENT[name].parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name} = {text!r}: {error}") from None


def check_environment() -> dict[str, Any]:
    """Parse every variable and refuse MDI_* names that do not exist (a misspelt one would silently do nothing)."""
    unknown = sorted(k for k in os.environ if k.startswith("MDI_") and k not in ENVIRONMENT)
    if unknown:
        raise ValueError(f"unknown environment variable {', '.join(unknown)}; known: {', '.join(ENVIRONMENT)}")
    return {name: read_env(name) for name in ENVIRONMENT}
