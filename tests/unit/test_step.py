"""One optimizer step in one process.

The subjects: accumulation, randomness, precision, clipping, locked towers, batch norm.
"""

import copy
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cpu_graphs import CpuGraph, use_cpu_graphs
from tests.support.jobs import COCA, RESNET, VIT, small_job, tiny_job
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
    fuse_as_on_a_gpu,
    grads,
    state_of,
    step_of,
    train_step,
    untrained,
    with_model,
)
from tests.support.text_towers import make_tower
from tests.support.thread_ranks import run_ranks
from tests.support.tiles import tiles_of
from trainer.comm.protocol import Comm
from trainer.data.loader import Batch
from trainer.errors import InputError
from trainer.model.caption_length import CaptionLength
from trainer.model.packed_captions import Packed, pack
from trainer.train.prefetch import ByLength, Prefetcher


def _config(path: Path, vision: dict[str, Any]) -> str:
    """Writes the config of the tiny ViT with another image tower; returns its path."""
    path.write_text(json.dumps({**json.loads(Path(VIT).read_text()), "vision_cfg": vision}))
    return str(path)


def _of_timm(name: str, pool: str = "avg") -> dict[str, Any]:
    return {"timm_model_name": name, "timm_model_pretrained": False, "timm_pool": pool, "image_size": 64}


def test_dropout_draws_anew_in_each_step_and_repeats_with_the_seed(alone: Comm) -> None:
    step = step_of(small_job(model={"patch_dropout": 0.5}), alone)
    losses = [float(step.gradients(batches_of(step.model), number)) for number in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize(
    ("kind", "micro_batches", "ranks"), [("clip", 1, 4), ("clip", 2, 2), ("siglip", 2, 1), ("siglip", 2, 4)]
)
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


@pytest.mark.parametrize(
    ("locked", "size", "tile"),
    [("lock_image", 4, 3), ("lock_text", SAMPLES, 0)],
)
def test_a_locked_tower_gets_no_gradient_and_the_other_one_does(
    alone: Comm, locked: str, size: int, tile: int
) -> None:
    with tiles_of(tile):
        step = step_of(accumulating(size, model={locked: True}), alone)
        step.gradients(batches_of(step.model, size), step=0)
    found = grads(step.model)
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


def test_bf16_autocast_keeps_parameters_and_loss_in_float32(alone: Comm) -> None:
    step = step_of(small_job(model={"precision": "bf16"}), alone)
    assert step(batches_of(step.model), 0).loss_share.dtype == torch.float32
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}


HARMS: dict[str, Callable[[TrainStep, MicroBatch], object]] = {
    "NaN": lambda _, batch: batch.images[0].fill_(float("nan")),
    "overflow": lambda step, _: step.scaler.update(1e38),
    # float32 holds each element and not their norm: clipping by it would make every parameter NaN
    "infinite norm": lambda step, _: step.model.get_parameter("visual.conv1.weight").register_hook(
        lambda gradient: torch.full_like(gradient, 3e38)
    ),
}


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("config", "precision", "harm"),
    [
        (VIT, "fp32", "NaN"),
        (RESNET, "fp32", "NaN"),
        (RESNET, "fp16", "overflow"),
        (VIT, "fp16", "infinite norm"),
    ],
)
def test_a_step_that_is_not_finite_leaves_model_and_optimizer_as_they_were(
    alone: Comm, config: str, precision: str, harm: str, clip_norm: float | None
) -> None:
    """Batch norm too, whose statistics the forward pass moves, and the optimizer's counts of steps."""
    optim = {"grad_clip_norm": clip_norm} if clip_norm else {}
    step = step_of(small_job(config=config, model={"precision": precision}, optim=optim), alone)
    if precision == "fp16":
        step.scaler.scale(torch.ones(1))
        step.scaler.update(2.0)
    assert step(batches_of(step.model), 0).finite
    before, moments = state_of(step.model), copy.deepcopy(step.optimizer.state_dict())
    batches = batches_of(step.model)
    hook = HARMS[harm](step, batches[0])
    scale = step.scaler.get_scale()
    result = step(batches, 1)
    assert not result.finite
    assert harm != "infinite norm" or float(result.grad_norm) == float("inf")
    assert differing(before, step.model) == []
    after = step.optimizer.state_dict()
    assert after["param_groups"] == moments["param_groups"]
    for number, state in moments["state"].items():
        assert all(torch.equal(after["state"][number][name], value) for name, value in state.items())
    if precision == "fp16":
        assert step.scaler.get_scale() == scale / 2
        step.scaler.update(2.0)
    if harm == "infinite norm":
        hook.remove()  # type: ignore[attr-defined]
    assert step(batches_of(step.model), 2).finite
    assert "logit_scale" in differing(before, step.model)


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
    """It keeps its parameters' names and its output, too, so that its checkpoints stay usable."""
    job = accumulating(4, config=timm_model if timm else RESNET)
    plain = untrained(job).model
    step = step_of(with_model(job, lock_image=True), alone)
    batches = batches_of(step.model, 4)
    assert plain.state_dict().keys() == step.model.state_dict().keys()
    with torch.no_grad():
        wanted, got = (clip.eval().get_submodule("visual")(batches[0].images) for clip in (plain, step.model))
    torch.testing.assert_close(got, wanted)
    step.model.train()
    assert step(batches, 0).finite
    moved = differing(state_of(plain), step.model)
    assert moved != []
    assert [name for name in moved if name.startswith("visual.") and "visual.head." not in name] == []


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


# Micro-batches of captions of like length: the same step, with fewer tokens in the text tower.

LONG = 20
RULE = CaptionLength(padding=1)


def padded(*lengths: int) -> Tensor:
    """Tokens with padding, 1, behind them."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 20, (len(lengths), LONG), generator=draw)
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = 1
    return tokens


def batch(*lengths: int, first: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(first)
    pixels = torch.randint(0, 255, (len(lengths), 3, 32, 32), generator=draw, dtype=torch.uint8)
    names = [f"{first + number}" for number in range(len(lengths))]
    positions, groups = torch.arange(len(lengths)), torch.arange(first, first + len(lengths))
    return Batch(pixels, padded(*lengths), 0, 0, 0, positions, names, names, (), None, groups)


def group() -> list[Batch]:
    """Two short and two long captions in each of two micro-batches."""
    return [batch(5, 20, 7, 19), batch(18, 6, 17, 3, first=4)]


def steps(by_length: ByLength | None, dtype: torch.dtype = torch.float64) -> list[MicroBatch]:
    channels = [0.5] * 3
    prefetcher = Prefetcher(torch.device("cpu"), dtype, channels, channels, RULE, 0, by_length)
    (found,) = prefetcher.steps(iter(group()), 2)
    return found


def test_the_log_says_once_what_is_spared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "clipship")
    by_length = ByLength(RULE, tells=True)
    for _ in range(25):
        by_length.order([each.tokens for each in group()])
    (line,) = caplog.messages
    assert line.split(None, 1)[1] == (
        "micro-batches by caption length: 30 % fewer tokens in the text tower in 10 steps"
    )


@pytest.mark.parametrize("kind", ["xlm-roberta", "modernbert"])
def test_the_gradient_is_that_of_the_order_of_the_loader_with_dropout_too(
    kind: str, tmp_path: Path, alone: Comm
) -> None:
    tower = make_tower(tmp_path, kind, pad_token_id=1)
    job = tiny_job(
        model={"text": str(tower), "precision": "fp64", "context_length": LONG, "patch_dropout": 0.5},
        optim={"global_batch_size": 8, "max_batch_size_per_gpu": 4},
    )
    found = []
    for by_length in (None, ByLength(RULE, tells=False)):
        clip = built(job, alone)
        assert clip.kernels.caption_length == RULE
        step = train_step(job, alone, clip.model.train())
        parts = steps(by_length)
        assert [part.rows.shape[1] for part in parts] == ([8, LONG] if by_length else [LONG, LONG])
        for part in parts:
            assert part.groups is not None
            assert [str(int(group)) for group in part.groups] == list(part.keys)
        loss = step.gradients(parts, step=3)
        found.append([loss, *grads(step.model).values()])
    assert len(found[0]) > 20
    for loaded, sorted_ in zip(*found, strict=True):
        torch.testing.assert_close(sorted_, loaded, rtol=1e-9, atol=1e-12)


# Steps whose passes are replayed are those of plain passes, to the last bit. Their graphs are the CPU's.

STEPS = 12
LENGTHS = (16, 8, 12)
"""Lengths to which captions are cut, in turns."""


def captions(samples: int, length: int, generator: torch.Generator, *, packs: bool) -> Tensor | Packed:
    """Returns captions of a length; packed ones are of several, whose sum is always the same."""
    tokens = torch.randint(1, 1000, (samples, length), generator=generator)
    if not packs:
        return tokens
    counted = torch.full((samples,), length - 2)
    counted[torch.randperm(samples, generator=generator)[:2]] += torch.tensor([2, -2])
    return pack(tokens, counted, torch.device("cpu"))


def trained(comm: Comm, model_keys: dict[str, Any], *, packs: bool = False, **sections: Any) -> list[Tensor]:
    """Returns the losses of all steps and all weights after them."""
    job = tiny_job(model=model_keys, **sections)
    step = step_of(job, comm)
    generator, losses = torch.Generator().manual_seed(1), []
    for number in range(STEPS):
        images, _ = drawn(step.model, job.optim.global_batch_size, seed=number)
        tokens = captions(len(images), LENGTHS[number % 3], generator, packs=packs)
        losses.append(step([MicroBatch(images, tokens)], number).loss_share)
    return [torch.stack(losses), *step.model.state_dict().values()]


@pytest.mark.parametrize(
    ("keys", "packs"),
    [
        ({"precision": "fp32"}, False),
        ({"precision": "bf16"}, False),
        ({"precision": "bf16"}, True),
        ({"precision": "bf16", "lock_image": True}, True),
    ],
    ids=["fp32", "bf16", "packed", "packed, a locked tower"],
)
def test_replayed_steps_are_plain_ones_to_the_last_bit(
    alone: Comm, keys: dict[str, Any], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clipped = {"grad_clip_norm": 0.1}
    if packs:  # as on a GPU, by the plain form of what Triton computes there
        fuse_as_on_a_gpu(monkeypatch)
    plain = trained(alone, keys, packs=packs, optim=clipped)
    use_cpu_graphs(monkeypatch)
    graphed = trained(alone, keys | {"cuda_graphs": True}, packs=packs, optim=clipped)
    # Images from the fourth step on, captions of each size from its fourth time on.
    towers = 1 if "lock_image" in keys else 2
    assert CpuGraph.replays == 2 * ((STEPS - 3) * (towers - 1) + STEPS - 3 * len(LENGTHS))
    for one, other in zip(graphed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert len(set(plain[0].tolist())) == STEPS


def test_a_gradient_that_is_a_part_of_another_is_clipped_once(
    alone: Comm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one sample autograd gives timm's class token a piece of the gradient of the positions."""
    vision = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 160}
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**json.loads(Path(VIT).read_text()), "vision_cfg": vision}))
    sections: dict[str, Any] = {
        "config": str(path),
        "optim": {"global_batch_size": 1, "grad_clip_norm": 1e-3, "loss": "siglip"},
    }
    plain = trained(alone, {}, **sections)
    use_cpu_graphs(monkeypatch)
    graphed = trained(alone, {"cuda_graphs": True}, **sections)
    for one, other in zip(graphed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
