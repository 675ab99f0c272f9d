"""Weights & Biases (W&B). Its package is imported when the writer is opened."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import Job
from trainer.config.loader import recorded
from trainer.errors import InputError
from trainer.run.layout import WANDB, WANDB_ID_FILE
from trainer.telemetry.figures import tagged
from trainer.telemetry.pictures import COLUMNS, Picture
from trainer.telemetry.services import WAIT_S, lasting_id, waits, why
from trainer.text.masking import masked

log = logging.getLogger("clipship")


class Wandb:
    """Writes to a W&B run, with our `step` on the x axis of its charts.

    W&B's own counter would refuse the steps that come again after a kill.
    """

    name = "W&B"

    def __init__(self, job: Job, folder: Path) -> None:
        self._wandb = wandb = importlib.import_module("wandb")
        arguments: dict[str, Any] = {
            "project": job.logging.wandb_project,
            "name": job.name,
            "id": lasting_id(folder / WANDB_ID_FILE),
            "resume": "allow",
            "dir": str(folder),
            "config": recorded(job),
            "settings": wandb.Settings(
                console="off", silent=True, init_timeout=WAIT_S, finish_timeout=WAIT_S
            ),
        }
        self._offline = job.logging.wandb == "offline"
        try:
            self._run = wandb.init(mode=job.logging.wandb, **arguments)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise InputError(
                f"W&B: {error} Without a W&B user, set logging.wandb=offline; without W&B, logging.wandb=off"
            ) from None
        except wandb.errors.CommError as error:
            text = (
                "W&B cannot be reached (%s): this start is logged offline; `wandb sync` uploads what is in %s"
            )
            log.warning(text, why(error), folder / WANDB)
            wandb.teardown()  # its own process still holds the run
            self._offline = True
            self._run = wandb.init(mode="offline", **arguments)
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Mapping[str, object]) -> None:
        self._run.log({"step": values["step"], **tagged(values)})

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        rows = [
            [
                self._wandb.Image(picture.image()),
                masked(picture.caption),
                picture.place or None,
                "\n".join(masked(text) for text, _ in picture.nearest),
            ]
            for picture in pictures
        ]
        table = self._wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log({"step": step, "eval/nearest_texts": table})

    def close(self, error: BaseException | None) -> None:
        if waits(error) or self._offline:
            self._run.finish()
            self._wandb.teardown()  # only then has its own process written everything to disk
