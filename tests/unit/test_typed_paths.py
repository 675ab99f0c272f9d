"""Paths that are typed with --set start at the current folder, in each command and for the ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from trainer.config.loader import dump_job, from_here, load_job
from trainer.plan.trained import evaluation_job

JOB = """
name = "one"
[data]
train = "own.csv"
[model]
name = "ViT-B-32"
[optim]
global_batch_size = 8
steps = 5
[checkpoint]
resume = "auto"
[eval]
class_names = "classes.txt"
[image.site]
certificates = ["ca.pem"]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; the job file is in another one."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.toml").write_text(JOB)
    current = tmp_path / "here [1]"
    current.mkdir()
    monkeypatch.chdir(current)
    return current


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("model.name=a.json", "{here}/a.json"),
        ("model.name=ViT-L-14", "ViT-L-14"),
        ("logging.runs=2024", "{here}/2024"),
        ("eval.class_names=x.txt", "{here}/x.txt"),
        ("data.train=s3://bucket/x.tar", ("s3://bucket/x.tar",)),
        ("data.train=t.csv", ("{escaped}/t.csv",)),
        ('data.train=["t.csv", "u.csv"]', ("{escaped}/t.csv", "{escaped}/u.csv")),
        ('image.site.certificates=["a\\u007f\\"b.pem"]', ('{here}/a\x7f"b.pem',)),
        ('checkpoint={resume="old", keep=2}', "{here}/old"),
        ("optim.lr=1e-4", 1e-4),
    ],
)
def test_what_is_typed_starts_at_the_current_folder(here: Path, typed: str, path: Any) -> None:
    key = typed.partition("=")[0] + (".resume" if typed.startswith("checkpoint") else "")
    (text,) = from_here([typed])
    assert from_here([text]) == (text,)
    job: Any = load_job(here.parent / "jobs" / "job.toml", [text])
    for name in key.split("."):
        job = getattr(job, name)
    escaped = str(here).replace("[", "[[]")

    def meant(value: Any) -> Any:
        return value.format(here=here, escaped=escaped) if isinstance(value, str) else value

    assert job == (tuple(map(meant, path)) if isinstance(path, tuple) else meant(path))


def test_other_commands_have_the_same_rule(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed, wanted = "model.pretrained=w/x.pt", str(here / "w" / "x.pt")
    (here / "job.toml").write_text(dump_job(tiny_job()))
    clipship("clone", here, "new.toml", "--set", typed, code=0)
    assert load_job(Path("new.toml")).model.pretrained == wanted
    monkeypatch.setattr("trainer.plan.trained.check_evaluated", lambda _job: None)
    evaluated = evaluation_job("ViT-B-32:openai", None, {"retrieval": ("t.csv",)}, 1, [typed])
    assert evaluated.model.pretrained == wanted
