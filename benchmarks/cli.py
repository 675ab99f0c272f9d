"""The time to render a batch script, against TorchX's dry run: `make bench-cli`.

Each is installed as pip installs it, in an environment of its own outside the checkout: clipship as a wheel
of this checkout, with the packages that it needs from the environment that runs this. Both are timed from the
command line's start to its end, in turns. The last line is JSON.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.environment import CACHE, environment

TORCHX = "0.7.0"
GOAL = 0.8
_JOB = """\
name = "bench"
[data]
train = "/data/{00000..00331}.tar"
[optim]
global_batch_size = 32768
epochs = 3
[slurm]
partition = "gpu"
time = "12:00:00"
"""


@click.command()
@click.option(
    "--nodes",
    "sizes",
    multiple=True,
    type=int,
    default=(1, 4096),
    show_default=True,
    help="Nodes of the jobs; each has 8 GPUs.",
)
@click.option("--repeats", default=7, show_default=True, help="Times that each is measured.")
def main(sizes: Sequence[int], repeats: int) -> None:
    """Time both command lines and print the pairs."""
    torchx = _torchx()
    with tempfile.TemporaryDirectory(prefix="clipship-bench-") as folder:
        clipship = _clipship(Path(folder))
        found = {nodes: _pair(clipship, torchx, Path(folder), nodes, repeats) for nodes in sizes}
    for nodes, (ours, theirs) in found.items():
        print(
            f"{nodes:>5} nodes of 8 GPUs: clipship {ours:.3f} s, TorchX {TORCHX} {theirs:.3f} s, "
            f"ratio {ours / theirs:.2f}"
        )
    seconds = {
        str(nodes): {"clipship_s": round(ours, 4), "torchx_s": round(theirs, 4)}
        for nodes, (ours, theirs) in found.items()
    }
    ratio = max(ours / theirs for ours, theirs in found.values())
    print(
        json.dumps(
            {
                "ratio_torchx": round(ratio, 3),
                "goal": GOAL,
                "torchx": TORCHX,
                "repeats": repeats,
                "nodes": seconds,
            }
        )
    )
    sys.exit(ratio > GOAL)


def _pair(clipship: Path, torchx: Path, folder: Path, nodes: int, repeats: int) -> tuple[float, float]:
    """Medians, of ours and of theirs."""
    (folder / "job.toml").write_text(_JOB)
    (folder / "train.py").write_text("")
    size = ["--set", f"resources.nodes={nodes}", "--set", "resources.gpus_per_node=8"]
    ours = [str(clipship), "render", "slurm", "job.toml", *size]
    options = ["--scheduler", "slurm", "--scheduler_args", "partition=gpu,time=12:00:00", "--dryrun"]
    theirs = [
        str(torchx),
        "run",
        *options,
        "dist.ddp",
        "-j",
        f"{nodes}x8",
        "--gpu",
        "8",
        "--script",
        "train.py",
    ]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for command, taken in zip((ours, theirs), times, strict=True):
            taken.append(_timed(command, folder))
    first = 1  # it reads files that later ones find in memory
    return statistics.median(times[0][first:]), statistics.median(times[1][first:])


def _timed(command: Sequence[str], folder: Path) -> float:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=variables)
    seconds = time.perf_counter() - start
    if done.returncode or "#SBATCH" not in done.stdout + done.stderr:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return seconds


def _clipship(folder: Path) -> Path:
    checkout, copy, home = Path(__file__).parent.parent, folder / "source", folder / "environment"
    shutil.copytree(
        checkout / "trainer", copy / "trainer", ignore=shutil.ignore_patterns("__pycache__")
    )  # what links point at, too
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, copy)
    pip = [str(environment(home)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", str(copy)], check=True)
    return home / "bin" / "clipship"


def _torchx() -> Path:
    folder = CACHE / f"torchx-{TORCHX}"
    if not (folder / "bin" / "torchx").exists():
        print(f"installing TorchX {TORCHX} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", f"torchx=={TORCHX}"], check=True)
    return folder / "bin" / "torchx"


if __name__ == "__main__":
    main()
