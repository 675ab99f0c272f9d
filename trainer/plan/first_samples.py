"""Lines and warnings of `clipship check` about the first samples of the training data. Imports no torch."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from typing import TypeVar

from trainer.config import Data, Job, is_remote
from trainer.config.formats import FORMATS
from trainer.data.caption_lengths import CAPTIONS, CaptionLengths
from trainer.data.formats import READERS
from trainer.data.mojibake import gbk_warning
from trainer.data.shard_names import expand_shards
from trainer.errors import InputError
from trainer.model.light_tokenizer import lengths_for
from trainer.text.wording import many

T = TypeVar("T")
MOST_EQUAL = 0.1
"""Share of a batch with the caption of another sample, from which a warning says so."""


@dataclass(frozen=True)
class FirstSamples:
    """The begin of the training data of a job: local files alone, since others are slow to reach."""

    job: Job

    @cached_property
    def file(self) -> str | None:
        """The first file; None if there is none that may be looked into."""
        data = self.job.data
        if not FORMATS[data.kind].unit or data.streams or not find_spec("numpy"):
            return None
        file = expand_shards(data.train)[0]
        return None if is_remote(file) else file

    @cached_property
    def _texts(self) -> list[str]:
        """Its first captions, also those that stand for none; empty if they cannot be read."""
        read = READERS[self.job.data.kind].captions
        return self._first(lambda file, data: read(file, data.model_copy(update={"empty_captions": ()})))

    @cached_property
    def captions(self) -> list[str]:
        """Its first captions."""
        return [text for text in self._texts if text not in self.job.data.empty_captions]

    @cached_property
    def lengths(self) -> CaptionLengths | None:
        """The lengths of these captions; None if there are none, or if only the ranks can count tokens."""
        return lengths_for(self.job.model, self.captions) if self.captions else None

    @cached_property
    def groups(self) -> list[int]:
        """The numbers of their groups, 0 without an id; none if no ids are asked for or cannot be read."""
        return [] if self.job.data.group_by is None else self._first(READERS[self.job.data.kind].groups)

    def _first(self, read: Callable[[str, Data], Iterator[T]]) -> list[T]:
        if self.file is None:
            return []
        try:
            return list(islice(read(self.file, self.job.data), CAPTIONS))
        except (InputError, OSError):
            return []

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields topic and text of each line about them."""
        if self.lengths is not None:
            yield "captions", self.lengths.text()
        if self.groups:
            ids = many(len({*filter(None, self.groups)}), "id")
            yield "groups", f"{ids} in data.group_by of the first {many(len(self.groups), 'sample')}"

    def _equal(self) -> str:
        """Returns a sentence if many samples of a batch share their caption with another, else ""."""
        others, times = self.job.optim.global_batch_size - 1, Counter(self.captions)
        most = max(1, len(self.captions) - 1)
        shared = sum(count * (1 - (1 - (count - 1) / most) ** others) for count in times.values())
        share = shared / max(1, len(self.captions))
        if self.job.optim.positives != "pairs" or share < MOST_EQUAL:
            return ""
        return (
            f"about {share:.0%} of a batch's samples have the caption of another one (by the first "
            f"{many(len(self.captions), 'caption')}), and the loss takes their pairs for wrong ones: "
            'optim.positives = "captions" takes them for right ones'
        )

    def warnings(self) -> Iterator[str]:
        """Yields a sentence for what is lost."""
        if self.file is not None and self.job.data.kind == "webdataset":
            from trainer.data.first_look import left_out_first  # imports numpy

            if lost := left_out_first(self.file, self.job.data):
                yield lost
        if empty := Counter(text for text in self._texts if text in self.job.data.empty_captions):
            yield (
                f"{self.file}: {empty.total():,} of its first {many(len(self._texts), 'caption')} stand for "
                f"none ({', '.join(map(repr, empty))}) and are left out (data.empty_captions)"
            )
        if equal := self._equal():
            yield equal
        if odd := gbk_warning(self.captions, self.job.data.encoding):
            yield odd
        if self.lengths is not None and (cut := self.lengths.warning(self.job.data.text_mask)):
            yield cut
        if without := self.groups.count(0):
            yield (
                f"{self.file}: {without:,} of its first {many(len(self.groups), 'sample')} have no id in "
                f'data.group_by = "{self.job.data.group_by}", so each is a positive of its own pair alone'
            )
