"""Files are whole or as they were; JSON holds no NaN."""

import json
import os
import socket
from pathlib import Path

import pytest

from trainer.safe_io.atomic import write_json, write_whole
from trainer.safe_io.plain import open_plain, read_plain


def test_text_replaces_the_older_and_leaves_nothing_beside(tmp_path: Path) -> None:
    for text in ("old", "né\n"):
        write_whole(tmp_path / "file", text)
    assert (tmp_path / "file").read_bytes() == "né\n".encode()
    assert os.listdir(tmp_path) == ["file"]


def test_write_that_fails_leaves_the_older_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "file", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_nan_and_infinity_become_null_in_json(tmp_path: Path) -> None:
    value = {"norm": float("inf"), "rows": ({"loss": float("nan")}, [1.5, -float("inf")]), "step": 3}
    write_json(tmp_path / "file", value)
    written = json.loads((tmp_path / "file").read_text())
    assert written == {"norm": None, "rows": [{"loss": None}, [1.5, None]], "step": 3}


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """Others may write in the folder of a report, too."""
    folder, precious = tmp_path / "shared", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("mine")
    for planted in (".report.html.partial", "report.html"):
        (folder / planted).symlink_to(precious)
    write_whole(folder / "report.html", "new")
    assert precious.read_text() == "mine"
    assert (folder / "report.html").read_text() == "new"
    assert not (folder / "report.html").is_symlink()


def test_a_link_planted_at_the_temporary_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", lambda _: b"guessed")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f".file.{b'guessed'.hex()}.partial").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "file", "new")
    assert precious.read_text() == "mine"


def test_a_file_name_of_maximum_length_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    write_whole(path, "text")
    assert path.read_text() == "text"


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "socket"])
def test_anything_but_a_plain_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "exit.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    with pytest.raises(OSError, match=r"Errno"):
        read_plain(path)
    with pytest.raises(OSError, match=r"Errno"), open(path, "a", opener=open_plain):
        pass
