"""Decoded weights kept by the reference: never stale, never more than the stated bound."""

from __future__ import annotations

import pytest
import torch

from mini_deepinfer.ops.reference import decoded as module
from mini_deepinfer.ops.reference.linear import dequant_block32


def weight(rows: int = 64, cols: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randn(rows, cols).to(torch.float8_e4m3fn)
    return codes, torch.full((rows // 32, cols // 32), 127, dtype=torch.uint8)


def look_up(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return module.decoded(codes, scale, codes.numel(), dequant_block32)


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(module, "_entries", type(module._entries)())


def test_the_second_look_up_returns_the_same_copy() -> None:
    codes, scale = weight()
    first = look_up(codes, scale)
    assert look_up(codes, scale) is first
    assert torch.equal(first, dequant_block32(codes, scale))


@pytest.mark.parametrize("operand", [0, 1])
def test_a_write_to_an_operand_is_seen(operand: int) -> None:
    operands = weight()
    look_up(*operands)
    operands[operand].view(torch.uint8)[:32].fill_(128)
    assert torch.equal(look_up(*operands), dequant_block32(*operands))


def test_other_tensors_at_the_same_address_are_never_confused() -> None:
    """Operands that die leave their memory to the next ones: the copies differ all the same."""
    for _ in range(50):
        codes, scale = weight()
        assert torch.equal(look_up(codes, scale), dequant_block32(codes, scale))


def test_the_bound_holds_and_the_oldest_go_first(monkeypatch) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 3 * 64 * 64 * 4)
    operands = [weight() for _ in range(5)]
    copies = [look_up(*pair) for pair in operands]
    assert module.held_bytes() == 3 * 64 * 64 * 4
    assert look_up(*operands[4]) is copies[4]
    assert look_up(*operands[0]) is not copies[0]


def test_large_matrices_and_inference_tensors_are_not_held(monkeypatch) -> None:
    with torch.inference_mode():
        look_up(*weight())
    monkeypatch.setattr(module, "MATRIX_BYTES", 64 * 64 * 4 - 1)
    look_up(*weight())
    assert module.held_bytes() == 0
