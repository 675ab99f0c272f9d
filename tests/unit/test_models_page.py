"""The table of all models: it has each of open_clip's, and what it says of them holds."""

import re
from pathlib import Path

import open_clip
import pytest

from trainer.model.catalog import known_models
from trainer.model.models_page import PAGE, page, row

pytestmark = pytest.mark.skipif(open_clip.__version__ >= "4", reason="the page is that of open_clip 3.3")

SAMPLE = ("RN50", "ViT-B-16-SigLIP", "xlm-roberta-base-ViT-B-32")
"""One model of each kind of towers; `-m full` tries every model."""


def rows_there() -> list[str]:
    return re.findall(r"^\| (?!model |---).*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_has_a_row_for_each_model_and_its_counts() -> None:
    names = known_models()
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows_there()] == names
    assert page(rows_there()) == PAGE.read_text(encoding="utf-8")
    assert all("trains" in line for line in rows_there())


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_that_is_said_to_train_trains_as_its_row_says(name: str) -> None:
    assert row(name) in rows_there()


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_model_that_is_said_to_train_trains_as_its_row_says() -> None:
    assert [row(name) for name in known_models()] == rows_there()


def test_the_page_is_in_the_menu() -> None:
    assert "models.md" in (Path(PAGE).parents[1] / "mkdocs.yml").read_text()
