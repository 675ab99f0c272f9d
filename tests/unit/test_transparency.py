"""Transparent parts of pictures: one key decides, a run counts them, and exports say what they were."""

import io
import logging
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.loading import rank_batches
from tests.support.pictures import picture
from trainer.config.loader import job_from_table
from trainer.data.bad_samples import Skipped
from trainer.data.pictures import Decoding, decode
from trainer.data.pixels import RandomCrop
from trainer.data.reading import TALLY
from trainer.data.sample import RawSample


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


def test_a_job_that_goes_on_from_open_clips_checkpoint_takes_its_pictures() -> None:
    job: dict[str, Any] = {"name": "a", "optim": {"global_batch_size": 8, "steps": 1}}
    white = {"transparency": "white"}
    for resume, given, wanted in (
        ("epoch_1.pt", {}, "drop_alpha"),
        ("epoch_1.pt", white, "white"),
        ("step-1", {}, "white"),
    ):
        table = {**job, "data": {"train": ["a.tar"], **given}, "checkpoint": {"resume": f"a/{resume}"}}
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
        return RawSample(str(index), "0.tar", icon() if index % 4 == 0 else picture(index), ("a",))


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
