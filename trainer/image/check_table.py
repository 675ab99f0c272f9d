"""Compares docker/stacks.toml with what the wheels on the package index declare, for `make check-stacks`.

Asks pip for the index's URL.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator

from trainer.config.stack_table import Row, Table, number, table
from trainer.image.wheel_index import Release, release, releases
from trainer.text.wording import many

_PIP_DEFAULT = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"


def main() -> int:
    """Print each difference; returns 1 if there is one or if the index does not answer."""
    known, index = table(), _index_url()
    try:
        differences = list(_differences(known, index))
    except OSError as problem:  # the errors of urllib are OSErrors
        print(
            f"check-stacks: {index} does not answer: {problem}; PIP_INDEX_URL names another index",
            file=sys.stderr,
        )
        return 1
    for line in differences:
        print(line)
    print(
        f"check-stacks: {many(len(known.rows), 'row')}, "
        f"{many(len(differences), 'difference')} from the index",
        file=sys.stderr,
    )
    return 1 if differences else 0


def _differences(known: Table, index_url: str) -> Iterator[str]:
    oldest = number(known.rows[-1].torch)
    torches = {
        version: wheels for version, wheels in releases(index_url, "torch") if number(version) >= oldest
    }
    visions = dict(releases(index_url, "torchvision"))
    for missing in sorted(set(torches) - {row.torch for row in known.rows}, key=number):
        yield f"torch {missing}: on the index, not in the table"
    for row in known.rows:
        if row.torch not in torches:
            yield f"torch {row.torch}: in the table, not on the index"
            continue
        yield from compare(row, release(row.torch, torches[row.torch]))
        if row.torchvision not in visions:
            yield f"torch {row.torch}: torchvision {row.torchvision} is not on the index"
        else:
            yield from _compare_vision(row, release(row.torchvision, visions[row.torchvision]))


def compare(row: Row, wheel: Release) -> Iterator[str]:
    """Yields a sentence for each value in which the row differs from the wheel."""
    declared = {
        "python": f"{wheel.pythons[0]} to {wheel.pythons[-1]}",
        "nccl": _pin(wheel, r"nvidia-nccl-cu\d+"),
        "cudnn": _pin(wheel, r"nvidia-cudnn-cu\d+"),
        "triton": _pin(wheel, "triton"),
        "setuptools": _bound(wheel, "setuptools"),
        "cuda": ".".join(
            (_pin(wheel, "cuda-toolkit") or _pin(wheel, r"nvidia-cuda-runtime-cu\d+")).split(".")[:2]
        ),
    }
    if wheel.glibc:
        declared["glibc"] = wheel.glibc
    ours = {name: getattr(row, name) for name in declared} | {"python": " to ".join(row.python)}
    for name, value in declared.items():
        if value != ours[name]:
            yield (
                f"torch {row.torch}: {name} is {ours[name] or 'unset'} in the table, {value or 'unset'} in "
                "the wheel"
            )


def _compare_vision(row: Row, wheel: Release) -> Iterator[str]:
    wanted = next(
        (requirement for requirement in wheel.requires if re.match(r"torch\b(?!vision)", requirement)), ""
    )
    versions = re.findall(r"([=>]=)\s*([\d.]+)", wanted)
    for comparison, version in versions:
        if (comparison == "==" and version != row.torch) or number(version) > number(row.torch):
            yield f"torch {row.torch}: torchvision {row.torchvision} wants {wanted}"


def _requirement(wheel: Release, name: str) -> str:
    return next(
        (text.partition(";")[0] for text in wheel.requires if re.match(rf"{name}(?![\w-])", text)), ""
    )


def _pin(wheel: Release, name: str) -> str:
    pinned = re.search(r"[=~]=\s*([\d.]+)", _requirement(wheel, name))
    return pinned[1] if pinned else ""


def _bound(wheel: Release, name: str) -> str:
    bound = re.search(r"[<>]=?\s*[\d.]+", _requirement(wheel, name))
    return bound[0] if bound else ""


def _index_url() -> str:
    """Returns the URL of the index that pip would ask.

    It comes from pip's environment, its configuration, or its own default.
    """
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    if configured.returncode == 0:
        return configured.stdout.strip()
    return subprocess.run(
        [sys.executable, "-c", _PIP_DEFAULT], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
