"""The demo of `make demo`: packs real images, trains a small CLIP on them, and shows what it learned.

It trains with `clipship run`'s own launcher. All files are in one folder, the job file too, so that the next
step is to change it and run it again. Imports no torch.
"""

import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import click

from trainer.config import Job
from trainer.config.loader import from_here, load_job
from trainer.demo.data import pack_digits
from trainer.errors import EXIT_DONE, InputError
from trainer.launch.local import run
from trainer.run.folder import move_aside, run_folder
from trainer.run.layout import JOB_FILE, RESULT_FILE
from trainer.safe_io.plain import read_json
from trainer.text.paste import word
from trainer.text.wording import many


@click.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo"),
    show_default=True,
    help="Folder of the data, the job file and the run.",
)
@click.option("--nproc", default=2, show_default=True, help="Number of ranks.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the demo's job file."
)
def main(folder: Path, nproc: int, overrides: tuple[str, ...]) -> None:
    """Train a small CLIP on 1,797 handwritten digits and show what it learned."""
    try:
        sys.exit(demo(folder, nproc, from_here(overrides)))
    except InputError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(2)


def demo(folder: Path, nproc: int, overrides: tuple[str, ...]) -> int:
    """Pack, train and show; returns an exit code.

    A finished earlier run is moved aside, an unfinished one is resumed.
    """
    job_path = prepare(folder)
    job = load_job(job_path, overrides)
    if (run_folder(job) / RESULT_FILE).exists():
        print(f"demo: the previous, finished run is now {move_aside(run_folder(job))}")
    print(f"demo: training on {many(nproc, 'rank')}; the job file is {job_path}", flush=True)
    started = time.monotonic()
    code = run(job, nproc=nproc, hosts=None)
    return code or _show(job, job_path, nproc, time.monotonic() - started)


def prepare(folder: Path) -> Path:
    """Pack the images and write the job file with its model; returns the job file.

    An existing job file is kept as its owner changed it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    print(f"demo: packing 1,797 real images of digits into {folder / 'digits'}", flush=True)
    pack_digits(folder / "digits")
    for name in (JOB_FILE, "digits-clip.json"):
        if not (folder / name).exists():
            text = files("trainer.demo").joinpath(name).read_text(encoding="utf-8")
            (folder / name).write_text(text, encoding="utf-8")
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
