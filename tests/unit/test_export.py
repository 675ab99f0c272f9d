"""Exported models: open_clip and transformers alone load them, and give the same features."""

import ast
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from PIL import Image
from transformers import AutoTokenizer

from tests.support.jobs import VIT, nonscalar, tiny_job
from tests.support.pages import ROOT
from tests.support.ready import models
from tests.support.text_towers import make_tower
from trainer.cli.export import command
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.config.loader import recorded
from trainer.errors import InputError
from trainer.model.build import build_model, untrained
from trainer.model.export import FORMATS
from trainer.model.model_card import model_card

TEXTS = ["a digit zero", "数字一"]
WITHOUT_CLIPSHIP = f"""
import sys
sys.path = [path for path in sys.path if path not in ("", {str(ROOT)!r})]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
"""
"""Begins a program that finds only what others have installed, too."""
ALONE = """
import torch
images, folder, out = torch.load({images!r}), {folder!r}, {out!r}
{load}
with torch.no_grad():
    torch.save([image(images), text({texts!r})], out)
assert "trainer" not in sys.modules
"""
OPEN_CLIP = """
import open_clip
model, _, transform = open_clip.create_model_and_transforms("local-dir:" + folder)
tokenizer = open_clip.get_tokenizer("local-dir:" + folder)
model.eval()
image, text = model.encode_image, lambda texts: model.encode_text(tokenizer(texts))
"""
TRANSFORMERS = """
from transformers import AutoModel, AutoTokenizer
model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
image = lambda images: model.visual_projection(model.vision_model(images).pooler_output)
def text(texts):
    length = {length}
    batch = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    out = model.text_model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    pooled = out.last_hidden_state[:, 0] if "Chinese" in type(model).__name__ else out.pooler_output
    return model.text_projection(pooled)
"""


def checkpoint(folder: Path, job: Job, clip: Any = None) -> tuple[Path, Any]:
    """A checkpoint of a run that has this model, or has trained nothing, and the model."""
    clip = clip or untrained(job)
    folder.mkdir()
    torch.save(clip.model.state_dict(), folder / "model.pt")
    for name, content in clip.files.items():
        (folder / name).write_bytes(content)
    digest = hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()
    files = {"model.pt": {"bytes": (folder / "model.pt").stat().st_size, "sha256": digest}}
    about = {"job": recorded(job), "step": 12, "files": files, "metrics": {"zero_shot_top1": 0.5}}
    (folder / "manifest.json").write_text(json.dumps(about, default=str))
    return folder, clip


def export(source: Path, out: Path, form: str, *more: str) -> Any:
    return CliRunner().invoke(command, [str(source), str(out), "--to", form, *more], standalone_mode=False)


@dataclass(frozen=True)
class Exported:
    """A checkpoint of a tiny model, the model, and what was written of it in one form."""

    source: Path
    clip: Any
    out: Path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """Exports a model with the tower "own" or "bert" in a form; once, for all tests that only read it."""

    @functools.cache
    def made(form: str, tower: str) -> Exported:
        folder = tmp_path_factory.mktemp(f"{tower}-{form}")
        model = {"text": str(make_tower(folder / "bert")), "text_pooling": "cls"} if tower == "bert" else {}
        source, clip = checkpoint(folder / "step", tiny_job(model=model))
        before = os.umask(0o022)
        done = export(source, folder / "out", form, "--license", "apache-2.0")
        os.umask(before)
        assert done.exception is None, done.exception
        return Exported(source, clip, folder / "out")

    return lambda form, tower="own": made(form, tower)


def features_there(tmp_path: Path, folder: Path, load: str) -> list[torch.Tensor]:
    """Image and text features that a process without Clipship computes."""
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    torch.save(images, tmp_path / "images.pt")
    code = ALONE.format(
        images=str(tmp_path / "images.pt"),
        folder=str(folder),
        out=str(tmp_path / "features.pt"),
        load=load,
        texts=TEXTS,
    )
    done = models().run(WITHOUT_CLIPSHIP + code, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    there: list[torch.Tensor] = torch.load(tmp_path / "features.pt")
    return there


def features_here(tmp_path: Path, clip: Any) -> list[torch.Tensor]:
    images = torch.load(tmp_path / "images.pt")
    clip.model.eval()
    with torch.no_grad():
        return [clip.model.encode_image(images), clip.model.encode_text(clip.tokenizer(TEXTS))]


@pytest.mark.parametrize("form", ["open_clip", "hf"])
@pytest.mark.parametrize("tower", ["own", "bert"])
def test_features_are_equal_where_clipship_is_not(
    tmp_path: Path, exported: Callable[..., Exported], form: str, tower: str
) -> None:
    made = exported(form, tower)
    load = OPEN_CLIP if form == "open_clip" else TRANSFORMERS.replace("{length}", "16")
    there = features_there(tmp_path, made.out, load)
    for theirs, ours in zip(there, features_here(tmp_path, made.clip), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


def adapted(tmp_path: Path, comm: Comm, **model: Any) -> tuple[Path, Any, Job]:
    """A checkpoint of a run of LoRA, its model, and its job."""
    torch.save(untrained(tiny_job(model=model)).model.state_dict(), tmp_path / "begin.pt")
    lora = {"pretrained": str(tmp_path / "begin.pt"), "lora_rank": 4, "lora_alpha": 6.0}
    job = tiny_job(model=lora | model)
    clip = build_model(job, plan(job, 1), comm)
    with torch.no_grad():
        for name, parameter in clip.model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.1)
    return *checkpoint(tmp_path / "step", job, clip), job


@pytest.mark.parametrize("tower", ["own", "bert"])
def test_adapters_alone_are_what_a_run_has_learned(tmp_path: Path, alone: Comm, tower: str) -> None:
    """W + (alpha / r) B A by the names of peft's, which is not needed for it, in a model of transformers."""
    from safetensors.torch import load_file, save_file

    model = {"text": str(make_tower(tmp_path / "bert")), "text_pooling": "cls"} if tower == "bert" else {}
    source, clip, job = adapted(tmp_path, alone, **model)
    assert export(source, tmp_path / "adapters", "peft").exception is None
    begin, _ = checkpoint(tmp_path / "begin", tiny_job(model=model), untrained(job))
    assert export(begin, tmp_path / "out", "hf").exception is None
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    factors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for target in config["target_modules"]:
        down, up = (factors.pop(f"base_model.model.{target}.lora_{factor}.weight") for factor in "AB")
        weights[f"{target}.weight"] += config["lora_alpha"] / config["r"] * up @ down
    assert not factors
    save_file(weights, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    there = features_there(tmp_path, tmp_path / "out", TRANSFORMERS.replace("{length}", "16"))
    for theirs, ours in zip(there, features_here(tmp_path, clip), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


def test_adapters_that_are_not_all_that_was_trained_are_refused(tmp_path: Path, alone: Comm) -> None:
    source, _, _ = adapted(tmp_path, alone, lora_towers="image")
    assert "trained weights of the text tower" in str(export(source, tmp_path / "out", "peft").exception)
    manifest = source / "manifest.json"
    locked = json.loads(manifest.read_text())
    locked["job"]["model"]["lock_text"] = True
    manifest.write_text(json.dumps(locked))
    assert export(source, tmp_path / "out", "peft").exception is None
    plain, _ = checkpoint(tmp_path / "plain", tiny_job())
    assert "no adapters of LoRA" in str(export(plain, tmp_path / "none", "peft").exception)


@pytest.mark.parametrize("form", ["open_clip", "hf"])
def test_adapters_are_added_to_the_weights_that_are_exported(tmp_path: Path, alone: Comm, form: str) -> None:
    source, clip, job = adapted(tmp_path, alone)
    assert export(source, tmp_path / "out", form).exception is None
    load = OPEN_CLIP if form == "open_clip" else TRANSFORMERS.replace("{length}", "16")
    there = features_there(tmp_path, tmp_path / "out", load)
    for theirs, ours in zip(there, features_here(tmp_path, clip), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6 if form == "open_clip" else 1e-5)
    for theirs, begin in zip(there, features_here(tmp_path, untrained(job)), strict=True):
        assert (theirs - begin).abs().max() > 0.01


@pytest.mark.parametrize("tower", ["own", "bert"])
def test_onnx_gives_equal_features_for_any_number_of_samples(
    exported: Callable[..., Exported], tower: str
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    made = exported("onnx", tower)
    clip = made.clip
    clip.model.eval()
    texts = [*TEXTS, "three"]
    inputs = {"images": torch.randn(3, 3, 32, 32), "tokens": clip.tokenizer(texts)}
    with torch.no_grad():
        ours = {
            "images": clip.model.encode_image(inputs["images"], normalize=True),
            "tokens": clip.model.encode_text(inputs["tokens"], normalize=True),
        }
    for name, given in inputs.items():
        session = runtime.InferenceSession(made.out / f"{name}.onnx")
        (there,) = session.run(None, {name: given.numpy()})
        torch.testing.assert_close(torch.from_numpy(there), ours[name], rtol=0, atol=1e-5)


def test_the_card_has_license_steps_metrics_and_job(tmp_path: Path) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job())
    export(source, tmp_path / "out", "safetensors", "--license", "apache-2.0")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith('---\nlicense: "apache-2.0"\n')
    assert "| steps | 12 |" in card
    assert "| zero_shot_top1 | 0.5 |" in card
    assert "[optim]" in card
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        "model.json",
        "model.safetensors",
    }


def test_the_card_has_no_default_no_other_door_and_no_private_path(tmp_path: Path) -> None:
    job = tiny_job(
        data={
            "format": "webdataset",
            "train": ("/home/me/secret/{0..3}.tar", "s3://bucket/x/a.tar"),
            "workers": 7,
        },
        eval={"retrieval": ("/home/me/held/val.csv",), "batch_size": 64},
        checkpoint={"keep": 9},
        model={"pretrained": "/home/me/weights.pt"},
    )
    card = model_card("one", "open_clip", "", {"job": recorded(job), "step": 3})
    text = card.partition("## Job file")[2].partition("```toml")[2].partition("```")[0]
    table = tomllib.loads(text)
    assert table.keys() == {"data", "model", "optim", "eval"}
    train = {"format": "webdataset", "train": ["{0..3}.tar", "a.tar"], "synthetic_samples": 64}
    assert table["data"] == train
    assert table["eval"] == {"retrieval": ["val.csv"]}
    assert "/home/me" not in card
    assert "bucket" not in card
    assert "| began with | weights.pt |" in card
    assert "| data | {0..3}.tar, a.tar |" in card


@pytest.mark.parametrize("name", ["apache-2.0", "no", "other: 'mine' # [1]", '"', ""])
def test_any_license_stays_one_text_of_the_cards_head(name: str) -> None:
    head = model_card("one", "open_clip", name, {}).split("---\n")[1]
    assert yaml.safe_load(head) == {
        "license": name or "unknown",
        "library_name": "open_clip",
        "tags": ["clip"],
    }


def test_a_license_of_two_lines_is_refused(tmp_path: Path) -> None:
    arguments = ["export", "none", str(tmp_path / "out"), "--to", "hf", "--license", "mit\ntags: [x]"]
    with pytest.raises(InputError, match="--license: the name of a license is one line"):
        command.main(arguments[1:], standalone_mode=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["open_clip", "hf", "safetensors"])
def test_the_cards_use_classifies_a_picture(
    tmp_path: Path, exported: Callable[..., Exported], form: str
) -> None:
    out, clip = exported(form).out, exported(form).clip
    picture = Image.effect_noise((40, 32), 80).convert("RGB")
    picture.save(tmp_path / "photo.jpg")
    use = (out / "README.md").read_text().partition("```python\n")[2].partition("\n```")[0]
    done = models().run(WITHOUT_CLIPSHIP + use.replace("FOLDER", str(out)), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    shares = ast.literal_eval(done.stdout.splitlines()[-1])
    assert list(shares) == ["a photo of a cat", "a photo of a dog"]
    assert sum(shares.values()) == pytest.approx(1)
    clip.model.eval()
    with torch.no_grad():
        with Image.open(tmp_path / "photo.jpg") as read:
            images = clip.model.encode_image(clip.eval_transform(read)[None], normalize=True)
        texts = clip.model.encode_text(clip.tokenizer(list(shares)), normalize=True)
    ours = (clip.model.logit_scale.exp() * images @ texts.T).softmax(-1)[0].tolist()
    assert list(shares.values()) == pytest.approx(ours, abs=1e-4)


def test_a_model_that_transformers_lacks_is_refused_with_the_reason(tmp_path: Path) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job(optim={"loss": "siglip"}))
    done = export(source, tmp_path / "out", "hf")
    assert isinstance(done.exception, InputError)
    assert "it has a logit bias; --to open_clip takes every model" in str(done.exception)


def with_tokenizer(folder: Path, tokenizer: Path) -> Path:
    """A checkpoint of a model whose tokenizer alone comes from a folder of Hugging Face's."""
    config = json.loads(Path(VIT).read_text())
    end = AutoTokenizer.from_pretrained(tokenizer)("").input_ids[-1]
    config["text_cfg"] |= {"hf_tokenizer_name": str(tokenizer), "pool_type": "eos", "eos_id": end}
    (folder / "tiny-words.json").write_text(json.dumps(config))
    return checkpoint(folder / "step", tiny_job(model={"name": str(folder / "tiny-words.json")}))[0]


@pytest.fixture(scope="module")
def of_other_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    words = AutoTokenizer.from_pretrained(make_tower(folder / "tower"))
    words.save_pretrained(folder / "tokenizer")
    return with_tokenizer(folder, folder / "tokenizer")


def test_another_tokenizer_than_that_of_transformers_model_is_refused(
    of_other_words: Path, tmp_path: Path
) -> None:
    done = export(of_other_words, tmp_path / "out", "hf")
    assert isinstance(done.exception, InputError)
    assert "its tokenizer has other words than OpenAI's; --to open_clip" in str(done.exception)


def test_a_tokenizer_of_hugging_face_with_openais_words_is_that_of_transformers_model(
    exported: Callable[..., Exported], tmp_path: Path
) -> None:
    done = export(with_tokenizer(tmp_path, exported("hf").out), tmp_path / "out", "hf")
    assert done.exception is None, done.exception


@pytest.mark.parametrize("form", ["open_clip", "safetensors"])
def test_a_tokenizer_from_a_folder_is_found_in_the_exported_one(
    of_other_words: Path, tmp_path: Path, form: str
) -> None:
    done = export(of_other_words, tmp_path / "out", form)
    assert done.exception is None, done.exception
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    for path in (tmp_path / "out").glob("*.json"):
        assert str(of_other_words.parent) not in path.read_text(), path.name


def _closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the folder one that may not be entered, for root, too."""
    stat = os.stat

    def denied(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if isinstance(path, str | Path) and Path(path).is_relative_to(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", denied)


@pytest.mark.parametrize("tower", [False, True])
@pytest.mark.parametrize("form", ["open_clip", "safetensors"])
def test_text_of_a_folder_that_was_moved_is_found_where_it_is(
    tmp_path: Path, form: str, tower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config holds the path of where it was made, since open_clip takes no relative one.

    That path may be in a home folder that others may not enter.
    """
    words = make_tower(tmp_path / "words")
    AutoTokenizer.from_pretrained(words).save_pretrained(words)
    tower_job = tiny_job(model={"text": str(words)})
    source = checkpoint(tmp_path / "step", tower_job)[0] if tower else with_tokenizer(tmp_path, words)
    assert export(source, tmp_path / "out", form).exception is None
    shutil.rmtree(words)
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    _closed(tmp_path / "out", monkeypatch)
    names = {"open_clip": f"local-dir:{moved}", "safetensors": str(moved / "model.json")}
    weights = {} if form == "open_clip" else {"pretrained": str(moved / "model.safetensors")}
    clip = untrained(tiny_job(model={"name": names[form], **weights}))
    ours, theirs = clip.tokenizer(["cats"])[0], AutoTokenizer.from_pretrained(moved)("cats")["input_ids"]
    assert ours.tolist()[: len(theirs)] == theirs
    assert not [note for note in clip.notes if "tokenizer" in note]


def test_a_logit_scale_with_a_dimension_becomes_the_scalar_of_transformers(tmp_path: Path) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job(config=nonscalar(VIT)))
    assert export(source, tmp_path / "out", "hf").exception is None


def test_siglip_keeps_its_bias_in_open_clip(tmp_path: Path) -> None:
    source, clip = checkpoint(tmp_path / "step", tiny_job(optim={"loss": "siglip"}))
    export(source, tmp_path / "out", "open_clip")
    bias = OPEN_CLIP + "image = lambda _: model.logit_bias\n"
    (there, _) = features_there(tmp_path, tmp_path / "out", bias)
    assert float(there.detach()) == float(clip.model.logit_bias.detach())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    done = export(source, tmp_path / "out", "open_clip")
    assert "is not empty" in str(done.exception)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def _config(tmp_path: Path, **parts: dict[str, Any]) -> str:
    """A config file of the tiny model with other keys in its parts; returns its path."""
    tiny = json.loads(Path(VIT).read_text())
    for part, keys in parts.items():
        tiny[part] = {**tiny[part], **keys}
    (tmp_path / "other.json").write_text(json.dumps(tiny))
    return str(tmp_path / "other.json")


@pytest.mark.parametrize("vision", [{"no_ln_pre": True}, {"ls_init_value": 0.5}, {"pool_type": "avg"}])
def test_a_model_of_which_transformers_makes_another_is_refused(
    tmp_path: Path, vision: dict[str, Any]
) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job(config=_config(tmp_path, vision_cfg=vision)))
    done = export(source, tmp_path / "out", "hf")
    assert isinstance(done.exception, InputError), done.exception
    assert re.search(
        r"--to hf: transformers (would make another model of this one|has no such model|cannot load)",
        str(done.exception),
    )
    assert "--to open_clip takes every model" in str(done.exception) or "choose another" in str(
        done.exception
    )
    assert list((tmp_path / "out").iterdir()) == []
    done = export(source, tmp_path / "out", "open_clip")
    assert done.exception is None, done.exception


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"image_resize_mode": "longest"}, "its pixels of pictures of 65 x 39"),
        ({"image_size": (32, 48)}, "no image_size of 32 x 48"),
    ],
)
def test_another_handling_of_pictures_is_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job(model=keys))
    done = export(source, tmp_path / "out", "hf")
    assert said in str(done.exception)


@pytest.mark.parametrize("tower", ["own", "bert"])
def test_odd_captions_become_the_same_tokens_in_transformers(tmp_path: Path, tower: str) -> None:
    from transformers import AutoTokenizer

    model = {"text": str(make_tower(tmp_path / "bert")), "text_pooling": "cls"} if tower == "bert" else {}
    source, clip = checkpoint(tmp_path / "step", tiny_job(model=model))
    export(source, tmp_path / "out", "hf")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    end = 49407 if tower == "own" else 3
    odd = ("“A dog’s” day…", "ﬁne ＡＢＣ！", "“图片”，一")  # noqa: RUF001
    for caption in (*odd, "cafe\u0301 &amp; bar", "a\n b"):
        ours = clip.tokenizer([caption])[0].tolist()
        theirs = tokenizer([caption], padding="max_length", max_length=16, truncation=True).input_ids[0]
        assert ours[: ours.index(end)] == theirs[: theirs.index(end)], caption


@pytest.mark.parametrize("form", ["open_clip", "safetensors", "onnx", "hf"])
def test_a_form_that_holds_another_model_is_refused(
    tmp_path: Path, exported: Callable[..., Exported], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The written form differs from the model in one weight, as a defect of the writer would have it."""
    sound = exported(form)

    def spoilt(made: Any) -> None:
        shutil.copytree(sound.out, made.folder, dirs_exist_ok=True)
        with torch.no_grad():
            made.clip.model.visual.conv1.weight.mul_(3)

    monkeypatch.setitem(FORMATS, form, replace(FORMATS[form], write=spoilt))
    done = export(sound.source, tmp_path / "out", form)
    assert isinstance(done.exception, InputError)
    assert "its features of the same pixels differ by" in str(done.exception)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_crop_that_is_one_pixel_aside_is_said(tmp_path: Path) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job())
    assert "one pixel beside" in export(source, tmp_path / "cropped", "hf").stderr
    source, _ = checkpoint(tmp_path / "squashed", tiny_job(model={"image_resize_mode": "squash"}))
    done = export(source, tmp_path / "whole", "hf")
    assert done.exception is None
    assert "one pixel" not in done.stderr


@pytest.mark.parametrize("form", ["open_clip", "hf", "safetensors"])
def test_others_may_read_what_is_written(exported: Callable[..., Exported], form: str) -> None:
    assert {path.stat().st_mode & 0o777 for path in exported(form).out.iterdir()} == {0o644}


def test_without_the_other_program_it_is_said_that_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job())
    row = replace(FORMATS["safetensors"], compared_with="no_such_module")
    monkeypatch.setitem(FORMATS, "safetensors", row)
    done = export(source, tmp_path / "out", "safetensors")
    assert done.exception is None
    assert "no_such_module is not installed, so the features" in done.stderr
