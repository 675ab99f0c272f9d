"""PCI addresses of the GPUs that CUDA will show, with a stand-in for NVML: this machine may have no GPU."""

import sys
from types import SimpleNamespace

import pytest

from trainer.sysinfo.nvml import pci_address, visible_gpus


class NVMLError(Exception):
    pass


BUSES = (b"00000000:1A:00.0", b"00000000:9A:00.0", b"0001A000:03:00.0")
ADDRESSES = ("0000:1a:00.0", "0000:9a:00.0", "1a000:03:00.0")
UUIDS = ("GPU-a", "GPU-b", "GPU-c")


def nvml(*names: str) -> SimpleNamespace:
    """Stand-in for pynvml on a machine with GPUs of these names; a handle is a number."""

    def by_uuid(uuid: bytes) -> int:
        if uuid.decode() not in UUIDS[: len(names)]:
            raise NVMLError
        return UUIDS.index(uuid.decode())

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda handle: names[handle],
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=BUSES[handle]),
    )


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-unknown"}, []),
    ],
    ids=str,
)
def test_gpus_come_in_the_order_in_which_cuda_numbers_them(
    env: dict[str, str], shown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml("H100", "H100", "H100"))
    assert visible_gpus(env) == [ADDRESSES[index] for index in shown]


def test_the_order_of_several_kinds_is_known_only_if_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml("A100", "H100"))
    assert visible_gpus({}) == []
    assert visible_gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == list(ADDRESSES[:2])


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml("H100", "H100"))
    assert pci_address("b") == ADDRESSES[1]
    assert pci_address("unknown") is None
