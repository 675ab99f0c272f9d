"""Jobs for tests: tiny models, synthetic data."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from trainer.config import Job

MODELS = Path(__file__).parents[1] / "models"
COCA = str(MODELS / "tiny-coca.json")
VIT = str(MODELS / "tiny-vit.json")
RESNET = str(MODELS / "tiny-resnet.json")
TOY_JOB = f"""
name = "toy"
[data]
format = "synthetic"
[model]
name = "{VIT}"
[optim]
global_batch_size = 16
steps = 4
"""
"""Text of a job file for the schedulers of `toy_scheduler`."""


def tiny_job(
    *,
    config: str = VIT,
    name: str = "tiny",
    stage: tuple[dict[str, Any], ...] = (),
    **sections: dict[str, Any],
) -> Job:
    """A job of a few steps on synthetic samples; keys of a section replace the ones here."""
    job: dict[str, Any] = {
        "data": {"format": "synthetic", "synthetic_samples": 64, "workers": 0},
        "model": {"name": config},
        "optim": {"global_batch_size": 16, "steps": 4, "lr": 1e-3},
    }
    for section, keys in sections.items():
        job[section] = {**job.get(section, {}), **keys}
    return Job.model_validate({"name": name, **job, **({"stage": stage} if stage else {})})


def small_job(*, config: str = VIT, **sections: Any) -> Job:
    """Returns `tiny_job` with the `few_words` of its model."""
    return tiny_job(config=few_words(config), **sections)


@functools.cache
def few_words(config: str) -> str:
    """Returns the path of the same model with a vocabulary of 1,024, for tests that draw their tokens.

    Nearly all of a tiny model's parameters are embeddings of the 49,408 words that its tokenizer knows.
    """
    table = json.loads(Path(config).read_text())
    for part in table.keys() & {"text_cfg", "multimodal_cfg"}:
        table[part]["vocab_size"] = 1024
    return _written(config, table)


@functools.cache
def nonscalar(config: str) -> str:
    """Returns the path of the same model, whose logit scale and bias have one dimension."""
    return _written(config, {**json.loads(Path(config).read_text()), "nonscalar_logit_scale": True})


def _written(config: str, table: dict[str, Any]) -> str:
    path = Path(tempfile.mkdtemp(dir=_folder())) / Path(config).name
    path.write_text(json.dumps(table))
    return str(path)


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="clipship-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
