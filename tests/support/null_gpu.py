"""Runs the trainer's own loop on a null GPU and keeps what the driver was asked for.

A null GPU is torch's CUDA path on a machine without a GPU: all of torch is real, kernels compute nothing, and
every call of the driver is counted with its place.
"""

import importlib
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.training import run, setup_of
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.supervise.world import World

nullgpu: Any = importlib.import_module("nullgpu")

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
WARM_STEPS = 4
"""Steps after which torch's allocators have all the memory that a step needs.

Three are enough for all cases but EVA, whose fourth backward pass takes one last segment of 2 MiB.
"""


@dataclass(frozen=True)
class Case:
    """One kind of job."""

    name: str
    config: dict[str, Any] | str = VIT
    precision: str = "fp32"
    optim: dict[str, Any] | None = None
    model: dict[str, Any] | None = None


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
    Case("clip in tiles, in bf16", precision="bf16", optim={"loss_tile": 4}),
    Case(
        "micro-batches in bf16, siglip in tiles",
        precision="bf16",
        optim={"loss": "siglip", "loss_tile": 4, "max_batch_size_per_gpu": 8},
    ),
    Case("checkpointed activations", precision="bf16", model={"grad_checkpointing": True}),
    Case("patch dropout", DROPOUT, "bf16"),
    Case("CUDA graphs", precision="bf16", model={"cuda_graphs": True}),
    Case("a ResNet in bf16", RESNET, "bf16"),
    Case("EVA in bf16", EVA, "bf16"),
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


class Steps:
    """Watches what lies between the optimizer steps `first` and `last`: data, logging and both passes."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.done = first, last, 0
        self._watch = nullgpu.watch()

    def __enter__(self) -> "Steps":
        self._hook = register_optimizer_step_post_hook(self._step_done)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _step_done(self, *_: object) -> None:
        self.done += 1
        if self.done == self.first:
            self.seen = self._watch.__enter__()
        elif self.done == self.last:
            self._watch.__exit__(None, None, None)


@pytest.fixture(scope="session")
def steps_of(gpu: Comm, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Any]:
    """Returns what the driver was asked for in five steps of a case, of which every second is logged."""
    known: dict[str, Any] = {}

    def seen(case: Case) -> Any:
        if case.name not in known:
            folder = tmp_path_factory.mktemp("run")
            config = case.config
            if not isinstance(config, str):
                path = folder / "model.json"
                path.write_text(json.dumps(config))
                config = str(path)
            last = WARM_STEPS + 5
            with Steps(WARM_STEPS, last) as steps:
                run(
                    setup_of(
                        folder,
                        gpu,
                        dict,
                        model={"name": config, "precision": case.precision, **(case.model or {})},
                        optim={"steps": last + 1, **(case.optim or {})},
                        eval={"zero_shot": (), "retrieval": ()},
                        logging={"every_steps": 2},
                    )
                )
            known[case.name] = steps.seen
        return known[case.name]

    return seen
