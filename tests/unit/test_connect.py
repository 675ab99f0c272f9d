"""Ranks meet and part, and every process group ends.

A name server that fails for a while is asked again; a name that does not exist is refused.
"""

import socket
import threading
import time

import pytest
import torch

from tests.support.jobs import tiny_job
from trainer.comm import connect, reach
from trainer.errors import InputError
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


def test_a_name_server_that_fails_for_a_while_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = failing(monkeypatch, socket.EAI_AGAIN, 3)
    reach.check_resolvable("node", 1)
    assert len(asked) == 4


def test_a_name_server_that_keeps_failing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, socket.EAI_AGAIN, 10**9)
    monkeypatch.setattr(reach, "RESOLVE_S", 0.01)
    with pytest.raises(InputError, match="MASTER_ADDR = 'node' cannot be resolved"):
        reach.check_resolvable("node", 1)


@pytest.mark.timeout(120)
def test_a_process_group_ends_right_behind_a_barrier_however_often() -> None:
    """torch before 2.8 (pytorch #154976) would never end one in a hundred of these."""
    for _ in range(100):
        comm = connect.connect(tiny_job(), World(0, 1, 0, 1, "here", "test"), {})
        comm.barrier(60)
        comm.close()
    assert not torch.distributed.is_initialized()


def test_a_name_that_does_not_exist_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = failing(monkeypatch, socket.EAI_NONAME, 10**9)
    with pytest.raises(InputError, match="MASTER_ADDR = 'node' cannot be resolved"):
        reach.check_resolvable("node", 1)
    assert len(asked) == 1


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
