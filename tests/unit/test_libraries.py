"""Which NCCL a process has mapped, and that two are refused."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.sysinfo import libraries


def test_a_library_that_is_mapped_is_found_and_others_are_not() -> None:
    assert len(libraries.mapped("libc")) == 1
    assert libraries.mapped("libnothing") == ()


def pinned_nccl() -> str:
    """The version of the NCCL wheel beside this torch; "None" where there is none."""
    packages = importlib.metadata.distributions()
    return next(
        (found.version for found in packages if (found.name or "").startswith("nvidia-nccl-cu")), "None"
    )


def mapped_nccl(**variables: str) -> str:
    """The version of the NCCL that a process maps with torch."""
    code = (
        "import torch; from trainer.sysinfo.libraries import nccl_facts; "
        "print(nccl_facts().get('nccl_mapped'))"
    )
    command = [sys.executable, "-P", "-c", code]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


def test_torch_maps_the_one_nccl_that_its_wheel_pins() -> None:
    assert mapped_nccl() == pinned_nccl()


@pytest.mark.skipif(pinned_nccl() == "None" or not shutil.which("cc"), reason="needs NCCL's wheel and cc")
def test_another_nccl_on_the_library_path_is_not_mapped(tmp_path: Path) -> None:
    """GKE's nodes mount a folder with NCCL, the plugin and the driver, which the image's path names."""
    source = tmp_path / "other.c"
    source.write_text("int ncclGetVersion(int *version) { *version = 22807; return 0; }\n")
    library = tmp_path / "libnccl.so.2"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(library), str(source)], check=True
    )
    assert mapped_nccl(LD_LIBRARY_PATH=str(tmp_path)) == pinned_nccl()
    with pytest.raises(subprocess.CalledProcessError):  # a process that did map it would end
        mapped_nccl(LD_PRELOAD=str(library))


def test_two_copies_of_nccl_end_the_run_with_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"/a/libnccl.so.2": "2.30.7", "/b/libnccl.so.2": "2.21.5"}
    monkeypatch.setattr(libraries, "mapped", lambda _: tuple(versions))
    monkeypatch.setattr(libraries, "nccl_version", versions.__getitem__)
    with pytest.raises(
        RuntimeError, match=r"2 copies.*/a/libnccl\.so\.2 \(2\.30\.7\), /b/libnccl\.so\.2 \(2\.21\.5\)"
    ):
        libraries.nccl_facts()
