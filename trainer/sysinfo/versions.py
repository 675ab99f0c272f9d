"""Versions of the packages that a run's results depend on."""

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
