"""The demo of `make demo`: packs real images, trains a small CLIP on them, and shows what it learned.

It trains with `clipship run`'s own launcher. All files are in one folder, the job file too, so that the next
step is to change it and run it again. Imports no torch.
"""

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import click

from trainer.config import Job
from trainer.config.loader import load_job
from trainer.config.typed import from_here
from trainer.demo.data import CHINESE, ENGLISH, Words, pack_digits
from trainer.demo.text_tower import make_text_tower
from trainer.errors import EXIT_DONE, InputError
from trainer.launch.local import run
from trainer.run.folder import move_aside, run_folder
from trainer.run.layout import JOB_FILE, RESULT_FILE
from trainer.safe_io.plain import read_json
from trainer.text.paste import word
from trainer.text.wording import many


@dataclass(frozen=True)
class Kind:
    """A demo: its captions and what its job file needs beside it."""

    words: Words
    folder: str
    files: Mapping[str, str]
    """Name in the package by the name in the demo's folder."""
    text_tower: str = ""
    """Folder of a small text tower that is made for these captions; empty for open_clip's own."""


KINDS = {
    "digits": Kind(ENGLISH, "demo", {"job.toml": "digits.toml", "digits-clip.json": "digits-clip.json"}),
    "chinese": Kind(
        CHINESE,
        "demo-chinese",
        {"job.toml": "chinese.toml", "digits-clip.json": "digits-clip.json"},
        "small-bert",
    ),
}


@click.command()
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    default="digits",
    show_default=True,
    help="chinese: with Chinese captions and a text tower of Hugging Face's kind.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the data, the job file and the run. [default: demo, or demo-chinese]",
)
@click.option("--nproc", default=2, show_default=True, help="Number of ranks.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the demo's job file."
)
def main(kind: str, folder: Path | None, nproc: int, overrides: tuple[str, ...]) -> None:
    """Train a small CLIP on 1,797 handwritten digits and show what it learned."""
    try:
        sys.exit(demo(folder or Path(KINDS[kind].folder), nproc, from_here(overrides), KINDS[kind]))
    except InputError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(2)


def demo(folder: Path, nproc: int, overrides: tuple[str, ...], kind: Kind) -> int:
    """Pack, train and show; returns an exit code.

    A finished earlier run is moved aside, an unfinished one is resumed.
    """
    job_path = prepare(folder, kind)
    job = load_job(job_path, overrides)
    if (run_folder(job) / RESULT_FILE).exists():
        print(f"demo: the previous, finished run is now {move_aside(run_folder(job))}")
    print(f"demo: training on {many(nproc, 'rank')}; the job file is {job_path}", flush=True)
    started = time.monotonic()
    code = run(job, nproc=nproc, hosts=None)
    return code or _show(job, job_path, nproc, time.monotonic() - started)


def prepare(folder: Path, kind: Kind = KINDS["digits"]) -> Path:
    """Pack the images and write the job file with its model; returns the job file.

    An existing job file is kept as its owner changed it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    print(f"demo: packing 1,797 real images of digits into {folder / 'digits'}", flush=True)
    pack_digits(folder / "digits", kind.words)
    if kind.text_tower:
        make_text_tower(folder / kind.text_tower, kind.words)
    for name, source in kind.files.items():
        if not (folder / name).exists():
            (folder / name).write_text(
                files("trainer.demo").joinpath(source).read_text(encoding="utf-8"), encoding="utf-8"
            )
    return folder / JOB_FILE


def _show(job: Job, job_path: Path, nproc: int, seconds: float) -> int:
    folder = run_folder(job)
    print("demo: reading the model, to show what it learned", flush=True)
    subprocess.run([sys.executable, "-P", "-m", "trainer.demo.show", str(folder)], check=True)
    result = read_json(folder / RESULT_FILE)
    accuracy = f"{result['zero_shot_top1']:.1%} of {result['zero_shot_samples']} held-out images"
    print(f"\ndemo: zero-shot top-1 {accuracy}, trained in {seconds:.0f} s")
    print(f"demo: the run folder is {folder}")
    print(
        f"demo: next: clipship check {word(job_path)}; clipship run {word(job_path)} --nproc {nproc} "
        "--set name=mine --set optim.lr=5e-4"
    )
    return EXIT_DONE


if __name__ == "__main__":
    main()
