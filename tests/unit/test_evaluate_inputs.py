"""Inputs of `clipship eval` and `[eval]`.

These are checkpoints of all kinds, folders of classes, and tables with several rows for an image.
"""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.jobs import VIT, tiny_job
from trainer.checkpoint import files
from trainer.checkpoint.weights import with_loss_of_weights
from trainer.cli import main as cli
from trainer.cli.export import _manifest
from trainer.comm.protocol import Comm
from trainer.config import Data, Eval, Job, Model
from trainer.config.batch_plan import plan
from trainer.data.eval_blocks import retrieval_blocks
from trainer.data.source import open_images, open_labelled
from trainer.errors import InputError
from trainer.evaluate.inputs import check_evaluation, class_names
from trainer.evaluate.rank import evaluate
from trainer.model.build import build_model, untrained
from trainer.model.catalog import check_init, check_pretrained, check_tag, check_teacher, weights_file
from trainer.model.teacher import build_teacher
from trainer.plan.trained import evaluation_job, export_job, search_job
from trainer.run import checkpoints
from trainer.run.checkpoints import TrainedModel, find_trained
from trainer.run.model_identity import weights_identity

Capture = pytest.CaptureFixture[str]


def test_the_names_of_a_checkpoints_parts_are_those_that_are_written() -> None:
    assert (checkpoints.WEIGHTS, checkpoints.MANIFEST) == (files.WEIGHTS, files.MANIFEST)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A run folder with two checkpoints; the job that made them evaluates on shards."""
    shards, tables = ("held-out/*.tar",), ("one.csv", "other.csv")
    job = tiny_job(
        eval={"zero_shot": shards, "class_names": ("a", "b"), "batch_size": 7, "every_steps": 2},
        checkpoint={"best": "zero_shot_top1"},
        data={"train": tables, "format": "table", "weights": (1.0, 0.5), "image_column": "file"},
        comm={"backend": "horovod"},
    )
    weights = tmp_path / "weights.pt"
    torch.save(untrained(job).model.state_dict(), weights)
    content = weights.read_bytes()
    seal = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for step in (9, 10):
        place = tmp_path / "runs" / "x" / "checkpoints" / f"step-{step:08d}"
        place.mkdir(parents=True)
        (place / "model.pt").write_bytes(content)
        (place / "manifest.json").write_text(
            json.dumps({"step": step, "files": {"model.pt": seal}, "job": job.model_dump(mode="json")})
        )
    return tmp_path / "runs" / "x"


@pytest.mark.parametrize(
    ("given", "step"),
    [
        ("", 10),
        ("checkpoints", 10),
        ("checkpoints/step-00000009", 9),
        ("checkpoints/step-00000009/model.pt", 9),
    ],
)
def test_weights_are_found_from_every_path_that_belongs_to_a_run(ours: Path, given: str, step: int) -> None:
    trained = find_trained(str(ours / given))
    assert trained.pretrained == str(ours / f"checkpoints/step-{step:08d}/model.pt")
    assert trained.model == VIT
    assert trained.job is not None


def test_a_run_stands_for_its_newest_checkpoint_and_best_for_its_best(ours: Path) -> None:
    with pytest.raises(InputError):
        find_trained(str(ours / "best"))
    with pytest.raises(InputError):
        check_init(Model(init=str(ours / "best")))
    files.record_best(ours / "checkpoints", 9, "zero_shot_top1", 0.5)
    for given, step in (("", 10), ("best", 9), ("checkpoints/step-00000009", 9)):
        weights = str(ours / f"checkpoints/step-{step:08d}/model.pt")
        assert find_trained(str(ours / given)).pretrained == weights
        assert weights_file(str(ours / given)) == weights
        for key in ("init", "pretrained"):
            assert untrained(tiny_job(model={key: str(ours / given)}))
        check_init(Model(name=VIT, init=str(ours / given)))
        check_pretrained(str(ours / given))


def test_a_name_that_no_file_system_can_have_names_no_model() -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        find_trained("x" * 300)


def test_the_files_of_a_checkpoint_may_be_links(ours: Path, tmp_path: Path, alone: Comm) -> None:
    files.record_best(ours / "checkpoints", 9, "zero_shot_top1", 0.5)
    (ours / "params.txt").write_text("model: ViT-B-32\n")
    blobs = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    for number, path in enumerate(blobs):  # as caches of Hugging Face's, git-annex and DVC have them
        path.rename(tmp_path / f"blob-{number}")
        path.symlink_to(tmp_path / f"blob-{number}")
    for given, step in (("", 10), ("best", 9), ("checkpoints/step-00000009", 9)):
        weights = str(ours / f"checkpoints/step-{step:08d}/model.pt")
        assert find_trained(str(ours / given)).pretrained == weights
    newest = ours / "checkpoints/step-00000010"
    assert checkpoints.newest_whole(ours / "checkpoints") == (10, newest)
    assert files.verify(newest)["step"] == 10
    assert with_loss_of_weights(with_weights(newest / "model.pt"), alone).optim.loss == "clip"
    assert _manifest(str(newest / "model.pt"))["step"] == 10
    job = tiny_job(model={"pretrained": str(newest / "model.pt")})
    assert weights_identity(job) == files.verify(newest)["files"]["model.pt"]
    (ours / "checkpoints" / "other.pt").touch()
    assert find_trained(str(ours / "checkpoints" / "other.pt")).model == "ViT-B-32"


def test_a_teacher_is_a_checkpoint_and_no_run_that_goes_on(ours: Path, alone: Comm) -> None:
    files.record_best(ours / "checkpoints", 9, "zero_shot_top1", 0.5)
    for given, step in (("", 10), ("best", 9)):
        job = tiny_job(model={"teacher": VIT, "teacher_pretrained": str(ours / given)})
        with pytest.raises(InputError, match=f"every start: name a checkpoint, such as .*{step:08d}"):
            check_teacher(job.model)
        with pytest.raises(InputError, match=r"model\.teacher_pretrained: "):
            build_teacher(job, plan(job, 1), alone, untrained(tiny_job()))
    check_teacher(Model(teacher=VIT, teacher_pretrained=str(ours / "checkpoints" / "step-00000010")))


def test_a_name_without_a_slash_is_a_tag_whatever_the_current_folder_has(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ours.parent)
    assert weights_file(ours.name) == ours.name
    assert weights_file(f"./{ours.name}").endswith("step-00000010/model.pt")
    with pytest.raises(InputError, match=f"no weights called '{ours.name}'.* write ./{ours.name}"):
        check_tag("ViT-B-32", ours.name)


def test_weights_of_others_take_their_model_from_open_clip_trains_parameters(tmp_path: Path) -> None:
    weights = tmp_path / "checkpoints" / "epoch_3.pt"
    weights.parent.mkdir()
    weights.touch()
    assert find_trained(str(weights)) == TrainedModel(None, str(weights))
    (tmp_path / "params.txt").write_text("logs: x\nmodel: ViT-B-32\nmodel_ema: no\n")
    assert find_trained(str(weights)) == TrainedModel("ViT-B-32", str(weights))


def test_names_of_open_clip_and_of_the_hub_are_taken() -> None:
    assert find_trained("ViT-B-32:laion2b_s34b_b79k") == TrainedModel("ViT-B-32", "laion2b_s34b_b79k")
    assert find_trained("hf-hub:org/name") == TrainedModel("hf-hub:org/name", None)


def test_a_run_that_began_with_other_weights_is_used_with_its_own(ours: Path) -> None:
    """The weights that it began with may be gone."""
    for manifest in ours.glob("checkpoints/*/manifest.json"):
        about = json.loads(manifest.read_text())
        about["job"]["model"] |= {"init": "gone.pt", "grad_checkpointing": True}
        about["job"]["eval"]["mix"] = 0.5
        manifest.write_text(json.dumps(about))
    (ours / "a.tar").touch()
    for job in (
        evaluation_job(str(ours), None, {"zero_shot": (f"{ours}/a.tar",)}, 1, ()),
        export_job(str(ours), None),
        search_job(str(ours), None, ()),
    ):
        assert job.model.init is None
        assert job.model.pretrained == str(ours / "checkpoints/step-00000010/model.pt")
        assert not job.model.grad_checkpointing, "which concerns training alone"


def test_a_checkpoint_of_ours_is_evaluated_as_its_job_says_and_anywhere(ours: Path) -> None:
    with pytest.raises(InputError, match=r"eval\.zero_shot: .*held-out"):
        evaluation_job(str(ours), None, {}, 1, ())
    (Path(ours) / "a.tar").touch()
    job = evaluation_job(str(ours), None, {"zero_shot": (f"{ours}/a.tar",)}, 2, ("data.workers=3",))
    assert job.eval == Eval(zero_shot=(f"{ours}/a.tar",), class_names=("a", "b"), batch_size=7, every_steps=2)
    assert (job.data.image_column, job.data.workers) == ("file", 3)
    assert job.comm == tiny_job().comm
    assert job.model.pretrained == str(ours / "checkpoints/step-00000010/model.pt")
    assert job.optim.global_batch_size == 2


ON_A_TABLE = ("w.pt", "--model", "ViT-B-32", "--data", "a.csv", "--set")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Missing argument 'CHECKPOINT'"),
        (("no.pt",), "no.pt: no such file or folder: give a run folder"),
        (("empty",), "empty is not a checkpoint and contains none"),
        (("w.pt",), "no file beside these weights names their model: give --model"),
        (("w.pt", "--model", "ViT-B-32"), "nothing to evaluate on: give --data"),
        (("w.pt", "--model", "ViT-B-33", "--data", "no.tar"), "did you mean ViT-B-32"),
        (("w.pt", "--model", "ViT-B-33", "--data", "no.tar"), "eval.retrieval: "),
        (("w.pt", "--model", "ViT-B-32", "--zero-shot", "a.tar"), "zero_shot needs class_names"),
        (("w.pt", "--model", "ViT-B-32", "--zero-shot", "empty"), "empty is a folder: name the files"),
        ((*ON_A_TABLE, "data.image_column=file"), "no image column 'file'"),
        ((*ON_A_TABLE, "eval.batchsize=3"), "did you mean eval.batch_size"),
    ],
)
def test_bad_input_of_eval_is_told_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    expected: str,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("w.pt", "0.png", "a.tar"):
        Path(name).touch()
    Path("a.csv").write_text("image,caption\n0.png,a\n")
    Path("empty").mkdir()
    assert cli.main(["eval", *arguments]) == 2
    shown = capsys.readouterr()
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
    prefixed = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 1, "state_dict": prefixed}, path)
    assert with_loss_of_weights(with_weights(path), alone).optim.loss == loss
    assert evaluate(with_weights(path), alone) == {}


def test_a_checkpoint_with_a_flipped_bit_is_refused(ours: Path, alone: Comm) -> None:
    path = ours / "checkpoints/step-00000010/model.pt"
    assert with_loss_of_weights(with_weights(path), alone).optim.loss == "clip"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.pt: its checksum differs from that in manifest\.json"):
        with_loss_of_weights(with_weights(path), alone)


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("code of the file was run",)


@pytest.mark.parametrize("content", [b"", b"no weights", {"a": Harmful()}, ["a", "list"]])
def test_a_file_that_holds_no_weights_is_refused_and_runs_no_code(
    tmp_path: Path, alone: Comm, content: Any, capsys: Capture
) -> None:
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(InputError, match=r"w\.pt holds no weights "):
        with_loss_of_weights(with_weights(path), alone)
    assert "was run" not in capsys.readouterr().out


def test_weights_of_another_model_are_bad_input(tmp_path: Path, alone: Comm) -> None:
    torch.save({"visual.proj": torch.zeros(3, 3)}, tmp_path / "w.pt")
    said = r"(?s)w\.pt cannot be loaded as .*tiny-vit\.json: .*is model\.name \(--model\) right\?"
    with pytest.raises(InputError, match=said):
        evaluate(with_weights(tmp_path / "w.pt"), alone)


def test_a_run_begins_from_a_checkpoint_folder_of_another(ours: Path) -> None:
    folder = ours / "checkpoints/step-00000009"
    check_pretrained(str(folder))
    wanted = torch.load(folder / "model.pt", weights_only=True)
    begun = untrained(with_weights(folder)).model.state_dict()
    assert all(torch.equal(begun[name], tensor) for name, tensor in wanted.items())
    with pytest.raises(
        InputError, match=r"checkpoints is a folder without manifest\.json: give a checkpoint"
    ):
        check_pretrained(str(ours / "checkpoints"))


@pytest.mark.parametrize("pretrained", ["laion2b_typo", "/"])
def test_a_tag_that_open_clip_does_not_know_is_bad_input(alone: Comm, pretrained: str) -> None:
    job = with_weights(Path(pretrained))
    with pytest.raises(
        InputError, match=rf"{pretrained} cannot be loaded as .*: .*not a known tag or valid file path"
    ):
        build_model(job, plan(job, 1), alone)


def test_weights_of_the_siglip_loss_are_refused_for_the_loss_clip(tmp_path: Path) -> None:
    torch.save(untrained(tiny_job(optim={"loss": "siglip"})).model.state_dict(), tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"w\.pt was trained with optim\.loss = siglip"):
        untrained(with_weights(tmp_path / "w.pt"))


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
    settings = Eval(zero_shot=(str(classes),))
    check_evaluation(settings)
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


def test_class_names_must_be_as_many_as_class_folders(classes: Path) -> None:
    assert class_names(Eval(zero_shot=(str(classes),), class_names=("x", "y", "z"))) == ("x", "y", "z")
    with pytest.raises(InputError, match=r"gives 2 names, but .* holds 3 class folders"):
        check_evaluation(Eval(zero_shot=(str(classes),), class_names=("x", "y")))


def test_class_folders_without_an_image_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match="no image in its 1 folders"):
        open_labelled(Eval(zero_shot=(str(tmp_path),)))


def test_rows_that_name_one_image_become_one_sample_with_all_captions(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "sub").mkdir()
    (tmp_path / "1.csv").write_text("image,caption\na.png,one\nb.png,two\n./a.png,three\n")
    (tmp_path / "sub" / "2.csv").write_text("image,caption\n../a.png,four\n")
    source = open_images(Data(train=(f"{tmp_path}/1.csv", f"{tmp_path}/sub/2.csv")))
    assert [(raw.image, raw.captions) for raw in map(source.read, range(len(source)))] == [
        (b"a.png", ("one", "three", "four")),
        (b"b.png", ("two",)),
    ]


def test_retrieval_blocks_say_whose_each_caption_is_and_which_read_the_same(tmp_path: Path) -> None:
    for name in "abc":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    (tmp_path / "t.csv").write_text("image,caption\na.png,x\nb.png,y\na.png,z\nc.png,x\n")
    source = open_images(Data(train=(f"{tmp_path}/t.csv",)))

    def tokens(captions: list[str]) -> torch.Tensor:
        return torch.tensor([[ord(caption)] for caption in captions])

    def white(picture: Image.Image) -> torch.Tensor:
        return torch.ones(3, 2, 2)

    blocks = partial(retrieval_blocks, source, block=2, transform=white, tokenizer=tokens, workers=0)
    first, second = blocks(rank=0, world_size=1)
    assert (first.valid, first.image_of_caption.tolist()) == (2, [0, 0, 1])
    assert first.tokens[:, 0].tolist() == [ord(c) for c in "xzy"]
    assert (second.valid, second.image_of_caption.tolist()) == (1, [2])
    assert second.images[:, 0, 0, 0].tolist() == [1, 0]
    assert second.digests[0] == first.digests[0]
    assert len(set(first.digests.tolist())) == 3
    assert list(blocks(rank=2, world_size=3)) == []


@pytest.mark.parametrize(
    ("best", "wrong"), [("retrieval_t2i_r1", "eval.retrieval"), ("zero_shot_top5", "eval.zero_shot")]
)
def test_the_best_checkpoint_needs_an_evaluation_that_measures_it(best: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"checkpoint.best = {best} needs {wrong}"):
        tiny_job(checkpoint={"best": best})
    tiny_job(checkpoint={"best": best}, eval={"retrieval": ("a.csv",), "zero_shot": ("val",)})


def test_a_folder_of_images_at_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zero_shot: s3://bucket/val is no shard, .* or shards \(\.tar\)"):
        Eval(zero_shot=("s3://bucket/val",))


def test_a_table_of_text_at_an_address_is_refused() -> None:
    with pytest.raises(InputError, match=r"s3://bucket/val\.csv: tables of text .* write it as \.parquet"):
        open_images(Data(train=("s3://bucket/val.csv",)))
