"""Two ranks of `make bench-step`, which make a step when they are told to.

`python -m benchmarks.step_rank start BACKEND PORT MODEL SAMPLES` starts them as `clipship run` would, and
`rank` in place of `start` is one of them. A rank connects to the port, says who it is, and then answers each
line with the seconds of one step. Each has so many samples, on one core, in fp32.
"""

import json
import os
import socket
import sys
import time

from trainer.config import Job
from trainer.launch.local import start_ranks

RANKS = 2


def job_of(backend: str, model: str, samples: int) -> Job:
    """Returns the job of both ranks, whose data are never read."""
    return Job.model_validate(
        {
            "name": "bench-step",
            "data": {"format": "synthetic"},
            "model": {"name": model, "precision": "fp32"},
            "optim": {"global_batch_size": RANKS * samples, "steps": 1},
            "comm": {"backend": backend},
            "resources": {"cpus_per_gpu": 1},
            "health": {"preflight": False},
        }
    )


def rank(backend: str, port: int, model: str, samples: int) -> None:
    """Makes steps until the connection ends, then leaves without a word to the other rank."""
    import torch

    from trainer.comm.connect import connect
    from trainer.config.batch_plan import plan
    from trainer.model.build import untrained
    from trainer.model.kernels import use_kernels
    from trainer.train.step import MicroBatch, TrainStep
    from trainer.world.launchers import detect

    job = job_of(backend, model, samples)
    comm = connect(job, detect(os.environ, os.uname().nodename), os.environ)
    clip = untrained(job).model.train()
    use_kernels(clip, job.model)
    step = TrainStep(job, plan(job, RANKS), comm, clip)
    side: int = clip.visual.image_size[0]  # type: ignore[union-attr, index, assignment]
    batch = MicroBatch(torch.randn(samples, 3, side, side), torch.randint(1, 1000, (samples, 77)))
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as lines:
        print(json.dumps({"rank": comm.world.rank, "pid": os.getpid()}), file=lines, flush=True)
        for number, _ in enumerate(lines):
            began = time.perf_counter()
            step([batch], number)
            print(time.perf_counter() - began, file=lines, flush=True)
    os._exit(0)


def main(what: str, backend: str, port: str, model: str, samples: str) -> int:
    """Starts the ranks, or is one."""
    if what == "rank":
        rank(backend, int(port), model, int(samples))
    own = (sys.executable, "-m", "benchmarks.step_rank", "rank", backend, port, model, samples)
    return start_ranks(own, job_of(backend, model, int(samples)), nproc=RANKS, hosts=None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
