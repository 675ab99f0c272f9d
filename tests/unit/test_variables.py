"""`name_problems`: names that no library reads are named, with the right one."""

import pytest

from trainer.sysinfo.variables import name_problems


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


def test_name_that_is_too_new_says_since_when() -> None:
    assert list(name_problems(["TORCH_FR_BUFFER_SIZE"], "2.6.0")) == [
        "TORCH_FR_BUFFER_SIZE has no effect: torch 2.6.0 does not read it; 2.9 is the first version that does"
    ]
