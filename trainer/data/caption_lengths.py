"""Counts the tokens of captions, and the captions that lose their end in the model's text tower. No torch."""

import logging
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from trainer.config import Data
from trainer.data.mojibake import gbk_warning
from trainer.text.wording import many

log = logging.getLogger("clipship")
CAPTIONS = 1000
"""Number of captions that are looked at; as many give a share to a percent."""
MOST_CUT = 0.01
"""Share of captions that may lose their end without a warning."""
Counter = Callable[[str], int]
"""Function from a text to its number of tokens, however many, with those of its beginning and its end."""


class CaptionLengths:
    """Numbers of tokens of some captions, for a text tower that takes `most`."""

    def __init__(self, most: int, count: Counter, captions: Iterable[str] = ()) -> None:
        self.most, self._count = most, count
        self.tokens: list[int] = []
        self.add(captions)

    def add(self, captions: Iterable[str]) -> None:
        self.tokens += map(self._count, captions)

    @property
    def cut_share(self) -> float:
        """Share of the captions that have more tokens than the tower takes."""
        return sum(count > self.most for count in self.tokens) / max(1, len(self.tokens))

    def text(self) -> str:
        """Returns what people read of the lengths."""
        return (
            f"{median(self.tokens):.0f} tokens at the median, {max(self.tokens)} at most, in "
            f"{many(len(self.tokens), 'caption')}; the model takes {self.most}: {self.cut_share:.1%} lose "
            "their end"
        )

    def warning(self, text_mask: str | None = None) -> str:
        """Returns a sentence if too many captions lose their end, and what to do; else an empty text."""
        if self.cut_share <= MOST_CUT or text_mask is not None:
            return ""
        whole = sorted(self.tokens)[-1 - int(MOST_CUT * len(self.tokens))]  # above `most`, as more are cut
        return (
            f"{self.cut_share:.0%} of the captions have more than the {self.most} tokens that the model "
            f"takes and lose their end: set model.context_length = {-(-whole // 8) * 8} for 99 % of them "
            "whole, choose shorter captions (data.caption_key, data.caption_column), or let data.text_mask "
            "draw which tokens stay"
        )


class CaptionMonitor:
    """Says once, in the log of a run, how long its first captions are, and if they seem to be misread."""

    def __init__(self, lengths: CaptionLengths | None, captions: int, data: Data) -> None:
        """`captions` will come in all. With None, as tokens cannot be counted, nothing is said."""
        self._lengths, self._data = lengths, data
        self._enough, self._first = min(captions, CAPTIONS), list[str]()

    def record(self, captions: Sequence[str]) -> None:
        """Counts the captions of a batch until there are enough of them."""
        if (lengths := self._lengths) is None:
            return
        new = captions[: self._enough - len(lengths.tokens)]
        self._first += new
        lengths.add(new)
        if len(lengths.tokens) < self._enough:
            return
        self._lengths = None
        log.info("%-12s %s", "captions", lengths.text())
        odd = gbk_warning(self._first, self._data.encoding)
        self._first = []
        for warning in filter(None, [odd, lengths.warning(self._data.text_mask)]):
            log.warning("%-12s %s", "captions", warning)


def counter_of(tokenizer: Any) -> Counter | None:
    """Returns a function that counts tokens as one of open_clip's tokenizers makes them; None for others."""
    if callable(encode := getattr(tokenizer, "encode", None)):
        return lambda text: len(encode(text)) + 2
    if callable(inner := getattr(tokenizer, "tokenizer", None)):  # one of transformers, which adds both ends
        clean = getattr(tokenizer, "clean_fn", str)
        return lambda text: len(inner(clean(text), verbose=False)["input_ids"])
    return None
