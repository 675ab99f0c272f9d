"""Pictures in their own shape: patches are those of timm and open_clip, and all else is as for one size."""

import dataclasses
import io
import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from timm.data import naflex_transforms
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify, RandomResizedCropToSequence
from timm.data.transforms_factory import create_transform
from timm.models.naflexvit import NaFlexEmbeds

from tests.support.command_line import TINY, check, joined
from tests.support.jobs import VIT, small_job, tiny_job
from tests.support.naflex import NAFLEX, PATCH, SHAPES, TOKENS, picture, rows_of
from tests.support.steps import features
from trainer.config import Job
from trainer.config.batch_plan import passes, plan
from trainer.data.augment import augmentation
from trainer.data.loader import Batch
from trainer.data.patches import Budget, Fitted, PatchCrop, eval_patches, normalised_patches, tower_input
from trainer.data.sample import RawSample
from trainer.errors import InputError
from trainer.model.build import untrained
from trainer.model.kernels import DevicePositions, use_kernels
from trainer.train.prefetch import Prefetcher

BUDGET = Budget(TOKENS, (PATCH, PATCH))
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
A_GPU = {"gpus_per_node": 1, "gpu": "A100-80GB"}


def _job(**sections: Any) -> Job:
    keys = {"image_tokens": TOKENS, **sections.pop("model", {})}
    return small_job(config=NAFLEX, model=keys, **sections)


@pytest.fixture(scope="module")
def clip() -> Any:
    return untrained(_job())


def _raw(image: Image.Image) -> RawSample:
    return RawSample("k", "table row 1", np.asarray(image), ("a caption",))


@pytest.mark.parametrize("budget", [BUDGET, Budget(9, (8, 4))])
def test_pictures_for_evaluation_are_those_of_open_clip_to_the_last_bit(budget: Budget) -> None:
    keys: dict[str, Any] = {"max_seq_len": budget.tokens, "patch_size": budget.patch}
    looks: dict[str, Any] = {"mean": MEAN, "std": STD, "interpolation": "bicubic"}
    if factory := getattr(open_clip.transform, "naflex_eval_transform_v2", None):
        theirs = factory(open_clip.transform.PreprocessCfg(size=32, **looks))(**keys)
    else:  # timm's, which is open_clip's from release 4 on
        theirs = create_transform((3, 32, 32), naflex=True, patchify=True, **keys, **looks)
    ours, pictures = eval_patches(budget, **looks), [picture(*shape) for shape in SHAPES]
    found = tower_input(torch.stack([ours(each) for each in pictures]))
    expected, _ = NaFlexCollator(budget.tokens)([(theirs(each), 0) for each in pictures])
    assert found["patch_valid"].sum(1).max() <= budget.tokens
    for name in ("patches", "patch_coord", "patch_valid"):
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("shape", [(640, 480), (900, 120), (20, 24)])
@pytest.mark.parametrize(("seed", "encoded"), [(0, False), (1, True)])
def test_crops_for_training_are_those_of_timm(
    shape: tuple[int, int], seed: int, encoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and coordinates are the same, and pixels but for the rounding of two libraries' bicubic."""
    budget, scale, ratio, draw = Budget(64, (16, 16)), (0.3, 1.0), (0.7, 1.5), random.Random(seed)
    smooth = picture(9, 7, seed).resize(shape, Image.Resampling.BICUBIC)
    raw = _raw(smooth)
    if encoded:
        smooth.save(file := io.BytesIO(), "jpeg")
        raw, smooth = dataclasses.replace(raw, image=file.getvalue()), Image.open(file)

    def randint(least: int, most: int) -> int:
        return least + int(draw.random() * (most - least + 1))

    monkeypatch.setattr(naflex_transforms, "random", SimpleNamespace(uniform=draw.uniform, randint=randint))
    crop = RandomResizedCropToSequence(budget.patch, budget.tokens, scale, ratio, "bicubic")(smooth)
    expected = Patchify(budget.patch)(crop)
    rows = PatchCrop(budget, scale, ratio)(raw, seed)
    found = tower_input(normalised_patches(rows[None], torch.zeros(3), torch.ones(3)))
    count = len(expected["patches"])
    assert int(found["patch_valid"].sum()) == count
    assert torch.equal(found["patch_coord"][0, :count], expected["patch_coord"])
    apart = (found["patches"][0, :count] - expected["patches"]).abs() * 255
    assert float(apart.max()) <= 2.01
    assert float(apart.mean()) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("height", "width"), [(1, 4096), (64, 64)])
def test_every_precision_holds_the_grid_of_any_picture(height: int, width: int, dtype: torch.dtype) -> None:
    tall = Image.new("RGB", (width * 2, height * 2))
    rows = PatchCrop(Budget(4096, (2, 2)), (1.0, 1.0), (1.0, 1.0))(_raw(tall), 0)
    found = tower_input(normalised_patches(rows[None], torch.zeros(3), torch.ones(3)).to(dtype))
    assert found["patch_coord"].amax((0, 1)).tolist() == [height - 1, width - 1]


def test_an_augmented_picture_follows_from_its_seed() -> None:
    change = augmentation(_job(data={"augment": {"rand_augment_ops": 2, "erase_prob": 1.0}}).data.augment)
    crop, plain = PatchCrop(BUDGET, change=change), PatchCrop(BUDGET)
    one, again, other = (crop(_raw(picture(90, 50)), seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, plain(_raw(picture(90, 50)), 1))
    assert torch.equal(one[-1], plain(_raw(picture(90, 50)), 1)[-1]), "the grid is no picture"


@pytest.mark.parametrize("shape", [(1, 1), (1, 30_000), (30_000, 1), (2, 3)])
def test_pictures_of_odd_shapes_make_patches(clip: Any, shape: tuple[int, int]) -> None:
    odd = picture(*shape)
    for rows in (clip.eval_transform(odd), PatchCrop(BUDGET)(_raw(odd), 0)):
        assert 1 <= int(tower_input(rows[None])["patch_valid"].sum()) <= TOKENS


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("edge", [4, 7, 12, 16])
def test_patches_of_another_size_are_embedded_as_timm_does_it(edge: int, mode: str) -> None:
    """timm resamples the weights, in float32, and here it is the patch."""
    embeds = NaFlexEmbeds(
        PATCH, 3, 32, "linear", pos_embed="none", pos_embed_interp_mode=mode, enable_patch_interpolator=True
    )
    budget = Budget(TOKENS, (edge, edge))
    rows = torch.stack([PatchCrop(budget)(_raw(picture(*shape)), 1) for shape in SHAPES])
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    found = Fitted((PATCH, PATCH), mode)(rows, mean, std)
    assert found.shape == (len(SHAPES), *BUDGET.shape)
    there, own = tower_input(normalised_patches(rows, mean, std)), tower_input(found)
    for name in ("patch_coord", "patch_valid"):
        assert torch.equal(own[name], there[name])
    theirs, _ = embeds(there["patches"].unflatten(2, (edge, edge, 3)), there["patch_coord"])
    ours, _ = embeds(own["patches"], own["patch_coord"])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _micro_batches(count: int, patches: int) -> list[Batch]:
    return [
        Batch(
            torch.full((2, patches + 1, 3), number, dtype=torch.uint8),
            torch.full((2, 4), number),
            *(0, 0, number),
            torch.arange(2) + 2 * number,
            ["", ""],
            [f"{number} a", f"{number} b"],
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(("patches", "sizes"), [(16, [2, 2, 2, 2]), (8, [4, 4]), (5, [4, 4]), (4, [8])])
def test_a_step_of_fewer_patches_passes_in_fewer_parts_of_the_same_samples(
    patches: int, sizes: list[int]
) -> None:
    job = tiny_job(
        config=NAFLEX,
        model={"image_tokens": (4, 8, 16)},
        optim={"global_batch_size": 8, "max_image_tokens_per_gpu": 32},
    )
    batch_plan = plan(job, 1)
    assert (batch_plan.micro_batch_size, batch_plan.accumulation) == (2, 4)
    prefetcher = Prefetcher(
        torch.device("cpu"), torch.float32, MEAN, STD, passes=partial(passes, job, batch_plan)
    )
    (found,) = prefetcher.steps(iter(_micro_batches(4, patches)), 4)
    assert [len(micro.images) for micro in found] == sizes
    assert [key for micro in found for key in micro.keys] == [f"{n} {c}" for n in range(4) for c in "ab"]
    expected = torch.arange(4).repeat_interleave(2)
    assert torch.equal(torch.cat([micro.images[:, 0, 0] for micro in found]), expected)
    assert torch.equal(torch.cat([micro.rows[:, 0] for micro in found]), expected)


def test_a_plan_counts_the_memory_of_the_largest_step_and_the_time_of_their_mean(tmp_path: Path) -> None:
    """A pass of few patches has more captions; here their long text tower is what takes the memory."""
    vision = {"timm_model_name": "naflexvit_base_patch16_siglip", "timm_pool": "map", "timm_proj": "none"}
    text = {"context_length": 512, "vocab_size": 1000, "width": 768, "heads": 12, "layers": 12}
    (file := tmp_path / "tower.json").write_text(
        json.dumps({"embed_dim": 768, "vision_cfg": vision, "text_cfg": text})
    )

    def estimate(tokens: Any, **optim: Any) -> tuple[float, float]:
        model = {"name": str(file), "image_tokens": tokens, "precision": "bf16"}
        optim = {"global_batch_size": 64, **optim}
        found = check(joined(TINY, model=model, optim=optim, resources=A_GPU, slurm={}))
        return found["gpu_bytes"], 1 / found["samples_per_s"]

    drawn = estimate((64, 256), max_image_tokens_per_gpu=2048)
    short = estimate(64, max_batch_size_per_gpu=32)
    long = estimate(256, max_batch_size_per_gpu=8)
    assert short[0] > long[0]
    assert drawn[0] == pytest.approx(short[0], rel=0.02)
    assert drawn[1] == pytest.approx((short[1] + long[1]) / 2, rel=1e-6)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("table", [(4, 4), (16, 16), (3, 7)])
def test_positions_on_the_device_are_those_of_timm(mode: str, table: tuple[int, int]) -> None:
    """timm's are in float32, which the tests of gradients take out of both."""
    embeds = NaFlexEmbeds(PATCH, 3, 32, "linear", pos_embed_grid_size=table, pos_embed_interp_mode=mode)
    grids = [(1, 1), (1, 60), (60, 1), (4, 4), (5, 12), (16, 3), (7, 8)]
    index = torch.arange(64)
    coordinates = torch.stack(
        [torch.stack([index // w, index % w], 1) * (index < h * w)[:, None] for h, w in grids]
    )
    found = []
    for kind in (NaFlexEmbeds, DevicePositions):
        x = torch.zeros(len(grids), 64, 32, requires_grad=True) * 1.0
        embeds.__class__ = kind
        embeds.zero_grad()
        embeds._apply_learned_naflex_pos_embed(x, coordinates)
        valid = torch.stack([index < h * w for h, w in grids])
        (x[valid] * torch.arange(32)).sum().backward()
        assert embeds.pos_embed is not None
        found.append((x[valid].detach(), embeds.pos_embed.grad))
    (theirs, of_theirs), (ours, of_ours) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-7)
    torch.testing.assert_close(of_ours, of_theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fast_kernels_give_the_features_of_plain_ones(precision: Any) -> None:
    job = _job(model={"precision": precision})
    found = []
    for kernels in ("plain", "fast"):
        clip = untrained(job)
        use_kernels(clip.model, job.model.model_copy(update={"kernels": kernels}))
        tokens = torch.ones(8, 16, dtype=torch.int64)
        image, *_ = features(clip.model.train(), rows_of(clip, 8), tokens, precision)
        image[:, 0].sum().backward()
        gradients = [p.grad for p in clip.model.get_submodule("visual").parameters() if p.grad is not None]
        assert all(gradient.isfinite().all() for gradient in gradients)
        found.append(image.detach())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize(
    ("key", "value"),
    [("image_size", 64), ("image_resize_mode", "squash"), ("patch_dropout", 0.5), ("cuda_graphs", True)],
)
def test_keys_of_pictures_of_one_size_are_refused(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"model\.{key}: .* in up to 16 patches .*: remove it"):
        untrained(_job(model={key: value}))


@pytest.mark.parametrize(
    ("config", "model", "said"),
    [
        (VIT, {"image_tokens": 16}, r"image_tokens = 16: the image tower of .*tiny-vit\.json takes"),
        (NAFLEX, {"image_patches": (8,)}, r"image_patches: .* images of one size: give model.image_tokens"),
    ],
)
def test_a_budget_and_a_tower_that_do_not_fit_are_refused(
    config: str, model: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        untrained(tiny_job(config=config, model=model))
