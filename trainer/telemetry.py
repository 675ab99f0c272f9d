"""What a run says while it trains: one console line and one JSON object every N steps, with the time split by what it went into."""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from trainer.sinks import Sink
from trainer.whole_file import json_text, write_whole

log = logging.getLogger("clipship")


@dataclass(frozen=True)
class Record:
    """One logged step. Times are seconds of one step, averaged since the record before, on rank 0."""

    step: int
    epoch: int
    samples: int
    loss: float
    lr: float
    grad_norm: float
    logit_scale: float
    samples_per_s: float
    step_s: float
    data_s: float
    compute_s: float
    comm_s: float
    checkpoint_s: float
    bad_samples: int = 0
    """Skipped by all ranks since this start."""


@dataclass(frozen=True)
class Lap:
    """So many steps, and the seconds that all of them took by part."""

    steps: int = 0
    data_s: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    checkpoint_s: float = 0.0

    def __add__(self, other: "Lap") -> "Lap":
        return Lap(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def per_step(self) -> dict[str, float]:
        """Seconds of one step by part, and `step_s`, their sum."""
        parts = {part: seconds / max(1, self.steps) for part, seconds in asdict(self).items() if part != "steps"}
        return {"step_s": sum(parts.values()), **parts}


class Clock:
    """Splits the time of steps: what is not data, communication or checkpoint is compute."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._start = time.perf_counter()
        self._spent = {"data_s": 0.0, "checkpoint_s": 0.0}
        self._steps = 0

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """Count the block as `data_s` or `checkpoint_s`."""
        start = time.perf_counter()
        yield
        self._spent[part] += time.perf_counter() - start

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the block out: it belongs to no step."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def step_done(self) -> None:
        """One more step since the last `pop`."""
        self._steps += 1

    def pop(self, comm_s: float) -> Lap:
        """The lap since the last call; `comm_s` is the communication of all its steps."""
        whole = time.perf_counter() - self._start
        spent = comm_s + sum(self._spent.values())
        lap = Lap(self._steps, comm_s=comm_s, compute_s=max(0.0, whole - spent), **self._spent)
        self._restart()
        return lap


class Telemetry:
    """Rank 0's console line, metrics.jsonl and sinks; other ranks give it no path and it stays silent."""

    def __init__(self, path: Path | None, steps: int, steps_done: int = 0, sinks: Sequence[Sink] = ()) -> None:
        self._steps, self._steps_done, self._sinks = steps, steps_done, sinks
        self._said_lost = False
        if path is not None:
            forget_after(path, steps_done)
        self._file: IO[str] | None = open(path, "a") if path is not None else None  # noqa: SIM115  # closed by __exit__

    def __enter__(self) -> "Telemetry":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._or_lost():
            if self._file is not None:
                self._file.close()
        for sink in self._sinks:
            with self._or_lost():
                sink.close(error)

    def write(self, record: Record, about_ranks: Mapping[str, object] | None = None) -> None:
        """One record of the loop, with what the ranks' watch saw, and its console line."""
        self.event({**asdict(record), **(about_ranks or {})})
        if self._file is not None:
            log.info(console_line(record, self._steps, first=record.step == self._steps_done + 1))

    def event(self, values: Mapping[str, object]) -> None:
        """One line of metrics.jsonl, flushed, and the sinks': a record, an evaluation, a checkpoint's cost; each has its `step`."""
        with self._or_lost():
            if self._file is not None:
                self._file.write(json_text(values) + "\n")
                self._file.flush()
        for sink in self._sinks:
            with self._or_lost():
                sink.write(values)

    @contextmanager
    def _or_lost(self) -> Iterator[None]:
        """Numbers that a full disk does not take are no reason to end a run: the console still has them, and says so once."""
        try:
            yield
        except OSError as error:
            if not self._said_lost:
                log.warning("%-12s NOT WRITTEN: %s. The run goes on; metrics.jsonl and TensorBoard have gaps from here", "metrics", error)
            self._said_lost = True


def forget_after(path: Path, steps_done: int) -> None:
    """Drop the lines of steps that a killed run did after its last checkpoint, for they come again; and a line that it did not finish."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            if json.loads(line)["step"] <= steps_done:
                kept.append(line + "\n")
    write_whole(path, "".join(kept))


def last_loss(path: Path) -> float | None:
    """The loss of the last record in metrics.jsonl."""
    losses = [found["loss"] for line in path.read_text().splitlines() if "loss" in (found := json.loads(line))]
    return losses[-1] if losses else None


def console_line(record: Record, steps: int, first: bool = False) -> str:
    """Fixed order, so that eyes and tools find the same thing at the same place."""
    # The first step of a start waits for loaders to start and says nothing of the others.
    left = "..." if first else duration((steps - record.step) * record.step_s)
    share = {part: getattr(record, f"{part}_s") / record.step_s for part in ("data", "comm", "checkpoint")}
    return (
        f"step {record.step:>{len(str(steps))}}/{steps}  epoch {record.epoch}  loss {record.loss:.4f}  lr {record.lr:.2e}  "
        f"grad {record.grad_norm:.3f}  scale {record.logit_scale:.2f}  {record.samples_per_s:.0f} samples/s  "
        f"data {share['data']:.0%} comm {share['comm']:.0%} ckpt {share['checkpoint']:.0%}  "
        f"{f'bad {record.bad_samples}  ' if record.bad_samples else ''}ETA {left}"
    )


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
