"""Text to token ids and back with the checkpoint's tokenizer.json; token ids are always accepted instead of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer

from mini_deepinfer.config import ModelConfig


def check_prompt_ids(ids: Sequence[int], config: ModelConfig) -> list[int]:
    """A prompt given as ids: a non-empty sequence of text token ids. Raises TypeError or ValueError naming the position."""
    out = []
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise TypeError(f"prompt: token {position} must be an integer, got {token!r}")
        token = int(token)
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"prompt: token id {token} at position {position} is outside the vocabulary "
                             f"0..{config.vocab_size - 1}")
        if token == config.image_token_id:
            raise ValueError(f"prompt: token id {token} at position {position} is the image token; images are not supported")
        out.append(token)
    if not out:
        raise ValueError("prompt: must hold at least one token")
    return out


class Tokenizer:
    """tokenizer.json of a checkpoint. The beginning-of-sentence token is added when tokenizer_config.json says so."""

    def __init__(self, raw: RawTokenizer, config: ModelConfig, *, add_bos: bool = False) -> None:
        size = raw.get_vocab_size(with_added_tokens=True)
        if size > config.vocab_size:
            raise ValueError(f"tokenizer has {size} tokens, more than vocab_size = {config.vocab_size}")
        self.raw = raw
        self.config = config
        self.add_bos = add_bos

    @staticmethod
    def from_folder(folder: str | Path, config: ModelConfig) -> Tokenizer:
        """Read folder/tokenizer.json (and tokenizer_config.json when there is one). Raises FileNotFoundError, ValueError."""
        path, options = Path(folder) / "tokenizer.json", Path(folder) / "tokenizer_config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found; give token ids instead of text, or add the checkpoint's tokenizer.json")
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer file: {error}") from None
        settings = json.loads(options.read_text(encoding="utf-8")) if options.is_file() else {}
        return Tokenizer(raw, config, add_bos=bool(settings.get("add_bos_token", False)))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens in it recognised. Raises ValueError for an empty result or an image token."""
        ids = self.raw.encode(text, add_special_tokens=False).ids
        if self.add_bos and ids[:1] != [self.config.bos_token_id]:
            ids = [self.config.bos_token_id, *ids]
        return check_prompt_ids(ids, self.config)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token give nothing."""
        return self.raw.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)
