"""Checks of single configuration values; every message names the field, its value and the rule."""

from __future__ import annotations

import math
from typing import NoReturn


def fail(name: str, value: object, rule: str) -> NoReturn:
    """Raise the ValueError."""
    raise ValueError(f"config: {name} = {value!r}: {rule}")


def check_int(name: str, value: object, low: int, high: int, multiple: int = 1) -> None:
    """Integer in low..high and a multiple of `multiple`; bool is refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        fail(name, value, "must be an integer")
    elif not low <= value <= high:
        fail(name, value, f"must be in {low}..{high}")
    elif value % multiple:
        fail(name, value, f"must be a multiple of {multiple}")


def check_float(name: str, value: object, low: float, *, open_low: bool = True) -> None:
    """Finite number above (or, with open_low=False, at least) low."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        fail(name, value, "must be a finite number")
    elif value < low or (open_low and value == low):
        fail(name, value, f"must be {'>' if open_low else '>='} {low}")
