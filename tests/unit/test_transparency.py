"""Transparent parts of pictures: one key decides, a run counts them, and exports say what they were."""

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.loading import rank_batches
from trainer.config.loader import job_from_table
from trainer.data.bad_samples import Skipped
from trainer.data.pictures import Decoding, decode
from trainer.data.pixels import RandomCrop
from trainer.data.reading import TALLY
from trainer.data.sample import RawSample
from trainer.model.model_card import model_card


def icon() -> bytes:
    """A PNG whose transparent half holds black, and whose other half is red."""
    pixels = np.zeros((32, 32, 4), dtype=np.uint8)
    pixels[:, 16:] = (255, 0, 0, 255)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(("value", "colour"), [("white", (255, 255, 255)), ("drop_alpha", (0, 0, 0))])
def test_the_key_decides_the_colour_of_transparent_parts(value: str, colour: tuple[int, ...]) -> None:
    decoding = Decoding.by(tiny_job(data={"transparency": value}).data)
    raw = RawSample("a", "0.tar", icon(), ())
    assert decode(raw, decoding).getpixel((0, 0)) == colour
    cropped = RandomCrop((32, 32), scale=(1, 1), ratio=(1, 1), decoding=decoding)(raw, 0)
    assert tuple(cropped[:3, 16, 2].tolist()) == colour


@pytest.mark.parametrize(
    ("resume", "given", "wanted"),
    [("a/epoch_1.pt", None, "drop_alpha"), ("a/epoch_1.pt", "white", "white"), ("a/step-1", None, "white")],
)
def test_a_job_that_goes_on_from_open_clips_checkpoint_takes_its_pictures(
    resume: str, given: str | None, wanted: str
) -> None:
    job = {"name": "a", "data": {"train": ["a.tar"]}, "optim": {"global_batch_size": 8, "steps": 1}}
    data: dict[str, Any] = {**job["data"], **({"transparency": given} if given else {})}  # type: ignore[dict-item]
    table = {**job, "data": data, "checkpoint": {"resume": resume}}
    assert job_from_table(table, "job.toml").data.transparency == wanted


def test_a_command_line_of_open_clip_train_keeps_its_pictures() -> None:
    words = ["--train-data", "a.tar", "--train-num-samples", "100"]
    assert 'transparency = "drop_alpha"' in clipship("from-open-clip", "--", *words, code=0).out


class Icons:
    """A source of icons and of photographs without transparency."""

    left_out: Any = None

    def __len__(self) -> int:
        return 8

    def shard_sizes(self) -> list[int]:
        return [8]

    def read(self, index: int) -> RawSample:
        file = io.BytesIO()
        Image.new("RGB", (32, 32)).save(file, "PNG")
        return RawSample(str(index), "0.tar", icon() if index % 4 == 0 else file.getvalue(), ("a",))


def test_a_run_counts_and_names_pictures_with_transparent_parts(caplog: pytest.LogCaptureFixture) -> None:
    batches = rank_batches(Icons(), (8, 1), 4, pixels=RandomCrop((8, 8)), epochs=1)
    skipped = Skipped(1.0)
    TALLY.pop()
    with caplog.at_level(logging.INFO):
        for batch in batches:
            skipped.record(len(batch.keys), batch.bad, batch.alone, batch.reading.transparent)
    assert skipped.figures["transparent_pictures"] == 2
    (said,) = [record.getMessage() for record in caplog.records if "transparent parts" in record.getMessage()]
    assert "data.transparency" in said


@pytest.mark.parametrize("to", ["open_clip", "hf", "safetensors", "peft"])
def test_the_card_says_the_colour_and_puts_pictures_on_it(to: str) -> None:
    white = {"job": tiny_job().model_dump(mode="json")}
    card = model_card("a", to, "", white)
    assert "| transparent parts of pictures | white |" in card
    code = card.split("```python\n")[1].split("```")[0]
    begin, end = code.index("picture = Image.open"), '"white"), picture)'
    recipe = code[begin : code.index(end) + len(end)]
    Image.open(io.BytesIO(icon())).save("photo.png")
    names: dict[str, Any] = {"Image": Image}
    exec(recipe.replace("photo.jpg", "photo.png"), names)
    assert names["picture"].convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    dropped = {"job": tiny_job(data={"transparency": "drop_alpha"}).model_dump(mode="json")}
    card = model_card("a", to, "", dropped)
    assert "| transparent parts of pictures | dropped, as open_clip does |" in card
    assert "alpha_composite" not in card


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
