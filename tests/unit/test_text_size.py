"""Text towers of Hugging Face before a run: their name, their size, and the word where one is missing."""

from pathlib import Path
from typing import Any

import pytest

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


def test_a_text_tower_that_the_hub_does_not_give_is_named() -> None:
    done = models().run(MISSING)
    assert done.stdout.startswith("True the text tower hf:nobody/nothing (model.text) cannot be fetched")
    assert "ViT-S-32-alt" not in done.stdout
