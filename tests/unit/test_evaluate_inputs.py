"""Inputs of `clipship eval` and `[eval]`: checkpoints of all kinds, folders of classes, and tables."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.check import problems
from tests.support.command_line import clipship
from tests.support.jobs import VIT, tiny_job
from tests.support.steps import built, untrained
from trainer.checkpoint import files
from trainer.cli.main import main
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.data.source import open_images, open_labelled
from trainer.errors import InputError
from trainer.evaluate.inputs import class_names
from trainer.evaluate.rank import evaluate
from trainer.model.teacher import build_teacher
from trainer.plan.trained import evaluation_job


def evaluation(**keys: Any) -> Any:
    return tiny_job(eval=keys).eval


def table(**keys: Any) -> Any:
    return tiny_job(data={"format": "auto", **keys}).data


Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A run folder with two checkpoints, whose logit scale is their step; its job evaluates on shards."""
    shards, tables = ("held-out/*.tar",), ("one.csv", "other.csv")
    job = tiny_job(
        eval={"zero_shot": shards, "class_names": ("a", "b"), "batch_size": 7, "every_steps": 2},
        checkpoint={"best": "zero_shot_top1"},
        data={"train": tables, "format": "table", "weights": (1.0, 0.5), "image_column": "file"},
        comm={"backend": "horovod"},
    )
    state = untrained(job).model.state_dict()
    for step in (9, 10):
        place = tmp_path / "runs" / "x" / "checkpoints" / f"step-{step:08d}"
        place.mkdir(parents=True)
        torch.save({**state, "logit_scale": torch.tensor(float(step))}, place / "model.pt")
        content = (place / "model.pt").read_bytes()
        seal = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (place / "manifest.json").write_text(
            json.dumps({"step": step, "files": {"model.pt": seal}, "job": job.model_dump(mode="json")})
        )
    return tmp_path / "runs" / "x"


def exported(path: Path, out: Path) -> int:
    """The step of the weights that `clipship export` finds there."""
    shutil.rmtree(out, ignore_errors=True)
    assert main(["export", str(path), str(out), "--to", "safetensors"]) == 0
    return int(load_file(out / "model.safetensors")["logit_scale"])


def begun(**model: str) -> int:
    """The step of the weights with which a model begins."""
    scale: Any = untrained(tiny_job(model=model)).model.logit_scale
    return int(scale)


@pytest.mark.parametrize("links", [False, True])
def test_weights_are_found_from_every_path_that_belongs_to_a_run(
    ours: Path, tmp_path: Path, links: bool, alone: Comm
) -> None:
    """A run stands for its newest checkpoint, and best for its best. Its files may be links."""
    out = tmp_path / "out"
    clipship("export", ours / "best", out, "--to", "safetensors", code=2)
    assert problems(tiny_job(model={"init": str(ours / "best")}))
    files.record_best(ours / "checkpoints", 9, "zero_shot_top1", 0.5)
    if links:  # as caches of Hugging Face's, git-annex and DVC have them
        blobs = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
        for number, path in enumerate(blobs):
            path.rename(tmp_path / f"blob-{number}")
            path.symlink_to(tmp_path / f"blob-{number}")
    folder = "checkpoints/step-00000009"
    for given, step in (("", 10), ("best", 9), ("checkpoints", 10), (folder, 9), (f"{folder}/model.pt", 9)):
        assert exported(ours / given, out) == step
        assert f"| steps | {step} |" in (out / "README.md").read_text()
        if given != "checkpoints":
            for key in ("init", "pretrained"):
                assert begun(**{key: str(ours / given)}) == step
                assert problems(tiny_job(model={key: str(ours / given)})) == ""
    newest = ours / "checkpoints/step-00000010"
    assert files.verify(newest)["step"] == 10
    assert evaluate(with_weights(newest / "model.pt"), alone) == {}
    said = problems(tiny_job(model={"pretrained": str(ours / "checkpoints")}))
    assert "checkpoints is a folder without manifest.json: give a checkpoint" in said


def test_a_teacher_is_a_checkpoint_and_no_run_that_goes_on(ours: Path, alone: Comm) -> None:
    files.record_best(ours / "checkpoints", 9, "zero_shot_top1", 0.5)
    for given, step in (("", 10), ("best", 9)):
        job = tiny_job(model={"teacher": VIT, "teacher_pretrained": str(ours / given)})
        assert f"step-{step:08d}" in problems(job).partition("every start: name a checkpoint, such as ")[2]
        with pytest.raises(InputError, match=r"model\.teacher_pretrained: "):
            build_teacher(job, plan(job, 1), alone, untrained(tiny_job()))
    checkpoint = str(ours / "checkpoints" / "step-00000010")
    assert problems(tiny_job(model={"teacher": VIT, "teacher_pretrained": checkpoint})) == ""


def test_a_checkpoint_of_ours_is_evaluated_as_its_job_says_and_anywhere(ours: Path) -> None:
    """The weights that its run began with may be gone."""
    with pytest.raises(InputError, match=r"eval\.zero_shot: .*held-out"):
        evaluation_job(str(ours), None, {}, 1, ())
    for manifest in ours.glob("checkpoints/*/manifest.json"):
        about = json.loads(manifest.read_text())
        about["job"]["model"] |= {"init": "gone.pt", "grad_checkpointing": True}
        about["job"]["eval"]["mix"] = 0.5
        manifest.write_text(json.dumps(about))
    assert exported(ours, ours.parent / "out") == 10
    (ours / "a.tar").touch()
    job = evaluation_job(str(ours), None, {"zero_shot": (f"{ours}/a.tar",)}, 2, ("data.workers=3",))
    own = evaluation(zero_shot=(f"{ours}/a.tar",), class_names=("a", "b"), batch_size=7, every_steps=2)
    assert job.eval.model_copy(update={"mix": None}) == own
    assert (job.data.image_column, job.data.workers) == ("file", 3)
    assert job.comm == tiny_job().comm
    assert job.model.pretrained == str(ours / "checkpoints/step-00000010/model.pt")
    assert (job.model.init, job.optim.global_batch_size) == (None, 2)
    assert not job.model.grad_checkpointing, "which concerns training alone"


ON_A_TABLE = ("w.pt", "--model", "ViT-B-32", "--data", "a.csv", "--set")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Missing argument 'CHECKPOINT'"),
        (("no.pt",), "no.pt: no such file or folder: give a run folder"),
        (("empty",), "empty is not a checkpoint and contains none"),
        (("w.pt",), "no file beside these weights names their model: give --model"),
        (("theirs/checkpoints/epoch_3.pt",), "nothing to evaluate on: give --data"),
        (("theirs/checkpoints/epoch_3.pt", "--data", "no.tar"), "eval.retrieval: "),
        (("ViT-B-32:laion2b_s34b_b79k",), "nothing to evaluate on: give --data"),
        (("w.pt", "--model", "ViT-B-33", "--data", "no.tar"), "did you mean ViT-B-32"),
        (("w.pt", "--model", "ViT-B-32", "--zero-shot", "empty"), "empty is a folder: name the files"),
        ((*ON_A_TABLE, "eval.batchsize=3"), "did you mean eval.batch_size"),
    ],
)
def test_bad_input_of_eval_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: Patch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs/checkpoints").mkdir(parents=True)
    for name in ("w.pt", "0.png", "a.tar", "theirs/checkpoints/epoch_3.pt"):
        Path(name).touch()
    Path("theirs/params.txt").write_text("logs: x\nmodel: ViT-B-32\nmodel_ema: no\n")
    Path("a.csv").write_text("image,caption\n0.png,a\n")
    Path("empty").mkdir()
    shown = clipship("eval", *arguments, code=2)
    assert expected in shown.err
    assert shown.out == ""


def with_weights(path: Path) -> Job:
    job = tiny_job()
    return job.model_copy(update={"model": job.model.model_copy(update={"pretrained": str(path)})})


@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_loss_is_read_from_the_weights(tmp_path: Path, alone: Comm, loss: str, prefix: str) -> None:
    """A model of the one cannot load weights of the other."""
    path = tmp_path / "epoch_1.pt"
    state = untrained(tiny_job(optim={"loss": loss})).model.state_dict()
    torch.save({"epoch": 1, "state_dict": {f"{prefix}{name}": each for name, each in state.items()}}, path)
    assert evaluate(with_weights(path), alone) == {}
    if loss == "siglip":
        with pytest.raises(InputError, match=r"epoch_1\.pt was trained with optim\.loss = siglip"):
            untrained(with_weights(path))


def test_a_checkpoint_with_a_flipped_bit_is_refused(ours: Path, alone: Comm) -> None:
    path = ours / "checkpoints/step-00000010/model.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.pt: its checksum differs from that in manifest\.json"):
        evaluate(with_weights(path), alone)


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("code of the file was run",)


@pytest.mark.parametrize("content", [{"a": Harmful()}, ["a", "list"]])
def test_a_file_that_holds_no_weights_is_refused_and_runs_no_code(
    tmp_path: Path, alone: Comm, content: Any, capsys: Capture
) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"w\.pt holds no weights "):
        evaluate(with_weights(tmp_path / "w.pt"), alone)
    assert "was run" not in capsys.readouterr().out


def test_weights_of_another_model_are_bad_input(tmp_path: Path, alone: Comm) -> None:
    torch.save({"visual.proj": torch.zeros(3, 3)}, tmp_path / "w.pt")
    said = r"(?s)w\.pt cannot be loaded as .*tiny-vit\.json: .*is model\.name \(--model\) right\?"
    with pytest.raises(InputError, match=said):
        evaluate(with_weights(tmp_path / "w.pt"), alone)


@pytest.mark.parametrize("pretrained", ["laion2b_typo", "/"])
def test_a_tag_that_open_clip_does_not_know_is_bad_input(alone: Comm, pretrained: str) -> None:
    with pytest.raises(
        InputError, match=rf"{pretrained} cannot be loaded as .*: .*not a known tag or valid file path"
    ):
        built(with_weights(Path(pretrained)), alone)


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Folders of three classes, one without an image; files that are none."""
    root = tmp_path / "val"
    pictures = ("tabby_cat/b.JPEG", "tabby_cat/a.png", "dog/deep/c.jpg")
    for name in (*pictures, "dog/notes.txt", ".cache/x.png", "ant/.hidden.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    (root / "README").touch()
    (root / "lost.jpg").touch()
    return root


def test_a_folder_for_each_class_is_numbered_and_named_by_its_folders(classes: Path) -> None:
    settings = evaluation(zero_shot=(str(classes),))
    assert problems(tiny_job(eval={"zero_shot": (str(classes),)})) == ""
    assert class_names(settings) == ("ant", "dog", "tabby cat")
    source = open_labelled(settings)
    samples = [(raw.key, raw.label, raw.image) for raw in map(source.read, range(len(source)))]
    assert samples == [
        ("dog/deep/c.jpg", 1, b"dog/deep/c.jpg"),
        ("tabby_cat/a.png", 2, b"tabby_cat/a.png"),
        ("tabby_cat/b.JPEG", 2, b"tabby_cat/b.JPEG"),
    ]
    assert list(source.left_out.by_cause.values()) == [1, 1]
    assert source.left_out.by_cause["in no class folder"] == 1


def test_class_folders_have_as_many_names_and_an_image(classes: Path) -> None:
    assert class_names(evaluation(zero_shot=(str(classes),), class_names=("x", "y", "z"))) == ("x", "y", "z")
    said = problems(tiny_job(eval={"zero_shot": (str(classes),), "class_names": ("x", "y")}))
    assert "gives 2 names, but " in said
    assert " holds 3 class folders" in said
    (classes / "dog" / "deep" / "c.jpg").rename(classes / "c.jpg")
    shutil.rmtree(classes / "tabby_cat")
    with pytest.raises(InputError, match="no image in its 2 folders"):
        open_labelled(evaluation(zero_shot=(str(classes),)))


def test_rows_that_name_one_image_become_one_sample_with_all_captions(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "sub").mkdir()
    (tmp_path / "1.csv").write_text("image,caption\na.png,one\nb.png,two\n./a.png,three\n")
    (tmp_path / "sub" / "2.csv").write_text("image,caption\n../a.png,four\n")
    source = open_images(table(train=(f"{tmp_path}/1.csv", f"{tmp_path}/sub/2.csv")))
    found = [(raw.image, raw.captions) for raw in map(source.read, range(len(source)))]
    assert found == [(b"a.png", ("one", "three", "four")), (b"b.png", ("two",))]


def test_a_folder_of_images_and_a_table_of_text_at_an_address_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zero_shot: s3://bucket/val is no shard, .* or shards \(\.tar\)"):
        evaluation(zero_shot=("s3://bucket/val",))
    with pytest.raises(InputError, match=r"s3://bucket/val\.csv: tables of text .* write it as \.parquet"):
        open_images(table(train=("s3://bucket/val.csv",)))
