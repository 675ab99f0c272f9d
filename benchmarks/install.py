"""Measures what a login node installs: `make bench-install`.

Builds the wheel of this checkout and installs it, without its extra `train`, into a new environment, as a
person would: pip chooses the versions. The last line on stdout is JSON: `mb` and `s`, megabytes on disk
beyond those of the empty environment, and seconds of `pip install`; beside them those of torch alone.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path) -> Path:
    """Builds the wheel in the folder, from a copy: setuptools writes into its source folder."""
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():  # a deleted file is listed until that is committed
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    run_pip(sys.executable, "wheel", *options, str(source))
    return next(folder.glob("clipship-*.whl"))


def empty_environment(home: Path) -> Path:
    """Makes an environment that has pip and nothing else; returns its Python."""
    venv.create(home, clear=True, with_pip=True)
    return home / "bin" / "python"


def run_pip(python: str | Path, *arguments: str) -> None:
    """Runs pip; its output is shown if it fails."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout}")


def megabytes(home: Path) -> float:
    """Returns the size of all files below a folder, a file of several links once, in 10^6 bytes."""
    files = {(each.st_dev, each.st_ino): each.st_size for each in map(Path.lstat, home.rglob("*"))}
    return sum(files.values()) / 1e6


def install(home: Path, what: Sequence[str]) -> dict[str, float]:
    """Installs into a new environment; returns megabytes and seconds."""
    python = empty_environment(home)
    before, began = megabytes(home), time.monotonic()
    run_pip(python, "install", "--quiet", *what)
    return {"mb": round(megabytes(home) - before, 1), "s": round(time.monotonic() - began, 1)}


@click.command(help=__doc__)
@click.option("--torch/--no-torch", default=True, show_default=True, help="Install torch alone, too: 6 GB.")
def main(torch: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="clipship-install-") as name:
        folder = Path(name)
        report = install(folder / "ours", [str(build_wheel(folder))])
        print(f"clipship without extras: {report['mb']:.0f} MB, {report['s']:.1f} s")
        if torch:
            other = install(folder / "torch", ["torch"])
            print(f"torch alone: {other['mb']:.0f} MB, {other['s']:.1f} s")
            report |= {"torch_mb": other["mb"], "torch_s": other["s"]}
            report["ratio_mb"] = round(other["mb"] / report["mb"], 1)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
