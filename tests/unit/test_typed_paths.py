"""Paths that are typed with --set start at the current folder, in each command and for the ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.cli.main import main
from trainer.config import Job
from trainer.config.loader import dump_job, from_here, load_job
from trainer.errors import InputError
from trainer.plan.trained import evaluation_job
from trainer.run.job_limits import job_of
from trainer.sweep.trials import find_sweep

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
        ("logging.runs='a b'", "{here}/a b"),
        ("eval.class_names=x.txt", "{here}/x.txt"),
        ("data.train=/abs/*.tar", ("/abs/*.tar",)),
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


def test_what_the_file_says_starts_at_its_own_folder(here: Path) -> None:
    job = load_job(here.parent / "jobs" / "job.toml", from_here(["optim.lr=1"]))
    assert job.data.train == (f"{here.parent}/jobs/own.csv",)


def test_empty_values_and_wrong_keys_stay_as_they_are(here: Path) -> None:
    texts = (
        "model.pretrained=",
        'data.train=""',
        "nonsense.key=a.csv",
        "data.train.x=3",
        'kubernetes.mounts."/d"=pvc:d',
    )
    assert from_here(texts) == texts
    with pytest.raises(InputError, match="expected key=value"):
        from_here(["model.name"])


def test_every_command_has_the_same_rule(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_path = here.parent / "jobs" / "job.toml"
    typed = ("--set", "model.pretrained=w/x.pt")
    wanted = str(here / "w" / "x.pt")
    run = here.parent / "runs" / "one"
    run.mkdir(parents=True)
    (run / "job.toml").write_text(dump_job(tiny_job()))
    assert main(["clone", str(run), "new.toml", *typed]) == 0
    assert load_job(Path("new.toml")).model.pretrained == wanted

    started: list[Any] = []

    def start(job: Job, **_: object) -> int:
        started.append(job.model.pretrained)
        return 0

    monkeypatch.setattr("trainer.launch.local.run", start)
    monkeypatch.setattr(
        "trainer.plan.check.checked", lambda path, texts, *_, **__: (load_job(path, texts), 1, 1)
    )
    assert main(["run", str(job_path), "--nproc", "1", *typed]) == 0
    assert started == [wanted]  # so that ranks elsewhere read the same

    assert job_of([str(job_path), *typed]).model.pretrained == wanted
    sweep = find_sweep(job_path, (), ["model.pretrained=w/x.pt,w/y.pt"], None)
    assert [trial.job.model.pretrained for trial in sweep.trials] == [wanted, str(here / "w" / "y.pt")]
    assert sweep.trials[0].values == ("model.pretrained=w/x.pt",)

    monkeypatch.setattr("trainer.plan.trained.check_evaluated", lambda _job: None)
    asked = {"retrieval": ("t.csv",)}
    evaluated = evaluation_job("ViT-B-32:openai", None, asked, 1, [typed[1]])
    assert evaluated.model.pretrained == wanted
