"""The store at which torch's ranks meet: it listens on the socket that rank 0 has opened, on one address."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from trainer.comm import torch_backend
from trainer.sysinfo.addresses import free_port
from trainer.world.launchers import World


@pytest.mark.parametrize("release", ["2.6.0+cu124", "2.7.1", "2.8.0", torch.__version__])
def test_rank_0_serves_with_a_backend_that_takes_an_open_socket(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    """torch before 2.8 has one that does not, and takes it unless it is told otherwise."""
    port = free_port("127.0.0.1")
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "__version__", TorchVersion(release))
    with ThreadPoolExecutor() as other:
        wait = timedelta(seconds=20)
        client = other.submit(lambda: TCPStore("127.0.0.1", port, 2, is_master=False, timeout=wait))
        served = torch_backend._store(World(0, 2, 0, 2, "here", "test"), 20.0)
    assert isinstance(served, TCPStore)
    assert getattr(served, "libuvBackend") == (not release.startswith(("2.6", "2.7")))  # noqa: B009 - untyped
    client.result().set("key", "value")
    assert served.get("key") == b"value"
