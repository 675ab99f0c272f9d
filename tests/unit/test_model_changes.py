"""Keys that change a model's config: size of images, length of captions, dropped patches, preprocessing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from tests.support.check import problems
from tests.support.jobs import VIT, tiny_job
from tests.support.steps import same, state_of, untrained


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
