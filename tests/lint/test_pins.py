"""The pinned requirements and pyproject.toml agree with one another."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainer.config.stack_table import StackRow, table

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / f"docker/torch/{table().default}.txt"
OTHER_TORCHES = sorted(set(ROOT.glob("docker/torch/*.txt")) - {DEFAULT})
PINS = sorted([*ROOT.glob("docker/requirements*.txt"), *ROOT.glob("tests/requirements*.txt"), DEFAULT])
NEWER_NCCLS = sorted(ROOT.glob("docker/requirements-nccl-*.txt"))
"""Versions of NCCL that an image may have in place of the one that its torch pins."""


def pinned(path: Path) -> dict[str, str]:
    """Version by normalized name."""
    return {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE)
    }


def test_every_dependency_of_the_package_is_pinned_within_its_bound() -> None:
    pins = (
        pinned(ROOT / "docker/requirements.txt")
        | pinned(DEFAULT)
        | pinned(ROOT / "docker/requirements-mpi.txt")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(line) for line in (*project["dependencies"], *extras["train"], *extras["mpi"])]
    outside = [
        str(need)
        for need in wanted
        if not need.specifier.contains(pins.get(canonicalize_name(need.name), "0"))
    ]
    assert outside == []


def test_no_lock_file_is_of_a_stack_that_is_gone() -> None:
    assert {path.stem for path in (*OTHER_TORCHES, DEFAULT)} == {
        row.torch for row in table().rows if table().trains(row)
    }


@pytest.mark.parametrize(
    "row", [row for row in table().rows if table().trains(row)], ids=lambda row: row.torch
)
def test_each_stack_that_the_trainer_runs_on_is_pinned_as_the_table_says(row: StackRow) -> None:
    pins = pinned(ROOT / f"docker/torch/{row.torch}.txt")
    nccl = next(version for name, version in pins.items() if name.startswith("nvidia-nccl-cu"))
    assert (pins["torch"], pins["torchvision"], pins["triton"], nccl) == (
        row.torch,
        row.torchvision,
        row.triton,
        row.nccl,
    )
    assert not pins.keys() & pinned(ROOT / "docker/requirements.txt").keys()


@pytest.mark.parametrize("path", [*PINS, *OTHER_TORCHES], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_pins_carry_hashes_and_no_address(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"://|--(extra-)?index|--find-links|^-f", text, re.MULTILINE)
    blocks = re.split(r"\n(?=\S)", text)
    assert [
        block.splitlines()[0] for block in blocks if "==" in block and "--hash=sha256:" not in block
    ] == []


@pytest.mark.parametrize("path", NEWER_NCCLS, ids=lambda path: path.name)
def test_a_newer_nccl_is_pinned_alone(path: Path) -> None:
    assert [name.rpartition("-")[0] for name in pinned(path)] == ["nvidia-nccl"]
    assert path.name == f"requirements-nccl-{next(iter(pinned(path).values()))}.txt"


def test_files_that_share_a_package_pin_the_same_version() -> None:
    versions: dict[str, set[str]] = {}
    of_another_stack = {ROOT / "docker/requirements-cuda-13.2.txt", *NEWER_NCCLS}
    for path in set(PINS) - of_another_stack:
        for name, version in pinned(path).items():
            versions.setdefault(name, set()).add(version)
    assert {name: sorted(found) for name, found in versions.items() if len(found) > 1} == {}
