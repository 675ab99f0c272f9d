"""Peak memory of steps of rank 0 of eight that split a model, for several jobs in one process.

`python -m tests.support.fsdp_step_rank JOBS` on a null GPU. JOBS is a JSON list of sections of jobs, and the
last line is a JSON list of the parameters and of the peak bytes of a step of each. The other ranks are not
there (`fsdp_state_rank.py`).
"""

import gc
import json
import sys

import torch

from tests.support.fsdp_state_rank import RANKS, OneOfEight
from tests.support.jobs import tiny_job
from tests.support.planned_steps import PlannedSteps
from trainer.config.batch_plan import plan
from trainer.estimate.architecture import architecture


def main(jobs: str) -> None:
    found: list[tuple[int, int]] = []
    for sections in json.loads(jobs):
        job = tiny_job(**sections)
        shape = architecture(job.model)
        assert shape is not None
        steps = PlannedSteps(job, plan(job, RANKS), shape, OneOfEight(job), on_host=True)
        found.append((steps.parameters, steps.peak))
        del steps
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
