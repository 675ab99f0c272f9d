"""Out of memory, as Python and torch say it, and the numbers that go with it."""

from pathlib import Path

import pytest
import torch

from trainer.sysinfo import memory


def test_out_of_memory_errors_of_every_library_are_recognized() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**55)
    for error in (
        of_torch.value,
        MemoryError(),
        torch.OutOfMemoryError(),
        OSError(12, "Cannot allocate memory"),
    ):
        assert memory.is_out_of_memory(error)
    assert not memory.is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize(
    ("form", "top", "name"),
    [("0::", "", "memory.max"), ("7:memory:", "memory", "memory.limit_in_bytes")],
    ids=["new", "old"],
)
def test_the_smallest_limit_of_the_enclosing_cgroups_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, top: str, name: str
) -> None:
    own, groups = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup"
    own.parent.mkdir(parents=True)
    own.write_text(f"{form}/slurm/job_7/step_0\n5:cpu,cpuacct:/elsewhere\n")
    limits = {
        "": str(2**63 - 4096),
        "slurm": str(64 * 2**30),
        "slurm/job_7": str(8 * 2**30),
        "slurm/job_7/step_0": "max",
    }
    for group, limit in limits.items():
        (groups / top / group).mkdir(parents=True, exist_ok=True)
        (groups / top / group / name).write_text(f"{limit}\n")
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    assert "its container or job is limited to 8.0 GiB" in memory.hint()
    own.unlink()
    assert "is limited to" not in memory.hint()


def test_rank_that_was_killed_beside_free_memory_is_not_said_to_have_lacked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    found = {"MemTotal": "24000000 kB", "MemAvailable": "20000000 kB"}
    monkeypatch.setattr(memory, "named_values", lambda _: found)
    said = memory.killed_hint(2_000_000, 2)
    assert "memory was not short (the rank held 1.9 GiB at its peak, the machine has 19.1 GiB avail" in said
    assert "To need less memory" not in said
    assert "when memory runs out" in memory.killed_hint(9_000_000, 2)
