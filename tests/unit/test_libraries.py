"""Which NCCL a process has mapped, and that two are refused."""

import pytest

from trainer.sysinfo import libraries


def test_two_copies_of_nccl_end_the_run_with_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"/a/libnccl.so.2": "2.30.7", "/b/libnccl.so.2": "2.21.5"}
    monkeypatch.setattr(libraries, "mapped", lambda _: tuple(versions))
    monkeypatch.setattr(libraries, "nccl_version", versions.__getitem__)
    with pytest.raises(
        RuntimeError, match=r"2 copies.*/a/libnccl\.so\.2 \(2\.30\.7\), /b/libnccl\.so\.2 \(2\.21\.5\)"
    ):
        libraries.nccl_facts()
