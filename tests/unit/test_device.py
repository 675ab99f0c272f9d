"""Which device a rank computes on: a job that asked for GPUs never gets the CPU instead."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from tests.support.check import found, problems
from tests.support.command_line import clipship
from tests.support.jobs import TOY_JOB, tiny_job
from trainer.comm import accelerator
from trainer.comm.backends import check_restarts, meeting_variables, starts_again
from trainer.comm.device import rank_device
from trainer.config import Job
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


# The table of backends: who starts and connects each, and what it is refused.

BACKENDS = get_args(type(tiny_job().comm).model_fields["backend"].annotation)
LAUNCHERS: Any = ("clipship", "mpirun")


def restarting(**sections: Any) -> Job:
    """Returns a job that asks for restarts of its ranks."""
    return tiny_job(recovery={"max_restarts": 3}, **sections)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_every_backend_and_starts_ranks_again(name: str, launcher: Any) -> None:
    job = restarting(comm={"backend": name, "launcher": launcher})
    assert problems(job, "--no-data", "--nproc", "2") == ""
    (row,) = found(job, "--no-data", "--nproc", "2")["rows"]["backend"]
    assert row.startswith(name)
    assert f", ranks started by {launcher}" in row
    assert bool(meeting_variables(job, launcher)) == (name == "horovod" and launcher == "clipship")
    check_restarts(job, launcher)
    again = {"clipship": "", "mpirun": "always" if name == "horovod" else "lost"}
    assert starts_again(job, launcher) == again[launcher]
    assert starts_again(tiny_job(comm={"backend": name}), launcher) == ""


@pytest.mark.parametrize("place", ["slurm", "kubernetes"])
@pytest.mark.parametrize(
    ("nodes", "launcher", "told"), [(33, "clipship", 1), (32, "clipship", 0), (33, "auto", 0)]
)
def test_many_ranks_without_mpi_are_told(place: str, nodes: int, launcher: str, told: int) -> None:
    kubernetes = {"gpu_resource": "none", "mounts": {"/runs": "pvc:runs"}}
    sections: Any = {"slurm": {"gpus": "none"}} if place == "slurm" else {"kubernetes": kubernetes}
    comm = {"backend": "horovod", "launcher": launcher}
    job = tiny_job(
        comm=comm,
        resources={"nodes": nodes, "gpus_per_node": 1},
        optim={"global_batch_size": 32 * 33},
        data={"synthetic_samples": 10**5},
        image={"tag": "registry/clip:1"},
        logging={"runs": "/runs"},
        **sections,
    )
    said = "Gloo connects 33 ranks of comm.backend = horovod: it is slow beyond 32; MPI, "
    warnings = found(job, "--no-data")["warnings"]
    assert [said in warning for warning in warnings].count(True) == told


def test_ranks_over_mpi_need_somebody_who_starts_all_again() -> None:
    """As where mpirun was called by hand."""
    with pytest.raises(InputError) as refused:
        check_restarts(restarting(comm={"backend": "horovod"}), "mpirun", starts_again=False)
    assert str(refused.value) == (
        "recovery.max_restarts = 3 needs ranks that can be started again, but MPI, which connects those of "
        "comm.backend = horovod, ends the whole run when one of its ranks is gone, and nothing is there to "
        "start all again: set it to 0, use `clipship run`, or comm.backend = torch"
    )
    check_restarts(restarting(comm={"backend": "torch"}), "mpirun", starts_again=False)


def test_restarts_of_ranks_that_read_standard_input_are_refused() -> None:
    data = {"format": "webdataset", "train": ("-",), "stream_samples": 8}
    assert "standard input can be read only once" in problems(restarting(data=data), "--no-data")
