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

import open_clip
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.support.command_line import clipship
from tests.support.jobs import VIT, tiny_job
from tests.support.naflex import NAFLEX, TOKENS
from tests.support.pages import ROOT
from tests.support.ready import models
from tests.support.steps import built, untrained, weights_of
from tests.support.text_towers import make_tower
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.loader import recorded
from trainer.model.export import FORMATS

Export = Callable[..., str]
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


@pytest.fixture
def told() -> Export:
    """Exports in a form; returns what the command says, which ends well unless `refused`."""

    def call(source: Path, out: Path, form: str, *more: str, refused: bool = False) -> str:
        return clipship("export", source, out, "--to", form, *more, code=2 if refused else 0).err

    return call


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
        clipship("export", source, folder / "out", "--to", form, "--license", "apache-2.0", code=0)
        os.umask(before)
        return Exported(source, clip, folder / "out")

    return lambda form, tower="own": made(form, tower)


def features_there(tmp_path: Path, folder: Path, load: str) -> list[torch.Tensor]:
    """Image and text features that a process without Clipship computes."""
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    torch.save(images, tmp_path / "images.pt")
    places = {"images": str(tmp_path / "images.pt"), "out": str(tmp_path / "features.pt")}
    code = ALONE.format(folder=str(folder), load=load, texts=TEXTS, **places)
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
    begin = weights_of(tiny_job(model=model), tmp_path / "begin.pt")
    lora = {"pretrained": begin, "lora_rank": 4, "lora_alpha": 6.0}
    job = tiny_job(model=lora | model)
    clip = built(job, comm)
    with torch.no_grad():
        for name, parameter in clip.model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.1)
    return *checkpoint(tmp_path / "step", job, clip), job


@pytest.mark.parametrize("tower", ["own", "bert"])
def test_adapters_are_added_to_exported_weights_and_alone_are_what_a_run_has_learned(
    tmp_path: Path, alone: Comm, tower: str, told: Export
) -> None:
    """W + (alpha / r) B A by the names of peft's, which is not needed for it, in a model of transformers."""
    model = {"text": str(make_tower(tmp_path / "bert")), "text_pooling": "cls"} if tower == "bert" else {}
    source, _, job = adapted(tmp_path, alone, **model)
    told(source, tmp_path / "adapters", "peft")
    told(source, tmp_path / "added", "hf")
    told(checkpoint(tmp_path / "begin", tiny_job(model=model), untrained(job))[0], tmp_path / "plain", "hf")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    factors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    added, weights = (load_file(tmp_path / name / "model.safetensors") for name in ("added", "plain"))
    for target in config["target_modules"]:
        down, up = (factors.pop(f"base_model.model.{target}.lora_{factor}.weight") for factor in "AB")
        change = config["lora_alpha"] / config["r"] * up @ down
        assert change.abs().max() > 0.01
        weights[f"{target}.weight"] += change
    assert not factors
    torch.testing.assert_close(added, weights, rtol=0, atol=1e-6)


def test_adapters_that_are_not_all_that_was_trained_are_refused(
    tmp_path: Path, alone: Comm, told: Export
) -> None:
    source, _, _ = adapted(tmp_path, alone, lora_towers="image")
    assert "trained weights of the text tower" in told(source, tmp_path / "out", "peft", refused=True)
    manifest = source / "manifest.json"
    locked = json.loads(manifest.read_text())
    locked["job"]["model"]["lock_text"] = True
    manifest.write_text(json.dumps(locked))
    told(source, tmp_path / "out", "peft")
    plain, _ = checkpoint(tmp_path / "plain", tiny_job())
    assert "no adapters of LoRA" in told(plain, tmp_path / "none", "peft", refused=True)


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


@pytest.mark.parametrize("form", ["open_clip", "hf", "safetensors"])
def test_the_cards_use_classifies_a_picture(
    tmp_path: Path, exported: Callable[..., Exported], form: str
) -> None:
    out, clip = exported(form).out, exported(form).clip
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}, "others may read it"
    picture = Image.effect_noise((40, 32), 80).convert("RGB")
    picture.save(tmp_path / "photo.jpg")
    use = (out / "README.md").read_text().partition("```python\n")[2].partition("\n```")[0]
    done = models().run(WITHOUT_CLIPSHIP + use.replace("FOLDER", str(out)), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    shares = ast.literal_eval(done.stdout.splitlines()[-1])
    clip.model.eval()
    with torch.no_grad():
        with Image.open(tmp_path / "photo.jpg") as read:
            images = clip.model.encode_image(clip.eval_transform(read)[None], normalize=True)
        texts = clip.model.encode_text(clip.tokenizer(list(shares)), normalize=True)
    ours = (clip.model.logit_scale.exp() * images @ texts.T).softmax(-1)[0].tolist()
    assert list(shares.values()) == pytest.approx(ours, abs=1e-4)


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
    tmp_path: Path, form: str, tower: bool, monkeypatch: pytest.MonkeyPatch, told: Export
) -> None:
    """Its config holds the path of where it was made, since open_clip takes no relative one.

    That path may be in a home folder that others may not enter.
    """
    words = make_tower(tmp_path / "words")
    AutoTokenizer.from_pretrained(words).save_pretrained(words)
    tower_job = tiny_job(model={"text": str(words)})
    source = checkpoint(tmp_path / "step", tower_job)[0] if tower else with_tokenizer(tmp_path, words)
    told(source, tmp_path / "out", form)
    shutil.rmtree(words)
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    _closed(tmp_path / "out", monkeypatch)
    names = {"open_clip": f"local-dir:{moved}", "safetensors": str(moved / "model.json")}
    weights = {} if form == "open_clip" else {"pretrained": str(moved / "model.safetensors")}
    clip = untrained(tiny_job(model={"name": names[form], **weights}))
    ours, theirs = clip.tokenizer(["cats"])[0], AutoTokenizer.from_pretrained(moved)("cats")["input_ids"]
    assert ours.tolist()[: len(theirs)] == theirs
    assert not [note for note in clip.notes if "tokenizer" in note]


@pytest.mark.parametrize("tower", ["own", "bert"])
def test_odd_captions_become_the_same_tokens_in_transformers(
    exported: Callable[..., Exported], tower: str
) -> None:
    made = exported("hf", tower)
    tokenizer: Any = AutoTokenizer.from_pretrained(made.out)
    end = 49407 if tower == "own" else 3
    odd = ("“A dog’s” day…", "ﬁne ＡＢＣ！", "“图片”，一")  # noqa: RUF001
    for caption in (*odd, "cafe\u0301 &amp; bar", "a\n b"):
        ours = made.clip.tokenizer([caption])[0].tolist()
        theirs = tokenizer([caption], padding="max_length", max_length=16, truncation=True).input_ids[0]
        assert ours[: ours.index(end)] == theirs[: theirs.index(end)], caption


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_a_form_that_holds_another_model_is_refused(
    tmp_path: Path,
    exported: Callable[..., Exported],
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    told: Export,
) -> None:
    """The written form differs from the model in one weight, as a defect of the writer would have it."""
    sound = exported(form)

    def spoilt(made: Any) -> None:
        shutil.copytree(sound.out, made.folder, dirs_exist_ok=True)
        with torch.no_grad():
            made.clip.model.visual.conv1.weight.mul_(3)

    monkeypatch.setitem(FORMATS, form, replace(FORMATS[form], write=spoilt))
    said = told(sound.source, tmp_path / "out", form, refused=True)
    assert "its features of the same pixels differ by" in said
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["apache-2.0", "other: 'mine' # [1]", ""])
def test_the_card_has_license_steps_metrics_and_job_without_defaults_and_private_paths(
    tmp_path: Path, told: Export, name: str
) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job())
    about = json.loads((source / "manifest.json").read_text())
    train = ("/home/me/secret/{0..3}.tar", "s3://bucket/x/a.tar")
    about["job"] = recorded(
        tiny_job(
            data={"format": "webdataset", "train": train, "workers": 7},
            eval={"retrieval": ("/home/me/held/val.csv",), "batch_size": 64},
            model={"pretrained": "/home/me/weights.pt"},
        )
    )
    (source / "manifest.json").write_text(json.dumps(about, default=str))
    told(source, tmp_path / "out", "safetensors", "--license", name)
    card = (tmp_path / "out" / "README.md").read_text()
    head = {"license": name or "unknown", "library_name": "open_clip", "tags": ["clip"]}
    assert yaml.safe_load(card.split("---\n")[1]) == head
    text = card.partition("## Job file")[2].partition("```toml")[2].partition("```")[0]
    table = tomllib.loads(text)
    assert table.keys() == {"data", "model", "optim", "eval"}
    assert table["data"].keys() == {"format", "train", "synthetic_samples"}
    assert table["eval"] == {"retrieval": ["val.csv"]}
    assert not re.search("/home/me|bucket", card)
    for row in ("steps | 12", "zero_shot_top1 | 0.5", "began with | weights.pt", "data | {0..3}.tar, a.tar"):
        assert f"| {row} |" in card


def test_what_cannot_be_written_is_refused_and_what_is_there_stays(tmp_path: Path, told: Export) -> None:
    two_lines = told(tmp_path, tmp_path / "out", "hf", "--license", "mit\ntags: [x]", refused=True)
    assert "--license: the name of a license is one line" in two_lines
    assert not (tmp_path / "out").exists()
    source, _ = checkpoint(tmp_path / "step", tiny_job())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    assert "is not empty" in told(source, tmp_path / "out", "open_clip", refused=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


ANOTHER = "transformers (would make another model of this one|has no such model|cannot load)"


@pytest.mark.parametrize(
    ("sections", "vision", "said"),
    [
        ({"optim": {"loss": "siglip"}}, {}, "it has a logit bias; --to open_clip takes every model"),
        ({}, {"no_ln_pre": True}, ANOTHER),
        ({}, {"ls_init_value": 0.5}, ANOTHER),
        ({}, {"pool_type": "avg"}, ANOTHER),
        ({"model": {"image_resize_mode": "longest"}}, {}, "its pixels of pictures of 65 x 39"),
        ({"model": {"image_size": (32, 48)}}, {}, "no image_size of 32 x 48"),
    ],
)
def test_a_model_of_which_transformers_makes_another_is_refused_and_open_clip_takes_it(
    tmp_path: Path, told: Export, sections: dict[str, Any], vision: dict[str, Any], said: str
) -> None:
    tiny = json.loads(Path(VIT).read_text())
    (tmp_path / "other.json").write_text(json.dumps({**tiny, "vision_cfg": {**tiny["vision_cfg"], **vision}}))
    source, clip = checkpoint(tmp_path / "step", tiny_job(config=str(tmp_path / "other.json"), **sections))
    assert re.search(said, told(source, tmp_path / "out", "hf", refused=True))
    assert list((tmp_path / "out").iterdir()) == []
    told(source, tmp_path / "out", "open_clip")
    if "optim" in sections:
        bias = OPEN_CLIP + "image = lambda _: model.logit_bias\n"
        (there, _) = features_there(tmp_path, tmp_path / "out", bias)
        assert float(there.detach()) == float(clip.model.logit_bias.detach())


def test_words_of_another_tokenizer_are_refused_by_transformers_and_go_with_other_forms(
    of_other_words: Path, exported: Callable[..., Exported], tmp_path: Path, told: Export
) -> None:
    said = told(of_other_words, tmp_path / "out", "hf", refused=True)
    assert "its tokenizer has other words than OpenAI's; --to open_clip" in said
    for form in ("open_clip", "safetensors"):
        told(of_other_words, tmp_path / form, form)
        assert (tmp_path / form / "tokenizer_config.json").is_file()
        for path in (tmp_path / form).glob("*.json"):
            assert str(of_other_words.parent) not in path.read_text(), path.name
    told(with_tokenizer(tmp_path, exported("hf").out), tmp_path / "openais", "hf")


def test_without_the_other_program_it_is_said_that_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Export
) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job())
    row = replace(FORMATS["safetensors"], compared_with="no_such_module")
    monkeypatch.setitem(FORMATS, "safetensors", row)
    assert "no_such_module is not installed, so" in told(source, tmp_path / "out", "safetensors")


@pytest.mark.parametrize("form", ["open_clip", "safetensors"])
def test_a_model_of_patches_is_exported_with_their_features(tmp_path: Path, told: Export, form: str) -> None:
    job = tiny_job(config=NAFLEX, model={"image_tokens": TOKENS})
    assert "naflex=True" in told(checkpoint(tmp_path / "step", job)[0], tmp_path / "out", form)
    (file,) = [path for path in (tmp_path / "out").glob("*.json") if "vision_cfg" in path.read_text()]
    config = json.loads(file.read_text())
    vision = config.get("model_cfg", config)["vision_cfg"]
    expected = TOKENS if hasattr(open_clip.transform, "naflex_eval_transform_v2") else None
    assert vision.get("image_seq_len") == expected


@pytest.mark.parametrize("form", ["hf", "onnx"])
def test_forms_for_pictures_of_one_size_are_refused(tmp_path: Path, told: Export, form: str) -> None:
    source, _ = checkpoint(tmp_path / "step", tiny_job(config=NAFLEX, model={"image_tokens": TOKENS}))
    said = told(source, tmp_path / "out", form, refused=True)
    assert f"--to {form}: this form holds towers that take images of one" in said
