"""Builds open_clip's models, tokenizers and transforms, the same way on every rank."""

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.factory import load_checkpoint
from open_clip.pretrained import download_pretrained_from_hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.comm.accelerator import is_cuda
from trainer.comm.protocol import Comm
from trainer.comm.rank_zero import raise_alike
from trainer.config import Job, Model
from trainer.config.batch_plan import BatchPlan
from trainer.config.losses import LOSSES, LossName
from trainer.data.tokens import Tokenizer, quick
from trainer.errors import InputError, encode_error
from trainer.model.captioning import initialise_decoder
from trainer.model.catalog import FOLDER, HUB, check_model, weights_file
from trainer.model.config_keys import check_keys
from trainer.model.gpu_math import choose_gpu_math, is_convolutional
from trainer.model.image_form import ImageForm, image_form
from trainer.model.image_positions import check_not_reshaped
from trainer.model.image_tokens import check_image_tokens, image_tokens, lost_pixels, not_recomputed
from trainer.model.init import TIMM, init_from
from trainer.model.kernels import Kernels, use_kernels
from trainer.model.layer_numbers import tower_of
from trainer.model.loading import check_finite, check_weights, loading, pretrained_file
from trainer.model.locking import lock_towers
from trainer.model.lora import adapt
from trainer.model.open_clip_api import LOGGERS
from trainer.model.preprocessing import preprocessing_of, said_beside, tokenizer_beside
from trainer.model.sync_batch_norm import has_batch_norm, synchronise_batch_norm
from trainer.model.text_source import TextSource, fit_tokenizer, text_source
from trainer.model.text_tower import check_caption_length, text_notes, use_our_text_towers
from trainer.model.weight_names import take_off_prefixes
from trainer.run.checkpoints import MODEL_CONFIG
from trainer.safe_io.plain import read_json

_FILLS = frozenset({"uniform_", "normal_", "kaiming_uniform_", "erfinv_"})
"""Names of the functions and methods, of tensors and of torch.nn.init, with which random values are drawn in
place; `erfinv_` is the second part of a truncated normal distribution."""


class SkipRandomValues(TorchFunctionMode):
    """Context in which a new parameter keeps the contents of its memory in place of random values.

    Buffers and constant values are set as usual: not all of them are in a checkpoint. Drawing random values
    is most of the time in which a model is made, and a state that is loaded overwrites them anyway.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function, unless it would fill a parameter with random values."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **kwargs)


use_our_text_towers()
take_off_prefixes()

_FIRST_BIAS = -10.0
"""Logit bias with which the siglip loss begins."""
_OWN = "open_clip's own"


@dataclass(frozen=True)
class Clip:
    """A model with the functions that turn samples into its input."""

    model: nn.Module
    tokenizer: Tokenizer
    """Function from texts to int64 [n, context length]."""
    images: ImageForm
    """Form in which the image tower takes pictures."""
    mean: Sequence[float]
    """Mean of each channel, for pixels from 0 to 1; `std` is the standard deviation."""
    std: Sequence[float]
    kernels: Kernels = field(default_factory=Kernels)
    """Modules of the model that were replaced by faster ones."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by name, from which the model and its tokenizer can be built elsewhere."""
    notes: tuple[str, ...] = ()
    """Sentences about what was done with the model that its user should know."""
    new_bias: bool = False
    """True if its logit bias is the one that training begins with, since the weights had none."""

    @property
    def eval_transform(self) -> Callable[[Any], Tensor]:
        """Function from a PIL image to what the image tower takes, float32, normalised."""
        return self.images.eval_transform


def build_model(
    job: Job, plan: BatchPlan, comm: Comm, *, initial_weights: bool = True, on_host: bool = False
) -> Clip:
    """Collective: returns the job's model on this rank's device, or in the host's memory if `on_host`.

    Its weights come from the job's seed, or are fetched once a node; without `initial_weights` they are
    undefined until a state is loaded, or `give_initial_weights` is called. Raises InputError on all ranks
    alike.
    """
    clip = None
    for first in (True, False):  # the other ranks find the files in the cache
        problem = None
        if first == (comm.world.local_rank == 0):
            try:
                clip = untrained(job, initial_weights=initial_weights)
            except InputError as error:
                problem = encode_error(error)
        comm.barrier(job.timeouts.init_s)
        raise_alike(comm.all_gather_object(problem))
    assert clip is not None
    _place(clip.model, job.model, comm.device, torch.device("cpu") if on_host else comm.device)
    choose_gpu_math(job, clip.model, comm.device)
    if has_batch_norm(clip.model):
        _prepare_batch_norm(clip.model, job, plan, comm)
    kernels = use_kernels(clip.model, job.model)
    return replace(clip, kernels=kernels, notes=(*clip.notes, *adapt(clip.model, job.model, job.seed)))


def build_alone(job: Job, device: torch.device) -> Clip:
    """Returns the job's model on the device, in a process that has no ranks beside it, to be used as it is.

    Raises InputError.
    """
    clip = untrained(job)
    _place(clip.model, job.model, device, device)
    choose_gpu_math(job, clip.model, device)
    return replace(clip, kernels=use_kernels(clip.model, job.model))


def trained_towers(model: nn.Module) -> tuple[bool, bool]:
    """Returns whether the image tower and the text tower have parameters that are trained."""
    trained = {tower_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    return "image" in trained, "text" in trained


def clamp_logit_scale(model: nn.Module, limit: float | None) -> None:
    """Clamps the factor of the similarities between 1 and the limit; None leaves it alone.

    The parameter is the factor's logarithm.
    """
    scale = getattr(model, "logit_scale", None)
    if limit is not None and isinstance(scale, Tensor):
        with torch.no_grad():
            scale.clamp_(0, math.log(limit))


def give_initial_weights(job: Job, model: nn.Module) -> None:
    """Loads the weights with which the job begins into a model made without them. Raises InputError."""
    model.load_state_dict(model.state_dict() | untrained(job).model.state_dict())


def untrained(job: Job, *, initial_weights: bool = True) -> Clip:
    """Returns the job's model on the CPU, with weights from its seed or from `pretrained`. Raises InputError.

    Without `initial_weights` its parameters are undefined; buffers that no checkpoint has are as they should
    be, and so is the state of the random generator in either case. It does not communicate.
    """
    torch.manual_seed(job.seed)
    notes: list[str] = []
    pretrained = pretrained_file(job)
    if check_weights(pretrained) and not LOSSES[job.optim.loss].has_bias:
        raise InputError(
            f"model.pretrained: {pretrained} was trained with optim.loss = siglip "
            f"and has a bias, which a model for optim.loss = {job.optim.loss} lacks: "
            "set optim.loss = siglip, or choose other weights"
        )
    _check_init(job)
    with (
        quiet(pretrained is None or not initial_weights),
        loading(job, pretrained),
        nullcontext() if initial_weights else SkipRandomValues(),
    ):
        name = registered(job.model.name)
        config = model_config(name, job.model.cache_dir)
        check_image_tokens(job.model, config)
        begins = initial_weights and pretrained is None and ":" not in name
        # Beside such a name open_clip takes the weights that are there, whatever it is given.
        own = pretrained if name.startswith((HUB, FOLDER)) else None
        text = text_source(job.model, config, weights=begins) if config else None
        begin = _begin(job.model, pretrained)
        notes += _other_tokenizer(begin if initial_weights and config else None, text)
        model = open_clip.create_model(
            name,
            pretrained=None if own else pretrained,
            load_weights=initial_weights and own is None,
            cache_dir=job.model.cache_dir,
            output_dict=False,
            weights_only=True,
            force_image_size=job.model.image_size,
            force_context_length=job.model.context_length,
            force_patch_dropout=job.model.patch_dropout,
            force_preprocess_cfg={
                **(said_beside(begin, job.model) if begin else {}),
                **job.model.preprocessing,
            },
            pretrained_image=initial_weights and job.model.init == TIMM,
            **_initial_logits(job.optim.loss),
            **(text.model_arguments if text else {}),
        )
        if own and initial_weights:
            load_checkpoint(model, own, weights_only=True)
        if pretrained and initial_weights and os.path.isfile(pretrained):
            check_not_reshaped(model, Path(pretrained))
        if begins:
            initialise_decoder(model)
        if initial_weights and job.model.init not in (None, TIMM):
            notes += init_from(model, Path(weights_file(str(job.model.init))), job.model)
        check_finite(model, begin if initial_weights else None)
    if text is not None:
        check_caption_length(model, text.config["context_length"])
    new_bias = LOSSES[job.optim.loss].has_bias and initial_weights and _give_bias(model, pretrained)
    if new_bias:
        notes.append(f"the weights have no logit bias; it begins at {_FIRST_BIAS:g} (arXiv 2303.15343)")
    torch.manual_seed(job.seed)  # what follows draws the same values, however many the model drew
    with loading(job, None):
        if text is not None:
            text, tokenizer, told = fit_tokenizer(text, model)
            notes += told
        else:
            tokenizer = _tokenizer(name, job.model.cache_dir, job.model.context_length, json.dumps(config))
    preprocess = preprocessing_of(model)
    return Clip(
        model,
        quick(tokenizer),
        image_form(job, model, image_tokens(job.model, config)),
        preprocess["mean"],
        preprocess["std"],
        files=_files(config, text),
        notes=(*notes, *lost_pixels(job.model), *not_recomputed(job.model), *text_notes(model)),
        new_bias=new_bias,
    )


def _begin(settings: Model, pretrained: str | None) -> Path | None:
    """Returns the file of weights with which the model begins; None if there is none."""
    begin = pretrained
    if pretrained is None and settings.init not in (None, TIMM):
        begin = weights_file(str(settings.init))
    return Path(begin) if begin and os.path.isfile(begin) else None


def _other_tokenizer(begin: Path | None, text: TextSource | None) -> list[str]:
    """Returns a note if the weights' own config names another tokenizer than the model's."""
    named = tokenizer_beside(begin) if begin else None
    names = text.names if text else {}
    ours = str(names.get("hf_tokenizer_name") or names.get("hf_model_name") or "")
    if begin is None or named in (None, ours) or Path(ours) == begin.parent.absolute():
        return []
    note = (
        f"the config beside {begin} names the tokenizer {named or _OWN}, and this model takes "
        f"{ours or _OWN}: where their tokens differ, give model.name the model that the weights belong to"
    )
    return [note]


def _check_init(job: Job) -> None:
    """Raises InputError for weights to begin with that were trained with the other loss."""
    if job.model.init in (None, TIMM):
        return
    if check_weights(weights_file(str(job.model.init))) and not LOSSES[job.optim.loss].has_bias:
        raise InputError(
            f"model.init: {job.model.init} was trained with optim.loss = siglip: set the same loss, or "
            "choose other weights"
        )


def _give_bias(model: nn.Module, pretrained: str | None) -> bool:
    """Sets the initial bias where the weights had none (open_clip takes 0 then); returns whether it did."""
    bias = getattr(model, "logit_bias", None)
    if pretrained is None or not isinstance(bias, Tensor) or float(bias.detach()) != 0:
        return False
    with torch.no_grad():
        bias.fill_(_FIRST_BIAS)
    return True


def preload_tokenizer(job: Job) -> None:
    """Makes the tokenizer of the job's model, so that forks of this process need not.

    A tokenizer of another library is left out: it may start threads, or be fetched.
    """
    if ":" in job.model.name or job.model.text:
        return
    name = registered(job.model.name)
    config = model_config(name, job.model.cache_dir)
    if config is not None and not config["text_cfg"].keys() & {"hf_tokenizer_name", "tokenizer_type"}:
        _tokenizer(name, job.model.cache_dir, job.model.context_length, json.dumps(config))


@cache
def _tokenizer(name: str, cache_dir: str | None, context_length: int | None, config: str) -> Tokenizer:
    """Returns open_clip's tokenizer of a model; one for a `config` is enough, and its file is large."""
    tokenizer: Tokenizer = open_clip.get_tokenizer(name, context_length=context_length, cache_dir=cache_dir)
    return tokenizer


def _files(config: dict[str, Any] | None, text: TextSource | None) -> dict[str, bytes]:
    """Returns what a checkpoint keeps so that its model can be built elsewhere: config and tokenizer."""
    if config is None:
        return {}
    whole = {**config, **({"text_cfg": dict(text.names)} if text else {})}
    about = json.dumps(whole, indent=2, ensure_ascii=False).encode() + b"\n"
    return {MODEL_CONFIG: about, **(text.files() if text else {})}


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Silences open_clip's warning about random weights if `wanted`.

    Training from the beginning asks for such weights.
    """
    loggers, has_to_be_told = [logging.getLogger(name) for name in LOGGERS], _Errors()
    for log in loggers if wanted else ():
        log.addFilter(has_to_be_told)
    try:
        yield
    finally:
        for log in loggers:
            log.removeFilter(has_to_be_told)


class _Errors(logging.Filter):
    """Lets through errors alone; each has its own place in a log, so that threads may be quiet at once."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR


def model_config(name: str, cache_dir: str | None) -> dict[str, Any] | None:
    """Returns a registered model's config in open_clip's format; None if open_clip knows none.

    That of a model on a hub comes from the cache, or is downloaded into it. Raises InputError for a config
    that open_clip must not be given.
    """
    config: dict[str, Any] | None
    if name.startswith(HUB):
        file = download_pretrained_from_hf(
            name.removeprefix(HUB), filename="open_clip_config.json", cache_dir=cache_dir
        )
        found = read_json(Path(file), links=True)
        config = found.get("model_cfg", found)
    else:
        config = open_clip.get_model_config(name)
    if config is not None:
        check_keys(config, name)
    return config


def registered(name: str) -> str:
    """Returns open_clip's name of a model, which may be a config file beside the job. Raises InputError."""
    if name.endswith(".json"):
        check_model(name)
        open_clip.add_model_config(name)
        return Path(name).stem
    return name


def _initial_logits(loss: LossName) -> dict[str, float]:
    """Returns the initial logit scale and bias.

    SigLIP starts with a smaller scale, and with a bias that makes most pairs negative (arXiv 2303.15343,
    section 3.2).
    """
    return {"init_logit_scale": math.log(10), "init_logit_bias": _FIRST_BIAS} if LOSSES[loss].has_bias else {}


def _place(model: nn.Module, settings: Model, device: torch.device, place: torch.device) -> None:
    """Locks towers, chooses the memory layout for the device and moves the model to its place."""
    lock_towers(model, settings)
    if settings.grad_checkpointing:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    wanted = (
        settings.channels_last
        if settings.channels_last is not None
        else is_convolutional(model) and is_cuda(device)
    )
    model.to(place, torch.float64 if settings.precision == "fp64" else torch.float32)
    if wanted:
        model.to(memory_format=torch.channels_last)


def _prepare_batch_norm(model: nn.Module, job: Job, plan: BatchPlan, comm: Comm) -> None:
    if plan.accumulation > 1:
        raise InputError(
            f"{job.model.name} has batch norm, whose statistics cannot be those of the whole batch "
            f"when {plan.accumulation} micro-batches "
            "are accumulated: use more ranks, a larger optim.max_batch_size_per_gpu, a smaller "
            "optim.global_batch_size, "
            "or a model without batch norm"
        )
    if job.model.sync_batch_norm and comm.world.size > 1:
        synchronise_batch_norm(model, comm)
