"""Messages about a mistyped command, choice or run name what may be meant."""

from pathlib import Path

import pytest

from trainer.cli import main as cli
from trainer.run.find import remember, run_hint


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
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "report", "eval", "resume"])
def test_a_mistyped_run_names_near_ones(capsys: pytest.CaptureFixture[str], command: str) -> None:
    a_run("runs", "first-run")
    options = ["--data", "0.tar"] if command == "eval" else []
    assert cli.main([command, "fist-run", *options]) == 2
    assert "; did you mean first-run?\n" in capsys.readouterr().err


def test_a_run_is_named_where_it_is(tmp_path: Path) -> None:
    elsewhere = a_run(str(tmp_path), "scratch", "runs", "night")
    assert run_hint("night") == ""
    remember(elsewhere.parent)
    assert run_hint("night") == f"; did you mean {elsewhere}?"
    assert run_hint("scratch/runs/nihgt") == "; did you mean scratch/runs/night?"
    (tmp_path / "scratch" / "runs" / "notes").mkdir()
    assert run_hint("scratch/runs/note") == "", "a folder that is no run is not named"
