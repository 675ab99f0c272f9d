"""`trainer.world.launchers`: each launcher's variables give the world that they describe.

Everything else is refused by name.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import InputError
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
