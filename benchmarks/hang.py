"""Limits learned from steps: false alarms, seconds until a stopped rank is named: `make bench-hang`.

It runs 100,000 steps of each kind of step, on a simulated clock and with pauses for garbage
collection, slow storage, heat, checkpoints and evaluations. The last kinds are recorded: seconds of data and
of work of each rank at each step of real runs, in `benchmarks/durations/`, which `--record FOLDER` makes of a
run folder whose job has `logging.every_steps = 1`. The last line on stdout is JSON; `beyond_15_s` in it has
the kinds whose steps are too long for a hang to be named in 15 s, and `longer_without_alarm_s` says by how
much any of the pauses could have been longer without a false alarm.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.hang_world import Outcome, Work, simulate
from trainer.run.layout import RANK_STATS_FILE
from trainer.supervise.rank.rank_report import STOPPED_S
from trainer.supervise.supervisor import TICK_S
from trainer.world.learned_limits import FLOOR_S, P99_FACTOR, P999_FACTOR

RECORDED = Path(__file__).with_name("durations")
RANKS = 4
STOPS = 200
NAMED_S = 15.0
"""Seconds within which a rank that hangs is to be named."""


def steady(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
    return 0.001, draw.gauss(0.35, 0.007)


def fast(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
    return 0.0002, draw.gammavariate(4, 0.005)


def lognormal(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
    return 0.01, draw.lognormvariate(0, 0.3)


def long_tail(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
    """The longest of 400,000 takes about ten times the usual."""
    return 0.01, 0.3 * draw.paretovariate(6)


def two_kinds(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
    """Samples come in two sizes, so that one step in five takes five times as long, on all ranks alike."""
    return 0.01, draw.gauss(2.0 if step * 7919 % 5 == 0 else 0.4, 0.01)


def loader_bound(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
    return draw.expovariate(1 / 0.3), draw.gauss(0.2, 0.01)


def drifting(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
    return 0.01, draw.gauss(0.3 + step * 3e-5, 0.01)


def with_records(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
    """Rank 0 writes a record at each tenth step, which the others wait for."""
    return 0.01, draw.gauss(0.2, 0.01) + (draw.expovariate(1 / 0.5) if rank == 0 and step % 10 == 0 else 0)


def slow(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
    return 0.1, draw.gauss(10.0, 0.5)


SYNTHETIC: dict[str, Work] = {
    work.__name__: work
    for work in (
        steady, fast, lognormal, long_tail, two_kinds, loader_bound, drifting, with_records, slow
    )
}  # fmt: skip


def recorded(path: Path) -> Work:
    """Returns recorded steps, over and over again.

    A rank that the run did not have takes other steps of one that it had.
    """
    columns = json.loads(path.read_text())
    data, work = columns["data_s"], columns["work_s"]

    def durations(draw: random.Random, rank: int, step: int) -> tuple[float, float]:
        row = (step + 37 * (rank // len(data[0]))) % len(data)
        return data[row][rank % len(data[0])], work[row][rank % len(data[0])]

    return durations


def record(run_folder: Path) -> None:
    """Writes the durations of a run's ranks, without those of its checkpoints and of its first step."""
    rows = [json.loads(line) for line in (run_folder / RANK_STATS_FILE).read_text().splitlines()][1:]
    columns = {"data_s": [row["data_s"] for row in rows], "work_s": [row["compute_s"] for row in rows]}
    rounded = {name: [[round(each, 4) for each in row] for row in table] for name, table in columns.items()}
    RECORDED.mkdir(exist_ok=True)
    path = RECORDED / f"{run_folder.name}.json"
    path.write_text(json.dumps(rounded, separators=(",", ":")) + "\n")
    print(f"{path}: {len(rows):,} steps")


def line(name: str, outcome: Outcome, seconds: float) -> str:
    """Returns a line for people; it says plainly where NAMED_S does not hold."""
    late = sum(named > NAMED_S for named in outcome.named_s)
    held = (
        f"within {NAMED_S:g} s"
        if not late
        else f"{late} of {len(outcome.named_s)} NOT within {NAMED_S:g} s: 99 % of the steps take up to "
        f"{max(outcome.usual_s):.1f} s, so their own limit is up to {max(outcome.limit_s):.1f} s"
    )
    return (
        f"{name:16} {outcome.steps:>8,} steps: {outcome.false_alarms} false alarms, the next one "
        f"{outcome.spare_s:.1f} s away; a rank that hangs is named after {max(outcome.named_s):5.1f} s at "
        f"most, {held}; another rank named {outcome.wrong} times ({seconds:.0f} s)"
    )


def measure(kinds: dict[str, Work], steps: int, seed: int) -> dict[str, Outcome]:
    """Simulates all kinds of steps, prints a line for each, and returns what came out."""
    outcomes = {}
    for number, (name, work) in enumerate(kinds.items()):
        begin = time.monotonic()
        outcomes[name] = simulate(work, ranks=RANKS, steps=steps, stops=STOPS, seed=seed * 1000 + number)
        print(line(name, outcomes[name], time.monotonic() - begin), flush=True)
    return outcomes


def beyond(outcomes: dict[str, Outcome]) -> dict[str, dict[str, float]]:
    """Returns the kinds of steps in which some stop is named after NAMED_S, with how long their steps are."""
    return {
        name: {
            "stops_beyond": sum(named > NAMED_S for named in outcome.named_s),
            "stops": len(outcome.named_s),
            "named_s_max": round(max(outcome.named_s), 1),
            "limit_s_max": round(max(outcome.limit_s), 1),
            "step_s_p99_max": round(max(outcome.usual_s), 1),
        }
        for name, outcome in outcomes.items()
        if max(outcome.named_s) > NAMED_S
    }


def summary(outcomes: dict[str, Outcome]) -> dict[str, object]:
    """Returns the figures of the last line.

    `too_late` counts stops that were named after more than NAMED_S although the limit of a step was below,
    and those that were named after that limit.
    """
    named = [
        (seconds, limit)
        for outcome in outcomes.values()
        for seconds, limit in zip(outcome.named_s, outcome.limit_s, strict=True)
    ]
    return {
        "steps": sum(outcome.steps for outcome in outcomes.values()),
        "false_alarms": sum(outcome.false_alarms for outcome in outcomes.values()),
        "longer_without_alarm_s": round(min(outcome.spare_s for outcome in outcomes.values()), 1),
        "stops": len(named),
        "named_within_15_s": round(sum(s <= NAMED_S for s, _ in named) / len(named), 4),
        "named_s_max_short_steps": round(max(s for s, limit in named if limit < NAMED_S), 1),
        "named_s_max": round(max(s for s, _ in named), 1),
        "beyond_15_s": beyond(outcomes),
        "too_late": sum(s > max(NAMED_S, limit + TICK_S) for s, limit in named),
        "wrong_rank": sum(outcome.wrong for outcome in outcomes.values()),
        "not_learned": sum(outcome.not_learned for outcome in outcomes.values()),
    }


@click.command(help=__doc__)
@click.option("--steps", default=100_000, show_default=True, help="Steps of each kind.")
@click.option("--seed", default=0, show_default=True, help="Draws other steps and pauses.")
@click.option("--record", "run_folder", type=click.Path(path_type=Path), help="Record this run instead.")
def main(steps: int, seed: int, run_folder: Path | None) -> None:
    if run_folder is not None:
        record(run_folder)
        return
    print(
        f"{RANKS} ranks; limits: {P99_FACTOR:g} times the 99th and {P999_FACTOR:g} times the 99.9th "
        f"percentile, at least {FLOOR_S:g} s; seed {seed}"
    )
    paths: Sequence[Path] = sorted(RECORDED.glob("*.json"))
    outcomes = measure({**SYNTHETIC, **{path.stem: recorded(path) for path in paths}}, steps, seed)
    report = summary(outcomes)
    if report["beyond_15_s"]:
        print(
            f"{NAMED_S:g} s do not hold where steps are long: a rank may take {P99_FACTOR:g} times what 99 % "
            "of the last steps took before it counts as hung. A rank that a signal has stopped is named "
            f"after {STOPPED_S:g} s, however long its steps are."
        )
    print(json.dumps(report))
    if report["false_alarms"] or report["too_late"] or report["wrong_rank"]:
        sys.exit("false alarms, or a stopped rank that was named too late or not at all")


if __name__ == "__main__":
    main()
