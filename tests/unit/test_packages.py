"""Packages that a model of open_clip needs beside Clipship's own.

They are known before a run starts, and the image has them.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import open_clip
import pytest

from tests.support.check import found, problems
from tests.support.jobs import VIT, tiny_job
from trainer.config import Job, Model
from trainer.image.dockerfile import dockerfile
from trainer.model.config_keys import OTHER_PARTS
from trainer.model.packages import needed

SIGLIP = "ViT-B-16-SigLIP"
ALL = ("transformers", "sentencepiece", "protobuf")


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


def is_taken(name: str) -> bool:
    """Whether it is a model of images and captions, with two towers."""
    return not open_clip.get_model_config(name).keys() & OTHER_PARTS.keys()


@pytest.mark.usefixtures("without_transformers")
def test_models_whose_tokenizer_open_clip_cannot_make_here_are_those_that_need_packages() -> None:
    """One in ten of the other models is tried, for their tokenizer is the same."""
    taken = [name for name in open_clip.list_models() if not name.startswith("tiny-") and is_taken(name)]
    plain = [name for name in taken if not needed(Model(name=name)).packages]
    for name in set(taken) - set(plain):
        with pytest.raises(ImportError):
            open_clip.get_tokenizer(name)
    for name in plain[::10]:
        open_clip.get_tokenizer(name)


def test_a_config_of_the_users_whose_name_has_siglip_is_said_to_want_a_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "my-SigLIP.json"
    path.write_text(Path(VIT).read_text())
    assert needed(Model(name=str(path))).packages == ALL
    config = json.loads(path.read_text())
    config["text_cfg"]["hf_tokenizer_name"] = "bert-base-uncased"
    path.write_text(json.dumps(config))
    assert "its tokenizer is bert-base-uncased" in needed(Model(name=str(path))).reason


@pytest.mark.parametrize("text", ["[]", "1", '{"text_cfg": 1}', '{"model_cfg": []}', "{"])
def test_a_config_that_cannot_be_read_is_left_to_other_checks(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    assert needed(Model(name=str(tmp_path / "odd.json"))).packages == ()


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("model", [SIGLIP, "roberta-ViT-B-32", "nllb-clip-base-siglip"])
def test_check_refuses_a_model_whose_package_is_not_here(model: str) -> None:
    said = problems(job(model), "--no-data")
    assert f"model.name: {model} needs the package transformers" in said
    assert ": `pip install transformers`" in said


def test_a_text_tower_that_the_job_names_needs_them_too() -> None:
    need = needed(Model(name="ViT-B-32", text="hf:bert-base-chinese"))
    assert (need.packages, need.reason) == (ALL, "its text tower is model.text = hf:bert-base-chinese")


def test_the_image_of_a_job_has_pinned_packages_if_its_model_needs_them() -> None:
    install = "pip install --quiet --no-deps --require-hashes --requirement /docker/requirements-text.txt"
    text = dockerfile(job(SIGLIP))
    assert install in text
    assert "COPY docker/requirements-text.txt /docker/" in text
    assert "requirements-text" not in dockerfile(job("ViT-B-32"))


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
