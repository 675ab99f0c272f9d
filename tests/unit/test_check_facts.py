"""`clipship check` says what the run gets: device, packages, disk and length."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.jobs import RESNET, VIT, tiny_job
from trainer.checkpoint.writer import CheckpointWriter
from trainer.comm.protocol import Comm
from trainer.config import Checkpoint, Job
from trainer.config.batch_plan import plan
from trainer.errors import InputError
from trainer.estimate.size import checkpoint_bytes
from trainer.model import catalog
from trainer.model.build import build_model
from trainer.plan import check, environment
from trainer.plan.check import check_without_files
from trainer.plan.describe import describe
from trainer.plan.disk import checkpoint_rows, disk_of, too_little_disk
from trainer.sysinfo import accelerators, nvml
from trainer.sysinfo.nvml import GpuHere
from trainer.train.step import MicroBatch, TrainStep

GB = 10**9
IMAGE = {"tag": "ours/clip:1"}


def rows_of(job: Job, *, local: bool = True, samples: int | None = 64) -> list[str]:
    return describe(job, 1, samples, local=local).splitlines()


def row(job: Job, topic: str, **options: Any) -> str:
    """The text of the row with this topic, with the rows below that continue it."""
    lines = rows_of(job, **options)
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{topic:<12}"))
    last = next((n for n in range(first + 1, len(lines)) if lines[n][0] != " "), len(lines))
    return "\n".join(line[12:] for line in lines[first:last])


def on_a_machine_with(monkeypatch: pytest.MonkeyPatch, *gpus: GpuHere) -> None:
    monkeypatch.setattr(accelerators, "exists", lambda _path: bool(gpus))
    monkeypatch.setattr(nvml, "gpus_here", lambda: list(gpus))


def test_the_device_has_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_with(monkeypatch)
    cores = len(os.sched_getaffinity(0))
    text = row(tiny_job(), "device")
    assert text.startswith(f"the CPU, {cores} core")
    assert text.endswith("GiB of memory (this machine has no GPU, and the job asks for none)")
    assert row(tiny_job(resources={"device": "cpu", "nodes": 2}), "device", local=False) == (
        'the CPU (resources.device = "cpu")'
    )


def test_gpus_of_this_machine_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    h100, l40s = GpuHere("NVIDIA H100", 80 * 2**30), GpuHere("NVIDIA L40S", 45 * 2**30)
    on_a_machine_with(monkeypatch, h100, h100, l40s)
    job = tiny_job(resources={"gpus_per_node": 3})
    here = "here: 2 x NVIDIA H100 of 80.0 GiB, 1 x NVIDIA L40S of 45.0 GiB"
    assert row(job, "device").splitlines()[1:] == [here]
    assert row(job, "device", local=False).splitlines()[1:] == []


def test_the_gpu_that_the_job_names_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_with(monkeypatch)
    job = tiny_job(resources={"gpus_per_node": 1, "gpu": "H100"}, model={"precision": "bf16"})
    named = "H100: 79.1 GiB, at most 989 TFLOP/s in bf16 and 3,350 GB/s"
    assert row(job, "device", local=False).splitlines()[1:] == [named]


def test_ranks_here_run_in_this_python() -> None:
    text = row(tiny_job(image=IMAGE, slurm={"partition": "gpu", "container": "pyxis"}), "environment")
    assert text.startswith("Python 3.")
    assert f", torch {torch.__version__.partition('+')[0]}" in text
    assert text.endswith(f" in {sys.prefix}")


@pytest.mark.parametrize(
    ("slurm", "topic", "text"),
    [
        (
            {"container": "pyxis"},
            "image",
            "ours/clip:1 (torch 2.13.0, CUDA 13.0, NCCL 2.29.7, on debian:12-slim)",
        ),
        ({"container": "pyxis", "image": "/i.sqsh"}, "image", "/i.sqsh (slurm.image)"),
        ({"python": "/venv/bin/python"}, "environment", "/venv/bin/python (slurm.python) of the nodes"),
        (
            {"setup": ("source venv/bin/activate",)},
            "environment",
            "the first `python` on PATH of the nodes, after slurm.setup",
        ),
    ],
)
def test_ranks_of_slurm_run_in_what_its_section_says(slurm: dict[str, Any], topic: str, text: str) -> None:
    job = tiny_job(image=IMAGE, stack={"torch": "2.13.0"}, slurm={"partition": "gpu", **slurm})
    assert row(job, topic, local=False) == text


def test_packages_that_no_rank_can_do_without_are_named_with_what_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda _: None)
    job = tiny_job(comm={"backend": "horovod"})
    warnings = [line for line in rows_of(job) if "this Python lacks" in line]
    torch_is_missing, horovod_is_missing = warnings
    assert torch_is_missing == (
        "warning     this Python lacks torch, open_clip, tensorboard, so that no rank can start here: "
        "python -m pip install 'clipship[train]' brings what is missing"
    )
    assert horovod_is_missing == (
        "warning     this Python lacks horovod, so that no rank can start here: `make horovod` builds it, or "
        "use backend = torch"
    )
    assert not any("this Python lacks" in line for line in rows_of(job, local=False))


def test_object_storage_needs_its_package_here_and_not_where_an_image_runs() -> None:
    assert importlib.util.find_spec("gcsfs") is None, "the pinned requirements have it: choose another"
    job = tiny_job(eval={"retrieval": ("gs://bucket/{0..3}.tar",)})
    with pytest.raises(InputError, match=r"gs://bucket/.* needs the package gcsfs, .*'clipship\[gcs\]'"):
        check_without_files(job, 1)
    assert check_without_files(
        tiny_job(
            eval={"retrieval": ("gs://bucket/{0..3}.tar",)},
            image=IMAGE,
            slurm={"partition": "gpu", "container": "pyxis"},
        ),
        1,
    )


def test_a_login_node_without_torch_is_not_asked_for_the_packages_of_the_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = {"retrieval": ("gs://bucket/{0..3}.tar",)}
    job, here = tiny_job(eval=data, slurm={"partition": "gpu"}), tiny_job(eval=data)
    with pytest.raises(InputError, match="needs the package gcsfs"):
        check_without_files(job, 1)
    monkeypatch.setattr(check, "find_spec", lambda _: None)
    check_without_files(job, 1)
    with pytest.raises(InputError, match="needs the package gcsfs"):
        check_without_files(here, 1)


@pytest.mark.parametrize("lock_image", [False, True])
def test_the_size_of_a_checkpoint_is_that_of_its_files(
    tmp_path: Path, alone: Comm, *, lock_image: bool
) -> None:
    job = tiny_job(model={"lock_image": lock_image})
    batch_plan = plan(job, 1)
    train = TrainStep(job, batch_plan, alone, build_model(job, batch_plan, alone).model.train())
    train([MicroBatch(torch.randn(16, 3, 32, 32), torch.randint(1, 1000, (16, 16)))], 1)
    writer = CheckpointWriter(tmp_path, Checkpoint(), 0, 1, 30.0)
    writer.save(1, train, {"job": job.model_dump(mode="json"), "data_samples": 64})
    writer.finish()
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    size = checkpoint_bytes(job)
    assert size is not None
    assert written == pytest.approx(size.total, rel=0.05)
    assert (size.optimizer < 2 * size.weights) == lock_image


def test_checkpoints_are_counted_against_the_disk_that_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * GB))
    job = tiny_job(
        config="ViT-B-32", logging={"runs": str(tmp_path / "not" / "made")}, checkpoint={"keep": 1}
    )
    disk = disk_of(job, local=True)
    assert disk is not None
    assert dict(checkpoint_rows(job, disk)) == {
        "checkpoints": "1.82 GB each (weights 605 MB, optimizer 1.21 GB), 1 kept; 2 fit the 5 GB free in "
        f"{tmp_path}"
    }
    assert list(too_little_disk(job, disk)) == []
    (warning,) = too_little_disk(job.model_copy(update={"checkpoint": Checkpoint(keep=2)}), disk)
    assert warning.startswith("the run keeps up to 3 checkpoints, of which the last is being written: they")
    assert "take 5.45 GB, and " in warning
    assert disk_of(job, local=False) is None, "a cluster's disk that is not mounted here"
    for step in (1, 2, 3):
        (tmp_path / "not" / "made" / "tiny" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert list(too_little_disk(job, disk_of(job, local=False))) == [], "old ones make room"


def test_a_model_of_unknown_size_has_checkpoints_of_unknown_size() -> None:
    ((_, text),) = checkpoint_rows(tiny_job(config=RESNET), None)
    assert text == f"3 kept; the config of {RESNET} does not say how large they are"


def test_without_open_clip_the_size_of_its_models_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_config_folders", list)
    ((_, text),) = checkpoint_rows(tiny_job(config="ViT-B-32"), None)
    assert text == "3 kept; without open_clip here their size is not known"


@pytest.mark.parametrize(
    ("optim", "text"),
    [
        ({"steps": 4}, "4 = 1 epoch x 4 steps"),
        ({"steps": 5}, "5 = 1.25 epochs x 4 steps"),
        ({"steps": 4000}, "4,000 = 1,000 epochs x 4 steps"),
        ({"steps": None, "epochs": 3}, "12 = 3 epochs x 4 steps"),
    ],
)
def test_the_length_is_said_in_steps_and_epochs(optim: dict[str, int | None], text: str) -> None:
    assert row(tiny_job(config=VIT, optim=optim), "steps") == text
