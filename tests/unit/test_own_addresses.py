"""Which addresses are this machine's own, by which ranks start here and not over ssh."""

import errno
import socket
from pathlib import Path

import pytest

from tests.support.jobs import TOY_JOB
from trainer.cli.main import main
from trainer.sysinfo import addresses


def let_all_be_bound(folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str = "1") -> None:
    (folder / "ip_nonlocal_bind").write_text(f"{setting}\n")
    monkeypatch.setitem(addresses._NONLOCAL_BIND, socket.AF_INET, folder / "ip_nonlocal_bind")
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: None, raising=False)


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
    let_all_be_bound(tmp_path, monkeypatch, nonlocal_bind)
    assert addresses.is_here("203.0.113.7") is here


def test_the_address_on_the_way_to_others_is_here() -> None:
    try:
        address = addresses.own_ipv4()
    except OSError:
        pytest.skip("this machine has no route to others")
    assert addresses.is_own(address, socket.AF_INET)


# The bridges to containers, which are no network between machines


def test_bridge_that_is_down_is_idle_and_a_card_is_no_bridge(tmp_path: Path) -> None:
    (tmp_path / "down0" / "bridge").mkdir(parents=True)
    (tmp_path / "docker0").mkdir()
    assert addresses.bridges_of_containers(tmp_path) == ["down0"]


def test_a_run_on_a_machine_without_loopback_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    job = tmp_path / "job.toml"
    job.write_text(f'{TOY_JOB}[logging]\nruns = "{tmp_path / "runs"}"\n')
    monkeypatch.setattr("socket.create_connection", refuse)
    assert main(["run", str(job), "--nproc", "1"]) == 1
    assert "does not reach itself at 127.0.0.1 (Network is unreachable)" in capsys.readouterr().err
