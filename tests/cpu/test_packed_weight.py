"""Packed expert weights: the layout bit by bit, the way back, and what cannot be packed."""

from __future__ import annotations

import pytest
import torch

from mini_deepinfer.ops import moe
from mini_deepinfer.ops.packed_weight import PackedWeight, pack_weight, weight_row_scale
from mini_deepinfer.ops.reference import number_formats as nf
from tests.golden import Runner, golden
from tests.inputs import generator, random_bytes


def packed(weight: torch.Tensor, scale: torch.Tensor, in_place: bool = False) -> PackedWeight:
    result = pack_weight(weight, scale, in_place=in_place)
    assert result is not None
    return result


@pytest.mark.parametrize("in_place", [False, True])
def test_words(in_place: bool) -> None:
    """Every byte at every place of a word: magnitudes stay, the sign of column c is on top of nibble 2c, from column 4 on 2c - 7."""
    stored = torch.arange(256).view(-1, 1).add(torch.tensor([0, 77, 154, 231])).remainder(256).to(torch.uint8)
    stored = stored.repeat_interleave(2, 1).view(1, 64, 32)[:, :, torch.arange(32) ^ 5].contiguous()
    scale = torch.full((1, 64, 2), 120, dtype=torch.uint8)
    for place in range(4):
        assert len(stored.view(-1, 4)[:, place].unique()) == 256
    before, weight = stored.clone(), stored.clone()
    result = packed(weight, scale, in_place)
    assert (weight.numel() == 0) == in_place and (in_place or torch.equal(weight, before))
    old, new = (t.view(torch.int32).long() & 0xFFFF_FFFF for t in (before, result.words))
    assert torch.equal(old & 0x7777_7777, new & 0x7777_7777)
    for column in range(8):
        nibble = 2 * column if column < 4 else 2 * column - 7
        assert torch.equal(old >> (4 * column + 3) & 1, new >> (4 * nibble + 3) & 1), f"sign of column {column}"
    assert torch.equal(result.unpack()[0], before)


@pytest.mark.parametrize("columns", [32, 128, 160, 640])
def test_scales(columns: int) -> None:
    g = generator(columns)
    weight = random_bytes(g, 3, 96, columns // 2)
    scale = random_bytes(g, 3, 96, columns // 32, low=110, high=124)
    result = packed(weight, scale)
    assert result.columns == columns and result.shifts.shape == (3, -(-columns // 128), 96, 4)
    assert torch.equal(result.largest, scale.amax(-1))
    for group in range(4 * result.shifts.shape[1]):
        shifts = result.shifts[:, group // 4, :, group % 4]
        if group < columns // 32:
            assert torch.equal(shifts.long(), 8 * (result.largest.long() - scale[:, :, group].long()))
        else:
            assert not bool(shifts.any())
    assert all(torch.equal(got, wanted) for got, wanted in zip(result.unpack(), (weight, scale), strict=True))


def test_zeros_may_have_any_scale_and_nan_stays() -> None:
    scale = torch.tensor([[[120, 106, 118], [120, 3, 118], [255, 3, 9], [0, 0, 0]]], dtype=torch.uint8)
    weight = torch.full((1, 4, 48), 0x21, dtype=torch.uint8)
    largest, exact = weight_row_scale(scale, weight)
    assert largest.tolist() == [[120, 120, 255, 0]] and not exact and pack_weight(weight, scale) is None
    weight[0, 1, 16:32] = 0x80  # zeros of either sign
    result = packed(weight, scale)
    values, again = (nf.dequant_mxfp4(codes[0], scales[0]) for codes, scales in ((weight, scale), result.unpack()))
    assert torch.equal(values[[0, 1, 3]], again[[0, 1, 3]])
    assert bool(values[2].isnan().any()) and bool(again[2].isnan().any())


def test_what_is_refused() -> None:
    weight, scale = torch.zeros(2, 64, 48, dtype=torch.uint8), torch.zeros(2, 64, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="weight must be"):
        pack_weight(weight[:, :, :32], scale)
    with pytest.raises(TypeError, match="weight must be uint8"):
        pack_weight(weight.view(torch.int32), scale)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        pack_weight(weight.transpose(0, 1).contiguous().transpose(0, 1), scale)
    nothing = packed(weight[:0], scale[:0])
    assert nothing.words.shape == (0, 64, 12) and nothing.shifts.shape == (0, 1, 64, 4)


def test_packed_weights_are_not_packed_again() -> None:
    weight, scale = torch.zeros(1, 32, 64, dtype=torch.uint8), torch.full((1, 32, 4), 120, dtype=torch.uint8)
    result = packed(weight, scale, in_place=True)
    with pytest.raises(ValueError, match=r"weight must be .*\[E=1, O=32, K/2=64\]"):
        pack_weight(weight, scale)
    with pytest.raises(TypeError, match="weight must be uint8"):
        pack_weight(result.words, scale)


def test_the_model_packs_what_can_be_packed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Packed weights leave the checkpoint's tensors and change no bit; a weight whose scales spread too far is named and kept."""
    wide = "layers.3.ffn.experts.w2"
    loaded: list[dict[str, torch.Tensor]] = []

    def spread(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{wide}_scale"][0, 0, 0] -= 20
        loaded.append(tensors)

    run, ids = Runner(dtype=torch.bfloat16, activation_quant=True), golden()["L7.input_ids"].numpy()
    run.reload(edit_weights=spread)
    stored = run.score(ids)
    assert not caplog.records and all(isinstance(block.ffn.w2, torch.Tensor) for block in run.model.blocks)
    monkeypatch.setattr(moe, "takes_packed_weights", lambda tensor, compute_dtype: True)
    run.reload(edit_weights=spread)
    assert torch.equal(run.score(ids), stored)
    assert [record.getMessage() for record in caplog.records] == [
        f"{wide}: scales spread over more than 14 binades in a row; kept as stored for the portable product"
    ]
    assert [name for name in loaded[-1] if ".experts." in name] == [wide, f"{wide}_scale"]
    for layer, block in enumerate(run.model.blocks):
        assert isinstance(block.ffn.w13, PackedWeight) and isinstance(block.ffn.w2, PackedWeight) == (layer != 3)
