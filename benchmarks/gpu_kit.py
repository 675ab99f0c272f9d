"""One folder with which a GPU machine without network measures this project: `make gpu-kit`.

It has the sources, the wheels of all that they need beside torch and torchvision, and `check`, which runs
`benchmarks.gpu_check`. Copy it there, and run `bash gpu-kit/check 3600`: seconds that it may take at most.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = (
    "open-clip-torch",
    "timm",
    "transformers",
    "webdataset",
    "ftfy",
    "regex",
    "pydantic",
    "click",
    "tomli-w",
    "simplejpeg",
    "nvidia-ml-py",
    "fsspec",
    "jinja2",
    "psutil",
    "scikit-learn",
    "pytest",
    "pytest-timeout",
    "hypothesis",
)
"""Packages that the trainer, the GPU's tests and the benchmarks import, beside torch."""
BESIDE_TORCH = frozenset({"torch", "torchvision", "numpy", "pillow", "triton"})
"""Packages that the machine has: its torch was built for its driver, and torchvision brings the rest."""
FOLDERS = (
    "trainer",
    "benchmarks",
    "tests",
    "docker",
    "slurm",
    "k8s",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
_PLATFORMS = ("2_39", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17")
CHECK = Path(__file__).with_name("gpu_check.sh")


@click.command(help=__doc__)
@click.option("--out", default="gpu-kit", show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--python", "version", default="3.12", show_default=True, help="Python of the GPU machine, as 3.12."
)
@click.option("--have", default="", help="Packages that are there already, with commas between.")
def main(out: Path, version: str, have: str) -> None:
    """Write the folder."""
    if out.exists():
        if not (out / "check").is_file():
            raise click.ClickException(f"{out} exists and is no kit: name another folder with --out")
        shutil.rmtree(out)
    copied = copy_sources(Path.cwd(), out / "clipship")
    (out / "wheels").mkdir()
    pins = sorted(pinned(ROOTS, leave_out=frozenset(map(canonicalize_name, have.split(",")))))
    print(f"{copied} files; fetching {len(pins)} wheels for Python {version}")
    fetch(pins, version, out / "wheels")
    shutil.copy(CHECK, out / "check")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.0f} MB. Copy it to the GPU machine, and there: bash {out.name}/check")


def copy_sources(root: Path, to: Path) -> int:
    """Copies the files of `FOLDERS` that git does not ignore; links stay links. Returns their number."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard", *FOLDERS],
        cwd=root,
        capture_output=True,
        check=True,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name and (root / name).exists()]
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, to / name, follow_symlinks=False)
    return len(names)


def pinned(names: tuple[str, ...], leave_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields NAME==VERSION of the packages and all that they need, as they are installed here.

    What is beside torch on every machine is left out, and what only that needs.
    """
    waiting, seen = list(names), set(BESIDE_TORCH)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            raise click.ClickException(f"{name} is not installed here: `make venv` first") from None
        needed = [Requirement(text) for text in found.requires or ()]
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
        if name not in leave_out:
            yield f"{name}=={found.version}"


def fetch(pins: list[str], version: str, to: Path) -> None:
    """Downloads a wheel of each for that Python on x86-64; `pip` says what cannot be had."""
    tags = [word for tag in _PLATFORMS for word in ("--platform", f"manylinux_{tag}_x86_64")]
    tags += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", version, "--implementation", "cp", *tags]
    if subprocess.run([*command, "-d", str(to), *pins], check=False).returncode:
        raise click.ClickException(f"pip could not fetch all wheels for Python {version}: see above")


if __name__ == "__main__":
    main()
