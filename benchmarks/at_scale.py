"""Bytes and seconds of what a large run writes, by the trainer's own code on made-up figures of its ranks."""

import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trainer.preflight.findings import Needs, find_problems
from trainer.preflight.measurements import Measurements, Timing
from trainer.run.layout import RANK_STATS_FILE
from trainer.telemetry.rank_stats import RankStats, summarize

RECORDS = 20
RECORDS_PER_HOUR = 360
"""Records of a run with steps of 1 s and `logging.every_steps = 10`, its default."""


@dataclass(frozen=True)
class Written:
    """Sizes and times of what rank 0 writes and compares in a run of so many ranks."""

    ranks: int
    rank_stats_bytes_per_hour: int
    rank_stats_s: float
    """Seconds of one record, on rank 0."""
    preflight_s: float
    """Seconds in which rank 0 compares the measurements of all ranks, two of which are odd."""
    preflight_bytes: int
    """Bytes of these measurements as rank 0 receives them."""
    findings: int

    def line(self) -> str:
        """Returns the figures as a line for people."""
        megabytes = self.rank_stats_bytes_per_hour / 1e6
        return (
            f"{self.ranks:>7} ranks: ranks.jsonl {megabytes:.0f} MB an hour with a "
            f"record every 10 s, {self.rank_stats_s * 1e3:.0f} ms each; preflight compares "
            f"{self.preflight_bytes / 1e6:.1f} MB in {self.preflight_s:.2f} s: {self.findings} findings"
        )


def written_at_scale(nodes: int, each: int) -> Written:
    """Measures it for so many nodes with `each` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        stats_bytes, stats_s = _rank_stats(nodes * each, Path(folder))
    measurements = [_measured(rank, each, random.Random(rank)) for rank in range(nodes * each)]
    size = len(json.dumps([asdict(one) for one in measurements]))
    began = time.perf_counter()
    findings = find_problems(measurements, Needs(2**28, 4096, 2**30, 4))
    seconds = time.perf_counter() - began
    return Written(nodes * each, stats_bytes, stats_s, seconds, size, len(findings))


def _rank_stats(ranks: int, folder: Path) -> tuple[int, float]:
    comm: Any = SimpleNamespace(world=SimpleNamespace(rank=0, generation=1), device=torch.device("cpu"))
    stats = RankStats(comm, folder)
    draw = random.Random(0)
    table = [
        [draw.gauss(0.4, 0.01) for _ in range(5)] + [6e9 + draw.random(), 0.9, 4e10] for _ in range(ranks)
    ]
    began = time.perf_counter()
    for record in range(RECORDS):
        summarize(table)
        stats._write(10 * record, table)
    seconds = (time.perf_counter() - began) / RECORDS
    return (folder / RANK_STATS_FILE).stat().st_size * RECORDS_PER_HOUR // RECORDS, seconds


def _measured(rank: int, each: int, draw: random.Random) -> Measurements:
    """Measurements of a healthy rank; rank 77's network is slow, and rank 99's clock is wrong."""
    slow = 10.0 if rank == 77 else 1.0
    timings = {
        name: Timing(2**24, slow * draw.gauss(0.01, 0.0002))
        for name in ("all_reduce", "all_gather", "latency", "host to device")
    }
    pairs = {f"node-{draw.randrange(1250)}": Timing(2**22, slow * draw.gauss(0.001, 0.00002))}
    clock = 1e9 + draw.random() / 1e3 + (60.0 if rank == 99 else 0.0)
    return Measurements(
        rank, rank % each, f"node-{rank // each}", 2**36, 2**16, 2**42, clock, timings=timings, pairs=pairs
    )
