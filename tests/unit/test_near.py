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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explian"], "No such command 'explian'; did you mean explain?\n"),
        (["xxyyz"], "No such command 'xxyyz'.\n"),
        (["render", "slrm", "job.toml"], "No such command 'slrm'; did you mean slurm?\n"),
        (["init", "--preset", "laptp"], "'laptop', 'slurm'; did you mean laptop?\n"),
        (["submit", "job.toml", "--to", "kuberntes"], "'kubernetes'; did you mean kubernetes?\n"),
        (["completion", "fsh"], "is not one of 'bash', 'zsh', 'fish'; did you mean fish, "),
        (["fabrics", "explain", "roc"], "; did you mean roce?\n"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_mistyped_word_of_a_command_names_near_ones(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    Path("job.toml").write_text("")
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "report", "eval", "resume"])
def test_a_mistyped_run_names_near_ones(capsys: pytest.CaptureFixture[str], command: str) -> None:
    a_run("runs", "first-run")
    options = ["--data", "0.tar"] if command == "eval" else []
    assert main([command, "fist-run", *options]) == 2
    assert "; did you mean first-run?\n" in capsys.readouterr().err


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
