"""Problems that are refused before anything is built, and the compatible choices that the messages name."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.pages import ROOT
from tests.support.refusals import refusal
from tools.check_table import compare
from tools.wheel_index import Release
from trainer.config import Job
from trainer.config.loader import job_from_table
from trainer.config.stack_table import table
from trainer.image.dockerfile import dockerfile
from trainer.image.pins import pins


def job_of(words: str = "") -> Job:
    """A job with words of `--set`, each of which begins with its section."""
    own = re.split(" (?=stack|image)", words) if words else []
    job = {"name": "x", "data": {"format": "synthetic"}, "optim": {"global_batch_size": 8, "steps": 1}}
    return job_from_table(job, "a test", ["image.tag=clipship:1", *own])


def refusal_of(words: str) -> str:
    return refusal(dockerfile, job_of(words))


CUDA_12_8 = "stack.torch=2.10.0 image.base=nvidia/cuda:12.8.{}-ubuntu24.04"
CUDA_13 = "image.base=nvidia/cuda:13.{}"
OWN = "stack.torch=base image.base=o/t:1 image.os=ubuntu-24.04"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ('stack.archs=["7.0"]', "no code for 7.0 | 7.5 | torch 2.6.0 or 2.10.0"),
        ("stack.driver=570", "needs driver 580 | given 570 | torch 2.6.0 or 2.10.0"),
        ("stack.nccl=2.29.7", "brings NCCL 2.30.7 | torch 2.13.0 | or stack.nccl = 2.32.3"),
        ("stack.torch=2.8.0 stack.nccl=2.32.3 image.os=debian-12", "brings NCCL 2.27.3 | torch 2.15.0"),
        (
            'stack.nccl=2.32.3 image.pip_packages=["nvidia-nccl-cu13==2.30.7"]',
            "pins nvidia-nccl-cu13 to 2.32.3",
        ),
        ("stack.cuda=12.8", "CUDA 13.0, not 12.8 | torch 2.10.0"),
        ("stack.open_clip=2.30.0", "open_clip_torch 3.3.0"),
        ("stack.torch=2.5.1", "needs torch 2.6.0"),
        ("stack.torch=2.99.0", "no stack for torch 2.99.0 | 2.14.1"),
        ("image.base=ubuntu:22.04", "Python 3.10 | needs 3.11 | debian-12"),
        ("image.base=registry.example/ours:3", "image.os | debian-12"),
        ("image.base=nvidia/cuda:12.4.1-devel-ubuntu24.04", "CUDA 12.4.1 | major versions must agree"),
        (CUDA_13.format("0.2-devel-ubuntu24.04"), "NCCL 2.28.3 | brings 2.30.7"),
        (
            "image.base=nvcr.io/x/pytorch:1 image.os=ubuntu-24.04",
            "has its own pytorch and NCCL | nvidia/cuda",
        ),
        ("stack.torch=2.6.0 image.base=debian:12", 'nvcc of CUDA 12.4 | "debian" on a base of Debian 13'),
        ("stack.torch=base image.base=nvcr.io/nvidia/pytorch:25.09-py3", "image.os | ubuntu-24.04"),
        ("stack.torch=base image.base=debian:12-slim", "debian:12-slim has no torch"),
        (f"{OWN} stack.driver=580", "without stack.cuda it is not known"),
        (f"{OWN} stack.cuda=14.0 stack.driver=570", "no CUDA 14"),
        ("stack.torch=2.7.1 image.base=debian:13 image.toolkit=debian", '"debian" has no nvcc'),
        ('stack.archs=["8.5"]', "nvcc 13.0 cannot compile for 8.5 | 8.6"),
        (
            'stack.torch=2.8.0 stack.archs=["12.0"] stack.driver=565 image.base=debian:12',
            "12.0 needs driver 570",
        ),
        (CUDA_12_8.format("1-devel"), "NCCL 2.25.1 | an image of your own | 12-8"),
        (CUDA_12_8.format("0-devel"), "whose version the table does not know"),
        (CUDA_12_8.format("1-base"), "needs nvcc of CUDA 12.8 | cuda-minimal-build-12-8"),
        (
            "image.base=debian:12 image.toolkit=base",
            'has no nvcc | toolkit = "pypi" | nvidia/cuda:13.1.*-devel',
        ),
        ("image.base=debian:12 image.os=debian-13", "debian:12 is debian-12, as its name says"),
        (CUDA_13.format("1.0-base-ubuntu20.04"), "is ubuntu-20.04; images can be built on debian-12"),
        ("image.base=debian:12 image.mpi=base", "has no MPI"),
        ("image.base=horovod image.os=debian-12", "the name of a stage | horovod:latest"),
        ('image.pip_packages=["open_clip_torch==2.30.0"]', "pins open_clip_torch to 3.3.0 | leave it out"),
        (
            'image.pip_packages=["torch @ https://host.example/torch-2.14.1.whl"]',
            "the stack pins torch to 2.14.1",
        ),
        ('image.pip_packages=["nvidia-nccl-cu13>=2.31"]', "the stack pins nvidia-nccl-cu13 to 2.30.7"),
        ('image.pip_packages=["nvidia-nccl-cu12==2.30.7"]', "nvidia-nccl-cu12 is a part of the stack"),
        ('image.pip_packages=["Horovod[pytorch]==0.27.0"]', "Horovod is a part of the stack"),
        ('image.pip_packages=["nvidia-nvjpeg-cu12"]', "overwrite the CUDA 13 libraries"),
        ('image.plugins=["tcpxo"]', "tcpxo is not in an image | nccl-tcpxo-installer"),
        ('image.plugins=["nccl-rdma-sharp"]', "debian:12-slim has no nccl-rdma-sharp | HPC-X"),
        (
            "stack.torch=2.10.0 image.platform=linux/arm64",
            'no CUDA; compatible: torch 2.15.0 | torch = "base"',
        ),
        ('stack.archs=["7.5"] image.platform=linux/arm64', "no code for 7.5, only for 8.0, 9.0, 10.0, 11.0"),
        # All problems at once.
        (
            'stack.archs=["7.0"] stack.driver=400 image.base=ubuntu:22.04',
            "stack.archs | stack.driver | image.base",
        ),
        # A base with a torch of its own needs no row of the table, and its nvcc may know other GPUs.
        (f"{OWN} stack.cuda=13.0 stack.driver=580 image.mpi=base", ""),
        ('stack.torch=2.8.0 stack.archs=["12.1"] image.base=nvidia/cuda:12.9.1-devel-ubuntu24.04', ""),
        ('stack.archs=["8.6", "8.9"]', ""),  # a GPU runs code of an older minor of its generation
    ],
)
def test_impossible_combinations_are_refused_with_possible_ones(words: str, said: str) -> None:
    message = refusal_of(words)
    assert [text for text in said.split(" | ") if text not in message] == []
    assert bool(said) == bool(message)


def test_packages_beside_the_stack_s_pins_are_taken() -> None:
    row = table().row(table().default)
    numpy = pins(row)["numpy"]
    packages = (
        *("nvidia-nvjpeg-cu13", "nvidia-dali-cuda120", "git+https://host.example/x.git@main"),
        *("einops==0.8.1", "open-clip-torch==3.3", "fsspec[s3]", "numpy>=2"),
        "x @ https://host.example/x==1.whl",
        *(f"numpy=={numpy}", f"numpy=={numpy.partition('.')[0]}.*", 'numpy==1.26.4; python_version < "3.9"'),
    )
    assert refusal(dockerfile, tiny_job(image={"tag": "clipship:1", "pip_packages": packages})) == ""


def _with_system(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Debian 12 is another one."""
    known = table()
    changed = replace(
        known, systems={**known.systems, "debian-12": replace(known.systems["debian-12"], **facts)}
    )
    monkeypatch.setattr("trainer.image.compatibility.table", lambda: changed)


def test_a_base_whose_glibc_is_too_old_for_the_wheels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_system(monkeypatch, glibc="2.27")
    assert "debian-12 has glibc 2.27, but torch 2.14.1 needs 2.28 or newer" in refusal_of(
        "image.base=debian:12"
    )


def test_a_base_whose_compilers_are_too_new_for_nvcc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_system(monkeypatch, gcc=(17, 16))
    said = "nvcc 13.0 needs g++ 15 or older, but debian-12 has 17 or 16; compatible: a base of debian-13 or"
    assert said in refusal_of("image.base=debian:12")
    own = refusal_of("stack.torch=base stack.cuda=13.0 image.base=o/t:1 image.os=debian-12")
    assert said.partition(";")[0] in own


# The table of stacks is compared with what wheels declare.

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
