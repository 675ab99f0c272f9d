"""`clipship pack`: tables and the demo's digits become shards, whole or not at all."""

import base64
import errno
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tests.support.command_line import Said, clipship
from tests.support.loading import keys_of
from tests.support.pictures import picture
from trainer.config import Data, Eval
from trainer.data import pack as packing
from trainer.data import store
from trainer.data.pack import write_shards
from trainer.data.sample import Source
from trainer.data.source import open_labelled, open_source
from trainer.demo.data import pack_digits
from trainer.errors import StorageError

FOLDER = ".clipship-index"
SKIP = "--skip-bad-rows"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Seven rows of tiny pictures, one of them twice."""
    for n in range(6):
        Image.new("RGB", (2, 2), (n, 0, 0)).save(tmp_path / f"{n}.{'JPG' if n == 3 else 'png'}")
    rows = [f"{n}.{'JPG' if n == 3 else 'png'},caption {n}" for n in range(6)] + ['0.png,"two\nlines"']
    (tmp_path / "t.csv").write_text("image,caption\n" + "\n".join(rows) + "\n")
    return tmp_path / "t.csv"


def pack(table: Path, out: object, *options: object, code: int = 0, per_shard: int = 1000) -> Said:
    cut = () if "--shard-mb" in options else ("--samples-per-shard", per_shard)
    return clipship("pack", table, out, "--processes", 1, *cut, *options, code=code)


def packed(table: Path, out: object, *options: object, per_shard: int = 1000) -> Source:
    return open_source(Data(train=(pack(table, out, *options, per_shard=per_shard).out.strip(),)))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


def test_packing_twice_gives_the_same_bytes(table: Path, tmp_path: Path) -> None:
    pack(table, tmp_path / "one", per_shard=2)
    pack(table, tmp_path / "two", "--processes", 2, per_shard=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_rows_without_a_usable_image_or_caption_are_named_before_anything_is_written(
    table: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.gif").write_bytes(b"gif")
    (tmp_path / "broken.jpg").write_bytes(b"not a picture")
    os.mkfifo(tmp_path / "fifo.png")
    before = sorted(tmp_path.iterdir())
    head, rows = table.read_text(), "gone.png,x\nx.gif,y\nfifo.png,z\n"
    table.write_text(head + rows)
    said = pack(table, tmp_path / "out", code=2).err
    assert "image file missing in rows 9, 11" in said
    assert "none of .jpg, .jpeg, .png, .webp in row 10" in said
    table.write_text(f"{head}1.png,\n,two\n")
    said = pack(table, tmp_path / "out", code=2).err
    assert "column 'image' is empty in row 10" in said
    assert "'caption' is empty in row 9" in said
    assert sorted(tmp_path.iterdir()) == before
    table.write_text(f"{head}broken.jpg,y\n")
    said = pack(table, tmp_path / "out", "--resize", 100, code=2).err
    assert f"row 9: image {tmp_path}/broken.jpg cannot be used" in said
    assert SKIP in said
    assert not (tmp_path / "out").exists()


def test_images_are_made_smaller_and_bad_rows_left_out_and_listed(table: Path, tmp_path: Path) -> None:
    Image.effect_noise((300, 200), 50).save(tmp_path / "large.png")
    (tmp_path / "broken.jpg").write_bytes(b"not a picture")
    os.mkfifo(tmp_path / "fifo.png")
    with table.open("a") as file:
        file.write("gone.png,x\nbroken.jpg,y\nfifo.png,z\n1.png,\n,two\nlarge.png,z\n")
    source = packed(table, tmp_path / "out", "--resize", 100, SKIP)
    assert len(source) == 8
    last = source.read(7)
    assert isinstance(last.image, bytes)
    assert Image.open(io.BytesIO(last.image)).size == (150, 100)
    listed = [line.split("\t") for line in (tmp_path / "out" / "bad-rows.tsv").read_text().splitlines()]
    assert [place.rpartition(" ")[2] for place, _ in listed] == ["9", "10", "11", "12", "13"]
    whys = [why for _, why in listed[2:]]
    assert whys == ["its image is a FIFO, not a file", "captions are empty", "its image is empty"]
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {"shard-000000.tar": 8}


def test_an_interrupted_replacement_loses_neither_the_old_shards_nor_the_new(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    pack(table, out)
    before, rename = contents(out), Path.rename

    def once(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", once)
        pack(table, out, "--force", per_shard=3, code=130)
    assert contents(tmp_path / ".out.former") == before
    assert packed(table, out, "--force", per_shard=3).shard_sizes() == [3, 3, 1]
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def test_a_place_that_cannot_be_written_is_named(table: Path, tmp_path: Path) -> None:
    assert "is a file" in pack(table, table, code=2).err
    assert "cannot be written: Not a directory" in pack(table, table / "below" / "out", code=2).err
    longest = "x" * (255 - len("..partial"))
    pack(table, tmp_path / longest)
    pack(table, tmp_path / longest, "--force")
    assert "cannot be written: File name too long" in pack(table, tmp_path / f"{longest}x", code=2).err


def test_other_columns_become_json_and_those_that_json_does_not_have_are_named(
    table: Path, tmp_path: Path
) -> None:
    columns = {
        "image": ["0.png", "1.png", "2.png"],
        "caption": ["a", "b", "c"],
        "raw": [b"x", None, b"y"],
        "nested": [None, [{"of": b"x"}], None],
        "width": [2, None, 3],
        "tag": ["x,y", "\u00e9", None],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    done = pack(tmp_path / "t.parquet", tmp_path / "out")
    with tarfile.open(done.out.strip()) as tar:
        names = [f"00000000{n}.{ending}" for n in range(3) for ending in ("json", "png", "txt")]
        assert tar.getnames() == names
        kept = [tar.extractfile(name) for name in names if name.endswith("json")]
        rows = [json.loads(file.read()) for file in kept if file is not None]
    assert [(row["width"], row["tag"]) for row in rows] == [(2, "x,y"), (None, "\u00e9"), (3, None)]
    assert "column 'raw' holds bytes in 2 rows" in done.err
    assert "column 'nested' holds bytes in 1 row," in done.err
    assert "width" not in done.err


def test_shards_may_be_cut_by_size(table: Path, tmp_path: Path) -> None:
    size = (tmp_path / "0.png").stat().st_size
    sizes = packed(table, tmp_path / "out", "--shard-mb", 2.5 * size / 1e6).shard_sizes()
    assert set(sizes) <= {1, 2}
    for wrong in ("inf", "nan"):
        assert f"{wrong} is no finite number" in pack(table, "out", "--shard-mb", wrong, code=2).err
    (tmp_path / "far").mkdir()
    url = "https://images.example/1.jpg"
    (tmp_path / "far" / "t.csv").write_text(f"image,caption\n{url},x\n")
    parquet.write_table(pyarrow.table({"image": [url], "caption": ["x"]}), tmp_path / "far" / "t.parquet")
    for name, row in (("t.csv", 2), ("t.parquet", 1)):
        said = pack(tmp_path / "far" / name, tmp_path / "more", "--shard-mb", 1, code=2).err
        assert f"row {row}: --shard-mb" in said
        assert "address: give --samples-per-shard" in said
    assert not (tmp_path / "more").exists()


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place in fsspec's own memory; the folder for what is under way is a folder of the test."""
    monkeypatch.chdir(tmp_path)
    yield f"memory://{tmp_path.name}/shards"
    store.remove(f"memory://{tmp_path.name}")


def at(address: str) -> dict[str, bytes | None]:
    return {name: store.read(f"{address}/{name}") for name in store.names(address) if name != FOLDER}


def test_shards_go_to_an_address_one_by_one_and_their_sizes_last(
    table: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(table, "whole", per_shard=3)
    expected, put = contents(Path("whole")), store.put

    def gone(source: Path, to: str) -> None:
        if to.endswith("shard-000002.tar"):
            raise StorageError("the store is gone")
        put(source, to)

    with monkeypatch.context() as cut:
        cut.setattr(packing, "put", gone)
        pack(table, address, per_shard=3, code=1)
    assert list(at(address)) == ["shard-000000.tar", "shard-000001.tar"]
    assert not list(Path(".shards.partial").glob("shard-00000[01].tar")), "what has gone is not kept twice"
    pack(table, address, per_shard=3)
    there = at(address)
    assert json.loads(there.pop("sizes.json") or b"") == dict(zip(sorted(expected), (3, 3, 1), strict=True))
    assert there == expected
    assert not Path(".shards.partial").exists()


@pytest.mark.parametrize("far", [False, True])
def test_an_empty_folder_is_filled_and_in_another_only_packed_shards_are_replaced(
    table: Path, tmp_path: Path, address: str, far: bool
) -> None:
    out = address if far else str(tmp_path / "out")
    (tmp_path / "out").mkdir()
    pack(table, out, per_shard=3)
    said = pack(table, out, code=2).err
    assert "the folder is not empty" in said
    assert "--force" in said
    pack(table, out, "--force")
    assert set(store.names(out)) - {FOLDER} == {"shard-000000.tar", "sizes.json"}
    store.put(b"years of work", f"{out}/thesis.tex")
    said = pack(table, out, "--force", code=2).err
    assert "holds thesis.tex" in said
    assert "only packed shards can be replaced" in said
    assert store.read(f"{out}/thesis.tex") == b"years of work"


@pytest.mark.parametrize("far", [False, True])
def test_shards_are_not_replaced_by_none(table: Path, tmp_path: Path, address: str, far: bool) -> None:
    out = address if far else str(tmp_path / "out")
    pack(table, out, per_shard=3)
    before, whole, text = at(out), (tmp_path / "0.png").read_bytes(), table.read_text()
    empty = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"image": pyarrow.array([], "string"), "caption": []}), empty)
    table.write_text("image,caption\n")
    for without in (table, empty):
        assert "the table has no rows" in pack(without, out, SKIP, "--force", code=2).err
    table.write_text(text)
    for each in tmp_path.glob("[0-5].*"):
        each.write_bytes(b"no picture")
    said = pack(table, out, SKIP, "--force", code=2, per_shard=3).err
    assert "none of the table's 7 rows can be packed" in said
    assert at(out) == before
    (tmp_path / "0.png").write_bytes(whole)
    pack(table, out, SKIP, "--force", per_shard=3)
    assert list(json.loads(at(out)["sizes.json"] or b"").values()) == [1, 0, 1]


def test_the_demo_holds_out_a_fifth_of_each_digit(tmp_path: Path) -> None:
    digits = pack_digits(tmp_path / "digits")
    train, held_out = open_source(Data(train=(digits.train,))), open_source(Data(train=(digits.held_out,)))
    assert len(train) + len(held_out) == 1797
    assert not set(keys_of(train)) & set(keys_of(held_out))
    names = tuple(map(str, range(10)))
    labelled = open_labelled(Eval(zero_shot=(digits.held_out,), class_names=names))
    labels = [labelled.read(n).label for n in range(len(labelled))]
    assert len(labels) == len(held_out)
    assert all(34 <= labels.count(digit) <= 37 for digit in range(10))
    first = train.read(0)
    assert first.captions[0] == "a handwritten zero"
    assert len(first.captions) == 5


def test_a_caption_that_is_no_text_is_named_as_what_it_is(tmp_path: Path) -> None:
    cells = {"image": [picture(0)] * 3, "caption": [{"en": "a"}, None, {"en": None}]}
    parquet.write_table(pyarrow.table(cells), tmp_path / "t.parquet")
    pack(tmp_path / "t.parquet", tmp_path / "out", SKIP, "--caption-column", "caption.en")
    bad = (tmp_path / "out" / "bad-rows.tsv").read_text().splitlines()
    assert [line.split("\t")[1] for line in bad] == [
        "it has null at caption, not an object with the field en",
        "captions are empty",
    ]


def test_shards_of_other_images_with_the_same_text_are_not_kept(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = packing._make, list[Any]()

    def stopped(job: Any) -> object:
        made.append(job)
        if len(made) == 3:
            raise KeyboardInterrupt
        return make(job)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_make", stopped)
        pack(table, tmp_path / "out", per_shard=1, code=130)
    Image.new("RGB", (9, 9), "blue").save(tmp_path / "0.png")
    pack(table, tmp_path / "out", per_shard=1)
    pack(table, tmp_path / "whole", per_shard=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_folder_that_cannot_be_renamed_is_refused_at_the_start(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "mounted", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    kinds = {"link": "a link", "dangling": "a link", "mounted": "a mount point", "here": "the working folder"}
    before = sorted(tmp_path.rglob("*"))
    for out, kind in [(Path("."), "the working folder"), *((tmp_path / of, kinds[of]) for of in kinds)]:
        said = pack(table, out, "--force", code=2).err
        assert f"is {kind}, which cannot" in said
        assert "give a folder inside it" in said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("writer", ["write_shard", "write_whole", "write_json"])
def test_packing_goes_on_after_a_full_disk(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    pack(table, tmp_path / "whole", per_shard=3)
    write, calls = getattr(packing, writer), []

    def full(*of: object) -> object:
        calls.append(of)
        if writer == "write_json" or len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*of)

    with monkeypatch.context() as patch:
        patch.setattr(packing, writer, full)
        said = pack(table, tmp_path / "out", per_shard=3, code=1).err
    assert "cannot be written: No space left" in said
    assert not (tmp_path / "out").exists()
    assert contents(tmp_path / ".out.partial")
    pack(table, tmp_path / "out", per_shard=3)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_packing_ordering_and_counting_tokens_import_no_torch() -> None:
    modules = "trainer.cli.pack, trainer.config, trainer.data.order, trainer.model.light_tokenizer"
    count = "trainer.model.light_tokenizer.lengths_for(trainer.config.Model(name='ViT-B-32'), ['a dog'])"
    program = f"import sys, {modules}; assert {count}.tokens == [4]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# `clipship data`: statistics that are those of the shards, and a sheet that shows each picture.

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
