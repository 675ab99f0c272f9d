"""`trainer.world.launchers`: each launcher's variables give the world that they describe.

Everything else is refused by name.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
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
from trainer.world import launchers
from trainer.world.launchers import World, detect


def env_of(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


TORCHRUN = env_of("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none")
OPEN_MPI = env_of(
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
    "PMIX_RANK=5"
)
HYDRA = env_of("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4")
HOROVODRUN = env_of("HOROVOD_RANK=5 HOROVOD_SIZE=8 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=4")
SRUN = env_of(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 "
    "SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2)"
)
BATCH_SHELL = env_of(
    "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=4(x2)"
)
BY_HAND = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
ONE_TASK_A_NODE = SRUN | env_of(
    "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=1(x2)"
)


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "Open MPI"),
        (HYDRA, "MPICH"),
        (HOROVODRUN, "horovodrun"),
        ({**SRUN, "PMIX_RANK": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "SLURM_HET_SIZE": "1"}, "Slurm"),
        (BY_HAND, "environment"),
        # The innermost one wins over those around it.
        ({**ONE_TASK_A_NODE, "PMIX_RANK": "1", **TORCHRUN}, "torchrun"),
        ({**ONE_TASK_A_NODE, **OPEN_MPI}, "Open MPI"),
        ({**BATCH_SHELL, **HOROVODRUN}, "horovodrun"),
        ({**ONE_TASK_A_NODE, **BY_HAND, "CLIPSHIP_STARTED_HERE": "1"}, "clipship run"),
    ],
)
def test_each_launcher_gives_its_world(env: dict[str, str], launcher: str) -> None:
    assert detect(env, "n2") == World(5, 8, 1, 4, "n2", launcher)


@pytest.mark.parametrize("env", [{}, BATCH_SHELL, {**BATCH_SHELL, "SLURM_STEP_ID": "batch"}])
def test_without_a_launcher_there_is_one_process(env: dict[str, str]) -> None:
    assert detect(env, "here") == World(0, 1, 0, 1, "here", "single process")


def test_open_mpi_5_on_unequal_hosts_is_believed_about_ranks() -> None:
    """Every node gets the local size of the last one (observed with 5.0.11 on hosts with 3 and 1 slots)."""
    env = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert detect(env, "n1") == World(5, 8, 2, 3, "n1", "Open MPI")


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK, LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "without RANK"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "local rank"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4x2"}, "SLURM_STEP_TASKS_PER_NODE='4x2'"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({**HYDRA, "MPI_LOCALNRANKS": "9"}, "MPI_LOCALNRANKS=9 is above PMI_SIZE=8"),
        ({**TORCHRUN, "WORLD_SIZE": "eight"}, "WORLD_SIZE='eight'"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({"CLIPSHIP_WORLD_SIZE": "two"}, "CLIPSHIP_WORLD_SIZE='two'"),
        (SRUN | {"SLURM_HET_SIZE": "2"}, "whose parts count their ranks apart"),
        # Those of two launchers contradict each other.
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, ("SLURM_PROCID=5", "RANK=0")),
        ({**SRUN, "WORLD_SIZE": "1"}, ("SLURM_STEP_NUM_TASKS=8", "WORLD_SIZE=1")),
        ({**OPEN_MPI, "PMIX_RANK": "0"}, ("OMPI_COMM_WORLD_RANK=5", "PMIX_RANK=0")),
        ({**HYDRA, **BY_HAND, "LOCAL_RANK": "0"}, ("MPI_LOCALRANKID=1", "LOCAL_RANK=0")),
        ({**SRUN, "CLIPSHIP_WORLD_SIZE": "16"}, ("CLIPSHIP_WORLD_SIZE=16: ", " sees one of 8 ")),
        ({"CLIPSHIP_WORLD_SIZE": "16"}, ("CLIPSHIP_WORLD_SIZE=16: ", " sees one of 1 ")),
    ],
)
def test_variables_that_make_no_world_are_refused_by_name(
    env: dict[str, str], names: str | tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as refused:
        detect(env, "n2")
    assert all(name in str(refused.value) for name in ([names] if isinstance(names, str) else names))


@pytest.mark.parametrize(("node", "tasks"), [("0", 4), ("1", 4), ("2", 3), ("3", 1)])
def test_slurm_tasks_per_node_are_counted_in_its_short_form(node: str, tasks: int) -> None:
    twelve = env_of("SLURM_STEP_NUM_TASKS=12 SLURM_STEP_TASKS_PER_NODE=4(x2),3,1 SLURM_LOCALID=0")
    env = {**SRUN, **twelve, "SLURM_NODEID": node}
    assert detect(env, "n").local_size == tasks


NAMES = sorted({name for row in launchers.ROWS for alternatives in row.variables for name in alternatives})
ALSO = ["TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "SLURM_NODEID", "CLIPSHIP_WORLD_SIZE"]
VALUES = st.one_of(
    st.integers(0, 4).map(str),
    st.sampled_from(["", "-1", "1.5", "4(x2),3", "4(x999999999)", "9" * 5000, "٣", "batch", " 1"]),
    st.text(max_size=4),
)
ENVIRONMENTS = st.builds(
    lambda around, changes: {
        **{name: value for launcher in around for name, value in launcher.items()},
        **changes,
    },
    st.lists(
        st.sampled_from([TORCHRUN, OPEN_MPI, HYDRA, HOROVODRUN, SRUN, BATCH_SHELL, BY_HAND, ONE_TASK_A_NODE]),
        max_size=3,
    ),
    st.dictionaries(st.sampled_from(NAMES + ALSO), VALUES, max_size=5),
)


@settings(max_examples=200, deadline=None)
@given(ENVIRONMENTS)
def test_any_environment_gives_a_sound_world_or_a_refusal(env: dict[str, str]) -> None:
    try:
        world = detect(env, "here")
    except InputError:
        return
    assert 0 <= world.rank < world.size
    assert 0 <= world.local_rank < world.local_size <= world.size
    assert env.get("CLIPSHIP_WORLD_SIZE", str(world.size)).lstrip("0") == str(world.size)


def test_ranks_that_lack_a_device_of_their_own_are_refused() -> None:
    with pytest.raises(InputError, match=r"rank 6 .* node n1.* 2 GPUs"):
        launchers.device_index(World(6, 8, 2, 4, "n1", "Slurm"), 2)
    apart = [(0, "n1", "GPU-a"), (1, "n1", "GPU-b"), (2, "n2", "GPU-a"), (3, "n1", None)]
    launchers.shared_devices(apart, "ITS_DEVICES")
    twice = r"ranks 1 and 3 on node n1 have the same GPU, GPU-b(.|\n)* in ITS_DEVICES"
    with pytest.raises(InputError, match=twice):
        launchers.shared_devices([(3, "n1", "GPU-b"), *apart[:3]], "ITS_DEVICES")


@pytest.mark.parametrize(
    ("address", "port", "message"),
    [
        (None, None, "MASTER_ADDR and MASTER_PORT are not set"),
        ("n1", None, "MASTER_PORT is not set"),
        ("", "1", "MASTER_ADDR is not set"),
        ("n1", "65536", "MASTER_PORT=65536"),
        ("n1", "http", "MASTER_PORT='http'"),
    ],
)
def test_rendezvous_is_what_the_launcher_exports_and_never_this_host(
    address: str | None, port: str | None, message: str
) -> None:
    world, alone = World(1, 2, 1, 2, "n1", "Slurm"), World(0, 1, 0, 1, "here", "single process")
    told = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert launchers.master_address(told, world) == ("n1", 29500)
    assert launchers.master_address(told, alone) == ("127.0.0.1", 0), "it needs none"
    env = {"MASTER_ADDR": address, "MASTER_PORT": port}
    with pytest.raises(InputError) as refused:
        launchers.master_address({name: value for name, value in env.items() if value is not None}, world)
    assert message in str(refused.value)


GIVEN = env_of("CLIPSHIP_RANK=2 CLIPSHIP_RANKS=3 CLIPSHIP_LOCAL_RANK=0 CLIPSHIP_LOCAL_SIZE=1")


@pytest.mark.parametrize("env", [TORCHRUN, OPEN_MPI, HOROVODRUN, SRUN, BY_HAND])
def test_supervisor_gives_its_rank_another_place_under_the_same_launcher(env: dict[str, str]) -> None:
    world = detect({**env, **GIVEN, "CLIPSHIP_WORLD_SIZE": "3"}, "n2")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 3, 0, 1)
    assert world.launcher == detect(env, "n2").launcher
    assert launchers.device_index(world, 4) == 1, "the GPU is still that of the launcher's local rank"


@pytest.mark.parametrize(("member", "spares", "size"), [(7, "0", 8), (3, "1", 4), (4, "1", None)])
def test_supervisors_of_the_last_nodes_are_spares(member: int, spares: str, size: int | None) -> None:
    world = World(member, 8, member % 4, 4, f"n{member // 4}", "Slurm")
    env = {"CLIPSHIP_SPARE_NODES": spares}
    expected = None if size is None else World(member, size, member % 4, 4, world.node, "Slurm")
    assert launchers.first_world(world, env) == expected
    respawned = launchers.first_world(world, {**env, "CLIPSHIP_RESPAWNED": "1"})
    assert respawned is None, "it takes another's place"


def test_variables_of_a_rank_are_those_of_its_world() -> None:
    world = World(2, 3, 0, 1, "n2", "clipship run")
    expected = {**GIVEN, "CLIPSHIP_CROSS_RANK": "2", "CLIPSHIP_CROSS_SIZE": "3"}
    assert launchers.rank_variables(world, (2, 3), {}) == expected
    given = launchers.rank_variables(world, (2, 3), {"CLIPSHIP_WORLD_SIZE": "8"})
    assert given == {**expected, "CLIPSHIP_WORLD_SIZE": "3"}


# Which device a rank computes on: a job that asked for GPUs never gets the CPU instead.

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
        "from tests.support.jobs import tiny_job; from tests.unit.test_world import HERE; "
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
