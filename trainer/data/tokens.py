"""A faster version of open_clip's word-piece tokenizer: the same tokens, with each word looked up once.

Plain ASCII text skips the repair of broken text. open_clip's own tokenizer takes as long as decoding half an
image. Other tokenizers are left as they are.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from open_clip import tokenizer as open_clip_tokenizer
from torch import Tensor

from trainer.errors import InputError

Tokenizer = Callable[[list[str]], Tensor]
"""Function from captions to int64 [captions, context length]; picklable."""
PLAIN_CAPTIONS = ("a photo of a cat", "Two dogs, one of them BLACK", "写数字一")
"""Captions that no program cleans, by which tokenizers are compared."""
MOST_WORDS = 200_000
"""Number of known words at which memory is freed and words are learnt anew.

Captions never stop bringing new words.
"""


def quick(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a faster tokenizer that gives the same tokens if there is one, else the tokenizer itself."""
    simple = (
        type(tokenizer) is open_clip_tokenizer.SimpleTokenizer
        and getattr(tokenizer, "reduction_fn", None) is None
    )
    return QuickTokenizer(tokenizer) if simple else tokenizer


Mask = Callable[[list[int], int, random.Random], list[int]]
"""Function from the tokens of a text, a number of them that fits, and a source of random numbers to as many
tokens."""


def random_tokens(ids: list[int], most: int, draw: random.Random) -> list[int]:
    """Returns some of the tokens, in their order."""
    return [ids[place] for place in sorted(_drawn(len(ids), most, draw))]


def shuffled_tokens(ids: list[int], most: int, draw: random.Random) -> list[int]:
    """Returns some of the tokens, in a random order."""
    return [ids[place] for place in _drawn(len(ids), most, draw)]


def piece_of_tokens(ids: list[int], most: int, draw: random.Random) -> list[int]:
    """Returns tokens that follow each other."""
    begin = int(draw.random() * (len(ids) - most + 1))
    return ids[begin : begin + most]


MASKS: Mapping[str, Mask] = {
    "random": random_tokens,
    "shuffle": shuffled_tokens,
    "simple": piece_of_tokens,
}
"""Functions by the values of data.text_mask, which are those of open_clip (CLIPA, arXiv 2305.07017)."""


def _drawn(count: int, most: int, draw: random.Random) -> list[int]:
    # random.sample is not used: its use of the stream may change between versions of Python.
    return sorted(range(count), key=lambda _: draw.random())[:most]


@runtime_checkable
class Masks(Protocol):
    """Protocol of a tokenizer that shortens long texts by a seed of each."""

    def masked(self, texts: list[str], seeds: Sequence[int]) -> Tensor:
        """Returns int64 [texts, context length]."""


@dataclass(frozen=True)
class MaskedTokenizer:
    """Gives the tokens of a quick tokenizer, with a mask for texts that are too long."""

    quick: "QuickTokenizer"
    mask: Mask

    def __call__(self, texts: list[str]) -> Tensor:
        return self.quick(texts)

    def masked(self, texts: list[str], seeds: Sequence[int]) -> Tensor:
        most = self.quick.context_length - 2
        ids = [
            of_text if len(of_text) <= most else self.mask(of_text, most, random.Random(seed))
            for of_text, seed in zip(map(self.quick.encode, texts), seeds, strict=True)
        ]
        return self.quick.framed(ids)


def with_mask(tokenizer: Tokenizer, kind: str | None) -> Tokenizer:
    """Returns the tokenizer with the mask that data.text_mask names.

    Raises InputError for tokenizers of other libraries.
    """
    if kind is None:
        return tokenizer
    if not isinstance(tokenizer, QuickTokenizer):
        raise InputError(
            f'data.text_mask = "{kind}" shortens texts of open_clip\'s own tokenizer, and this model has '
            f"{type(tokenizer).__name__}: remove the key"
        )
    return MaskedTokenizer(tokenizer, MASKS[kind])


class QuickTokenizer:
    """Gives the tokens of `open_clip.tokenizer.SimpleTokenizer` for a list of texts."""

    def __init__(self, simple: Any) -> None:
        self._simple = simple
        self._known: dict[str, list[int]] = {}

    def __call__(self, texts: list[str]) -> Tensor:
        return self.framed([self.encode(text) for text in texts])

    @property
    def context_length(self) -> int:
        """Tokens of a text that the model takes, with those of its beginning and its end."""
        return int(self._simple.context_length)

    def framed(self, ids: Sequence[list[int]]) -> Tensor:
        """Returns int64 [texts, context length] of the tokens of each text, cut where they are too many."""
        length = self.context_length
        tokens = np.zeros((len(ids), length), dtype=np.int64)
        for row, of_text in zip(tokens, ids, strict=True):
            framed = [self._simple.sot_token_id, *of_text][: length - 1]
            framed.append(self._simple.eot_token_id)
            row[: len(framed)] = framed
        return torch.from_numpy(tokens)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, however many."""
        ids: list[int] = []
        for word in self._simple.pat.findall(self._clean(text)):
            ids += self._known.get(word) or self._learn(word)
        return ids

    def _clean(self, text: str) -> str:
        # ftfy and html.unescape change nothing in printable ASCII without an ampersand, but take half the
        # time.
        if (
            self._simple.clean_fn is open_clip_tokenizer.get_clean_fn("lower")
            and text.isascii()
            and text.isprintable()
            and "&" not in text
        ):
            return " ".join(text.split()).lower()
        return str(self._simple.clean_fn(text))

    def _learn(self, word: str) -> list[int]:
        if len(self._known) >= MOST_WORDS:
            self._known.clear()
            special = (self._simple.decoder[token] for token in self._simple.all_special_ids)
            self._simple.cache = {text: text for text in special}
        pieces = self._simple.bpe("".join(self._simple.byte_encoder[byte] for byte in word.encode())).split(
            " "
        )
        self._known[word] = [self._simple.encoder[piece] for piece in pieces]
        return self._known[word]
