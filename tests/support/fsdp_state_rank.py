"""Memory of rank 0 of eight on null GPUs that split a model, by torch's own allocator, for several jobs.

`python -m tests.support.fsdp_state_rank JOBS`. JOBS is a JSON list of sections of jobs. The other seven ranks
are not there: the process group is torch's fake one, whose collectives return at once. The models are built
as training builds them, but their weights are never written, so that the host needs no memory for them. The
last line is a JSON list with the bytes of each job: of the state, and of the most while the model was split,
in a step, and in a checkpoint.
"""

import gc
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.jobs import tiny_job
from tests.support.planned_steps import PlannedSteps
from tools import nullgpu
from trainer.checkpoint import state
from trainer.comm.fsdp_backend import FsdpBackend
from trainer.comm.timer import CommTimer
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.estimate.architecture import architecture
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

RANKS = 8


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


def figures(job: Job) -> dict[str, Any]:
    shape = architecture(job.model)
    assert shape is not None
    torch.cuda.reset_peak_memory_stats()
    steps = PlannedSteps(job, plan(job, RANKS), shape, OneOfEight(job), on_host=True)
    torch.cuda.reset_peak_memory_stats()
    contents = state.contents_of(steps.train, 0, 1)
    with nullgpu.watch() as seen:
        # As on a rank that writes none: the host has no room.
        state.Snapshot(contents, others=contents.keys())
    return {
        "parameters": steps.parameters,
        "replaced": dict(steps.replaced),
        "splitting": steps.splitting,
        "state": steps.state,
        "step": steps.peak,
        "checkpoint": torch.cuda.max_memory_allocated(),
        "waits": [event.place for event in seen.waits],
    }


def main(jobs: str) -> None:
    found = []
    for sections in json.loads(jobs):
        found.append(figures(tiny_job(**sections)))
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
