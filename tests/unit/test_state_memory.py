"""`clipship check` says how much of each node's memory the newest steps take, and whether it is there."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest

from tests.support.jobs import VIT, tiny_job
from trainer.cli.main import main
from trainer.config import Job, Model
from trainer.estimate.size import parameters, state_bytes
from trainer.plan.state_memory import in_memory, too_little_memory

GB = 10**9


def job_of(model: str = "ViT-B-32", **sections: Any) -> Job:
    sections["recovery"] = {"max_restarts": 1, **sections.get("recovery", {})}
    return tiny_job(model={"name": model}, **sections)


@pytest.mark.parametrize("name", [VIT])
def test_parameters_are_counted_from_the_config_alone(name: str) -> None:
    """All but the logit scale."""
    open_clip.add_model_config(name)
    model = open_clip.create_model("tiny-vit")
    assert parameters(Model(name=name)) == sum(each.numel() for each in model.parameters()) - 1


def test_known_models_have_their_known_size() -> None:
    assert (parameters(Model(name="ViT-B-32")), parameters(Model(name="ViT-L-14"))) == (
        151_277_312,
        427_616_512,
    )
    assert parameters(Model(name="RN50")) is None
    assert parameters(Model(name="ViT-B-16-SigLIP")) == 203_155_968
    assert parameters(Model(name="hf-hub:someone/model")) is None


def test_check_says_gb_of_each_node() -> None:
    (text,) = in_memory(job_of())
    assert text == "restarts go on from the newest step, kept in 3.63 GB of each node's /dev/shm"
    (text,) = in_memory(job_of("RN50"))
    assert "kept in twice the size of weights and optimizer state of each node's" in text
    assert list(in_memory(tiny_job())) == []
    assert list(in_memory(job_of(recovery={"keep_in_memory": False}))) == []


def test_too_little_shared_memory_here_is_told_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=GB))
    (text,) = too_little_memory(job_of(), local=True)
    assert text.startswith("/dev/shm of this machine has 1.00 GB, and the newest steps take 3.63 GB: ")
    assert "give 2.63 GB more, or set recovery.keep_in_memory = false" in text
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * GB))
    assert list(too_little_memory(job_of(), local=True)) == []
    assert list(too_little_memory(job_of("RN50"), local=True)) == []


def test_too_little_memory_of_a_cluster_is_told_with_the_key() -> None:
    assert state_bytes(tiny_job(config="ViT-B-32")) == 12 * 151_277_312
    few = {"gpus_per_node": 1, "mem_gb_per_gpu": 3.0}
    shm, memory = too_little_memory(job_of(resources=few, kubernetes={"namespace": "n"}), local=False)
    assert shm.startswith("a worker's /dev/shm (kubernetes.shm_gb) has 2.15 GB")
    assert memory.startswith("the memory of a node (resources.mem_gb_per_gpu) has 3.22 GB")
    # What [slurm] asks for goes before.
    for mem, told in {"2048": "2.15 GB", "4G": None, "1T": None, "0": None}.items():
        job = job_of(resources=few, slurm={"mem": mem})
        told_here = [text.partition(" has ")[::2] for text in too_little_memory(job, local=False)]
        assert [(name, text.partition(",")[0]) for name, text in told_here] == (
            [("the memory of a node (slurm.mem)", told)] if told else []
        )
    many = {"gpus_per_node": 8, "mem_gb_per_gpu": 3.0}
    assert list(too_little_memory(job_of(resources=many, kubernetes={"namespace": "n"}), local=False)) == []


JOB = """
name = "large"
[data]
format = "synthetic"
[model]
name = "ViT-L-14"
[optim]
global_batch_size = 1024
steps = 800
[resources]
nodes = 2
gpus_per_node = 8
mem_gb_per_gpu = 0.5
[recovery]
max_restarts = 3
[image]
tag = "registry.example/ml/clipship:1"
[logging]
runs = "/shared/runs"
"""
SECTIONS = {
    "slurm": '[slurm]\nsignal_lead_s = 10\ntime = "1:00:00"\n',
    "kubernetes": '[kubernetes]\ngrace_s = 10\n[kubernetes.mounts]\n"/shared" = "pvc:claim"\n',
}


@pytest.mark.parametrize("named", [(), ("slurm",), ("kubernetes",), ("slurm", "kubernetes")])
def test_check_speaks_of_the_schedulers_alone_that_the_job_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: tuple[str, ...]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB + "".join(map(SECTIONS.__getitem__, named)))
    assert main(["check", str(job), "--no-data"]) == 0
    text = capsys.readouterr().out
    warned = text[text.index("warning") :]
    assert "the memory of a node (resources.mem_gb_per_gpu) has 4.29 GB" in warned
    keys = {"slurm": "slurm.signal_lead_s", "kubernetes": "kubernetes.grace_s"}
    assert [key in warned for key in keys.values()] == [name in named for name in keys]
    assert ("a worker's /dev/shm" in warned) == ("kubernetes" in named)
