"""Reads checkpoints of open_clip_train 3.3 and 4 (src/open_clip_train/main.py).

Such a file holds epoch, state_dict, optimizer and perhaps scaler.
"""

import fnmatch
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.state import TrainState, WholeState, put_weights
from trainer.checkpoint.weights import cause
from trainer.config.optimizers import NO_DECAY_IN_OPEN_CLIP_4, OPTIMIZERS, OptimizerName
from trainer.errors import InputError
from trainer.run.checkpoints import open_clip_parameters
from trainer.text.wording import many

log = logging.getLogger("clipship")


@dataclass(frozen=True)
class OpenClipCheckpoint:
    """Contents of a checkpoint of open_clip_train."""

    path: Path
    epoch: int
    """Number of epochs that are done."""
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    scaler: Mapping[str, Any]
    own_steps: int | None
    """Number of steps that are done, if the file itself counts them."""
    updates: int | None
    """Number of steps that its optimizer counts; those that a GradScaler left out are not among them."""

    def steps(self, by_epochs: int, batch: int) -> tuple[int, str]:
        """Returns the number of steps that are done, and how it was found where that is not plain, else "".

        `by_epochs` is that of as many epochs here, `batch` the number of samples of a step here.
        open_clip_train rounds epochs up, so that with a GradScaler the steps are never fewer than these.
        """
        if (other := self.batch) is not None and other != batch:
            return by_epochs, (
                f"the params.txt of the run that wrote {self.path} says {many(other, 'sample')} per step "
                "(batch_size x world_size x accum_freq), and optim.global_batch_size is "
                f"{batch}, so that its steps are counted by its epochs"
            )
        steps = self.updates if self.own_steps is None else self.own_steps
        if steps is None:
            return by_epochs, (
                f"{self.path} does not say how many steps it has done, so that they are counted by its epochs"
            )
        if self.own_steps is None and self.scaler and steps < by_epochs:
            return by_epochs, (
                f"the optimizer in {self.path} counts {many(steps, 'step')}, without those that its "
                "GradScaler left out, so that they are counted by its epochs"
            )
        if steps != by_epochs:
            return steps, (
                f"{self.path} has done {many(steps, 'step')} in {many(self.epoch, 'epoch')}, which would be "
                f"{by_epochs:,} here: the step counts, from which learning rate and samples follow. If its "
                "run had another batch, set model.pretrained instead."
            )
        return steps, ""

    @property
    def batch(self) -> int | None:
        """Samples of a step, by the parameters that open_clip_train wrote; None if they do not say it."""
        said = self._parameters
        try:
            return math.prod(int(said[name]) for name in ("batch_size", "world_size", "accum_freq"))
        except (KeyError, ValueError):
            return None

    @cached_property
    def _parameters(self) -> Mapping[str, str]:
        """Parameters of the run that wrote the file; empty if they are gone."""
        try:
            return open_clip_parameters(self.path)
        except OSError as error:
            log.warning(
                "resume       %s of the run that wrote %s cannot be read (%s), so that its batch is unknown, "
                "and its optimizer is not compared by name",
                error.filename,
                self.path,
                error.strerror,
            )
            return {}

    def check_optimizer(self, ours: OptimizerName) -> None:
        """Raises InputError if the state in the file is that of another optimizer than the job's.

        Several keep tensors of the same names: among these, only the run's parameters tell them apart.
        """
        row, named = OPTIMIZERS[ours], self._parameters.get("opt", "").lower().rpartition("/")[2]
        kept = {
            " ".join(sorted(moments.keys() - {"use_muon"})) for moments in self.optimizer["state"].values()
        }
        if named not in ("", row.factory or ours, row.synonym):
            theirs = named
        elif not kept <= {names.removesuffix(" step") if row.group_counts else names for names in row.state}:
            theirs = f"one that keeps {' and '.join(sorted(kept))} of a parameter"
        else:
            return
        raise InputError(
            f"checkpoint.resume = {self.path}: the optimizer in it is another one ({theirs}) than "
            f"optim.optimizer = {ours}: set the same one, or model.pretrained to load its weights alone"
        )


def read(path: Path) -> OpenClipCheckpoint:
    """Returns the file's contents, loaded as weights only. Raises InputError if it is no such checkpoint."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        weights = {name.removeprefix("module."): tensor for name, tensor in content["state_dict"].items()}
        return OpenClipCheckpoint(
            path,
            int(content["epoch"]),
            weights,
            content["optimizer"],
            content.get("scaler", {}),
            _count([content]),
            _count([*content["optimizer"]["state"].values(), *content["optimizer"]["param_groups"]]),
        )
    except Exception as error:  # damaged bytes can make torch.load raise anything
        raise InputError(
            f"checkpoint.resume = {path} is not a checkpoint of open_clip_train (a file with epoch, "
            "state_dict and optimizer): "
            f"{cause(error)}. To load weights alone, set model.pretrained."
        ) from None


def _count(holders: Iterable[Mapping[str, Any]]) -> int | None:
    counts = (holder.get(key) for holder in holders for key in ("global_step", "step"))
    return max((int(count) for count in counts if count is not None), default=None)


def whole_state(checkpoint: OpenClipCheckpoint, train: TrainState, optimizer: OptimizerName) -> WholeState:
    """Returns the contents by our names, the weights put into the model.

    Raises InputError if they are another model's, or another optimizer's than the job's.
    """
    checkpoint.check_optimizer(optimizer)
    try:
        put_weights(checkpoint.weights, train)
    except RuntimeError as error:
        raise InputError(f"checkpoint.resume = {checkpoint.path} belongs to another model: {error}") from None
    names = _optimizer_order(checkpoint, train.model)
    state = checkpoint.optimizer["state"]
    counts = {
        key: {"step": torch.tensor(float(group["step"]))}
        for group in checkpoint.optimizer["param_groups"]
        for key in (group["params"] if "step" in group else ())
    }  # as `trainer.model.optimizer` keeps them
    by_name = {names.get(key, ""): {**moments, **counts.get(key, {})} for key, moments in state.items()}
    if state and (by_name.keys() != set(names.values()) or not _fits(by_name, checkpoint.weights)):
        raise InputError(
            f"checkpoint.resume = {checkpoint.path}: its optimizer has state for {len(state)} parameters, "
            f"and they are not the {len(names)} that this model trains, or in another order (--wd-exclude, "
            "decay of the learning rate by layers): set model.pretrained to load its weights alone"
        )
    return WholeState(checkpoint.weights, by_name, checkpoint.scaler)


def _optimizer_order(checkpoint: OpenClipCheckpoint, model: nn.Module) -> dict[int | str, str]:
    """Returns the names of the parameters by what the file's optimizer calls them.

    Release 3.3 numbers first those without decay, then the others, each in the model's order; release 4
    spares more of them, and names its groups. The names of its FSDP are the model's.
    """
    groups = [str(group.get("group_name", "")) for group in checkpoint.optimizer["param_groups"]]
    spared = NO_DECAY_IN_OPEN_CLIP_4 if any(groups) else ()
    names: dict[str, list[str]] = {"no_wd": [], "wd": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            names["wd" if _decays(name, parameter, spared) else "no_wd"].append(name)
    if any(isinstance(key, str) for key in checkpoint.optimizer["state"]):
        return {name: name for kind in names.values() for name in kind}
    kinds = [group for group in groups if group] or list(names)
    return dict(enumerate(name for kind in kinds for name in names.get(kind, ())))


def _decays(name: str, parameter: nn.Parameter, spared: Iterable[str]) -> bool:
    if parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale")):
        return False
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in spared)


def _fits(by_name: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether the moments have the shapes of the parameters; steps are scalars."""
    return all(
        value.ndim == 0 or value.numel() == 1 or value.shape == weights[name].shape
        for name, moments in by_name.items()
        for value in moments.values()
        if isinstance(value, torch.Tensor)
    )
