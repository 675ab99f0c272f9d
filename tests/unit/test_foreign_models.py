"""Models of strangers: no key of a config and no file beside it runs code, or reaches a library unseen."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import open_clip
import pytest
from open_clip.coca_model import MultimodalCfg
from open_clip.model import CLIPTextCfg, CLIPVisionCfg

from tests.support.check import problems
from tests.support.jobs import VIT, tiny_job
from tests.support.steps import untrained
from tests.support.text_towers import make_tower
from trainer.errors import InputError
from trainer.model.config_keys import config_keys

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
