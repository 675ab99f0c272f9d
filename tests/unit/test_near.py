"""Messages about a mistyped command, choice or run name what may be meant."""

from pathlib import Path

import pytest

from trainer.cli.main import main


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "cache"))


def a_run(*parts: str) -> Path:
    folder = Path(*parts)
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text("")
    return folder


def test_a_run_is_named_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = a_run(str(tmp_path), "scratch", "runs", "night")
    (elsewhere.parent / "notes").mkdir()

    def said(name: str) -> str:
        assert main(["status", name]) == 2
        return capsys.readouterr().err

    assert "did you mean" not in said("night")
    Path("cache/clipship/runs").mkdir(parents=True)
    Path("cache/clipship/runs/0").symlink_to(elsewhere.parent)  # as a start of a run leaves it
    assert said("night").endswith(f"; did you mean {elsewhere}?\n")
    assert said("scratch/runs/nihgt").endswith("; did you mean scratch/runs/night?\n")
    assert "did you mean" not in said("scratch/runs/note"), "a folder that is no run is not named"
