"""One optimizer step in one process.

The subjects: accumulation, randomness, precision, clipping, locked towers, batch norm.
"""

import copy
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor, nn

from tests.support.jobs import COCA, RESNET, VIT, few_words, nonscalar, small_job, tiny_job
from tests.support.step_ranks import gradients_of_ranks
from tests.support.steps import (
    SAMPLES,
    MicroBatch,
    TrainStep,
    accumulating,
    batches_of,
    built,
    differing,
    drawn,
    features,
    gradients_of,
    grads,
    same,
    state_of,
    step_of,
    train_step,
    untrained,
    with_model,
)
from tests.support.thread_ranks import run_ranks
from tests.support.tiles import tiles_of
from trainer.comm.protocol import Comm
from trainer.data.pixels import normalised
from trainer.errors import InputError

TEXT_ENCODER = "encode_text" if open_clip.__version__ < "4" else "_encode_text"
"""Method that the forward pass of open_clip's models calls."""


def _config(path: Path, vision: dict[str, Any]) -> str:
    """Writes the config of the tiny ViT with another image tower; returns its path."""
    path.write_text(json.dumps({**json.loads(Path(VIT).read_text()), "vision_cfg": vision}))
    return str(path)


def _vision_of(config: str) -> dict[str, Any]:
    vision: dict[str, Any] = json.loads(Path(config).read_text())["vision_cfg"]
    return vision


def _of_timm(name: str, pool: str = "avg") -> dict[str, Any]:
    return {"timm_model_name": name, "timm_model_pretrained": False, "timm_pool": pool, "image_size": 64}


@pytest.fixture
def dropout_model(tmp_path: Path) -> str:
    """The tiny ViT with patch dropout, which draws random numbers in its forward pass."""
    return _config(tmp_path / "tiny-dropout.json", {**_vision_of(VIT), "patch_dropout": 0.5})


def test_dropout_draws_anew_in_each_step_and_repeats_with_the_seed(alone: Comm, dropout_model: str) -> None:
    step = step_of(small_job(config=dropout_model), alone)
    batches = batches_of(step.model, SAMPLES)
    losses = [float(step.gradients(batches, number)) for number in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


PAIRS = [("clip", 1, 1), ("clip", 2, 2), ("clip", 1, 4), ("siglip", 2, 1), ("siglip", 1, 2), ("siglip", 2, 4)]
OTHERS = [cell for cell in product(("clip", "siglip"), (1, 2), (1, 2, 4)) if cell not in PAIRS]
TILED = [*PAIRS, *(pytest.param(*cell, marks=pytest.mark.full) for cell in OTHERS)]
"""Each pair of loss, micro-batches and ranks; `-m full` has the rest."""


@pytest.mark.parametrize(("kind", "micro_batches", "ranks"), TILED)
def test_a_loss_in_tiles_gives_every_weight_the_gradient_of_the_plain_one(
    kind: str, micro_batches: int, ranks: int
) -> None:
    """Ranks together have the gradient that one process has of the whole batch."""
    size = SAMPLES // ranks // micro_batches
    job = accumulating(size, optim={"loss": kind}, model={"precision": "fp64"})
    samples = drawn(untrained(job).model.double(), SAMPLES)
    with tiles_of(0):
        _, expected = gradients_of_ranks(small_job(optim={"loss": kind}), 1, samples)
    with tiles_of(3):
        _, found = gradients_of_ranks(job, ranks, samples)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


IMAGES = ("start all_gather", (SAMPLES // 2, 32))


@pytest.mark.parametrize(
    ("size", "loss", "locked", "tile", "sent"),
    [
        (SAMPLES // 2, "clip", "", 3, [IMAGES]),
        (SAMPLES // 2, "clip", "", 0, [IMAGES]),
        (SAMPLES // 2, "clip", "lock_image", 3, [IMAGES]),
        (SAMPLES // 2, "clip", "lock_text", 0, [IMAGES]),
        (SAMPLES // 4, "clip", "", 3, []),
        (SAMPLES // 2, "siglip", "", 3, []),
    ],
)
def test_images_are_gathered_beside_the_text_tower_in_one_micro_batch(
    size: int, loss: str, locked: str, tile: int, sent: list[Any]
) -> None:
    job = accumulating(size, optim={"loss": loss}, model={locked: True} if locked else {})
    models = [built(job, comm).model.train() for comm in run_ranks(1, lambda c: c) * 2]

    def rank_main(comm: Any) -> list[Any]:
        model: Any = models[comm.world.rank]
        between: list[Any] = []
        before: list[int] = []
        model.visual.register_forward_hook(lambda *_: before.append(len(comm.sent)))
        encode = getattr(model, TEXT_ENCODER)

        def encode_text(*inputs: Any, **named: Any) -> Tensor:
            between.extend(comm.sent[before[-1] :])
            return encode(*inputs, **named)  # type: ignore[no-any-return]

        step = train_step(job, comm, model)
        setattr(model, TEXT_ENCODER, encode_text)
        many = SAMPLES // 2 // size
        step.gradients(batches_of(model, size)[comm.world.rank * many :][:many], step=0)
        assert len(model.visual._forward_hooks) == 1, "the model is as before"
        return between

    with tiles_of(tile):
        assert run_ranks(2, rank_main) == [sent, sent]


@pytest.mark.parametrize(("kind", "tile", "size"), [("clip", 0, 16), ("siglip", 3, 16), ("clip", 3, 4)])
def test_a_logit_scale_with_a_dimension_has_the_gradient_of_a_scalar(
    alone: Comm, kind: str, tile: int, size: int
) -> None:
    job = accumulating(size, optim={"loss": kind}, model={"precision": "fp64"})
    with tiles_of(tile):
        expected = gradients_of(step_of(job, alone), size)
        shaped = gradients_of(step_of(with_model(job, name=nonscalar(few_words(VIT))), alone), size)
    assert shaped["logit_scale"].shape == (1,)
    for name, gradient in expected.items():
        torch.testing.assert_close(shaped[name].view_as(gradient), gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("locked", "size", "tile"),
    [("lock_image", 4, 3), ("lock_text", 4, 0), ("lock_image", SAMPLES, 0), ("lock_text", SAMPLES, 3)],
)
def test_a_locked_tower_gets_no_gradient_and_the_other_one_does(
    alone: Comm, locked: str, size: int, tile: int
) -> None:
    with tiles_of(tile):
        found = gradients_of(step_of(accumulating(size, model={locked: True}), alone), size)
    image = [name for name in found if name.startswith("visual.")]
    assert (image == []) == (locked == "lock_image")
    assert (len(image) < len(found) - 1) == (locked == "lock_image")
    assert "logit_scale" in found


def test_gradient_is_clipped_to_the_norm_and_the_log_shows_it_before(alone: Comm) -> None:
    step = step_of(small_job(optim={"grad_clip_norm": 1e-3}), alone)
    result = step(batches_of(step.model, SAMPLES), 0)
    after = torch.stack([p.grad.norm() for p in step.model.parameters() if p.grad is not None]).norm()
    assert float(result.grad_norm) > 1e-3
    assert float(after) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "limit"),
    [({}, 100.0), ({"max_logit_scale": 20.0}, 20.0), ({"loss": "siglip", "max_logit_scale": 5.0}, 5.0)],
)
def test_logit_scale_stays_between_one_and_its_limit(alone: Comm, keys: dict[str, Any], limit: float) -> None:
    step = step_of(small_job(optim={"lr": 100.0, **keys}), alone)
    for number in range(3):
        step(batches_of(step.model, SAMPLES), number)
        assert 0 <= step.model.get_parameter("logit_scale").item() <= math.log(limit) + 1e-6


def test_the_logit_scale_of_siglip_weights_above_one_hundred_moves_by_its_gradient_alone(alone: Comm) -> None:
    """Released SigLIP weights have a logit scale of about 117.

    A clamp would change the model at the first step of fine-tuning.
    """
    step = step_of(small_job(optim={"loss": "siglip", "lr": 1e-6}), alone)
    scale = step.model.get_parameter("logit_scale")
    with torch.no_grad():
        scale.fill_(math.log(117.3))
    step(batches_of(step.model, SAMPLES), 0)
    assert scale.exp().item() == pytest.approx(117.3, rel=1e-4)


@pytest.mark.parametrize("size", [4, SAMPLES])
def test_bf16_autocast_keeps_parameters_gradients_and_loss_in_float32(alone: Comm, size: int) -> None:
    step = step_of(with_model(accumulating(size), precision="bf16"), alone)
    result = step(batches_of(step.model, size), 0)
    assert result.loss_share.dtype == torch.float32
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "vision",
    [
        _vision_of(VIT),
        _vision_of(RESNET),
        _of_timm("test_vit", "token"),
        *map(_of_timm, ("test_efficientnet", "test_nfnet")),
    ],
    ids=lambda vision: vision.get("timm_model_name", f"patches of {vision.get('patch_size')}"),
)
def test_images_in_half_precision_have_the_features_of_images_in_float32(
    tmp_path: Path, vision: dict[str, Any]
) -> None:
    """The first layer of every tower would cast them itself."""
    clip = untrained(small_job(config=_config(tmp_path / "tiny.json", vision))).model.train()
    batch = batches_of(clip, SAMPLES)[0]
    assert batch.images.dtype == torch.float32
    torch.manual_seed(0)
    wanted, *_ = features(clip, batch.images, batch.tokens, "bf16")
    torch.manual_seed(0)
    got, *_ = features(clip, batch.images.to(torch.bfloat16), batch.tokens, "bf16")
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(("config", "size"), [(VIT, 4), (VIT, SAMPLES), (RESNET, SAMPLES)])
def test_fp16_scaler_skips_a_step_that_overflows_and_halves_its_factor(
    alone: Comm, config: str, size: int
) -> None:
    """The statistics of batch norm stay as they were, too."""
    step = step_of(with_model(accumulating(size, config=config), precision="fp16"), alone)
    before = state_of(step.model)
    step.scaler.scale(torch.ones(1))
    step.scaler.update(1e38)
    assert not step(batches_of(step.model, size), 0).finite
    assert differing(before, step.model) == []
    assert step.scaler.get_scale() < 1e38


def _state_of_both(step: TrainStep) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of the model and of its optimizer."""
    return state_of(step.model), copy.deepcopy(step.optimizer.state_dict())


def _assert_as_before(before: tuple[dict[str, Tensor], dict[str, Any]], step: TrainStep) -> None:
    """Nothing has changed since the first step."""
    model, moments = before
    assert differing(model, step.model) == []
    after = step.optimizer.state_dict()
    assert after["param_groups"] == moments["param_groups"]
    for number, state in moments["state"].items():
        assert state["step"] == 1
        assert all(torch.equal(after["state"][number][name], value) for name, value in state.items())


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_fp16_skips_a_step_whose_finite_gradients_have_an_infinite_norm(
    alone: Comm, clip_norm: float | None
) -> None:
    """float32 holds each element and not their norm: clipping by it would make every parameter NaN."""
    optim = {"grad_clip_norm": clip_norm} if clip_norm else {}
    step = step_of(tiny_job(model={"precision": "fp16"}, optim=optim), alone)
    batches = batches_of(step.model, SAMPLES)
    assert step(batches, 0).finite
    step.scaler.update(2.0)
    before = _state_of_both(step)
    weight = step.model.get_parameter("visual.conv1.weight")
    hook = weight.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    result = step(batches, 1)
    assert not result.finite
    assert float(result.grad_norm) == float("inf")
    _assert_as_before(before, step)
    assert step.scaler.get_scale() == 1.0
    hook.remove()
    assert step(batches, 2).finite
    assert "logit_scale" in differing(before[0], step.model)


def test_batch_norm_with_accumulation_is_refused(alone: Comm) -> None:
    with pytest.raises(InputError, match=r"batch norm.*4 micro-batches"):
        step_of(accumulating(4, config=RESNET), alone)


def test_a_model_and_a_loss_that_do_not_fit_are_refused_wherever_the_config_was(alone: Comm) -> None:
    with pytest.raises(InputError, match=r"tiny-coca\.json also writes captions \(CoCa\)"):
        step_of(small_job(config=COCA), alone)
    with pytest.raises(InputError, match=r"tiny-vit\.json writes no captions"):
        step_of(small_job(optim={"loss": "coca"}), alone)


@pytest.fixture
def timm_model(tmp_path: Path) -> str:
    """A convolutional tower of timm's, whose batch norm has the activation in it."""
    return _config(tmp_path / "tiny-timm.json", _of_timm("test_efficientnet"))


@pytest.mark.parametrize("timm", [False, True])
def test_a_locked_tower_keeps_the_statistics_of_its_batch_norm(
    alone: Comm, timm_model: str, timm: bool
) -> None:
    """A locked tower keeps its parameters' names and its output, too, so that its checkpoints stay usable.

    Micro-batches may be accumulated.
    """
    job = accumulating(4, config=timm_model if timm else RESNET)
    plain = untrained(job).model
    step = step_of(with_model(job, lock_image=True), alone)
    batches = batches_of(step.model, 4)
    assert differing(state_of(plain), step.model) == []
    assert plain.state_dict().keys() == step.model.state_dict().keys()
    wanted, got = (_image_features(clip, batches[0].images) for clip in (plain, step.model))
    torch.testing.assert_close(got, wanted)
    for number in range(2):
        assert step(batches, number).finite
    moved = differing(state_of(plain), step.model)
    assert moved != []
    assert [name for name in moved if name.startswith("visual.") and "visual.head." not in name] == []


def _image_features(clip: nn.Module, images: Tensor) -> Tensor:
    """In evaluation mode; the model is in training mode afterwards."""
    with torch.no_grad():
        features: Tensor = clip.eval().get_submodule("visual")(images)
    clip.train()
    return features


@pytest.mark.parametrize("size", [4, 8])
def test_dropout_of_a_sample_does_not_depend_on_its_micro_batch(
    alone: Comm, dropout_model: str, size: int
) -> None:
    at_once = gradients_of(step_of(small_job(config=dropout_model), alone))
    in_micro_batches = gradients_of(step_of(accumulating(size, config=dropout_model), alone), size)
    torch.testing.assert_close(in_micro_batches, at_once, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("config", [VIT, RESNET])
def test_gradient_that_is_no_number_leaves_model_and_optimizer_as_they_were(
    alone: Comm, config: str, clip_norm: float | None
) -> None:
    """Batch norm too, whose statistics the forward pass moves, and the optimizer's counts of steps."""
    step = step_of(small_job(config=config, optim={"grad_clip_norm": clip_norm} if clip_norm else {}), alone)
    batches = batches_of(step.model, SAMPLES)
    assert step(batches, 0).finite
    before = _state_of_both(step)
    images = batches[0].images.clone()
    batches[0].images[0] = float("nan")
    assert not step(batches, 1).finite
    _assert_as_before(before, step)
    batches[0].images.copy_(images)
    assert step(batches, 2).finite
    assert "logit_scale" in differing(before[0], step.model)


@pytest.mark.parametrize("size", [4, SAMPLES])
def test_bytes_that_a_pass_normalises_have_the_gradient_of_normalised_images(alone: Comm, size: int) -> None:
    step = step_of(accumulating(size), alone)
    _, tokens = drawn(step.model, SAMPLES)
    pixels = torch.randint(0, 256, (SAMPLES, 4, 32, 32), dtype=torch.uint8)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    found = []
    for normalise in (None, lambda images: normalised(images, mean, std)):
        sent = pixels if normalise else normalised(pixels, mean, std)
        parts = [
            MicroBatch(p, t, normalise=normalise)
            for p, t in zip(sent.split(size), tokens.split(size), strict=True)
        ]
        step.gradients(parts, step=0)
        found.append(grads(step.model))
    assert same(*found)
    assert "visual.conv1.weight" in found[0]


def test_activations_that_are_recomputed_move_no_statistics_of_batch_norm(
    alone: Comm, timm_model: str
) -> None:
    states = []
    for recompute in (False, True):
        step = step_of(small_job(config=timm_model, model={"grad_checkpointing": recompute}), alone)
        step(batches_of(step.model, SAMPLES), 0)
        states.append(state_of(step.model))
    assert [name for name, tensor in states[0].items() if not torch.equal(tensor, states[1][name])] == []
    assert {int(tensor) for name, tensor in states[1].items() if "num_batches" in name} == {1}


def test_ranks_with_statistics_of_their_own_go_on_with_the_mean_of_them() -> None:
    """Otherwise each would evaluate and save another model, and the ranks' state would differ."""
    job = small_job(config=RESNET, model={"sync_batch_norm": False})

    def rank_main(comm: Any) -> tuple[dict[str, Tensor], Tensor]:
        model = models[comm.world.rank]
        step = train_step(job, comm, model)
        own_batch = [batches_of(model, SAMPLES // 2)[comm.world.rank]]
        step.gradients(own_batch, 0)
        own = model.get_buffer("visual.bn1.running_var").clone()
        model.load_state_dict(first)
        step(own_batch, 0)
        return state_of(model), own

    models = [untrained(job).model.train() for _ in range(2)]
    first = state_of(models[0])
    (state, own), (other_state, other) = run_ranks(2, rank_main)
    assert not torch.equal(own, other)
    torch.testing.assert_close(state["visual.bn1.running_var"], (own + other) / 2)
    assert [name for name, tensor in state.items() if not torch.equal(tensor, other_state[name])] == []
