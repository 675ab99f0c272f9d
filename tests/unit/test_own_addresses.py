"""Which addresses are this machine's own, by which ranks start here and not over ssh."""

import socket

import pytest

from trainer.sysinfo.addresses import is_here, is_own, own_ipv4


def test_an_address_that_can_be_bound_and_is_elsewhere_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """With net.ipv4.ip_nonlocal_bind = 1 each address can be bound, as load balancers need it."""
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: None, raising=False)
    assert not is_here("203.0.113.7")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1"])
def test_every_loopback_address_is_here(address: str) -> None:
    assert is_own(address, socket.AF_INET)


def test_the_address_on_the_way_to_others_is_here() -> None:
    try:
        address = own_ipv4()
    except OSError:
        pytest.skip("this machine has no route to others")
    assert is_own(address, socket.AF_INET)
