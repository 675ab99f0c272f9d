"""Our loader against open_clip_train's, on shards behind a slow web server: `make bench-data-remote`.

The server waits before the first byte and limits the rate of a connection, as object storage does
(`benchmarks/slow_store.py`). Both sides read the same addresses, take turns and are pinned to one core, with
two loader processes to two. Ours has its index; theirs needs none.

Then it measures the time from opening 102 shards to the first batch, without their index and with it, the
batches that come within a second while one block is late by 4 s, and an epoch of ours on a slow local disk
from a cold page cache (`benchmarks/slow_disk.py`; left out with a word where the kernel cannot). The last
line on stdout is JSON.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.data import SAMPLES, measured, run_alone, shards, their_python
from benchmarks.slow_disk import CannotSlowDown, reads_in, slow_disk

WAITS_MS = (5, 30, 100)
TWO_MS = 30
"""Wait at which two loader processes are measured, too, on two cores."""
MB_PER_S = 100
EPOCHS = 3
STALL_S = 4
OURS, START, STALL, SLOW = (
    [sys.executable, "-m", f"benchmarks.{name}"]
    for name in ("data_remote_ours", "data_remote_start", "data_remote_stall", "slow_disk")
)
COPIES = 17
"""Addresses of each of six shards where a start is measured: those of 102."""


@contextmanager
def store(folder: Path, wait_ms: int) -> Iterator[str]:
    """The address of a server of the folder's files."""
    command = [sys.executable, "-m", "benchmarks.slow_store", str(folder), str(wait_ms), str(MB_PER_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def compare(
    pattern: str, wait_ms: int, python: Path, turns: int, cores: set[int], workers: int = 1
) -> dict[str, list[float]]:
    """Returns the figures of each turn, by name: both sides' images per second, and more of ours."""
    folder, names = Path(pattern).parent, Path(pattern).name
    theirs = [str(python), str(Path(__file__).with_name("data_theirs.py"))]
    found: dict[str, list[float]] = {}
    with store(folder, wait_ms) as address:
        for turn in range(turns):
            how = [str(EPOCHS), str(workers)]
            ours = json.loads(run_alone([*OURS, f"{address}/{names}", *how], cores))
            local = json.loads(run_alone([*OURS, pattern, *how], cores))
            of_theirs = [f"{address}/{names}", str(SAMPLES), "8", str(workers)]
            rate = measured([*theirs, *of_theirs], cores, "wall")
            of_turn = {
                **ours,
                "theirs": rate,
                "local": local["rate"],
                "local_us_of_processor": local["us_of_processor"],
            }
            for name, value in of_turn.items():
                found.setdefault(name, []).append(value)
            print(
                f"{wait_ms} ms, turn {turn + 1}: ours {ours['rate']:.0f}, local {local['rate']:.0f}, "
                f"theirs {rate:.0f} img/s; first batch after {ours['first_batch_s']:.2f} s",
                file=sys.stderr,
            )
    return found


def starts(pattern: str, turns: int, cores: set[int]) -> dict[str, float]:
    """Returns the seconds to the first batch of many shards, without their index and with it."""
    folder, names = Path(pattern).parent, Path(pattern).name
    found: dict[str, list[float]] = {"start_s": [], "start_indexed_s": []}
    with store(folder, TWO_MS) as address:
        for _ in range(turns):
            with TemporaryDirectory() as index:
                for name in found:
                    words = [f"{address}/{names}", str(COPIES), index]
                    found[name].append(float(run_alone([*START, *words], cores)))
    return {name: statistics.median(values) for name, values in found.items()}


def in_a_stall(pattern: str, turns: int) -> float:
    """Returns the batches that come within a second while a block is late."""
    folder, names = Path(pattern).parent, Path(pattern).name
    cores = os.sched_getaffinity(0)
    with store(folder, TWO_MS) as address:
        words = [f"{address}/{names}", str(STALL_S)]
        return statistics.median(float(run_alone([*STALL, *words], cores)) for _ in range(turns))


def on_a_slow_disk(pattern: str, turns: int, cores: set[int]) -> dict[str, float]:
    """Returns samples per second and reads of an epoch on a slow disk, if it can be slow."""
    rates, reads = [], []
    try:
        with slow_disk(Path(pattern).parent) as group:
            for _ in range(turns):
                before = reads_in(group)
                rates.append(float(run_alone([*SLOW, pattern, str(group)], cores)))
                reads.append(reads_in(group) - before)
    except CannotSlowDown as why:
        print(f"no slow disk: {why}", file=sys.stderr)
        return {}
    return {"slow_disk": round(statistics.median(rates)), "slow_disk_reads": statistics.median(reads)}


@click.command(help=__doc__)
@click.option("--turns", default=3, show_default=True, help="Times that each side runs.")
@click.option("--core", default=0, show_default=True, help="The core that both sides are pinned to.")
@click.option(
    "--cache", type=click.Path(path_type=Path), default=Path("~/.cache/clipship/bench"), show_default=True
)
def main(turns: int, core: int, cache: Path) -> None:
    folder = cache.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    pattern, python = shards(folder, 512), their_python(folder)
    report: dict[str, float] = {}
    worst: dict[str, float] = {}
    for wait_ms in WAITS_MS:
        figures = compare(pattern, wait_ms, python, turns, {core})
        medians = {name: statistics.median(values) for name, values in figures.items()}
        report[f"ours_{wait_ms}ms"] = round(medians["rate"])
        report[f"theirs_{wait_ms}ms"] = round(medians["theirs"])
        report[f"ratio_{wait_ms}ms"] = round(medians["rate"] / medians["theirs"], 2)
        report[f"local_share_{wait_ms}ms"] = round(medians["rate"] / medians["local"], 3)
        report[f"us_of_processor_{wait_ms}ms"] = round(medians["us_of_processor"])
        report[f"local_us_of_processor_{wait_ms}ms"] = round(medians["local_us_of_processor"])
        for name in ("requests_per_sample", "bytes_share", "first_batch_s"):
            worst[name] = max(worst.get(name, 0.0), medians[name])
    if len(both := sorted(os.sched_getaffinity(0))[:2]) == 2:
        two = compare(pattern, TWO_MS, python, turns, set(both), workers=2)
        medians = {name: statistics.median(values) for name, values in two.items()}
        report[f"ratio_{TWO_MS}ms_two"] = round(medians["rate"] / medians["theirs"], 2)
        report[f"local_share_{TWO_MS}ms_two"] = round(medians["rate"] / medians["local"], 3)
    worst |= starts(pattern, turns, {core})
    report["batches_in_a_stall"] = in_a_stall(pattern, turns)
    report |= on_a_slow_disk(pattern, turns, {core})
    print(json.dumps({**report, **{name: round(value, 4) for name, value in worst.items()}}))


if __name__ == "__main__":
    main()
