"""Packages that a model of open_clip needs beside Clipship's own.

They are known before a run starts, and the image has them.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.check import found, problems
from tests.support.jobs import tiny_job
from trainer.config import Job, Model
from trainer.image.dockerfile import dockerfile
from trainer.model.packages import needed

SIGLIP = "ViT-B-16-SigLIP"


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the package from every import, and from the check."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )


def job(model: str, **sections: Any) -> Job:
    return tiny_job(config=model, **sections)


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("model", [SIGLIP, "roberta-ViT-B-32", "nllb-clip-base-siglip"])
def test_check_refuses_a_model_whose_package_is_not_here(model: str) -> None:
    said = problems(job(model), "--no-data")
    assert f"model.name: {model} needs the package transformers" in said
    assert ": `pip install transformers`" in said


def test_an_image_takes_the_versions_that_its_job_names_and_the_rest_once() -> None:
    text = dockerfile(job(SIGLIP, image={"pip_packages": ("transformers==5.0",)}))
    assert "requirements-text" not in text
    assert "transformers==5.0 sentencepiece protobuf" in text


def test_check_says_which_package_an_image_of_another_job_lacks() -> None:
    def told(model: str) -> list[str]:
        keys = {"slurm": {"container": "pyxis"}, "image": {"tag": "ours/clip:1"}}
        return [text for text in found(job(model, **keys), "--no-data")["warnings"] if "transformers" in text]

    (said,) = told(SIGLIP)
    named = 'image.pip_packages = ["transformers", "sentencepiece", "protobuf"]'
    assert f"an image of another job needs {named}" in said
    assert told("ViT-B-32") == []


def test_a_text_tower_needs_them_and_a_config_that_cannot_be_read_is_left_to_other_checks(
    tmp_path: Path,
) -> None:
    need = needed(Model(name="ViT-B-32", text="hf:bert-base-chinese"))
    assert need.packages == ("transformers", "sentencepiece", "protobuf")
    assert need.reason == "its text tower is model.text = hf:bert-base-chinese"
    for text in ("[]", '{"text_cfg": 1}', '{"model_cfg": []}', "{"):
        (tmp_path / "odd.json").write_text(text)
        assert needed(Model(name=str(tmp_path / "odd.json"))).packages == ()
