"""Products of row-scaled operands: what reaches a kernel, and the reference's meaning."""

from __future__ import annotations

import pytest
import torch

from mini_deepinfer.ops import elementwise, linear
from mini_deepinfer.ops.linear import Rotation, scaled_gemm


def operands(tokens: int = 5, groups: int = 2, k: int = 128, columns: int = 512) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    codes = torch.randn(tokens, groups, k, generator=g).to(torch.float8_e4m3fn)
    weight = torch.randn(columns, k, generator=g).to(torch.float8_e4m3fn)
    return codes, torch.exp2(torch.arange(tokens * groups) % 5.0).view(tokens, groups), weight, torch.exp2(torch.arange(columns) % 3.0)


@pytest.mark.parametrize(
    ("place", "tensor", "message"),
    [
        (1, torch.ones(5, 1), r"row_scale must be \[5, 2\], got \[5, 1\]"),
        (2, torch.ones(512, 96).to(torch.float8_e4m3fn), r"weight must be \[512, 128\], got \[512, 96\]"),
        (3, torch.ones(256), r"weight_scale must be \[512\], got \[256\]"),
    ],
)
def test_wrong_shapes_are_refused(place: int, tensor: torch.Tensor, message: str) -> None:
    inputs = list(operands())
    inputs[place] = tensor
    with pytest.raises(ValueError, match=r"linear.scaled_gemm: " + message):
        scaled_gemm(*inputs)
    codes, row_scale, weight, weight_scale = operands()
    with pytest.raises(ValueError, match=r"as many rows for each of g=2 groups, got O=511"):
        scaled_gemm(codes, row_scale, weight[:511], weight_scale[:511])


def test_the_reference_multiplies_group_by_group() -> None:
    codes, row_scale, weight, weight_scale = operands()
    out = scaled_gemm(codes, row_scale, weight, weight_scale)
    for g in range(2):
        values = codes[:, g].double() * row_scale[:, g, None].double()
        wanted = values @ (weight[256 * g : 256 * (g + 1)].double() * weight_scale[256 * g : 256 * (g + 1), None].double()).t()
        assert torch.equal(out[:, 256 * g : 256 * (g + 1)], wanted.float().bfloat16())


def test_the_rotation_is_rope_of_the_heads() -> None:
    inputs = operands(groups=1)
    rotation = Rotation(torch.arange(5, dtype=torch.int32), torch.randn(9, 8, 2), 128)
    wanted = elementwise.rope(scaled_gemm(*inputs).view(5, 4, 128), *rotation[:2])
    assert torch.equal(scaled_gemm(*inputs, rotation), wanted.flatten(1))


def test_what_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for all groups; shapes that the kernel does not take, and no rows, do not reach it."""
    seen: list[tuple] = []
    monkeypatch.setattr(linear, "select", lambda op, tensor: "sm90")
    monkeypatch.setattr(linear, "call", lambda op, impl, *args: seen.append((op, impl, args)))
    library: list[tuple] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **rest: library.append((a, b)))
    inputs = operands()
    out = scaled_gemm(*inputs)
    ((op, impl, args),) = seen
    assert (op, impl) == ("linear.scaled_gemm", "sm90") and args[4:7] == (None, None, 0) and args[-1] is out
    scaled_gemm(*operands(tokens=0))
    assert len(seen) == 1 and not library
    for shape in ((5, 1, 96, 512), (5, 1, 128, 500), (5, 2, 128, 136)):
        scaled_gemm(*operands(*shape))
    assert len(seen) == 1 and len(library) == 4
