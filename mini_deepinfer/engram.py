"""Engram addressing: token compression map, hash constants and row ids (model spec 7.1 - 7.3).

Everything depends on token ids only, so the rows of a step are known before the step starts. The gate is in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as RawTokenizer

from mini_deepinfer.config import ModelConfig

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # a token that is part of a multi-byte character decodes to this
_LONE_SPACE = "\ue000"  # keeps " " apart from "" through the strip
_SEED_FACTOR = 10007
NO_TOKEN = -1  # map entry of a vocabulary id that the tokenizer does not know


def compress_vocabulary(texts: Sequence[str], raw_tokens: Sequence[str | None]) -> np.ndarray:
    """Class of every token id, numbered in order of first appearance (model spec 7.1).

    texts[i] is id i decoded alone with special tokens kept, raw_tokens[i] its spelling in the vocabulary (used when the text
    holds U+FFFD). Returns int32 [len(texts)].
    """
    normalise = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), _LONE_SPACE), normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " ")])
    classes: dict[str, int] = {}
    out = np.empty(len(texts), np.int32)
    for i, (text, raw) in enumerate(zip(texts, raw_tokens)):
        if _REPLACEMENT in text and raw is not None:
            key = raw
        else:
            key = normalise.normalize_str(text) or text
        out[i] = classes.setdefault(key, len(classes))
    return out


def token_map_from_tokenizer(tokenizer: RawTokenizer, config: ModelConfig) -> np.ndarray:
    """The compression map int32 [vocab_size]; ids at or past the tokenizer's length get NO_TOKEN.

    Raises ValueError when the tokenizer is larger than the vocabulary or the number of classes differs from
    engram_compressed_vocab_size (another tokenizer revision addresses other rows without any other symptom).
    """
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    if count > config.vocab_size:
        raise ValueError(f"engram: tokenizer has {count} tokens, config has vocab_size = {config.vocab_size}")
    texts = tokenizer.decode_batch([[i] for i in range(count)], skip_special_tokens=False)
    known = compress_vocabulary(texts, [tokenizer.id_to_token(i) for i in range(count)])
    _check_classes(known, config)
    out = np.full(config.vocab_size, NO_TOKEN, np.int32)
    out[:count] = known
    return out


def token_map_from_folder(folder: str | Path, config: ModelConfig) -> np.ndarray:
    """`token_map_from_tokenizer` of folder/tokenizer.json. Raises FileNotFoundError."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: the engram tables are addressed through the tokenizer")
    return token_map_from_tokenizer(RawTokenizer.from_file(str(path)), config)


def synthetic_token_map(config: ModelConfig) -> np.ndarray:
    """A stand-in map for dummy weights, which have no tokenizer: id -> id modulo the number of classes. int32 [vocab_size].

    Every class occurs (as far as the vocabulary reaches), so rows are read in the same pattern as with the real map.
    """
    return (np.arange(config.vocab_size) % min(config.engram_compressed_vocab_size, config.vocab_size)).astype(np.int32)


def _check_classes(token_map: np.ndarray, config: ModelConfig) -> None:
    classes = int(token_map.max()) + 1 if token_map.size else 0
    if classes != config.engram_compressed_vocab_size:
        raise ValueError(
            f"engram: the tokenizer compresses to {classes} classes, the checkpoint was made with "
            f"engram_compressed_vocab_size = {config.engram_compressed_vocab_size}; use the checkpoint's own tokenizer.json")


@dataclass(frozen=True)
class EngramLayout:
    """Hash constants of one engram layer (model spec 7.2).

    multipliers  int64 [max_ngram]              odd, one per history position
    primes       int64 [max_ngram - 1, heads]   bucket sizes, 2-grams first
    offsets      int64 [max_ngram - 1, heads]   first table row of each bucket range
    """

    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray

    @property
    def num_rows(self) -> int:
        """Table height: the sum of the primes."""
        return int(self.primes.sum())


def engram_layouts(layer_ids: Sequence[int], max_ngram: int, heads: int, vocab_size: int,
                   compressed_size: int) -> tuple[EngramLayout, ...]:
    """Constants of every engram layer. Primes run on across layers, offsets restart with every layer."""
    bound = max(1, (np.iinfo(np.int64).max // compressed_size) // 2)
    candidate = vocab_size - 1
    layouts = []
    for layer in layer_ids:
        generator = np.random.default_rng(_SEED_FACTOR * layer)
        multipliers = generator.integers(0, bound, size=(max_ngram,), dtype=np.int64) * 2 + 1
        primes = np.empty((max_ngram - 1, heads), np.int64)
        for index in np.ndindex(primes.shape):
            candidate = _next_prime(candidate)
            primes[index] = candidate
        offsets = (np.cumsum(primes.reshape(-1)) - primes.reshape(-1)).reshape(primes.shape)
        layouts.append(EngramLayout(multipliers, primes, offsets))
    return tuple(layouts)


def _next_prime(n: int) -> int:
    n += 1
    while not _is_prime(n):
        n += 1
    return n


_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # deterministic Miller-Rabin below 3.3e24


def _is_prime(n: int) -> bool:
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for a in _WITNESSES:
        x = pow(a, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


class EngramHasher:
    """Table row ids of tokens (model spec 7.3).

    token_map int32 [vocab_size] from one of the functions above. Raises ValueError when the map's length or number of classes
    does not fit the config, or a table's height is not the sum of its primes.
    """

    def __init__(self, config: ModelConfig, token_map: np.ndarray | torch.Tensor) -> None:
        token_map = np.asarray(token_map)
        if token_map.dtype != np.int32 or token_map.shape != (config.vocab_size,):
            raise ValueError(f"engram: token_map must be int32 [vocab_size={config.vocab_size}], got {token_map.dtype} "
                             f"{list(token_map.shape)}")
        self._map = token_map.astype(np.int64)
        self._max_ngram = config.engram_max_ngram_size
        self._image_token_id = config.image_token_id
        self.layouts = engram_layouts(config.engram_layer_ids, config.engram_max_ngram_size, config.engram_n_heads,
                                      config.engram_vocab_size, config.engram_compressed_vocab_size)
        if not config.engram_layer_ids:
            return
        _check_classes(token_map, config)
        for layer, rows, layout in zip(config.engram_layer_ids, config.engram_num_embeddings, self.layouts):
            if rows != layout.num_rows:
                raise ValueError(f"engram: layer {layer} has a table of {rows} rows, but its {layout.primes.size} hash primes "
                                 f"add up to {layout.num_rows}")
        self.pad_class = int(self._map[config.engram_pad_token_id])
        if self.pad_class == NO_TOKEN:
            raise ValueError(f"engram: engram_pad_token_id = {config.engram_pad_token_id} has no token in the tokenizer")

    @property
    def history(self) -> int:
        """Tokens before `start` that row_ids looks at."""
        return self._max_ngram - 1

    def row_ids(self, token_ids: np.ndarray | torch.Tensor | Sequence[int], start: int, end: int,
                dead: np.ndarray | None = None) -> torch.Tensor:
        """Rows of tokens start..end-1 of one request.

        token_ids int64 [S] are the request's raw ids from its first token on; only ids[start - history : end] are read.
        dead bool [S], optional: positions that are no text; like image tokens they block themselves and everything older.
        Returns int64 [end - start, engram layers, rows per token] on the CPU, 2-gram heads first.
        Raises ValueError for a range outside the request and for ids without a token.
        """
        total = len(token_ids)
        if not 0 <= start <= end <= total:
            raise ValueError(f"engram: tokens {start}..{end} are not inside the request of {total} tokens")
        first = max(0, start - self.history)
        ids = np.asarray(token_ids[first:end], dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._map.size):
            wrong = ids[(ids < 0) | (ids >= self._map.size)][0]
            raise ValueError(f"engram: token id {wrong} is outside the vocabulary 0..{self._map.size - 1}")
        classes = self._map[ids]
        alive = np.ones(ids.size, bool) if self._image_token_id is None else ids != self._image_token_id
        if dead is not None:
            alive &= ~np.asarray(dead[first:end], dtype=bool)
        if bool((classes[alive] == NO_TOKEN).any()):
            raise ValueError(f"engram: token id {ids[alive & (classes == NO_TOKEN)][0]} has no token in the tokenizer")
        missing = self.history - (start - first)  # positions before the request's first token
        classes = np.concatenate([np.zeros(missing, np.int64), classes])
        alive = np.concatenate([np.zeros(missing, bool), alive])
        num = end - start
        out = np.empty((num, len(self.layouts), self.layouts[0].primes.size if self.layouts else 0), np.int64)
        for at, layout in enumerate(self.layouts):
            live = np.ones(num, bool)
            rolled = np.zeros(num, np.int64)
            for shift in range(self._max_ngram):
                window = slice(self.history - shift, self.history - shift + num)
                live = live & alive[window]
                rolled = rolled ^ np.where(live, classes[window], self.pad_class) * layout.multipliers[shift]
                if shift:
                    rows = rolled[:, None] % layout.primes[shift - 1] + layout.offsets[shift - 1]
                    heads = layout.primes.shape[1]
                    out[:, at, (shift - 1) * heads:shift * heads] = rows
        return torch.from_numpy(out)
