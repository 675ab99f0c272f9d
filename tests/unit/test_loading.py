"""Weights, configs and hubs from which no model can be made.

Each gives one sentence and the right exit code, and never the advice to run a file's code.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import VIT, tiny_job
from tests.support.ready import models
from trainer.config import Job
from trainer.errors import InputError
from trainer.model.build import untrained
from trainer.model.loading import loading


def _with_weights(path: Path) -> Job:
    job = tiny_job()
    return job.model_copy(update={"model": job.model.model_copy(update={"pretrained": str(path)})})


class Trap:
    """Leaves a file where its pickle is loaded as code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


BROKEN: dict[str, Any] = {
    "pickle.pt": lambda path: path.write_bytes(pickle.dumps({"state_dict": Trap(path.with_name("trapped"))})),
    "archive.pt": lambda path: torch.save({"state_dict": Trap(path.with_name("trapped"))}, path),
    "empty.pt": lambda path: path.touch(),
    "text.pt": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "list.pt": lambda path: torch.save([torch.zeros(2)], path),
    "no-tensors.pt": lambda path: torch.save({"epoch": 1}, path),
    "no-entries.pt": lambda path: torch.save({}, path),
    "bad.safetensors": lambda path: path.write_bytes(b"\x10" + bytes(30)),
    "empty.safetensors": lambda path: path.touch(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_weights_are_refused_without_advice_to_run_their_code(tmp_path: Path, name: str) -> None:
    BROKEN[name](tmp_path / name)
    job = _with_weights(tmp_path / name)
    with pytest.raises(InputError, match=name) as refusal:
        untrained(job)
    message = str(refusal.value)
    assert "weights_only" not in message
    assert "trust" not in message
    assert not message.isspace()
    assert len(message.splitlines()) <= 2
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"embed_dim": "wide"},
        {"vision_cfg": {"layers": "two"}},
        {"text_cfg": {"no_such_key": 1}},
        {"vision_cfg": None},
    ],
)
def test_a_config_that_makes_no_model_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({**json.loads(Path(VIT).read_text()), **change}))
    with pytest.raises(InputError, match=r"model\.name: .*odd\.json: "):
        untrained(tiny_job(config=str(path)))


UNREACHABLE = """
import sys, time
time.sleep = lambda _: None  # between the tries of the hub's client
from tests.support.jobs import tiny_job
from trainer.model.build import untrained
from trainer.model.loading import loading
from trainer.errors import InputError, StorageError
job = tiny_job(config=sys.argv[1])
if len(sys.argv) > 2:
    job = job.model_copy(update={"model": job.model.model_copy(update={"pretrained": sys.argv[2]})})
try:
    untrained(job)
except InputError as error:
    print(type(error) is StorageError, error)
"""


@pytest.mark.parametrize("arguments", [["hf-hub:nobody/nothing"], ["ViT-B-32", "laion2b_s34b_b79k"]])
def test_a_hub_that_does_not_answer_is_no_bad_input(arguments: list[str]) -> None:
    done = models().run(UNREACHABLE, *arguments)
    assert done.stdout.startswith("True "), done.stdout + done.stderr
    because = "the Hugging Face hub does not answer (ConnectionRefusedError: [Errno 111] Connection refused)"
    assert f"{arguments[-1]} cannot be fetched, because {because}: start again" in done.stdout


def test_what_an_offline_job_does_not_find_in_its_cache_is_bad_input() -> None:
    offline = "import huggingface_hub.constants as constants\nconstants.HF_HUB_OFFLINE = True\n"
    program = UNREACHABLE.replace('"pretrained": sys.argv[2]', '"pretrained": sys.argv[2], "offline": True')
    done = models().run(offline + program, "ViT-B-32", "laion2b_s34b_b79k")
    assert done.stdout.startswith("False "), done.stdout + done.stderr


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_lack_of_memory_is_no_bad_input(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, loading(tiny_job(), "weights.pt"):
        raise error
    assert raised.value is error
