"""Checks of the operands of an op, before anything is launched: every message says op, tensor, wanted, got, what to do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mini_deepinfer.ops._dispatch import kernels_check

COMPUTE_DTYPES = (torch.bfloat16, torch.float32)  # the kernels take bfloat16, float32 runs the reference


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_operand(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    dims: Mapping[str, int | None],
    like: Tensor | None = None,
) -> None:
    """Raise unless `tensor` has one of the dtypes, the shape `dims` (letter: size, None = any) and `like`'s device.

    In a step that runs nothing but kernels theirs is the only check.
    """
    if kernels_check():
        return
    if tensor.dtype not in dtypes or (tensor.shape != tuple(dims.values()) and not _has_shape(tensor, dims)):
        raise _wrong_operand(op, name, tensor, dtypes, dims)
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device} like the first operand, got {tensor.device}")


def _has_shape(tensor: Tensor, dims: Mapping[str, int | None]) -> bool:
    shape = list(tensor.shape)
    return len(shape) == len(dims) and shape == [have if size is None else size for size, have in zip(dims.values(), shape)]


def _wrong_operand(
    op: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], dims: Mapping[str, int | None]
) -> TypeError | ValueError:
    """What is wrong in words. Only put together for a wrong operand: a step checks some thousand right ones."""
    letters = ", ".join(letter if size is None or letter.isdigit() else f"{letter}={size}" for letter, size in dims.items())
    wanted = f"{' or '.join(map(dtype_name, dtypes))} [{letters}]"
    got = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    if tensor.dtype in dtypes:
        return ValueError(f"{op}: {name} must be {wanted}, got {got}")
    hint = f" Cast with {name}.int()." if dtypes == (torch.int32,) else ""
    return TypeError(f"{op}: {name} must be {wanted}, got {got}.{hint}")


def check_groups(op: str, name: str, width: int) -> None:
    """Raise unless a row of `width` columns is whole groups of 32."""
    if width == 0 or width % 32:
        raise ValueError(f"{op}: {name} must have a positive multiple of 32 columns (one scale per 32), got {width}")


def check_eps(op: str, name: str, eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"{op}: {name} must be >= 0, got {eps}")


def check_rotary(op: str, name: str, x: Tensor, positions: Tensor, table: Tensor) -> None:
    """Raise unless positions [T] int32 and table [P, R/2, 2] float32 (cos, sin) can rotate the last R columns of x [T, .., d].

    Positions are not compared with P: on a GPU that would wait.
    """
    check_operand(op, "positions", positions, (torch.int32,), {"T": x.shape[0]}, x)
    check_operand(op, "table", table, (torch.float32,), {"P": None, "R/2": None, "2": 2}, x)
    if x.shape[-1] % 2 or 2 * table.shape[1] > x.shape[-1]:
        raise ValueError(f"{op}: {name} must have an even head dim of at least R={2 * table.shape[1]} (table), got {x.shape[-1]}")


def check_out(op: str, out: Tensor | None, like: Tensor, *letters: str) -> Tensor:
    """`out` after its checks, or a new tensor like `like`, whose dims are called `letters`."""
    if out is None:
        return like.new_empty(like.shape)
    check_operand(op, "out", out, (like.dtype,), dict(zip(letters, like.shape, strict=True)), like)
    return out
