"""Which device a rank computes on: a job that asked for GPUs never gets the CPU instead."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from tests.support.command_line import clipship
from tests.support.jobs import TOY_JOB, tiny_job
from trainer.comm import accelerator
from trainer.comm.device import rank_device
from trainer.errors import InputError
from trainer.sysinfo.accelerators import ACCELERATORS
from trainer.world.launchers import World

HERE = World(0, 1, 0, 1, "n1", "test")
CPU = torch.device("cpu")
NULL_GPUS = Path(__file__).parents[2] / "tools" / "nullgpu" / "run"
null_gpus = pytest.mark.skipif(shutil.which("gcc") is None, reason="null GPUs need gcc")


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the driver does not load: torch counts no GPU, whatever the machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


ASKED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"resources": {"gpus_per_node": 4}}, {}, "resources.gpus_per_node = 4"),
    ({"resources": {"gpus_per_node": 4}}, {"CUDA_VISIBLE_DEVICES": ""}, "resources.gpus_per_node = 4"),
    ({"resources": {"device": "gpu"}}, {}, 'resources.device = "gpu"'),
    ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
    ({}, {"SLURM_STEP_GPUS": "2"}, "SLURM_STEP_GPUS=2"),
    ({}, {"NVIDIA_VISIBLE_DEVICES": "GPU-8a56"}, "NVIDIA_VISIBLE_DEVICES=GPU-8a56"),
]


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize(("sections", "env", "asked"), ASKED)
def test_a_rank_that_was_to_have_a_gpu_does_not_compute_on_the_cpu(
    sections: dict[str, Any], env: dict[str, str], asked: str
) -> None:
    with pytest.raises(InputError) as refusal:
        rank_device(tiny_job(**sections), HERE, env)
    said = str(refusal.value)
    assert said.startswith(f"{asked}, but rank 0 on n1 cannot use a GPU")
    assert 'resources.device = "cpu"' in said
    shown = env.get("CUDA_VISIBLE_DEVICES")
    for sight in (
        "/dev/nvidia*: ",
        "nvidia-smi: ",
        f"CUDA_VISIBLE_DEVICES: {shown!r}" if shown is not None else "not set",
        "torch 2.",
    ):
        assert sight in said


def test_a_job_cannot_ask_for_a_gpu_and_for_none() -> None:
    with pytest.raises(ValidationError, match="contradicts"):
        tiny_job(resources={"device": "gpu", "gpus_per_node": 0})


@null_gpus
def test_a_rank_beside_a_gpu_takes_it_unless_the_cpu_is_meant() -> None:
    resources = [{}, {"gpus_per_node": 1}, {"device": "cpu"}]
    program = (
        "from tests.support.jobs import tiny_job; from tests.unit.test_device import HERE; "
        "from trainer.comm.device import rank_device; "
        f"print(*(rank_device(tiny_job(resources=keys), HERE, {{}}) for keys in {resources}))"
    )
    done = subprocess.run(
        [NULL_GPUS, sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["cuda:0", "cuda:0", "cpu"], done.stderr


# The table of accelerators, and what a job gets from its row.


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_collectives_of_rows_that_are_tried_are_torchs_own_choice(name: str) -> None:
    row = ACCELERATORS[name]
    assert dist.Backend.default_device_backend_map[row.device_type] == row.collectives


def test_a_job_that_names_a_row_gets_it_though_torch_lacks_its_plugin() -> None:
    row = accelerator.chosen("ascend")
    assert (row.name, accelerator.usable_devices(row)) == ("ascend", 0)


@pytest.mark.usefixtures("no_driver")
def test_a_row_says_which_variables_give_a_process_devices() -> None:
    def device(row: str, **env: str) -> str:
        return str(rank_device(tiny_job(resources={"accelerator": row}), HERE, env))

    of_amd = {"ROCR_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2"}
    with pytest.raises(InputError, match=r"^ROCR_VISIBLE_DEVICES=0,1, but rank 0 on n1 cannot use a GPU"):
        device("rocm", **of_amd)
    assert device("rocm", **of_amd, HIP_VISIBLE_DEVICES="") == "cpu"
    assert device("ascend", CUDA_VISIBLE_DEVICES="0") == "cpu"


def refused(**sections: Any) -> str:
    with pytest.raises(ValidationError) as problem:
        tiny_job(**sections)
    return str(problem.value)


def test_what_only_cuda_has_is_refused_for_others() -> None:
    assert "table for CUDA" in refused(resources={"accelerator": "rocm", "gpu": "H100"})
    assert "variables in [env]" in refused(resources={"accelerator": "ascend", "fabric": "ib"})
    assert "a format of CUDA" in refused(resources={"accelerator": "rocm"}, model={"precision": "tf32"})
    tiny_job(resources={"accelerator": "cuda", "gpu": "H100"}, model={"precision": "tf32"})


@pytest.mark.parametrize("name", ["rocm", "cuda"])
def test_check_says_that_a_row_was_not_tried_and_what_is_off(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(TOY_JOB)
    settings = (f"resources.accelerator={name}", "model.cuda_graphs=true", "model.cudnn_benchmark=true")
    words = [word for setting in settings for word in ("--set", setting)]
    shown = clipship("check", tmp_path / "job.toml", *words, code=0).out
    off = "model.cuda_graphs, model.cudnn_benchmark"
    why = f'it is made for CUDA, and resources.accelerator = "{name}"'
    assert ("not tried here: ROCm" in shown, off in shown, why in shown) == (name == "rocm",) * 3, shown
