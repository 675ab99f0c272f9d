"""Where a run's metrics go besides metrics.jsonl: TensorBoard, and W&B when asked; rank 0 only.

Each gets the numbers of metrics.jsonl under the same names. What is heavy (torch, W&B) is imported when a sink is opened.
"""

import importlib
import logging
import math
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import InputError, Preempted
from trainer.job import Job, Logging

log = logging.getLogger("clipship")

TENSORBOARD = "tensorboard"
"""Folder of the event files, in the run folder."""
WANDB_ID = "wandb-id"
"""File in the run folder that makes every start of a run one run of W&B."""

_WANDB_INIT_S = 30.0
_WANDB_FINISH_S = 30.0  # less than timeouts.shutdown_s: the other ranks wait at the end of the run meanwhile


class Sink(Protocol):
    """Takes what metrics.jsonl takes."""

    def write(self, values: Mapping[str, object]) -> None:
        """One event; it has its `step`."""

    def close(self, error: BaseException | None) -> None:
        """The run is over; `error` is what ended it before its end."""


def check_installed(settings: Logging) -> None:
    """Raises InputError where a sink that is asked for needs a package that is not there."""
    if settings.wandb != "off" and find_spec("wandb") is None:
        raise InputError(
            f'logging.wandb = "{settings.wandb}" needs the package wandb, which is not installed: '
            f"`python -m pip install 'clipship[wandb]'` installs it, --set logging.wandb=off does without"
        )


def open_sinks(job: Job, folder: Path, steps_done: int) -> list[Sink]:
    """Those that the job asks for, for the run in the folder. Raises InputError where W&B is not there or knows no user."""
    check_installed(job.logging)
    sinks: list[Sink] = []
    if job.logging.tensorboard:
        sinks.append(TensorBoard(folder / TENSORBOARD, steps_done))
    if job.logging.wandb != "off":
        sinks.append(Wandb(job, folder))
    return sinks


class TensorBoard:
    """Event files. Steps that a killed run did after its last checkpoint are taken back, for they come again."""

    def __init__(self, folder: Path, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=steps_done + 1)

    def write(self, values: Mapping[str, object]) -> None:
        step = values["step"]
        for name, value in numbers(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a kill takes no more from here than from metrics.jsonl

    def close(self, error: BaseException | None) -> None:
        self._writer.close()


class Wandb:
    """A run of W&B whose charts have our `step` below them: W&B's own counter refuses the steps that come again after a kill."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._wandb = wandb = importlib.import_module("wandb")
        asked: dict[str, Any] = {
            "project": job.logging.wandb_project,
            "name": job.name,
            "id": _wandb_id(folder / WANDB_ID),
            "resume": "allow",
            "dir": str(folder),
            # [env] may hold keys and passwords.
            "config": job.model_dump(mode="json", exclude={"env"}),
            "settings": wandb.Settings(console="off", silent=True, init_timeout=_WANDB_INIT_S, finish_timeout=_WANDB_FINISH_S),
        }
        self._offline = job.logging.wandb == "offline"
        try:
            self._run = wandb.init(mode=job.logging.wandb, **asked)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise InputError(f'W&B: {error} Or take --set logging.wandb=offline, which needs no user; "off" needs no W&B') from None
        except wandb.errors.CommError as error:
            why = str(error).partition("\n")[0]
            log.warning("W&B cannot be reached (%s): this start is logged offline; `wandb sync` sends what is in %s", why, folder / "wandb")
            wandb.teardown()  # its own process still holds the run
            self._offline = True
            self._run = wandb.init(mode="offline", **asked)
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Mapping[str, object]) -> None:
        self._run.log({"step": values["step"], **numbers(values)})

    def close(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, Preempted) or self._offline:  # a rank that fails does not wait for a network
            self._run.finish()
            self._wandb.teardown()  # only now its own process has written all to disk


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers by name, without the step: neither sink draws the others."""
    return {
        name: float(value)
        for name, value in values.items()
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def _wandb_id(path: Path) -> str:
    """The one in the file, or a new one, which it then holds."""
    if not path.exists():
        path.write_text(secrets.token_hex(8) + "\n")
    return path.read_text().strip()
