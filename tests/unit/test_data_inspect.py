"""`clipship data`: statistics that are those of the shards, and a sheet that shows each picture."""

import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.support.command_line import clipship
from tests.support.pictures import picture
from trainer.data.pack import write_shards

PICTURE = re.compile(r'src="data:image/png;base64,([^"]+)"')


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
    found = json.loads(clipship("data", "stats", shard, code=0).out)
    assert (found["shards"], found["samples"], found["bad"]) == (2, 6, {"not an image": 1})
    assert found["width"] == {"least": 100, "median": 130, "most": 150}
    assert found["caption_characters"] == {"least": 9, "median": 10, "most": 11}
    assert found["samples_per_shard"] == {"least": 2, "median": 3, "most": 4}


def test_the_sheet_shows_every_picture_and_names_the_broken_one(shard: str, tmp_path: Path) -> None:
    out = tmp_path / "sheet.html"
    assert clipship("data", "show", shard, "--out", out) == (0, f"{out}\n", "")
    text = out.read_text(encoding="utf-8")
    pictures = [Image.open(io.BytesIO(base64.b64decode(data))) for data in PICTURE.findall(text)]
    assert [picture.getpixel((0, 0)) for picture in pictures] == [(40 * n, 0, 0) for n in (0, 1, 3, 4, 5)]
    assert text.count("<figcaption>a caption</figcaption>") == 5
    assert "<b>not usable</b><figcaption>2: not an image</figcaption>" in text


def test_the_sheet_escapes_captions_of_any_script(tmp_path: Path) -> None:
    write_shards([("0", {"png": picture(9, 60), "txt": "<b>一只狗".encode()})], tmp_path, 4)
    out = tmp_path / "sheet.html"
    clipship("data", "show", tmp_path / "*.tar", "--out", out, code=0)
    assert "<figcaption>&lt;b&gt;一只狗</figcaption>" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["sheet.png", "sheet", ""])
def test_a_sheet_that_is_no_page_is_refused(name: str, shard: str, tmp_path: Path) -> None:
    said = clipship("data", "show", shard, "--out", tmp_path / name, code=2).err
    assert "the contact sheet is a page: give a name that ends with .html" in said
    assert not list(tmp_path.glob("*.png"))


def test_table_is_inspected_as_shards_are(tmp_path: Path, shard: str) -> None:
    (tmp_path / "a.png").write_bytes(picture(0, 30))
    (table := tmp_path / "t.csv").write_text("file;text\na.png;hello, you\na.png;again\n")
    columns = ["--image-column", "file", "--caption-column", "text"]
    found = json.loads(clipship("data", "stats", table, *columns, "--separator", ";", code=0).out)
    assert (found["samples"], found["bad"], found["width"]["most"]) == (2, {}, 30)
    assert found["caption_characters"]["most"] == len("hello, you")
    said = clipship("data", "stats", table, "--separator", ";;", code=2).err
    assert "--separator: must not be longer than 1 character" in said
    table.write_text("image,caption\nnowhere.png,hello\n")
    said = clipship("data", "stats", table, code=2).err
    assert "t.csv: 1 of 1 image files of column 'image' are missing: row 2" in said
    said = clipship("data", "stats", table, shard, code=2).err
    assert "t.csv is a table among shards: name only files of one format" in said
