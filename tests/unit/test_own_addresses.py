"""Which addresses are this machine's own, by which ranks start here and not over ssh."""

import socket
from pathlib import Path

import pytest

from trainer.sysinfo import addresses
from trainer.sysinfo.addresses import is_here, is_own, own_ipv4


@pytest.mark.parametrize(
    ("nonlocal_bind", "here"),
    [
        ("1", False),  # each address can be bound, as load balancers need it
        ("0", True),  # the route to a second address of one subnet has the first one as its source
    ],
)
def test_what_can_be_bound_is_here_unless_everything_can(
    nonlocal_bind: str, here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path / "ip_nonlocal_bind"
    setting.write_text(f"{nonlocal_bind}\n")
    monkeypatch.setitem(addresses._NONLOCAL_BIND, socket.AF_INET, setting)
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: None, raising=False)
    assert is_here("203.0.113.7") is here


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1"])
def test_every_loopback_address_is_here(address: str) -> None:
    assert is_own(address, socket.AF_INET)


def test_the_address_on_the_way_to_others_is_here() -> None:
    try:
        address = own_ipv4()
    except OSError:
        pytest.skip("this machine has no route to others")
    assert is_own(address, socket.AF_INET)
