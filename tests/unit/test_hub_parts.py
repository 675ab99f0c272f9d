"""`clipship check` names what ranks would look for on a hub that they may not ask."""

from pathlib import Path

import pytest

from trainer.cli.main import main

JOB = """
name = "of-a-hub"
[data]
format = "synthetic"
[model]
name = "ViT-B-32"
pretrained = "laion2b_s34b_b79k"
text = "hf:FacebookAI/roberta-base"
cache_dir = "{cache}"
[optim]
global_batch_size = 1024
steps = 800
[logging]
runs = "/shared/runs"
"""
SLURM = '[slurm]\ntime = "1:00:00"\n'
WEIGHTS = "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
Capture = pytest.CaptureFixture[str]


def warned(job: Path, capsys: Capture, *arguments: str) -> str:
    """Returns what `clipship check` warns of, in one line, without looking at data."""
    assert main(["check", str(job), "--no-data", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(line for line in lines if "hub" in line and line.startswith("warning"))


def is_in(cache: Path, repository: str) -> None:
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "snapshots/0123").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0123")


def test_what_no_cache_has_is_named_until_it_is_fetched(tmp_path: Path, capsys: Capture) -> None:
    job, cache = tmp_path / "job.toml", tmp_path / "weights"
    job.write_text(JOB.format(cache=cache) + SLURM)
    text = warned(job, capsys)
    assert f"model.pretrained = laion2b_s34b_b79k ({WEIGHTS}), the text tower FacebookAI/roberta-base" in text
    assert f"not in the cache ({cache})" in text
    assert "`clipship fetch JOB`" in text
    is_in(cache, "FacebookAI/roberta-base")
    assert warned(job, capsys).startswith(f"warning     model.pretrained = laion2b_s34b_b79k ({WEIGHTS}): ")
    is_in(cache, WEIGHTS)
    assert warned(job, capsys) == ""
    assert warned(job, capsys, "--set", f"model.cache_dir={tmp_path / 'gone/weights'}") == "", "not seen here"
    assert "of the teacher model.pretrained = openai" in warned(
        job, capsys, "--set", "model.teacher=ViT-B-16", "--set", "model.teacher_pretrained=openai"
    )
