"""Ranks meet and part, and every process group ends; copies in the host's memory stay as they were.

A name server that fails for a while is asked again; a name that does not exist is refused.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from trainer.comm import reach, torch_backend
from trainer.errors import InputError
from trainer.sysinfo.addresses import free_port
from trainer.world.launchers import World


def failing(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[str]:
    asked: list[str] = []

    def getaddrinfo(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        if len(asked) <= times:
            raise socket.gaierror(number, "why")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return asked


@pytest.mark.parametrize(
    ("number", "times", "limit_s", "asks"),
    [
        (socket.EAI_AGAIN, 3, 60.0, 4),
        (socket.EAI_AGAIN, 10**9, 0.01, None),
        (socket.EAI_NONAME, 10**9, 60.0, 1),
    ],
    ids=["for a while", "for long", "no such name"],
)
def test_a_name_server_that_fails_is_asked_again_and_a_name_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: int, times: int, limit_s: float, asks: int | None
) -> None:
    asked = failing(monkeypatch, number, times)
    monkeypatch.setattr(reach, "RESOLVE_S", limit_s)
    if times == 3:
        reach.check_resolvable("node", 1)
    else:
        with pytest.raises(InputError, match="MASTER_ADDR = 'node' cannot be resolved"):
            reach.check_resolvable("node", 1)
    assert asks in (None, len(asked))


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
