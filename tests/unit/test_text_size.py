"""Text towers of Hugging Face before a run: their name, their size, and the word where one is missing."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.check import found
from tests.support.jobs import VIT, tiny_job
from tests.support.ready import models
from tests.support.steps import untrained
from tests.support.text_towers import make_tower
from trainer.config import Model
from trainer.model.text_size import text_parameters

MISSING = """
import sys, time
time.sleep = lambda _: None  # between the tries of the hub's client
from tests.support.jobs import tiny_job
from trainer.errors import StorageError, InputError
from trainer.model.build import untrained
try:
    untrained(tiny_job(model={"name": "ViT-S-32-alt", "text": "hf:nobody/nothing"}))
except InputError as error:
    print(type(error) is StorageError, error)
"""


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@pytest.mark.parametrize(
    "keys", [{}, {"text_projection": "mlp"}, {"text_projection": "none"}, {"text_pooling": "pooler"}]
)
def test_the_parameters_of_a_tower_are_counted_from_its_config(
    tmp_path: Path, kind: str, keys: dict[str, str]
) -> None:
    model: dict[str, Any] = {"text": str(make_tower(tmp_path / kind, kind, weights=False)), **keys}
    tower: Any = untrained(tiny_job(model=model)).model.text
    assert text_parameters(Model(name=VIT, **model)) == sum(p.numel() for p in tower.parameters())


def test_a_tower_in_the_hubs_cache_and_a_known_one_have_a_size(tmp_path: Path) -> None:
    folder = tmp_path / "models--some--tower" / "snapshots" / "0"
    make_tower(folder, weights=False)
    assert text_parameters(Model(name=VIT, text="hf:some/tower", cache_dir=str(tmp_path)))
    assert text_parameters(Model(name=VIT, text="hf:other/tower", cache_dir=str(tmp_path))) is None
    chinese = text_parameters(Model(name="ViT-B-16", text="hf:hfl/chinese-roberta-wwm-ext"))
    assert chinese == 102_267_648 - 768 * 769 + 768 * 512  # without its pooler, with a projection


def test_check_shows_the_text_tower_the_beginning_and_the_memory(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    model = {"text": "hf:hfl/rbt3", "init": str(tmp_path / "weights.pt")}
    rows = found(tiny_job(model=model, resources={"gpus_per_node": 1}), "--no-data")["rows"]
    about = " ".join(rows["model"])
    assert "with the text tower hf:hfl/rbt3 (37.9 M parameters)" in about
    assert f"beginning with what fits of {tmp_path / 'weights.pt'}" in about
    said = "of the text tower hfl/rbt3 take is not estimated; its 37.9 M parameters, trained, take"
    assert said in " ".join(rows["memory"])


def test_a_text_tower_that_the_hub_does_not_give_is_named() -> None:
    done = models().run(MISSING)
    assert done.stdout.startswith("True the text tower hf:nobody/nothing (model.text) cannot be fetched")
    assert "ViT-S-32-alt" not in done.stdout
