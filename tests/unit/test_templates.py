"""Templates and the filters of their values; compiled ones are kept, and nothing depends on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.launch import templates

NAME = "slurm/train.sbatch.j2"


@pytest.fixture(autouse=True)
def _as_a_new_process() -> Iterator[None]:
    templates._environment.cache_clear()
    yield
    templates._environment.cache_clear()


def test_a_compiled_template_is_kept_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    templates._environment().get_template(NAME)
    kept = tmp_path / "clipship" / "templates"
    assert kept.stat().st_mode & 0o077 == 0
    (compiled,) = kept.iterdir()
    for damage in (b"", b"j2", compiled.read_bytes()[:900]):
        compiled.write_bytes(damage)
        templates._environment.cache_clear()
        assert templates._environment().get_template(NAME).name == NAME


@pytest.mark.parametrize("folder", ["/proc/nowhere", "relative"])
def test_without_a_place_for_it_a_template_is_compiled_each_time(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.chdir(tmp_path)
    assert templates._environment().get_template(NAME).name == NAME
    assert not list(tmp_path.iterdir())
