"""The real trainer under its supervisor, which measures a step and the cost of watching it.

Both come from one run and are printed at its last step. `python -m benchmarks.rank JOB` is a supervisor and
its rank, as `python -m trainer.rank JOB` is.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config.loader import load_job
from trainer.config.phases import Phase
from trainer.run.exit_record import RANK_DIR
from trainer.supervise import main as rank
from trainer.world.heartbeat import Heartbeat

FROM_STEP = 3
MARK = "watched "


class Watched:
    """Times of the same stretch of steps.

    These are the wall clock, the rank's time in its heartbeat and in its monitoring, and its supervisor's CPU
    time.
    """

    def __init__(self, last_step: int) -> None:
        self._last = last_step
        self._heartbeat_s, self._heartbeats, self._monitoring_s = 0.0, 0, 0.0
        self._phase, self._write = Heartbeat.begin_phase, Heartbeat._write
        self._start: tuple[float, float, float, float, int] | None = None

    def install(self) -> None:
        def write(heartbeat: Heartbeat) -> None:
            begin = time.perf_counter()
            self._write(heartbeat)
            self._heartbeat_s += time.perf_counter() - begin
            self._heartbeats += 1

        def phase(heartbeat: Heartbeat, entered: Phase, step: int = 0) -> None:
            self._phase(heartbeat, entered, step)
            if (entered, step) == ("step", FROM_STEP):
                self._start = self._now()
            elif (entered, step) == ("step", self._last):
                self._tell(step - FROM_STEP)

        Heartbeat.begin_phase, Heartbeat._write = phase, write  # type: ignore[method-assign, assignment]
        self._install_around_monitoring()

    def _install_around_monitoring(self) -> None:
        """Times the functions that inspect and record steps; waiting for other ranks in them counts, too."""
        from trainer.telemetry.metrics import Telemetry
        from trainer.telemetry.rank_stats import RankStats, StragglerDetector
        from trainer.train.monitors import NonFiniteGuard

        for owner, name in (
            (StragglerDetector, "_collect"),
            (StragglerDetector, "contribution"),
            (RankStats, "gather"),
            (Telemetry, "write"),
            (NonFiniteGuard, "check"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return work(*arguments)
            finally:
                self._monitoring_s += time.perf_counter() - begin

        return timed

    def _now(self) -> tuple[float, float, float, float, int]:
        return (
            time.perf_counter(),
            self._heartbeat_s,
            self._monitoring_s,
            cpu_s(os.getppid()),
            self._heartbeats,
        )

    def _tell(self, steps: int) -> None:
        assert self._start is not None
        wall, heartbeat, monitoring, supervisor, heartbeats = (
            (now - then) / steps for now, then in zip(self._now(), self._start, strict=True)
        )
        cost = {
            "step_s": wall,
            "heartbeat_s": heartbeat,
            "monitoring_s": monitoring,
            "supervisor_cpu_s": supervisor,
            "heartbeats": heartbeats,
        }
        print(MARK + json.dumps(cost), flush=True)


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    if RANK_DIR in os.environ:
        from trainer.train.main import command

        Watched(load_job(Path(sys.argv[1])).optim.steps or 0).install()
        command()
    else:
        sys.exit(rank.main(sys.argv[1:], "benchmarks.rank"))
