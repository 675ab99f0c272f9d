"""Compares docker/stacks.toml with what the wheels on the package index declare, for `make check-stacks`.

Asks pip for the index's URL.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement

from tools.wheel_index import Release, release, releases, sdists
from trainer.config.stack_table import ARM64, MACHINES, StackRow, StackTable, number, table
from trainer.image.pins import normal, of_linux, pins
from trainer.text.wording import many

_PIP_DEFAULT = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"


def main() -> int:
    """Print each difference; returns 1 if there is one or if the index does not answer."""
    known, index = table(), _index_url()
    try:
        differences = [
            *_differences(known, index),
            *_horovod(known, index),
            *_nccl(known, index),
            *_newest_nccl(known, index),
        ]
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


def _differences(known: StackTable, index_url: str) -> Iterator[str]:
    oldest = number(known.rows[-1].torch)
    torches = {
        version: wheels for version, wheels in releases(index_url, "torch") if number(version) >= oldest
    }
    visions = dict(releases(index_url, "torchvision"))
    arm64 = dict(releases(index_url, "torch", MACHINES[ARM64]))
    for missing in sorted(set(torches) - {row.torch for row in known.rows}, key=number):
        yield f"torch {missing}: on the index, not in the table"
    for row in known.rows:
        if row.torch not in torches:
            yield f"torch {row.torch}: in the table, not on the index"
            continue
        yield from compare(row, release(row.torch, torches[row.torch]))
        on_arm64 = release(row.torch, arm64[row.torch]) if row.torch in arm64 else None
        yield from compare_arm64(row, on_arm64, pins(row) if known.trains(row) else {})
        if row.torchvision not in visions:
            yield f"torch {row.torch}: torchvision {row.torchvision} is not on the index"
        else:
            yield from _compare_vision(row, release(row.torchvision, visions[row.torchvision]))


def _horovod(known: StackTable, index_url: str) -> Iterator[str]:
    yield from compare_horovod(known, sdists(index_url, "horovod"))


def compare_horovod(known: StackTable, archives: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence if the table's Horovod is not the newest of the archives, or has another hash."""
    newest = max(archives, key=number, default="")
    if newest and number(newest) > number(known.horovod):
        yield f"horovod {newest}: on the index, the table has {known.horovod}"
    if known.horovod not in archives:
        yield f"horovod {known.horovod}: in the table, not on the index"
    elif archives[known.horovod] not in ("", known.horovod_sha256):
        yield (
            f"horovod {known.horovod}: its sha256 is {known.horovod_sha256} in the table, "
            f"{archives[known.horovod]} on the index"
        )


def _nccl(known: StackTable, index_url: str) -> Iterator[str]:
    """Yields a sentence for each NCCL of a stack for whose platforms the index has no wheel."""
    for platform, machine in MACHINES.items():
        rows = [row for row in known.rows if row.archs_on(platform)]
        rows += [row.with_nccl(version) for row in rows[:1] for version in known.newer_nccls(row)]
        for package in dict.fromkeys(row.nccl_package for row in rows):
            there = dict(releases(index_url, package, machine))
            for row in rows:
                if row.nccl_package == package and row.nccl not in there:
                    yield f"torch {row.torch}: {package} {row.nccl} for {platform} is not on the index"


def _newest_nccl(known: StackTable, index_url: str) -> Iterator[str]:
    """Yields a sentence if the index has a newer NCCL than any stack of the newest CUDA can have."""
    row = max(known.rows, key=lambda row: row.cuda_major)
    newest = max(dict(releases(index_url, row.nccl_package)), key=number, default="0")
    ours = max((other.nccl for other in known.rows if other.cuda_major == row.cuda_major), key=number)
    ours = max([ours, *known.newer_nccls(row)], key=number)
    if number(newest) > number(ours):
        yield f"{row.nccl_package} {newest}: on the index, the table has {ours}"


def compare_arm64(row: StackRow, wheel: Release | None, pinned: Mapping[str, str]) -> Iterator[str]:
    """Yields a sentence for each way in which the row's wheel for arm64 differs from the table and the pins.

    `wheel` None means that the index has none; empty `pinned` that the row has no pins.
    """
    wanted = [] if wheel is None else [need for need in map(Requirement, wheel.requires) if _on_arm64(need)]
    nccl = next((need for need in wanted if need.name.startswith("nvidia-nccl-cu")), None)
    if not row.archs_arm64:
        if nccl is not None:
            yield f"torch {row.torch}: its wheel for arm64 has CUDA, the table has no archs_arm64"
        return
    if nccl is None or not nccl.specifier.contains(row.nccl):
        yield f"torch {row.torch}: its wheel for arm64 wants {nccl or 'no NCCL'}, the table has {row.nccl}"
    for need in wanted if pinned else ():
        if not need.specifier.contains(pinned.get(normal(need.name), "0")):
            yield f"torch {row.torch}: its wheel for arm64 wants {need}, which docker/torch does not pin"


def _on_arm64(need: Requirement) -> bool:
    """Returns whether the requirement holds on Linux on arm64, without extras."""
    return need.marker is None or need.marker.evaluate({**of_linux(ARM64), "extra": ""})


def compare(row: StackRow, wheel: Release) -> Iterator[str]:
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


def _compare_vision(row: StackRow, wheel: Release) -> Iterator[str]:
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
