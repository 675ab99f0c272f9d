"""Variables that no library reads, and a second copy of NCCL, are named."""

import pytest

from trainer.sysinfo import libraries
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
