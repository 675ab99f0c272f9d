"""LoRA: gradients by its formula, weights that keep their bits, towers of each kind, and what is refused."""

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torch._dynamo
from open_clip.modified_resnet import ModifiedResNet
from torch import Tensor, nn

from tests.support.check import found
from tests.support.jobs import RESNET, VIT, few_words, tiny_job
from tests.support.steps import (
    SAMPLES,
    MicroBatch,
    TrainStep,
    batches_of,
    built,
    differing,
    features,
    grads,
    state_of,
    step_of,
    untrained,
    weights_of,
)
from tests.support.text_towers import make_tower
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.errors import InputError
from trainer.estimate.architecture import architecture
from trainer.model.build import build_model, give_initial_weights
from trainer.model.compile import compile_blocks

LOGITS = {"logit_scale"}
SCALE = 1.5


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Keys of models with weights to begin with, by the kind of their towers."""
    folder = tmp_path_factory.mktemp("begin")
    timm = json.loads(Path(few_words(VIT)).read_text())
    timm["vision_cfg"] = {"image_size": 160, "timm_model_name": "test_vit", "timm_proj": "linear"}
    (folder / "tiny-timm.json").write_text(json.dumps({**timm, "custom_text": True}))
    kinds: dict[str, dict[str, Any]] = {
        "open_clip": {"name": few_words(VIT)},
        "timm": {"name": str(folder / "tiny-timm.json")},
        "bert": {"name": few_words(VIT), "text": str(make_tower(folder / "bert"))},
    }
    for kind, keys in kinds.items():
        job = tiny_job(model=keys).model_copy(update={"seed": 9})
        keys |= {
            "pretrained": weights_of(job, folder / f"{kind}.pt"),
            "lora_rank": 2,
            "lora_alpha": 2 * SCALE,
        }
    return kinds


def job_of(keys: dict[str, Any], optim: dict[str, Any] | None = None, **model: Any) -> Job:
    return tiny_job(model={**keys, **model}, optim=optim or {})


def without_lora(job: Job, **model: Any) -> Job:
    return job.model_copy(update={"model": job.model.model_copy(update={"lora_rank": None, **model})})


def batch_of(model: nn.Module) -> MicroBatch:
    """The samples of a step, with words that each text tower knows."""
    (batch,) = batches_of(model, SAMPLES)
    return MicroBatch(batch.images, batch.rows % 16)


def trained(job: Job, comm: Comm, steps: int = 2) -> TrainStep:
    step = step_of(job, comm)
    for number in range(steps):
        step(batches_of(step.model, SAMPLES), number)
    return step


def features_of(model: nn.Module) -> Tensor:
    batch = batch_of(model)
    with torch.no_grad():
        image, text, *_ = features(model.eval(), batch.images, batch.rows, "fp32")
    model.train()
    return torch.cat([image, text])


def learning(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad} - LOGITS


def weight_beside(name: str, tensors: Any) -> str:
    """The name of the weight that an adapter's A belongs to."""
    place = name.removesuffix("lora_A")
    return place + ("in_proj_weight" if place + "in_proj_weight" in tensors else "weight")


def by_hand(tensors: dict[str, Tensor], scale: float = SCALE) -> dict[str, Tensor]:
    """The weights W + scale B A, by the names of a plain model."""
    plain = {name: each for name, each in tensors.items() if ".lora_" not in name}
    for name in tensors:
        if name.endswith(".lora_A"):
            up = tensors[name.replace("lora_A", "lora_B")]
            plain[weight_beside(name, plain)] = plain[weight_beside(name, plain)] + scale * up @ tensors[name]
    return plain


def test_loss_and_gradients_are_those_of_the_formula(begin: dict[str, dict[str, Any]], alone: Comm) -> None:
    """dA = s B^T dW and dB = s dW A^T, where dW is the gradient of a plain model with W + s B A."""
    job = job_of(begin["open_clip"], {"max_batch_size_per_gpu": 4}, precision="fp64")
    step, plain = step_of(job, alone), step_of(without_lora(job), alone)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in step.model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.1, generator=draw)
    plain.model.load_state_dict(by_hand(state_of(step.model)))
    batches = batches_of(step.model, 4)
    torch.testing.assert_close(step.gradients(batches, 0), plain.gradients(batches, 0), rtol=1e-12, atol=0)
    whole, ours = dict(plain.model.named_parameters()), dict(step.model.named_parameters())
    adapters = [name for name in ours if name.endswith("lora_A")]
    assert len(adapters) == 2 * 2 * 4
    for name in adapters:
        down, up, wanted = (
            ours[name],
            ours[name.replace("lora_A", "lora_B")],
            whole[weight_beside(name, whole)].grad,
        )
        assert wanted is not None
        torch.testing.assert_close(down.grad, SCALE * up.T @ wanted, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(up.grad, SCALE * wanted @ down.T, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kernels", ["fast", "plain"])
@pytest.mark.parametrize("kind", ["open_clip", "timm", "bert"])
def test_training_begins_with_the_weights_and_leaves_them_their_bits(
    begin: dict[str, dict[str, Any]], alone: Comm, kind: str, kernels: str, tmp_path: Path
) -> None:
    """Gradients and the optimizer's state are those of A and B alone, and a file of both is one model."""
    job = job_of(begin[kind], kernels=kernels, grad_checkpointing=kernels == "plain")
    step = step_of(job, alone)
    before = state_of(step.model)
    plain = built(without_lora(job), alone).model
    assert torch.equal(features_of(step.model), features_of(plain))
    assert learning(step.model) == {name for name in before if name.endswith(("lora_A", "lora_B"))}
    for number in range(2):
        assert step([batch_of(step.model)], number).finite
    changed = set(differing(before, step.model))
    assert changed == learning(step.model) | LOGITS
    kept = {id(parameter) for parameter in step.optimizer.state}
    assert kept == {id(step.model.get_parameter(name)) for name in changed}
    torch.save(step.model.state_dict(), tmp_path / "weights.pt")
    for key in ("pretrained", "init"):
        file = {"pretrained": None, key: str(tmp_path / "weights.pt")}
        one = untrained(without_lora(job, **file)).model
        torch.testing.assert_close(features_of(one), features_of(step.model), rtol=0, atol=1e-6)
        torch.testing.assert_close(state_of(one), by_hand(state_of(step.model)), rtol=0, atol=1e-7)


@pytest.mark.parametrize("tower", ["image", "text"])
def test_the_other_tower_learns_as_a_whole(begin: dict[str, dict[str, Any]], alone: Comm, tower: str) -> None:
    job = job_of(begin["open_clip"], lora_towers=tower, lora_targets=("*attn*",))
    found = learning(step_of(job, alone).model)
    whole = learning(step_of(without_lora(job), alone).model)
    image = {name for name in found if name.startswith("visual.")}
    adapted, other = (image, found - image) if tower == "image" else (found - image, image)
    assert all(".attn." in name and ".lora_" in name for name in adapted)
    assert len(adapted) == 2 * 2 * 2
    assert other == {name for name in whole if name.startswith("visual.") == (tower == "text")}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's own tracing, others in each version
def test_compiled_blocks_give_the_adapters_their_gradients(
    begin: dict[str, dict[str, Any]], alone: Comm
) -> None:
    def gradients(*, compiled: bool) -> dict[str, Tensor]:
        step = trained(job_of(begin["open_clip"]), alone)
        if compiled:
            assert compile_blocks(step.model.get_submodule("visual")).blocks == 2
        step.gradients(batches_of(step.model), 2)
        return grads(step.model)

    torch._dynamo.reset()
    plain, fast = gradients(compiled=False), gradients(compiled=True)
    torch._dynamo.reset()
    assert fast.keys() == plain.keys()
    for name, wanted in plain.items():
        assert float((fast[name] - wanted).norm()) <= 1e-5 * float(wanted.norm()), name


def test_a_model_made_without_weights_gets_them_beside_its_adapters(
    begin: dict[str, dict[str, Any]], alone: Comm
) -> None:
    job = job_of(begin["open_clip"])
    model = built(job, alone, initial_weights=False).model
    give_initial_weights(job, model)
    torch.testing.assert_close(state_of(model), state_of(step_of(job, alone).model), rtol=0, atol=0)


def test_check_counts_what_a_checkpoint_holds(begin: dict[str, dict[str, Any]], alone: Comm) -> None:
    job = job_of(begin["open_clip"], lora_rank=3)
    model = step_of(job, alone).model
    adapters = sum(model.get_parameter(name).numel() for name in learning(model))
    weights = sum(each.nbytes for each in model.state_dict().values())
    said = found(job)
    assert abs(said["checkpoint_bytes"] - weights - 2 * 4 * adapters) < 400
    assert "LoRA of rank 3 in both towers" in said["rows"]["model"][0]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pretrained": None}, "lora_rank trains beside weights that stay as they are.*: give pretrained"),
        ({"lock_image": True}, 'lock_image = true and lora_rank both .* or set lora_towers = "text"'),
        ({"lock_text": True, "lora_towers": "text"}, 'remove lock_text, or set lora_towers = "image"'),
        ({"pretrained": None, "init": "timm"}, 'init = "timm" has weights for the image tower alone'),
    ],
)
def test_keys_that_exclude_each_other_are_refused(
    begin: dict[str, dict[str, Any]], keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        job_of(begin["open_clip"], **keys)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"lora_targets": ("*attn*", "*q_proj*")},
            r"lora_targets: '\*q_proj\*' fits no weight of .* such as visual",
        ),
        (
            {"lora_targets": ("visual.*",)},
            "lora_towers: the text tower of .* fits model.lora_targets, so nothing",
        ),
        (
            {"config": RESNET, "lora_towers": "image"},
            "the image tower of .* has no linear weight in its blocks, so",
        ),
    ],
)
def test_towers_in_which_nothing_would_learn_are_refused(
    begin: dict[str, dict[str, Any]], alone: Comm, keys: dict[str, Any], said: str
) -> None:
    config = few_words(keys.pop("config", VIT))
    job = job_of({**begin["open_clip"], "name": config}, **keys)
    with pytest.raises(InputError, match=said):
        built(job, alone, initial_weights=False)


# Towers that are locked but for the layers at their end: what learns, and what check says of it.

SCALE_AND_BIAS = {"logit_scale", "logit_bias"}


def built_alone(job: Job) -> nn.Module:
    (model,) = run_ranks(1, lambda comm: build_model(job, plan(job, 1), comm).model)
    return model


def those_that_learn(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad} - SCALE_AND_BIAS


@pytest.mark.parametrize("groups", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("lock", "unlocked"),
    [("lock_image", "lock_image_unlocked_groups"), ("lock_text", "lock_text_unlocked_layers")],
)
def test_the_groups_at_a_towers_end_learn_as_open_clip_has_them_and_check_counts_them(
    lock: str, unlocked: str, groups: int
) -> None:
    if groups == 4:  # projection, two blocks, all before them
        with pytest.raises(InputError, match=f"model.{unlocked} = 4 leaves the whole .* tower unlocked"):
            built_alone(tiny_job(model={lock: True, unlocked: groups}))
        return
    job = tiny_job(model={lock: True, unlocked: groups})
    open_clip.add_model_config(VIT)
    theirs = open_clip.create_model("tiny-vit")
    getattr(theirs, f"{lock}_tower")(groups)
    assert those_that_learn(built_alone(job)) == those_that_learn(theirs)
    shape, learn = architecture(job.model), those_that_learn(theirs)
    assert shape is not None
    assert shape.trained_parameters == sum(theirs.get_parameter(name).numel() for name in learn)


@pytest.mark.skipif(
    hasattr(ModifiedResNet, "layer_groups"), reason="this open_clip unlocks parts of a ResNet"
)
def test_a_tower_without_groups_is_refused() -> None:
    with pytest.raises(InputError, match="image tower has no groups of layers that can be unlocked"):
        built_alone(tiny_job(config=RESNET, model={"lock_image": True, "lock_image_unlocked_groups": 1}))


def test_a_tower_that_is_unlocked_later_learns_from_the_step_after() -> None:
    job = tiny_job(model={"lock_image": True, "unlock_after_step": 2})
    assert those_that_learn(built_alone(job)) == those_that_learn(built_alone(tiny_job()))
    image = {name for name in those_that_learn(built_alone(job)) if name.startswith("visual.")}

    def changed(comm: Comm) -> list[set[str]]:
        step = step_of(job, comm)
        names = []
        for number in range(3):
            before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
            step(batches_of(step.model, SAMPLES), number)
            named = step.model.named_parameters()
            names.append({name for name, p in named if not torch.equal(p, before[name])})
        return names

    [(first, second, third)] = run_ranks(1, changed)
    assert first - image
    assert not (first | second) & image
    assert third >= image


def test_a_locked_tower_with_batch_norm_stays_locked() -> None:
    job = tiny_job(config=RESNET, model={"lock_image": True, "unlock_after_step": 2})
    with pytest.raises(InputError, match="image tower has batch norm"):
        run_ranks(1, lambda comm: step_of(job, comm))
