"""`clipship check` says what the run gets: device, packages, memory, disk, places, and time to save."""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch

from tests.support.command_line import TINY, Table, check, joined, problems, tiny
from tests.support.report_folders import restarted_run
from trainer.sysinfo import accelerators, nvml
from trainer.sysinfo.nvml import GpuHere

GB = 10**9
IMAGE = {"tag": "ours/clip:1"}
B_32, L_14 = {"name": "ViT-B-32"}, {"name": "ViT-L-14"}
RESTARTS = {"max_restarts": 1}


def lines(topic: str, **sections: Any) -> list[str]:
    found: dict[str, list[str]] = tiny(**sections)["rows"]
    return found.get(topic, [])


def on_a_machine_with(monkeypatch: pytest.MonkeyPatch, *gpus: GpuHere) -> None:
    monkeypatch.setattr(accelerators, "exists", lambda _path: bool(gpus))
    monkeypatch.setattr(nvml, "gpus_here", lambda: list(gpus))


def test_the_device_is_that_of_this_machine_or_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_with(monkeypatch)
    [here] = lines("device")
    assert here.startswith(f"the CPU, {len(os.sched_getaffinity(0))} core")
    assert here.endswith("GiB of memory (this machine has no GPU, and the job asks for none)")
    on_cpus = lines("device", resources={"device": "cpu", "nodes": 2})
    assert on_cpus == ['the CPU (resources.device = "cpu")']
    h100 = {"gpus_per_node": 1, "gpu": "H100"}
    assert lines("device", resources=h100, model={"precision": "bf16"}, slurm={})[1:] == [
        "H100: 79.1 GiB, at most 989 TFLOP/s in bf16 and 3,350 GB/s"
    ]
    large, small = GpuHere("NVIDIA H100", 80 * 2**30), GpuHere("NVIDIA L40S", 45 * 2**30)
    on_a_machine_with(monkeypatch, large, large, small)
    named = "here: 2 x NVIDIA H100 of 80.0 GiB, 1 x NVIDIA L40S of 45.0 GiB"
    assert lines("device", resources={"gpus_per_node": 2})[1:] == [named]
    assert lines("device", resources={"gpus_per_node": 2}, slurm={})[1:] == []


def test_ranks_here_run_in_this_python_and_packages_that_it_lacks_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [text] = lines("environment")
    assert text.startswith("Python 3.")
    assert f", torch {torch.__version__.partition('+')[0]}" in text
    assert text.endswith(f" in {sys.prefix}")
    for name in ("torch", "open_clip", "tensorboard", "horovod"):
        monkeypatch.setitem(sys.modules, name, None)  # nobody finds it
    lacks = "this Python lacks {}, so that no rank can start here: {}"
    found = tiny(comm={"backend": "horovod"})["warnings"]
    assert [text for text in found if "this Python lacks" in text] == [
        lacks.format(
            "torch, open_clip, tensorboard", "python -m pip install 'clipship[train]' brings what is missing"
        ),
        lacks.format("horovod", "`make horovod` builds it, or use backend = torch"),
    ]
    assert not any("lacks" in text for text in tiny(comm={"backend": "horovod"}, slurm={})["warnings"])


def test_object_storage_needs_its_package_here_and_not_where_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert importlib.util.find_spec("gcsfs") is None, "the pinned requirements have it: choose another"
    far: dict[str, Any] = {"eval": {"retrieval": ["gs://bucket/{0..3}.tar"]}}
    needs = "needs the package gcsfs"
    for sections in ({}, {"slurm": {"partition": "gpu"}}):
        assert needs in problems(**far, **sections)
    assert not problems(**far, image=IMAGE, slurm={"partition": "gpu", "container": "pyxis"})
    monkeypatch.setitem(sys.modules, "torch", None)  # as on a login node
    assert not problems(**far, slurm={"partition": "gpu"})
    assert needs in problems(**far)


def test_checkpoints_are_counted_against_the_disk_that_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * GB))

    def found(keep: int, **sections: Any) -> tuple[list[str], list[str]]:
        logging = {"runs": str(tmp_path / "not" / "made")}
        table = joined(TINY, model=B_32, logging=logging, checkpoint={"keep": keep}, **sections)
        said = check(table, files=True)
        return said["rows"]["checkpoints"], [text for text in said["warnings"] if "keeps up to" in text]

    each = "1.82 GB each (weights 605 MB, optimizer 1.21 GB)"
    assert found(1) == ([f"{each}, 1 kept; 2 fit the 5 GB free in {tmp_path}"], [])
    [warning] = found(2)[1]
    assert warning.startswith("the run keeps up to 3 checkpoints, of which the last is being written: they")
    assert f"take 5.45 GB, and {tmp_path} has 5 GB free: lower checkpoint.keep" in warning
    shutil.rmtree(tmp_path / "not", ignore_errors=True)
    assert found(2, slurm={}) == ([f"{each}, 2 kept"], []), "a cluster's disk that is not mounted here"


def test_too_little_shared_memory_here_is_told_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=GB))
    [told] = [text for text in tiny(model=B_32, recovery=RESTARTS)["warnings"] if "/dev/shm" in text]
    assert told == (
        "/dev/shm of this machine has 1.00 GB, and the newest steps take 3.63 GB: the run would end "
        "before it trains; give 2.63 GB more, or set recovery.keep_in_memory = false"
    )


POD = {"mounts": {"/scratch": "pvc:claim"}}


@pytest.mark.parametrize(
    ("gpus", "schedulers", "told"),
    [
        (1, {"kubernetes": POD}, ["shm (kubernetes.shm_gb) has 2.15", "(resources.mem_gb_per_gpu) has 3.22"]),
        # What [slurm] asks for goes before.
        (1, {"slurm": {"mem": "2048"}}, ["(slurm.mem) has 2.15"]),
        (1, {"slurm": {"mem": "4G"}}, []),
        (1, {"slurm": {"mem": "0"}}, []),
        (1, {"slurm": {}}, ["(resources.mem_gb_per_gpu) has 3.22"]),
        (8, {"kubernetes": POD}, []),
    ],
)
def test_too_little_memory_of_a_cluster_is_told_with_the_key_of_each_scheduler_that_the_job_names(
    gpus: int, schedulers: dict[str, Any], told: list[str]
) -> None:
    resources = {"gpus_per_node": gpus, "mem_gb_per_gpu": 3.0}
    found = tiny(model=B_32, recovery=RESTARTS, resources=resources, image=IMAGE, **schedulers)
    texts = [text for text in found["warnings"] if "the newest steps take 3.63 GB" in text]
    assert [text.partition(" GB, and")[0].rpartition("/dev/")[2].removeprefix("the memory of a node ")
            for text in texts] == told  # fmt: skip


# From a request to stop to the checkpoint


def stop(runs: Path, **sections: Any) -> dict[str, Any]:
    """What check finds in a job, whose run may have begun."""
    table = joined(TINY, model=L_14, logging={"runs": str(runs)}, **sections)
    if (runs / "tiny").is_dir():
        (runs / "tiny" / "job.toml").write_text(tomli_w.dumps(table))
    return check(table, files=True)


def test_the_best_interval_follows_from_faults_and_the_wait_at_a_checkpoint(tmp_path: Path) -> None:
    nodes = {"nodes": 2, "gpus_per_node": 8}
    assert stop(tmp_path, resources=nodes)["rows"]["interval"] == [
        (
            "a checkpoint every 71 minutes loses the least time (Young/Daly), if each of 2 nodes fails "
            "once in 5,000 h (assumed) and training waits 1.0 s (assumed) for a checkpoint; this job saves "
            "every 30:00"
        )
    ]
    assert "interval" not in stop(tmp_path)["rows"], "its ranks are here"
    in_memory = stop(tmp_path, resources=nodes, recovery={"max_restarts": 3}, slurm={})
    assert "interval" not in in_memory["rows"], "its steps are in memory"
    folder = restarted_run(tmp_path / "tiny")
    lap = {"event": "steps", "time": 90_060.0, "step": 1110, "steps": 10, "seconds": 14.0, "checkpoint_s": 4}
    saves = ({"event": "save", "step": step, "time": 90_055.0} for step in (1105, 1110))
    with open(folder / "goodput.jsonl", "a") as times:
        times.writelines(f"{json.dumps(line)}\n" for line in (*saves, lap))
    (measured,) = stop(tmp_path, resources=nodes, checkpoint={"every_steps": 500})["rows"]["interval"]
    assert "every 100 minutes loses" in measured
    assert "waits 2.0 s (measured)" in measured
    assert measured.endswith("saves every 30:00 and every 500 steps (8:20)")


@pytest.mark.parametrize("key", ["slurm.signal_lead_s", "kubernetes.grace_s", "timeouts.checkpoint_s"])
def test_a_notice_that_is_too_short_is_named_with_both_numbers(key: str) -> None:
    section, name = key.split(".")

    def told(seconds: int) -> list[str]:
        cluster: Table = {"kubernetes": POD, "image": IMAGE} if section == "kubernetes" else {"slurm": {}}
        sections = joined(cluster, **{section: {name: seconds}})
        found: list[str] = tiny(model=L_14, **sections)["warnings"]
        return [text for text in found if f"longer than {key}" in text]

    assert told(20) == [
        (
            "after a request to stop the ranks save for at least 20.5 s (2 steps, whose time is not known "
            f"yet, and 5.13 GB at 0.25 GB/s (assumed)), longer than {key} = 20: raise it to 21 or more"
        )
    ]
    assert told(21) == []


@pytest.mark.parametrize(
    ("recovery", "said"),
    [
        ({}, "such an end costs the steps since the last checkpoint, which checkpoint.every_minutes bounds"),
        (
            RESTARTS | {"spare_nodes": 1},
            "if only some nodes are taken, the others go on from the step in their",
        ),
    ],
)
def test_thirty_seconds_are_compared_on_a_cluster_alone(recovery: dict[str, Any], said: str) -> None:
    def told(model: str = "ViT-g-14", **sections: Any) -> list[str]:
        found = tiny(model={"name": model}, recovery=recovery, **sections)["warnings"]
        return [text for text in found if "30 s of warning that scancel and spot instances" in text]

    [warning] = told(slurm={})
    assert said in warning
    assert told("ViT-L-14", slurm={}) == told() == []


# Nodes and places


HERE = "recovery.spare_nodes = 1, but a run on this machine has 1 node and no spare: "
BY_HAND = "recovery.spare_nodes = 1, and no scheduler of this job allocates nodes: "
HOSTS = "name 3 nodes with --hosts, of which the last is a spare"
SPARES = joined(
    TINY, recovery={"max_restarts": 3, "spare_nodes": 1}, resources={"nodes": 2, "gpus_per_node": 0}
)


@pytest.mark.parametrize(
    ("sections", "words", "said"),
    [
        ({}, ["--nproc", 2], HERE + HOSTS),
        ({"slurm": {}}, ["--nproc", 2], HERE + HOSTS + ", or submit the job: [slurm] asks for as many"),
        ({}, [], BY_HAND + HOSTS),
        ({"slurm": {}}, [], None),
    ],
)
def test_spares_without_nodes_are_told_with_the_number(
    sections: dict[str, Any], words: list[object], said: str | None
) -> None:
    found = check(joined(SPARES, **sections), *words)
    assert [text for text in found["warnings"] if "spare" in text] == ([] if said is None else [said])
    if not words and sections:
        [world] = found["rows"]["world"]
        assert world.endswith("([resources]), and 1 spare node (recovery.spare_nodes): 3 nodes in all")


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"image": {"tag": "r.example:5000/x:1"}}, "tag = r.example:5000/x:1: r.example is a placeholder"),
        ({"image": {"tag": "ghcr.io/me/clipship:1"}}, ""),
        ({"data": {"train": ["/tmp/x/{00..09}.tar", "/d/y.tar"]}}, "/tmp/x/{00..09}.tar is in /tmp, which"),
        ({"logging": {"runs": "/var/tmp/runs"}}, "/var/tmp/runs is in /var/tmp, which each node has for"),
        ({"model": {"cache_dir": "/tmp/cache"}}, ""),  # each node may make its own
        ({"data": {"train": ["/tmporary/x.tar"]}}, ""),
        (
            {"data": {"train": ["/tmp/d/x.tar"]}}
            | {"slurm": {"container": "pyxis", "mounts": ["/lustre/d:/tmp/d"]}, "image": IMAGE},
            "",
        ),
        (
            {"data": {"train": ["/tmp/d/x.tar"]}}
            | {"kubernetes": {"mounts": {"/tmp/d": "pvc:d", "/scratch": "pvc:s"}}, "image": IMAGE},
            "",
        ),
    ],
)
def test_an_image_and_files_that_the_nodes_of_a_cluster_cannot_reach_are_named(
    sections: dict[str, Any], told: str
) -> None:
    data = {"format": None, "synthetic_samples": None} if "data" in sections else {}
    sections = joined({"slurm": {"gpus": "none"}, "model": B_32}, **sections)
    table = joined(joined(TINY, **sections), data=data)
    found = check(table)["warnings"]
    texts = [text for text in found if "placeholder" in text or "which each node has for itself" in text]
    assert len(texts) == bool(told)
    assert all(told in text for text in texts)
    here = check({name: its for name, its in table.items() if name not in ("slurm", "kubernetes")})
    assert not [text for text in here["warnings"] if "for itself" in text]


@pytest.mark.parametrize(
    ("sections", "way"),
    [
        ({"slurm": {"partition": "gpu", "launcher": "mpirun"}}, "MPI"),
        ({"slurm": {"partition": "gpu"}, "recovery": {"max_restarts": 3}}, "Gloo"),
        ({"kubernetes": {**POD, "kind": "mpijob"}, "image": IMAGE}, "MPI"),
        ({"kubernetes": {**POD, "kind": "job"}, "image": IMAGE}, "Gloo"),
    ],
)
def test_what_connects_horovods_ranks_is_said(sections: Table, way: str) -> None:
    [row] = lines("backend", comm={"backend": "horovod"}, resources={"nodes": 2}, **sections)
    assert row.startswith(f"horovod over {way}, ranks started by ")
