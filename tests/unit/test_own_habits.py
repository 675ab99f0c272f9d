"""Users of open_clip, img2dataset and others bring tables, keys and weights: taken, or led to ours."""

import csv
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from trainer.config.loader import load_job
from trainer.data.check import check_data
from trainer.data.source import open_source
from trainer.errors import InputError
from trainer.model.build import untrained


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
