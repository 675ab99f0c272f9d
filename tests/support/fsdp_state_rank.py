"""Memory of rank 0 of eight on null GPUs that split ViT-bigG-14, by torch's own allocator.

`python -m tests.support.fsdp_state_rank SAMPLES`. The other seven ranks are not there: the process group is
torch's fake one, whose collectives return at once. The model is built as training builds it, but its weights
are never written, so that the host needs no memory for them. Prints one line of JSON with GiB: of the state,
and of the most while the model was split, in a step of SAMPLES samples, and in a checkpoint.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.jobs import tiny_job
from tests.support.planned_steps import PlannedSteps
from tools import nullgpu
from trainer.checkpoint.state import Snapshot, contents_of
from trainer.comm.fsdp_backend import FsdpBackend
from trainer.comm.timer import CommTimer
from trainer.config.batch_plan import plan
from trainer.estimate.architecture import architecture
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

MODEL, RANKS = "ViT-bigG-14", 8
GIB = 2**30


class OneOfEight(FsdpBackend):
    """Rank 0, alone."""

    def __init__(self, job: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        self.world, self.device = World(0, RANKS, 0, RANKS, "here", "test"), torch.device("cuda", 0)
        self.heartbeat = Heartbeat.open({})
        self._job, self._settings = job, job.comm.torch
        self._control = self._beside = None
        self._timer = CommTimer(self.device, self.heartbeat)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * RANKS


def main(samples: int) -> None:
    job = tiny_job(
        model={"name": MODEL, "precision": "bf16", "grad_checkpointing": True},
        optim={"global_batch_size": RANKS * samples},
        comm={"backend": "fsdp"},
    )
    shape = architecture(job.model)
    assert shape is not None
    steps = PlannedSteps(job, plan(job, RANKS), shape, OneOfEight(job), on_host=True)
    figures: dict[str, Any] = {
        "parameters": steps.parameters,
        "replaced": dict(steps.replaced),
        "splitting": steps.splitting / GIB,
        "state": steps.state / GIB,
        "step": steps.peak / GIB,
    }
    torch.cuda.reset_peak_memory_stats()
    contents = contents_of(steps.train, 0, 1)
    with nullgpu.watch() as seen:
        Snapshot(contents, others=contents.keys())  # as on a rank that writes none: the host has no room
    figures["checkpoint"] = torch.cuda.max_memory_allocated() / GIB
    figures["waits"] = [event.place for event in seen.waits]
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
