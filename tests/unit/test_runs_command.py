"""`clipship runs`, on run folders as ranks leave them."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import TOY_JOB
from tests.support.report_folders import failed_run, long_run
from tests.support.toy_scheduler import clipship
from trainer.cli.main import main
from trainer.run.find import remember
from trainer.text.paste import command

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a user's cache with nothing in it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    long_run(tmp_path / "runs" / "first", steps=100, every=50)
    log = tmp_path / "runs" / "first" / "logs" / "rank-00000.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("2026-01-02 03:04:05,006 INFO step 50/100\n2026-01-02 03:04:06,007 INFO step 100/100\n\n")
    failed_run(tmp_path / "runs" / "second")
    return tmp_path / "runs"


def test_a_folder_in_which_this_user_may_not_look_is_no_run(runs: Path) -> None:
    """It is another user's, so root asks as nobody."""
    (runs / "second").chmod(0)
    ask = (
        "import os, sys; from pathlib import Path; from trainer.run.find import is_run;"
        " os.geteuid() or os.setuid(65534); print(is_run(Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", ask, str(runs / "second")], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (120, ["run", "where", "state", "step", "evaluation", "samples/s", "left", "last"]),
        (72, ["run", "state", "step", "left", "last"]),
        (30, ["run", "state", "step"]),
    ],
)
def test_a_narrow_terminal_has_fewer_columns_and_no_broken_line(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int, titles: list[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["runs"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == titles
    assert {line.split()[0] for line in lines} == {"first", "second"}
    assert max(map(len, [title, *lines])) <= columns


def test_a_scheduler_that_does_not_answer_costs_no_other_line(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = runs / "waiting"
    (waiting / "artefacts").mkdir(parents=True)
    known = {"to": "slurm", "id": "12", "at": "2026-01-01T00:00:00+00:00"}
    (waiting / "artefacts" / "submission.json").write_text(json.dumps(known))
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["runs", "--json"]) == 0
    found = {Path(run["run"]).name: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert found["waiting"]["where"] == "slurm 12"
    assert found["waiting"]["scheduler_state"].startswith("unknown: ")
    assert found["first"]["done"] is True
    assert found["second"]["end"]["exit_code"] != 0


def test_a_damaged_run_is_named_and_the_others_are_listed(runs: Path, capsys: Capture) -> None:
    (runs / "odd" / "artefacts").mkdir(parents=True)
    (runs / "odd" / "artefacts" / "submission.json").write_text("no json")
    assert main(["runs", "runs"]) == 0
    out = capsys.readouterr().out
    assert "unreadable" in out
    assert "submit it again" in out
    assert "first" in out


def test_no_run_and_no_folder_are_told(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert capsys.readouterr().err == "no run in ./runs, and none of yours elsewhere\n"
    assert main(["runs", "elsewhere"]) == 2
    assert "elsewhere is not a folder" in capsys.readouterr().err


def test_runs_in_all_folders_that_this_user_used_are_listed(
    runs: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_run(tmp_path / "scratch" / "elsewhere", steps=100, every=50)
    assert main(["runs", "scratch"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["scratch/elsewhere"]
    remember(runs)  # ./runs under another name: its runs are listed once
    remember(tmp_path / "gone")
    assert main(["runs"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(names) == ["first", "scratch/elsewhere", "second"]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    assert main(["runs"]) == 0
    assert capsys.readouterr().err.startswith("no run in ./runs")
    assert main(["runs", "runs"]) == 0  # a folder that is named shows everybody's
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_links_to_folders_that_are_gone_for_long_are_removed(
    tmp_path: Path, cache: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("there", "gone", "long-gone"):
        remember(tmp_path / name)
    long_run(tmp_path / "there" / "mine", steps=100, every=50)
    links = {os.readlink(link).rpartition("/")[2]: link for link in (cache / "clipship" / "runs").iterdir()}
    os.utime(links["long-gone"], (0, 0), follow_symlinks=False)
    assert main(["runs"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["there/mine"]
    assert [links[name].is_symlink() for name in ("there", "gone", "long-gone")] == [True, True, False]


def test_a_cache_that_cannot_be_written_stops_nothing(
    tmp_path: Path, cache: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache.write_text("a file")
    remember(tmp_path)
    assert main(["runs"]) == 0
    assert "and none of yours elsewhere" in capsys.readouterr().err


def test_submitting_a_run_remembers_its_folder(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(TOY_JOB)
    submitted = clipship(tmp_path, "submit", "job.toml", "--to", "nohup", "--set", "logging.runs=far")
    assert submitted.returncode == 0, submitted.stderr
    try:
        assert main(["runs"]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["far/toy"]
    finally:
        assert clipship(tmp_path, "cancel", str(tmp_path / "far" / "toy")).returncode == 0


# What messages name: a run that may be meant, and commands that can be pasted into bash and fish.


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
