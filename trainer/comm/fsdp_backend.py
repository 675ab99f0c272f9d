"""torch's FSDP2: parameters, gradients and optimizer state are split over the ranks.

Each block of a tower is a unit: its parameters are gathered before its forward and its backward pass and let
go after it, and its gradients are reduced to the rank that owns their rows. All else is as in the backend
torch. This is one of the modules that name a communication library.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from trainer.comm.accelerator import on_accelerator
from trainer.comm.blocks import BATCH_NORMS, repeated_blocks
from trainer.comm.protocol import Reducer
from trainer.comm.reducers import LocalReducer
from trainer.comm.shard_degree import shard_degree
from trainer.comm.timer import CommTimer, Mark
from trainer.comm.torch_backend import TorchBackend, all_gather_single, reduce_scatter_single
from trainer.config import Job
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ENCODERS = ("encode_image", "encode_text")
_REPLICATE, _SHARD = "replicate", "shard"


class FsdpBackend(TorchBackend):
    """Implements `protocol.Comm`; only its reducer differs from that of torch."""

    def __init__(self, job: Job, world: World, device: torch.device, heartbeat: Heartbeat) -> None:
        super().__init__(job, world, device, heartbeat)
        self.name = f"fsdp ({self._backend})"
        self._job = job

    def _group_beside(self) -> Any:
        """Returns a group of its own on GPUs: in that of all, the next block's gather would wait for it."""
        return dist.new_group(backend=self._backend) if self._backend != "gloo" else None

    def reducer(self, model: nn.Module) -> Reducer:
        """Splits the model's parameters over the ranks, in place, and moves them to the device.

        Block after block is moved, so that the device never has the whole model. Raises InputError if the
        ranks cannot be cut as `comm.fsdp.shard_degree` asks.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("the model has no parameter to train")
        if self.world.size == 1:
            return LocalReducer(model.to(self.device))
        nodes = self.all_gather_object(self.world.node)
        degree = shard_degree(self._job.comm.fsdp.shard_degree, nodes)
        whole = degree == self.world.size
        mesh = init_device_mesh(
            self.device.type,
            (degree,) if whole else (self.world.size // degree, degree),
            mesh_dim_names=(_SHARD,) if whole else (_REPLICATE, _SHARD),
        )
        return _Reducer(self, model, mesh, self._timer)

    def policy(self, model: nn.Module) -> MixedPrecisionPolicy:
        """Returns in which types parameters are gathered and gradients reduced."""
        settings = self._job.comm.fsdp
        half = _HALF.get(self._job.model.precision)
        gathered = half if settings.param_dtype == "auto" and self.gathers_half else None
        if any(isinstance(module, BATCH_NORMS) for module in model.modules()):
            gathered = None  # its kernels want parameters as wide as the statistics
        reduced = torch.float32 if gathered is not None else None  # None: the parameters' own
        if self._job.model.precision != "fp64":
            reduced = _HALF.get(settings.reduce_dtype, reduced)
        # Autocast casts where a layer asks for it; what runs between the layers stays in float32.
        return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)

    @property
    def gathers_half(self) -> bool:
        """True if parameters may be gathered in half precision; on CPUs nothing would be faster."""
        return on_accelerator(self.device)

    @property
    def reshard_after_forward(self) -> bool:
        return self._job.comm.fsdp.reshard_after_forward


class _Reducer:
    """The model split over the ranks; gradients of all but scalars are reduced in each backward pass."""

    def __init__(self, comm: FsdpBackend, model: nn.Module, mesh: DeviceMesh, timer: CommTimer) -> None:
        self._comm, self._timer = comm, timer
        self.last_reduction: Mark | None = None
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": comm.policy(model)}
        with _scalars_aside(model, comm.device) as scalars:
            _make_contiguous(model)
            units = [*repeated_blocks(model), *_towers(model)]
            for unit in units:
                _move(unit, comm.device)
                fully_shard(unit, reshard_after_forward=comm.reshard_after_forward, **options)
            _move(model, comm.device)
            fully_shard(model, reshard_after_forward=False, **options)
        self._scalars = [scalar for scalar in scalars if scalar.requires_grad]
        self.module = model
        for name in _ENCODERS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]  # the model first
        gather: Any = _AllGather(self, timer, comm.device)
        scatter: Any = _ReduceScatter(self, timer, comm.device)
        for module in modules:
            if hasattr(module, "set_custom_all_gather"):  # torch before 2.9 has no place to measure at
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)
        self.shards = RowShards(comm, model, mesh, modules)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Returns an empty context: a gradient that were not reduced would be as large as the model."""
        yield

    def finish(self) -> None:
        self.shards.take_gradients()
        if self._scalars:
            gradients = [_gradient(scalar).reshape(()) for scalar in self._scalars]
            mean = self._comm.all_reduce(torch.stack(gradients)) / self._comm.world.size
            for scalar, gradient in zip(self._scalars, mean.unbind(), strict=True):
                scalar.grad = gradient.clone().view_as(scalar)
        if self.last_reduction is not None:
            self._timer.since(self.last_reduction)
            self.last_reduction = None


class RowShards:
    """Implements `Shards` for parameters of which each rank has some rows, in the order of the ranks."""

    def __init__(
        self, comm: FsdpBackend, model: nn.Module, mesh: DeviceMesh, modules: Sequence[FSDPModule]
    ) -> None:
        self._comm, self._model, self._modules = comm, model, modules
        self._group = mesh.get_group(_SHARD)
        self._index, self._degree = mesh.get_local_rank(_SHARD), mesh[_SHARD].size()
        self._replicas = comm.world.size // self._degree
        self._sources = {
            name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)
        }
        self._shapes = {name: tuple(source.shape) for name, source in self._sources.items()}
        self._bound = False
        self.split = frozenset(self._sources)
        self.part = f"rows {self._index + 1} of {self._degree}"
        self.parameters: Mapping[str, nn.Parameter] = {
            name: nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
            if isinstance(parameter, DTensor)
            else parameter
            for name, parameter in model.named_parameters()
        }

    def state(self) -> Mapping[str, Tensor]:
        tensors: Mapping[str, Tensor] = self._model.state_dict()
        return {
            name: self.parameters[name].detach() if name in self.split else tensor
            for name, tensor in tensors.items()
        }

    def whole(self, name: str, rows: Tensor) -> Tensor:
        if name not in self.split:
            return rows
        count, *rest = self._shapes[name]
        most = self._most_rows(count)
        filled = rows.detach()
        if len(rows) < most:
            filled = rows.new_zeros(most, *rest)
            filled[: len(rows)] = rows.detach()
        gathered = rows.new_empty(self._degree * most, *rest)
        with self._comm.timed("all_gather of state", filled.nbytes):
            all_gather_single(gathered, filled.contiguous(), group=self._group)
        return gathered[:count]

    def own(self, name: str, whole: Tensor) -> Tensor:
        if name not in self.split:
            return whole
        most = self._most_rows(len(whole))
        return whole[self._index * most : (self._index + 1) * most]

    def grad_norm(self) -> Tensor:
        mine: list[Tensor] = []
        equal: list[Tensor] = []
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                (mine if name in self.split else equal).append(parameter.grad)
        square = nn.utils.get_total_norm(mine, foreach=True).square()
        # The sum is over all ranks, that of a group's replicas too, so that all have the same bits.
        total = self._comm.all_reduce(square.to(self._comm.device)) / self._replicas
        if equal:
            total = total + nn.utils.get_total_norm(equal, foreach=True).square()
        return total.sqrt()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
        for module in self._modules:
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()
                whole_pass = module is self._modules[0] or not self._comm.reshard_after_forward
                module.set_reshard_after_forward(not whole_pass, recurse=False)

    def take_gradients(self) -> None:
        """Moves the reduced gradients from FSDP's parameters to ours."""
        if not self._bound:
            self._bind()
        for name, source in self._sources.items():
            gradient = source.grad
            self.parameters[name].grad = gradient.to_local() if isinstance(gradient, DTensor) else None
            source.grad = None

    def _bind(self) -> None:
        """Makes our parameters share FSDP's memory: it may have moved them at its first pass."""
        for name, source in self._sources.items():
            self.parameters[name].data = source.to_local().detach()
        self._bound = True

    def _most_rows(self, count: int) -> int:
        return -(-count // self._degree)


class _Measured:
    """A collective of FSDP, which it records in the heartbeat and in the time of communication.

    On CPUs FSDP waits for each; on GPUs it computes meanwhile.
    """

    def __init__(self, reducer: _Reducer, timer: CommTimer, device: torch.device) -> None:
        self._reducer, self._timer, self._on_gpu = reducer, timer, on_accelerator(device)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(self, collective: str, nbytes: int, start: Callable[[], Any]) -> Any:
        if self._on_gpu:
            with self._timer.starting(collective, nbytes):
                return start()
        with self._timer.span(collective, nbytes):
            return start()


class _AllGather(_Measured):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        start = partial(all_gather_single, output_tensor, input_tensor, group=group, async_op=async_op)
        return self._run("all_gather of parameters", input_tensor.nbytes, start)


class _ReduceScatter(_Measured):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        if self._on_gpu:  # the backward pass goes on; what is left of the last one at its end is waiting
            self._reducer.last_reduction = self._timer.mark()
        start = partial(
            reduce_scatter_single, output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return self._run("reduce_scatter of gradients", input_tensor.nbytes, start)


def _towers(model: nn.Module) -> list[nn.Module]:
    """Returns the children with blocks that have parameters beside them; what is left is the model's own."""
    blocks = repeated_blocks(model)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    own = {id(parameter) for parameter in model.parameters(recurse=False)}
    return [
        child
        for child in model.children()
        if any(block in set(child.modules()) for block in blocks)
        and any(id(parameter) not in inside | own for parameter in child.parameters())
    ]


@contextmanager
def _scalars_aside(model: nn.Module, device: torch.device) -> Iterator[list[nn.Parameter]]:
    """Takes the parameters of a single value out of the model for the block: there is nothing to split.

    They come back to their places, on the device.
    """
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.numel() == 1
    ]
    orders = {
        module: [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        for module, *_ in places
    }
    for module, name, parameter in places:
        parameter.data = parameter.data.to(device)
        delattr(module, name)
    yield list({id(parameter): parameter for *_, parameter in places}.values())
    for module, name, parameter in places:
        module.register_parameter(name, parameter)
    for module, order in orders.items():
        for name in order:  # each goes behind the others
            parameter = getattr(module, name)
            delattr(module, name)
            module.register_parameter(name, parameter)


def _move(unit: nn.Module, device: torch.device) -> None:
    """Moves what is not split yet to the device."""
    for tensor in (*unit.parameters(), *unit.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


def _make_contiguous(model: nn.Module) -> None:
    """Gives weights torch's plain layout, the only one that FSDP takes."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
