"""`clipship embed` from the command line: the same bytes by real ranks, and a killed command goes on."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import VIT, tiny_job
from tests.support.runs import clipship
from tests.support.ssh_hosts import missing_program, two_hosts
from tests.support.suites import COLOURS, captioned
from trainer.model.build import untrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of pictures, four and three, and weights."""
    folder = tmp_path_factory.mktemp("embed")
    colours = list(COLOURS)
    captioned(folder / "set", [(colours[n % 4], f"one\nof {n}") for n in range(7)])
    torch.save(untrained(tiny_job()).model.state_dict(), folder / "weights.pt")
    return folder


def embedded(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    ran = clipship("embed", "weights.pt", "set/test/*.tar", "--model", VIT, *words, cwd=folder)
    (line,) = ran.stdout.splitlines()
    return json.loads(line), ran.stderr


@pytest.fixture(scope="module")
def by_one(folder: Path) -> dict[str, Any]:
    """Returns what the command says of the files that one rank has written, to `one` in the folder."""
    return embedded(folder, "--out", "one", "--set", "eval.batch_size=2")[0]


def test_two_ranks_write_the_bytes_that_one_writes_and_keep_what_is_there(
    folder: Path, by_one: dict[str, Any]
) -> None:
    found = by_one
    assert (found["shards"], found["kept"], found["samples"], found["rows"]) == (2, 0, 7, 14)
    several, _ = embedded(folder, "--out", "two", "--nproc", "2", "--set", "eval.batch_size=2")
    assert several["world_size"] == 2
    files = sorted(path.name for path in (folder / "one").iterdir())
    assert files == ["shard-000000.parquet", "shard-000001.parquet"]
    for name in files:
        assert (folder / "one" / name).read_bytes() == (folder / "two" / name).read_bytes()
    (folder / "two" / files[0]).unlink()
    again, said = embedded(folder, "--out", "two", "--set", "eval.batch_size=2")
    assert again["kept"] == 1
    assert "1 shard of 2 there already" in said
    assert (folder / "one" / files[0]).read_bytes() == (folder / "two" / files[0]).read_bytes()


@pytest.mark.skipif(missing_program() is not None, reason=f"{missing_program()} is missing")
def test_ranks_on_two_hosts_write_the_same_bytes(
    folder: Path, by_one: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_hosts(tmp_path) as programs:
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        words = ("--out", "hosts", "--hosts", "node-a:1,node-b:1", "--set", "eval.batch_size=2")
        found, _ = embedded(folder, *words)
    assert (found["world_size"], found["samples"]) == (2, by_one["samples"])
    for path in (folder / "one").iterdir():
        assert (folder / "hosts" / path.name).read_bytes() == path.read_bytes()
    assert not list(folder.glob("clipship-eval-*")), "the job's folder, which the hosts saw, is gone"


def test_problems_are_found_before_anything_starts(folder: Path) -> None:
    for words, problem in (
        (["nowhere/*.tar"], "no file matches"),
        (["pipe:cat x"], "is a stream, which this command cannot read"),
        (["set/test/*.tar", "--dtype", "fp8"], "is not one of 'fp16', 'fp32'"),
    ):
        ran = clipship("embed", "weights.pt", "--model", VIT, *words, cwd=folder, code=2)
        assert problem in ran.stderr
        assert "importing torch" not in ran.stderr
