"""Which decode steps become CUDA graphs: their fixed shapes, and where there are none (decode_graphs.py captures them)."""

from __future__ import annotations

import torch

from .config import NumericProfile
from .env_variables import read_env

FIRST_LENGTH = 2048  # tokens of the shortest shapes
LENGTH_FACTOR = 4  # from one length to the next


def sizes_up_to(largest: int) -> list[int]:
    """Numbers of rows that are captured: powers of two, and the largest."""
    return sorted({1 << power for power in range((largest - 1).bit_length())} | {largest})


def lengths_up_to(longest: int) -> list[int]:
    """Context lengths that are captured: FIRST_LENGTH, four times that, ..., and the longest."""
    lengths = [longest]
    length = FIRST_LENGTH
    while length < longest:
        lengths.append(length)
        length *= LENGTH_FACTOR
    return sorted(lengths)


def why_not(device: torch.device, profile: NumericProfile, processes: int) -> str | None:
    """Why decode steps cannot be graphs here; None if they can. processes: how many share the experts (a loopback is one)."""
    if device.type != "cuda":
        return "they need a GPU"
    if profile.compute_dtype != torch.bfloat16 or not profile.activation_quant:
        return "float32 or unquantised activations run reference operations, which wait for the GPU"
    if processes > 1:
        return f"{processes} expert-parallel ranks exchange another number of rows in every step"
    if "reference" in read_env("MDI_OPS").values():
        return "MDI_OPS asks for reference operations, which wait for the GPU"
    for name in ("MDI_SYNC", "MDI_LOG_OPS"):
        if read_env(name):
            return f"{name}=1 looks at every operation"
    return None
