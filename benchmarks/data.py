"""Our loader against open_clip_train's, on the same shards: `make bench-data`.

They take turns, each pinned to one core. Then two of our loader processes run against one, where two cores
are theirs. A table says where the processor time of a sample goes; `--parts` prints that alone.

Photographs of two sizes are packed once; open_clip_torch's trainer is installed once, in an environment of
its own, with the webdataset that it asks for and the torch, Pillow and numpy of this one. The last line on
stdout is JSON.

Where others use the machine too, `--clock cpu` counts the processor time of a side's processes instead of the
wall's.
"""

import io
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
from PIL import Image

from benchmarks.data_index import generated
from benchmarks.environment import environment, share
from trainer.data.pack import PackedSample, write_shards
from trainer.safe_io.folders import whole_folder

THEIRS = ("open_clip_torch==3.3.0", "webdataset==0.2.86")
SIZES = {512: (512, 384), 1024: (1024, 768)}
OURS = [sys.executable, "-m", "benchmarks.data_ours"]
SAMPLES = 1536
PER_SHARD = 256
QUALITY = 80
WORDS = """the of on in near old new red blue white green temple flower roof tree sky water stone garden
    petals gold morning summer photograph closeup view street china travel people walking beautiful
    architecture detail ornament hill lake"""


def photographs(width: int, height: int, count: int) -> Iterator[PackedSample]:
    """Cuts pictures at random from scikit-learn's two photographs, each with a caption of 5 to 15 words."""
    from sklearn.datasets import load_sample_images

    pictures = [Image.fromarray(picture) for picture in load_sample_images().images]
    draw = np.random.default_rng(0)
    for number in range(count):
        picture = pictures[number % 2]
        share = draw.uniform(0.7, 1)
        across, down = int(picture.height * share * width / height), int(picture.height * share)
        left, top = (
            int(draw.integers(0, picture.width - across + 1)),
            int(draw.integers(0, picture.height - down + 1)),
        )
        file = io.BytesIO()
        cut = picture.crop((left, top, left + across, top + down)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        cut.save(file, "jpeg", quality=QUALITY)
        yield (
            f"{number:06d}",
            {
                "jpg": file.getvalue(),
                "txt": " ".join(draw.choice(WORDS.split(), draw.integers(5, 16))).encode(),
            },
        )


def shards(folder: Path, size: int) -> str:
    """The pattern of the shards with photographs of that width, made where they are missing."""
    out = folder / f"photographs-{size}-{SAMPLES}-{QUALITY}"
    if not out.exists():
        print(f"packing {SAMPLES} photographs of {SIZES[size]}", file=sys.stderr)
        with whole_folder(out) as beside:
            write_shards(photographs(*SIZES[size], SAMPLES), beside, PER_SHARD)
    return f"{out}/shard-{{000000..{SAMPLES // PER_SHARD - 1:06d}}}.tar"


def their_python(folder: Path) -> Path:
    """An environment with open_clip_torch's trainer, made where it is missing."""
    home = folder / "-".join(["open_clip", *THEIRS]).replace("==", "-")
    python, done = home / "bin" / "python", home / "installed"
    if not done.exists():
        print(f"installing {', '.join(THEIRS)} in {home}", file=sys.stderr)
        environment(home)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--force-reinstall", "--no-deps", *THEIRS], check=True, stdout=sys.stderr)
        subprocess.run([*pip, "pandas"], check=True, stdout=sys.stderr)  # needed, and not declared
        done.touch()
    share(home)
    return python


def measured(command: list[str], cores: set[int], clock: str) -> float:
    """Returns the images per second that the command prints, by the wall clock or in processor time."""
    return float(run_alone(command, cores).split()[("wall", "cpu").index(clock)])


def run_alone(command: list[str], cores: set[int]) -> str:
    """Runs the command on those cores alone and returns the last line that it prints."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=variables,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr}")
    return str(run.stdout.splitlines()[-1])


def compare(size: int, folder: Path, turns: int, batches: int, core: int, clock: str) -> dict[str, float]:
    """Medians over the turns, in images per second: ours, theirs, the decoder alone."""
    pattern, python, here = (
        shards(folder, size),
        their_python(folder),
        str(Path(__file__).with_name("data_theirs.py")),
    )
    sides: dict[str, Callable[[], float]] = {
        "theirs": lambda: measured(
            [str(python), here, pattern, str(SAMPLES), str(max(4, batches // 3))], {core}, clock
        ),
        "ours": lambda: measured([*OURS, "loader", pattern, str(batches)], {core}, clock),
        "decoder": lambda: measured([*OURS, "decoder", pattern, str(batches)], {core}, clock),
    }
    return in_turns(str(size), sides, turns)


def two_processes(size: int, folder: Path, turns: int, batches: int, cores: set[int]) -> dict[str, float]:
    """Returns the medians over the turns of one and of two loader processes on two cores.

    The unit is images per second by the wall clock.
    """
    words = [shards(folder, size), str(batches)]
    sides: dict[str, Callable[[], float]] = {
        "one": lambda: measured([*OURS, "loader", *words], cores, "wall"),
        "two": lambda: measured([*OURS, "loader2", *words], cores, "wall"),
    }
    return in_turns(f"{size}, two cores", sides, turns)


def parts(folder: Path, batches: int, core: int) -> dict[int, dict[str, float]]:
    """Returns the microseconds of each part of a sample, by width of the photographs."""
    found = {}
    for size in SIZES:
        line = run_alone(
            [sys.executable, "-m", "benchmarks.data_parts", shards(folder, size), str(batches)], {core}
        )
        found[size] = json.loads(line)
    return found


def table(found: dict[int, dict[str, float]]) -> str:
    """Returns the parts of a sample as lines of text: microseconds, and the share of the sum."""
    heads = [f"{SIZES[size][0]}x{SIZES[size][1]}" for size in found]
    lines = [f"{'processor time, us a sample':28}" + "".join(f"{head:>18}" for head in heads)]
    for part in next(iter(found.values())):
        cells = (f"{of_size[part]:9.0f}  {of_size[part] / of_size['sum']:6.1%}" for of_size in found.values())
        lines.append(f"{part:28}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def in_turns(what: str, sides: dict[str, Callable[[], float]], turns: int) -> dict[str, float]:
    found: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(turns):
        for side, rate in sides.items():
            found[side].append(rate())
        print(
            f"{what}: turn {turn + 1}  "
            + "  ".join(f"{side} {rates[-1]:.0f}" for side, rates in found.items())
            + " img/s",
            file=sys.stderr,
        )
    return {side: statistics.median(rates) for side, rates in found.items()}


@click.command(help=__doc__)
@click.option("--turns", default=5, show_default=True, help="Times that each side runs.")
@click.option(
    "--batches", default=20, show_default=True, help="Batches of 64 in each of our turns; theirs has a third."
)
@click.option("--core", default=0, show_default=True, help="The core that both sides are pinned to.")
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True)
@click.option(
    "--cache", type=click.Path(path_type=Path), default=Path("~/.cache/clipship/bench"), show_default=True
)
@click.option("--parts", "only_parts", is_flag=True, help="Only the table of a sample's processor time.")
def main(turns: int, batches: int, core: int, clock: str, cache: Path, only_parts: bool) -> None:
    folder = cache.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    by_part = parts(folder, batches, core)
    print(table(by_part))
    report = {
        f"us_{part.replace(' ', '_')}_{size}": value
        for size, of_size in by_part.items()
        for part, value in of_size.items()
    }
    if only_parts:
        print(json.dumps({name: round(value, 1) for name, value in report.items()}))
        return
    for size in SIZES:
        rates = compare(size, folder, turns, batches, core, clock)
        print(
            f"{SIZES[size][0]}x{SIZES[size][1]}: "
            + ", ".join(f"{side} {rate:.0f} img/s" for side, rate in rates.items())
        )
        report[f"ratio_{size}"] = round(rates["ours"] / rates["theirs"], 2)
        report[f"ratio_decode_{size}"] = round(rates["ours"] / rates["decoder"], 2)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) == 2:
        rates = two_processes(max(SIZES), folder, turns, batches, set(cores))
        print(f"loader processes on two cores: one {rates['one']:.0f} img/s, two {rates['two']:.0f} img/s")
        report["ratio_two_processes"] = round(rates["two"] / rates["one"], 2)
    with generated(folder) as index:
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.data_index", str(index)],
            check=True,
            capture_output=True,
            text=True,
        )
    report |= json.loads(run.stdout)
    print(json.dumps({name: round(value, 3) for name, value in report.items()}))


if __name__ == "__main__":
    main()
