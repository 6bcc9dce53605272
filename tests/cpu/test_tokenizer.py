"""Text and ids in and out."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from mini_deepinfer.config import ModelConfig
from mini_deepinfer.tokenizer import Tokenizer, check_prompt_ids
from tests.golden import TINY_A


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_folder(TINY_A)


@pytest.fixture(scope="module")
def tokenizer(config):
    return Tokenizer.from_folder(TINY_A, config)


@pytest.mark.parametrize("text", ["hello", " two  spaces\n", "naïve 你好 🙂", "a"])
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(isinstance(i, int) and 0 <= i < 512 for i in ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer):
    ids = tokenizer.encode("<|begin_of_sentence|>hi<|end_of_sentence|>")
    assert ids[0] == 0 and ids[-1] == 1
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<|begin_of_sentence|>")


def test_bos_only_when_the_checkpoint_says_so(tokenizer, config, tmp_path):
    assert tokenizer.encode("hi")[0] != 0
    shutil.copy(TINY_A / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    with_bos = Tokenizer.from_folder(tmp_path, config)
    assert with_bos.encode("hi") == [0, *tokenizer.encode("hi")]
    assert with_bos.encode("<|begin_of_sentence|>hi").count(0) == 1


def test_ids_are_accepted_instead_of_text(config):
    assert check_prompt_ids([5, 6, 7], config) == [5, 6, 7]
    assert check_prompt_ids(np.array([5, 6]), config) == [5, 6]
    assert check_prompt_ids(torch.tensor([5, 6]), config) == [5, 6]


@pytest.mark.parametrize(("ids", "error", "message"), [
    ([], ValueError, "at least one token"),
    ([1, -1], ValueError, "token id -1 at position 1 is outside the vocabulary 0..511"),
    ([512], ValueError, "token id 512 at position 0"),
    ([0, 3], ValueError, "token id 3 at position 1 is the image token"),
    ([1.5], TypeError, "must be an integer, got 1.5"),
    ([True], TypeError, "must be an integer"),
    (["a"], TypeError, "must be an integer"),
])
def test_prompt_refusals(config, ids, error, message):
    with pytest.raises(error, match=message):
        check_prompt_ids(ids, config)


def test_image_token_in_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match="image token"):
        tokenizer.encode("look: <|image|>")
    with pytest.raises(ValueError, match="at least one token"):
        tokenizer.encode("")


def test_files_are_checked(config, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path, config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer file"):
        Tokenizer.from_folder(tmp_path, config)
    with pytest.raises(ValueError, match="512 tokens, more than vocab_size = 300"):
        Tokenizer.from_folder(TINY_A, dataclasses.replace(config, vocab_size=300))
