"""`check` warns of an image and of files that the nodes of a cluster cannot reach."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from trainer.cli.main import main
from trainer.config.loader import job_from_table
from trainer.plan.places import odd_places

JOB: dict[str, Any] = {
    "name": "mine",
    "data": {"train": ["/data/{00..09}.tar"]},
    "model": {"name": "ViT-B-32"},
    "optim": {"global_batch_size": 64, "steps": 10},
    "logging": {"runs": "/shared/runs"},
    "slurm": {"gpus": "none"},
}


def said(**sections: Any) -> list[str]:
    table = {**JOB, **{name: {**JOB.get(name, {}), **section} for name, section in sections.items()}}
    return list(odd_places(job_from_table(table, "job")))


@pytest.mark.parametrize("tag", ["registry.example/team/clipship:0.1", "r.example:5000/x:1"])
def test_a_placeholder_of_a_registry_is_named(tag: str) -> None:
    (sentence,) = said(image={"tag": tag})
    assert sentence.startswith(f"image.tag = {tag}: ")
    assert "is a placeholder, from which no node can pull" in sentence


@pytest.mark.parametrize("tag", ["ghcr.io/me/clipship:1", "me/clipship:1", "localhost:5000/x:1"])
def test_other_registries_are_not(tag: str) -> None:
    assert said(image={"tag": tag}) == []


def test_files_in_a_nodes_own_folders_are_named() -> None:
    assert said() == []
    (data,) = said(data={"train": ["/tmp/x/{00..09}.tar", "/data/y.tar", "s3://tmp/z.tar"]})
    assert data.startswith("/tmp/x/{00..09}.tar is in /tmp, which each node has for itself")
    assert len(said(logging={"runs": "/var/tmp/runs"}, model={"name": "/dev/shm/m.json"})) == 2
    assert said(model={"cache_dir": "/tmp/cache"}) == []  # each node may make its own
    assert said(data={"train": ["/tmporary/x.tar"]}) == []


def test_files_that_a_mount_puts_there_are_not() -> None:
    train = {"train": ["/tmp/data/x.tar"]}
    assert said(data=train, slurm={"container": "pyxis", "mounts": ["/lustre/d:/tmp/data"]}) == []
    assert said(data=train, kubernetes={"mounts": {"/tmp/data": "pvc:d"}}) == []


def test_check_says_it_for_a_cluster_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {**JOB, "data": {"format": "synthetic"}, "logging": {"runs": "/tmp/runs"}}
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(table))
    assert main(["check", str(path)]) == 0
    assert "warning     /tmp/runs is in /tmp" in capsys.readouterr().out
    path.write_text(tomli_w.dumps({name: part for name, part in table.items() if name != "slurm"}))
    assert main(["check", str(path), "--nproc", "1"]) == 0
    assert "/tmp/runs is in" not in capsys.readouterr().out
