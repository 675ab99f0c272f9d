"""Words that stand for a missing caption: left out, counted and named in every format."""

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from tests.support.jobs import tiny_job
from trainer.cli.data import command as data_command
from trainer.cli.pack import command as pack
from trainer.config import Data
from trainer.data.bad_samples import ANY
from trainer.data.captions import CaptionReader
from trainer.data.sample import BadSample
from trainer.data.source import open_source
from trainer.plan.first_samples import FirstSamples

CAPTIONS = ["a red cat", "nan", "two dogs", "None", "null", "a house", "Nan bread", "a red cat"]


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()


def shard(path: Path, captions: list[str] = CAPTIONS) -> str:
    with tarfile.open(path, "w") as tar:
        for number, caption in enumerate(captions):
            for ending, content in (("png", picture()), ("txt", caption.encode())):
                info = tarfile.TarInfo(f"{number:03d}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return str(path)


def table(path: Path) -> str:
    (path.parent / "a.png").write_bytes(picture())
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *(("a.png", each) for each in CAPTIONS)])
    return str(path)


def parquet(path: Path) -> str:
    import pyarrow
    from pyarrow.parquet import write_table

    rows = {"image": [picture()] * len(CAPTIONS), "caption": CAPTIONS}
    write_table(pyarrow.table(rows), path)
    return str(path)


@pytest.mark.parametrize(("make", "ending"), [(shard, "tar"), (table, "csv"), (parquet, "parquet")])
def test_words_that_stand_for_no_caption_are_left_out_counted_and_named(
    tmp_path: Path, make: Any, ending: str
) -> None:
    file = make(tmp_path / f"a.{ending}")
    source = open_source(Data(train=(file,), index=str(tmp_path / "index")), allowed=ANY)
    used = list[str]()
    causes = [sample.cause for sample in source.left_out.named]
    for number in range(len(source)):
        try:
            used += source.read(number).captions
        except BadSample as problem:
            causes.append(problem.cause)
    assert used == ["a red cat", "two dogs", "a house", "Nan bread", "a red cat"]
    assert sorted(causes) == ["caption 'None'", "caption 'nan'", "caption 'null'"]
    found = json.loads(CliRunner().invoke(data_command, ["stats", file]).stdout)
    assert {**found["bad"], **found["not_usable"]} == dict.fromkeys(causes, 1)
    assert found["equal_captions"] == 2
    all_of_them = CliRunner().invoke(data_command, ["stats", file, "--empty-captions", "-"]).stdout
    assert json.loads(all_of_them)["bad"] == {}


@pytest.mark.parametrize(("make", "ending"), [(shard, "tar"), (table, "csv"), (parquet, "parquet")])
def test_check_names_the_words_and_the_share_of_equal_captions(
    tmp_path: Path, make: Any, ending: str
) -> None:
    data = {"train": (make(tmp_path / f"a.{ending}"),), "format": "auto"}
    job = tiny_job(data=data, optim={"global_batch_size": 4})
    said = "\n".join(FirstSamples(job).warnings())
    assert "3 of its first 8 captions stand for none ('nan', 'None', 'null')" in said
    assert "about 23% of a batch's samples have the caption of another one" in said
    assert 'optim.positives = "captions"' in said
    job = tiny_job(data=data, optim={"global_batch_size": 4, "positives": "captions"})
    assert "caption of another one" not in "\n".join(FirstSamples(job).warnings())


def test_one_of_several_captions_and_a_field_of_a_template_may_stand_for_none() -> None:
    reader = CaptionReader.by(Data(train=("a.tar",), caption_key=("json:a", "json:b")))
    assert reader(json.dumps({"a": "nan", "b": "a dog"}).encode()) == (("a dog",), (0, 1))
    reader = CaptionReader.by(Data(train=("a.tar",), caption_key=("json",), caption_template=("{a}. {b}",)))
    with pytest.raises(ValueError, match="empty"):
        reader(json.dumps({"a": "nan", "b": "a dog"}).encode())


def test_pack_refuses_rows_whose_caption_stands_for_none(tmp_path: Path) -> None:
    arguments = [table(tmp_path / "a.csv"), str(tmp_path / "out")]
    refused = CliRunner().invoke(pack, arguments)
    assert "caption 'nan' stands for none (data.empty_captions)" in str(refused.exception)
    done = CliRunner().invoke(pack, [*arguments, "--skip-bad-rows"])
    assert done.exception is None, done.exception
    assert (tmp_path / "out" / "bad-rows.tsv").read_text().count("stands for none") == 3
