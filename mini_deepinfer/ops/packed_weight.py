"""MXFP4 expert weights in the layout of the sm90 product (csrc/moe/grouped_gemm_sm90.cu): made once at the load, the same size.

It differs from the stored layout (model spec 2) in two ways, each of which takes work out of the product's inner loop:
  * the sign bits of eight columns trade places, so that one AND brings four of them to the tops of four bytes;
  * group scales are kept as distances to the row's largest, in the order in which the product's steps of 128 columns read them.
A stored weight is uint8, a packed one is a PackedWeight: no op can take one for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_deepinfer.ops._operands import check_operand

BINADES = 14  # spread of scales inside a row that E2M1 values keep exactly as E4M3
_STEP = 4  # groups of 32 columns in a step of the product
_CHUNK = 2  # experts whose words are repacked at a time: bounds the temporary memory


@dataclass(frozen=True)
class PackedWeight:
    """An MXFP4 weight of E experts, O outputs and K columns, from pack_weight.

    words    int32 [E, O, K/8]              word w of a row: columns 8w .. 8w+7. The low three bits of nibble i are the magnitude of
                                            column i, as stored; its top bit is the sign of column i/2 (i even) or 4 + i/2 (i odd)
    shifts   uint8 [E, ceil(K/128), O, 4]   8 * ((largest - scale byte) mod 16) of the four groups of 128 columns; 0 past K
    largest  uint8 [E, O]                   the largest scale byte of the row, 255 if one is NaN
    """

    words: Tensor
    shifts: Tensor
    largest: Tensor

    @property
    def columns(self) -> int:
        """K."""
        return 8 * self.words.shape[2]

    def unpack(self) -> tuple[Tensor, Tensor]:
        """The stored weight [E, O, K/2] and weight_scale [E, O, K/32], copies.

        A group of zeros may get another scale, and in a row with a NaN scale every finite one is lost: the row's products are NaN anyway.
        """
        words = torch.empty_like(self.words)
        for target, part in zip(words.split(_CHUNK), self.words.split(_CHUNK), strict=True):
            target.copy_(_scatter_signs(part))
        experts, _, outputs, _ = self.shifts.shape
        distances = (self.shifts >> 3).transpose(1, 2).reshape(experts, outputs, -1)[..., : self.columns // 32]
        return words.view(torch.uint8), self.largest.unsqueeze(-1) - distances


def pack_weight(weight: Tensor, weight_scale: Tensor, *, in_place: bool = False) -> PackedWeight | None:
    """The weight for the sm90 product, or None when the scales of a row spread too far for it (weight_row_scale).

    Shapes: E experts, O outputs, K columns, a multiple of 32.
        weight        [E, O, K/2]   uint8, contiguous: two E2M1 codes a byte, the even column in the low nibble
        weight_scale  [E, O, K/32]  uint8 E8M0
        in_place      the words take over the memory of `weight`, which is left without elements
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device; not contiguous
    For the load: reads the scales and synchronises.
    """
    op = "moe.pack_weight"
    largest, exact = weight_row_scale(weight_scale, weight)
    if not weight.is_contiguous():
        raise ValueError(f"{op}: weight must be contiguous, got strides {weight.stride()}. Call .contiguous().")
    if not exact:
        return None
    words = weight.view(torch.int32)
    if in_place:
        weight.data = weight.new_empty(0)  # the old name must not show the new order
    else:
        words = words.clone()
    for part in words.split(_CHUNK):
        part.copy_(_gather_signs(part))
    experts, outputs, groups = weight_scale.shape
    shifts = weight_scale.new_zeros(experts, outputs, -(-groups // _STEP) * _STEP)
    torch.sub(largest.unsqueeze(-1), weight_scale, out=shifts[..., :groups]).bitwise_and_(15).bitwise_left_shift_(3)
    return PackedWeight(words, shifts.unflatten(-1, (-1, _STEP)).transpose(1, 2).contiguous(), largest)


def weight_row_scale(weight_scale: Tensor, weight: Tensor) -> tuple[Tensor, bool]:
    """The largest scale of every row of an MXFP4 weight, and whether the row can be FP8 with that one scale.

    Operands as in pack_weight.
    Returns:
        largest  [E, O]  uint8, the largest byte of each row
        exact    bool    every E2M1 * 2^(byte - largest + 6) is an E4M3 number: at most 14 binades in a row between groups with a
                         value other than zero, or a NaN, which makes the row NaN
    Reads the whole tensor and synchronises.
    """
    op = "moe.weight_row_scale"
    check_operand(op, "weight_scale", weight_scale, (torch.uint8,), {"E": None, "O": None, "K/32": None})
    experts, outputs, groups = weight_scale.shape
    check_operand(op, "weight", weight, (torch.uint8,), {"E": experts, "O": outputs, "K/2": groups * 16}, weight_scale)
    if weight_scale.numel() == 0:
        return weight_scale.new_zeros(experts, outputs), True
    largest = weight_scale.amax(-1)
    floor = largest.clamp(min=BINADES) - BINADES
    floor = torch.where(largest == 255, torch.zeros_like(floor), floor)
    low = weight_scale < floor.unsqueeze(-1)
    if bool(low.any()):
        low &= ((weight & 0x77) != 0).unflatten(-1, (groups, 16)).any(-1)
    return largest, not bool(low.any())


def _gather_signs(words: Tensor) -> Tensor:
    """From the stored order of the signs to the packed one: the sign of column (i2 i1 i0) moves to nibble (i1 i0 i2)."""
    return _swap_nibbles(_swap_nibbles(words, 8, 0x0000_8800), 4, 0x0080_0080)


def _scatter_signs(words: Tensor) -> Tensor:
    """The inverse of _gather_signs."""
    return _swap_nibbles(_swap_nibbles(words, 4, 0x0080_0080), 8, 0x0000_8800)


def _swap_nibbles(words: Tensor, distance: int, mask: int) -> Tensor:
    """Exchange the bits of `mask` with those `distance` above them."""
    changed = ((words >> distance) ^ words) & mask
    return words ^ changed ^ (changed << distance)
