"""The table of all models: it has each of open_clip's, and what it says of them holds."""

from pathlib import Path

import pytest

from tools import models_page
from tools.models_page import PAGE, page, row, rows_of
from trainer.model.catalog import MODELS_OF_4, known_models


def there() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_has_a_row_for_each_model_and_its_counts() -> None:
    rows = rows_of(there())
    assert list(rows) == sorted({*known_models(), *MODELS_OF_4})
    assert page(there(), rows) == there()
    assert all("| trains" in line or "| refused: it is" in line for line in rows.values())
    trained = sum("| trains" in rows[name] for name in MODELS_OF_4)
    assert f"configs of {len(rows) - len(MODELS_OF_4)} models, and all of them train here" in there()
    assert f"{len(MODELS_OF_4)} more: {trained} train here" in there()


def test_rows_that_are_not_made_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models_page, "PAGE", tmp_path / "models.md")
    monkeypatch.setattr(models_page, "row", lambda name: f"| {name} | 3.3 | made anew |")
    models_page.PAGE.write_text(there())
    assert models_page.main(["RN50"]) == 0
    before, after = rows_of(there()), rows_of(models_page.PAGE.read_text())
    assert after == {**before, "RN50": "| RN50 | 3.3 | made anew |"}


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_model_that_is_said_to_train_trains_as_its_row_says() -> None:
    rows = rows_of(there())
    assert {name: row(name) for name in known_models()} == {name: rows[name] for name in known_models()}


def test_the_page_is_in_the_menu() -> None:
    assert "models.md" in (Path(PAGE).parents[1] / "mkdocs.yml").read_text()
