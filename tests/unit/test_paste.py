"""Commands that messages print can be pasted into bash and fish."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from trainer.cli.main import main
from trainer.text.paste import command, with_home

HARD = (
    "", "runs/first-run", "two words", "it's", "'", "''a''", "\\", "a\\", "a\\'b", "a\\\\b\\n", '"', "$HOME",
    "$(id)", "(id)", "`id`", "~/x", "*", "?", "[a]", "{a,b}", "%self", "^x", "=ls", "#x", "!x", "!!", "&",
    ";", "|", "<x>", "a\nb", "\ta ", "é世", "x=1", "-", "@", "a,b:c+d",
)  # fmt: skip


@pytest.mark.parametrize(
    "shell",
    [
        "bash",
        pytest.param(
            "fish",
            marks=pytest.mark.skipif(
                shutil.which("fish") is None, reason="no fish on this machine (tests/debian-packages.txt)"
            ),
        ),
        "sh",
    ],
)
def test_a_shell_reads_each_word_as_it_was(shell: str) -> None:
    assert shlex.split(command(*HARD)) == list(HARD), "Python reads them, too"
    script = f"printf '%s\\0' {command(*HARD)}"
    private = ["--no-config"] if shell == "fish" else []
    ran = subprocess.run([shell, *private, "-c", script], capture_output=True, check=True)
    assert ran.stdout.decode().split("\0")[:-1] == list(HARD)


def test_plain_words_stay_as_they_are() -> None:
    assert command("clipship", "run", "job.toml", "--set", "optim.lr=1e-3") == (
        "clipship run job.toml --set optim.lr=1e-3"
    )
    assert command("two words") == "'two words'"


@pytest.mark.parametrize("home", ["/", "/root", "/root/"])
def test_a_pattern_in_the_home_folder_has_no_double_slash(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    assert with_home("~/x/*.tar") == f"{home.rstrip('/')}/x/*.tar"


@pytest.mark.parametrize("name", ["two words", "it's a\\job"])
def test_the_command_after_init_runs_as_it_is_printed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--preset", "laptop", f"sub/{name}/job.toml"]) == 0
    said = capsys.readouterr().err
    printed = said.partition("next: ")[2].strip()
    assert shlex.split(printed) == ["clipship", "check", f"sub/{name}/job.toml"]
    assert main(shlex.split(printed)[1:]) == 0
    assert Path("sub", name, "job.toml").is_file()
