"""Records on rank 0 what the time of a generation goes into, and says how much of the run's time was useful.

No torch.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainer.run import goodput_log
from trainer.run.layout import GOODPUT_FILE
from trainer.telemetry.goodput import (
    GenerationTimes,
    Goodput,
    Steps,
    account,
    by_generation,
    generations,
)
from trainer.telemetry.records import Gaps, Lap


class GoodputRecorder:
    """Adds the lines of one generation to goodput.jsonl; other ranks than 0 give it no folder."""

    def __init__(
        self,
        folder: Path | None,
        *,
        start: str,
        generation: int,
        ranks: int,
        from_step: int,
        began: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`began` is the time at which the start began; `now` returns seconds since the epoch."""
        self._folder, self._now, self._gaps = folder, now, Gaps()
        self._generation = generation
        self._before, self._own = Goodput(), GenerationTimes(start, generation, began, True, began)
        self._sum: Steps | None = None
        """Sum of all laps but the first step."""
        if folder is not None:
            begin = {
                "event": "begin",
                "start": start,
                "ranks": ranks,
                "began": round(began, 3),
                "from_step": from_step,
                "time": round(now(), 3),
            }
            all_times = generations([*goodput_log.read(folder), {**begin, "generation": generation}])
            self._before = sum(by_generation(all_times)[:-1], Goodput())
            self._own = all_times[-1]
            self._write(begin)

    def steps(self, step: int, lap: Lap, data_s: float, straggler_s: float) -> dict[str, float]:
        """Records the steps of a lap; `data_s` and `straggler_s` are seconds per step.

        Returns the fields of the record: the share of the run's time that was useful, and the seconds that
        were lost by cause. Other ranks than 0 return none.
        """
        seconds = lap.data_s + lap.compute_s + lap.comm_s + lap.checkpoint_s
        if self._folder is None:
            return {}
        self._add(
            Steps(step, lap.steps, seconds, data_s * lap.steps, lap.checkpoint_s, straggler_s * lap.steps)
        )
        times = self.times()
        return {
            "useful_share": round(times.useful_share or 0.0, 4),
            **{f"lost_{cause}_s": round(lost, 3) for cause, lost in times.lost_s.items()},
        }

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """Records the block, which evaluates the model of a step."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._own = replace(self._own, evaluation_s=self._own.evaluation_s + seconds)
        self._write_now({"event": "evaluation", "step": step, "seconds": round(seconds, 6)})

    def save(self, step: int) -> None:
        """Records that a checkpoint of the step is being saved."""
        self._write_now({"event": "save", "step": step})

    def close(self, step: int, lap: Lap) -> None:
        """Records that the training loop has ended, and what came after the last record."""
        if self._folder is not None:
            seconds = lap.data_s + lap.compute_s + lap.comm_s + lap.checkpoint_s
            self._add(Steps(step, lap.steps, seconds, lap.data_s, lap.checkpoint_s))
            self._write_now({"event": "close", "step": step})

    def times(self) -> Goodput:
        """Returns where the seconds of the run went, up to the last line."""
        return self._before + account([replace(self._own, laps=[self._sum] if self._sum else [])])

    def summary(self) -> Mapping[str, Any]:
        """Returns the seconds of the run and what they were spent on, for result.json; rank 0 only."""
        return as_result(self.times()) if self._folder is not None else {}

    def _add(self, steps: Steps) -> None:
        if self._own.first is None:
            self._own = replace(self._own, first=steps)
        else:
            self._sum = steps if self._sum is None else self._sum + steps
        assert self._own.first is not None
        whole = asdict(self._own.first if self._sum is None else self._own.first + self._sum)
        line = {name: round(value, 6) for name, value in asdict(steps).items()}
        so_far = {name: round(whole[name], 6) for name in goodput_log.SUMMED}
        self._write_now({"event": "steps", **line, goodput_log.SO_FAR: so_far})

    def _write_now(self, event: Mapping[str, Any]) -> None:
        at = round(self._now(), 3)
        self._own = replace(self._own, last=max(self._own.last, at))
        self._write({**event, "time": at})

    def _write(self, event: Mapping[str, Any]) -> None:
        """Adds the line, with its generation; on a full disk the run goes on, and rank 0 warns once."""
        if self._folder is None:
            return
        with self._gaps.tolerated_in(GOODPUT_FILE):
            goodput_log.append(self._folder, {**event, "generation": self._generation})


def as_result(times: Goodput) -> dict[str, Any]:
    """Returns the fields of result.json: the whole seconds of the run, the useful share, the lost seconds."""
    return {
        "seconds": round(times.whole_s, 1),
        "useful_share": None if times.useful_share is None else round(times.useful_share, 4),
        "lost_s": {cause: round(seconds, 1) for cause, seconds in times.lost_s.items()},
    }
