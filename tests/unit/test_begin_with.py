"""`model.init`: weights that need not fit, their tables of positions interpolated, the rest listed."""

import hashlib
import json
import logging
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import nn

from tests.support.check import found as found_by_check
from tests.support.check import problems
from tests.support.jobs import COCA, MODELS, RESNET, VIT, nonscalar, tiny_job
from tests.support.steps import Clip, same, state_of, untrained, weights_of
from tests.support.text_towers import make_tower
from trainer.checkpoint.resume import expects_state
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.model.build import give_initial_weights
from trainer.train.main import prepare

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


# Models without initial weights, for ranks that go on: equal to the others once a state is loaded.


@pytest.fixture(params=["vit", "resnet", "timm"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    tower = {"timm_model_name": "test_vit", "timm_pool": "token", "image_size": 32}
    (tmp_path / "timm.json").write_text(
        json.dumps({**json.loads(Path(VIT).read_text()), "vision_cfg": tower})
    )
    configs = {"vit": VIT, "resnet": RESNET, "timm": str(tmp_path / "timm.json")}
    return tiny_job(config=configs[request.param])


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers, those too that no checkpoint has."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_loaded_state_leaves_nothing_of_the_undefined_values_and_the_same_random_numbers_follow(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = untrained(job).model
    after = torch.get_rng_state()
    state = {name: tensor + 1 for name, tensor in drawn.state_dict().items()}
    drawn.load_state_dict(state)
    empty = torch.empty

    def spoiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", spoiled)
        skipped = untrained(job, initial_weights=False).model
    assert torch.equal(torch.get_rng_state(), after)
    parameters = sum(parameter.numel() for parameter in skipped.parameters())
    undefined = sum(int(parameter.isnan().sum()) for parameter in skipped.parameters())
    assert undefined > parameters / 2, "random values were drawn"
    skipped.load_state_dict(state)
    assert same(everything(drawn), everything(skipped))


def test_a_model_that_finds_no_state_gets_the_weights_with_which_its_job_begins(job: Job) -> None:
    model = untrained(job, initial_weights=False).model
    give_initial_weights(job, model)
    assert same(everything(untrained(job).model), everything(model))


@pytest.mark.parametrize(
    ("resume", "on_disk", "generation", "in_memory", "expected"),
    [
        ("auto", False, 1, True, False),
        ("auto", True, 1, True, True),
        ("never", True, 1, True, False),
        ("/a/checkpoint", False, 1, True, True),
        ("auto", False, 2, True, True),
        ("auto", False, 2, False, False),
        ("never", True, 2, False, True),
    ],
)
def test_state_is_expected_of_a_checkpoint_or_of_the_ranks_before(
    resume: str,
    on_disk: bool,
    generation: int,
    in_memory: bool,
    expected: bool,
    tmp_path: Path,
    alone: Comm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its = tiny_job(checkpoint={"resume": resume}, recovery={"max_restarts": 3, "keep_in_memory": in_memory})
    if on_disk:
        checkpoint = tmp_path / "checkpoints" / "step-00000003"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    monkeypatch.setattr(alone, "world", replace(alone.world, generation=generation))
    assert expects_state(its, alone, tmp_path / "checkpoints") is expected


def test_run_whose_only_checkpoint_is_damaged_does_not_begin_again_by_itself(
    tmp_path: Path, alone: Comm
) -> None:
    its = tiny_job(logging={"runs": str(tmp_path)}, health={"preflight": False})
    checkpoint = tmp_path / its.name / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint.parents[1] / "job.toml").write_text(dump_job(its))
    with pytest.raises(InputError, match=r"the newest of 1 checkpoint is .*step-00000003.*--fresh"):
        prepare(its, alone)


# Weights of other programs and of other sizes: what they are is said, and what was done with them.

TINY: dict[str, Any] = json.loads(Path(VIT).read_text())


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in untrained(tiny_job()).model.state_dict().items()}


@pytest.mark.parametrize("key", ["init", "pretrained"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "model.", "model._orig_mod."])
def test_names_of_wrappers_are_taken_off_and_said(
    tmp_path: Path, state: dict[str, torch.Tensor], key: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": {"loss.weight": torch.zeros(2), **wrapped}}, tmp_path / "weights.pt")
    with caplog.at_level(logging.INFO, "clipship"):
        model = untrained(tiny_job(model={key: str(tmp_path / "weights.pt")})).model
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert f"{prefix!r} is taken off the names of {len(state)} tensors; 1 others" in caplog.text


def _script(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/code/__torch__.py", "class Model: pass")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"), "a pointer of Git LFS"),
        (_script, "a TorchScript archive"),
    ],
)
def test_files_that_are_no_weights_are_called_what_they_are(tmp_path: Path, write: Any, said: str) -> None:
    path = tmp_path / "weights.pt"
    write(path)
    name = f"weights.pt is {said}"
    for key in ("init", "pretrained"):
        job = tiny_job(model={key: str(path)})
        assert name in problems(job)
        with pytest.raises(InputError, match=name):
            untrained(job)


def _wide(tmp_path: Path) -> str:
    vision, text = {**TINY["vision_cfg"], "width": 64}, {**TINY["text_cfg"], "width": 64}
    (tmp_path / "wide.json").write_text(json.dumps({**TINY, "vision_cfg": vision, "text_cfg": text}))
    return str(tmp_path / "wide.json")


def test_weights_of_another_width_are_bad_input(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(InputError, match=r"model.init: .* does not fit the model .*only resolution"):
        untrained(tiny_job(config=_wide(tmp_path), model={"init": str(tmp_path / "model.pt")}))
    for name in ("manifest.json", "model.json"):
        (tmp_path / name).write_text(json.dumps(TINY))
    said = problems(tiny_job(model={"name": _wide(tmp_path), "init": str(tmp_path)}))
    assert re.search("towers are 48 and 32 wide, and those of .*wide.json are 64 and 64", said)
    assert problems(tiny_job(model={"init": str(tmp_path)})) == ""


def test_positions_that_are_interpolated_are_said(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, tmp_path / "weights.pt")
    keys = {"init": str(tmp_path / "weights.pt"), "image_size": 96, "context_length": 20}
    notes = "\n".join(untrained(tiny_job(model=keys)).notes)
    assert "visual.positional_embedding is interpolated from 17 positions to 145" in notes
    assert "positional_embedding is interpolated from 16 positions to 20" in notes


@pytest.mark.parametrize(("model", "said"), [("tiny-resnet.json", True), ("tiny-vit.json", False)])
def test_a_tower_that_ignores_checkpointing_is_said(model: str, said: bool) -> None:
    """open_clip's ResNet has an empty `set_grad_checkpointing`."""
    for wanted in (True, False):
        job = tiny_job(model={"name": str(MODELS / model), "grad_checkpointing": wanted})
        for found in (found_by_check(job)["warnings"], untrained(job).notes):
            told = [text for text in found if "grad_checkpointing does nothing in the image tower" in text]
            assert bool(told) == (said and wanted)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (100, "4 pixels of an edge unseen; 96 or 104 loses none"),
        ((32, 33), "1 pixel of an edge unseen; 32 x 32 or 40 x 40 loses none"),
        (96, ""),
    ],
)
def test_pixels_that_no_patch_sees_are_said(size: Any, said: str) -> None:
    job = tiny_job(model={"image_size": size})
    for found in (found_by_check(job)["warnings"], untrained(job).notes):
        assert any(said in text for text in found) if said else not any("patches" in text for text in found)
