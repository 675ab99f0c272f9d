"""Tables of images and captions: what is read, what is refused."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.support.processes import ended_on_failure
from tests.support.range_server import serving
from trainer.config import Data
from trainer.data.check import check_data
from trainer.data.pack import Recipe, pack
from trainer.data.sample import BadSample
from trainer.data.source import open_images, open_source
from trainer.data.tables import Table, TableColumns, TableSource, list_rows, missing_images, read_table
from trainer.errors import InputError


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def read(path: Path, separator: str | None = None) -> Table:
    return read_table(path, TableColumns(separator=separator))


def refusal(path: Path, separator: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        read(path, separator)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_text_behind_the_last_column_is_named_and_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('image,caption\na.jpg,a dog, running\nb.jpg,a cat,\nc.jpg,"one, two"\nd.jpg,x,y,z\n')
    with pytest.raises(
        InputError, match=r"t\.csv: more cells than the 2 columns .* in rows 2, 5: put a cell"
    ):
        read_table(path, TableColumns())


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
        packed = pack(path, tmp_path / "out", data=data, recipe=Recipe(skip_bad=True))
        assert [origin for origin, _ in packed.bad] == [f"{path}: row 4"]


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
    assert "the header names 'caption' more than once" in refusal(path)
    other = TableColumns(captions=("image",))
    assert read_table(path, other).captions == (("a.png",),), "a column that nobody reads may be there twice"
    with pytest.raises(InputError, match="names 'caption', 'x' more than once"):
        read_table(path, other, keep_others=True)


def test_quotes_are_text_where_the_job_says_so(tmp_path: Path) -> None:
    text = 'image\tcaption\na.png\t"Sunset" by Monet\nb.png\t"no end\nc.png\t5" disk\nd.png\t"x"\n'
    path = write(tmp_path / "t.tsv", text)
    assert 'set data.quotes = "text" in a job, --quotes text in a command' in refusal(path)
    columns = TableColumns.by(Data(train=(str(path),), quotes="text"))
    assert read_table(path, columns).captions[0] == ('"Sunset" by Monet', '"no end', '5" disk', '"x"')


def test_a_quote_that_swallows_rows_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", 'image,caption\na.png,x\nb.png,"not closed\nc.png,lost\nd.png,end"\n')
    assert "a cell holds lines that look like rows in row 3: its first quote is not closed" in refusal(path)
    poem = write(tmp_path / "p.csv", 'image,caption\na.png,"roses, red\nviolets, blue"\n')
    assert read(poem).captions == (("roses, red violets, blue",),)


@pytest.mark.parametrize("line", ["see b.jpg, the second", "b.jpg, the second"])
def test_a_caption_of_two_lines_that_names_an_image_is_no_swallowed_row(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "t.csv", f'image,caption\na.jpg,"a poster:\n{line}"\nc.jpg,x\n')
    assert read(path).captions == ((f"a poster: {line}", "x"),)
    (tmp_path / "b.jpg").write_bytes(b"b")
    if not line.startswith("see"):
        assert "lines that look like rows in row 2" in refusal(path), "the image of the line is there"


def test_columns_are_found_by_name_and_images_beside_the_table(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    table = write(tmp_path / "t.csv", f'id,caption, image \n1,"one, two",a.png\n2,other,{tmp_path}/a.png\n')
    source = open_source(Data(train=(str(table),)))
    assert [(s.key, s.image, s.captions, s.origin) for s in map(source.read, range(2))] == [
        ("a.png", b"pixels", ("one, two",), f"{table}: row 2"),
        (f"{tmp_path}/a.png", b"pixels", ("other",), f"{table}: row 3"),
    ]


@pytest.mark.parametrize(
    ("name", "separator", "between"),
    [("t.tsv", None, "\t"), ("t.csv", None, ","), ("t.txt", None, ","), ("t.csv", ";", ";")],
)
def test_the_separator_follows_from_the_job_or_the_ending(
    tmp_path: Path, name: str, separator: str | None, between: str
) -> None:
    table = read(write(tmp_path / name, f"image{between}caption\na.png{between}hello\n"), separator)
    assert (table.images, table.captions) == (("a.png",), (("hello",),))


def test_tables_of_spreadsheets_are_read(tmp_path: Path) -> None:
    table = read(
        write(
            tmp_path / "t.csv", 'image,caption\r\na.png,"two\r\nlines"\r\n\r\n,\r\nb.png,x\r\n', "utf-8-sig"
        )
    )
    assert (table.images, table.captions, table.rows) == (("a.png", "b.png"), (("two lines", "x"),), (2, 5))


def test_several_tables_are_several_shards(tmp_path: Path) -> None:
    tables = [Table(tmp_path / f"{n}.csv", ("i",) * n, (("c",) * n,), tuple(range(2, n + 2))) for n in (2, 3)]
    assert TableSource(tables).shard_sizes() == [2, 3]


def test_a_missing_column_lists_those_there_and_the_nearest(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "t.csv", "image,captions,url\na,b,c\n"))
    assert "no caption column 'caption'; did you mean 'captions'?" in message
    assert "'image', 'captions', 'url'" in message
    both = refusal(write(tmp_path / "t.csv", "file,title\na,b\n"))
    assert (
        "there is no image column 'image'. There is no caption column 'caption'; did you mean 'title'?"
        in both
    )


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
    assert problem in refusal(path)


def test_a_table_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "gone.csv")
    assert "Is a directory" in refusal(tmp_path)


def test_the_row_of_bytes_that_are_no_text_is_found_far_down_too(tmp_path: Path) -> None:
    """Decoding runs ahead of the rows by thousands of bytes."""
    rows = b"".join(b"%d.png,caption\n" % row for row in range(2, 5000))
    (tmp_path / "t.csv").write_bytes(b"image,caption\n" + rows + b"5000.png,caf\xe9\n" + rows)
    assert "row 5000 is not UTF-8 text" in refusal(tmp_path / "t.csv")


def test_a_fifo_without_a_writer_and_a_device_end_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    assert "the file is empty" in refusal(tmp_path / "t.csv")
    assert "is a device, not a file" in refusal(Path("/dev/zero"))


def test_a_table_may_come_through_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    writer = ["sh", "-c", f"exec >'{tmp_path}/t.csv'; sleep 1; printf 'image,caption\\na.png,x\\n'"]
    with ended_on_failure(subprocess.Popen(writer)):
        file = os.open(tmp_path / "t.csv", os.O_RDONLY)  # until the writer is there
        table = read(tmp_path / "t.csv")
        os.close(file)
    assert table.images == ("a.png",)


def test_missing_images_are_found_by_row_and_named_when_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    long = "n" * 300
    table = read(write(tmp_path / "t.csv", f"image,caption\na.png,x\ngone.png,y\n{long}.png,z\n"))
    assert missing_images(table) == [3, 4]
    with pytest.raises(
        InputError, match=r"t\.csv: row 3: image .*gone\.png: cannot be read after .*: No such file"
    ):
        TableSource([table]).read(1)


def test_long_lists_of_rows_are_cut() -> None:
    assert list_rows([7]) == "row 7"
    assert list_rows(range(2, 30)) == "rows 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 18 more"


def test_every_problem_of_the_rows_is_told_at_once(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", "image,caption\nno.png,a\n,b\nt.csv,\n")
    with pytest.raises(InputError) as refused:
        check_data(Data(train=(str(tmp_path / "t.csv"),)))
    message = str(refused.value)
    assert "1 of 1 image files of column 'image' are missing: row 2" in message
    with pytest.raises(InputError) as refused:
        check_data(Data(train=(str(tmp_path / "t.csv"),), on_bad_sample="fail"))
    message = str(refused.value)
    assert 'bad samples: 2 of 3 (1 no image, 1 bad captions); data.on_bad_sample = "fail"' in message
    assert "row 3: sample (no image): column 'image' is empty" in message
    assert "row 4: sample t.csv: captions are empty" in message


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
            with pytest.raises(InputError, match=r"bad samples: 2 of 4 \(1 bad captions, 1 no image\)"):
                opens(data.model_copy(update=refuses))
