"""Steps of models of real size on a null GPU, and what they ask of it."""

import gc
from collections import Counter
from dataclasses import replace
from typing import Any

import open_clip
import torch
from timm.layers.helpers import to_2tuple
from torch.utils._pytree import tree_leaves

from tests.support.jobs import tiny_job
from tools import nullgpu
from trainer.comm.protocol import Comm
from trainer.config.batch_plan import plan
from trainer.model.kernels import use_kernels
from trainer.model.outputs import features, half_type
from trainer.model.packed_captions import Packed
from trainer.train.step import MicroBatch, TrainStep

WARM_STEPS = 2


class RealStep:
    """A step of a model by its name, in bf16 unless the keys say otherwise, on captions of any length."""

    def __init__(
        self, comm: Comm, name: str, samples: int, micro_batch: int | None = None, **model_keys: Any
    ) -> None:
        self.job = tiny_job(
            data={"synthetic_samples": samples},
            model={"name": name, "precision": "bf16", **model_keys},
            optim={"global_batch_size": samples, "max_batch_size_per_gpu": micro_batch},
        )
        with torch.device("cuda"):  # weights made on the host would take the test's time
            self.model = open_clip.create_model(name, device="cuda", output_dict=False).train()
        if self.job.model.grad_checkpointing:
            self.model.set_grad_checkpointing(True)
        use_kernels(self.model, self.job.model)
        for module in self.model.modules():
            if getattr(module, "fused_ops", None) is not None:
                module.fused_ops = counting(module.fused_ops)
        self._plan = plan(self.job, 1)
        self._step = TrainStep(self.job, self._plan, comm, self.model)
        size = self._plan.micro_batch_size
        self._images = torch.empty(
            size,
            3,
            *to_2tuple(self.model.visual.image_size),
            dtype=half_type(self.job.model.precision),
            device="cuda",
        )
        self._tokens = torch.empty(size, self.model.context_length, dtype=torch.int64, device="cuda")
        self._number = 0

    def __call__(self, captions: int | Packed | None = None) -> None:
        """Runs a step on captions of a length, whole ones without it, or on packed ones."""
        tokens = captions if isinstance(captions, Packed) else self._tokens[:, :captions].contiguous()
        self._step([MicroBatch(self._images, tokens)] * self._plan.accumulation, self._number)
        self._number += 1

    def forward(self) -> None:
        """Passes all samples through the model without a graph, in the step's micro-batches."""
        with torch.no_grad():
            for _ in range(self._plan.accumulation):
                features(self.model, self._images, self._tokens, self.job.model.precision)


class Measured:
    """Figures of one step on whole captions, after the first ones."""

    def __init__(self, comm: Comm, name: str, samples: int, **keys: Any) -> None:
        gc.collect()  # another test's model may be left in a cycle
        step = RealStep(comm, name, samples, **keys)
        for _ in range(WARM_STEPS):
            step()
        torch.cuda.reset_peak_memory_stats()
        with nullgpu.watch() as seen:
            step()
        self.peak_gib, self.launches, self.waits = nullgpu.peak_gib(), seen["launches"], seen.waits
        self.moved_gib = moved_gib(step)
        self.forward_gib = moved_gib(step.forward)


def moved_gib(call: Any) -> float:
    """GiB that the operators of a call read and write, and the fused kernels, which are no operators."""
    before = _fused_bytes.total()
    with nullgpu.BytesMoved() as traffic:
        call()
    return float(traffic.bytes + _fused_bytes.total() - before) / 2**30


_fused_bytes: Counter[str] = Counter()


def counting(ops: Any) -> Any:
    """Returns the functions, which add the bytes of their tensors, read and written, to `_fused_bytes`."""

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            results = function(*arguments)
            # A sum to which nothing is added is the input itself, and what is kept may be a result.
            tensors = {
                id(one): one for one in tree_leaves((arguments, results)) if isinstance(one, torch.Tensor)
            }
            _fused_bytes[name] += sum(tensor.nbytes for tensor in tensors.values())
            return results

        return call

    functions = {name: value for name, value in vars(ops).items() if callable(value)}
    return replace(ops, **{name: counted(name, function) for name, function in functions.items()})
