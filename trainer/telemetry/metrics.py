"""Console lines and metrics.jsonl of a run: one of each every N steps, with the time split by part."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.run.layout import METRICS_FILE
from trainer.safe_io.atomic import json_text
from trainer.safe_io.plain import lines_from_end, open_plain, parse_json, still_there
from trainer.telemetry.pictures import Picture
from trainer.telemetry.records import SO_FAR, SUMMED, Gaps, Lap, Record
from trainer.telemetry.writers import MetricWriter
from trainer.text.wording import duration

log = logging.getLogger("clipship")

_NO_EVALUATION = {"loss", "checkpoint", "slow_rank", "evaluation_failed"}
"""Names of which each line of metrics.jsonl has one unless it is an evaluation's."""


class Clock:
    """Splits the time of steps by part; what is not data, communication or checkpoint is compute."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._start = time.perf_counter()
        self._spent = {"data_s": 0.0, "checkpoint_s": 0.0}
        self._steps = 0

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """Counts the block as `data_s` or `checkpoint_s`."""
        start = time.perf_counter()
        yield
        self._spent[part] += time.perf_counter() - start

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leaves the block out of the time, since it belongs to no step."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def step_done(self) -> None:
        """Counts one more step since the last `pop`."""
        self._steps += 1

    def pop(self, comm_s: float) -> Lap:
        """Returns the times since the last call.

        `comm_s` is the communication of all those steps, in seconds.
        """
        whole = time.perf_counter() - self._start
        spent = comm_s + sum(self._spent.values())
        lap = Lap(self._steps, comm_s=comm_s, compute_s=max(0.0, whole - spent), **self._spent)
        self._restart()
        return lap


class Telemetry:
    """Writes rank 0's console lines, metrics.jsonl and metric writers.

    Other ranks give it no path, and it stays silent.
    """

    def __init__(
        self,
        path: Path | None,
        steps: int,
        steps_done: int = 0,
        writers: Sequence[MetricWriter] = (),
        generation: int = 1,
        record: Mapping[str, object] | None = None,
    ) -> None:
        """`generation` is that of the ranks, which every line says.

        `record` is that of the step `steps_done`: it is written if the ranks before ended without writing it.
        """
        self._steps, self._steps_done, self._writers = steps, steps_done, writers
        self._generation = generation
        self._gaps = Gaps()
        self._so_far: dict[str, float] = {}
        if path is not None:
            drop_after(path, steps_done)
            self._so_far = dict(_last_record(path).get(SO_FAR, {}))
        # `__exit__` closes the file.
        self._file: TextIOWrapper | None = (
            open(path, "a", opener=open_plain) if path is not None else None  # noqa: SIM115
        )
        if path is not None and record is not None and not is_recorded(path, steps_done):
            self.event(record)

    def __enter__(self) -> "Telemetry":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._gaps.tolerated_in(METRICS_FILE):
            if self._file is not None:
                self._file.close()
        self._tell(lambda writer: writer.close(error))

    def write(self, record: Record, about_ranks: Mapping[str, object] | None = None) -> Mapping[str, object]:
        """Writes one record of the loop, with the figures about all ranks, and its console line.

        Returns the values of its line, on every rank.
        """
        values = {**asdict(record), **(about_ranks or {})}
        self.event(values)
        if self._file is not None:
            log.info(console_line(record, self._steps, first=record.step == self._steps_done + 1))
        return values

    def event(self, values: Mapping[str, object]) -> None:
        """Writes one line of metrics.jsonl, flushed, and passes it to the metric writers.

        It is a record, an evaluation or a checkpoint's cost; each has its `step`, and gets its `generation`.
        A record also gets the sums over the run, so that nobody has to read all of it for them.
        """
        values = {**values, "generation": self._generation}
        line = values
        if "loss" in values:
            for name, value in values.items() if self._file is not None else ():
                if name in SUMMED and isinstance(value, int | float):
                    self._so_far[name] = round(self._so_far.get(name, 0) + value, 6)
            line = {**values, SO_FAR: self._so_far} if self._so_far else values
        with self._gaps.tolerated_in(METRICS_FILE):
            if self._file is not None:
                self._file = still_there(self._file)
                self._file.write(json_text(line) + "\n")
                self._file.flush()
        self._tell(lambda writer: writer.write(values))

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        """Shows pictures of the step's evaluation, if there are any, in the metric writers."""
        if pictures:
            self._tell(lambda writer: writer.show(step, pictures))

    def _tell(self, tell: Callable[[MetricWriter], None]) -> None:
        """Tells each metric writer, whatever another one raises."""
        for writer in self._writers:
            with self._gaps.tolerated_in(writer.name, Exception):  # a service's client raises what it likes
                tell(writer)


def drop_after(path: Path, steps_done: int) -> None:
    """Removes the lines of steps after `steps_done`, which a killed run did and which come again.

    It also removes lines at the end that are unfinished. No more is read than that: what stands before the
    record of a step is about that step or earlier ones.
    """
    begin, kept = 0, []
    for at, line, event in _from_end(path):
        if event["step"] <= steps_done:
            kept.append(line.rstrip() + b"\n")
            if _is_record(event):
                begin = at
                break
    with suppress(FileNotFoundError), open(path, "r+b", opener=open_plain) as file:
        file.seek(begin)
        file.writelines(reversed(kept))
        file.truncate()


def is_recorded(path: Path, step: int) -> bool:
    """Returns whether metrics.jsonl has the record of a step."""
    return any("loss" in event for event in _events_of(path, step))


def evaluation_of(path: Path, step: int) -> dict[str, float | int] | None:
    """Returns the metrics that an evaluation of the step wrote into metrics.jsonl; None if there are none."""
    for event in _events_of(path, step):
        if not _NO_EVALUATION & event.keys():
            return {name: value for name, value in event.items() if name not in ("step", "generation")}
    return None


def _events_of(path: Path, step: int) -> Iterator[dict[str, Any]]:
    for _, _, event in _from_end(path):
        if event["step"] == step:
            yield event
        elif event["step"] < step and _is_record(event):
            return


def _is_record(event: Mapping[str, Any]) -> bool:
    """Returns whether a line of metrics.jsonl or ranks.jsonl is the record of its step."""
    return "loss" in event or "rss_bytes" in event


def _from_end(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yields where each line that tells of a step begins, the line and what it says, the last one first."""
    for begin, line in lines_from_end(path) if path.exists() else ():
        with suppress(ValueError):
            event = parse_json(line)
            if isinstance(event, dict) and isinstance(event.get("step"), int):
                yield begin, line, event


def _last_record(path: Path) -> Mapping[str, Any]:
    return next((event for *_, event in _from_end(path) if "loss" in event), {})


def last_loss(path: Path) -> float | None:
    """Returns the loss of the last record in metrics.jsonl; None if there is none."""
    return _last_record(path).get("loss")


def console_line(record: Record, steps: int, first: bool = False) -> str:
    """Returns the console line of a record.

    Its order is fixed, so that people and tools find values in one place.
    """
    # The first step of a start includes the start of the loaders, so it says nothing about the other steps.
    left = "..." if first else duration((steps - record.step) * record.step_s)
    share = {part: getattr(record, f"{part}_s") / record.step_s for part in ("data", "comm", "checkpoint")}
    return (
        f"step {record.step:>{len(str(steps))}}/{steps}  epoch {record.epoch + 1}  "
        f"loss {record.loss:.4f}  lr {record.lr:.2e}  "
        f"grad {record.grad_norm:.3f}  scale {record.logit_scale:.2f}  {record.samples_per_s:.0f} samples/s  "
        f"data {share['data']:.0%} comm {share['comm']:.0%} ckpt {share['checkpoint']:.0%}  "
        f"{f'bad {record.bad_samples}  ' if record.bad_samples else ''}ETA {left}"
    )
