"""`clipship init`: presets with what the user says, and its questions in a terminal."""

import os
import pty
import select
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.cli.init import Wishes, data_pattern, job_text
from trainer.cli.main import main
from trainer.cli.presets import preset_names
from trainer.config import Job
from trainer.config.loader import load_job


def written(folder: Path, *arguments: str) -> Job:
    path = folder / "job.toml"
    assert main(["init", *arguments, str(path), "--force"]) == 0
    return load_job(path)


@pytest.mark.parametrize("preset", preset_names())
def test_own_data_take_the_place_of_the_presets(tmp_path: Path, preset: str) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.tar").touch()
    job = written(tmp_path, "--preset", preset, "--data", str(tmp_path / "shards"))
    assert job.data.train == (str(tmp_path / "shards" / "*.tar"),)
    assert job.data.format != "synthetic"


def test_a_relative_path_is_the_users_and_not_the_job_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("captions.csv").touch()
    assert main(["init", "--preset", "gpu", "--data", "captions.csv", "sub/dir/job.toml"]) == 0
    (found,) = load_job(Path("sub/dir/job.toml")).data.train
    assert os.path.samefile(found, "captions.csv")


@pytest.mark.parametrize("pattern", ["s3://b/{0..3}.tar", "/data/*.tar", "pipe:cat x.tar", "-", "~/x.tar"])
def test_what_is_no_path_here_stays_as_it_is(pattern: str) -> None:
    assert data_pattern(pattern, Path("sub/job.toml")) == pattern


@pytest.mark.parametrize(
    ("data", "says"), [(".", "neither shards (*.tar) nor a table"), ("no.csv", "no such file")]
)
def test_data_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--preset", "gpu", "--data", data]) == 2
    assert says in capsys.readouterr().err
    assert not Path("job.toml").exists()


@given(st.sampled_from(preset_names()), st.text(min_size=1), st.text(min_size=1), st.integers(1, 64))
def test_every_answer_stands_in_the_file_as_it_was_given(
    preset: str, data: str, model: str, gpus: int
) -> None:

    try:
        data.encode(), model.encode()
    except UnicodeEncodeError:
        return
    table = tomllib.loads(job_text(Wishes(preset, data, gpus, model)))
    assert (table["data"]["train"], table["model"]["name"]) == (data, model)
    assert table["resources"]["gpus_per_node"] == gpus


def answered(folder: Path, *answers: str) -> str:
    """Returns what a terminal shows while these answers are typed."""
    ours, theirs = pty.openpty()
    asked = subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", "init"], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen, left, end = b"", list(answers), time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
        if left and seen.rstrip(b" ").endswith(b":"):
            os.write(ours, left.pop(0).encode() + b"\n")
            seen += b"\n"
    assert asked.wait(60) == 0, seen.decode()
    os.close(ours)
    return seen.decode()


def test_questions_in_a_terminal_choose_the_preset(tmp_path: Path) -> None:
    (tmp_path / "captions.csv").touch()
    seen = answered(tmp_path, "no/", "captions.csv", "moon", "here", "2", "ViT-B16", "ViT-B-16")
    assert "no such folder" in seen
    assert "unknown model 'ViT-B16'; did you mean ViT-B-16" in seen
    assert "'moon' is not one of" in seen
    assert "next: clipship check job.toml" in seen
    job = load_job(tmp_path / "job.toml")
    assert (job.name, job.model.name, job.resources.gpus_per_node) == ("my-clip", "ViT-B-16", 2)
    assert job.data.train == (str(tmp_path / "captions.csv"),)


def test_folder_with_a_table_is_taken_and_one_with_several_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "captions.csv").touch()
    job = written(tmp_path, "--preset", "laptop", "--data", str(folder))
    assert job.data.train == (str(folder / "captions.csv"),)
    (folder / "more.tsv").touch()
    assert main(["init", "--preset", "laptop", "--data", str(folder), str(tmp_path / "x.toml")]) == 2
    assert "several tables, captions.csv, more.tsv: name one" in capsys.readouterr().err


def test_header_tells_of_the_own_data_and_of_the_files_own_name() -> None:
    text = job_text(Wishes("laptop", "captions.csv"), Path("elsewhere/my job.toml"))
    header = text.partition("\n\n")[0]
    assert "made-up" not in header
    assert "clipship run 'my job.toml' --nproc 2" in header
    for preset in preset_names():
        assert "CC3M" not in job_text(Wishes(preset, "x.csv")).partition("\n")[0]


def test_enter_alone_leads_to_a_run_of_a_cluster_too(tmp_path: Path) -> None:
    answered(tmp_path, "", "slurm", "", "")
    assert load_job(tmp_path / "job.toml").slurm.partition == "gpu"
