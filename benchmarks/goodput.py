"""Runs with faults, ours beside open_clip_train's under torchrun: `make bench-goodput`.

Four ranks on two nodes and a spare node, all on this machine, train the model of `make demo`. A seed draws
the faults, one in 60 s on average. First our run without faults, then ours with them, then open_clip_train
under `torchrun --max-restarts` with its checkpoint of each epoch and the same faults. A run that ends is
started again at once, as by a person who waits beside it, and the fault that ended it is named. Needs root.

All figures are measured. The last line on stdout is JSON.
"""

import json
import secrets
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from benchmarks.goodput_faults import Fault, faults
from benchmarks.goodput_nodes import Nodes, missing
from benchmarks.goodput_run import Runner, Story, no_faults
from benchmarks.goodput_sides import BATCH, EPOCH_STEPS, Ours, Side, Theirs
from trainer.demo.__main__ import prepare

PROBE_STEPS = 2 * EPOCH_STEPS
_LIMIT = 4.0
"""Longest time of a run with faults, as a multiple of that of our run without."""


def measure_step(folder: Path, job: Path, backend: str) -> float:
    """Returns the seconds of a step on this machine, from a short run."""
    side = Ours(nodes_of(folder), folder, PROBE_STEPS, job, backend, faults=False)
    must_be_done(run(side, no_faults(), 600.0))
    return statistics.median(record["step_s"] for record in side.records()[2:])


def nodes_of(folder: Path) -> Nodes:
    folder.mkdir(parents=True, exist_ok=True)
    return Nodes(folder, secrets.token_hex(8))


def run(side: Side, with_faults: Iterable[Fault], limit_s: float) -> Story:
    print(f"{side.folder.name}: {side.steps} steps", file=sys.stderr, flush=True)
    story = Runner(side, with_faults, limit_s).run()
    state = "done" if story.done else "GIVEN UP"
    print(f"{side.folder.name}: {state} after {story.seconds:.1f} s, started {story.starts} times")
    if not story.done:
        print(story.output[-3000:], file=sys.stderr)
    return story


def must_be_done(story: Story) -> None:
    if not story.done:
        sys.exit("the run without faults did not end as it should")


def rows(story: Story) -> list[dict[str, Any]]:
    """Returns a row for each fault, as the JSON has it."""
    return [
        {
            "kind": moment.kind,
            "at_s": round(moment.at_s, 1),
            "recovery_s": None if (took := story.recovery_s(moment)) is None else round(took, 1),
            "ended_run": moment.ended_run,
        }
        for moment in story.moments
    ]


def median_s(story: Story, *, of_node: bool) -> float | None:
    """Returns the median of the recoveries; None without any."""
    took = [story.recovery_s(moment) for moment in story.moments if moment.of_node == of_node]
    known = [seconds for seconds in took if seconds is not None]
    return round(statistics.median(known), 1) if known else None


def useful_share(side: Ours, story: Story) -> float:
    """Returns the seconds of steps that counted, without waits for data and checkpoints, by all seconds."""
    useful = sum(record["compute_s"] + record["comm_s"] for record in side.records())
    return round(useful / story.seconds, 4)


def samples(side: Ours, whole: Ours) -> tuple[int, int]:
    """Returns how many samples of the order were lost, and how many counted twice.

    A step takes the positions of the order that its record ends at. One whose loss differs from that of the
    run without faults had other samples than those of its positions.
    """
    times: dict[int, int] = {}
    true_loss = {record["step"]: record["loss"] for record in whole.records()}
    for record in side.records():
        if record["loss"] == true_loss.get(record["step"]):
            last = int(record["samples"])
            times[last] = times.get(last, 0) + 1
    due = [step * BATCH for step in range(1, side.steps + 1)]
    lost = sum(times.get(last, 0) == 0 for last in due) * BATCH
    twice = sum(count - 1 for count in times.values()) * BATCH
    return lost, twice


def bit_equal(one: Ours, other: Ours) -> bool:
    """Returns whether the final weights of two runs are equal, bit for bit."""
    import torch

    states = [
        torch.load(
            side.run_folder / "checkpoints" / f"step-{side.steps:08d}" / "model.pt",
            map_location="cpu",
            weights_only=True,
        )
        for side in (one, other)
    ]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


def compare(
    folder: Path, seed: int, minutes: float, backend: str, cache: Path, theirs: bool
) -> dict[str, Any]:
    """Runs all sides, one after the other, and returns the figures of the last line."""
    job = prepare(folder / "demo")
    step_s = measure_step(folder / "probe", job, backend)
    steps = max(2, round(minutes * 60 / step_s / EPOCH_STEPS)) * EPOCH_STEPS
    print(f"a step takes {step_s:.3f} s: {steps} steps; seed {seed}", flush=True)
    whole = Ours(nodes_of(folder / "whole"), folder / "whole", steps, job, backend, faults=False)
    without = run(whole, no_faults(), 3600.0)
    must_be_done(without)
    limit_s = _LIMIT * max(without.seconds, 120.0)
    side = Ours(nodes_of(folder / "ours"), folder / "ours", steps, job, backend)
    story = run(side, faults(seed), limit_s)
    lost, twice = samples(side, whole)
    report: dict[str, Any] = {
        "seed": seed,
        "backend": backend,
        "steps": steps,
        "faults": rows(story),
        "not_made": story.not_made,
        "ended_run": sorted({moment.kind for moment in story.moments if moment.ended_run}),
        "useful_share": (share := useful_share(side, story)),
        "useful_share_without_faults": (full := useful_share(whole, without)),
        "useful_share_ratio": round(share / full, 4),
        "recovery_s_median_rank": median_s(story, of_node=False),
        "recovery_s_median_node": median_s(story, of_node=True),
        "steps_redone_max": max(story.redone, default=0),
        "bit_equal": story.done and bit_equal(side, whole),
        "samples_lost": lost,
        "samples_twice": twice,
        "seconds": round(story.seconds, 1),
        "seconds_without_faults": round(without.seconds, 1),
        "done": story.done,
    }
    if theirs:
        report |= beside(
            Theirs(nodes_of(folder / "theirs"), folder / "theirs", steps, job, cache), seed, story
        )
    return report


def beside(side: Theirs, seed: int, ours: Story) -> dict[str, Any]:
    """Runs open_clip_train; a run that is given up gives a ratio that the true one exceeds."""
    story = run(side, faults(seed), _LIMIT * ours.seconds)
    return {
        "ratio_torchrun": round(story.seconds / ours.seconds, 2),
        "torchrun_done": story.done,
        "torchrun_starts": story.starts,
        "torchrun_faults": rows(story),
    }


@click.command(help=__doc__)
@click.option("--seed", default=0, show_default=True, help="Draws other faults at other moments.")
@click.option("--minutes", default=3.0, show_default=True, help="Length of our run without faults.")
@click.option("--backend", type=click.Choice(["torch", "horovod"]), default="torch", show_default=True)
@click.option("--theirs/--no-theirs", default=True, show_default=True, help="Run open_clip_train, too.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep all runs in this new folder.")
@click.option(
    "--cache", type=click.Path(path_type=Path), default=Path("~/.cache/clipship/bench"), show_default=True
)
def main(seed: int, minutes: float, backend: str, theirs: bool, folder: Path | None, cache: Path) -> None:
    if lacks := missing():
        sys.exit(f"the nodes of this benchmark need {lacks}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no run is left behind
    cache.expanduser().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="clipship-goodput-") as temporary:
        report = compare(
            (folder or Path(temporary)).absolute(), seed, minutes, backend, cache.expanduser(), theirs
        )
    for row in report["faults"]:
        took = "no new step" if row["recovery_s"] is None else f"{row['recovery_s']:.1f} s"
        print(f"{row['at_s']:7.1f} s  {row['kind']:38} {took}{'  ENDED THE RUN' * row['ended_run']}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
