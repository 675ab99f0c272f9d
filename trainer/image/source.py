"""Selects the files of Clipship that an image is built from, by their names in the build context.

A checkout gives the files that git tracks, so that no secret, data or scratch file in it reaches an image. A
checkout without git, such as an unpacked archive, gives files of the kinds that Clipship has. An installed
package gives the files that its installer recorded; its wheel carries the files from outside the package in
`trainer/templates/`. Asks only git; uses no daemon.
"""

import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from trainer.errors import InputError

ROOT = Path(__file__).parents[2]
"""The checkout's folder; for an installed package, the folder of packages."""
_FILES = ("pyproject.toml", "README.md", "LICENSE")
_FOLDERS = ("docker", "slurm", "k8s", "trainer")
_KINDS = (".conf", ".css", ".in", ".j2", ".js", ".json", ".py", ".sh", ".toml", ".txt")
_TEMPLATES = ("trainer", "templates")
_PROJECT = "project"
"""Folder of the templates with links to _FILES, so that a wheel carries them."""


def source_files(root: Path = ROOT) -> dict[str, Path]:
    """Returns each file by its name in the context, in order.

    Raises InputError if the files cannot be determined.
    """
    if not (root / "pyproject.toml").is_file():
        return dict(sorted(_of_package(root)))
    names = _tracked(root) if by_git(root) else _of_our_kinds(root)
    return {name: root / name for name in names}


def left_out(root: Path = ROOT) -> list[str]:
    """Returns files of Clipship's kinds that the image will lack: git neither tracks nor ignores them."""
    if not by_git(root):
        return []
    others = _git(root, "--others", "--exclude-standard", "--", *_FOLDERS)
    return [name for name in others if name.endswith(_KINDS)]


def by_git(root: Path = ROOT) -> bool:
    """Returns whether git can tell which files belong to the checkout."""
    return (root / ".git").exists() and shutil.which("git") is not None


def revision() -> str:
    """Returns the checkout's commit, with a plus if files differ; "unknown" if git cannot tell."""
    if not by_git():
        return "unknown"
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _tracked(root: Path) -> list[str]:
    """Returns the tracked files in the order of the folders, without those deleted since the last commit."""
    names = _git(root, "--cached", "--", *_FILES, *_FOLDERS)
    there = [name for name in names if (root / name).is_symlink() or (root / name).is_file()]
    return sorted(there, key=_place)


def _git(root: Path, *arguments: str) -> list[str]:
    answer = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", *arguments], capture_output=True, check=False
    )
    if answer.returncode:
        message = answer.stderr.decode(errors="replace").strip()
        raise InputError(
            f"an image is built from the files of {root} that git tracks, but git cannot list them: {message}"
        )
    return [name.decode() for name in answer.stdout.split(b"\0") if name]


def _of_our_kinds(root: Path) -> list[str]:
    paths = [path for folder in _FOLDERS for path in (root / folder).rglob("*")]
    ours = [path for path in paths if path.is_symlink() or (path.is_file() and path.name.endswith(_KINDS))]
    return sorted([*_FILES, *(path.relative_to(root).as_posix() for path in ours)], key=_place)


def _place(name: str) -> tuple[int, str]:
    first = name.partition("/")[0]
    return (_FILES + _FOLDERS).index(first), name


def _of_package(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields the package's files.

    Those below its templates also come under the name that they have in a checkout.
    """
    for name in _recorded(root):
        parts = PurePosixPath(name).parts
        if parts[:1] != ("trainer",) or name.endswith(".pyc"):
            continue
        yield name, root / name
        if parts[:2] == _TEMPLATES:
            inner = parts[3:] if parts[2] == _PROJECT else parts[2:]
            yield "/".join(inner), root / name


def _recorded(root: Path) -> list[str]:
    package = next((entry for entry in distributions(path=[str(root)]) if _is_clipship(entry)), None)
    names = [file.as_posix() for file in package.files or ()] if package else []
    wanted = ["/".join((*_TEMPLATES, _PROJECT, name)) for name in _FILES]
    if not set(wanted) <= set(names):
        raise InputError(
            f"an image is built from a checkout of Clipship or from its installed wheel, and {root} is "
            "neither: run this command in one"
        )
    return names


def _is_clipship(package: Distribution) -> bool:
    return package.metadata["Name"] == "clipship"
