"""Runs with faults, ours beside open_clip_train's under torchrun: `make bench-goodput`.

Four ranks on two nodes and a spare node, all on this machine, train the model of `make demo`. A seed draws
the faults, one in 60 s on average; all kinds come once, some of them in the run of each backend, and each run
has a fault of a node and one of a rank. First a run without faults, then the same run with them, then one
that goes on with fewer ranks, in float64. At last open_clip_train, under `torchrun --max-restarts` with its
checkpoint of each epoch and the faults of the first backend. A run that ends is started again at once, as by
a person who waits beside it, and the fault that ended it is named. Needs root.

All figures are measured. The last line on stdout is JSON: for each figure the worst of all backends, then the
figures of each. The exit code is 1 if a figure misses its limit; a sentence on stderr says which.
"""

import json
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.goodput_faults import (
    EVERY_S,
    EXTRA_KINDS,
    FAULTS,
    KINDS,
    OF_NODES,
    Fault,
    deal,
    made,
    only,
)
from benchmarks.goodput_figures import difference, figures, rows, step_s, steps_on_fewer
from benchmarks.goodput_limits import missed, worst
from benchmarks.goodput_nodes import NAMES, Nodes, missing
from benchmarks.goodput_run import Runner
from benchmarks.goodput_sides import EPOCH_STEPS, GOES_ON, Ours, Side, Theirs
from benchmarks.goodput_story import Story, read_story
from trainer.demo.__main__ import prepare

BACKENDS = ("torch", "horovod")
STORY_FILE = "story.json"
_PROBE_STEPS = 2 * EPOCH_STEPS
_FEWER_STEPS = 4 * EPOCH_STEPS
_STEPS_SHARE = 0.9
"""Share of its time that a run with faults is reckoned to spend in steps."""
_LIMIT = 4.0
"""Longest time of a run with faults, as a multiple of that of our run without."""
_FEWER_LIMIT_S = 600.0


@dataclass(frozen=True)
class Bench:
    """Runs of all sides, each in a folder of its own; one that was done there before is not made again."""

    folder: Path
    job: Path

    def nodes(self, name: str) -> Nodes:
        """Returns the nodes of a run; what is left of one that was cut off is removed."""
        place = self.folder / name
        if not (place / STORY_FILE).exists():
            shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True, exist_ok=True)
        return Nodes(place, secrets.token_hex(8))

    def ours(self, name: str, backend: str, steps: int, *settings: str, spare: bool = False) -> Ours:
        """Returns our side of a run in the folder NAME-BACKEND."""
        name = f"{name}-{backend}"
        names = NAMES if spare else NAMES[:2]
        place = self.folder / name
        return Ours(self.nodes(name), place, steps, self.job, backend, names=names, settings=settings)

    def run(self, side: Side, faults: Sequence[Fault], limit_s: float) -> Story:
        """Makes a run, unless its folder says how it went."""
        name, path = side.folder.name, side.folder / STORY_FILE
        if path.exists():
            print(f"{name}: was made before", file=sys.stderr)
            return read_story(path)
        print(f"{name}: {side.steps} steps", file=sys.stderr, flush=True)
        story = Runner(side, faults, limit_s).run()
        state = "done" if story.done else "GIVEN UP"
        print(f"{name}: {state} after {story.seconds:.1f} s, started {story.starts} times", flush=True)
        if not story.done:
            print(story.output[-3000:], file=sys.stderr)
        story.write(path)
        return story

    def run_without_faults(self, side: Ours) -> Story:
        """Makes a run that must be done."""
        story = self.run(side, (), 3600.0)
        if not story.done:
            sys.exit("the run without faults did not end as it should")
        return story

    def backend(self, backend: str, faults: Sequence[Fault]) -> tuple[dict[str, Any], Story]:
        """Returns the figures of one backend, and how its run with faults went."""
        probe = self.ours("probe", backend, _PROBE_STEPS)
        self.run_without_faults(probe)
        steps = steps_for(faults, step_s(probe))
        whole = self.ours("whole", backend, steps)
        without = self.run_without_faults(whole)
        side = self.ours("faults", backend, steps, *GOES_ON, "recovery.spare_nodes=1", spare=True)
        story = self.run(side, faults, _LIMIT * max(without.seconds, 120.0))
        return figures(side, story, whole, without), story

    def fewer(self, backend: str) -> dict[str, Any]:
        """Returns the figures of a run in float64 that loses one node of two and goes on without it."""
        exact = "model.precision=fp64"
        whole = self.ours("whole-fp64", backend, _FEWER_STEPS, exact)
        self.run_without_faults(whole)
        side = self.ours("fewer-fp64", backend, _FEWER_STEPS, exact, *GOES_ON, "recovery.min_nodes=1")
        story = self.run(side, (Fault(5.0, OF_NODES[0], 0.0),), _FEWER_LIMIT_S)
        return {
            "fewer_ranks_difference": difference(side, whole) if story.done else None,
            "fewer_ranks_steps": steps_on_fewer(side),
        }

    def theirs(self, faults: Sequence[Fault], steps: int, ours: Story, cache: Path) -> dict[str, Any]:
        """Runs open_clip_train; a run that is given up gives a ratio that the true one exceeds."""
        side = Theirs(self.nodes("theirs"), self.folder / "theirs", steps, self.job, cache)
        story = self.run(side, faults, _LIMIT * ours.seconds)
        return {
            "ratio_torchrun": round(story.seconds / ours.seconds, 2),
            "torchrun_seconds": round(story.seconds, 1),
            "torchrun_done": story.done,
            "torchrun_starts": story.starts,
            "torchrun_steps_redone_max": max(story.redone, default=0),
            "torchrun_faults": list(rows(story)),
        }


def steps_for(faults: Sequence[Fault], step_s: float) -> int:
    """Returns the steps of a run with these faults, whole epochs: one fault comes in EVERY_S on average."""
    seconds = _STEPS_SHARE * EVERY_S * made([fault.kind for fault in faults])
    return max(2, round(seconds / step_s / EPOCH_STEPS)) * EPOCH_STEPS


def compare(
    bench: Bench,
    backends: Sequence[str],
    hands: Sequence[Sequence[Fault]],
    *,
    fewer: bool,
    cache: Path | None,
) -> dict[str, Any]:
    """Runs all sides, one after the other; open_clip_train with a folder for it. Returns the last line."""
    of_backends: dict[str, dict[str, Any]] = {}
    stories = []
    for backend, faults in zip(backends, hands, strict=True):
        own, story = bench.backend(backend, faults)
        of_backends[backend] = {**own, **(bench.fewer(backend) if fewer else {})}
        stories.append(story)
    theirs = {}
    if cache is not None:
        theirs = bench.theirs(hands[0], of_backends[backends[0]]["steps"], stories[0], cache)
    sentences = [each for name, its in of_backends.items() for each in missed(name, its)]
    return {**worst(list(of_backends.values())), **theirs, "missed": sentences, "backends": of_backends}


def show(report: dict[str, Any]) -> None:
    """Prints the faults as a table and the report as JSON; says on stderr which limits are missed."""
    for backend, its in report["backends"].items():
        for row in its["faults"]:
            took = "no new step" if row["recovery_s"] is None else f"{row['recovery_s']:.1f} s"
            ended = "  ENDED THE RUN" * row["ended_run"]
            print(f"{backend:8} {row['at_s']:7.1f} s  {row['kind']:38} {took}{ended}")
    sys.stdout.flush()
    for sentence in report["missed"]:
        print(sentence, file=sys.stderr)
    print(json.dumps(report))


@click.command(help=__doc__)
@click.option("--seed", default=0, show_default=True, help="Draws other faults at other moments.")
@click.option(
    "--minutes",
    type=click.IntRange(min=1),
    default=FAULTS,
    show_default=True,
    help="Minutes with faults, one in each, over both backends.",
)
@click.option(
    "--backend", type=click.Choice([*BACKENDS, "both"]), default="both", show_default=True, help="Backend."
)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice([*KINDS, *EXTRA_KINDS]),
    multiple=True,
    help="Make only faults of this kind, in the run of each backend. May be repeated.",
)
@click.option("--fewer/--no-fewer", default=True, show_default=True, help="Go on with fewer ranks, too.")
@click.option("--theirs/--no-theirs", default=True, show_default=True, help="Run open_clip_train, too.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Keep all runs in this folder, and make no run again that it has from the same arguments.",
)
@click.option(
    "--cache", type=click.Path(path_type=Path), default=Path("~/.cache/clipship/bench"), show_default=True
)
def main(
    seed: int,
    minutes: int,
    backend: str,
    kinds: tuple[str, ...],
    fewer: bool,
    theirs: bool,
    folder: Path | None,
    cache: Path,
) -> None:
    if lacks := missing():
        sys.exit(f"the nodes of this benchmark need {lacks}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no run is left behind
    hands = [only(kinds, seed, minutes)] * len(BACKENDS) if kinds else deal(seed, minutes, len(BACKENDS))
    chosen = [pair for pair in zip(BACKENDS, hands, strict=True) if backend in ("both", pair[0])]
    cache = cache.expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="clipship-goodput-") as temporary:
        place = (folder or Path(temporary)).absolute()
        bench = Bench(place, prepare(place / "demo"))
        names, of_names = zip(*chosen, strict=True)
        report = compare(bench, names, of_names, fewer=fewer, cache=cache if theirs else None)
    show({"seed": seed, **report})
    if report["missed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
