"""The table of stacks is compared with what wheels declare."""

import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.support.pages import ROOT
from tests.support.range_server import serving
from tools import check_table
from tools.check_table import compare, compare_arm64, compare_horovod
from tools.wheel_index import Release
from trainer.config.stack_table import table
from trainer.image.pins import pins

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
        ("9.24.0.43", "9.26.0.51", "cudnn is 9.24.0.43"),
        (">=77.0.3", "<82", "setuptools is >=77.0.3"),
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


def test_the_parenthesised_form_of_old_wheels_is_read() -> None:
    old = table().row("2.6.0")
    requires = (
        'setuptools ; python_version >= "3.12"',
        'nvidia-cuda-runtime-cu12 (==12.4.127) ; platform_system == "Linux"',
        'nvidia-cudnn-cu12 (==9.1.0.70) ; platform_system == "Linux"',
        'nvidia-nccl-cu12 (==2.21.5) ; platform_system == "Linux"',
        'triton (==3.2.0) ; platform_system == "Linux"',
    )
    assert list(compare(old, Release("2.6.0", ("3.9", "3.13"), "", requires))) == []


def test_each_cuda_whose_compiler_comes_from_the_package_index_has_its_pins() -> None:
    known = table()
    from_index = {row.cuda for row in known.rows if "pypi" in known.cuda[row.cuda].nvcc}
    assert from_index
    for cuda in from_index:
        lock = (ROOT / "docker" / f"requirements-cuda-{cuda}.txt").read_text()
        assert f"nvidia-cuda-nvcc=={cuda}." in lock


def test_each_newer_nccl_has_its_pins_and_takes_the_place_of_older_ones_of_its_cuda() -> None:
    known = table()
    for version, release in known.nccl.items():
        lock = (ROOT / "docker" / f"requirements-nccl-{version}.txt").read_text()
        assert lock.startswith(f"nvidia-nccl-cu{release.cuda_major}=={version} ")
    [newest] = known.nccl
    row = known.stack("2.13.0", newest)
    assert (row.nccl, [bad for bad in row.known_bad if bad.nccl]) == (newest, []), (
        "what is known to be bad is of the older NCCL"
    )
    assert known.matching("2.13.0+cu130", "13.0", newest) == row
    assert known.matching("2.13.0", "13.0", "2.29.7") == known.row("2.13.0")
    assert known.matching("2.13.0", "13.0", "2.31.0") is None
    assert known.stack("2.10.0", newest) == known.row("2.10.0"), "which has CUDA 12"


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


def _publish(
    index: Path, package: str, version: str, pythons: Sequence[str], requires: Sequence[str]
) -> None:
    """Wheels of one release, with a page for the package as an index has it; no METADATA beside them."""
    folder = index / package
    folder.mkdir(exist_ok=True)
    name = package.replace("-", "_")
    metadata = "".join(f"Requires-Dist: {text}\n" for text in requires)
    with (folder / "index.html").open("a") as page:
        for python, machine in product(pythons, ("x86_64", "aarch64")):
            wheel = f"{name}-{version}-{python}-{python}-manylinux_2_28_{machine}.whl"
            with zipfile.ZipFile(folder / wheel, "w") as archive:
                archive.writestr(
                    f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\n{metadata}"
                )
            page.write(f'<a href="{wheel}#sha256=0">{wheel}</a>\n')


def _checked(monkeypatch: pytest.MonkeyPatch, index: str) -> int:
    """`make check-stacks` with a table of one row."""
    known = replace(table(), rows=(ROW,))
    monkeypatch.setattr(check_table, "table", lambda: known)
    monkeypatch.setenv("PIP_INDEX_URL", index)
    return check_table.main()


def test_the_table_is_held_against_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _publish(tmp_path, "torch", "2.14.1", ("cp310", "cp314"), REQUIRES)
    _publish(tmp_path, "torchvision", "0.29.2", ("cp310",), ["torch==2.14.1"])
    _publish(tmp_path, "nvidia-nccl-cu13", "2.30.7", ("py3",), [])
    _publish(tmp_path, "nvidia-nccl-cu13", "2.32.3", ("py3",), [])
    (tmp_path / "horovod").mkdir()
    archive = f"horovod-{table().horovod}.tar.gz"
    link = f'<a href="{archive}#sha256={table().horovod_sha256}">{archive}</a>'
    (tmp_path / "horovod" / "index.html").write_text(link)
    with serving(tmp_path) as (address, _):
        assert _checked(monkeypatch, address) == 0
        assert "1 row, 0 differences from the index\n" in capsys.readouterr().err
        _publish(tmp_path, "nvidia-nccl-cu13", "2.33.0", ("py3",), [])
        assert _checked(monkeypatch, address) == 1
        assert capsys.readouterr().out == "nvidia-nccl-cu13 2.33.0: on the index, the table has 2.32.3\n"
        shutil.rmtree(tmp_path / "nvidia-nccl-cu13")
        _publish(tmp_path, "nvidia-nccl-cu13", "2.30.7", ("py3",), [])
        assert _checked(monkeypatch, address) == 1
        assert capsys.readouterr().out.splitlines() == [
            f"torch 2.14.1: nvidia-nccl-cu13 2.32.3 for linux/{machine} is not on the index"
            for machine in ("amd64", "arm64")
        ]
        _publish(tmp_path, "nvidia-nccl-cu13", "2.32.3", ("py3",), [])
        _publish(tmp_path, "torch", "2.16.0", ("cp311",), REQUIRES)
        _publish(tmp_path, "torch", "2.0.1", ("cp311",), REQUIRES)  # older than the table's oldest
        assert _checked(monkeypatch, address) == 1
        assert capsys.readouterr().out == "torch 2.16.0: on the index, not in the table\n"
        shutil.rmtree(tmp_path / "torchvision")
        _publish(tmp_path, "torchvision", "0.29.2", ("cp310",), ["torch==2.14.0"])
        shutil.rmtree(tmp_path / "torch")
        newer = [text.replace("2.30.7", "2.31.0") for text in REQUIRES]
        _publish(tmp_path, "torch", "2.14.1", ("cp310", "cp314"), newer)
        assert _checked(monkeypatch, address) == 1
        assert capsys.readouterr().out.splitlines() == [
            "torch 2.14.1: nccl is 2.30.7 in the table, 2.31.0 in the wheel",
            (
                "torch 2.14.1: its wheel for arm64 wants nvidia-nccl-cu13==2.31.0; "
                'platform_system == "Linux", the table has 2.30.7'
            ),
            (
                "torch 2.14.1: its wheel for arm64 wants nvidia-nccl-cu13==2.31.0; "
                'platform_system == "Linux", which docker/torch does not pin'
            ),
            "torch 2.14.1: torchvision 0.29.2 wants torch==2.14.0",
        ]


def test_a_newer_horovod_and_another_archive_are_differences() -> None:
    known = table()
    ours = {known.horovod: known.horovod_sha256}
    assert list(compare_horovod(known, ours)) == []
    assert list(compare_horovod(known, {known.horovod: ""})) == [], "an index may say no hash"
    assert list(compare_horovod(known, {**ours, "0.100.0": "x"})) == [
        f"horovod 0.100.0: on the index, the table has {known.horovod}"
    ]
    (said,) = compare_horovod(known, {known.horovod: "0" * 64})
    assert said.startswith(f"horovod {known.horovod}: its sha256 is {known.horovod_sha256} in the table, 000")
    assert "in the table, not on the index" in " ".join(compare_horovod(known, {"0.1.0": ""}))


def test_a_wheel_for_arm64_is_held_against_the_table_and_the_pins() -> None:
    x86 = tuple(text + ' and platform_machine == "x86_64"' for text in REQUIRES if "nccl" in text)
    older = table().row("2.10.0")
    assert list(compare_arm64(older, Release("2.10.0", ("3.12",), "2.28", x86), {})) == []
    assert list(compare_arm64(older, None, {})) == []
    (said,) = compare_arm64(older, Release("2.10.0", ("3.12",), "2.28", REQUIRES), {})
    assert "has CUDA, the table has no archs_arm64" in said
    assert list(compare_arm64(ROW, Release("2.14.1", ("3.12",), "2.28", REQUIRES), {})) == []
    (said,) = compare_arm64(ROW, None, {})
    assert "wants no NCCL" in said
    (said,) = compare_arm64(ROW, Release("2.14.1", ("3.12",), "2.28", (*REQUIRES, "new>=1")), pins(ROW))
    assert said == "torch 2.14.1: its wheel for arm64 wants new>=1, which docker/torch does not pin"


def test_an_index_that_does_not_answer_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _checked(monkeypatch, "http://127.0.0.1:9/simple") == 1
    said = capsys.readouterr().err
    assert said.startswith("check-stacks: http://127.0.0.1:9/simple does not answer: ")
    assert len(said.splitlines()) == 1
