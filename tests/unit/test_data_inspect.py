"""`clipship data`: statistics that are those of the shards, and a sheet that shows each picture."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image, ImageFont

from trainer.cli.data import command
from trainer.data import sheet_fonts
from trainer.data.inspect import MARGIN, TILE
from trainer.data.shard_files import write_shards


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Five pictures, one each of a colour, and one that is broken."""
    samples = []
    for number in range(6):
        file = io.BytesIO()
        Image.new("RGB", (100 + 10 * number, 50), (40 * number, 0, 0)).save(file, "png")
        samples.append(
            (
                f"{number}",
                {"png": file.getvalue() if number != 2 else b"broken", "txt": b"a caption\nanother one"},
            )
        )
    write_shards(samples, tmp_path, 4)
    return str(tmp_path / "*.tar")


def test_statistics_count_sizes_captions_and_what_is_bad(shard: str) -> None:
    result = CliRunner().invoke(command, ["stats", shard], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert (found["shards"], found["samples"], found["inspected"], found["bad"]) == (
        2,
        6,
        6,
        {"not an image": 1},
    )
    assert found["width"] == {"least": 100, "median": 130, "most": 150}
    assert found["caption_characters"] == {"least": 9, "median": 10, "most": 11}
    assert found["samples_per_shard"] == {"least": 2, "median": 3, "most": 4}


def test_the_sheet_shows_every_picture_and_names_the_broken_one(shard: str, tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    result = CliRunner().invoke(command, ["show", shard, "--out", str(out)], catch_exceptions=False)
    assert result.stdout == f"{out}\n"
    with Image.open(out) as sheet:
        pixels = np.asarray(sheet)
    seen = {tuple(colour) for colour in pixels.reshape(-1, 3).tolist()}
    assert {(40 * number, 0, 0) for number in (1, 3, 4, 5)} <= seen
    assert (80, 0, 0) not in seen
    assert any(red > 200 and green < 60 for red, green, _ in seen)
    assert pixels.shape[1] >= TILE + 2 * MARGIN


def chinese(tmp_path: Path) -> str:
    file = io.BytesIO()
    Image.new("RGB", (60, 60), "red").save(file, "png")
    write_shards([("0", {"png": file.getvalue(), "txt": "<b>一只狗".encode()})], tmp_path, 4)
    return str(tmp_path / "*.tar")


def test_characters_that_no_font_has_are_named_and_a_page_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sheet_fonts, "FOLDERS", (str(tmp_path),))
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    out, shards = tmp_path / "sheet.png", chinese(tmp_path)
    result = CliRunner().invoke(command, ["show", shards, "--out", str(out)], catch_exceptions=False)
    assert "warning: no font of this machine has 3 characters of the captions, such as 一" in result.stderr
    assert "or give --out contact-sheet.html" in result.stderr
    page = tmp_path / "sheet.html"
    result = CliRunner().invoke(command, ["show", shards, "--out", str(page)], catch_exceptions=False)
    assert (result.stdout, result.stderr) == (f"{page}\n", "")
    text = page.read_text(encoding="utf-8")
    assert "<figcaption>&lt;b&gt;一只狗</figcaption>" in text
    assert text.count("data:image/png;base64,") == 1


def test_a_font_of_this_machine_is_taken_where_pillows_own_lacks_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins for fonts: which characters a font has is asked of its drawings."""

    class Face:
        def __init__(self, letters: str) -> None:
            self.letters = letters

        def getmask(self, letter: str) -> bytes:
            return letter.encode() if letter in self.letters else b"box"

    faces = {"latin.ttf": Face("abc"), "odd.ttf": Face("ab一"), "cjk.ttf": Face("abc一只狗")}
    monkeypatch.setattr(ImageFont, "load_default", lambda _size: Face("ab "))
    monkeypatch.setattr(ImageFont, "truetype", lambda path, _size: faces[path])
    monkeypatch.setattr(sheet_fonts, "_paths", lambda: iter(faces))
    fonts = sheet_fonts.Fonts(11)
    chosen: list[Any] = [fonts.of(text) for text in ("a b", "c", "一只狗", "a一", "狗 é")]
    assert [face.letters for face in chosen] == ["ab ", "abc", "abc一只狗", "ab一", "abc一只狗"]
    assert fonts.lacking == {"é"}


def test_table_is_inspected_as_shards_are(tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("file,text\na.png,hello\na.png,again\n")
    columns = ["--image-column", "file", "--caption-column", "text"]
    result = CliRunner().invoke(command, ["stats", str(tmp_path / "t.csv"), *columns], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert (found["samples"], found["bad"], found["width"]["most"]) == (2, {}, 30)


def test_a_table_may_have_another_separator(tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    table = tmp_path / "t.csv"
    table.write_text("image;caption\na.png;hello, you\n")
    result = CliRunner().invoke(command, ["stats", str(table), "--separator", ";"], catch_exceptions=False)
    assert json.loads(result.stdout)["caption_characters"]["most"] == len("hello, you")
    refused = CliRunner().invoke(command, ["stats", str(table), "--separator", ";;"])
    assert "--separator: must not be longer than 1 character" in str(refused.exception)


def test_table_with_missing_images_and_a_mixture_are_refused(shard: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,caption\nnowhere.png,hello\n")
    missing = CliRunner().invoke(command, ["stats", str(tmp_path / "t.csv")])
    assert "t.csv: 1 of 1 image files of column 'image' are missing: row 2" in str(missing.exception)
    mixed = CliRunner().invoke(command, ["stats", str(tmp_path / "t.csv"), shard])
    assert "t.csv is a table among shards: name only files of one format" in str(mixed.exception)
