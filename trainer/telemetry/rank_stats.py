"""Figures of each rank: seconds of a step by part, use of its machine, and which rank is slow.

The table goes to `ranks.jsonl`, its worst rows into the record; a rank that stays slow is named.

A rank's own work is a step without its waiting for other ranks: reading data and computing. Every few steps
the ranks exchange how long it took, with the requests that they exchange anyway (`train/loop.py`), so
nobody waits for the times.
"""

import json
import logging
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.comm.accelerator import accelerator_of, on_accelerator, uuid_of
from trainer.comm.host_memory import HostCopy, to_device
from trainer.comm.protocol import Comm
from trainer.config.recovery import Health
from trainer.run.layout import RANK_STATS_FILE
from trainer.safe_io.plain import append_line
from trainer.telemetry.metrics import drop_after
from trainer.telemetry.records import Gaps, Lap
from trainer.text.wording import many
from trainer.world.condemned import condemn

log = logging.getLogger("clipship")

CONDEMNED_EXCHANGES = 20
"""Exchanges in a row in which a rank was slow, from which on its node is condemned: 100 steps."""
EVERY = 5
"""Number of steps between two exchanges."""
_TIMES = 2
"""Number of exchanges in a row that make a rank slow; a single one may be a late memory page."""
_NOTICEABLE_S = 0.01
COLUMNS = (
    "data_s",
    "compute_s",
    "comm_s",
    "checkpoint_s",
    "cpu_share",
    "rss_bytes",
    "gpu_share",
    "gpu_bytes",
    "gpu_joules",
)


RankFigures = Callable[[], tuple[dict[str, Any], dict[str, float], list[list[float]]]]
"""Function that gives the figures for the record, the totals of all ranks, and each rank's values."""


class RankStats:
    """Gathers the figures of all ranks at each record; every rank has one, for one start of a run."""

    def __init__(self, comm: Comm, folder: Path, steps_done: int = 0) -> None:
        """`steps_done` is the last step to keep in the folder's file; later steps come again."""
        self._comm = comm
        self._machine = Machine(comm.device)
        self._all = Lap()
        self._sent = 0
        self._slowest: Counter[int] = Counter()
        self._peaks: dict[str, float] = {}
        self._gaps = Gaps()
        self._path = folder / RANK_STATS_FILE if comm.world.rank == 0 else None
        if self._path is not None:
            drop_after(self._path, steps_done)

    def gather(
        self, step: int, lap: Lap, counts: Mapping[str, float], values: Sequence[Tensor] = ()
    ) -> RankFigures:
        """Collective: starts to compare this rank's times since the last call with the others'.

        `counts` are this rank's, by names that are the same on all ranks, and are summed over them; `values`
        are scalars on the device, which travel along. The returned function waits for the figures and writes
        them; call it once.
        """
        self._all += lap
        times = lap.per_step()
        sent = self._comm.pop_bytes()
        self._sent += sent
        row = [*(times[part] for part in COLUMNS[:4]), *self._machine.sample(), *counts.values()]
        numbers = to_device(torch.tensor(row, dtype=torch.float64), self._comm.device)
        own = torch.cat([numbers, *(value.reshape(1).double() for value in values)])
        table = HostCopy([self._comm.all_gather(own[None])])
        self._comm.pop_bytes()  # leaves out the bytes of this all_gather itself
        about = {
            "comm_bytes": round(sent / max(1, lap.steps)),
            "comm_share": round(times["comm_s"] / max(times["step_s"], 1e-9), 4),
        }

        def read() -> tuple[dict[str, Any], dict[str, float], list[list[float]]]:
            rows: list[list[float]] = table.get()[0].tolist()
            figures = self._record(step, lap.steps, [row[: len(COLUMNS)] for row in rows])
            totals = {name: sum(row[at] for row in rows) for at, name in enumerate(counts, len(COLUMNS))}
            return {**about, **figures}, totals, [row[len(COLUMNS) + len(counts) :] for row in rows]

        return read

    def _record(self, step: int, steps: int, table: Sequence[Sequence[float]]) -> dict[str, float]:
        """Writes one table and returns what it says, which `summary` counts for that many steps."""
        self._write(step, table)
        figures = summarize(table)
        self._slowest[int(figures["slowest_rank"])] += steps
        self._peaks = {
            key: max(figures.get(key, 0.0), self._peaks.get(key, 0.0))
            for key in ("rss_bytes_max", "gpu_bytes_max")
        }
        return figures

    def summary(self) -> dict[str, float]:
        """Returns the figures of this start for result.json. Not collective.

        They are: how this rank's time was spent, the bytes that it sent per step, the rank that was slowest
        in most steps and its share of them, and the most memory that any rank took.
        """
        times = self._all.per_step()
        shares = {
            f"{part}_share": round(times[f"{part}_s"] / max(times["step_s"], 1e-9), 4)
            for part in ("data", "comm", "checkpoint")
        }
        if not self._slowest:
            return shares
        ((slowest, steps),) = self._slowest.most_common(1)
        return {
            **shares,
            "step_s": round(times["step_s"], 6),
            "comm_bytes": round(self._sent / max(1, self._all.steps)),
            "slowest_rank": slowest,
            "slowest_share": round(steps / max(1, self._all.steps), 4),
            **{key: value for key, value in self._peaks.items() if value},
        }

    def _write(self, step: int, table: Sequence[Sequence[float]]) -> None:
        if self._path is None:
            return
        columns = {name: [round(row[at], 6) for row in table] for at, name in enumerate(COLUMNS)}
        line = {"step": step, "generation": self._comm.world.generation, **columns}
        with self._gaps.tolerated_in(RANK_STATS_FILE):
            append_line(self._path, json.dumps(line))


def summarize(table: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the rank with the most work of its own, by how much, and the worst value of each column.

    `table` has one row of `COLUMNS` per rank. Own work is data and compute; it is compared with the median
    of the other ranks, so that two ranks can be compared too. `straggler_s` is by how many seconds it is
    longer, for which the others wait; `data_s_median` is the others' median wait for data. `gpu_joules` is
    the energy of all GPUs since the last table.
    """
    own = [row[0] + row[1] for row in table]
    slowest = max(range(len(own)), key=own.__getitem__)
    others = own[:slowest] + own[slowest + 1 :]
    data_of_others = [row[0] for at, row in enumerate(table) if at != slowest or len(table) == 1]
    columns = dict(zip(COLUMNS, zip(*table, strict=True), strict=True))
    values = {
        "slowest_rank": slowest,
        "slowest_by": round(own[slowest] / max(statistics.median(others), 1e-9), 3) if others else 1.0,
        "straggler_s": max(0.0, own[slowest] - statistics.median(others)) if others else 0.0,
        "data_s_median": statistics.median(data_of_others),
        "data_s_max": max(columns["data_s"]),
        "compute_s_max": max(columns["compute_s"]),
        "comm_s_min": min(columns["comm_s"]),
        "cpu_share_max": max(columns["cpu_share"]),
        "rss_bytes_max": max(columns["rss_bytes"]),
    }
    if max(columns["gpu_bytes"]):
        values |= {"gpu_bytes_max": max(columns["gpu_bytes"]), "gpu_share_min": min(columns["gpu_share"])}
    if joules := sum(columns["gpu_joules"]):
        values["gpu_joules"] = joules
    return values


class Machine:
    """Measures the resources that this rank's process uses."""

    def __init__(self, device: torch.device) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self._monitor, uuid = accelerator_of(device).monitor, uuid_of(device)
        self._gpu = None if self._monitor is None or uuid is None else self._monitor.gpu_handle(uuid)
        self._energy_mj = self._counted_mj()

    def sample(self) -> tuple[float, float, float, float, float]:
        """Returns cores in use and peak resident bytes; of the GPU its busy share, bytes in use, and joules.

        Cores are averaged since the last call, and joules are those since the last call; 0 where the GPU
        does not count them. Ranks that share a GPU each get all of its joules.
        """
        cpu, wall = time.process_time(), time.perf_counter()
        share = (cpu - self._cpu) / max(wall - self._wall, 1e-9)
        self._cpu, self._wall = cpu, wall
        before, self._energy_mj = self._energy_mj, self._counted_mj()
        joules = (self._energy_mj - before) / 1000 if self._energy_mj and before else 0.0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        return share, peak, *self._gpu_sample(), max(0.0, joules)

    def _counted_mj(self) -> int:
        if self._monitor is None or self._gpu is None:
            return 0
        return self._monitor.counted_mj(self._gpu)

    def _gpu_sample(self) -> tuple[float, float]:
        if self._monitor is None or self._gpu is None:
            return 0.0, 0.0
        return self._monitor.use_of(self._gpu)


class StragglerDetector:
    """Detects slow ranks; every rank has one, and rank 0 logs.

    Its numbers travel with the consensus of each step.
    """

    def __init__(self, settings: Health, comm: Comm) -> None:
        """Collective, since it gathers the names of the nodes."""
        self._comm = comm
        enabled = settings.slow_rank_factor is not None and comm.world.size > 1
        self._slow_ranks = (
            SlowRanks(comm.world.rank, comm.world.size, settings.slow_rank_factor or 0.0) if enabled else None
        )
        self._nodes = comm.all_gather_object(comm.world.node)
        self._on_gpu = on_accelerator(comm.device)
        self._comm_s, self._own_s, self._steps = 0.0, 0.0, 0
        self.slow_ranks: Counter[int] = Counter()
        """Number of times that each rank was named since the start."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures the block, which is one step with its data."""
        if self._steps == 0 or not self._on_gpu:
            self._collect()
        begin = time.perf_counter()
        yield
        self._own_s += time.perf_counter() - begin
        self._steps += 1
        # A GPU's time is known only once its work is done, so it is asked for seldom.
        if self._steps == EVERY or not self._on_gpu:
            self._own_s -= self._collect()
        if self._steps == EVERY:
            if self._slow_ranks is not None:
                self._slow_ranks.record(self._own_s / EVERY)
            self._steps, self._own_s = 0, 0.0

    def pop_comm_s(self) -> float:
        """Returns the seconds of communication since the last call; call it between steps."""
        self._settle()
        comm_s, self._comm_s = self._comm_s, 0.0
        return comm_s

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Marks a block between steps that belongs to no step.

        Its communication is left out; that of the steps before it still counts.
        """
        self._settle()
        yield
        self._comm.pop_seconds()

    def _settle(self) -> None:
        collected = self._collect()
        if self._on_gpu and self._steps:  # these steps count as this rank's own work when the window ends
            self._own_s -= collected

    def contribution(self) -> list[float]:
        """Returns the numbers that this rank sends before a step; mostly none."""
        return (
            self._slow_ranks.contribution() if self._slow_ranks is not None and self._slow_ranks.due else []
        )

    def receive(self, own_times: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yields an event for each slow rank, from the numbers of all ranks."""
        for slow in self._slow_ranks.receive(own_times) if own_times and self._slow_ranks else []:
            node = self._nodes[slow.rank]
            self.slow_ranks[slow.rank] += 1
            if self._comm.world.rank == 0:
                if slow.exchanges == CONDEMNED_EXCHANGES:
                    steps = slow.exchanges * EVERY
                    why = f"rank {slow.rank} there took {slow.own_s / slow.median_s:.1f} times the median"
                    condemn(node, f"{why} for {many(steps, 'step')}", os.environ)
                text = (
                    "%-12s rank %d on %s works %.3f s per step, the median of all ranks is %.3f s: "
                    "all ranks wait for it"
                )
                log.warning(text, "slow rank", slow.rank, node, slow.own_s, slow.median_s)
            yield {"slow_rank": slow.rank, "node": node, "own_s": slow.own_s, "median_s": slow.median_s}

    def _collect(self) -> float:
        seconds = self._comm.pop_seconds()
        self._comm_s += seconds
        return seconds


@dataclass(frozen=True)
class SlowRank:
    """A slow rank, the seconds per step of its own work, and the ranks' median."""

    rank: int
    own_s: float
    median_s: float
    exchanges: int
    """Number of exchanges in a row in which it was slow."""


class SlowRanks:
    """Finds slow ranks from the times of all ranks' own work.

    `contribution` returns what this rank sends; `receive` takes the sum over all ranks.
    """

    def __init__(self, rank: int, world_size: int, factor: float) -> None:
        self._rank, self._size, self._factor = rank, world_size, factor
        self._own_s: float | None = None
        self._slow_times = [0] * world_size

    def record(self, own_s: float) -> None:
        """Records a step's own work, in seconds, averaged over the last EVERY steps."""
        self._own_s = own_s

    @property
    def due(self) -> bool:
        """True if an exchange is due. All ranks count the same steps, so they agree."""
        return self._own_s is not None

    def contribution(self) -> list[float]:
        """Returns this rank's mean at its index and zeros elsewhere; the sum over the ranks holds all.

        Starts a new mean.
        """
        own_times = [0.0] * self._size
        own_times[self._rank], self._own_s = self._own_s or 0.0, None
        return own_times

    def receive(self, own_times: Sequence[float]) -> list[SlowRank]:
        """Returns the ranks that have just become slow, or still are after as many exchanges again."""
        median = statistics.median_low(own_times)  # the faster one of two ranks
        for rank, own in enumerate(own_times):
            slow = own > self._factor * median and own - median > _NOTICEABLE_S
            self._slow_times[rank] = self._slow_times[rank] + 1 if slow else 0
        return [
            SlowRank(rank, own_times[rank], median, times)
            for rank, times in enumerate(self._slow_times)
            if times and times % _TIMES == 0
        ]
