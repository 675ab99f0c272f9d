"""Packing: tables and the demo's digits become shards, whole or not at all."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow
import pytest
import webdataset
from click.testing import CliRunner
from PIL import Image
from pyarrow import parquet

from tests.support.pictures import picture
from trainer.cli.pack import command
from trainer.config import Data, Eval
from trainer.data import pack as packing
from trainer.data import pack_rows, store
from trainer.data.index import FOLDER, stale
from trainer.data.pack import BAD_ROWS, Recipe, pack
from trainer.data.source import IMAGE_ENDINGS, open_labelled, open_source
from trainer.data.tar import Selection
from trainer.demo.data import CLASS_NAMES, TEMPLATES, pack_digits
from trainer.errors import InputError, StorageError
from trainer.safe_io.folders import whole_folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Seven rows of tiny pictures, one of them twice."""
    for n in range(6):
        Image.new("RGB", (2, 2), (n, 0, 0)).save(tmp_path / f"{n}.{'JPG' if n == 3 else 'png'}")
    rows = [f"{n}.{'JPG' if n == 3 else 'png'},caption {n}" for n in range(6)] + ['0.png,"two\nlines"']
    (tmp_path / "t.csv").write_text("image,caption\n" + "\n".join(rows) + "\n")
    return tmp_path / "t.csv"


def test_packed_rows_are_the_rows_of_the_table(table: Path, tmp_path: Path) -> None:
    shards = pack(table, tmp_path / "out", samples_per_shard=3).shards
    packed, rows = open_source(Data(train=tuple(map(str, shards)))), open_source(Data(train=(str(table),)))
    assert packed.shard_sizes() == [3, 3, 1]
    assert [(s.image, s.captions) for s in map(packed.read, range(7))] == [
        (s.image, s.captions) for s in map(rows.read, range(7))
    ]
    assert packed.read(6).captions == ("two lines",)
    sizes = json.loads((tmp_path / "out/sizes.json").read_text())
    assert sizes == {"shard-000000.tar": 3, "shard-000001.tar": 3, "shard-000002.tar": 1}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset never closes its shard
def test_webdataset_reads_packed_shards(table: Path, tmp_path: Path) -> None:
    (shard,) = pack(table, tmp_path / "out").shards
    samples = list(webdataset.WebDataset(str(shard), shardshuffle=False).decode("rgb8"))
    assert [s["txt"] for s in samples][:2] == ["caption 0", "caption 1"]
    assert samples[3]["jpg"].shape == (2, 2, 3)
    assert samples[1]["png"][0, 0].tolist() == [1, 0, 0]


def test_packing_twice_gives_the_same_bytes(table: Path, tmp_path: Path) -> None:
    one = pack(table, tmp_path / "one", samples_per_shard=2).shards
    two = pack(table, tmp_path / "two", samples_per_shard=2, processes=2).shards
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_rows_without_a_usable_image_are_named_before_anything_is_written(
    table: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.gif").write_bytes(b"gif")
    with table.open("a") as file:
        file.write("gone.png,x\nx.gif,y\n")
    with pytest.raises(InputError) as caught:
        pack(table, tmp_path / "out")
    assert "image file missing in row 9" in str(caught.value)
    assert "none of .jpg, .jpeg, .png, .webp in row 10" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_an_interrupted_replacement_loses_neither_the_old_shards_nor_the_new(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    before = contents(pack(table, out).shards)
    renames: list[Path] = []
    rename = Path.rename

    def once(path: Path, target: Path) -> Path:
        renames.append(path)
        if len([path for path in renames if path.suffix == ".partial"]) == 1 and path.suffix == ".partial":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        pack(table, out, samples_per_shard=3, force=True)
    assert contents(sorted((tmp_path / ".out.former").glob("*.tar"))) == before
    assert len(pack(table, out, samples_per_shard=3, force=True).shards) == 3
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]


def contents(shards: Sequence[Path]) -> list[bytes]:
    return [path.read_bytes() for path in shards]


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    def fill_and_fail() -> None:
        with whole_folder(tmp_path / "out") as folder:
            (folder / "shard").write_bytes(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fill_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(table: Path) -> None:
    with pytest.raises(InputError, match="is a file"):
        pack(table, table)
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        pack(table, table / "below" / "out")


def test_other_columns_become_json_and_parquet_is_read_too(table: Path, tmp_path: Path) -> None:
    more = {"width": [2, None], "tag": ["x,y", "\u00e9"]}
    columns = {"image": ["0.png", "1.png"], "caption": ["a", "b"], **more}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    (shard,) = pack(tmp_path / "t.parquet", tmp_path / "out").shards
    with tarfile.open(shard) as tar:
        names = [f"00000000{n}.{ending}" for n in (0, 1) for ending in ("json", "png", "txt")]
        assert tar.getnames() == names
        kept = [tar.extractfile(name) for name in names if name.endswith("json")]
        columns_kept = [json.loads(file.read()) for file in kept if file is not None]
    assert columns_kept == [{"width": 2, "tag": "x,y"}, {"width": None, "tag": "\u00e9"}]


def test_columns_whose_bytes_json_does_not_have_are_named_and_counted(table: Path, tmp_path: Path) -> None:
    columns = {
        "image": ["0.png", "1.png", "2.png"],
        "caption": ["a", "b", "c"],
        "raw": [b"x", None, b"y"],
        "nested": [None, [{"of": b"x"}], None],
        "width": [1, 2, 3],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    arguments = [str(tmp_path / "t.parquet"), str(tmp_path / "out"), "--samples-per-shard", "1"]
    said = CliRunner().invoke(command, arguments, catch_exceptions=False).stderr
    assert "column 'raw' holds bytes in 2 rows" in said
    assert "column 'nested' holds bytes in 1 row," in said
    assert "width" not in said


def test_images_are_made_smaller_and_bad_rows_left_out_and_listed(table: Path, tmp_path: Path) -> None:
    Image.effect_noise((300, 200), 50).save(tmp_path / "large.png")
    (tmp_path / "broken.jpg").write_bytes(b"not a picture")
    with table.open("a") as file:
        file.write("gone.png,x\nbroken.jpg,y\nlarge.png,z\n")
    packed = pack(table, tmp_path / "out", recipe=Recipe(resize=100, skip_bad=True))
    source = open_source(Data(train=tuple(map(str, packed.shards))))
    assert len(source) == 8
    last = source.read(7)
    assert isinstance(last.image, bytes)
    assert Image.open(io.BytesIO(last.image)).size == (150, 100)
    listed = (tmp_path / "out" / BAD_ROWS).read_text().splitlines()
    assert [line.split("\t")[0].rpartition(" ")[2] for line in listed] == ["9", "10"]
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {"shard-000000.tar": 8}


def test_a_damaged_image_without_leave_to_skip_names_its_row(table: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"not a picture")
    with table.open("a") as file:
        file.write("broken.jpg,y\n")
    with pytest.raises(InputError, match=r"row 9: image .*broken\.jpg cannot be used.*--skip-bad-rows"):
        pack(table, tmp_path / "out", recipe=Recipe(resize=100))
    assert not (tmp_path / "out").exists()


def test_shards_may_be_cut_by_size(table: Path, tmp_path: Path) -> None:
    size = (tmp_path / "0.png").stat().st_size
    packed = pack(table, tmp_path / "out", shard_mb=2.5 * size / 1e6)
    assert all(
        1 <= count <= 2 for count in open_source(Data(train=tuple(map(str, packed.shards)))).shard_sizes()
    )


def test_what_packing_leaves_needs_no_indexing(table: Path, tmp_path: Path) -> None:
    shards = [str(path) for path in pack(table, tmp_path / "out", samples_per_shard=3).shards]
    assert list(stale(shards, Selection(IMAGE_ENDINGS, "txt"), tmp_path / "out" / FOLDER)) == []
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == [FOLDER, *(Path(path).name for path in shards), "sizes.json"]


def test_packing_goes_on_after_a_kill_with_the_same_bytes(table: Path, tmp_path: Path) -> None:
    expected = contents(pack(table, tmp_path / "whole", samples_per_shard=1).shards)
    program = """
import os, signal, sys
from pathlib import Path
from trainer.data import pack as module
made = module._make
def killed(job):
    made(job)
    if job.path.name == "shard-000003.tar":
        os.kill(os.getpid(), signal.SIGKILL)
module._make = killed
module.pack(Path(sys.argv[1]), Path(sys.argv[2]), samples_per_shard=1)
"""
    done = subprocess.run([sys.executable, "-c", program, str(table), str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    kept = tmp_path / ".out.partial" / "shard-000003.tar"
    before = kept.stat().st_mtime_ns
    reported: list[int] = []
    packed = pack(
        table, tmp_path / "out", samples_per_shard=1, progress=lambda rows, of: reported.append(rows)
    )
    assert [path.read_bytes() for path in packed.shards] == expected
    assert reported == [5, 6, 7]
    assert packed.shards[3].stat().st_mtime_ns == before


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place in fsspec's own memory; the folder for what is under way is a folder of the test."""
    monkeypatch.chdir(tmp_path)
    yield f"memory://{tmp_path.name}/shards"
    store.remove(f"memory://{tmp_path.name}")


def at(address: str) -> dict[str, bytes | None]:
    return {name: store.read(f"{address}/{name}") for name in store.names(address)}


def test_shards_go_to_an_address_one_by_one_and_their_sizes_last(
    table: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pack(table, Path("whole"), samples_per_shard=3).shards
    expected = {path.name: path.read_bytes() for path in whole}
    put = store.put

    def gone(source: Path, to: str) -> None:
        if to.endswith("shard-000002.tar"):
            raise StorageError("the store is gone")
        put(source, to)

    with monkeypatch.context() as cut:
        cut.setattr(packing, "put", gone)
        with pytest.raises(StorageError, match="the store is gone"):
            pack(table, address, samples_per_shard=3)
    assert list(at(address)) == ["shard-000000.tar", "shard-000001.tar"]
    assert not list(Path(".shards.partial").glob("shard-00000[01].tar")), "what has gone is not kept twice"
    reported: list[int] = []
    packed = pack(table, address, samples_per_shard=3, progress=lambda rows, of: reported.append(rows))
    assert reported == [7]
    assert [str(path) for path in packed.shards] == list(expected)
    there = at(address)
    assert json.loads(there.pop("sizes.json") or b"") == dict(zip(expected, (3, 3, 1), strict=True))
    assert there == expected
    assert not Path(".shards.partial").exists()


@pytest.mark.parametrize("far", [False, True])
def test_an_empty_folder_is_filled_and_in_another_only_packed_shards_are_replaced(
    table: Path, tmp_path: Path, address: str, far: bool
) -> None:
    out = address if far else tmp_path / "out"
    (tmp_path / "out").mkdir()
    pack(table, out, samples_per_shard=3)
    with pytest.raises(InputError, match=r"the folder is not empty .*--force"):
        pack(table, out)
    pack(table, out, force=True)
    assert set(store.names(str(out))) - {FOLDER} == {"shard-000000.tar", "sizes.json"}
    store.put(b"years of work", f"{out}/thesis.tex")
    with pytest.raises(InputError, match=r"holds thesis\.tex.*only packed shards can be replaced"):
        pack(table, out, force=True)
    assert store.read(f"{out}/thesis.tex") == b"years of work"


def test_what_is_at_an_address_stays_if_no_row_can_be_packed(table: Path, address: str) -> None:
    pack(table, address, samples_per_shard=3)
    before, whole = at(address), (table.parent / "0.png").read_bytes()
    for each in table.parent.glob("[0-5].*"):
        each.write_bytes(b"no picture")
    with pytest.raises(InputError, match="none of the table's 7 rows can be packed"):
        pack(table, address, samples_per_shard=3, recipe=Recipe(skip_bad=True), force=True)
    assert at(address) == before
    (table.parent / "0.png").write_bytes(whole)
    pack(table, address, samples_per_shard=3, recipe=Recipe(skip_bad=True), force=True)
    there = at(address)
    assert list(json.loads(there["sizes.json"] or b"").values()) == [1, 0, 1]
    assert list(there) == ["bad-rows.tsv", *before]


@pytest.mark.parametrize("far", [False, True])
def test_the_command_prints_what_a_job_file_takes(
    table: Path, tmp_path: Path, address: str, far: bool
) -> None:
    out = address if far else f"{tmp_path}/out"
    arguments = [str(table), f"{out}/", "--samples-per-shard", "3", "--processes", "1"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == f"{out}/shard-{{000000..000002}}.tar\n"
    assert len(open_source(Data(train=(result.stdout.strip(),)))) == 7


@pytest.mark.parametrize("name", ["a{1..2}", "a[1]", "a*", "a,b"])
@pytest.mark.parametrize("rows", ["3", "7"])
def test_the_pattern_that_the_command_prints_names_the_shards_in_any_folder(
    table: Path, tmp_path: Path, address: str, name: str, rows: str
) -> None:
    for out in (f"{tmp_path}/{name}", f"{address}/{name}"):
        arguments = [str(table), out, "--samples-per-shard", rows, "--processes", "1"]
        result = CliRunner().invoke(command, arguments, catch_exceptions=False)
        assert len(open_source(Data(train=(result.stdout.strip(),)))) == 7


def test_the_command_imports_no_torch() -> None:
    program = "import sys, trainer.cli.pack, trainer.data.pack; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_demo_holds_out_a_fifth_of_each_digit(tmp_path: Path) -> None:
    digits = pack_digits(tmp_path / "digits")
    train, held_out = open_source(Data(train=(digits.train,))), open_source(Data(train=(digits.held_out,)))
    assert len(train) + len(held_out) == 1797
    keys = [{source.read(n).key for n in range(len(source))} for source in (train, held_out)]
    assert not keys[0] & keys[1]
    labelled = open_labelled(Eval(zero_shot=(digits.held_out,), class_names=CLASS_NAMES, templates=TEMPLATES))
    labels = [labelled.read(n).label for n in range(len(labelled))]
    assert len(labels) == len(held_out)
    assert all(34 <= labels.count(digit) <= 37 for digit in range(10))
    first = train.read(0)
    assert first.captions[0] == "a handwritten zero"
    assert len(first.captions) == len(TEMPLATES) == 5


def test_the_demo_is_packed_once(tmp_path: Path) -> None:
    pack_digits(tmp_path / "digits")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "digits").rglob("*")}
    pack_digits(tmp_path / "digits")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "digits").rglob("*")} == before


def test_a_fifo_among_the_images_is_a_bad_row_and_holds_nobody_up(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    table = tmp_path / "t.csv"
    table.write_text("image,caption\na.png,x\nb.png,y\n")
    with pytest.raises(InputError, match="image file missing in row 3"):
        pack(table, tmp_path / "shards")
    packed = pack(table, tmp_path / "shards", recipe=Recipe(skip_bad=True))
    assert packed.bad == [(f"{table}: row 3", "its image is a FIFO, not a file")]
    os.mkfifo(tmp_path / "fifo.csv")
    with pytest.raises(InputError, match="the file is empty"):
        pack(tmp_path / "fifo.csv", tmp_path / "more")


def test_rows_without_an_image_or_a_caption_are_left_out_where_bad_rows_are(
    table: Path, tmp_path: Path
) -> None:
    table.write_text("image,caption\n0.png,one\n1.png,\n,two\n2.png,three\n")
    with pytest.raises(
        InputError, match=r"column 'image' is empty in row 4.*\n.*'caption' is empty in row 3"
    ):
        pack(table, tmp_path / "out")
    packed = pack(table, tmp_path / "out", recipe=Recipe(skip_bad=True))
    assert packed.bad == [
        (f"{table}: row 3", "captions are empty"),
        (f"{table}: row 4", "its image is empty"),
    ]
    assert len(open_source(Data(train=tuple(map(str, packed.shards))))) == 2


def test_a_caption_that_is_no_text_is_named_as_what_it_is(tmp_path: Path) -> None:
    cells = {"image": [picture(0)] * 3, "caption": [{"en": "a"}, None, {"en": None}]}
    parquet.write_table(pyarrow.table(cells), tmp_path / "t.parquet")
    data = Data(train=("t.parquet",), caption_column=("caption.en",))
    packed = pack(tmp_path / "t.parquet", tmp_path / "out", recipe=Recipe(skip_bad=True), data=data)
    assert [why for _, why in packed.bad] == [
        "it has null at caption, not an object with the field en",
        "captions are empty",
    ]


def test_shards_are_not_replaced_by_none_where_every_row_is_bad(table: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", Recipe(skip_bad=True)
    before = contents(pack(table, out).shards)
    (tmp_path / "moved").mkdir()
    moved = table.rename(tmp_path / "moved" / "t.csv")
    with pytest.raises(InputError, match=r"row 2: .*0\.png: .*; none of the table's 7 rows can"):
        pack(moved, out, recipe=recipe, force=True)
    assert contents(sorted(out.glob("*.tar"))) == before
    Image.new("RGB", (2, 2)).save(tmp_path / "moved" / "5.png")
    assert len(pack(moved, out, recipe=recipe, force=True).bad) == 6


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_table_without_rows_replaces_nothing(table: Path, address: str, skip_bad: bool) -> None:
    pack(table, address)
    before = at(address)
    table.write_text("image,caption\n")
    empty = Path("t.parquet")
    parquet.write_table(pyarrow.table({"image": pyarrow.array([], "string"), "caption": []}), empty)
    for without in (table, empty):
        with pytest.raises(InputError, match="the table has no rows"):
            pack(without, address, recipe=Recipe(skip_bad=skip_bad), force=True)
    assert at(address) == before


def interrupt(table: Path, out: Path) -> None:
    """Packs a shard for each row, and is interrupted after the second."""

    def stop(rows: int, _of: int) -> None:
        if rows == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(table, out, samples_per_shard=1, progress=stop)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_shards_of_another_table_with_the_same_text_are_not_kept(tmp_path: Path, name: str) -> None:
    for folder, shade in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        for n in range(3):
            Image.new("RGB", (2, 2), (shade, n, 0)).save(tmp_path / folder / f"{n}.png")
    columns = {"image": [f"{n}.png" for n in range(3)], "caption": list("xyz")}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a" / "t.parquet")
    (tmp_path / "a" / "t.csv").write_text("image,caption\n0.png,x\n1.png,y\n2.png,z\n")
    shutil.copy2(tmp_path / "a" / name, tmp_path / "b" / name)
    interrupt(tmp_path / "a" / name, tmp_path / "out")
    packed = pack(tmp_path / "b" / name, tmp_path / "out", samples_per_shard=1)
    whole = pack(tmp_path / "b" / name, tmp_path / "whole", samples_per_shard=1)
    assert contents(packed.shards) == contents(whole.shards)


def test_shards_of_images_that_have_changed_are_not_kept(table: Path, tmp_path: Path) -> None:
    interrupt(table, tmp_path / "out")
    Image.new("RGB", (9, 9), "blue").save(tmp_path / "0.png")
    packed = pack(table, tmp_path / "out", samples_per_shard=1)
    image = open_source(Data(train=tuple(map(str, packed.shards)))).read(0).image
    assert image == (tmp_path / "0.png").read_bytes()


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
        with pytest.raises(InputError, match=f"is {kind}, which cannot .* give a folder inside it"):
            pack(table, out, force=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("size", ["inf", "nan"])
def test_a_size_that_is_no_finite_number_is_refused(size: str) -> None:
    ended = CliRunner().invoke(command, ["t.csv", "out", "--shard-mb", size])
    assert (ended.exit_code, f"{size} is no finite number" in ended.output) == (2, True)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_cutting_by_size_is_refused_for_images_at_addresses(tmp_path: Path, name: str) -> None:
    url = "https://images.example/1.jpg"
    (tmp_path / "t.csv").write_text(f"image,caption\n{url},x\n")
    parquet.write_table(pyarrow.table({"image": [url], "caption": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"row [12]: --shard-mb .* address: give --samples-per-shard"):
        pack(tmp_path / name, tmp_path / "out", shard_mb=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.parquet"]


def test_the_longest_name_that_can_be_begun_can_also_be_replaced(table: Path, tmp_path: Path) -> None:
    longest = "x" * (255 - len("..partial"))
    for force in (False, True):
        pack(table, tmp_path / longest, force=force)
    with pytest.raises(InputError, match="cannot be written: File name too long"):
        pack(table, tmp_path / f"{longest}x")


@pytest.mark.parametrize("writer", ["write_shard", "write_whole", "write_json"])
def test_packing_goes_on_after_a_full_disk(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    expected = contents(pack(table, tmp_path / "whole", samples_per_shard=3).shards)
    write, calls = getattr(packing, writer), []

    def full(*of: object) -> object:
        calls.append(of)
        if writer == "write_json" or len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*of)

    with monkeypatch.context() as patch:
        patch.setattr(packing, writer, full)
        with pytest.raises(StorageError, match=r"out.*: cannot be written: No space left .* goes on when"):
            pack(table, tmp_path / "out", samples_per_shard=3)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / ".out.partial").glob("*.tar"))
    assert contents(pack(table, tmp_path / "out", samples_per_shard=3).shards) == expected


def test_a_folder_that_cannot_be_put_in_place_is_named(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path), None, str(target))

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(StorageError, match=r"\.out\.partial: cannot be written: Device or resource busy"):
        pack(table, tmp_path / "out")


def test_a_table_that_can_no_longer_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_of: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    parquet.write_table(pyarrow.table({"image": [b"x"], "caption": ["x"]}), tmp_path / "t.parquet")
    monkeypatch.setattr(pack_rows, "cells_of", lost)
    with pytest.raises(StorageError, match=r"t\.parquet: cannot be read: Input/output error"):
        pack(tmp_path / "t.parquet", tmp_path / "out")
