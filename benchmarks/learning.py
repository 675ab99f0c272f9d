"""Compares what trainers and recipes learn from the same samples: `make bench-learning`.

A small CLIP learns emoji in three styles with their names in English and Chinese. Then it finds, by those
names alone, the emoji of a fourth style, which it has never seen: R@1 and R@5 among all, beside chance.
Our job is what `clipship from-open-clip` makes of open_clip_train's command line: the same samples, model,
batch and schedule. Both trainers run at the same time with a core each, so that what else the machine does
meets both, and open_clip itself measures the weights of both. Seconds count from the command to the weights.

`--with KEY=VALUE` sets our job with changed keys against our job as it is, in place of open_clip_train; both
begin with one seed. A difference within two standard errors over the names is too small to show, and even a
larger one may be the seed's: `--seeds 3` says more. `--both KEY=VALUE` sets a key of both, such as the loss
for which the other key is. The data are fetched by npm and drawn once. The last line on stdout is JSON.
"""

import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.data import their_python
from benchmarks.learning_data import STYLES, EmojiSet, packed
from trainer.from_open_clip.job_file import job_file
from trainer.run.layout import CHECKPOINTS

MODEL = Path(__file__).with_name("learning-clip.json")
_HERE = Path(__file__).parents[1]
_BATCH, _LR, _WARM_UP = 128, 1e-3, 100
Places = Mapping[str, Sequence[int]]
"""By language, the place at which each name finds its picture, from 0."""


@dataclass(frozen=True)
class Saved:
    """Weights that a side saved on its way: their file, and the seconds from its command."""

    weights: Path
    seconds: float


@dataclass(frozen=True)
class Learned:
    """Figures of a side after so many seconds."""

    seconds: float
    places: Places

    @property
    def r1(self) -> float:
        """R@1, the mean over the languages."""
        return statistics.mean(recall(found, 1) for found in self.places.values())


@dataclass(frozen=True)
class Plan:
    """Samples, length and seed of both sides."""

    data: EmojiSet
    epochs: int
    every: int
    seed: int

    def arguments(self, logs: Path) -> list[str]:
        """Returns open_clip_train's arguments, all but the model."""
        return [
            "--train-data", self.data.train, "--train-num-samples", str(self.data.samples),
            "--dataset-type", "webdataset", "--batch-size", str(_BATCH), "--workers", "1",
            "--epochs", str(self.epochs), "--lr", str(_LR), "--wd", "0.1", "--warmup", str(_WARM_UP),
            "--grad-clip-norm", "1.0", "--precision", "fp32", "--device", "cpu", "--seed", str(self.seed),
            "--save-frequency", str(self.every), "--logs", str(logs), "--name", "learning",
        ]  # fmt: skip


class Side:
    """A trainer on one core, which leaves its checkpoints in a folder of its own."""

    def __init__(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], folder: Path, files: str
    ) -> None:
        """`files` is the pattern of the weights' files below the folder."""
        self.name, self._command, self._variables = name, command, variables
        self._folder, self._files = folder, files

    def start(self, core: int) -> None:
        """Starts it on that core."""
        self._began = time.time()
        self._output = open(self._folder / "output", "w+b")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *self._command],
            cwd=self._folder,
            env={**self._variables, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> list[Saved]:
        """Waits for its end; returns what it saved, in that order. Raises SystemExit if it failed."""
        if self._process.wait():
            raise SystemExit(f"{self.name} failed:\n{(self._folder / 'output').read_text()[-3000:]}")
        saved = sorted(self._folder.glob(self._files), key=lambda path: path.stat().st_mtime)
        return [Saved(path, path.stat().st_mtime - self._began) for path in saved]

    def stop(self) -> None:
        """Ends what still runs of it."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()
        self._output.close()


def ours(plan: Plan, folder: Path, settings: Sequence[str] = (), name: str = "ours") -> Side:
    """`clipship run` of the job that `clipship from-open-clip` makes; `settings` are overrides, KEY=VALUE."""
    folder.mkdir()
    job, _ = job_file([*plan.arguments(folder), "--model", str(MODEL)], None)
    (folder / "job.toml").write_text(job, encoding="utf-8")
    overrides = ["checkpoint.keep=1000", *settings]
    command = [sys.executable, "-P", "-m", "trainer.cli", "run", "job.toml", "--nproc", "1"]
    command += [word for override in overrides for word in ("--set", override)]
    variables = {**os.environ, "PYTHONPATH": str(_HERE)}
    return Side(name, command, variables, folder, f"learning/{CHECKPOINTS}/step-*/model.pt")


def theirs(plan: Plan, folder: Path, cache: Path) -> Side:
    """open_clip_train."""
    folder.mkdir()
    command = [str(their_python(cache)), str(Path(__file__).with_name("goodput_open_clip.py")), str(MODEL)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["OPEN_CLIP_ARGUMENTS"] = shlex.join(plan.arguments(folder))
    return Side("theirs", command, variables, folder, "learning/checkpoints/epoch_*.pt")


def learned(sides: Sequence[Side], cores: Sequence[int], plan: Plan) -> list[list[Learned]]:
    """Returns for each side what it could do after each checkpoint."""
    with contextlib.ExitStack() as running:
        for side, core in zip(sides, cores, strict=True):
            side.start(core)
            running.callback(side.stop)
        saved = [side.wait() for side in sides]
    return [
        measured(side.name, of_side, plan.data.held_out) for side, of_side in zip(sides, saved, strict=True)
    ]


def measured(name: str, saved: Sequence[Saved], held_out: Path) -> list[Learned]:
    """Returns what the weights can do, and prints it."""
    command = [sys.executable, "-m", "benchmarks.learning_measure", str(MODEL), str(held_out)]
    run = subprocess.run(
        [*command, *(str(each.weights) for each in saved)], cwd=_HERE, check=True, stdout=subprocess.PIPE
    )
    found = [
        Learned(each.seconds, json.loads(line))
        for each, line in zip(saved, run.stdout.splitlines(), strict=True)
    ]
    for each in found:
        shown = ", ".join(f"{key} {value:.1%}" for key, value in recalls(each.places).items())
        print(f"{name}: after {each.seconds:.0f} s {shown}", flush=True)
    return found


def recall(places: Sequence[int], within: int) -> float:
    """Returns the share of names whose picture is among the nearest `within`."""
    return sum(place < within for place in places) / len(places)


def recalls(places: Places) -> dict[str, float]:
    """Returns R@1 and R@5 by language."""
    return {
        f"{language}_r{within}": round(recall(found, within), 4)
        for language, found in places.items()
        for within in (1, 5)
    }


def difference(one: Sequence[Places], other: Sequence[Places]) -> tuple[float, float]:
    """Returns how much higher R@1 of the one is, and two standard errors of that.

    Each has the places of one run for each seed, and seeds are in pairs. The errors are those of a sample of
    names; each name counts once, with its mean over seeds and languages.
    """
    columns = [
        [(mine < 1) - (yours < 1) for mine, yours in zip(ours[language], theirs[language], strict=True)]
        for ours, theirs in zip(one, other, strict=True)
        for language in ours
    ]
    by_name = [statistics.mean(of_name) for of_name in zip(*columns, strict=True)]
    return statistics.mean(by_name), 2 * statistics.stdev(by_name) / len(by_name) ** 0.5


def summary(names: Sequence[str], runs: Sequence[Sequence[Sequence[Learned]]]) -> dict[str, object]:
    """Returns the figures of two sides: `runs` has for each seed what each side could do on its way."""
    last = [[of_seed[side][-1] for of_seed in runs] for side in (0, 1)]
    gain, error = difference(*([each.places for each in of_side] for of_side in last))
    pictures = len(next(iter(last[0][0].places.values())))
    reached = [seconds_to(of_seed[0], of_seed[1][-1].r1) for of_seed in runs]
    known = [seconds for seconds in reached if seconds is not None]
    return {
        "benchmark": "learning",
        "pictures": pictures,
        "seeds": len(runs),
        "chance_r1": round(1 / pictures, 5),
        "chance_r5": round(5 / pictures, 5),
        **{name: of_side(found) for name, found in zip(names, last, strict=True)},
        f"{names[0]}_s_to_{names[1]}_r1": round(statistics.mean(known), 1) if known == reached else None,
        "r1_gain": round(gain, 4),
        "r1_two_errors": round(error, 4),
        "shows": names[gain < 0] if abs(gain) > error else "too small to show",
    }


def of_side(found: Sequence[Learned]) -> dict[str, object]:
    """Returns the means over the seeds."""
    each = [recalls(one.places) for one in found]
    means = {key: round(statistics.mean(one[key] for one in each), 4) for key in each[0]}
    return {**means, "seconds": round(statistics.mean(one.seconds for one in found), 1)}


def seconds_to(way: Sequence[Learned], r1: float) -> float | None:
    """Returns the seconds after which that R@1 was first reached, on a line between checkpoints.

    None if it was not reached.
    """
    before, below = 0.0, 0.0
    for each in way:
        if each.r1 >= r1:
            share = (r1 - below) / (each.r1 - below) if each.r1 > below else 1.0
            return before + share * (each.seconds - before)
        before, below = each.seconds, each.r1
    return None


@contextlib.contextmanager
def _folder(keep: Path | None, seed: int) -> Iterator[Path]:
    """Gives a folder for the runs of one seed, which is removed afterwards unless it is to be kept."""
    if keep is not None:
        folder = keep.absolute() / f"seed-{seed}"
        folder.mkdir(parents=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="clipship-learning-") as name:
        yield Path(name)


@click.command(help=__doc__)
@click.option("--epochs", default=30, show_default=True, help="Passes over the data.")
@click.option(
    "--every", default=3, show_default=True, help="Epochs from one measured checkpoint to the next."
)
@click.option(
    "--seeds", default=1, show_default=True, help="Runs of each side, one with each seed from 0 on."
)
@click.option("--held-out", type=click.Choice(list(STYLES)), default="noto", show_default=True, help="Style.")
@click.option(
    "--with",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key: ours against ours so changed.",
)
@click.option("--both", multiple=True, metavar="KEY=VALUE", help="With --with: set a key of both.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="Folder in which the runs are left, such as for a teacher; it must not be there.",
)
@click.option(
    "--cache", type=click.Path(path_type=Path), default=Path("~/.cache/clipship/bench"), show_default=True
)
def main(
    epochs: int,
    every: int,
    seeds: int,
    held_out: str,
    settings: tuple[str, ...],
    both: tuple[str, ...],
    keep: Path | None,
    cache: Path,
) -> None:
    """Run the benchmark."""
    if both and not settings:
        raise click.UsageError("--both is for two of our jobs, see --with")
    if keep is not None and keep.exists():
        raise click.UsageError(f"--keep: {keep} is there already")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it started ends, too
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit(
            "both trainers run at the same time with a core each, and this process may use one only"
        )
    data = packed(cache.expanduser(), held_out)
    runs = []
    for seed in range(seeds):
        plan = Plan(data, epochs, every, seed)
        print(f"training {epochs} epochs of {data.samples} samples with the seed {seed}", flush=True)
        with _folder(keep, seed) as folder:
            other = (
                ours(plan, folder / "changed", (*both, *settings), "changed")
                if settings
                else theirs(plan, folder / "theirs", cache.expanduser())
            )
            sides = [ours(plan, folder / "ours", both), other]
            # The cores are changed from seed to seed: one may have more to do for others.
            runs.append(learned(sides, cores if seed % 2 == 0 else cores[::-1], plan))
    about = {
        "held_out": held_out,
        "samples": data.samples,
        "epochs": epochs,
        "batch": _BATCH,
        "with": settings,
        "both": both,
    }
    print(json.dumps(summary([side.name for side in sides], runs) | about))


if __name__ == "__main__":
    main()
