"""Tables of images and captions, also as others write them: what is read, and what is refused."""

import base64
import csv
import io
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.loading import refusal
from tests.support.range_server import serving
from tests.support.tables import write_parquet
from trainer.config import Data
from trainer.config.loader import load_job
from trainer.data.check import check_data
from trainer.data.pictures import decode
from trainer.data.sample import BadSample
from trainer.data.source import open_images, open_source
from trainer.data.tables import TableColumns, read_table
from trainer.errors import InputError
from trainer.model.build import untrained


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def read(path: Path, separator: str | None = None) -> Any:
    return read_table(path, TableColumns(separator=separator))


def refused(path: Path) -> str:
    said = refusal(read, path)
    assert str(path) in said
    return said


def test_text_behind_the_last_column_is_named_and_not_dropped(tmp_path: Path) -> None:
    rows = 'image,caption\na.jpg,a dog, running\nb.jpg,a cat,\nc.jpg,"one, two"\nd.jpg,x,y,z\n'
    with pytest.raises(InputError, match=r"more cells than the 2 columns .* in rows 2, 5: put a cell"):
        read(write(tmp_path / "t.csv", rows))


def test_images_behind_addresses_are_read_and_are_no_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.image_cells.WAITS_S", ())
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with serving(tmp_path) as (url, _):
        rows = f"{url}/a.png,one\n{url}/a.png,two\n{url}/gone.png,x\n"
        path = write(tmp_path / "t.csv", f"URL,caption\n{rows}")
        data = Data(train=(str(path),), image_column="URL")
        assert check_data(data) == 3
        assert open_source(data).read(1).image == (tmp_path / "a.png").read_bytes()
        images = open_images(data)
        assert (len(images), images.read(0).captions) == (2, ("one", "two"))
        with pytest.raises(BadSample, match="cannot be fetched"):
            images.read(1)
        clipship("pack", path, tmp_path / "out", "--image-column", "URL", "--skip-bad-rows", code=0)
        assert (tmp_path / "out" / "bad-rows.tsv").read_text().startswith(f"{path}: row 4\t")


def test_paths_of_windows_are_taken_or_named(tmp_path: Path) -> None:
    (tmp_path / "images" / "deep").mkdir(parents=True)
    (tmp_path / "images" / "deep" / "a.jpg").write_bytes(b"a")
    (tmp_path / "odd\\name.jpg").write_bytes(b"odd")
    path = write(tmp_path / "t.csv", "image,caption\nimages\\deep\\a.jpg,c\nodd\\name.jpg,c\n")
    data = Data(train=(str(path),))
    assert check_data(data) == 2
    source = open_source(data)
    assert [source.read(number).image for number in range(2)] == [b"a", b"odd"]
    write(path, "image,caption\nC:\\data\\a.jpg,c\n")
    with pytest.raises(InputError, match=r"C:\\data\\a.jpg is a path of Windows: name files relative"):
        check_data(data)


def test_a_column_that_comes_twice_is_not_chosen_by_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "image,caption,caption,x,x\na.png,one,two,3,4\n")
    (tmp_path / "a.png").touch()
    assert "the header names 'caption' more than once" in refused(path)
    other = Data(train=(str(path),), caption_column=("image",))
    assert open_source(other).read(0).captions == ("a.png",), "a column that nobody reads may be there twice"
    said = clipship("pack", path, tmp_path / "out", "--caption-column", "image", code=2).err
    assert "names 'caption', 'x' more than once" in said


def test_quotes_are_text_where_the_job_says_so(tmp_path: Path) -> None:
    text = 'image\tcaption\na.png\t"Sunset" by Monet\na.png\t"no end\na.png\t5" disk\n'
    path = write(tmp_path / "t.tsv", text)
    (tmp_path / "a.png").touch()
    assert 'set data.quotes = "text" in a job, --quotes text in a command' in refused(path)
    source = open_source(Data(train=(str(path),), quotes="text"))
    captions = [source.read(row).captions for row in range(3)]
    assert captions == [('"Sunset" by Monet',), ('"no end',), ('5" disk',)]


def test_a_quote_that_swallows_rows_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", 'image,caption\na.png,x\nb.png,"not closed\nc.png,lost\nd.png,end"\n')
    assert "a cell holds lines that look like rows in row 3: its first quote is not closed" in refused(path)
    poem = write(tmp_path / "p.csv", 'image,caption\na.png,"roses, red\nviolets, blue"\n')
    assert read(poem).captions == (("roses, red violets, blue",),)


@pytest.mark.parametrize("line", ["see b.jpg, the second", "b.jpg, the second"])
def test_a_caption_of_two_lines_that_names_an_image_is_no_swallowed_row(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "t.csv", f'image,caption\na.jpg,"a poster:\n{line}"\nc.jpg,x\n')
    assert read(path).captions == ((f"a poster: {line}", "x"),)
    (tmp_path / "b.jpg").write_bytes(b"b")
    if not line.startswith("see"):
        assert "lines that look like rows in row 2" in refused(path), "the image of the line is there"


def test_tables_of_spreadsheets_are_read(tmp_path: Path) -> None:
    table = read(
        write(
            tmp_path / "t.csv", 'image,caption\r\na.png,"two\r\nlines"\r\n\r\n,\r\nb.png,x\r\n', "utf-8-sig"
        )
    )
    assert (table.images, table.captions, table.rows) == (("a.png", "b.png"), (("two lines", "x"),), (2, 5))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "none, the file is empty"),
        ("image,caption\n", "no rows below the header"),
        ("image,caption\nb.png, \n,x\nc.png\n", "column 'caption' is empty in rows 2, 4: fill in"),
        ("image,caption\n,x\n", "column 'image' is empty in row 2: fill in"),
        ("image,caption\na.png,\nb.png,\n", "column 'caption' is empty in every row"),
        ('image,caption\na.png,x\nb.png,"never closed\nc.png,y\n', "row 3 cannot be read"),
        (
            "image,caption\na.png,x\nb.png,caf\udce9\nc.png,y\n",
            "row 3 is not UTF-8 text (it has the byte 0xe9)",
        ),
        ('image,caption\na.png,"two\nlines"\nb.png,caf\udce9\n', "row 3 is not UTF-8 text"),
        ("\udcff\udcfei\0m\0", "row 1 is not UTF-8 text (it has the byte 0xff)"),
    ],
)
def test_a_bad_table_is_refused_with_its_rows(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert problem in refused(path)


def test_a_table_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "gone.csv")
    assert "Is a directory" in refused(tmp_path)


def test_the_row_of_bytes_that_are_no_text_is_found_far_down_too(tmp_path: Path) -> None:
    """Decoding runs ahead of the rows by thousands of bytes."""
    rows = b"".join(b"%d.png,caption\n" % row for row in range(2, 5000))
    (tmp_path / "t.csv").write_bytes(b"image,caption\n" + rows + b"5000.png,caf\xe9\n" + rows)
    assert "row 5000 is not UTF-8 text" in refused(tmp_path / "t.csv")


def test_a_fifo_without_a_writer_and_a_device_end_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    assert "the file is empty" in refused(tmp_path / "t.csv")
    assert "is a device, not a file" in refused(Path("/dev/zero"))


def test_rows_without_a_caption_are_bad_samples_as_in_shards(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    path = write(tmp_path / "t.csv", "image,caption,more\na.png,x,1\na.png,,2\n,y,3\na.png,z,4\n")
    data = Data(train=(str(path),))
    assert check_data(data) == 2
    source = open_source(data)
    assert [(raw.captions, raw.origin) for raw in map(source.read, range(len(source)))] == [
        (("x",), f"{path}: row 2"),
        (("z",), f"{path}: row 5"),
    ]
    assert (
        source.left_out.by_cause == open_images(data).left_out.by_cause == {"bad captions": 1, "no image": 1}
    )
    assert "row 3: sample a.png: captions are empty" in str(source.left_out.named[0])
    refusals: list[dict[str, object]] = [{"on_bad_sample": "fail"}, {"max_bad_share": 0.001}]
    openers: list[Callable[[Data], object]] = [check_data, open_source, open_images]
    for refuses in refusals:
        for opens in openers:
            said = refusal(opens, data.model_copy(update=refuses))
            assert "bad samples: 2 of 4 (1 bad captions, 1 no image)" in said


def picture_of(kind: str = "PNG", shade: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, 0, 0)).save(file, kind)
    return file.getvalue()


def foreign_table(path: Path, cells: list[str], separator: str = "\t") -> str:
    with path.open("w", newline="") as file:
        rows = [("image", "caption"), *((cell, f"caption {number}") for number, cell in enumerate(cells))]
        csv.writer(file, delimiter=separator).writerows(rows)
    return str(path)


def foreign_parquet(path: Path, cells: list[str]) -> str:
    captions = [f"caption {number}" for number in range(len(cells))]
    return write_parquet(path, {"image": cells, "caption": captions})


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
@pytest.mark.parametrize("name", ["t.tsv", "t.parquet"])
def test_pictures_in_base64_are_pictures(tmp_path: Path, kind: str, name: str) -> None:
    content = picture_of(kind)
    cells = [base64.b64encode(content).decode(), base64.urlsafe_b64encode(content).decode().rstrip("=")]
    make = foreign_table if name.endswith("tsv") else foreign_parquet
    data = Data(train=(make(tmp_path / name, cells),))
    assert check_data(data) == 2
    for source in (open_source(data), open_images(data)):
        for number in range(len(source)):
            raw = source.read(number)
            assert raw.image == content
            assert len(raw.key) < 20
            assert decode(raw).size == (16, 16)
    done = clipship("pack", data.train[0], tmp_path / "out", code=2 * (kind == "GIF"))
    if kind == "GIF":  # no job expects it in shards
        assert "none of" in done.err
        return
    packed = open_source(Data(train=(f"{tmp_path}/out/*.tar",)))
    assert [packed.read(number).image for number in range(2)] == [content, content]


def chinese_clip(folder: Path) -> Path:
    pictures = [f"{number}\t{base64.b64encode(picture_of(shade=number)).decode()}\n" for number in (7, 8, 9)]
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
    given = ("pack", chinese_clip(tmp_path), tmp_path / "out", "--processes", "1")
    said = clipship(*given, code=2).err
    assert "1 text beside it name pictures that it lacks: --skip-bad-rows" in said
    done = clipship(*given, *options, "--skip-bad-rows", code=0)
    assert "1 row left out" in done.err  # picture 8 has no text
    packed = open_source(Data(train=(f"{tmp_path}/out/*.tar",)))
    found = {packed.read(number).image: packed.read(number).captions for number in range(len(packed))}
    assert found == {picture_of(shade=7): ("一只猫",), picture_of(shade=9): ("一只猫", "two cats")}


def test_texts_of_another_form_are_named_by_their_line(tmp_path: Path) -> None:
    path = chinese_clip(tmp_path)
    (tmp_path / "train_texts.jsonl").write_text('{"text": "a"}\n')
    said = clipship("pack", path, tmp_path / "out", code=2).err
    assert "train_texts.jsonl: line 1 has no text and image_ids" in said


def test_a_message_has_a_bound_whatever_a_cell_holds(tmp_path: Path) -> None:
    said = clipship("data", "stats", foreign_table(tmp_path / "t.csv", ["x" * 600_000], ","), code=2).err
    assert "more characters" in said
    assert len(said) < 10_000


# Users of open_clip, img2dataset and others bring tables, keys and weights: taken, or led to ours.


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()


def parquet(path: Path, rows: int, **columns: list[Any]) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    path.parent.mkdir(exist_ok=True)
    names = [f"caption {number}" for number in range(rows)]
    write_table(pyarrow.table({"jpg": [picture()] * rows, "caption": names, **columns}), path)


def init_at(folder: Path, data: str, *options: str) -> tuple[dict[str, Any], str]:
    done = clipship("init", folder / "job.toml", "--preset", "gpu", "--data", folder / data, *options)
    assert done.code == 0, done.err
    return tomllib.loads((folder / "job.toml").read_text()), done.err


def test_files_of_other_sizes_hold_out_a_twentieth_of_the_samples(tmp_path: Path) -> None:
    for number, rows in enumerate((300, 300, 300, 20, 20, 20)):
        parquet(tmp_path / "birds" / f"{number:05d}.parquet", rows)
    job, said = init_at(tmp_path, "birds")
    assert "held out" not in said
    assert [Path(name).name for name in job["eval"]["retrieval"].split(",")] == ["{00003..00005}.parquet"]
    assert job["name"] == "birds"


@pytest.mark.parametrize("rows", [5, 60])
def test_open_clips_own_table_is_found(tmp_path: Path, rows: int) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        lines = [("filepath", "title"), *(("a.png", f"a caption, {number}") for number in range(rows))]
        csv.writer(file, delimiter="\t").writerows(lines)
    init_at(tmp_path, "pairs.csv")
    data = load_job(tmp_path / "job.toml").data
    assert check_data(data) == rows
    assert open_source(data).read(0).captions == ("a caption, 0",)


def test_a_command_line_with_an_unknown_model_is_refused_with_the_nearest() -> None:
    said = clipship("from-open-clip", "--train-data", "a.tar", "--model", "ViT-B-23")
    assert re.search(r"unknown model 'ViT-B-23'; did you mean .*ViT-B-32", said.err)


def test_weights_below_another_name_and_those_with_nan_are_named(tmp_path: Path) -> None:
    state, path = untrained(tiny_job()).model.state_dict(), tmp_path / "w.pt"
    torch.save({"epoch": 1, "module": state}, path)
    with pytest.raises(InputError, match="'module' in it does: save that part"):
        untrained(tiny_job(model={"pretrained": str(path)}))
    state["visual.proj"][0, 0] = float("nan")
    torch.save(state, path)
    for key in ("pretrained", "init"):
        with pytest.raises(InputError, match=r"w\.pt hold NaN or infinity in 1 tensor: visual\.proj"):
            untrained(tiny_job(model={key: str(path)}))


def test_weights_are_found_however_the_system_writes_their_accents(tmp_path: Path) -> None:
    torch.save(untrained(tiny_job()).model.state_dict(), tmp_path / "cafe\u0301.pt")
    assert untrained(tiny_job(model={"pretrained": str(tmp_path / "caf\u00e9.pt")})).model is not None
