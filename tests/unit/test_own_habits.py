"""Users of open_clip, img2dataset and others bring tables, keys and weights: taken, or led to ours."""

import csv
import io
import re
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.command_line import clipship, render
from tests.support.jobs import tiny_job
from trainer.config import Data
from trainer.config.caption_key import column_path, path_text
from trainer.config.loader import load_job
from trainer.data.check import check_data
from trainer.data.source import open_source
from trainer.errors import InputError
from trainer.model.build import untrained

JOB = 'name = "a"\n[data]\nformat = "synthetic"\n[optim]\nglobal_batch_size = 8\nsteps = 1\n'


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


def test_a_folder_of_img2datasets_parquet_is_taken(tmp_path: Path) -> None:
    for number in range(4):
        parquet(tmp_path / "w" / f"{number:05d}.parquet", 30)
    job, said = init_at(tmp_path, "w")
    assert job["data"]["image_column"] == "jpg"
    assert job["name"] != "w"
    assert "1 file of 4 are held out, 25% of the samples" in said
    data = load_job(tmp_path / "job.toml").data
    assert check_data(data) == 90
    assert open_source(data).read(0).captions == ("caption 0",)


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
    for name in ("module", "model", "model_state_dict"):
        torch.save({"epoch": 1, name: state}, path)
        with pytest.raises(InputError, match=f"'{name}' in it does: save that part"):
            untrained(tiny_job(model={"pretrained": str(path)}))
    state["visual.proj"][0, 0] = float("nan")
    torch.save(state, path)
    for key in ("pretrained", "init"):
        with pytest.raises(
            InputError, match=r"the weights in .*w\.pt hold NaN or infinity in 1 tensor: visual\.proj"
        ):
            untrained(tiny_job(model={key: str(path)}))


def test_weights_are_found_however_the_system_writes_their_accents(tmp_path: Path) -> None:
    name = "caf\u00e9.pt"
    torch.save(untrained(tiny_job()).model.state_dict(), tmp_path / unicodedata.normalize("NFD", name))
    clip = untrained(tiny_job(model={"pretrained": str(tmp_path / unicodedata.normalize("NFC", name))}))
    assert clip.model is not None


def test_a_column_with_a_dot_in_its_name_can_be_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", 2, **{"meta.caption": ["one", "two"]})
    data = Data(train=(str(tmp_path / "a.parquet"),), image_column="jpg", caption_column=('"meta.caption"',))
    assert open_source(data).read(1).captions == ("two",)
    path = column_path("data.caption_column", '"meta.caption"[0].a')
    assert (path, path_text(path)) == (("meta.caption", 0, "a"), '"meta.caption"[0].a')


def test_a_text_for_a_cluster_without_its_sections_says_what_it_asks_for() -> None:
    job = tomllib.loads(JOB)
    asks = "neither [slurm] nor [resources], so this asks for 1 node with 1 GPU"
    assert asks in render("slurm", job).err
    assert "neither" not in render("slurm", {**job, "resources": {"gpus_per_node": 1}, "slurm": {}}).err


@pytest.mark.parametrize(("ending", "separator"), [("csv", "\t"), ("parquet", None)])
def test_a_table_with_other_columns_is_met_with_their_names(
    tmp_path: Path, ending: str, separator: str | None
) -> None:
    path = tmp_path / f"a.{ending}"
    if ending == "csv":
        path.write_text("filepath\ttitle\na.png\ta cat\n")
    else:
        parquet(path, 2)
    with pytest.raises(InputError, match=r"column 'image'; did you mean '(filepath|jpg)'\?"):
        check_data(Data(train=(str(path),), separator=separator))
