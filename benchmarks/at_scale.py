"""Bytes and seconds of what a large run writes, gathers and restores.

The trainer's own code works on made-up figures of so many ranks; sizes of logs are those of a real run of two
ranks, counted up.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.jobs import tiny_job
from trainer.checkpoint.memory_restore import choose
from trainer.comm.objects import decode, encode
from trainer.config.fabric_rates import FABRIC_RATES
from trainer.config.loader import dump_job
from trainer.preflight.findings import find_problems
from trainer.preflight.measurements import Measurements, Needs, Timing
from trainer.run.layout import ENVIRONMENT_FILE, GOODPUT_FILE, LOGS, METRICS_FILE, RANK_STATS_FILE, rank_log
from trainer.telemetry.rank_stats import COLUMNS, RankStats, summarize
from trainer.train.same_environment import differences, facts

RECORDS = 20
RECORDS_PER_HOUR = 360
"""Records of a run with steps of 1 s and `logging.every_steps = 10`, its default."""
STATE_BYTES = 12 * 151_277_313
"""Weights and optimizer state of ViT-B-32 in float32."""
FABRIC = "NDR"
_SHORT, _LONG = 10, 30
"""Steps of the two real runs whose files are compared, a record for each step."""


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


@dataclass(frozen=True)
class Logged:
    """Bytes of the other files of a run of so many ranks."""

    ranks: int
    log_bytes_at_start: int
    """Bytes of all ranks' logs before the first step, and again after each restart."""
    log_bytes_per_hour: int
    """Bytes that all ranks' logs grow by; only rank 0's does."""
    metrics_bytes_per_hour: int
    """Bytes that metrics.jsonl and goodput.jsonl grow by."""
    environment_bytes: int

    def line(self) -> str:
        """Returns the figures as a line for people."""
        return (
            f"{self.ranks:>7} ranks: logs {self.log_bytes_at_start / 1e6:.1f} MB at a start or a restart, "
            f"then {self.log_bytes_per_hour / 1e3:.0f} kB an hour; metrics.jsonl and goodput.jsonl "
            f"{self.metrics_bytes_per_hour / 1e3:.0f} kB an hour; environment.json "
            f"{self.environment_bytes / 1e6:.1f} MB"
        )


@dataclass(frozen=True)
class Started:
    """Messages that the ranks of a generation exchange before their first step, on one rank of so many."""

    ranks: int
    facts_bytes: int
    """Bytes of the facts that must be equal on all ranks, as each rank receives them."""
    facts_s: float
    """Seconds in which a rank reads and compares them."""
    offers_bytes: int
    """Bytes of the steps that all nodes have in memory, as each rank receives them."""
    offers_s: float
    """Seconds in which a rank reads them and chooses one."""
    spread_s: float
    """Model: seconds in which the state reaches all nodes, in a chain or tree that passes on what it has."""
    spread_peers: int
    """Model: most peers to which one rank sends the state, in a binomial tree as gloo has it."""

    def line(self) -> str:
        """Returns the figures as a line for people."""
        return (
            f"{self.ranks:>7} ranks start: each compares {self.facts_bytes / 1e6:.0f} MB of facts in "
            f"{self.facts_s:.2f} s, and chooses among {self.offers_bytes / 1e6:.1f} MB of steps in memory in "
            f"{self.offers_s:.2f} s; {STATE_BYTES / 1e9:.1f} GB of state reach all nodes in "
            f"{self.spread_s:.2f} s over {FABRIC}, each rank sends them to {self.spread_peers} others or "
            "fewer (model)"
        )


def written_at_scale(nodes: int, each: int) -> Written:
    """Measures what rank 0 writes for so many nodes with `each` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        stats_bytes, stats_s = _rank_stats(nodes * each, Path(folder))
    measurements = [_measured(rank, each, random.Random(rank)) for rank in range(nodes * each)]
    size = len(json.dumps([asdict(one) for one in measurements]))
    findings, seconds = _timed(lambda: find_problems(measurements, Needs(2**28, 4096, 2**30, 4)))
    return Written(nodes * each, stats_bytes, stats_s, seconds, size, len(findings))


def logged_at_scale(ranks: int) -> Logged:
    """Counts up the files of a real run of two ranks, of which rank 1 is like all but the first."""
    short, long = (_files_of_a_run(steps) for steps in (_SHORT, _LONG))
    grown = {name: (long[name] - short[name]) / (_LONG - _SHORT) for name in short}
    at_start = {name: short[name] - _SHORT * grown[name] for name in short}
    first, other = rank_log(0), rank_log(1)
    return Logged(
        ranks,
        round(at_start[first] + (ranks - 1) * at_start[other]),
        round(RECORDS_PER_HOUR * (grown[first] + (ranks - 1) * grown[other])),
        round(RECORDS_PER_HOUR * (grown[METRICS_FILE] + grown[GOODPUT_FILE])),
        round(ranks * short[ENVIRONMENT_FILE] / 2),
    )


def started_at_scale(nodes: int, each: int) -> Started:
    """Measures what each rank reads at a start of so many nodes with `each` ranks, and models the spread."""
    ranks = nodes * each
    told, facts_s = _read(ranks, ["node-0", _facts(), []], lambda rows: list(differences(rows)))
    offers = [
        [(step, "0" * 64, step % 2) for step in (811, 812)] if not rank % each else []
        for rank in range(ranks)
    ]
    messages = [encode(offer) for offer in offers]

    def choose_one() -> None:
        everyone = [decode(message) for message in messages]
        choose([[(step, digest) for step, digest, _ in offer] for offer in everyone], 0)

    _, offers_s = _timed(choose_one)
    fabric = FABRIC_RATES[FABRIC]
    return Started(
        ranks,
        told,
        facts_s,
        ranks * max(len(message) for message in messages),
        offers_s,
        STATE_BYTES / (fabric.node_gb_s * 1e9) + nodes * fabric.latency_us / 1e6,
        math.ceil(math.log2(ranks)),
    )


def _read(ranks: int, message: Any, compare: Callable[[list[tuple[str, Any]]], Any]) -> tuple[int, float]:
    """Returns the bytes of so many messages and the seconds in which one rank reads and compares them."""
    sent = encode(message)

    def read() -> None:
        compare([(node, its) for node, its, _ in (decode(sent) for _ in range(ranks))])

    return ranks * len(sent), _timed(read)[1]


def _facts() -> dict[str, str]:
    comm: Any = SimpleNamespace(
        device=torch.device("cpu"), name="torch (gloo)", versions=lambda: {"gloo": torch.__version__}
    )
    return facts(tiny_job(), comm)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def _files_of_a_run(steps: int) -> dict[str, int]:
    """Returns the bytes of the files of a real run of two ranks, by name."""
    with tempfile.TemporaryDirectory(prefix="clipship-at-scale-") as folder:
        job = tiny_job(name="small", optim={"steps": steps}, logging={"runs": folder, "every_steps": 1})
        path = Path(folder, "job.toml")
        path.write_text(dump_job(job))
        subprocess.run(
            [sys.executable, "-P", "-m", "trainer.cli", "run", str(path), "--nproc", "2"],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        run = Path(folder, "small")
        logs = {path.name: path.stat().st_size for path in (run / LOGS).iterdir()}
        names = (METRICS_FILE, GOODPUT_FILE, ENVIRONMENT_FILE)
        return {**logs, **{name: (run / name).stat().st_size for name in names}}


def _rank_stats(ranks: int, folder: Path) -> tuple[int, float]:
    comm: Any = SimpleNamespace(world=SimpleNamespace(rank=0, generation=1), device=torch.device("cpu"))
    stats = RankStats(comm, folder)
    draw = random.Random(0)
    of_machine = {"rss_bytes": 6e9, "gpu_share": 0.9, "gpu_bytes": 4e10, "gpu_joules": 7e3}
    table = [[of_machine.get(name, 0.4) * draw.gauss(1.0, 0.02) for name in COLUMNS] for _ in range(ranks)]

    def write() -> None:
        for record in range(RECORDS):
            summarize(table)
            stats._write(10 * record, table)

    _, seconds = _timed(write)
    return (folder / RANK_STATS_FILE).stat().st_size * RECORDS_PER_HOUR // RECORDS, seconds / RECORDS


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
