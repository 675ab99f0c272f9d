"""`rank_environment`: what the job says about communication is what a rank finds in its environment."""

from tests.support.jobs import tiny_job
from trainer.config import Model
from trainer.launch.rank_env import rank_environment


def test_a_plain_job_sets_only_what_every_rank_needs() -> None:
    assert rank_environment(tiny_job(), 4, threads=2) == {
        "CLIPSHIP_WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1920",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }


def test_threads_on_a_cluster_are_the_cores_of_a_gpu() -> None:
    assert rank_environment(tiny_job(resources={"cpus_per_gpu": 12}), 4)["OMP_NUM_THREADS"] == "12"


def test_each_rank_that_compiles_does_so_on_its_own_cores() -> None:
    assert (
        rank_environment(tiny_job(model={"compile": True}), 4, threads=3)["TORCHINDUCTOR_COMPILE_THREADS"]
        == "3"
    )


def test_nccl_settings_keep_commas_and_signs() -> None:
    nccl = {"socket_ifname": "^docker,lo", "ib_hca": "mlx5_0:1,mlx5_1:1"}
    variables = rank_environment(tiny_job(comm={"nccl": nccl}), 2)
    assert {name: value for name, value in variables.items() if name.startswith("NCCL_")} == {
        "NCCL_SOCKET_IFNAME": "^docker,lo",
        "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
    }


def test_horovod_settings_are_in_horovods_units() -> None:
    knobs = {
        "fusion_mb": 1.5,
        "cycle_ms": 2.5,
        "hierarchical_allreduce": True,
        "hierarchical_allgather": False,
        "cpu_operations": "gloo",
    }
    variables = rank_environment(tiny_job(comm={"backend": "horovod", "horovod": knobs}), 2)
    assert {name: value for name, value in variables.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "150",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1860",
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "1860",
    }


def test_horovod_settings_stay_out_of_a_torch_run() -> None:
    variables = rank_environment(tiny_job(comm={"horovod": {"fusion_mb": 1.0}}), 2)
    assert not [name for name in variables if name.startswith("HOROVOD_")]


def test_offline_reaches_the_hub_library() -> None:
    assert (
        rank_environment(tiny_job().model_copy(update={"model": Model(offline=True)}), 1)["HF_HUB_OFFLINE"]
        == "1"
    )
