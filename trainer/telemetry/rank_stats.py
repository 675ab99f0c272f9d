"""Figures of each rank at every record: seconds per step by part, and the use of its machine. Collective.

The table goes to `ranks.jsonl`, its worst rows into the record. `trainer.telemetry.stragglers` names a rank
that stays slow.
"""

import json
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.comm.accelerator import accelerator_of, uuid_of
from trainer.comm.host_memory import HostCopy, to_device
from trainer.comm.protocol import Comm
from trainer.run.layout import RANK_STATS_FILE
from trainer.safe_io.plain import append_line
from trainer.telemetry.metrics import drop_after
from trainer.telemetry.records import Gaps, Lap

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
