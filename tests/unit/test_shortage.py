"""Shortages of a machine other than memory, each told in one sentence with the numbers.

Shared memory and open files run out for real.
"""

import errno
import os
import resource
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.runs import TinyRun
from trainer.errors import MachineError
from trainer.sysinfo import libraries, memory, shortage
from trainer.sysinfo.variables import name_problems

MB = 10**6


def test_a_quota_that_is_used_up_is_not_told_by_the_free_space_of_the_disk(tmp_path: Path) -> None:
    error = OSError(errno.EDQUOT, "Disk quota exceeded")
    said = shortage.shortage(shortage.with_missing_room(error, "the checkpoint of step 4", 5 * MB, tmp_path))
    assert said == (
        "[Errno 122] Disk quota exceeded: the checkpoint of step 4 takes 5.0 MB: make room below "
        f"{tmp_path} (`quota -s`), or have the quota raised"
    )


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("received 0 items of ancdata")]
)
def test_a_lack_of_open_files_names_the_limit(error: Exception) -> None:
    assert (
        f"this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}; raise `ulimit -n`"
        in shortage.shortage(error)
    )


def limited(run: TinyRun, script: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Runs it after a script of the shell that limits it."""
    words = [*before, "bash", "-c", f'{script}; exec "$@"', "bash", *run.command(1)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)


def test_a_run_that_may_open_too_few_files_says_how_many_it_needs(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.write(optim={"steps": 1})
    done = limited(run, "ulimit -n 32")
    assert done.returncode == 1, done.stderr
    assert "only 32 files here, but needs at least 256: raise `ulimit -n` by 224" in done.stderr
    assert "Traceback" not in done.stderr
    assert not run.run.exists()


@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0,
    reason="a shared memory of its own needs root and util-linux",
)
def test_a_run_whose_loaders_need_more_shared_memory_than_there_is_says_so_before_it_trains(
    tmp_path: Path,
) -> None:
    run = TinyRun(tmp_path)
    run.write(optim={"steps": 1, "global_batch_size": 256}, data={"workers": 2, "synthetic_samples": 512})
    done = limited(run, "mount -t tmpfs -o size=2m none /dev/shm", "unshare", "-m")
    assert done.returncode == 1, done.stderr
    assert "MB free of 2.1 MB, and 1 rank with data.workers = 2 may keep 4.2 MB of images" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_memory_that_is_too_small_for_the_newest_steps_is_told_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortage, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=20_000_000, free=10_000_000))
    monkeypatch.setattr(shortage, "host_bytes", lambda: 11_000_000)
    shortage.memory_for_state("n1", 10_000_000)
    shortage.memory_for_state("n1", 11_000_000, taken=4_000_000, beside=2_000_000)
    with pytest.raises(MachineError) as full:
        shortage.memory_for_state("n1", 9_000_000, beside=3_000_000)
    assert str(full.value) == (
        f"{tmp_path} of n1 has 10.0 MB free of 20.0 MB, and recovery.keep_in_memory takes 9.0 MB of it "
        "(twice weights and optimizer state), and the loaders 3.0 MB: make it 2.0 MB larger "
        "(kubernetes.shm_gb, docker run --shm-size, or a memory volume of slurmd's pod), or set "
        "recovery.keep_in_memory = false, so that restarts begin at a checkpoint"
    )
    with pytest.raises(MachineError, match=r"n1 has 11\.0 MB of memory, and .* give it 1\.0 MB more"):
        shortage.memory_for_state("n1", 12_000_000, taken=9_000_000)


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((1024, 1 << 19), 5000), ((1024, -1), 5000), ((5000, 5000), None), ((-1, -1), None)],
)
def test_soft_limit_on_open_files_is_raised_as_far_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: int | None
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, value: told.append(value))
    shortage.raise_open_files_limit(5000)
    assert told == ([] if raised is None else [(raised, limits[1])])


def test_hard_limit_below_the_connections_of_a_large_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(MachineError, match=r"only 1,024 files here, but needs at least 1,505: .* by 481"):
        shortage.raise_open_files_limit(256 + 1250 - 1)


# Out of memory, as Python and torch say it, and the numbers that go with it.


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


# Variables that no library reads, and a second copy of NCCL, are named.


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("NCCL_TIMEOUT", "NCCL has no such variable and never had; [timeouts]"),
        ("NCCL_DEBGU", "did you mean NCCL_DEBUG?"),
        ("NCCL_IB_CUDA_SUPPORT", "since 2.4.2; NCCL_NET_GDR_LEVEL"),
        ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT", "did you mean TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC?"),
        ("HOROVOD_FUSION_TRESHOLD", "did you mean HOROVOD_FUSION_THRESHOLD?"),
        ("NCCL_QQQQQQQQ", "NCCL does not read it"),
    ],
)
def test_a_variable_without_effect_is_flagged(name: str, problem: str) -> None:
    (found,) = name_problems([name], "2.14.1")
    assert found.startswith(f"{name} has no effect: ")
    assert problem in found


def test_names_that_are_known_foreign_or_read_by_a_plugin_of_nccl_are_left_alone() -> None:
    names = (
        *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE", "HOROVOD_CYCLE_TIME", "PATH"),
        *("HOROVOD_WITH_MPI", "NCCL_FASTRAK_CTRL_DEV", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"),
        *("NCCL_TUNER_CONFIG_PATH", "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE", "SHARP_COLL_ENABLE_SAT"),
    )
    assert list(name_problems(names, "2.14.1+cu130")) == []


def test_what_an_image_says_of_its_packages_is_no_setting() -> None:
    """Images that derive from nvidia/cuda have these; in [env] the first is still a mistake."""
    assert list(name_problems((), "2.14.1", ["NCCL_VERSION", "NV_LIBNCCL_PACKAGE"])) == []
    (found,) = name_problems(["NCCL_VERSION"], "2.14.1", ["NCCL_VERSION"])
    assert found.startswith("NCCL_VERSION has no effect")


def test_name_that_is_too_new_says_since_when() -> None:
    assert list(name_problems(["TORCH_FR_BUFFER_SIZE"], "2.6.0")) == [
        "TORCH_FR_BUFFER_SIZE has no effect: torch 2.6.0 does not read it; 2.9 is the first version that does"
    ]


def test_two_copies_of_nccl_end_the_run_with_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"/a/libnccl.so.2": "2.30.7", "/b/libnccl.so.2": "2.21.5"}
    monkeypatch.setattr(libraries, "mapped", lambda _: tuple(versions))
    monkeypatch.setattr(libraries, "nccl_version", versions.__getitem__)
    with pytest.raises(
        RuntimeError, match=r"2 copies.*/a/libnccl\.so\.2 \(2\.30\.7\), /b/libnccl\.so\.2 \(2\.21\.5\)"
    ):
        libraries.nccl_facts()
