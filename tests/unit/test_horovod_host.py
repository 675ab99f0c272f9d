"""Conditions of a host under which Horovod would hang or crash in its start."""

import os
import re
import socket

import pytest

from trainer.errors import InputError

pytestmark = pytest.mark.horovod


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
