"""Watches the ranks while they train: who spent how long on what, who is slow, what their machines do. Every rank takes part.

Each look costs one small all_gather every LOOK_STEPS steps, or at every record where those are closer.
"""

import json
import logging
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from trainer.comm.protocol import Comm
from trainer.telemetry import Clock, Lap, forget_after

log = logging.getLogger("clipship")

LOOK_STEPS = 10
SLOW = 1.5
"""A rank is slow when its own work takes so many times the median rank's; what it waits for others does not count."""
SLOW_LOOKS = 2
"""In so many looks, one after the other: 20 steps."""
RANKS_FILE = "ranks.jsonl"
_COLUMNS = ("data_s", "compute_s", "comm_s", "checkpoint_s", "cpu_share", "rss_bytes", "gpu_share", "gpu_bytes")


@dataclass(frozen=True)
class Seen:
    """What the ranks' laps say together. Times are seconds of one step."""

    slowest_rank: int
    slowest_by: float
    """Its own work over the median of the other ranks'."""
    slowest_in: str
    """What it spends more on than they do: "data" or "compute"."""
    values: Mapping[str, float]
    """For the record: the worst rank of each column."""


class Watch:
    """One per rank, for a start of a run. Its methods are collective where they say so."""

    def __init__(self, comm: Comm, folder: Path, steps_done: int = 0) -> None:
        """Collective. `steps_done`: later steps in the folder's file come again."""
        self.clock = Clock()
        self._comm = comm
        self._machine = Machine(comm.device)
        self._nodes: list[str] = comm.all_gather_object(comm.world.node)
        self._lap, self._bytes = Lap(), 0
        self._slow_looks = 0
        self._flagged: set[int] = set()
        self._seen: Seen | None = None
        self._all, self._slow = Lap(), dict[int, float]()
        self._file: IO[str] | None = None
        if comm.world.rank == 0:
            forget_after(folder / RANKS_FILE, steps_done)
            self._file = open(folder / RANKS_FILE, "a")  # noqa: SIM115  # until close

    def look(self, step: int) -> None:
        """Collective: compare the ranks since the last look; a rank that stays slow is named in the log."""
        lap = self.clock.pop(self._comm.pop_seconds())
        self._all += lap
        self._lap, self._bytes = self._lap + lap, self._bytes + self._comm.pop_bytes()
        row = [*(lap.per_step()[part] for part in _COLUMNS[:4]), *self._machine.sample()]
        table = self._comm.all_gather(torch.tensor([row], dtype=torch.float64, device=self._comm.device)).tolist()
        self._seen = seen(table)
        self._note_slow(self._seen, step)
        if self._file is not None:
            columns = {name: [round(values[at], 6) for values in table] for at, name in enumerate(_COLUMNS)}
            self._file.write(json.dumps({"step": step, **columns}) + "\n")
            self._file.flush()

    def pop(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Not collective. This rank's seconds of one step by part since the last call, and what the last look saw of all ranks."""
        times, lap = self._lap.per_step(), self._lap
        sent = self._bytes / max(1, lap.steps)
        self._lap, self._bytes = Lap(), 0
        assert self._seen is not None  # a record comes after a look
        about = {"slowest_rank": self._seen.slowest_rank, "slowest_by": round(self._seen.slowest_by, 3), **self._seen.values}
        return times, {"comm_bytes": round(sent), "comm_share": round(times["comm_s"] / times["step_s"], 4), **about}

    def summary(self) -> dict[str, Any]:
        """Not collective. For result.json: this rank's shares of the time, and the ranks that stayed slow with their worst factor."""
        times = self._all.per_step()
        shares = {f"{part}_share": round(times[f"{part}_s"] / max(times["step_s"], 1e-9), 4) for part in ("data", "comm", "checkpoint")}
        return {**shares, "slow_ranks": {str(rank): factor for rank, factor in self._slow.items()}}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _note_slow(self, found: Seen, step: int) -> None:
        rank = found.slowest_rank
        self._slow_looks = self._slow_looks + 1 if found.slowest_by > SLOW else 0
        if self._slow_looks < SLOW_LOOKS:
            return
        self._slow[rank] = max(self._slow.get(rank, 0.0), round(found.slowest_by, 2))
        if rank not in self._flagged:
            self._flagged.add(rank)
            log.warning(
                "%-12s rank %d on %s takes %.1f times as long as the median rank for its own work (%s); all wait for it. Seen at step %d",
                "slow", rank, self._nodes[rank], found.slowest_by, found.slowest_in, step,
            )  # fmt: skip


def seen(table: Sequence[Sequence[float]]) -> Seen:
    """From one row of `_COLUMNS` a rank. The median is that of the other ranks, so that two ranks can be compared too."""
    own = [row[0] + row[1] for row in table]
    slowest = max(range(len(own)), key=own.__getitem__)
    others = own[:slowest] + own[slowest + 1 :]
    factor = own[slowest] / max(statistics.median(others), 1e-9) if others else 1.0
    columns = dict(zip(_COLUMNS, zip(*table, strict=True), strict=True))
    values = {
        "data_s_max": max(columns["data_s"]),
        "compute_s_max": max(columns["compute_s"]),
        "comm_s_min": min(columns["comm_s"]),
        "rss_bytes_max": max(columns["rss_bytes"]),
        "cpu_share_max": max(columns["cpu_share"]),
    }
    if max(columns["gpu_bytes"]):
        values |= {"gpu_bytes_max": max(columns["gpu_bytes"]), "gpu_share_min": min(columns["gpu_share"])}
    return Seen(slowest, factor, _excess(table, slowest), {name: round(value, 6) for name, value in values.items()})


def _excess(table: Sequence[Sequence[float]], slowest: int) -> str:
    others = [row for rank, row in enumerate(table) if rank != slowest] or [table[slowest]]
    excess = [table[slowest][part] - statistics.median(row[part] for row in others) for part in (0, 1)]
    return "data" if excess[0] > excess[1] else "compute"


class Machine:
    """What this rank's process takes of its machine."""

    def __init__(self, device: torch.device) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self._gpu = _nvml_handle(device)

    def sample(self) -> tuple[float, float, float, float]:
        """Cores in use since the last call, resident bytes at their highest, share of time that the GPU computed, its bytes in use."""
        cpu, wall = time.process_time(), time.perf_counter()
        share = (cpu - self._cpu) / max(wall - self._wall, 1e-9)
        self._cpu, self._wall = cpu, wall
        return share, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0, *self._gpu_sample()

    def _gpu_sample(self) -> tuple[float, float]:
        if self._gpu is None:
            return 0.0, 0.0
        import pynvml

        with suppress(pynvml.NVMLError):
            used = pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used
            return pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu / 100, float(used)
        return 0.0, 0.0


def _nvml_handle(device: torch.device) -> Any:
    """Of the rank's GPU, or None without one."""
    if device.type != "cuda":
        return None
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
    return None
