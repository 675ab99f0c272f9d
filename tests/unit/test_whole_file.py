"""Files are whole or as they were; JSON holds no NaN."""

import json
import os
from pathlib import Path

import pytest

from trainer.whole_file import json_text, write_json, write_whole


def test_text_replaces_the_older_and_leaves_nothing_beside(tmp_path: Path) -> None:
    for text in ("old", "né\n"):
        write_whole(tmp_path / "file", text)
    assert (tmp_path / "file").read_bytes() == "né\n".encode()
    assert os.listdir(tmp_path) == ["file"]


def test_write_that_fails_leaves_the_older_and_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "file", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_json_does_not_have_becomes_null(tmp_path: Path) -> None:
    value = {"norm": float("inf"), "rows": ({"loss": float("nan")}, [1.5, -float("inf")]), "step": 3}
    assert json.loads(json_text(value)) == {"norm": None, "rows": [{"loss": None}, [1.5, None]], "step": 3}
    write_json(tmp_path / "file", value)
    assert json.loads((tmp_path / "file").read_text())["norm"] is None
