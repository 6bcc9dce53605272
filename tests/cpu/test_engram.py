"""Engram addressing: compression map, hash constants, row ids."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer as RawTokenizer

from mini_deepinfer.config import ModelConfig
from mini_deepinfer.engram import (
    NO_TOKEN,
    EngramHasher,
    compress_vocabulary,
    engram_layouts,
    synthetic_token_map,
    token_map_from_folder,
    token_map_from_tokenizer,
)
from mini_deepinfer.weights import EngramTable
from tests.golden import TINY_A

RELEASED_MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
RELEASED_PRIMES = {  # last three digits, after 16000
    1: [[57, 79, 81, 97, 121, 129, 133, 183], [189, 207, 211, 253, 277, 289, 307, 321],
        [339, 381, 393, 399, 403, 409, 447, 463]],
    14: [[477, 487, 499, 507, 511, 573, 609, 627], [667, 669, 693, 697, 711, 729, 759, 769],
         [781, 799, 813, 819, 841, 877, 879, 889]],
}
RELEASED_ROWS = {  # compressed ids 11, 22, 33, 44 (current)
    1: [3057966, 30651080, 44796572, 61963654, 71726252, 80317041, 108613237, 126346894, 140321507, 159116561, 168627578,
        180512592, 205606856, 218158584, 236991918, 246311391, 264034123, 287119368, 296008949, 308455274, 332753723,
        345201542, 360056803, 377270028],
    14: [8916476, 28116336, 35159353, 50523921, 74207384, 81346417, 102573526, 121200903, 133602641, 151350061, 172321369,
         191819128, 204063003, 219814614, 230090270, 254856424, 260712270, 287451853, 294033192, 308284742, 323214553,
         344767661, 354855588, 373295295],
}
SMALL_IDS = [3, 0, 4, 4, 2, 0]  # compressed ids; classes 0..4, pad class 1
SMALL_ROWS = [[8, 15, 24, 50, 60, 102], [0, 15, 32, 45, 73, 105], [3, 14, 33, 41, 76, 104], [4, 19, 37, 59, 81, 91],
              [4, 19, 38, 55, 67, 98], [0, 18, 31, 48, 82, 95]]
SMALL_ROWS_DEAD_AT_2 = [[8, 15, 24, 50, 60, 102], [0, 15, 32, 45, 73, 105], None, [5, 18, 28, 50, 79, 94],
                        [4, 19, 31, 55, 63, 104], [0, 18, 31, 48, 78, 94]]


@pytest.fixture(scope="module")
def released():
    config = ModelConfig.released()
    return EngramHasher(config, synthetic_token_map(config))


@pytest.fixture
def small_config():
    return dataclasses.replace(
        ModelConfig.from_folder(TINY_A), vocab_size=6, engram_layer_ids=(1,), engram_num_embeddings=(112,),
        engram_n_heads=2, engram_vocab_size=11, engram_compressed_vocab_size=5, engram_pad_token_id=1, pad_token_id=1,
        image_token_id=None)


@pytest.fixture
def small(small_config):
    """Raw id = class for 0..4; raw id 5 is another spelling of class 3."""
    return EngramHasher(small_config, np.array([0, 1, 2, 3, 4, 3], np.int32))


def test_released_constants(released):
    for layer, layout, height in zip((1, 14), released.layouts, (384_006_168, 384_016_682)):
        assert layout.multipliers.tolist() == RELEASED_MULTIPLIERS[layer]
        assert layout.primes.tolist() == [[16_000_000 + p for p in row] for row in RELEASED_PRIMES[layer]]
        assert layout.num_rows == height
        assert layout.offsets.flatten().tolist()[:3] == [0, layout.primes[0, 0], layout.primes[0, :2].sum()]


def test_released_products_fit_int64_only_when_compressed():
    largest = max(RELEASED_MULTIPLIERS[1] + RELEASED_MULTIPLIERS[14])
    assert 99_091 * largest < 2**63 <= 129_279 * largest


def test_released_rows(released):
    rows = released.row_ids([11, 22, 33, 44], 3, 4)
    assert rows.dtype == torch.int64 and rows.shape == (1, 2, 24)
    assert rows[0, 0].tolist() == RELEASED_ROWS[1]
    assert rows[0, 1].tolist() == RELEASED_ROWS[14]


def test_small_constants(small):
    (layout,) = small.layouts
    assert layout.primes.tolist() == [[11, 13], [17, 19], [23, 29]] and layout.num_rows == 112
    assert layout.multipliers.tolist() == [1518725532282926647, 95918600367724651, 712663169893792747, 1466310648685405061]


def test_small_rows_for_every_cut(small):
    ids = np.array(SMALL_IDS)
    assert small.row_ids(ids, 0, 6)[:, 0].tolist() == SMALL_ROWS
    for cut in range(7):
        parts = torch.cat([small.row_ids(ids, 0, cut), small.row_ids(ids, cut, 6)])
        assert parts[:, 0].tolist() == SMALL_ROWS
    single = torch.cat([small.row_ids(torch.tensor(SMALL_IDS), i, i + 1) for i in range(6)])
    assert single[:, 0].tolist() == SMALL_ROWS


def test_lost_history_would_be_noticed(small):
    lost = small.row_ids(SMALL_IDS[3:], 0, 3)[:, 0].tolist()
    assert lost[0] == [5, 18, 28, 50, 79, 94] != SMALL_ROWS[3]


def test_rows_depend_on_classes_not_on_raw_ids(small):
    assert torch.equal(small.row_ids([3, 0, 5], 0, 3), small.row_ids([5, 0, 3], 0, 3))


def test_dead_positions_block_themselves_and_everything_older(small):
    dead = np.zeros(6, bool)
    dead[2] = True
    rows = small.row_ids(SMALL_IDS, 0, 6, dead)[:, 0].tolist()
    for got, expected in zip(rows, SMALL_ROWS_DEAD_AT_2):
        assert expected is None or got == expected
    pad = small.row_ids([1], 0, 1)[0, 0].tolist()  # a sequence of pads only
    assert rows[2] == pad
    parts = torch.cat([small.row_ids(SMALL_IDS, 0, 4, dead), small.row_ids(SMALL_IDS, 4, 6, dead)])
    assert parts[:, 0].tolist() == rows


def test_image_tokens_are_dead(small_config):
    config = dataclasses.replace(small_config, image_token_id=5)
    hasher = EngramHasher(config, np.array([0, 1, 2, 3, 4, 0], np.int32))
    ids = [3, 0, 5, 4, 2, 0]
    for got, expected in zip(hasher.row_ids(ids, 0, 6)[:, 0].tolist(), SMALL_ROWS_DEAD_AT_2):
        assert expected is None or got == expected


def test_only_the_history_is_read(small):
    """Older ids may be anything, even invalid."""
    ids = np.array([999, -5, *SMALL_IDS])
    assert small.row_ids(ids, 5, 8)[:, 0].tolist() == SMALL_ROWS[3:]


@pytest.mark.parametrize("wrong", [-1, 6, 2**40])
def test_ids_outside_the_vocabulary_are_refused(small, wrong):
    with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary 0..5"):
        small.row_ids([0, wrong, 1], 2, 3)


def test_ids_without_a_token_are_refused(small_config):
    hasher = EngramHasher(small_config, np.array([0, 1, 2, 3, 4, NO_TOKEN], np.int32))
    with pytest.raises(ValueError, match="token id 5 has no token"):
        hasher.row_ids([0, 5], 0, 2)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 4)])
def test_ranges_are_checked(small, start, end):
    with pytest.raises(ValueError, match="request of 3 tokens"):
        small.row_ids([0, 1, 2], start, end)


def test_empty_range(small):
    assert small.row_ids([0, 1], 1, 1).shape == (0, 1, 6)
    assert small.row_ids([], 0, 0).shape == (0, 1, 6)


def test_table_height_must_be_the_sum_of_the_primes(small_config):
    config = dataclasses.replace(small_config, engram_num_embeddings=(111,))
    with pytest.raises(ValueError, match=r"111 rows.*112"):
        EngramHasher(config, np.array([0, 1, 2, 3, 4, 3], np.int32))


def test_map_must_fit_the_config(small_config):
    with pytest.raises(ValueError, match=r"4 classes.*engram_compressed_vocab_size = 5"):
        EngramHasher(small_config, np.array([0, 1, 2, 3, 2, 3], np.int32))
    with pytest.raises(ValueError, match=r"int32 \[vocab_size=6\]"):
        EngramHasher(small_config, np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="engram_pad_token_id = 1"):
        EngramHasher(small_config, np.array([0, NO_TOKEN, 2, 3, 4, 3], np.int32))


def test_compression_map():
    texts = [" Cat", "cat", "CAT", " ", "na\u00efve", "NAIVE", "\ufffd", "", " "]
    raw = ["x"] * 6 + ["<0xC3>", "x", "x"]
    result = compress_vocabulary(texts, raw)
    assert result.dtype == np.int32
    assert result.tolist() == [0, 0, 0, 1, 2, 2, 3, 4, 1]  # 5 classes; the pad id 3 is in class 1


@pytest.mark.parametrize(("a", "b", "same"), [
    ("\t", " ", True), ("\n\r\n", " ", True), (" x ", "x", True), ("x  y", "x y", True), ("\ufb01", "fi", True),
    ("\u00c5", "a", True), ("\u212b", "a", True), ("\uff21", "a", True), ("", " ", False), ("x", "y", False),
    ("\u3000", " ", True), ("ss", "\u00df", False),
])
def test_normalisation(a, b, same):
    first, second = compress_vocabulary([a, b], ["p", "q"])
    assert (first == second) == same


def test_tiny_a_map_and_hashes():
    config = ModelConfig.from_folder(TINY_A)
    hasher = EngramHasher(config, token_map_from_folder(TINY_A, config))
    with safe_open(TINY_A / "golden.safetensors", "pt") as golden:
        for length in (1, 2, 7, 33, 100, 193):
            ids = golden.get_tensor(f"L{length}.input_ids").long()
            expected = golden.get_tensor(f"L{length}.engram_hash_ids").long()
            assert torch.equal(hasher.row_ids(ids, 0, length), expected)
            half = length // 2
            parts = torch.cat([hasher.row_ids(ids, 0, half), hasher.row_ids(ids, half, length)])
            assert torch.equal(parts, expected)


def test_another_tokenizer_is_noticed_or_changes_rows():
    config = ModelConfig.from_folder(TINY_A)
    raw = RawTokenizer.from_file(str(TINY_A / "tokenizer.json"))
    own = token_map_from_tokenizer(raw, config)
    with pytest.raises(ValueError, match=r"397 classes.*engram_compressed_vocab_size = 398"):
        token_map_from_tokenizer(raw, dataclasses.replace(config, engram_compressed_vocab_size=398))
    first, second = (int(np.flatnonzero(own == c)[0]) for c in (40, 41))  # two tokens swap their places
    swapped = own.copy()
    swapped[[first, second]] = own[[second, first]]
    ids = [first, second, first]
    assert not torch.equal(EngramHasher(config, own).row_ids(ids, 0, 3), EngramHasher(config, swapped).row_ids(ids, 0, 3))


def test_vocabulary_larger_than_the_tokenizer():
    config = dataclasses.replace(ModelConfig.from_folder(TINY_A), vocab_size=520)
    token_map = token_map_from_folder(TINY_A, config)
    assert token_map.shape == (520,) and (token_map[512:] == NO_TOKEN).all()
    with pytest.raises(ValueError, match=r"tokenizer has 512 tokens.*vocab_size = 500"):
        token_map_from_folder(TINY_A, dataclasses.replace(config, vocab_size=500))


def test_missing_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        token_map_from_folder(tmp_path, ModelConfig.from_folder(TINY_A))


def test_primes_run_on_across_layers():
    first, second = engram_layouts([0, 3], 3, 2, 11, 5)
    assert first.primes.tolist() == [[11, 13], [17, 19]] and second.primes.tolist() == [[23, 29], [31, 37]]
    assert second.offsets[0, 0] == 0


def test_no_engram_layers():
    config = dataclasses.replace(ModelConfig.from_folder(TINY_A), engram_layer_ids=(), engram_num_embeddings=())
    assert EngramHasher(config, np.zeros(512, np.int32)).row_ids([1, 2], 0, 2).shape == (2, 0, 0)


def test_rows_past_2_31_bytes(tmp_path):
    """Table row 8,388,608 of 256 bytes starts at byte 2^31 (case C18 d): a sparse file of 8,388,610 rows."""
    rows, width = 8_388_610, 256
    planted = {row: np.arange(row % 7, row % 7 + width, dtype=np.int64).astype(np.uint8) for row in (8_388_607, 8_388_608, 8_388_609)}
    codes = np.memmap(tmp_path / "codes.bin", dtype=np.uint8, mode="w+", shape=(rows, width))
    for row, content in planted.items():
        codes[row] = content
    scales = np.memmap(tmp_path / "scales.bin", dtype=np.uint8, mode="w+", shape=(rows, width // 32))
    table = EngramTable("table", codes, scales, rows)
    got, _ = table.gather(np.array(list(planted), dtype=np.int64))
    assert np.array_equal(got.numpy(), np.stack(list(planted.values())))
