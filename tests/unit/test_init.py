"""`clipship init`: presets with what the user says, and its questions in a terminal."""

import csv
import json
import os
import pty
import select
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import clipship
from trainer.cli.main import main
from trainer.config import Job
from trainer.config.loader import load_job
from trainer.data.pack import write_shards
from trainer.data.shard_names import expand_shards
from trainer.data.source import open_images
from trainer.presets.files import preset_names, preset_text
from trainer.presets.wishes import Wishes, job_text


def written(folder: Path, *arguments: str) -> Job:
    path = folder / "job.toml"
    assert main(["init", *arguments, str(path), "--force"]) == 0
    return load_job(path)


@pytest.mark.parametrize("name", ["birds[1]", "birds{1..2}", "birds?", r"birds\d"])
def test_a_folder_whose_name_looks_like_a_pattern_is_taken_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for folder, word in ((name, "ours"), ("birds1", "another's")):
        (tmp_path / folder / "shards").mkdir(parents=True)
        samples = ((f"{n}", {"png": b"x", "txt": word.encode()}) for n in range(100))
        write_shards(samples, tmp_path / folder / "shards", 50)
        flowers(tmp_path / folder / "pictures", 200)
    own = tmp_path / name
    monkeypatch.chdir(own)
    for data, file in (("shards", "shard-000000.tar"), ("pictures", "captions.csv")):
        for job_path in (Path("job.toml"), Path("../job.toml")):
            options = ["--preset", "gpu", "--data", data, "--held-out", "pictures/captions.csv"]
            clipship("init", *options, "--force", job_path, code=0)
            job = load_job(job_path)
            assert os.path.samefile(expand_shards(job.data.train)[0], Path(data, file))
            (held_out,) = expand_shards(job.eval.retrieval)
            assert os.path.samefile(held_out, "pictures/captions.csv")
    for data in ("shards", "pictures"):  # parts of both are held out
        clipship("init", "--preset", "gpu", "--data", data, "--force", "../job.toml", code=0)
        job = load_job(Path("../job.toml"))
        for file in expand_shards((*job.data.train, *job.eval.retrieval)):
            assert Path(file).resolve().parent in (own / "shards", tmp_path)


def flowers(folder: Path, pairs: int) -> Path:
    """A table of pictures that have two captions each."""
    folder.mkdir()
    rows = [f'img/{number // 2}.png,"a flower, {number}",{number}' for number in range(pairs)]
    (folder / "img").mkdir()
    for number in range(-(-pairs // 2)):
        (folder / "img" / f"{number}.png").touch()
    (folder / "captions.csv").write_text("\n".join(["image,caption,more", *rows]) + "\n")
    return folder


def pictures(table: Path) -> list[Path]:
    with table.open() as rows:
        return [table.parent / row["image"] for row in csv.DictReader(rows)]


def test_the_job_follows_the_table_part_of_which_is_held_out(tmp_path: Path) -> None:
    job = written(tmp_path, "--preset", "laptop", "--data", str(flowers(tmp_path / "flowers", 200)))
    assert (job.name, job.optim.steps, job.optim.epochs) == ("flowers", None, 30)
    assert (job.optim.global_batch_size, job.optim.warmup_steps, job.eval.every_epochs) == (16, 5, 1)
    assert (len(open_images(job.data)), len(open_images(job.retrieval_data))) == (95, 5)
    names = [set(pictures(tmp_path / f"captions-{part}.csv")) for part in ("train", "held-out")]
    assert not names[0] & names[1], "a picture with two captions is in one part"
    assert all(path.is_file() for path in names[0] | names[1])
    assert "190 pairs, counted by clipship init" in (tmp_path / "job.toml").read_text()


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_table_that_is_there_is_never_replaced(tmp_path: Path, force: tuple[str, ...]) -> None:
    own = str(flowers(tmp_path / "flowers", 200))
    (tmp_path / "captions-train.csv").write_text("mine")
    said = clipship("init", "--preset", "laptop", "--data", own, tmp_path / "job.toml", *force, code=2).err
    assert "captions-train.csv exists already with other rows" in said
    assert (tmp_path / "captions-train.csv").read_text() == "mine"
    assert not (tmp_path / "job.toml").exists()


def test_the_users_own_table_stays_whole_however_often_it_is_cut(tmp_path: Path) -> None:
    folder = flowers(tmp_path / "flowers", 200)
    table = (folder / "captions.csv").rename(folder / "dogs-train.csv")
    before = table.read_text()
    for _ in range(2):
        job = written(folder, "--preset", "laptop", "--data", str(table))
        assert job.data.train == (str(folder / "dogs-train-train.csv"),)
        assert table.read_text() == before
    clipship("init", "--preset", "laptop", "--data", table, table, "--force", code=2)
    assert table.read_text() == before


def test_addresses_of_images_are_cut_as_they_are(tmp_path: Path) -> None:
    table = tmp_path / "web" / "birds.csv"
    table.parent.mkdir()
    rows = [f"https://x.org/a/{number}.jpg,a bird" for number in range(100)]
    table.write_text("\n".join(["image,caption", *rows]))
    written(tmp_path, "--preset", "laptop", "--data", str(table))
    parts = [(tmp_path / f"birds-{part}.csv").read_text().splitlines()[1:] for part in ("train", "held-out")]
    assert sorted([*parts[0], *parts[1]]) == sorted(rows)


def test_held_out_pairs_that_are_given_are_taken_and_none_are_for_none(tmp_path: Path) -> None:
    own = str(flowers(tmp_path / "flowers", 200) / "captions.csv")
    other = str(flowers(tmp_path / "val", 10) / "captions.csv")
    job = written(tmp_path, "--preset", "gpu", "--data", own, "--held-out", other)
    assert (job.data.train, job.eval.retrieval) == ((own,), (other,))
    assert written(tmp_path, "--preset", "slurm", "--data", own, "--held-out", "none").eval.retrieval == ()
    clipship("init", "--preset", "gpu", "--held-out", other, tmp_path / "x.toml", code=2)
    clipship("init", "--preset", "gpu", "--data", own, "--held-out", "no.csv", tmp_path / "x", code=2)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (".", "neither shards (*.tar) nor a table"),
        ("no.csv", "no.csv: no such file"),
        ("no/", "no such folder"),
        ("/no/{0..3}.tar", "4 of 4 files are missing"),
    ],
)
def test_data_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in clipship("init", "--preset", "gpu", "--data", data, code=2).err
    assert not Path("job.toml").exists()


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1)


@given(st.sampled_from(preset_names()), TEXTS, TEXTS, st.integers(1, 64))
def test_every_answer_stands_in_the_file_as_it_was_given(
    preset: str, data: str, model: str, gpus: int
) -> None:
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
    seen = answered(tmp_path, "moon", "here", "no/", "captions.csv", "none", "2", "ViT-B16", "ViT-B-16")
    assert "no such folder" in seen
    assert "unknown model 'ViT-B16'; did you mean ViT-B-16" in seen
    assert "'moon' is not one of" in seen
    assert "next: clipship check job.toml" in seen
    job = load_job(tmp_path / "job.toml")
    assert (job.model.name, job.resources.gpus_per_node) == ("ViT-B-16", 2)
    assert job.data.train == (str(tmp_path / "captions.csv"),)


def test_folder_with_a_table_is_taken_and_one_with_several_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "captions.csv").touch()
    job = written(tmp_path, "--preset", "laptop", "--data", str(folder))
    assert job.data.train == (str(folder / "captions.csv"),)
    (folder / "more.tsv").touch()
    said = clipship("init", "--preset", "laptop", "--data", folder, tmp_path / "x.toml", code=2).err
    assert "several tables, captions.csv, more.tsv: name one" in said


def test_a_line_break_in_the_files_name_stays_in_the_comment(tmp_path: Path) -> None:
    path = tmp_path / "a\nname = 'of another'\n# .toml"
    clipship("init", "--preset", "laptop", path, code=0)
    assert load_job(path).name == tomllib.loads(preset_text("laptop"))["name"]


@pytest.mark.parametrize(
    ("data", "job_path"),
    [("caf\udce9.csv", "job.toml"), ("caf\udce9", "job.toml"), ("a.csv", "caf\udce9.toml")],
)
def test_a_name_that_is_not_utf_8_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, job_path: str
) -> None:
    monkeypatch.chdir(flowers(tmp_path / "flowers", 200))
    Path("caf\udce9").mkdir()
    write_shards(((f"{n}", {"png": b"x", "txt": b"a bird"}) for n in range(9)), Path("caf\udce9"), 5)
    for name in ("caf\udce9.csv", "a.csv"):
        Path(name).write_text(Path("captions.csv").read_text())
    before = set(Path().iterdir())
    for more in ([], ["--no-data"]):
        said = clipship("init", "--preset", "gpu", "--data", data, *more, job_path, code=2).err
        assert "this name is not UTF-8" in said
    assert set(Path().iterdir()) == before


def test_enter_alone_leads_to_a_run_of_a_cluster_too(tmp_path: Path) -> None:
    answered(tmp_path, "slurm", "", "", "")
    assert load_job(tmp_path / "job.toml").slurm.partition == "gpu"


# What helps at a prompt: completion in the shell, and `clipship explain` of keys and sections.

BASH = """
source "$SCRIPT"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_clipship_completion "$ASKED" 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, *words: str) -> list[str]:
    """Returns what bash would suggest for the last of the words."""
    script = folder / "script"
    script.write_text(clipship("completion", "bash").out)
    asked = folder / "clipship"
    asked.write_text(f"#!/bin/sh\nexec {sys.executable} -m trainer.cli\n")
    asked.chmod(0o755)
    environment = {**os.environ, "SCRIPT": str(script), "ASKED": str(asked)}
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=60,
    )
    return done.stdout.split()


def test_bash_completes_commands_presets_keys_values_and_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first-run").mkdir(parents=True)
    (tmp_path / "runs" / "first-run" / "job.toml").touch()
    (tmp_path / "runs" / "other").mkdir()
    assert completed(tmp_path, "clipship", "expl") == ["explain"]
    assert "laptop" in completed(tmp_path, "clipship", "init", "--preset", "")
    assert completed(tmp_path, "clipship", "run", "--set", "optim.lr") == ["optim.lr="]
    assert "model.precision=bf16" in completed(tmp_path, "clipship", "run", "--set", "model.precision=b")
    assert completed(tmp_path, "clipship", "status", "fi") == ["first-run"]
    assert completed(tmp_path, "clipship", "report", "other-run", "fi") == ["first-run"]
    assert completed(tmp_path, "clipship", "explain", "comm.nccl") == [
        "comm.nccl",
        "comm.nccl.ib_hca",
        "comm.nccl.socket_ifname",
    ]


def test_each_shell_has_a_script() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_CLIPSHIP_COMPLETE={shell}_complete" in clipship("completion", shell, code=0).out


def keys(schema: dict[str, Any], section: str = "") -> list[str]:
    found = []
    for name, place in schema["properties"].items():
        found += [section + name, *(keys(place, f"{section}{name}.") if "properties" in place else [])]
    return found


@pytest.mark.parametrize("columns", [60, 200, pytest.param(80, marks=pytest.mark.full)])
def test_every_key_and_section_is_explained_within_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for key in ["", *keys(json.loads(clipship("explain", "", "--json").out))]:
        shown = clipship("explain", key)
        assert shown.code == 0, key
        assert max(map(len, shown.out.splitlines())) <= columns, key


def test_key_has_its_type_default_range_unit_and_rule_of_resumed_runs() -> None:
    assert clipship("explain", "recovery.min_nodes").out.splitlines()[-6:] == [
        "",
        "  - whole number, at least 1",
        "  - in nodes",
        "  - default not set",
        "  - a resumed run may change it",
        "  - see also: resources.nodes",
    ]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        *(("optim.learning_rate", ""), ("optim.warmup", "optim.warmup_steps"), ("lrr", "optim.lr")),
        *((".", "`clipship explain` lists the sections"), ("xyzzy", "")),
    ],
)
def test_unknown_key_names_near_ones(wrong: str, near: str) -> None:
    code, _, why = clipship("explain", wrong)
    assert code == 2
    assert f"the job file has no key {wrong}: " in why
    assert near in why
