"""The bridges to containers, which are no network between machines."""

from pathlib import Path

import pytest

from trainer.sysinfo.addresses import bridges_of_containers


@pytest.mark.parametrize(
    ("name", "carrier", "left_out"),
    [
        ("docker0", "1", True),
        ("br-0123456789ab", "1", True),
        ("virbr0", "0", True),
        ("lab0", "0", True),
        ("br0", "1", False),
        ("br-ex", "1", False),
        ("eth0", "1", False),
    ],
)
def test_bridges_of_containers_and_idle_ones(tmp_path: Path, name: str, carrier: str, left_out: bool) -> None:
    (tmp_path / name / "bridge").mkdir(parents=True)
    (tmp_path / name / "carrier").write_text(f"{carrier}\n")
    assert bridges_of_containers(tmp_path) == [name] * left_out


def test_bridge_that_is_down_is_idle_and_a_card_is_no_bridge(tmp_path: Path) -> None:
    (tmp_path / "down0" / "bridge").mkdir(parents=True)
    (tmp_path / "docker0").mkdir()
    assert bridges_of_containers(tmp_path) == ["down0"]
