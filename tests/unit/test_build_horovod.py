"""docker/build-horovod.sh: what it refuses before it builds, and what the library that came out names."""

import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "build-horovod.sh"


def build(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script for this test's own environment."""
    command = [SCRIPT, "--python", sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --wheel-dir and --cache"),
        (["--wheel"], "option --wheel is unknown or has no value"),
        (["--cache", "b", "--ops", "rocm"], "--ops is rocm; it can be auto, cpu or nccl"),
        (["--cache", "b", "--jobs", "0"], "--jobs is 0"),
        (["--cache", "b", "--python", "/no/python"], "there is no Python at /no/python"),
        (["--cache", "b", "--ops", "nccl", "--cuda-home", "/no/cuda"], "--ops nccl, but"),
    ],
)
def test_build_refuses_bad_options(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = build(*(str(tmp_path / "b") if argument == "b" else argument for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_build_refuses_an_environment_without_torch(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    done = build("--cache", tmp_path / "cache", "--python", tmp_path / "bare" / "bin" / "python")
    assert done.returncode == 2
    assert "torch is not installed in this environment" in done.stderr


def test_the_system_s_nccl_that_torch_loads_is_found_with_its_header(tmp_path: Path) -> None:
    """As NVIDIA's images have it: no wheel of NCCL, and ldd names it by way of /lib, which is a link."""
    torch, tools = tmp_path / "site/torch", tmp_path / "tools"
    libraries = tmp_path / "usr/lib/x86_64-linux-gnu"
    for folder in (torch / "lib", tmp_path / "site/torch-2.14.1.dist-info", tools / "bin", libraries):
        folder.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("cuda: str | None = '13.0'\n")
    (tmp_path / "site/torch-2.14.1.dist-info/METADATA").write_text("Name: torch\nVersion: 2.14.1\n")
    (libraries / "libnccl.so.2").touch()
    (tmp_path / "lib").symlink_to("usr/lib")
    loaded = f"\tlibnccl.so.2 => {tmp_path}/lib/x86_64-linux-gnu/libnccl.so.2 (0x7f)"
    for name, says in (("ldd", loaded), ("nvcc", "release 13.0, V13.0.88")):
        (tools / "bin" / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tools / "bin" / name).chmod(0o755)
    found = {"PYTHONPATH": str(tmp_path / "site"), "PATH": f"{tools}/bin:{os.environ['PATH']}"}
    words = ["--cache", f"{tmp_path}/cache", "--ops", "nccl", "--cuda-home", str(tools)]
    done = build(*words, **found)
    assert f"there is no nccl.h in {tmp_path}/usr/include" in done.stderr
    (tmp_path / "usr/include").mkdir()
    (tmp_path / "usr/include/nccl.h").touch()
    done = build(*words, CXX="no-such-compiler", **found)
    assert done.returncode == 3, "what is looked at after NCCL has a code of its own"
    assert "there is no C++ compiler (no-such-compiler)" in done.stderr


@pytest.mark.horovod
def test_build_refuses_another_sdist_and_leaves_nothing(tmp_path: Path) -> None:
    sdist = tmp_path / "horovod-0.28.1.tar.gz"
    sdist.write_bytes(b"something else")
    done = build("--cache", tmp_path / "cache", "--ops", "cpu", "--sdist", sdist)
    assert done.returncode == 2
    assert "has another sha256" in done.stderr
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.horovod
def test_library_names_no_folder_of_the_environment_it_was_built_in() -> None:
    library = next(file for file in metadata.files("horovod") or [] if file.match("mpi_lib_v2*.so"))
    dynamic = subprocess.run(
        ["readelf", "-d", library.locate()], capture_output=True, text=True, check=True
    ).stdout
    folders = dynamic.partition("runpath: [")[2].partition("]")[0].split(":")
    assert "$ORIGIN/../../torch/lib" in folders
    assert not [folder for folder in folders if folder.startswith(sys.prefix)]
