"""Random operands for op tests, in the layouts of the caches and weights. Everything is made on the CPU from a seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops.reference import number_formats as nf


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Gaussian values, rounded to dtype."""
    return (torch.randn(*shape, generator=g) * scale).to(dtype)


def integers(g: torch.Generator, *shape: int, low: int = -4, high: int = 4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small integers low..high: products and sums are exact, so results can be compared bit for bit."""
    return torch.randint(low, high + 1, shape, generator=g).to(dtype)


def random_bytes(g: torch.Generator, *shape: int, low: int = 0, high: int = 255) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=g, dtype=torch.int32).to(torch.uint8)


# -- packed cache rows (contract of the caches: payload bytes, then scale bytes) --------------------------------------


def window_rows(g: torch.Generator, num_rows: int, dim: int = 512, scale: float = 1.0) -> Tensor:
    """[S, D + D/32] uint8: E4M3 codes then E8M0 bytes."""
    codes, scales = nf.quant_fp8_ue8m0(normal(g, num_rows, dim, scale=scale))
    return torch.cat((codes.view(torch.uint8), scales), dim=1)


def compressed_rows(g: torch.Generator, num_rows: int, dim: int = 512, scale: float = 1.0) -> Tensor:
    """[S, D/2 + D/16] uint8: packed E2M1 then E4M3 scale bytes."""
    return torch.cat(nf.quant_nvfp4(normal(g, num_rows, dim, scale=scale)), dim=1)


def index_key_rows(g: torch.Generator, num_rows: int, dim: int = 128, scale: float = 1.0) -> Tensor:
    """[S, Di/2 + Di/32] uint8: packed E2M1 then E8M0 bytes."""
    return torch.cat(nf.quant_mxfp4(normal(g, num_rows, dim, scale=scale)), dim=1)


# -- weights and activations -----------------------------------------------------------------------------------------


def fp4_weight(g: torch.Generator, *shape: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(packed [.., K/2] uint8, scale [.., K/32] uint8 E8M0) of a Gaussian weight [.., K]."""
    return nf.quant_mxfp4(normal(g, *shape, scale=scale))


def fp8_activation(g: torch.Generator, rows: int, columns: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(codes [T, K] float8_e4m3fn, scale [T, K/32] uint8): act_quant of Gaussian rows."""
    return nf.quant_fp8_ue8m0(normal(g, rows, columns, scale=scale))


# -- indices ---------------------------------------------------------------------------------------------------------


def page_table(g: torch.Generator, num_seqs: int, pages_per_seq: int, num_pages: int) -> Tensor:
    """[B, P] int32, every page used once, in random order."""
    return torch.randperm(num_pages, generator=g)[: num_seqs * pages_per_seq].view(num_seqs, pages_per_seq).int()


def selection(g: torch.Generator, num_tokens: int, num_picks: int, num_rows: int, skip: float = 0.0) -> Tensor:
    """[T, K] int32 distinct rows ascending, -1 tail where rows run out; `skip`: share of lanes set to -1 in place."""
    keys = torch.rand(num_tokens, num_rows, generator=g)
    count = min(num_picks, num_rows)
    picked = torch.full((num_tokens, num_picks), -1, dtype=torch.int32)
    picked[:, :count] = keys.topk(count, dim=1).indices.sort(dim=1).values.int()
    if skip:
        picked[torch.rand(num_tokens, num_picks, generator=g) < skip] = -1
    return picked


# -- memory that exists only where it is touched (CPU): offsets past 2^31 without the gigabytes ------------------------


def untouched(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] of zeros whose pages the system maps at their first use; skips the test where it does not promise that many."""
    try:
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    except MemoryError:
        pytest.skip(f"no address space for {num_bytes / 2**30:.1f} GiB")


def far_apart(x: Tensor, stride: int) -> Tensor:
    """x [T, ..] again, its rows `stride` elements apart."""
    num_elements = (x.shape[0] - 1) * stride + x[0].numel()
    rows = untouched(num_elements * x.element_size()).view(x.dtype).as_strided(x.shape, (stride, *x.contiguous().stride()[1:]))
    return rows.copy_(x)


# -- guards ----------------------------------------------------------------------------------------------------------


class Canary:
    """An output tensor inside a larger buffer of marked bytes; check() raises when a kernel wrote outside it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, margin: int = 4096) -> None:
        size = torch.empty(0, dtype=dtype).element_size()
        count = size
        for extent in shape:
            count *= extent
        self.margin = margin
        self.buffer = torch.full((count + 2 * margin,), 0xA5, dtype=torch.uint8, device=device)
        self.tensor = self.buffer[margin : margin + count].view(dtype).view(shape)

    def check(self) -> None:
        for name, part in (("before", self.buffer[: self.margin]), ("behind", self.buffer[-self.margin :])):
            if bool((part != 0xA5).any()):
                raise AssertionError(f"{int((part != 0xA5).sum())} bytes written {name} the output")
