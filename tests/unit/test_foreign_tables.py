"""Tables as others write them: pictures in base64, Chinese-CLIP's pair of files, endings in capitals."""

import base64
import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from trainer.cli.main import main
from trainer.cli.pack import command as pack
from trainer.config import Data
from trainer.data.bad_samples import ANY
from trainer.data.check import check_data
from trainer.data.pictures import decode
from trainer.data.source import open_images, open_source
from trainer.errors import InputError


def picture(kind: str = "PNG", shade: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, 0, 0)).save(file, kind)
    return file.getvalue()


def table(path: Path, cells: list[str], separator: str = "\t") -> str:
    with path.open("w", newline="") as file:
        rows = [("image", "caption"), *((cell, f"caption {number}") for number, cell in enumerate(cells))]
        csv.writer(file, delimiter=separator).writerows(rows)
    return str(path)


def parquet(path: Path, cells: list[str]) -> str:
    import pyarrow
    from pyarrow.parquet import write_table

    captions = [f"caption {number}" for number in range(len(cells))]
    write_table(pyarrow.table({"image": cells, "caption": captions}), path)
    return str(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
@pytest.mark.parametrize("name", ["t.tsv", "t.parquet"])
def test_pictures_in_base64_are_pictures(tmp_path: Path, kind: str, name: str) -> None:
    content = picture(kind)
    cells = [base64.b64encode(content).decode(), base64.urlsafe_b64encode(content).decode().rstrip("=")]
    make = table if name.endswith("tsv") else parquet
    data = Data(train=(make(tmp_path / name, cells),))
    assert check_data(data) == 2
    for source in (open_source(data), open_images(data)):
        for number in range(len(source)):
            raw = source.read(number)
            assert raw.image == content
            assert len(raw.key) < 20
            assert decode(raw).size == (16, 16)
    done = CliRunner().invoke(pack, [data.train[0], str(tmp_path / "out")])
    if kind == "GIF":  # no job expects it in shards
        assert "none of" in str(done.exception)
        return
    assert done.exception is None, done.exception
    packed = open_source(Data(train=(f"{tmp_path}/out/*.tar",)))
    assert [packed.read(number).image for number in range(2)] == [content, content]


@pytest.mark.parametrize("name", ["UPPER.CSV", "UPPER.TSV", "UPPER.PARQUET"])
def test_endings_in_capitals_are_endings(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    make = parquet if name.endswith("PARQUET") else table
    more = {"separator": ","} if name.endswith("CSV") else {}
    data = Data(train=(make(tmp_path / name, ["a.png"], **more),))
    assert check_data(data) == 1
    assert open_source(data).read(0).captions == ("caption 0",)


def chinese_clip(folder: Path) -> Path:
    pictures = [f"{number}\t{base64.b64encode(picture(shade=number)).decode()}\n" for number in (7, 8, 9)]
    (folder / "train_imgs.tsv").write_text("".join(pictures))
    texts = [
        {"text_id": 1, "text": "一只猫", "image_ids": [7, 9]},
        {"text_id": 2, "text": "two  cats", "image_ids": [9]},
        {"text_id": 3, "text": "elsewhere", "image_ids": [70]},
    ]
    lines = [json.dumps(text, ensure_ascii=False) for text in texts]
    (folder / "train_texts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "train_imgs.tsv"


@pytest.mark.parametrize("options", [[], ["--shard-mb", "1"], ["--samples-per-shard", "1"]])
def test_pack_joins_chinese_clips_pair(tmp_path: Path, options: list[str]) -> None:
    given = [str(chinese_clip(tmp_path)), str(tmp_path / "out"), "--processes", "1"]
    refused = CliRunner().invoke(pack, given)
    assert "1 text beside it name pictures that it lacks: --skip-bad-rows" in str(refused.exception)
    done = CliRunner().invoke(pack, [*given, *options, "--skip-bad-rows"])
    assert done.exception is None, done.exception
    assert "1 row left out" in done.stderr  # picture 8 has no text
    packed = open_source(Data(train=(f"{tmp_path}/out/*.tar",)), allowed=ANY)
    found = {packed.read(number).image: packed.read(number).captions for number in range(len(packed))}
    assert found == {picture(shade=7): ("一只猫",), picture(shade=9): ("一只猫", "two cats")}


def test_texts_of_another_form_are_named_by_their_line(tmp_path: Path) -> None:
    path = chinese_clip(tmp_path)
    (tmp_path / "train_texts.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match=r"train_texts\.jsonl: line 1 has no text and image_ids"):
        main_or_raise(["pack", str(path), str(tmp_path / "out")])


def main_or_raise(arguments: list[str]) -> None:
    done = CliRunner().invoke(pack, arguments[1:])
    if done.exception is not None:
        raise done.exception


def test_a_message_has_a_bound_whatever_a_cell_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "x" * 600_000
    assert main(["data", "stats", table(tmp_path / "t.csv", [name], ",")]) == 2
    said = capsys.readouterr().err
    assert "more characters" in said
    assert len(said) < 10_000
