"""Replays both passes of the towers as CUDA graphs: one launch each, whatever the number of their kernels.

It is for steps so small that the GPU waits for the host. A graph reads inputs of one shape: images have one,
captions that are laid end to end a few, since their tokens are counted in coarse steps. A shape is captured
between two steps once training has met it some times; others run as before, by the same kernels, so that it
changes no value which of them are captured. Loss, reduction, clipping and update stay as they are, on every
number of ranks. A replay does what the capture did, so nothing may be captured that draws random numbers or
communicates.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.comm.accelerator import is_cuda
from trainer.comm.backends import check_backend
from trainer.config import Job, Model, Precision
from trainer.config.batch_plan import plan
from trainer.errors import InputError
from trainer.internals import copy_all
from trainer.model.image_tokens import check_image_tokens
from trainer.model.layer_numbers import tower_of
from trainer.model.open_clip_api import encoders_of
from trainer.model.outputs import autocast
from trainer.model.packages import check_captions
from trainer.model.packed_captions import Packed
from trainer.model.sync_batch_norm import has_batch_norm
from trainer.text.wording import many

log = logging.getLogger("clipship")

_RATES = ("p", "drop_prob", "prob", "dropout", "attn_drop")
"""Names under which modules keep the rate at which they drop something."""
_WARM_UP = 3
_OFTEN = 3
"""Times that training meets a shape before it is captured: a run's first steps have whole captions."""
_MOST = 4
"""Most shapes of a tower that are captured. Each takes memory of its own for what its kernels write."""

Shapes = tuple[torch.Size, ...]
"""Shapes of an input's tensors."""


class TowerGraphs:
    """The model's trained towers, which training replays as graphs if the job asks so."""

    def __init__(self, model: nn.Module, job: Job, device: torch.device) -> None:
        """Puts itself before the functions by which the model's forward pass encodes images and texts.

        Evaluation runs as before. Parameters must stay where they are in memory. Raises InputError for a
        model that cannot be captured. Does nothing without a GPU.
        """
        self._towers: list[_Tower] = []
        if not job.model.cuda_graphs or not is_cuda(device):
            return
        if problems := list(_problems(model)):
            raise InputError(f"model.cuda_graphs: {job.model.name} {' and '.join(problems)}: set it to false")
        for what, name in zip(("image", "text"), encoders_of(model), strict=True):
            if trained := _trained(model, what):
                tower = _Tower(model, what, getattr(model, name), trained, job.model.precision)
                vars(model)[name] = _replayed(model, tower)
                self._towers.append(tower)

    def capture(self) -> None:
        """Captures what training has met often enough: call it between steps, where no gradients are kept."""
        captured = [tower.capture() for tower in self._towers]  # of all towers
        for tower in self._towers if any(captured) else ():
            tower.make_room()


class _Tower:
    """A tower, and the graphs of its passes by the shapes of their input."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        encode: Callable[..., Tensor],
        trained: list[nn.Parameter],
        precision: Precision,
    ) -> None:
        self.encode, self._model, self._name, self._trained = encode, model, name, trained
        self._precision: Precision = precision
        self._met: Counter[Shapes] = Counter()
        self._wanted: Tensor | Packed | None = None
        self._largest: Tensor | Packed | None = None
        self._graphs: dict[Shapes, tuple[_Graphs, list[nn.Parameter]]] = {}
        """Graphs, and the parameters of which they give gradients."""
        self._shared: _Shared | None = None

    def __call__(self, x: Tensor | Packed) -> Tensor:
        """Returns the unit features of training's input, with their graph."""
        parts = _parts(x)
        shapes = _shapes(parts)
        if (known := self._graphs.get(shapes)) is not None:
            graphs, reached = known
            features: Tensor = _Replay.apply(graphs, parts, *reached)
            return features
        self._met[shapes] += 1
        if self._met[shapes] == _OFTEN and len(self._graphs) < _MOST:
            self._wanted = _copy(x)
        if not parts[0].is_floating_point() and (  # images have one size
            self._largest is None or parts[0].numel() > _parts(self._largest)[0].numel()
        ):
            self._largest = _copy(x)
        return self._encoded(x)

    def capture(self) -> bool:
        """Captures both passes for the input that is wanted, and returns whether there is one."""
        if self._wanted is None:
            return False
        x, self._wanted = self._wanted, None
        self._shared = self._shared or _Shared(torch.cuda.graph_pool_handle(), torch.cuda.Stream())
        with _aliased(self._model, self._trained) as trained:
            graphs = _Graphs(partial(self._encoded, x), _parts(x), trained, self._shared)
        self._graphs[_shapes(_parts(x))] = graphs, [*compress(self._trained, graphs.reached)]
        log.info("%-12s both passes of the %s tower, %s", "CUDA graphs", self._name, _size(x))
        return True

    def make_room(self) -> None:
        """Takes memory for the largest input that runs plain, before smaller ones cut it into pieces.

        A run's first steps have taken it, and a capture has given it back.
        """
        x = self._largest
        if x is not None and _shapes(_parts(x)) not in self._graphs:
            features = self._encoded(x)
            torch.autograd.grad(features, self._trained, torch.zeros_like(features), allow_unused=True)

    def _encoded(self, x: Tensor | Packed) -> Tensor:
        """Computes what a replay does, to the same bits: a weight that is used twice is rounded twice.

        A weight that autocast has cached would stay in the graph for ever.
        """
        with autocast(self._trained[0].device, self._precision, cache_enabled=False):
            return self.encode(x, normalize=True)


@dataclass
class _Shared:
    """Holds what graphs of one tower share. What one keeps between its passes, another may overwrite."""

    pool: Any
    stream: torch.cuda.Stream
    """Stream on which all are captured: memory of a pool serves the stream that took it."""
    gradients: list[Tensor] | None = None
    """Memory in which all of them leave gradients, of the parameters that have one."""


class _Graphs:
    """Graphs of a tower's passes for inputs of one shape, and the memory that they read and write."""

    def __init__(
        self,
        encoded: Callable[[], Tensor],
        inputs: tuple[Tensor, ...],
        trained: list[nn.Parameter],
        shared: _Shared,
    ) -> None:
        """`encoded` computes features of `inputs`."""
        self.inputs, self.passes = inputs, (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())

        def backward(features: Tensor) -> list[Tensor]:
            found = torch.autograd.grad(features, trained, self.towards, allow_unused=True)
            self.reached = [part is not None for part in found]
            gradients = _apart([part for part in found if part is not None])
            if shared.gradients is None:
                return gradients
            copy_all(shared.gradients, gradients)
            return shared.gradients

        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what plain passes have had until now
        shared.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(shared.stream):
            for _ in range(_WARM_UP):
                features = encoded()
                self.towards = torch.zeros_like(features)
                backward(features)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            with _captured(self.passes[0], shared.pool):
                features = encoded()
            with _captured(self.passes[1], shared.pool):
                self.gradients = backward(features)
        torch.cuda.current_stream().wait_stream(shared.stream)
        self.features = features.detach()
        shared.gradients = self.gradients


def _apart(gradients: list[Tensor]) -> list[Tensor]:
    """Returns the gradients, none of which has a value in common with another: each is clipped in place."""
    taken: list[tuple[int, int]] = []
    apart = []
    for part in gradients:
        begin = part.data_ptr()
        end = begin + part.element_size() * (
            1 + sum((n - 1) * stride for n, stride in zip(part.shape, part.stride(), strict=True))
        )
        is_apart = all(end <= other or begin >= its_end for other, its_end in taken)
        taken.append((begin, end))
        apart.append(part if is_apart else part.clone())
    return apart


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Captures the block. Unlike `torch.cuda.graph` it leaves the host's page-locked memory as it is.

    Other threads may take memory meanwhile: a run keeps its steps by one, and Horovod has its own.
    """
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, parts: tuple[Tensor, ...], *_: nn.Parameter) -> Tensor:
        for held, part in zip(graphs.inputs, parts, strict=True):
            held.copy_(part)
        graphs.passes[0].replay()
        ctx.graphs = graphs
        return graphs.features.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        graphs = ctx.graphs
        graphs.towards.copy_(grads[0])
        graphs.passes[1].replay()
        return None, None, *(part.detach() for part in graphs.gradients)


@contextmanager
def _aliased(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Puts others in the parameters' place, on the same memory, and yields them.

    Theirs are gradients of no other graph: DistributedDataParallel's nodes belong to another stream than the
    one that captures.
    """
    aliases = {id(parameter): nn.Parameter(parameter.detach()) for parameter in parameters}
    places = [
        (module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if id(parameter) in aliases
    ]
    for held, key, parameter in places:
        held[key] = aliases[id(parameter)]
    try:
        yield list(aliases.values())
    finally:
        for held, key, parameter in places:
            held[key] = parameter


def could_be_replayed(model: nn.Module, job: Job, ranks: int, device: torch.device) -> bool:
    """Returns whether the job does not ask for graphs, and would not be refused if it did."""
    if job.model.cuda_graphs or not is_cuda(device) or any(_problems(model)):
        return False
    try:
        settings = Model.model_validate(job.model.model_dump() | {"cuda_graphs": True})
        wanted = job.model_copy(update={"model": settings})
        plan(wanted, ranks)
        check_backend(wanted, ranks)
        check_captions(wanted)
        check_image_tokens(settings)
    except (InputError, ValidationError):
        return False
    return True


def _replayed(model: nn.Module, tower: _Tower) -> Callable[..., Tensor]:
    def encode(x: Tensor | Packed, normalize: bool = False) -> Tensor:
        trains = model.training and torch.is_grad_enabled() and normalize
        return tower(x) if trains else tower.encode(x, normalize=normalize)

    return encode


def _parts(x: Tensor | Packed) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, Packed) else (x,)


def _copy(x: Tensor | Packed) -> Tensor | Packed:
    return Packed(*map(torch.clone, x)) if isinstance(x, Packed) else x.clone()


def _shapes(parts: tuple[Tensor, ...]) -> Shapes:
    return tuple(part.shape for part in parts)


def _size(x: Tensor | Packed) -> str:
    if isinstance(x, Packed):
        return f"{many(len(x.ends), 'caption')} of {many(len(x.ids), 'token')}"
    return " x ".join(map(str, x.shape))


def _problems(model: nn.Module) -> Iterator[str]:
    """Yields what keeps the model from being captured, as clauses that follow its name."""
    if has_batch_norm(model):
        yield "has batch norm, which communicates"
    if any(_rate(module) > 0 for module in model.modules()):
        yield "drops values or patches at random"


def _rate(module: nn.Module) -> float:
    rates = (vars(module).get(name) for name in _RATES)
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def _trained(model: nn.Module, tower: str) -> list[nn.Parameter]:
    parameters = model.named_parameters()
    return [each for name, each in parameters if each.requires_grad and tower_of(name) == tower]
