"""A rank that trains twice on the same samples: by our step, and by open_clip_train's loop.

`python -m tests.support.trajectory_rank PRECISION CASE ...`. Rank 0 tells of each case: the
losses of both, and the largest difference of a weight at the end, relative to the norm of its tensor.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import timm
import torch
from open_clip_train.scheduler import cosine_lr
from open_clip_train.train import train_one_epoch
from timm.models import register_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.jobs import VIT, tiny_job
from tests.support.rank import joined, tell
from tests.support.steps import set_rate, step_of
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.model.build import untrained
from trainer.train.step import MicroBatch

BATCH, STEPS, WARMUP = 8, 8, 3
SIGLIP: dict[str, Any] = {
    "embed_dim": 48,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 32,
        "timm_model_name": "vit_test_patch8_siglip",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 1000,
        "width": 48,
        "heads": 3,
        "layers": 2,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    },
}
"""ViT-B-16-SigLIP's config with smaller numbers, and without its tokenizer."""


@register_model
def vit_test_patch8_siglip(pretrained: bool = False, **keys: Any) -> nn.Module:
    """Image tower of SigLIP with two narrow blocks."""
    small = {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 8, "img_size": 32}
    tower: nn.Module = timm.models.vision_transformer._create_vision_transformer(
        "vit_base_patch16_siglip_224",
        pretrained=pretrained,
        **{"class_token": False, "global_pool": "map", **small, **keys},
    )
    return tower


@dataclass
class TheirData:
    """Batches of one rank, in the form of open_clip_train's DataInfo and of its loader."""

    batches: list[tuple[Tensor, Tensor]]
    num_batches: int = STEPS
    num_samples: int = STEPS * BATCH

    @property
    def dataloader(self) -> "TheirData":
        return self

    def set_epoch(self, _epoch: int) -> None:
        """Does nothing."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


@dataclass
class Recorded:
    """Loss of open_clip_train that remembers its values."""

    loss: Callable[..., dict[str, Tensor]]
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, **inputs: Any) -> dict[str, Tensor]:
        losses = self.loss(**inputs)
        self.values.append(torch.stack(list(losses.values())).sum().detach())
        return losses


def job_of(case: str, precision: str, folder: Path) -> Job:
    optim: dict[str, Any] = {
        "global_batch_size": BATCH, "steps": STEPS, "warmup_steps": WARMUP, "lr": 1e-3, "weight_decay": 0.2,
    }  # fmt: skip
    if case.endswith("clipped"):
        optim["grad_clip_norm"] = 1.0
    config = VIT
    if case.startswith("siglip"):
        optim |= {"loss": "siglip", "max_logit_scale": 100.0, "beta2": 0.95}
        config = str(folder / "small.json")
        Path(config).write_text(json.dumps(SIGLIP))
    return tiny_job(config=config, optim=optim, model={"precision": precision, "kernels": "plain"})


def batches(job: Job, comm: Comm) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    own = slice(comm.world.rank * BATCH // comm.world.size, (comm.world.rank + 1) * BATCH // comm.world.size)
    dtype = torch.float64 if job.model.precision == "fp64" else torch.float32
    return [
        (
            torch.randn(BATCH, 3, 32, 32, generator=draw, dtype=torch.float64)[own].to(dtype),
            torch.randint(1, 1000, (BATCH, 16), generator=draw)[own],
        )
        for _ in range(STEPS)
    ]


def ours(job: Job, comm: Comm) -> tuple[list[float], dict[str, Tensor]]:
    step = step_of(job, comm)
    losses = []
    for number, batch in enumerate(batches(job, comm)):
        set_rate(step, job, number, STEPS)
        share = step([MicroBatch(*batch)], number).loss_share
        losses.append(float(comm.all_reduce(share)))
    return losses, dict(step.model.state_dict())


def theirs(job: Job, comm: Comm) -> tuple[list[float], dict[str, Tensor]]:
    """Trains as open_clip_train's main does: its loop, its loss, its schedule; AdamW with its two groups."""
    model: Any = untrained(job).model.to(torch.float64 if job.model.precision == "fp64" else torch.float32)
    model.output_dict = True
    args = arguments(job, comm)
    wrapped = DistributedDataParallel(model) if comm.world.size > 1 else model

    def spared(name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))

    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in named if spared(name, p)], "weight_decay": 0.0},
            {"params": [p for name, p in named if not spared(name, p)], "weight_decay": args.wd},
        ],
        lr=args.lr,
        betas=(job.optim.beta1, job.optim.beta2),
        eps=job.optim.eps,
    )
    loss = Recorded(open_clip.create_loss(args))
    data = {"train": TheirData(batches(job, comm))}
    scheduler = cosine_lr(optimizer, args.lr, WARMUP, STEPS)
    train_one_epoch(wrapped, data, loss, 0, optimizer, None, scheduler, None, args)
    means = comm.all_reduce(torch.stack(loss.values)) / comm.world.size
    return means.tolist(), dict(model.state_dict())


def arguments(job: Job, comm: Comm) -> SimpleNamespace:
    """Returns the options of open_clip_train that its loop and its loss read."""
    return SimpleNamespace(
        device="cpu", precision="fp32", accum_freq=1, distill=False, skip_scheduler=False, horovod=False,
        grad_clip_norm=job.optim.grad_clip_norm, rank=comm.world.rank, local_rank=comm.world.local_rank,
        world_size=comm.world.size, log_every_n_steps=STEPS, log_local=False, wandb=False, batch_size=BATCH,
        model=job.model.name, siglip=job.optim.loss == "siglip", local_loss=True, gather_with_grad=True,
        loss_dist_impl=None, lr=job.optim.lr, wd=job.optim.weight_decay,
    )  # fmt: skip


def main(precision: str, *cases: str) -> None:
    with joined(tiny_job()) as comm, tempfile.TemporaryDirectory() as folder:
        for case in cases:
            job = job_of(case, precision, Path(folder))
            own_losses, own = ours(job, comm)
            their_losses, their = theirs(job, comm)
            assert own.keys() == their.keys()
            worst = max(float((own[key] - their[key]).norm() / (1e-9 + their[key].norm())) for key in own)
            if comm.world.rank == 0:
                tell({"case": case, "ours": own_losses, "theirs": their_losses, "weights": worst})


if __name__ == "__main__":
    main(*sys.argv[1:])
