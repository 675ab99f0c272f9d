"""Counts samples that cannot be used, names them in the rank's log, and ends the run if there are too many.

No torch.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.config import Data
from trainer.data.sample import BadSample, LeftOut
from trainer.errors import InputError
from trainer.text.terminal import one_line
from trainer.text.wording import many

# Records of this logger below a warning go to the rank's log file and not to the console.
log = logging.getLogger("clipship.data")
LEAST_SAMPLES = 1000
"""Number of samples that fewer samples count as, so that the first few bad ones do not end a run."""
SHOWN = 3
TRANSPARENT = "transparent_pictures"
"""Name in metrics.jsonl of the number of pictures with transparent parts, since a start."""
ALONE = "samples_without_group"
"""Name in metrics.jsonl of the number of samples without an id in data.group_by, since a start."""


class Allowed(NamedTuple):
    """Limits to what may be wrong with shards that are opened."""

    damage: bool
    """True if samples after a damaged place in a shard may be lost."""
    max_share: float
    """Largest share of samples that may be left out, between 0 and 1."""

    @classmethod
    def by(cls, data: Data) -> "Allowed":
        """Returns the limits that the job sets."""
        return (
            cls(damage=True, max_share=data.max_bad_share)
            if data.on_bad_sample == "skip"
            else cls(damage=False, max_share=0)
        )

    def check(self, left_out: LeftOut, usable: int) -> None:
        """Raises InputError if more samples are left out than allowed."""
        check_share(
            left_out.by_cause,
            usable + left_out.count,
            self.max_share,
            left_out.named,
            none_by=not self.damage,
        )


class NothingUsable(InputError):
    """Data without a sample that can be used."""

    def __init__(self, problem: str, left_out: LeftOut) -> None:
        super().__init__(problem)
        self.left_out = left_out


WHOLE = Allowed(damage=False, max_share=1)
ANY = Allowed(damage=True, max_share=1)


def name_left_out(left_out: LeftOut) -> None:
    """Names the samples that were left out in the rank's log; a damaged shard also on the console."""
    for sample in left_out.named:
        log.log(logging.INFO if sample.key else logging.WARNING, "left out (%s): %s", sample.cause, sample)


class Skipped:
    """Counts the samples that one rank has skipped in this stage of this start."""

    def __init__(self, max_share: float, before: Mapping[str, int] | None = None) -> None:
        """`before` counts by cause what all ranks have skipped earlier in the run, which fills no share."""
        self._max_share = max_share
        self.before = Counter(before)
        self.seen = 0
        self.by_cause: Counter[str] = Counter()
        self.of_steps: Counter[str] = Counter()
        """Those of `by_cause` that came with steps that have begun: others may be fetched ahead."""
        self._fetched: deque[Counter[str]] = deque()
        self.alone = 0
        """Number of samples without a group, which were not skipped."""
        self.transparent = 0
        self._first: list[BadSample] = []

    @property
    def count(self) -> int:
        """Number of samples that were skipped."""
        return self.by_cause.total()

    @property
    def figures(self) -> dict[str, float]:
        """Samples that begun steps have skipped, and those to know of, by their names in a record."""
        return {"bad_samples": self.of_steps.total(), ALONE: self.alone, TRANSPARENT: self.transparent}

    @property
    def examples(self) -> list[str]:
        """The first of them, for a message."""
        return list(map(str, self._first))

    def step_fetched(self) -> None:
        """Notes that all samples of the next step have been recorded."""
        self._fetched.append(self.by_cause.copy())

    def step_begins(self) -> None:
        """Notes that the first of the fetched steps that have not begun does."""
        self.of_steps = self._fetched.popleft()

    def record(
        self, samples: int, bad: Sequence[BadSample], alone: Sequence[str] = (), transparent: int = 0
    ) -> None:
        """Records that `samples` samples came and that those in `bad` were skipped and replaced.

        Those with the keys `alone` came without an id in data.group_by; the first of them are named.
        `transparent` of the pictures have transparent parts.

        Raises InputError if too large a share was skipped.
        """
        self.seen += samples
        for sample in bad:
            self.by_cause[sample.cause] += 1
            log.info("skipped (%s): %s", sample.cause, sample)
        if alone and not self.alone:
            log.warning(
                "%-12s no id in data.group_by, so positives of their own pairs alone: %d of the last %s, "
                "such as %s. metrics.jsonl counts all (%s).",
                "positives",
                len(alone),
                many(samples, "sample"),
                ", ".join(map(one_line, alone[:SHOWN])),
                ALONE,
            )
        self.alone += len(alone)
        if transparent and not self.transparent:
            log.warning(
                "%-12s %.1f %% of the first %s have transparent parts, whose colour data.transparency says. "
                "metrics.jsonl counts all (%s).",
                "pictures",
                100 * transparent / self.seen,
                many(self.seen, "picture"),
                TRANSPARENT,
            )
        self.transparent += transparent
        self._first = [*self._first, *bad][:SHOWN]
        check_share(self.by_cause, self.seen, self._max_share, self._first)


def check_share(
    bad: Mapping[str, int], samples: int, max_share: float, first: Sequence[object], none_by: bool = False
) -> None:
    """Raises InputError if `bad`, counted by cause, is more than `max_share` of the samples.

    `first` are some of them; `none_by` means that on_bad_sample allows none.
    """
    count = sum(bad.values())
    most = max_share * max(samples, LEAST_SAMPLES)
    if count > most:
        causes = in_words(bad)
        limit = (
            'data.on_bad_sample = "fail" allows none'
            if none_by
            else f"data.max_bad_share = {max_share:g} allows {most:.0f}"
        )
        examples = "".join(f"\n  {sample}" for sample in first[:SHOWN])
        shown = f" For example:{examples}" if examples else ""
        raise InputError(
            f"bad samples: {count} of {samples} ({causes}); {limit}. Repair the data or allow more.{shown}"
        )


def in_words(by_cause: Mapping[str, int]) -> str:
    """Returns how many samples are bad for each cause, for a message."""
    return ", ".join(f"{count} {cause}" for cause, count in Counter(by_cause).most_common())


def without(bad: Mapping[str, int]) -> str:
    """Returns which samples a figure does not count, for its line; empty if there is none."""
    return f" (without {many(sum(bad.values()), 'bad sample')}: {in_words(bad)})" if bad else ""
