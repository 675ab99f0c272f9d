"""Versions of the packages that a run's results depend on, and whether open_clip's is one that fits."""

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "torchvision", "open_clip_torch", "webdataset", "numpy", "pillow")


def versions() -> dict[str, str]:
    """Returns the installed version of each package in PACKAGES.

    Raises PackageNotFoundError if one is missing.
    """
    return dict(_versions())


def installed(package: str) -> str:
    """Returns the installed version of a package; "" if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, version(name)) for name in PACKAGES)


PACKAGE = "open_clip_torch"
FROM, BELOW = (3, 3), (4,)
"""Releases of open_clip_torch that pyproject.toml allows. 4 is not published, its main branch is tested."""


def unsupported(release: str) -> str:
    """Returns a sentence about a release of open_clip_torch that was not tried; "" for the others."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if not numbers or FROM <= numbers < BELOW:
        return ""
    return (
        f"open_clip_torch {release} is none of the releases that Clipship is written for: install one from "
        "3.3 to below 4 (pip install 'open_clip_torch>=3.3,<4')"
    )
