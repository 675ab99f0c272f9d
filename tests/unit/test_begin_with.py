"""`model.init`: weights that need not fit, their tables of positions interpolated, the rest listed."""

import hashlib
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from tests.support.check import problems
from tests.support.jobs import COCA, VIT, nonscalar, tiny_job
from tests.support.steps import Clip, same, state_of, untrained, weights_of
from tests.support.text_towers import make_tower
from trainer.errors import InputError

IMAGE_TABLES = ("visual.positional_embedding", "visual.trunk.pos_embed")


@pytest.fixture
def weights(tmp_path: Path) -> str:
    return weights_of(tiny_job(), tmp_path / "small.pt")


def begun(weights: str, seed: int = 1, **model: Any) -> Clip:
    job = tiny_job(model={"init": weights, **model})
    return untrained(job.model_copy(update={"seed": seed}))


def test_logit_scale_and_bias_are_taken_whatever_their_shape(tmp_path: Path) -> None:
    weights, siglip = str(tmp_path / "siglip.pt"), {"loss": "siglip"}
    for other, own in ((nonscalar(VIT), VIT), (VIT, nonscalar(VIT))):
        state = untrained(tiny_job(config=other, optim=siglip)).model.state_dict()
        torch.save({**state, "logit_bias": state["logit_bias"] - 1}, weights)
        clip = untrained(tiny_job(config=own, model={"init": weights}, optim=siglip))
        assert clip.notes == (f"init: all weights of {weights} fit",)
        assert float(clip.model.logit_bias.detach()) == -11  # type: ignore[operator]


@pytest.mark.parametrize("key", ["init", "pretrained"])
def test_positions_are_interpolated_as_open_clip_does(weights: str, key: str) -> None:
    sizes = {"image_size": 48, "context_length": 24}
    ours = state_of(untrained(tiny_job(model={key: weights, **sizes})).model)
    open_clip.add_model_config(VIT)
    forced = {f"force_{name}": value for name, value in sizes.items()}
    theirs = open_clip.create_model("tiny-vit", pretrained=weights, **forced)
    name = "visual.positional_embedding"
    assert ours[name].shape != torch.load(weights)[name].shape
    assert same(ours, theirs.state_dict())


def test_another_text_tower_is_refused_until_the_share_allows_it(weights: str, tmp_path: Path) -> None:
    tower = str(make_tower(tmp_path / "bert"))
    with pytest.raises(
        InputError, match=r"% of the parameters are not in .*text\.transformer.* At most 5\.0%"
    ):
        begun(weights, text=tower)
    clip = begun(weights, text=tower, init_max_missing=0.9)
    saved = torch.load(weights, weights_only=True)
    ours = clip.model.state_dict()
    assert torch.equal(ours["visual.conv1.weight"], saved["visual.conv1.weight"])
    missing, unexpected = clip.notes[:2]
    assert "text.transformer.embeddings.word_embeddings.weight" in missing
    assert "they begin as without model.init" in missing
    assert "parameters that this model lacks: " in unexpected


def test_weights_of_the_other_loss_and_two_beginnings_are_refused(tmp_path: Path, weights: str) -> None:
    siglip = weights_of(tiny_job(optim={"loss": "siglip"}), tmp_path / "siglip.pt")
    with pytest.raises(InputError, match=r"was trained with optim\.loss = siglip"):
        begun(siglip)
    clip = untrained(tiny_job(model={"init": weights, "init_max_missing": 0.1}, optim={"loss": "siglip"}))
    assert float(clip.model.logit_bias.detach()) == -10  # type: ignore[operator]
    with pytest.raises(ValueError, match="init and pretrained both say where weights come from"):
        tiny_job(model={"init": weights, "pretrained": weights})


def test_a_state_needs_no_weights_to_begin_with(tmp_path: Path) -> None:
    job = tiny_job(model={"init": str(tmp_path / "gone.pt")})
    with pytest.raises(InputError, match=r"gone\.pt"):
        untrained(job)
    assert untrained(job, initial_weights=False).model is not None


@pytest.mark.parametrize(
    ("name", "init", "words"),
    [
        ("ViT-B-32", "/nowhere/w.pt", "no weights file that can be read at /nowhere/w.pt"),
        ("ViT-B-32", "timm", "image tower of ViT-B-32 is not one of timm's"),
        ("convnext_base", "timm", ""),
    ],
)
def test_check_refuses_what_cannot_begin(name: str, init: str, words: str) -> None:
    said = problems(tiny_job(model={"name": name, "init": init}))
    assert (words in said, bool(said)) == (True, bool(words))


@pytest.mark.parametrize("tower", ["plain", "custom"])
def test_a_longer_context_keeps_its_first_positions_and_stretches_the_others_as_long_clip_does(
    tmp_path: Path, tower: str
) -> None:
    """Its table, written out: keep + 4 k + r lies r quarters of the way from keep + k to its next."""
    optim = {"loss": "coca"} if tower == "custom" else {}
    config = COCA if tower == "custom" else VIT
    name = "text.positional_embedding" if tower == "custom" else "positional_embedding"
    first = weights_of(tiny_job(config=config, optim=optim), tmp_path / "first.pt")
    before, keep = torch.load(first)[name], 4
    many = len(before) - keep
    special = len(before) - json.loads(Path(config).read_text())["text_cfg"]["context_length"]
    settings = {"init": first, "context_length": keep + 4 * many - special, "init_max_missing": 0.0}
    clip = untrained(tiny_job(config=config, optim=optim, model={**settings, "init_keep_positions": keep}))
    found = clip.model.state_dict()[name]
    assert torch.equal(found[:keep], before[:keep])
    for k in range((len(found) - keep) // 4):
        begin = before[keep + k]
        step = before[keep + k + 1] - begin if k < many - 1 else begin - before[keep + k - 1]
        for r in range(4):
            torch.testing.assert_close(found[keep + 4 * k + r], begin + r / 4 * step, atol=1e-6, rtol=0)
    said = f"{name} keeps {keep} positions, and the others are stretched from {len(before)}"
    assert said in "\n".join(clip.notes)


def numbered(folder: Path, name: str, image_size: tuple[int, int], beside: str) -> str:
    """Weights of which each position is the numbers of its row and of its column, and what lies beside."""
    folder.mkdir()
    model: Any = untrained(tiny_job(config=name, model={"image_size": image_size})).model
    state, config = model.state_dict(), json.loads(Path(name).read_text())
    if beside == "model.json":
        config["vision_cfg"]["image_size"] = image_size
    if beside:
        (folder / "model.json").write_text(json.dumps(config))
    (table,) = (tensor for name, tensor in state.items() if name in IMAGE_TABLES)
    height, width = grid_of(model)
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float()
    table.view(-1, table.shape[-1])[-height * width :, :2] = places
    torch.save(state, folder / "model.pt")
    if beside == "manifest.json":
        sealed = {"model.pt": {"sha256": hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()}}
        about = {"job": {"model": {"image_size": image_size}}, "files": sealed}
        (folder / "manifest.json").write_text(json.dumps(about))
    return str(folder / "model.pt")


def grid_of(model: Any) -> tuple[int, int]:
    height, width = getattr(model.visual, "grid_size", None) or model.visual.trunk.patch_embed.grid_size
    return height, width


@pytest.mark.parametrize(
    ("config", "beside", "there", "here"),
    [
        ("open_clip", "manifest.json", (64, 128), (128, 256)),
        ("open_clip", "model.json", (32, 128), (64, 64)),
        ("timm", "manifest.json", (64, 256), (128, 128)),
    ],
)
def test_rows_and_columns_of_positions_stay_rows_and_columns(
    tmp_path: Path, config: str, beside: str, there: tuple[int, int], here: tuple[int, int]
) -> None:
    name = VIT
    if config == "timm":
        name = str(tmp_path / "tiny-timm.json")
        visual = {"timm_model_name": "test_vit", "image_size": 160, "timm_pool": "", "timm_proj": "linear"}
        Path(name).write_text(json.dumps({**json.loads(Path(VIT).read_text()), "vision_cfg": visual}))
    init = numbered(tmp_path / "step-00000001", name, there, beside)
    clip = untrained(tiny_job(config=name, model={"init": init, "image_size": here, "init_max_missing": 0.0}))
    height, width = grid_of(clip.model)
    (table,) = (tensor for name, tensor in clip.model.state_dict().items() if name in IMAGE_TABLES)
    rows, columns = table.view(-1, table.shape[-1])[-height * width :, :2].view(height, width, 2).unbind(-1)
    torch.testing.assert_close(rows, rows[:, :1].expand(height, width))
    torch.testing.assert_close(columns, columns[:1].expand(height, width))
    assert bool((rows[:, 0].diff() > 0).all() and (columns[0].diff() > 0).all())
    assert any("is interpolated from" in note for note in clip.notes)


def test_pretrained_of_another_shape_is_refused_where_open_clip_would_take_it_for_a_square(
    tmp_path: Path,
) -> None:
    weights = numbered(tmp_path / "step-00000001", VIT, (32, 128), "model.json")
    assert untrained(tiny_job(model={"pretrained": weights, "image_size": (32, 128)}))
    with pytest.raises(InputError, match=r"trained on images of \[32, 128\] .* model\.init"):
        untrained(tiny_job(model={"pretrained": weights, "image_size": (64, 64)}))


def test_positions_of_an_unknown_grid_are_refused_unless_they_fit(tmp_path: Path) -> None:
    init = numbered(tmp_path / "alone", VIT, (64, 128), "")
    assert begun(init, image_size=(64, 128)).notes == (f"init: all weights of {init} fit",)
    with pytest.raises(InputError, match=r"has 128 positions of patches, which are no square, .*image_size"):
        begun(init, image_size=(128, 256))
