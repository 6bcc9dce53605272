"""Decoded copies of small quantised weights on the CPU, so that the reference does not decode them again at every step.

At most `LIMIT_BYTES` are held in all and only matrices whose float32 copy has at most `MATRIX_BYTES`: a tiny model fits, and of a
released model (whose smallest FP8 matrix takes 10 MiB as float32) nothing is ever held twice. The least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

LIMIT_BYTES = 64 << 20
MATRIX_BYTES = 4 << 20


@dataclass(frozen=True)
class _Entry:
    """A decoded matrix with what it came from: while the operands are held, no other tensor can have their addresses."""

    codes: Tensor
    scale: Tensor
    versions: tuple[int, int]
    values: Tensor


_entries: OrderedDict[tuple, _Entry] = OrderedDict()


def decoded(codes: Tensor, scale: Tensor, num_values: int, decode: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """decode(codes, scale) as float32 with num_values values; do not write to it.

    A write to the operands is seen through their version counters. Writes in inference mode or through a numpy view are not, but
    nothing writes weights once a model is built.
    """
    inference = codes.is_inference() or scale.is_inference()  # these have no version counter
    if codes.device.type != "cpu" or inference or 4 * num_values > MATRIX_BYTES:
        return decode(codes, scale)
    key = (decode, codes.data_ptr(), codes.shape, codes.stride(), scale.data_ptr(), scale.shape, scale.stride())
    versions = (codes._version, scale._version)
    entry = _entries.get(key)
    if entry is not None and entry.versions == versions:
        _entries.move_to_end(key)
        return entry.values
    _entries[key] = _Entry(codes, scale, versions, decode(codes, scale))
    while held_bytes() > LIMIT_BYTES:
        _entries.popitem(last=False)
    return _entries[key].values


def held_bytes() -> int:
    """Bytes of all decoded copies."""
    return sum(entry.values.nbytes for entry in _entries.values())
