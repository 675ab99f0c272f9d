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
from torch.nn.parallel import DistributedDataParallel

from tests.support.jobs import COCA, RESNET, VIT, few_words, nonscalar, small_job, tiny_job
from tests.support.thread_ranks import run_ranks
from tests.support.tiles import tiles_of
from trainer.comm.protocol import Comm
from trainer.comm.reducers import LocalReducer
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.data.pixels import normalised
from trainer.errors import InputError
from trainer.model.build import build_model, untrained
from trainer.model.outputs import features
from trainer.train.step import MicroBatch, TrainStep

SAMPLES = 16

TEXT_ENCODER = "encode_text" if open_clip.__version__ < "4" else "_encode_text"
"""Method that the forward pass of open_clip's models calls."""


def _step(job: Job, comm: Comm) -> TrainStep:
    batch_plan = plan(job, 1)
    clip = build_model(job, batch_plan, comm).model.train()
    return TrainStep(job, batch_plan, comm, clip)


def _batches(clip: nn.Module, size: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(1)
    side: Any = clip.get_submodule("visual").image_size
    height, width = side if isinstance(side, tuple) else (side, side)
    images = torch.randn(SAMPLES, 3, height, width, generator=generator, dtype=next(clip.parameters()).dtype)
    tokens = torch.randint(1, 1000, (SAMPLES, 16), generator=generator)
    return [MicroBatch(i, t) for i, t in zip(images.split(size), tokens.split(size), strict=True)]


def _gradients(step: TrainStep, size: int) -> dict[str, Tensor | None]:
    step.gradients(_batches(step.model, size), step=0)
    return {name: None if p.grad is None else p.grad.clone() for name, p in step.model.named_parameters()}


def _accumulating(size: int, **sections: Any) -> Job:
    optim_keys = {"max_batch_size_per_gpu": size, **sections.pop("optim", {})}
    return small_job(optim=optim_keys, **sections)


def _with_model(job: Job, **keys: Any) -> Job:
    return job.model_copy(update={"model": job.model.model_copy(update=keys)})


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _differing(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    return [name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)]


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


def test_the_second_pass_of_accumulation_repeats_the_dropout_of_the_first(
    alone: Comm, dropout_model: str
) -> None:
    step = _step(_accumulating(4, config=dropout_model), alone)
    passes: list[Tensor] = []
    step.model.get_submodule("visual").register_forward_hook(
        lambda _module, _input, out: passes.append(out.detach().clone())
    )
    _gradients(step, 4)
    first, second = passes[:4], passes[4:]
    assert len(first) == len(second) == 4
    for once, again in zip(first, second, strict=True):
        assert torch.equal(once, again)
    assert not torch.equal(first[0], first[1])


def test_dropout_draws_anew_in_each_step_and_repeats_with_the_seed(alone: Comm, dropout_model: str) -> None:
    step = _step(small_job(config=dropout_model), alone)
    batches = _batches(step.model, SAMPLES)
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
    job = _accumulating(size, optim={"loss": kind}, model={"precision": "fp64"})
    models = [untrained(job).model.double().train() for _ in range(ranks)]

    def rank_main(comm: Any) -> dict[str, Tensor | None]:
        model = models[comm.world.rank]
        step = TrainStep(job, plan(job, ranks), comm, model)
        first = comm.world.rank * micro_batches
        step.gradients(_batches(model, size)[first : first + micro_batches], step=0)
        return {name: p.grad for name, p in model.named_parameters()}

    whole = small_job(optim={"loss": kind}, model={"precision": "fp64"})
    with tiles_of(0):
        (expected,) = run_ranks(1, lambda comm: _of_one(whole, comm))
    with tiles_of(3):
        found = run_ranks(ranks, rank_main)
    for gradients in found:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tile", [0, 3])
@pytest.mark.parametrize("locked", [None, "lock_image", "lock_text"])
def test_images_are_gathered_beside_the_text_tower_and_change_no_bit(locked: str | None, tile: int) -> None:
    job = _accumulating(SAMPLES // 2)
    job = job if locked is None else _with_model(job, **{locked: True})
    images = ("start all_gather", (SAMPLES // 2, 32))
    with tiles_of(tile):
        late, early = (_two_ranks(job, early=early) for early in (False, True))
    for (gradients, before_texts), (expected, nothing) in zip(early, late, strict=True):
        assert (before_texts, nothing) == ([images], [])
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize(("size", "loss"), [(SAMPLES // 4, "clip"), (SAMPLES // 2, "siglip")])
def test_micro_batches_and_the_siglip_loss_gather_nothing_beside_the_text_tower(size: int, loss: str) -> None:
    job = _accumulating(size, optim={"loss": loss})
    assert [sent for _, sent in _two_ranks(job)] == [[], []]


def _two_ranks(job: Job, *, early: bool = True) -> list[tuple[dict[str, Any], list[Any]]]:
    """Gradients of both ranks by name, and what each gave to collectives between its towers."""
    models = [build_model(job, plan(job, 1), comm).model.train() for comm in run_ranks(1, lambda c: c) * 2]

    def rank_main(comm: Any) -> tuple[dict[str, Any], list[Any]]:
        model: Any = models[comm.world.rank]
        sent: list[Any] = []
        before: list[int] = []
        model.visual.register_forward_hook(lambda *_: before.append(len(comm.sent)))
        encode = getattr(model, TEXT_ENCODER)

        def encode_text(*inputs: Any, **named: Any) -> Tensor:
            sent.extend(comm.sent[before[-1] :])
            return encode(*inputs, **named)  # type: ignore[no-any-return]

        batch_plan = plan(job, 2)
        step = TrainStep(job, batch_plan, comm, model)
        setattr(model, TEXT_ENCODER, encode_text)
        if not early:
            step._loss.image_features_ready = lambda _: None  # type: ignore[method-assign, assignment]
        first = comm.world.rank * batch_plan.accumulation
        batches = _batches(model, batch_plan.micro_batch_size)[first : first + batch_plan.accumulation]
        share = step.gradients(batches, step=0)
        assert len(model.visual._forward_hooks) == 1, "the model is as before"
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {**gradients, "the loss": share}, sent

    return run_ranks(2, rank_main)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize(("tile", "size"), [(0, SAMPLES), (3, SAMPLES), (3, 4)])
def test_a_logit_scale_with_a_dimension_has_the_gradient_of_a_scalar(
    alone: Comm, kind: str, tile: int, size: int
) -> None:
    job = _accumulating(size, optim={"loss": kind}, model={"precision": "fp64"})
    with tiles_of(tile):
        expected = _gradients(_step(job, alone), size)
        shaped = _gradients(_step(_with_model(job, name=nonscalar(few_words(VIT))), alone), size)
    assert shaped["logit_scale"] is not None
    assert shaped["logit_scale"].shape == (1,)
    for name, gradient in expected.items():
        found = shaped[name]
        assert gradient is not None
        assert found is not None
        torch.testing.assert_close(found.view_as(gradient), gradient, rtol=1e-12, atol=1e-13)


def _of_one(job: Job, comm: Any) -> dict[str, Tensor | None]:
    return _gradients(_step(job, comm), SAMPLES)


@pytest.mark.parametrize("tile", [0, 3])
@pytest.mark.parametrize("locked", ["lock_image", "lock_text"])
@pytest.mark.parametrize("size", [4, SAMPLES])
def test_a_locked_tower_gets_no_gradient_and_the_other_one_does(
    alone: Comm, locked: str, size: int, tile: int
) -> None:
    job = _accumulating(size)
    with tiles_of(tile):
        gradients = _gradients(_step(_with_model(job, **{locked: True}), alone), size)
    image = [grad for name, grad in gradients.items() if name.startswith("visual.")]
    assert all(grad is None for grad in image) == (locked == "lock_image")
    assert gradients["logit_scale"] is not None


def test_gradient_is_clipped_to_the_norm_and_the_log_shows_it_before(alone: Comm) -> None:
    step = _step(small_job(optim={"grad_clip_norm": 1e-3}), alone)
    result = step(_batches(step.model, SAMPLES), 0)
    after = torch.stack([p.grad.norm() for p in step.model.parameters() if p.grad is not None]).norm()
    assert float(result.grad_norm) > 1e-3
    assert float(after) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "limit"),
    [({}, 100.0), ({"max_logit_scale": 20.0}, 20.0), ({"loss": "siglip", "max_logit_scale": 5.0}, 5.0)],
)
def test_logit_scale_stays_between_one_and_its_limit(alone: Comm, keys: dict[str, Any], limit: float) -> None:
    step = _step(small_job(optim={"lr": 100.0, **keys}), alone)
    for number in range(3):
        step(_batches(step.model, SAMPLES), number)
        assert 0 <= step.model.get_parameter("logit_scale").item() <= math.log(limit) + 1e-6


def test_the_logit_scale_of_siglip_weights_above_one_hundred_moves_by_its_gradient_alone(alone: Comm) -> None:
    """Released SigLIP weights have a logit scale of about 117.

    A clamp would change the model at the first step of fine-tuning.
    """
    step = _step(small_job(optim={"loss": "siglip", "lr": 1e-6}), alone)
    scale = step.model.get_parameter("logit_scale")
    with torch.no_grad():
        scale.fill_(math.log(117.3))
    step(_batches(step.model, SAMPLES), 0)
    assert scale.exp().item() == pytest.approx(117.3, rel=1e-4)


@pytest.mark.parametrize("size", [4, SAMPLES])
def test_bf16_autocast_keeps_parameters_gradients_and_loss_in_float32(alone: Comm, size: int) -> None:
    step = _step(_with_model(_accumulating(size), precision="bf16"), alone)
    result = step(_batches(step.model, size), 0)
    assert result.loss_share.dtype == torch.float32
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "vision",
    [
        _vision_of(VIT),
        _vision_of(RESNET),
        _of_timm("test_vit", "token"),
        *map(_of_timm, ("test_efficientnet", "test_convnext", "test_nfnet", "test_resnet")),
    ],
    ids=lambda vision: vision.get("timm_model_name", f"patches of {vision.get('patch_size')}"),
)
def test_images_in_half_precision_have_the_features_of_images_in_float32(
    tmp_path: Path, vision: dict[str, Any]
) -> None:
    """The first layer of every tower would cast them itself."""
    clip = untrained(small_job(config=_config(tmp_path / "tiny.json", vision))).model.train()
    batch = _batches(clip, SAMPLES)[0]
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
    step = _step(_with_model(_accumulating(size, config=config), precision="fp16"), alone)
    before = _state(step.model)
    step.scaler.scale(torch.ones(1))
    step.scaler.update(1e38)
    assert not step(_batches(step.model, size), 0).finite
    assert _differing(before, step.model) == []
    assert step.scaler.get_scale() < 1e38


def _state_of_both(step: TrainStep) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of the model and of its optimizer."""
    return _state(step.model), copy.deepcopy(step.optimizer.state_dict())


def _assert_as_before(before: tuple[dict[str, Tensor], dict[str, Any]], step: TrainStep) -> None:
    """Nothing has changed since the first step."""
    model, moments = before
    assert _differing(model, step.model) == []
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
    step = _step(tiny_job(model={"precision": "fp16"}, optim=optim), alone)
    batches = _batches(step.model, SAMPLES)
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
    assert "logit_scale" in _differing(before[0], step.model)


def test_batch_norm_with_accumulation_is_refused(alone: Comm) -> None:
    with pytest.raises(InputError, match=r"batch norm.*4 micro-batches"):
        _step(_accumulating(4, config=RESNET), alone)


def test_a_model_and_a_loss_that_do_not_fit_are_refused_wherever_the_config_was(alone: Comm) -> None:
    with pytest.raises(InputError, match=r"tiny-coca\.json also writes captions \(CoCa\)"):
        _step(small_job(config=COCA), alone)
    with pytest.raises(InputError, match=r"tiny-vit\.json writes no captions"):
        _step(small_job(optim={"loss": "coca"}), alone)


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
    job = _accumulating(4, config=timm_model if timm else RESNET)
    plain = untrained(job).model
    step = _step(_with_model(job, lock_image=True), alone)
    batches = _batches(step.model, 4)
    assert _differing(_state(plain), step.model) == []
    assert plain.state_dict().keys() == step.model.state_dict().keys()
    wanted, got = (_image_features(clip, batches[0].images) for clip in (plain, step.model))
    torch.testing.assert_close(got, wanted)
    for number in range(2):
        assert step(batches, number).finite
    moved = _differing(_state(plain), step.model)
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
    at_once = _gradients(_step(small_job(config=dropout_model), alone), SAMPLES)
    in_micro_batches = _gradients(_step(_accumulating(size, config=dropout_model), alone), size)
    for name, gradient in at_once.items():
        assert gradient is not None
        torch.testing.assert_close(in_micro_batches[name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("config", [VIT, RESNET])
def test_gradient_that_is_no_number_leaves_model_and_optimizer_as_they_were(
    alone: Comm, config: str, clip_norm: float | None
) -> None:
    """Batch norm too, whose statistics the forward pass moves, and the optimizer's counts of steps."""
    step = _step(small_job(config=config, optim={"grad_clip_norm": clip_norm} if clip_norm else {}), alone)
    batches = _batches(step.model, SAMPLES)
    assert step(batches, 0).finite
    before = _state_of_both(step)
    images = batches[0].images.clone()
    batches[0].images[0] = float("nan")
    assert not step(batches, 1).finite
    _assert_as_before(before, step)
    batches[0].images.copy_(images)
    assert step(batches, 2).finite
    assert "logit_scale" in _differing(before[0], step.model)


def test_one_rank_has_the_gradient_of_distributed_data_parallel_to_the_bit(alone: Comm) -> None:
    step = _step(small_job(), alone)
    without = _gradients(step, SAMPLES)
    assert step._reducer.module is step.model
    step._reducer = LocalReducer(DistributedDataParallel(step.model))
    for name, gradient in _gradients(step, SAMPLES).items():
        alone_gradient = without[name]
        assert gradient is not None
        assert alone_gradient is not None
        assert torch.equal(gradient, alone_gradient), name


@pytest.mark.parametrize("size", [4, SAMPLES])
def test_bytes_that_a_pass_normalises_have_the_gradient_of_normalised_images(alone: Comm, size: int) -> None:
    step = _step(_accumulating(size), alone)
    batches = _batches(step.model, size)
    images = [torch.randint(0, 256, (size, 4, 32, 32), dtype=torch.uint8) for _ in batches]
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    gradients = []
    for normalise in (None, lambda pixels: normalised(pixels, mean, std)):
        sent = [pixels if normalise else normalised(pixels, mean, std) for pixels in images]
        parts = [
            MicroBatch(pixels, batch.tokens, normalise=normalise)
            for pixels, batch in zip(sent, batches, strict=True)
        ]
        step.gradients(parts, step=0)
        named = step.model.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    assert "visual.conv1.weight" in gradients[0]


def test_a_step_moves_the_statistics_of_batch_norm(alone: Comm) -> None:
    step = _step(small_job(config=RESNET), alone)
    before = _state(step.model)
    assert step(_batches(step.model, SAMPLES), 0).finite
    assert {"visual.bn1.running_mean", "visual.bn1.running_var", "visual.bn1.num_batches_tracked"} <= set(
        _differing(before, step.model)
    )


def test_activations_that_are_recomputed_move_no_statistics_of_batch_norm(
    alone: Comm, timm_model: str
) -> None:
    states = []
    for recompute in (False, True):
        step = _step(small_job(config=timm_model, model={"grad_checkpointing": recompute}), alone)
        step(_batches(step.model, SAMPLES), 0)
        states.append(_state(step.model))
    assert [name for name, tensor in states[0].items() if not torch.equal(tensor, states[1][name])] == []
    assert {int(tensor) for name, tensor in states[1].items() if "num_batches" in name} == {1}


def test_ranks_with_statistics_of_their_own_go_on_with_the_mean_of_them() -> None:
    """Otherwise each would evaluate and save another model, and the ranks' state would differ."""
    job = small_job(config=RESNET, model={"sync_batch_norm": False})

    def rank_main(comm: Any) -> tuple[dict[str, Tensor], Tensor]:
        model = models[comm.world.rank]
        step = TrainStep(job, plan(job, 2), comm, model)
        batches = [_batches(model, SAMPLES // 2)[comm.world.rank]]
        step.gradients(batches, 0)
        own = model.get_buffer("visual.bn1.running_var").clone()
        model.load_state_dict(first)
        step(batches, 0)
        return _state(model), own

    models = [untrained(job).model.train() for _ in range(2)]
    first = _state(models[0])
    (state, own), (other_state, other) = run_ranks(2, rank_main)
    assert not torch.equal(own, other)
    torch.testing.assert_close(state["visual.bn1.running_var"], (own + other) / 2)
    assert [name for name, tensor in state.items() if not torch.equal(tensor, other_state[name])] == []
