"""Files are whole or as they were; JSON holds no NaN."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from trainer.safe_io.atomic import write_json, write_whole


def test_write_that_fails_leaves_the_older_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = "é" * 127
    write_whole(tmp_path / longest, "old")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / longest, "new")
    assert (tmp_path / longest).read_text() == "old"
    assert os.listdir(tmp_path) == [longest]


def test_nan_and_infinity_become_null_in_json(tmp_path: Path) -> None:
    value = {"norm": float("inf"), "rows": ({"loss": float("nan")}, [1.5, -float("inf")]), "step": 3}
    write_json(tmp_path / "file", value)
    written = json.loads((tmp_path / "file").read_text())
    assert written == {"norm": None, "rows": [{"loss": None}, [1.5, None]], "step": 3}


def test_no_planted_link_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write in the folder of a report, too."""
    precious, report = tmp_path / "precious", tmp_path / "report.html"
    precious.write_text("mine")
    report.symlink_to(precious)
    write_whole(report, "new")
    assert (report.read_text(), report.is_symlink()) == ("new", False)
    monkeypatch.setattr(os, "urandom", lambda _: b"guessed")
    (tmp_path / f".report.html.{b'guessed'.hex()}.partial").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_whole(report, "newer")
    assert precious.read_text() == "mine"
