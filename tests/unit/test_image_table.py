"""The table of stacks is compared with what wheels declare."""

import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT
from tools.check_table import compare
from tools.wheel_index import Release
from trainer.config.stack_table import table

ROW = table().row("2.14.1")
REQUIRES = (
    "setuptools>=77.0.3",
    'cuda-toolkit[cublas,cudart]==13.0.3; platform_system == "Linux"',
    'nvidia-cudnn-cu13==9.24.0.43; platform_system == "Linux"',
    'nvidia-nccl-cu13==2.30.7; platform_system == "Linux"',
    'triton~=3.8.0; platform_system == "Linux" and python_version < "3.15"',
)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", None),
        ("2.30.7", "2.31.2", "nccl is 2.30.7 in the table, 2.31.2 in the wheel"),
        ("==13.0.3", "==13.2.2", "cuda is 13.0 in the table, 13.2 in the wheel"),
        ("~=3.8.0", "~=3.9.0", "triton is 3.8.0"),
        ("2.28", "2.34", "glibc is 2.28 in the table, 2.34 in the wheel"),
        ("3.10", "3.11", "python is 3.10 to 3.14 in the table, 3.11 to 3.14 in the wheel"),
    ],
)
def test_a_difference_names_both_sides(old: str, new: str, said: str | None) -> None:
    def changed(text: str) -> str:
        return text.replace(old, new) if old else text

    release = Release("2.14.1", (changed("3.10"), "3.14"), changed("2.28"), tuple(map(changed, REQUIRES)))
    found = list(compare(ROW, release))
    assert len(found) == (said is not None)
    assert all(text.startswith("torch 2.14.1: ") and str(said) in text for text in found)


def test_each_cuda_whose_compiler_comes_from_the_package_index_has_its_pins() -> None:
    known = table()
    from_index = {row.cuda for row in known.rows if "pypi" in known.cuda[row.cuda].nvcc}
    assert from_index
    for cuda in from_index:
        lock = (ROOT / "docker" / f"requirements-cuda-{cuda}.txt").read_text()
        assert f"nvidia-cuda-nvcc=={cuda}." in lock


def test_torch_asks_for_the_nccl_that_takes_the_place_of_its_own(tmp_path: Path) -> None:
    metadata = tmp_path / "lib" / "python3.11" / "site-packages" / "torch-2.14.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Name: torch\n" + "".join(f"Requires-Dist: {text}\n" for text in REQUIRES))
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/asked\n')
    pip.chmod(0o755)
    command = ["sh", str(ROOT / "docker" / "nccl.sh"), str(tmp_path), "/docker/nccl.txt"]
    subprocess.run([*command, "nvidia-nccl-cu13", "2.32.3"], check=True)
    assert "--no-deps --require-hashes --requirement /docker/nccl.txt" in (tmp_path / "asked").read_text()
    text = metadata.read_text()
    assert 'Requires-Dist: nvidia-nccl-cu13==2.32.3; platform_system == "Linux"\n' in text
    assert text.count("2.32.3") == 1
    other = subprocess.run([*command, "nvidia-nccl-cu12", "2.32.3"], capture_output=True, text=True)
    assert (other.returncode, other.stdout) == (1, "nccl.sh: torch does not ask for nvidia-nccl-cu12\n")
