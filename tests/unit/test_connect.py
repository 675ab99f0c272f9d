"""Ranks meet and part, and every process group ends; copies in the host's memory stay as they were.

A name server that fails for a while is asked again; a name that does not exist is refused.
"""

import io
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from tests.support.jobs import tiny_job
from trainer.comm import connect, reach, torch_backend
from trainer.comm.host_memory import HostCopy
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


@pytest.mark.timeout(120)
def test_a_process_group_ends_right_behind_a_barrier_however_often() -> None:
    """torch before 2.8 (pytorch #154976) would never end one in a hundred of these."""
    for _ in range(100):
        comm = connect.connect(tiny_job(), World(0, 1, 0, 1, "here", "test"), {})
        comm.barrier(60)
        comm.close()
    assert not torch.distributed.is_initialized()


def test_waiting_for_rank_0_ends_as_soon_as_it_listens() -> None:
    late = socket.socket()
    late.bind(("127.0.0.1", 0))  # nobody else gets the port, and who calls it is refused
    port = late.getsockname()[1]
    accepted: list[tuple[str, int]] = []

    def serve() -> None:
        time.sleep(0.2)
        with late:
            late.listen()
            connection, address = late.accept()
            connection.close()
            accepted.append(address)

    rank_0 = threading.Thread(target=serve)
    rank_0.start()
    assert reach.wait_until_served("127.0.0.1", port, 60.0)
    rank_0.join(60.0)
    assert accepted
    assert not reach.wait_until_served("127.0.0.1", port, 0.05)


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


def test_a_copy_stays_as_it_was_and_is_contiguous() -> None:
    tensors = [torch.arange(6.0).view(2, 3).T, torch.tensor(3, dtype=torch.int64)]
    copy = HostCopy(tensors)
    tensors[0].zero_()
    wide, count = copy.get()
    assert wide.is_contiguous()
    assert (wide.tolist(), int(count)) == ([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], 3)


def test_a_saved_copy_is_as_long_as_itself() -> None:
    """A part of a larger memory would be saved with the whole of it."""
    (copy,) = HostCopy([torch.zeros(1_000_000)[:10]]).get()
    file = io.BytesIO()
    torch.save(copy, file)
    assert len(file.getvalue()) < 10_000
