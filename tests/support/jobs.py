"""Jobs for tests: tiny models, synthetic data."""

from pathlib import Path
from typing import Any

from trainer.config import Job

MODELS = Path(__file__).parents[1] / "models"
COCA = str(MODELS / "tiny-coca.json")
VIT = str(MODELS / "tiny-vit.json")
RESNET = str(MODELS / "tiny-resnet.json")


def tiny_job(*, config: str = VIT, name: str = "tiny", **sections: dict[str, Any]) -> Job:
    """A job of a few steps on synthetic samples; keys of a section replace the ones here."""
    job: dict[str, Any] = {
        "data": {"format": "synthetic", "synthetic_samples": 64, "workers": 0},
        "model": {"name": config},
        "optim": {"global_batch_size": 16, "steps": 4, "lr": 1e-3},
    }
    for section, keys in sections.items():
        job[section] = {**job.get(section, {}), **keys}
    return Job.model_validate({"name": name, **job})
