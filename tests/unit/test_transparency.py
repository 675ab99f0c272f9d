"""Transparent parts of pictures: one key decides, a run counts them, and exports say what they were."""

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.loading import rank_batches
from trainer.data.bad_samples import Skipped
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


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
