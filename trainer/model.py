"""Models, tokenizers and transforms: open_clip's, made the same way on every rank."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import Tensor, nn

from trainer import job as jobs
from trainer.batch_norm import has_batch_norm, lock_batch_norm, synchronise_batch_norm
from trainer.checkpoint.weights import holds_bias
from trainer.comm.protocol import Comm
from trainer.data.pixels import RandomCrop
from trainer.data.tokens import Tokenizer, quick
from trainer.errors import InputError
from trainer.health.memory import is_out_of_memory
from trainer.inputs.models import weights_file
from trainer.job import Job
from trainer.plan import Plan

MAX_LOGIT_SCALE = math.log(100)  # arXiv 2103.00020, section 2.5


@dataclass(frozen=True)
class Clip:
    """A model and what turns samples into its input."""

    model: nn.Module
    tokenizer: Tokenizer
    """Texts -> int64 [n, context length]."""
    crop: RandomCrop
    """Sample and seed -> uint8 [3, height, width] for training."""
    mean: Sequence[float]
    """Of each channel, with pixels from 0 to 1; `std` is the standard deviation."""
    std: Sequence[float]
    eval_transform: Callable[[Any], Tensor]
    """PIL image -> float32 [3, height, width], normalised."""


def build(job: Job, plan: Plan, comm: Comm) -> Clip:
    """Collective: the job's model on this rank's device, weights from its seed or fetched once a node. Raises InputError on all alike."""
    clip = None
    for first in (True, False):  # the others find the files in the cache
        problem = ""
        if first == (comm.world.local_rank == 0):
            try:
                clip = untrained(job)
            except InputError as error:
                problem = str(error)
        comm.barrier(job.timeouts.init_s)
        if problems := [found for found in comm.all_gather_object(problem) if found]:
            raise InputError(problems[0])
    assert clip is not None
    _place(clip.model, job.model, comm.device)
    if has_batch_norm(clip.model):
        _prepare_batch_norm(clip.model, job, plan, comm)
    return clip


def features(model: nn.Module, images: Tensor, tokens: Tensor, precision: jobs.Precision) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Unit vectors [n, D] of images [n, 3, H, W] and tokens [n, L], the logit scale and the logit bias (or None), all float32 or wider."""
    with autocast(images.device, precision):
        out = model(images, tokens)
    image, text, scale, *bias = (_wide(tensor) for tensor in out)
    return image, text, scale, bias[0] if bias else None


def autocast(device: torch.device, precision: jobs.Precision) -> torch.autocast:
    """The job's precision for forward passes; parameters stay float32."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype=half or torch.bfloat16, enabled=half is not None)


def clamp_logit_scale(model: nn.Module) -> None:
    """Keep the temperature in [1, 100]."""
    scale = getattr(model, "logit_scale", None)
    if isinstance(scale, Tensor):
        with torch.no_grad():
            scale.clamp_(0, MAX_LOGIT_SCALE)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def untrained(job: Job) -> Clip:
    """The job's model on the CPU, weights from its seed or from `pretrained`; says nothing to other ranks. Raises InputError."""
    name = _register(job.model.name)
    torch.manual_seed(job.seed)
    pretrained = job.model.pretrained and weights_file(job.model.pretrained)
    with _quiet(pretrained is None), _loading(job, pretrained):
        model = open_clip.create_model(
            name,
            pretrained=pretrained,
            cache_dir=job.model.cache_dir,
            output_dict=False,
            weights_only=True,
            **_initial_logits(job.optim.loss),
        )
    preprocess = open_clip.transform.PreprocessCfg(**model.visual.preprocess_cfg)
    shared = {"mean": preprocess.mean, "std": preprocess.std, "interpolation": preprocess.interpolation}
    size = (preprocess.size, preprocess.size) if isinstance(preprocess.size, int) else tuple(preprocess.size[-2:])
    return Clip(
        model,
        quick(open_clip.get_tokenizer(name, cache_dir=job.model.cache_dir)),
        RandomCrop(size, scale=job.data.crop_scale, most_pixels=job.data.max_image_pixels),
        preprocess.mean,
        preprocess.std,
        open_clip.image_transform(preprocess.size, is_train=False, resize_mode=preprocess.resize_mode, **shared),
    )


@contextmanager
def _loading(job: Job, pretrained: str | None) -> Iterator[None]:
    """What open_clip says of a tag that is not there, of weights of another model, of what is not in the cache: as InputError.

    A hub that cannot be reached is none: another start may reach it.
    """
    try:
        yield
    except AttributeError:  # open_clip looks for the model's bias
        if pretrained is None or job.optim.loss == "siglip" or not os.path.isfile(pretrained) or not holds_bias(Path(pretrained)):
            raise
        raise InputError(
            f"model.pretrained: {pretrained} was trained with optim.loss = siglip, and has a bias that a model for the loss clip has not: "
            "set optim.loss = siglip, or choose other weights"
        ) from None
    except (RuntimeError, OSError) as error:
        unreachable = isinstance(error, OSError) and not job.model.offline and not os.path.exists(pretrained or "")
        if is_out_of_memory(error) or unreachable:
            raise
        what = "\n".join(str(error).splitlines()[:4])
        given = pretrained or "weights"
        raise InputError(f"{given} cannot be loaded as {job.model.name}: {what}\nis model.name (--model) right?") from None


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """open_clip warns of random weights, which is what training from the beginning asks for."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR if wanted else level)
    try:
        yield
    finally:
        root.setLevel(level)


def _register(name: str) -> str:
    """open_clip's name of a model, which may be a config file beside the job."""
    if name.endswith(".json"):
        open_clip.add_model_config(name)
        return Path(name).stem
    return name


def _initial_logits(loss: str) -> dict[str, float]:
    """SigLIP starts colder, and with a bias that makes most pairs negative (arXiv 2303.15343, section 3.2)."""
    return {"init_logit_scale": math.log(10), "init_logit_bias": -10.0} if loss == "siglip" else {}


def _place(model: nn.Module, settings: jobs.Model, device: torch.device) -> None:
    """Lock towers, choose the memory layout, move to the device."""
    if settings.lock_image:
        model.lock_image_tower()  # type: ignore[operator]
        lock_batch_norm(model.visual)  # type: ignore[arg-type]
    if settings.lock_text:
        model.lock_text_tower()  # type: ignore[operator]
    if settings.grad_checkpointing:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    convolutional = not hasattr(model.visual, "transformer")
    wanted = settings.channels_last if settings.channels_last is not None else convolutional and device.type == "cuda"
    model.to(device, torch.float64 if settings.precision == "fp64" else torch.float32)
    if wanted:
        model.to(memory_format=torch.channels_last)


def _prepare_batch_norm(model: nn.Module, job: Job, plan: Plan, comm: Comm) -> None:
    if plan.accumulation > 1:
        raise InputError(
            f"{job.model.name} has batch norm, whose statistics cannot be those of the whole batch when {plan.accumulation} micro-batches "
            "are accumulated: use more ranks, a larger optim.max_batch_size_per_gpu, a smaller optim.global_batch_size, "
            "or a model without batch norm"
        )
    if job.model.sync_batch_norm and comm.world.size > 1:
        synchronise_batch_norm(model, comm)
