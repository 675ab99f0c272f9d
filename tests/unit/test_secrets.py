"""Secrets of a job stand in no record that others read.

`check` names them, and they are refused where they would enter an image.
"""

import io
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from trainer.config.loader import load_job, recorded
from trainer.config.resume_rule import differences
from trainer.data.sample import BadSample
from trainer.errors import InputError
from trainer.launch import live_line
from trainer.plan.trained import evaluation_job
from trainer.text import live
from trainer.text.fitting import fitted
from trainer.text.masking import masked, secret_in
from trainer.world.console import ShownFormatter
from trainer.world.heartbeat import RankState

SIGNED = "https://data.example/0.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t"


ON_PODS = {
    "image": {"tag": "clip:1"},
    "kubernetes": {"mounts": {"/runs": "pvc:runs"}},
    "logging": {"runs": "/runs"},
}


def job_file(folder: Path, **sections: Any) -> Path:
    table = {
        "name": "x",
        "data": {"format": "synthetic"},
        "model": {"name": "ViT-S-32-alt"},
        "optim": {"global_batch_size": 32, "steps": 2},
        **sections,
    }
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def test_a_run_goes_on_though_its_addresses_were_signed_again(tmp_path: Path) -> None:
    before, now, elsewhere = (
        tiny_job(data={"train": (SIGNED.replace(*change),), "format": "webdataset"})
        for change in (("", ""), ("s3cr3t", "0ther"), ("0.tar", "1.tar"))
    )
    for there in (recorded(before), before.model_dump()):
        assert not list(differences(there, now.model_dump()))
    (told,) = differences(before.model_dump(), elsewhere.model_dump())
    assert "s3cr3t" not in told


def test_an_evaluation_does_not_begin_with_an_address_that_lost_its_secret(tmp_path: Path) -> None:
    job = tiny_job(eval={"retrieval": (SIGNED,)})
    (tmp_path / "model.pt").touch()
    (tmp_path / "manifest.json").write_text(json.dumps({"job": recorded(job)}))
    with pytest.raises(InputError, match="had a secret in its address"):
        evaluation_job(str(tmp_path), None, {}, 1, ())


def test_what_is_submitted_lies_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    runs = tmp_path / "runs"
    sections = {
        "env": {"HF_TOKEN": "s3cr3t"},
        "slurm": {"python": "/p/python"},
        "logging": {"runs": str(runs)},
    }
    assert clipship("submit", job_file(tmp_path, **sections), "--to", "slurm").code == 0
    holding = [path for path in runs.rglob("*") if path.is_file() and "s3cr3t" in path.read_text()]
    assert len(holding) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}


@pytest.mark.parametrize(
    ("sections", "key", "advice"),
    [
        ({"env": {"HF_TOKEN": "s3cr3t"}}, "env.HF_TOKEN", "export HF_TOKEN in the shell"),
        ({"env": {"HF_TOKEN": "s3cr3t"}, **ON_PODS}, "env.HF_TOKEN", 'HF_TOKEN = "secret:SECRET:KEY"'),
        ({"slurm": {"setup": ["export API_KEY=s3cr3t"]}}, "slurm.setup", "batch script"),
        ({"data": {"train": "pipe:x -u a:s3cr3t", "stream_samples": 9}}, "data.train", "$NAME"),
    ],
)
def test_check_names_what_looks_like_a_secret_and_shows_no_value(
    tmp_path: Path, sections: dict[str, Any], key: str, advice: str
) -> None:
    said = "".join(clipship("check", job_file(tmp_path, **sections), "--no-data")[1:])
    assert f"{key} looks like a secret (" in " ".join(said.split())
    assert advice in " ".join(said.split())
    assert "s3cr3t" not in said


@pytest.mark.parametrize("command", [["check"], ["render", "slurm"], ["render", "kubernetes"]])
def test_each_command_that_shows_a_job_warns_of_its_secrets(tmp_path: Path, command: list[str]) -> None:
    path = job_file(tmp_path, env={"HF_TOKEN": "s3cr3t"}, slurm={"python": "/p/python"}, **ON_PODS)
    said = clipship(*command, path, *(["--no-data"] if command == ["check"] else []))
    assert "env.HF_TOKEN looks like a secret" in said.out + said.err
    assert "s3cr3t" not in said.err


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"train": SIGNED.replace("https", "no-such-protocol")}},
        {"image": {"mirrors": {"pip": "ftp://user:s3cr3t@host"}}},
        {"model": {"precision": "token=s3cr3t"}},
    ],
)
def test_no_message_of_check_holds_a_secret(tmp_path: Path, sections: dict[str, Any]) -> None:
    said = "".join(clipship("check", job_file(tmp_path, **sections))[1:])
    assert "***" in said
    assert "s3cr3t" not in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pip_packages", ["mine @ https://user:s3cr3t@host/mine.whl"]),
        ("pip_packages", ["mine @ https://host/mine.whl?token=s3cr3t"]),
        ("env", {"HF_TOKEN": "s3cr3t"}),
        ("env", {"PLAIN": "hf_" + "s3cr3t" * 5}),
        ("mirrors", {"pip": "https://host/simple?token=s3cr3t"}),
    ],
)
def test_a_secret_that_would_enter_an_image_is_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(InputError, match=r"contains a |looks like a secret") as refused:
        load_job(job_file(tmp_path, image={key: value}))
    assert "s3cr3t" not in str(refused.value)


# Secrets are found in every form in which job files hold them.
# Nothing that is shown or kept for others contains them.

HF = "hf_" + "aB3" * 10
SECRETS = [
    ("https://user:s3cr3t@host/a.tar", "https://***@host/a.tar"),
    ("https://s3cr3t@host/a.tar", "https://***@host/a.tar"),
    ("https://user:s3c/r3t@host/a.tar", "https://***@host/a.tar"),
    ("https://user:s3c@r3t@host/a.tar", "https://***@host/a.tar"),
    ("ftp://:s3cr3t@host/", "ftp://***@host/"),
    ("https://b/0.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t&x=1",
     "https://b/0.tar?X-Amz-Expires=9&X-Amz-Signature=***&x=1"),
    ("https://b/0?X-Amz-Credential=s3cr3t%2Fus", "https://b/0?X-Amz-Credential=***"),
    ("https://b/0?GoogleAccessId=me&Signature=s3cr3t", "https://b/0?GoogleAccessId=me&Signature=***"),
    ("https://b/0?AWSAccessKeyId=s3cr3t&a=b", "https://b/0?AWSAccessKeyId=***&a=b"),
    ("https://b/0?key=s3cr3t", "https://b/0?key=***"),
    ("einops @ https://i/e.whl?token=s3cr3t#sha256=ab", "einops @ https://i/e.whl?token=***#sha256=ab"),
    ("pipe:curl -H 'Authorization: Bearer s3cr3t' https://b/0",
     "pipe:curl -H 'Authorization: ***' https://b/0"),
    ('pipe:curl -H "X-Api-Key: s3cr3t" https://b/0', 'pipe:curl -H "X-Api-Key: ***" https://b/0'),
    ("pipe:curl -H Authorization:Bearer\\ s3cr3t https://b/0", "pipe:curl -H Authorization:*** https://b/0"),
    ("pipe:curl -H 'Cookie: a=b; session=s3cr3t' https://b", "pipe:curl -H 'Cookie: ***' https://b"),
    ("pipe:curl -u me:s3cr3t https://b/0", "pipe:curl -u *** https://b/0"),
    ("pipe:wget --password s3cr3t https://b/0", "pipe:wget --password *** https://b/0"),
    ("pipe:wget --http-password=s3cr3t https://b", "pipe:wget --http-password=*** https://b"),
    ("pipe:AWS_SECRET_ACCESS_KEY=s3cr3t aws s3 cp s3://a -",
     "pipe:AWS_SECRET_ACCESS_KEY=*** aws s3 cp s3://a -"),
    ("export API_TOKEN='s3cr3t with blanks'; x", "export API_TOKEN='***'; x"),
    ("pipe:x --env 'A=b TOKEN=s3cr3t'", "pipe:x --env 'A=b TOKEN=***'"),
    ('{"password": "s3cr3t"}', '{"password": "***"}'),
    ("AccountName=a;AccountKey=s3cr3t;x=y", "AccountName=a;AccountKey=***;x=y"),
    (f"--set env.X={HF} given", "--set env.X=*** given"),
    ("eyJs3cr3t0000.eyJ0123456789.s-_", "***"),
    ("x-eyJ-eyJs3cr3t0000.eyJ0123456789.s", "x-***"),
    ("-----BEGIN RSA PRIVATE KEY-----\ns3cr3t\n-----END", "-----BEGIN RSA PRIVATE KEY-----***-----END"),
]  # fmt: skip
HARMLESS = [
    "https://host:8080/a@b", "http://[::1]:8080/x", "s3://bucket/{0000..0099}.tar",
    "git+ssh://git@github.com/a/b", "nvcr.io/nvidia/pytorch:24.01-py3@sha256:" + "a" * 64,
    "einops @ https://i/e.whl#sha256=ab", 'pipe:curl -H "Authorization: Bearer $HF_TOKEN" https://b/0',
    'pipe:curl -u "$ME:${PASSWORD}" https://b/0', "secret:wandb:api-key", "TOKENIZERS_PARALLELISM=false",
    "pipe:curl -H 'Accept: text/plain' https://b/0?part=3&key_frames=2",
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SECRETS)
def test_a_secret_is_masked_and_the_rest_stays(text: str, expected: str) -> None:
    assert masked(text) == expected
    assert masked(expected) == expected
    assert secret_in(text)
    assert secret_in(expected) is None


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert masked(text) == text
    assert secret_in(text) is None


@given(st.text(), st.sampled_from(SECRETS), st.text())
def test_a_secret_is_masked_whatever_stands_around_it(
    before: str, secret: tuple[str, str], after: str
) -> None:
    assert "s3cr3t" not in masked(f"{before} {secret[0]} {after}".replace("$", ""))


PARTS = [
    "://a:", "https://", "token=", "token='", "-u a:", "Authorization:", "'Authorization:", "a.", "a ",
    "x=${", "-----BEGIN PRIVATE KEY-----", "x-token:'", "password=$(", "-eyJ", ".eyJaaaaaaaaaaa",
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_masking_takes_no_time_that_grows_with_the_square_of_a_text(part: str) -> None:
    start = time.monotonic()
    masked(part * (200_000 // len(part)))
    assert time.monotonic() - start < 20  # the square of it takes hours


def test_a_log_shows_neither_secrets_nor_what_acts_on_a_terminal() -> None:
    hostile = "a\x1b[2Jb\x00c\r\x9b1m\x7f\u202e\udcff\n\té"
    record = logging.LogRecord(
        "clipship", logging.INFO, "", 0, "%s of %s", (hostile, "https://a:s3cr3t@h/0"), None
    )
    shown = "a\\u001b[2Jb\\u0000c\\u000d\\u009b1m\\u007f\\u202e\\udcff\n\té"
    assert ShownFormatter("%(message)s").format(record) == f"{shown} of https://***@h/0"


def test_a_key_of_a_sample_neither_acts_on_a_terminal_nor_forges_a_line() -> None:
    forged = "2026-01-01 00:00:00,000 ERROR forged"
    text = str(BadSample("0.tar", f"a\x1b[2J\n{forged}", "decode", "cannot be decoded"))
    assert text == f"0.tar: sample a\\u001b[2J\\n{forged}: cannot be decoded"


# The line that `clipship run` rewrites in a terminal while rank 0 prints nothing.


def state(phase: str, began: float, step: int = 3, stage: str = "", stage_began: float = 0.0) -> RankState:
    return RankState(phase, 60.0, step, began, 0, "", False, stage=stage, stage_began=stage_began)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def lines(
    shown: Sequence[tuple[float, RankState | None]], *, begun: bool = True, **options: Any
) -> list[str]:
    """Returns what the line says at each of these times, in which rank 0 is in that state."""
    states: Iterator[RankState | None] = iter([each for _, each in shown])
    line = live_line.LiveLine(lambda: (next(states), begun), 2, out=io.StringIO(), **options)
    return [line.line(now) for now, _ in shown]


@pytest.mark.parametrize(
    ("rank", "now", "said"),
    [
        (state("first step", 14.0), 17.2, "first step  3 s"),
        (state("checkpoint", 17.0), 17.5, ""),
        (state("evaluation", 17.0), 137.0, "evaluation  2 min 0 s"),
        (state("shutdown", 90.0), 92.0, "ending  2 s"),
        (None, 99.0, ""),
    ],
)
def test_the_line_says_what_lasts(rank: RankState | None, now: float, said: str) -> None:
    assert lines([(now, rank)]) == [said]


def test_steps_show_their_number_where_they_have_no_line_of_their_own() -> None:
    steps = [(now, state("step", now - 0.1, step)) for now, step in ((20.0, 11), (20.5, 12), (21.5, 14))]
    assert lines(steps, every_steps=10) == ["", "", "step 14"]
    printed = (21.6, state("step", 21.6, 21))
    assert lines([*steps, printed], every_steps=10)[-1] == ""
    assert lines(steps, every_steps=1) == ["", "", ""]
    assert lines([(24.0, state("step", 20.0, 5))], every_steps=1) == ["step 5  4 s"]
    assert lines([(24.0, state("data", 20.0, 5))]) == ["step 5, waiting for data  4 s"]


def test_the_line_knows_how_long_the_last_evaluation_of_the_run_took() -> None:
    first, second = state("evaluation", 20.0), state("evaluation", 30.0)
    shown = [(20.0, first), (24.0, state("step", 24.0)), (32.0, second), (50.0, state("step", 50.0))]
    assert lines(shown) == ["", "", "evaluation  2 s of about 4 s", ""]


def shown(out: Any, until: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns what `out` gets from a line that stays until then."""
    monkeypatch.setattr(live_line, "FROM_S", 0.0)
    init = state("init", 0.0, stage="loading torch", stage_began=time.monotonic())
    with live_line.LiveLine(lambda: (init, True), 2, out=out):
        while not until():
            time.sleep(0.01)
    text: str = out.getvalue()
    return text


def test_a_terminal_has_the_line_and_no_trace_of_it_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    text = shown(terminal, terminal.getvalue, monkeypatch)
    assert text.startswith("\r\x1b[Kloading torch")
    assert text.endswith("\r\x1b[K")


def test_a_command_that_takes_long_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FROM_S", 0.0)
    monkeypatch.setattr("trainer.text.live.time.monotonic", lambda: 0.0)
    terminal, file = Terminal(), io.StringIO()
    with live.waiting("checking job.toml", terminal), live.waiting("checking job.toml", file):
        while not terminal.getvalue():
            time.sleep(0.01)
    assert terminal.getvalue() == "\r\x1b[Kchecking job.toml  0 s\r\r\x1b[K"
    assert file.getvalue() == ""


# Lines that fit a terminal, and the progress of a long work: there in a line, elsewhere now and then.

STEP = (
    "step  4/20  epoch 1  loss 3.1  lr 1.00e-04  grad 2.0  scale 14.3  9 samples/s  data 0% comm 1%  ETA 0:20"
)


@pytest.mark.parametrize(
    ("line", "columns", "expected"),
    [
        ("short\n", 40, "short\n"),
        ("batch        32 = 2 ranks x 16\n", 25, "batch        32 = 2 ranks\n             x 16\n"),
        ("no topic but many words here", 20, "no topic but many\n  words here"),
        ("result       /" + "a" * 40, 20, "result       /" + "a" * 40),
        (STEP, len(STEP), STEP),
        (STEP, 100, STEP.replace("data 0% comm 1%  ", "")),
        (STEP, 60, "step  4/20  loss 3.1  lr 1.00e-04  9 samples/s  ETA 0:20"),
        (STEP, 20, "step  4/20  loss 3.1  9 samples/s  ETA 0:20"),
    ],
)
def test_a_line_is_folded_between_words_and_a_step_loses_parts(
    line: str, columns: int, expected: str
) -> None:
    assert fitted(line, columns) == expected


def test_progress_is_said_every_ten_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("trainer.text.live.time.monotonic", lambda: now)
    with live.progress("reading", "read", "shard") as done:
        for count in range(1, 31):
            now += 1.0
            done(count, 3000)
    assert capsys.readouterr().err.splitlines() == [
        "clipship: read 12 of 3,000 shards",
        "clipship: read 23 of 3,000 shards",
    ]


def test_a_terminal_gets_a_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Line:
        moves = True

        def __init__(self, text: Callable[[float], str]) -> None:
            self.text = text

        def __enter__(self) -> "Line":
            return self

        def __exit__(self, *_: object) -> None:
            lines.append(self.text(0.0))

    monkeypatch.setattr(live, "LiveText", Line)
    monkeypatch.setattr("trainer.text.live.time.monotonic", lambda: 0.0)
    with live.progress("packing [a].csv", "packed", "row"):
        pass
    with live.progress("packing", "packed", "row") as done:
        done(1, 1)
    assert lines == ["packing [a].csv  0 s", "packed 1 of 1 row  0 s"]
