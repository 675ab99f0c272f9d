"""How the table is compared with what wheels declare."""

import pytest

from trainer.launch.image.check_table import compare
from trainer.launch.image.table import Row, table
from trainer.launch.image.wheel_index import Release
from trainer.launch.templates import FOLDER

ROW = table().row("2.14.1")
REQUIRES = (
    "setuptools>=77.0.3",
    'cuda-toolkit[cublas,cudart]==13.0.3; platform_system == "Linux"',
    'nvidia-cudnn-cu13==9.24.0.43; platform_system == "Linux"',
    'nvidia-nccl-cu13==2.30.7; platform_system == "Linux"',
    'triton~=3.8.0; platform_system == "Linux" and python_version < "3.15"',
)


def test_a_row_that_says_what_the_wheel_says_has_no_difference() -> None:
    assert list(compare(ROW, Release("2.14.1", ("3.10", "3.14"), REQUIRES))) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("2.30.7", "2.31.2", "nccl is 2.30.7 in the table, 2.31.2 in the wheel"),
        ("==13.0.3", "==13.2.2", "cuda is 13.0 in the table, 13.2 in the wheel"),
        ("~=3.8.0", "~=3.9.0", "triton is 3.8.0"),
        ("9.24.0.43", "9.26.0.51", "cudnn is 9.24.0.43"),
        (">=77.0.3", "<82", "setuptools is >=77.0.3"),
    ],
)
def test_a_difference_names_both_sides(old: str, new: str, said: str) -> None:
    changed = tuple(text.replace(old, new) for text in REQUIRES)
    found = list(compare(ROW, Release("2.14.1", ("3.10", "3.14"), changed)))
    assert len(found) == 1
    assert said in found[0]


def test_a_python_that_lost_its_wheels_is_a_difference() -> None:
    assert list(compare(ROW, Release("2.14.1", ("3.11", "3.14"), REQUIRES))) == [
        "torch 2.14.1: python is 3.10 to 3.14 in the table, 3.11 to 3.14 in the wheel"
    ]


def test_the_parenthesised_form_of_old_wheels_is_read() -> None:
    old: Row = table().row("2.6.0")
    requires = (
        'setuptools ; python_version >= "3.12"',
        'nvidia-cuda-runtime-cu12 (==12.4.127) ; platform_system == "Linux"',
        'nvidia-cudnn-cu12 (==9.1.0.70) ; platform_system == "Linux"',
        'nvidia-nccl-cu12 (==2.21.5) ; platform_system == "Linux"',
        'triton (==3.2.0) ; platform_system == "Linux"',
    )
    assert list(compare(old, Release("2.6.0", ("3.9", "3.13"), requires))) == []


def test_each_cuda_whose_compiler_comes_from_the_package_index_has_its_pins() -> None:
    known = table()
    from_index = {row.cuda for row in known.rows if "pypi" in known.cuda[row.cuda].nvcc}
    assert from_index
    for cuda in from_index:
        pins = (FOLDER / "docker" / f"requirements-cuda-{cuda}.txt").read_text()
        assert f"nvidia-cuda-nvcc=={cuda}." in pins
