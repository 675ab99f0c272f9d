"""Users of open_clip, img2dataset and others bring tables, keys and weights: taken, or led to ours."""

import csv
import io
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from tests.support.jobs import tiny_job
from trainer.cli.init import command as init
from trainer.cli.render import command as render
from trainer.config import Data
from trainer.config.caption_key import column_path, path_text
from trainer.config.loader import load_job
from trainer.data.check import check_data
from trainer.data.source import open_source
from trainer.errors import InputError
from trainer.from_open_clip.job_file import job_file
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
    arguments = [str(folder / "job.toml"), "--preset", "gpu", "--data", str(folder / data), *options]
    done = CliRunner().invoke(init, arguments)
    assert done.exception is None, done.exception
    return tomllib.loads((folder / "job.toml").read_text()), done.stderr


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


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("timeouts.nccl_timeout", "[timeouts]"),
        ("optim.learning_rate", "optim.lr"),
        ("optim.wd", "optim.weight_decay"),
        ("optim.accum_freq", "optim.max_batch_size_per_gpu"),
        ("data.val_data", "eval.retrieval"),
    ],
)
def test_keys_that_others_have_lead_to_ours(tmp_path: Path, key: str, wanted: str) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    with pytest.raises(InputError) as refused:
        load_job(tmp_path / "job.toml", [f"{key}=1"])
    assert f"unknown key; here it is {wanted}" in str(refused.value)


def test_a_command_line_with_an_unknown_model_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown model 'ViT-B-23'; did you mean .*ViT-B-32"):
        job_file(["--train-data", "a.tar", "--train-num-samples", "10", "--model", "ViT-B-23"])


@pytest.mark.parametrize("name", ["module", "model", "model_state_dict"])
def test_weights_below_another_name_are_named(tmp_path: Path, name: str) -> None:
    torch.save({"epoch": 1, name: untrained(tiny_job()).model.state_dict()}, tmp_path / "w.pt")
    with pytest.raises(InputError, match=f"'{name}' in it does: save that part"):
        untrained(tiny_job(model={"pretrained": str(tmp_path / "w.pt")}))


@pytest.mark.parametrize("key", ["pretrained", "init"])
def test_weights_with_nan_are_named(tmp_path: Path, key: str) -> None:
    state = untrained(tiny_job()).model.state_dict()
    state["visual.proj"][0, 0] = float("nan")
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(
        InputError, match=r"the weights in .*w\.pt hold NaN or infinity in 1 tensor: visual\.proj"
    ):
        untrained(tiny_job(model={key: str(tmp_path / "w.pt")}))


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
    assert path == ("meta.caption", 0, "a")
    assert path_text(path) == '"meta.caption"[0].a'


def test_a_text_for_a_cluster_without_its_sections_says_what_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    done = CliRunner().invoke(render, ["slurm", str(tmp_path / "job.toml")])
    assert "neither [slurm] nor [resources], so this asks for 1 node with 1 GPU" in done.stderr
    (tmp_path / "job.toml").write_text(f"{JOB}[resources]\ngpus_per_node = 1\n[slurm]\n")
    assert "neither" not in CliRunner().invoke(render, ["slurm", str(tmp_path / "job.toml")]).stderr


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


def test_several_tables_of_open_clip_keep_their_columns(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    for number in range(2):
        rows = "".join(f"a.png\tcaption {row}\n" for row in range(30))
        (tmp_path / f"birds-{number}.csv").write_text(f"filepath\ttitle\n{rows}")
    job, said = init_at(tmp_path, "birds-*.csv")
    assert "1 file of 2 are held out, 50% of the samples" in said
    assert (job["data"]["image_column"], job["data"]["caption_column"]) == ("filepath", "title")
    assert check_data(load_job(tmp_path / "job.toml").data) == 30
