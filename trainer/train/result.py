"""End of the training of one start, and the file that records it."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.comm.device import device_name
from trainer.errors import EXIT_DONE, Preempted
from trainer.run.exit_files import restarts_of
from trainer.safe_io.atomic import write_json
from trainer.telemetry.metrics import last_loss
from trainer.train.checkpoint_policy import Metrics
from trainer.train.setup import TrainSetup
from trainer.world.rendezvous import Rendezvous

log = logging.getLogger("clipship")


@dataclass(frozen=True)
class TrainResult:
    """End of the training of one start, as one rank knows it."""

    steps: int
    """Number of steps in the whole run."""
    saved_step: int
    """Step of the last checkpoint."""
    stopped: bool
    """True if a request to stop ended the training or its last evaluation early."""
    metrics: Metrics
    """Metrics of the final evaluation; empty if there was none."""
    evaluation_failed: str | None
    """Why the final evaluation failed; None if it did not."""
    bad_samples: Mapping[str, int]
    """Number of samples that all ranks have skipped in the run until now, by cause."""
    summary: Mapping[str, object]
    """Time that this rank spent on each part, the ranks that were slow, and on rank 0 the seconds of the run
    and what they went into."""

    def raise_if_stopped(self) -> None:
        """Raises Preempted, which becomes exit code 75, if the run has to go on in a later start."""
        if self.stopped:
            raise Preempted(
                f"asked to stop: step {self.saved_step} of {self.steps} is saved, and the run can go on"
            )


def _restarts(run_folder: Path) -> list[dict[str, Any]]:
    """Returns the restarts of this start's ranks, without their details."""
    rendezvous = Rendezvous.from_env(os.environ)
    restarts = restarts_of(run_folder, rendezvous.start if rendezvous else "")
    return [{name: value for name, value in restart.items() if name != "details"} for restart in restarts]


def write_result(setup: TrainSetup, result: TrainResult) -> None:
    """Collective: rank 0 writes result.json, which marks the run as done."""
    comm = setup.comm
    devices = sorted(set(comm.all_gather_object(device_name(comm.device))))
    if comm.world.rank:
        return
    write_json(
        setup.run.result,
        {
            "exit_code": EXIT_DONE,
            "reason": "done",
            "steps": result.steps,
            "samples": setup.samples_after(result.steps),
            "loss": last_loss(setup.run.metrics),
            "resume": setup.job.checkpoint.resume,
            "device": ", ".join(devices),
            "bad_samples": dict(result.bad_samples),
            "left_out": setup.left_out,
            **result.metrics,
            **({"evaluation_failed": result.evaluation_failed} if result.evaluation_failed else {}),
            **result.summary,
            "world_size": comm.world.size,
            "restarts": _restarts(setup.run.folder),
        },
    )
    log.info("%-12s %s", "result", setup.run.result)
