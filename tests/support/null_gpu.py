"""Runs the trainer's own loop on a null GPU and keeps what the driver was asked for.

A null GPU is torch's CUDA path on a machine without a GPU: all of torch is real, kernels compute nothing, and
every call of the driver is counted with its place.
"""

import gc
import inspect
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.tiles import tiles_of
from tests.support.training import run, setup_of
from tools import nullgpu
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.model.build import untrained
from trainer.world.launchers import World

EVA = {
    "embed_dim": 32,
    "vision_cfg": {
        "timm_model_name": "eva02_tiny_patch14_224",
        "timm_model_pretrained": False,
        "timm_pool": "token",
        "timm_proj": "linear",
        "image_size": 224,
    },
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
DROPOUT = {**json.loads(Path(VIT).read_text())}
DROPOUT["vision_cfg"] = {**DROPOUT["vision_cfg"], "patch_dropout": 0.5}
FIRST = "first.pt"
"""Name of weights to begin with, in the run's folder."""
LORA = {"lora_rank": 4, "pretrained": FIRST}
"""LoRA beside weights of the tiny ViT."""
WARM_STEPS = 3
"""Steps after which torch's allocators have all the memory that a step needs."""


@dataclass(frozen=True)
class Case:
    """One kind of job."""

    name: str
    config: dict[str, Any] | str = VIT
    precision: str = "fp32"
    optim: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    tile: int = 2048
    """Rows of a tile of the loss."""
    warm_steps: int = WARM_STEPS


CASES = (
    Case("clip in fp32"),
    Case("clip in tf32", precision="tf32"),
    Case("clip in bf16, clipped", precision="bf16", optim={"grad_clip_norm": 1.0}),
    Case("clip in fp16", precision="fp16"),
    Case("siglip in bf16", precision="bf16", optim={"loss": "siglip"}),
    Case("micro-batches in bf16", precision="bf16", optim={"max_batch_size_per_gpu": 4}),
    Case(
        "micro-batches in fp16, siglip",
        precision="fp16",
        optim={"loss": "siglip", "max_batch_size_per_gpu": 8},
    ),
    Case("clip in small tiles, in bf16", precision="bf16", tile=4),
    Case(
        "micro-batches in bf16, siglip in small tiles",
        precision="bf16",
        optim={"loss": "siglip", "max_batch_size_per_gpu": 8},
        tile=4,
    ),
    Case("anchor in fp16", precision="fp16", optim={"anchor": 0.1}, model={"init": FIRST}),
    Case("equal captions in bf16", precision="bf16", optim={"positives": "captions"}),
    Case(
        "equal captions for siglip in small tiles",
        precision="bf16",
        optim={"loss": "siglip", "positives": "captions"},
        tile=4,
    ),
    Case("checkpointed activations", precision="bf16", model={"grad_checkpointing": True}),
    Case("patch dropout", DROPOUT, "bf16"),
    Case("CUDA graphs", precision="bf16", model={"cuda_graphs": True}, warm_steps=WARM_STEPS + 2),
    Case("LoRA in bf16", precision="bf16", model=LORA),
    Case(
        "LoRA with CUDA graphs",
        precision="bf16",
        model={**LORA, "cuda_graphs": True},
        warm_steps=WARM_STEPS + 2,
    ),
    Case("a ResNet in bf16", RESNET, "bf16"),
    # The seventh backward pass takes a last segment of 2 MiB for small tensors of timm's rotary positions.
    Case("EVA in bf16", EVA, "bf16", warm_steps=WARM_STEPS + 5),
)


@pytest.fixture(scope="session")
def gpu() -> Iterator[Comm]:
    """A process group of one rank on the null GPU."""
    assert nullgpu.active(), "start pytest with `make test-nullgpu`"
    comm = connect(tiny_job(), World(0, 1, 0, 1, "here", "single process"), {})
    assert comm.device.type == "cuda"
    yield comm
    comm.close()


@pytest.fixture(autouse=True)
def stop_signal() -> Iterator[None]:
    """Puts the handler back that a loop replaces to receive a request to stop."""
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


class NewMemory:
    """Records where torch's allocators ask the driver for memory, or give it back, inside of a `with`.

    The memory is the GPU's, and page-locked memory of the host where this torch records that.
    """

    ACTIONS = ("segment_alloc", "segment_map", "segment_free", "segment_unmap")

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __enter__(self) -> "NewMemory":
        record = torch.cuda.memory._record_memory_history
        host = {"record_pinned_host_memory": True}
        known = host.keys() <= inspect.signature(record).parameters.keys()
        record("all", context="all", stacks="python", clear_history=True, **(host if known else {}))
        return self

    def __exit__(self, *_: object) -> None:
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        traces = [("GPU", trace) for trace in snapshot["device_traces"]]
        traces.append(("page-locked", snapshot.get("host_traces", [])))
        self.events = [
            nullgpu.Event(f"{entry['action']}, {what}", entry["size"], _stack(entry))
            for what, trace in traces
            for entry in trace
            if entry["action"] in self.ACTIONS
        ]

    def table(self) -> str:
        """A line for each place: times, bytes, and file and line."""
        return nullgpu.Seen(events=self.events).table() or "nothing was recorded"


def _stack(entry: dict[str, Any]) -> tuple[tuple[str, int, str], ...]:
    return tuple((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ()))


_OF_A_BATCH = 4
"""Tensors of a micro-batch, at most, that are page-locked: images, tokens, targets, groups."""


class Steps:
    """Watches what lies between the optimizer steps `first` and `last`: data, logging and both passes."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.done = first, last, 0
        self.memory = NewMemory()
        self._watch = nullgpu.watch()

    def __enter__(self) -> "Steps":
        self._hook = register_optimizer_step_post_hook(self._step_done)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _step_done(self, *_: object) -> None:
        self.done += 1
        if self.done == self.first:
            self.memory.__enter__()
            self.seen = self._watch.__enter__()
        elif self.done == self.last:
            self._watch.__exit__(None, None, None)
            self.memory.__exit__()

    def check(self) -> None:
        """Fails if the host waited, copied from memory that is not page-locked, or took new memory."""
        assert self.seen.waits == [], self.seen.table()
        assert (self.seen["h2d_pageable"], self.seen["d2h_pageable"]) == (0, 0), self.seen.table()
        self.check_memory()

    def check_memory(self) -> None:
        """Fails if the steps took new memory or gave some back, and names file and line.

        Page-locked memory may grow by a micro-batch: how many are fetched ahead at once depends on who is
        faster, the loader or the steps. Growth in each step is more than that.
        """
        counts = {name: self.seen[name] for name in ("mallocs", "frees", "host_allocs")}
        few = {"host_allocs": min(_OF_A_BATCH, self.last - self.first - 1)}
        assert all(count <= few.get(name, 0) for name, count in counts.items()), (
            f"{counts}\n{self.memory.table()}"
        )


@pytest.fixture(scope="session")
def steps_of(gpu: Comm, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Steps]:
    """Returns what the driver was asked for in five steps of a case, of which every second is logged."""
    known: dict[str, Steps] = {}

    def watched(case: Case) -> Steps:
        if case.name not in known:
            folder = tmp_path_factory.mktemp("run")
            config = case.config
            if not isinstance(config, str):
                path = folder / "model.json"
                path.write_text(json.dumps(config))
                config = str(path)
            model = {"name": config, "precision": case.precision, **(case.model or {})}
            for key in {"init", "pretrained"} & model.keys():
                model[key] = str(folder / model[key])
                torch.save(untrained(tiny_job(config=config)).model.state_dict(), model[key])
            gc.collect()
            torch.cuda.empty_cache()  # else a case would find the memory of others
            last = case.warm_steps + 5
            with Steps(case.warm_steps, last) as steps, tiles_of(case.tile):
                run(
                    setup_of(
                        folder,
                        gpu,
                        dict,
                        model=model,
                        optim={"steps": last + 1, **(case.optim or {})},
                        eval={"zero_shot": (), "retrieval": ()},
                        logging={"every_steps": 2},
                    )
                )
            known[case.name] = steps
        return known[case.name]

    return watched
