"""`rank_environment`: what the job says about communication is what a rank finds in its environment."""

from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.config import Timeouts
from trainer.launch.rank_env import rank_environment

KNOBS = {
    "fusion_mb": 1.5,
    "cycle_ms": 2.5,
    "hierarchical_allreduce": True,
    "hierarchical_allgather": False,
    "cpu_operations": "gloo",
}
OWN = {"NCCL_IB_TC": "106", "A": "x y,'z' $HOME", "OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("sections", "beginning", "variables"),
    [
        (
            {},
            "",
            {
                "CLIPSHIP_WORLD_SIZE": "4",
                "OMP_NUM_THREADS": "2",
                "PYTHONUNBUFFERED": "1",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1920",
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
                "TORCH_FR_BUFFER_SIZE": "2000",
            },
        ),
        # Each rank that compiles does so on its own cores.
        ({"model": {"compile": True}}, "TORCHINDUCTOR", {"TORCHINDUCTOR_COMPILE_THREADS": "2"}),
        ({"model": {"offline": True}}, "HF_", {"HF_HUB_OFFLINE": "1"}),
        (
            {"comm": {"nccl": {"socket_ifname": "^docker,lo", "ib_hca": "mlx5_0:1,mlx5_1:1"}}},
            "NCCL_",
            {"NCCL_SOCKET_IFNAME": "^docker,lo", "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1"},
        ),
        (
            {"comm": {"backend": "horovod", "horovod": KNOBS}},
            "HOROVOD_",
            {
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "150",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1860",
                "HOROVOD_FUSION_THRESHOLD": "0",
                "HOROVOD_CYCLE_TIME": "2.5",
                "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
                "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_TIMEOUT_SECONDS": "1860",
            },
        ),
        ({"comm": {"horovod": {"fusion_mb": 1.0}}}, "HOROVOD_", {}),
        # The job's own variables reach every rank as they are, and win.
        ({"env": OWN}, ("NCCL_IB", "A", "OMP"), OWN),
    ],
)
def test_a_rank_gets_what_its_job_says(
    sections: dict[str, Any], beginning: str | tuple[str, ...], variables: dict[str, str]
) -> None:
    found = rank_environment(tiny_job(**sections), 4, threads=2)
    assert {name: value for name, value in found.items() if name.startswith(beginning)} == variables


def test_threads_on_a_cluster_are_the_cores_of_a_gpu() -> None:
    assert rank_environment(tiny_job(resources={"cpus_per_gpu": 12}), 4)["OMP_NUM_THREADS"] == "12"


def test_libraries_get_a_limit_that_is_later_than_every_phase() -> None:
    limits = Timeouts()
    assert limits.backstop_s > limits.longest_s == limits.eval_s
    horovod = rank_environment(tiny_job(comm={"backend": "horovod"}), 2)
    check_s, end_s = (int(horovod[f"HOROVOD_STALL_{name}_TIME_SECONDS"]) for name in ("CHECK", "SHUTDOWN"))
    assert end_s >= limits.backstop_s
    assert end_s > check_s, "else it has no effect"
    assert int(rank_environment(tiny_job(), 2)["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > limits.backstop_s
