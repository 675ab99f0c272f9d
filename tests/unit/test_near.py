"""What messages name: a run that may be meant, and commands that can be pasted into bash and fish."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from trainer.cli.main import main
from trainer.text.paste import command


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


HARD = (
    "", "runs/first-run", "two words", "it's", "'", "''a''", "\\", "a\\", "a\\'b", "a\\\\b\\n", '"', "$HOME",
    "$(id)", "(id)", "`id`", "~/x", "*", "?", "[a]", "{a,b}", "%self", "^x", "=ls", "#x", "!x", "!!", "&",
    ";", "|", "<x>", "a\nb", "\ta ", "é世", "x=1", "-", "@", "a,b:c+d",
)  # fmt: skip


FISH = pytest.mark.skipif(not shutil.which("fish"), reason="no fish here (tests/debian-packages.txt)")


@pytest.mark.parametrize("shell", ["bash", "sh", pytest.param("fish", marks=FISH)])
def test_a_shell_reads_each_word_as_it_was(shell: str) -> None:
    assert shlex.split(command(*HARD)) == list(HARD), "Python reads them, too"
    script = f"printf '%s\\0' {command(*HARD)}"
    private = ["--no-config"] if shell == "fish" else []
    ran = subprocess.run([shell, *private, "-c", script], capture_output=True, check=True)
    assert ran.stdout.decode().split("\0")[:-1] == list(HARD)
