"""Horovod's ranks meet over Gloo at an address that rank 0 serves."""

import os
import re
import socket
from dataclasses import replace
from http.client import HTTPConnection
from unittest import mock

import pytest

from trainer.comm.horovod_meeting import meet
from trainer.errors import InputError
from trainer.launch.ranks.localrun import places_of
from trainer.sysinfo.addresses import free_port
from trainer.world.launchers import World

pytest.importorskip("horovod", reason="Horovod is not installed: `make horovod`")


pytestmark = pytest.mark.horovod
ROOT = World(0, 4, 0, 2, "n1", "Slurm")


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body)
    with connection.getresponse() as response:
        return response.status, response.read()


@pytest.fixture
def master_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Port at which the ranks of this process's variables meet, on loopback; what a test adds is undone."""
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    port = free_port("127.0.0.1")
    monkeypatch.setattr(os, "environ", {**before, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    return port


def test_rank_0_serves_the_addresses_of_all_on_its_own_address_alone(master_port: int) -> None:
    close = meet(ROOT, 5.0)
    assert ask(master_port, "GET", "/global/1")[0] == 404
    assert ask(master_port, "PUT", "/global/1", b"an address")[0] == 200
    assert ask(master_port, "DELETE", "/global/1")[0] == 200  # a rank that has met all
    assert ask(master_port, "GET", "/global/1") == (200, b"an address")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", master_port), timeout=5)
    assert os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] == str(master_port)
    close()
    with pytest.raises(ConnectionRefusedError):
        ask(master_port, "GET", "/global/1")


def test_the_server_takes_nothing_large_and_shows_no_file(
    master_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    close = meet(ROOT, 5.0)
    assert ask(master_port, "HEAD", "/pyproject.toml")[0] == 405
    assert ask(master_port, "PUT", "/global/2", b"1" * 2**21)[0] == 200, "of 10,000 ranks"
    for length in (-1, 2**24 + 1):
        with socket.create_connection(("127.0.0.1", master_port), timeout=20) as stranger:
            stranger.sendall(b"PUT /global/1 HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % length)
            assert b" 413 " in stranger.recv(100)
    for method in ("GET", "PUT"):
        for path in ("/a/b/c", "/a", "x", "/"):
            assert ask(master_port, method, path, b"1" if method == "PUT" else None)[0] == 400
    assert capfd.readouterr().err == ""
    with pytest.raises(InputError, match=f"MASTER_PORT = {master_port}, .* is taken on this machine"):
        meet(ROOT, 5.0)
    close()


@pytest.mark.parametrize("route", [True, False])
def test_a_node_that_knows_its_name_as_loopback_serves_all_interfaces(
    master_port: int, monkeypatch: pytest.MonkeyPatch, route: bool
) -> None:
    """As Debian has it: others reach the name at another address."""
    os.environ["MASTER_ADDR"] = "n1"
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    own = mock.Mock(return_value="127.0.0.1", side_effect=None if route else OSError("unreachable"))
    monkeypatch.setattr("trainer.comm.horovod_meeting.own_ipv4", own)
    if not route:
        with pytest.raises(
            InputError, match="n1, where Horovod's ranks would meet, is a loopback address on"
        ):
            meet(ROOT, 5.0)
        return
    close = meet(ROOT, 5.0)
    assert os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    monkeypatch.undo()
    socket.create_connection(("127.0.0.2", master_port), timeout=5).close()
    close()


def test_a_rank_knows_its_place(master_port: int) -> None:
    close = meet(ROOT, 5.0)
    meet(replace(ROOT, rank=3, local_rank=1, node="n2"), 5.0)()
    close()
    places = {
        "RANK": "3",
        "SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
    }
    meeting = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": str(master_port)}
    expected = {**places, **meeting, "HOSTNAME": "n2", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    found = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    assert found == {f"HOROVOD_{name}": value for name, value in expected.items()}


@pytest.mark.usefixtures("master_port")
def test_a_rank_without_a_rank_0_says_so_and_ipv6_is_refused() -> None:
    with pytest.raises(TimeoutError, match="rank 0 does not serve the ranks' addresses at localhost, port"):
        meet(replace(ROOT, rank=1, local_rank=1), 0.2)
    os.environ["MASTER_ADDR"] = "::1"
    with pytest.raises(
        InputError, match="needs an IPv4 address, and ::1, where its ranks would meet, has no"
    ):
        meet(ROOT, 1.0)


@pytest.mark.usefixtures("master_port")
def test_hosts_with_different_numbers_of_ranks_are_told_apart() -> None:
    first, second, alone = places_of([("a", 2), ("b", 1)])
    assert [place.cross for place in (first, second, alone)] == [(0, 2), (0, 1), (1, 2)]
    world = World(0, 3, 0, 2, "a", "clipship run")
    given = {"CLIPSHIP_CROSS_RANK": "0", "CLIPSHIP_CROSS_SIZE": "2", "CLIPSHIP_HOST": "alias-of-a"}
    of_a_shell = {"HOROVOD_CROSS_RANK": "7", "HOROVOD_CROSS_SIZE": "9", "HOROVOD_HOSTNAME": "login"}
    os.environ.update(given | of_a_shell)
    close = meet(world, 5.0)
    assert os.environ["HOROVOD_HOSTNAME"] == "alias-of-a"
    assert (os.environ["HOROVOD_CROSS_RANK"], os.environ["HOROVOD_CROSS_SIZE"]) == ("0", "2")
    for name in given:
        del os.environ[name]
    with pytest.raises(InputError, match="3 ranks, 2 of them on node a: Horovod over Gloo needs as many on"):
        meet(replace(world, rank=1, local_rank=1), 5.0)
    close()


# Conditions of a host under which Horovod would hang or crash in its start.


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no-such-host.invalid", r"has no address \(.+\)"),
        ("192.0.2.7", r"has only addresses of other machines \(192\.0\.2\.7\)"),
    ],
)
def test_host_whose_own_name_is_not_its_own_is_named(
    name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.comm import horovod_backend

    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    with pytest.raises(InputError, match=rf"own name, {re.escape(name)}, {problem}"):
        horovod_backend._choose_interface()


@pytest.mark.parametrize(
    ("given", "excluded"),
    [
        ({}, "127.0.0.1/8,sppp,docker0"),
        ({"OMPI_MCA_btl_tcp_if_include": "ib0"}, None),
        ({"OMPI_MCA_btl_tcp_if_exclude": "eth1"}, "eth1"),
    ],
)
def test_open_mpi_leaves_bridges_out_unless_its_interfaces_are_named(
    given: dict[str, str], excluded: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.comm import horovod_backend

    for word in ("include", "exclude"):
        monkeypatch.delenv(f"OMPI_MCA_btl_tcp_if_{word}", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(horovod_backend, "bridges_of_containers", lambda: ["docker0"])
    horovod_backend._leave_out_bridges()
    found = os.environ.pop("OMPI_MCA_btl_tcp_if_exclude", None)
    assert found == excluded
