"""Which NCCL a process has mapped, and that two are refused."""

import importlib.metadata
import subprocess
import sys

import pytest

from trainer.sysinfo import libraries


def test_a_library_that_is_mapped_is_found_and_others_are_not() -> None:
    assert len(libraries.mapped("libc")) == 1
    assert libraries.mapped("libnothing") == ()


def test_torch_maps_the_one_nccl_that_its_wheel_pins() -> None:
    code = (
        "import torch; from trainer.sysinfo.libraries import nccl_facts; "
        "print(nccl_facts().get('nccl_mapped'))"
    )
    said = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    pinned = next(
        (
            found.version
            for found in importlib.metadata.distributions()
            if (found.name or "").startswith("nvidia-nccl-cu")
        ),
        "None",
    )
    assert said == pinned


def test_two_copies_of_nccl_end_the_run_with_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"/a/libnccl.so.2": "2.30.7", "/b/libnccl.so.2": "2.21.5"}
    monkeypatch.setattr(libraries, "mapped", lambda _: tuple(versions))
    monkeypatch.setattr(libraries, "nccl_version", versions.__getitem__)
    with pytest.raises(
        RuntimeError, match=r"2 copies.*/a/libnccl\.so\.2 \(2\.30\.7\), /b/libnccl\.so\.2 \(2\.21\.5\)"
    ):
        libraries.nccl_facts()
