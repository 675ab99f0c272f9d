"""Rounds of an evaluation: in each, every rank does one block, or none if too few are left.

Requests to stop, and failures of a rank, are checked between rounds. A long evaluation logs its progress now
and then.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

import torch

from trainer.comm.protocol import Comm
from trainer.data.bad_samples import Skipped, check_share
from trainer.data.loading import Ahead
from trainer.data.sample import BadSample
from trainer.errors import InputError, MachineError, Preempted, StorageError
from trainer.sysinfo.memory import is_out_of_memory
from trainer.text.wording import many

Result = TypeVar("Result")


class EvaluationFailed(InputError):
    """Raised on all ranks alike if one cannot read its samples, or has no memory to compute with them.

    The model and all ranks are as they were before the evaluation.
    """


class EvaluationCutOff(EvaluationFailed, StorageError):
    """An evaluation that failed for a reason which a later start may not meet: exit code 1."""


class Block(Protocol):
    """Samples that are read together, as `Rounds.counted` needs them."""

    @property
    def valid(self) -> int:
        """Number of samples that can be used."""

    @property
    def bad(self) -> tuple[BadSample, ...]:
        """Samples that cannot."""


BlockT = TypeVar("BlockT", bound=Block)


def never() -> bool:
    """Returns False: nobody asks to stop."""
    return False


def stop_of(comm: Comm) -> Callable[[], bool]:
    """Returns a function that says whether this rank's supervisor asks it to stop."""
    return lambda: comm.heartbeat.stop_requested


@dataclass(frozen=True)
class Rounds:
    """The ranks of an evaluation, and what ends it early on all of them."""

    comm: Comm
    stop: Callable[[], bool] = never
    """Function that returns whether this rank is asked to stop; it is called before each round."""
    _failures: list[tuple[bool, str]] = field(default_factory=list)
    """Reasons why this rank cannot go on, each after whether a later start may."""

    def of(self, count: int, block: int) -> Iterator[int]:
        """Collective: yields where each round begins among `count` items in blocks of `block`.

        Rank 0's block is the first from there. Raises Preempted if any rank is asked to stop, and
        EvaluationFailed if any has failed, on all ranks before the same round or after the last.
        """
        for begin in range(0, count, block * self.comm.world.size):
            self._check()
            yield begin
        self._check()

    def each(
        self, results: Iterable[Result], nothing: Result, progress: "Progress", block: int
    ) -> Iterator[Result]:
        """Collective: yields this rank's result of each round; `nothing` where it has no block left.

        The results are those of its blocks of the items whose progress is told. Raises as `of` does.
        """
        own = self.until_failed(results)
        for begin in self.of(progress.total, block):
            yield next(own, nothing)
            progress.done(begin + block * self.comm.world.size)

    def while_any(self, results: Iterator[Result]) -> Iterator[Result]:
        """Collective: yields this rank's results, one a round, until no rank has another.

        Raises as `of` does.
        """
        left = True
        while self._check(left):
            left = False
            for result in islice(results, 1):
                left = True
                yield result

    def _check(self, left: bool = False) -> bool:
        """Collective: returns whether `left` is true on any rank."""
        own = [float(bool(self._failures)), float(self.stop()), float(left)]
        failed, stopped, any_left = self.comm.all_reduce(torch.tensor(own, device=self.comm.device)).tolist()
        if stopped:
            raise Preempted("asked to stop during an evaluation")
        if failed:
            later, reason = next(filter(None, self.comm.all_gather_object([*self._failures])))[0]
            raise EvaluationCutOff(reason) if later else EvaluationFailed(reason)
        return bool(any_left)

    def until_failed(self, results: Iterable[Result]) -> Iterator[Result]:
        """Yields the results of this rank's blocks up to one that fails, whose reason all ranks then raise.

        Nothing of a block may be collective.
        """
        try:
            yield from results
        except (InputError, MachineError) as problem:
            self._failures.append((isinstance(problem, StorageError | MachineError), str(problem)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._failures.append((True, f"memory ran out; a smaller eval.batch_size needs less: {error}"))

    def counted(self, blocks: Iterator[BlockT], skipped: Skipped) -> Iterator[BlockT]:
        """Yields the blocks, whose bad samples it counts and names in the rank's log.

        A thread reads the next one meanwhile. It is not waited for where storage is silent once this rank is
        asked to stop: StorageError, after which the next round raises Preempted.
        """
        ahead = Ahead(lambda: blocks, 1, self.stop)
        for block in ahead:
            skipped.record(block.valid + len(block.bad), block.bad)
            yield block
        if ahead.missing:
            raise StorageError("asked to stop before storage has given a block")

    def alone(self, compute: Callable[[], Result]) -> Result:
        """Collective: returns what each rank computes by itself; a failure of one is raised as in a round."""
        results = list(self.until_failed(compute() for _ in range(1)))
        self._check()
        return results[0]

    def bad_of_all(self, skipped: Skipped, max_share: float) -> dict[str, int]:
        """Collective: returns the number of samples that the ranks have left out of one set, by cause.

        Raises EvaluationFailed on all ranks alike if they are more than the share, or all.
        """
        ranks = self.comm.all_gather_object([skipped.seen, dict(skipped.by_cause), skipped.examples])
        by_cause: Counter[str] = sum((Counter(causes) for _, causes, _ in ranks), Counter())
        samples = sum(seen for seen, _, _ in ranks)
        try:
            check_share(by_cause, samples, max_share, [text for _, _, texts in ranks for text in texts])
        except InputError as problem:
            raise EvaluationFailed(str(problem)) from None
        if by_cause.total() == samples:
            raise EvaluationFailed(f"none of the {many(samples, 'sample')} can be used")
        return dict(by_cause)


log = logging.getLogger("clipship")

EVERY_S = 10.0


class Progress:
    """Progress of one phase; a phase that is done within ten seconds logs nothing."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self.total, self._unit = what, total, unit
        self._logged_at = time.monotonic()

    def done(self, count: int) -> None:
        """Records that `count` of the total are done."""
        now = time.monotonic()
        if now - self._logged_at > EVERY_S:
            log.info("%-12s %d of %d %s", self._what, min(count, self.total), self.total, self._unit)
            self._logged_at = now
