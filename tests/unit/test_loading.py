"""Weights, configs and hubs from which no model can be made.

Each gives one sentence and the right exit code, and never the advice to run a file's code.
"""

import importlib.util
import json
import pickle
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.coca_model import MultimodalCfg
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from PIL import Image

from tests.support.check import found, problems
from tests.support.jobs import VIT, tiny_job
from tests.support.ready import models
from tests.support.steps import same, state_of, untrained
from tests.support.text_towers import make_tower
from trainer.config import Job, Model
from trainer.errors import InputError
from trainer.image.dockerfile import dockerfile
from trainer.model.config_keys import config_keys
from trainer.model.loading import loading
from trainer.model.packages import needed
from trainer.model.text_size import text_parameters


def _with_weights(path: Path) -> Job:
    job = tiny_job()
    return job.model_copy(update={"model": job.model.model_copy(update={"pretrained": str(path)})})


class Trap:
    """Leaves a file where its pickle is loaded as code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


BROKEN: dict[str, Any] = {
    "pickle.pt": lambda path: path.write_bytes(pickle.dumps({"state_dict": Trap(path.with_name("trapped"))})),
    "archive.pt": lambda path: torch.save({"state_dict": Trap(path.with_name("trapped"))}, path),
    "empty.pt": lambda path: path.touch(),
    "text.pt": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "list.pt": lambda path: torch.save([torch.zeros(2)], path),
    "no-tensors.pt": lambda path: torch.save({"epoch": 1}, path),
    "no-entries.pt": lambda path: torch.save({}, path),
    "bad.safetensors": lambda path: path.write_bytes(b"\x10" + bytes(30)),
    "empty.safetensors": lambda path: path.touch(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_weights_are_refused_without_advice_to_run_their_code(tmp_path: Path, name: str) -> None:
    BROKEN[name](tmp_path / name)
    job = _with_weights(tmp_path / name)
    with pytest.raises(InputError, match=name) as refusal:
        untrained(job)
    message = str(refusal.value)
    assert "weights_only" not in message
    assert "trust" not in message
    assert not message.isspace()
    assert len(message.splitlines()) <= 2
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"embed_dim": "wide"},
        {"vision_cfg": {"layers": "two"}},
        {"text_cfg": {"no_such_key": 1}},
        {"vision_cfg": None},
    ],
)
def test_a_config_that_makes_no_model_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({**json.loads(Path(VIT).read_text()), **change}))
    with pytest.raises(InputError, match=r"model\.name: .*odd\.json: "):
        untrained(tiny_job(config=str(path)))


UNREACHABLE = """
import sys, time
time.sleep = lambda _: None  # between the tries of the hub's client
from tests.support.jobs import tiny_job
from tests.support.steps import untrained
from trainer.model.loading import loading
from trainer.errors import InputError, StorageError
job = tiny_job(config=sys.argv[1])
if len(sys.argv) > 2:
    job = job.model_copy(update={"model": job.model.model_copy(update={"pretrained": sys.argv[2]})})
try:
    untrained(job)
except InputError as error:
    print(type(error) is StorageError, error)
"""


@pytest.mark.parametrize("arguments", [["hf-hub:nobody/nothing"], ["ViT-B-32", "laion2b_s34b_b79k"]])
def test_a_hub_that_does_not_answer_is_no_bad_input(arguments: list[str]) -> None:
    done = models().run(UNREACHABLE, *arguments)
    assert done.stdout.startswith("True "), done.stdout + done.stderr
    because = "the Hugging Face hub does not answer (ConnectionRefusedError: [Errno 111] Connection refused)"
    assert f"{arguments[-1]} cannot be fetched, because {because}: start again" in done.stdout


def test_what_an_offline_job_does_not_find_in_its_cache_is_bad_input() -> None:
    offline = "import huggingface_hub.constants as constants\nconstants.HF_HUB_OFFLINE = True\n"
    program = UNREACHABLE.replace('"pretrained": sys.argv[2]', '"pretrained": sys.argv[2], "offline": True')
    done = models().run(offline + program, "ViT-B-32", "laion2b_s34b_b79k")
    assert done.stdout.startswith("False "), done.stdout + done.stderr


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_lack_of_memory_is_no_bad_input(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, loading(tiny_job(), "weights.pt"):
        raise error
    assert raised.value is error


# Models of strangers: no key of a config and no file beside it runs code, or reaches a library unseen.

TINY: dict[str, Any] = json.loads(Path(VIT).read_text())


def _trap(folder: Path, file: str, auto: str) -> Path:
    """Lets `auto_map` in the file name a Python file that leaves a file behind when it is run.

    Returns the path of that.
    """
    trapped = folder / "trapped"
    code = f"import pathlib\npathlib.Path({str(trapped)!r}).touch()\nclass Stranger: pass\n"
    (folder / "stranger.py").write_text(code)
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    name: Any = [None, "stranger.Stranger"] if auto == "AutoTokenizer" else "stranger.Stranger"
    path.write_text(json.dumps({**content, "auto_map": {auto: name}}))
    return trapped


def _config(path: Path, **text: Any) -> Path:
    path.write_text(json.dumps({**TINY, "text_cfg": {**TINY["text_cfg"], **text}}))
    return path


@pytest.mark.parametrize("place", ["config file", "local-dir"])
def test_a_config_cannot_have_the_code_beside_it_run(tmp_path: Path, place: str) -> None:
    folder = make_tower(tmp_path / "tower")
    trapped = _trap(folder, "tokenizer_config.json", "AutoTokenizer")
    text = {
        "hf_model_name": str(folder),
        "hf_tokenizer_name": str(folder),
        "tokenizer_kwargs": {"trust_remote_code": True},
    }
    name = str(_config(tmp_path / "model.json", **text))
    if place == "local-dir":
        inner = {"model_cfg": json.loads(Path(name).read_text()), "preprocess_cfg": {}}
        (folder / "open_clip_config.json").write_text(json.dumps(inner))
        name = f"local-dir:{folder}"
    said = "text_cfg.tokenizer_kwargs.trust_remote_code is no key"
    assert said in problems(tiny_job(model={"name": name}))
    with pytest.raises(InputError, match=said):
        untrained(tiny_job(model={"name": name}))
    assert not trapped.exists()


@pytest.mark.parametrize("auto", ["AutoConfig", "AutoModel", "AutoTokenizer"])
def test_a_text_tower_with_code_of_its_own_is_refused_and_nobody_is_asked(
    tmp_path: Path, auto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tower(tmp_path / "tower")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    file, changes = (
        ("tokenizer_config.json", {"tokenizer_class": "Stranger"})
        if auto == "AutoTokenizer"
        else ("config.json", {"model_type": "strange"})  # a kind that transformers does not know
    )
    trapped = _trap(folder, file, auto)
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **changes}))
    said = "brings code of its own" if auto == "AutoConfig" else "model"
    with pytest.raises(InputError, match=said):
        untrained(tiny_job(model={"text": str(folder)}))
    assert not trapped.exists()


def test_an_attention_of_a_hub_is_refused(tmp_path: Path) -> None:
    folder = make_tower(tmp_path / "tower")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "stranger/kernel"}))
    with pytest.raises(InputError, match=r"'stranger/kernel'.*never runs"):
        untrained(tiny_job(model={"text": str(folder)}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vision_cfg": {"timm_model_name": "hf-hub:stranger/model"}}, "vision_cfg.timm_model_name is"),
        ({"vision_cfg": {"act_kwargs": {"device": "meta"}}}, "vision_cfg.act_kwargs.device is no key"),
        ({"text_cfg": {"norm_kwargs": {"dtype": "int8"}}}, "text_cfg.norm_kwargs.dtype is no key"),
        ({"text_cfg": {"tokenizer_kwargs": ["a"]}}, r"text_cfg.tokenizer_kwargs is \['a'\]"),
        ({"vision_cfg": {"width": 10**12}}, "vision_cfg.width is 1000000000000, and must be a whole number"),
        ({"text_cfg": {"width": True}}, "text_cfg.width is True"),
        ({"visual_cfg": {}}, "visual_cfg is no key"),
    ],
)
def test_other_keys_and_values_are_refused_before_a_library_gets_them(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "model.json"
    parts = {
        key: {**TINY.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in change.items()
    }
    path.write_text(json.dumps({**TINY, **parts}))
    teacher = {"name": "ViT-B-32", "teacher": str(path), "teacher_pretrained": "openai"}
    found = [problems(tiny_job(model=keys)) for keys in ({"name": str(path)}, teacher)]
    with pytest.raises(InputError) as refused:
        untrained(tiny_job(model={"name": str(path)}))
    for text, key in zip((*found, str(refused.value)), ("name", "teacher", "name"), strict=True):
        assert re.search(f"model.{key}: .*{said}", text)


@pytest.mark.parametrize("part", ["image tower", "text tower"])
def test_a_tower_that_no_machine_could_hold_is_bad_input(tmp_path: Path, part: str) -> None:
    if part == "image tower":
        config = {**TINY, "vision_cfg": {**TINY["vision_cfg"], "image_size": 2**20, "patch_size": 2**20}}
        (tmp_path / "wide.json").write_text(json.dumps(config))
        job = tiny_job(model={"name": str(tmp_path / "wide.json")})
    else:
        folder = make_tower(tmp_path / "wide", weights=False)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**13}))
        job = tiny_job(model={"text": str(folder)})
    with pytest.raises(InputError, match=r"wide.* has a tensor .* GiB of memory: are the sizes"):
        untrained(job)


def test_all_problems_of_a_config_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**TINY, "embed_dim": 0, "code": "x", "vision_cfg": 3}))
    assert len(problems(tiny_job(model={"name": str(path)})).splitlines()) == 3


@pytest.mark.parametrize(
    ("name", "part"), [("vision", CLIPVisionCfg), ("text", CLIPTextCfg), ("multimodal", MultimodalCfg)]
)
def test_the_keys_are_those_of_open_clips_classes(name: str, part: Any) -> None:
    keys = config_keys()
    later = {**keys["vision_4"], **keys["text_4"]} if open_clip.__version__ < "4" else {}
    assert set(keys[name]) - set(later) == {field.name for field in fields(part)}
    assert {"embed_dim", "vision_cfg", "text_cfg"} < set(keys["config"])


# Text towers of Hugging Face before a run: their name, their size, and the word where one is missing.

MISSING = """
import sys, time
time.sleep = lambda _: None  # between the tries of the hub's client
from tests.support.jobs import tiny_job
from trainer.errors import StorageError, InputError
from trainer.model.build import untrained
try:
    untrained(tiny_job(model={"name": "ViT-S-32-alt", "text": "hf:nobody/nothing"}))
except InputError as error:
    print(type(error) is StorageError, error)
"""


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@pytest.mark.parametrize(
    "keys", [{}, {"text_projection": "mlp"}, {"text_projection": "none"}, {"text_pooling": "pooler"}]
)
def test_the_parameters_of_a_tower_are_counted_from_its_config(
    tmp_path: Path, kind: str, keys: dict[str, str]
) -> None:
    model: dict[str, Any] = {"text": str(make_tower(tmp_path / kind, kind, weights=False)), **keys}
    tower: Any = untrained(tiny_job(model=model)).model.text
    assert text_parameters(Model(name=VIT, **model)) == sum(p.numel() for p in tower.parameters())


def test_a_text_tower_that_the_hub_does_not_give_is_named() -> None:
    done = models().run(MISSING)
    assert done.stdout.startswith("True the text tower hf:nobody/nothing (model.text) cannot be fetched")
    assert "ViT-S-32-alt" not in done.stdout


# Packages that a model of open_clip needs beside Clipship's own.
# They are known before a run starts, and the image has them.

SIGLIP = "ViT-B-16-SigLIP"


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the package from every import, and from the check."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )


def job(model: str, **sections: Any) -> Job:
    return tiny_job(config=model, **sections)


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("model", [SIGLIP, "roberta-ViT-B-32", "nllb-clip-base-siglip"])
def test_check_refuses_a_model_whose_package_is_not_here(model: str) -> None:
    said = problems(job(model), "--no-data")
    assert f"model.name: {model} needs the package transformers" in said
    assert ": `pip install transformers`" in said


def test_an_image_takes_the_versions_that_its_job_names_and_the_rest_once() -> None:
    text = dockerfile(job(SIGLIP, image={"pip_packages": ("transformers==5.0",)}))
    assert "requirements-text" not in text
    assert "transformers==5.0 sentencepiece protobuf" in text


def test_check_says_which_package_an_image_of_another_job_lacks() -> None:
    def told(model: str) -> list[str]:
        keys = {"slurm": {"container": "pyxis"}, "image": {"tag": "ours/clip:1"}}
        return [text for text in found(job(model, **keys), "--no-data")["warnings"] if "transformers" in text]

    (said,) = told(SIGLIP)
    named = 'image.pip_packages = ["transformers", "sentencepiece", "protobuf"]'
    assert f"an image of another job needs {named}" in said
    assert told("ViT-B-32") == []


def test_a_text_tower_needs_them_and_a_config_that_cannot_be_read_is_left_to_other_checks(
    tmp_path: Path,
) -> None:
    need = needed(Model(name="ViT-B-32", text="hf:bert-base-chinese"))
    assert need.packages == ("transformers", "sentencepiece", "protobuf")
    assert need.reason == "its text tower is model.text = hf:bert-base-chinese"
    for text in ("[]", '{"text_cfg": 1}', '{"model_cfg": []}', "{"):
        (tmp_path / "odd.json").write_text(text)
        assert needed(Model(name=str(tmp_path / "odd.json"))).packages == ()


# Keys that change a model's config: size of images, length of captions, dropped patches, preprocessing.


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("image_size", [32, 64], "vision_cfg"),
        ("context_length", 20, "text_cfg"),
        ("patch_dropout", 0.5, "vision_cfg"),
    ],
)
def test_a_key_makes_the_model_that_a_changed_config_file_makes(
    tmp_path: Path, key: str, value: Any, part: str
) -> None:
    config = json.loads(Path(VIT).read_text())
    config[part][key] = value
    (tmp_path / "changed.json").write_text(json.dumps(config))
    ours = untrained(tiny_job(model={key: tuple(value) if isinstance(value, list) else value}))
    theirs = untrained(tiny_job(config=str(tmp_path / "changed.json")))
    assert same(state_of(ours.model), state_of(theirs.model))
    assert ours.images.size == theirs.images.size
    assert torch.equal(ours.tokenizer(["a word"]), theirs.tokenizer(["a word"]))
    assert str(ours.model.visual) == str(theirs.model.visual)


@pytest.mark.parametrize(
    "keys",
    [
        {"image_mean": (0.5, 0.4, 0.3), "image_std": (0.2, 0.25, 0.3)},
        {"image_resize_mode": "longest", "image_interpolation": "bilinear"},
    ],
)
def test_pictures_are_prepared_for_evaluation_as_open_clip_prepares_them(keys: dict[str, Any]) -> None:
    clip = untrained(tiny_job(model=keys))
    open_clip.add_model_config(VIT)
    _, _, transform = open_clip.create_model_and_transforms("tiny-vit", **keys)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 80, 3), dtype=np.uint8))
    assert torch.equal(clip.eval_transform(picture), transform(picture))
    assert (tuple(clip.mean), tuple(clip.std)) == (
        transform.transforms[-1].mean,
        transform.transforms[-1].std,
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("image_size=0", "model.image_size"),
        ("image_size=[32]", "model.image_size"),
        ("patch_dropout=1.0", "model.patch_dropout"),
        ("context_length=0", "model.context_length"),
        ("image_std=[0.1, 0.0, 0.1]", "three numbers above 0"),
        ("image_mean=[0.1]", "model.image_mean"),
        ("image_size=[32, 64]", ""),
    ],
)
def test_wrong_values_are_refused(value: str, message: str) -> None:
    said = problems(tiny_job(), f"--set=model.{value}")
    assert message in said
    assert bool(said) == bool(message)
