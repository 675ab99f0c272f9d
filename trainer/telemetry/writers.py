"""Metric writers besides metrics.jsonl: TensorBoard, and W&B if asked for; rank 0 only.

Each gets the numbers of metrics.jsonl under the same names, in groups, for each of which they show one panel.
Heavy packages (torch, W&B) are imported when a writer is opened.
"""

import importlib
import logging
import math
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import tomli_w

from trainer.config import Job, Logging
from trainer.config.loader import own_keys, recorded
from trainer.errors import InputError, Preempted
from trainer.run.layout import TENSORBOARD, WANDB, WANDB_ID_FILE
from trainer.safe_io.atomic import write_whole
from trainer.safe_io.plain import read_plain
from trainer.telemetry.pictures import COLUMNS, Picture, as_markdown, strip
from trainer.text.masking import masked, masked_values

log = logging.getLogger("clipship")


_WANDB_INIT_S = 30.0
_WANDB_FINISH_S = 30.0  # less than timeouts.shutdown_s, since the other ranks wait meanwhile


class MetricWriter(Protocol):
    """Protocol of a metric writer, which takes the same values as metrics.jsonl."""

    def write(self, values: Mapping[str, object]) -> None:
        """Writes one event, which has its `step`."""

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        """Shows pictures of the step's evaluation, at least one, with their nearest texts."""

    def close(self, error: BaseException | None) -> None:
        """Closes the writer; `error` is the exception that ended the run early, or None."""


def check_installed(settings: Logging) -> None:
    """Raises InputError if a writer that the job asks for needs a package that is not installed."""
    if settings.wandb != "off" and find_spec("wandb") is None:
        raise InputError(
            f'logging.wandb = "{settings.wandb}" needs the package wandb, which is not installed: '
            f"install it with `python -m pip install 'clipship[wandb]'`, or turn W&B off with "
            "--set logging.wandb=off"
        )


def open_writers(job: Job, folder: Path, steps_done: int) -> list[MetricWriter]:
    """Opens the writers that the job asks for, in the run folder.

    Raises InputError if W&B is not installed or knows no user.
    """
    check_installed(job.logging)
    writers: list[MetricWriter] = []
    if job.logging.tensorboard:
        writers.append(TensorBoard(folder / TENSORBOARD, steps_done, job_text(job)))
    if job.logging.wandb != "off":
        writers.append(Wandb(job, folder))
    return writers


class TensorBoard:
    """Writes TensorBoard event files.

    Steps that a killed run did after its last checkpoint are purged, since they come again.
    """

    def __init__(self, folder: Path, steps_done: int, job: str) -> None:
        """`job` is what each start shows under Text, as Markdown."""
        from torch.utils.tensorboard import SummaryWriter

        _say_errors_of_its_thread_once()
        self._writer = SummaryWriter(str(folder), purge_step=steps_done + 1)
        self._writer.add_text("job", job, steps_done + 1)
        self._has_pictures = False

    def write(self, values: Mapping[str, object]) -> None:
        step = values["step"]
        for name, value in numbers(values).items():
            self._writer.add_scalar(tag(name), value, step)
        self._writer.flush()  # so that a kill loses no more here than in metrics.jsonl

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        if not self._has_pictures:  # each evaluation has the same ones
            self._writer.add_image("eval/pictures", strip(pictures), step, dataformats="HWC")
            self._has_pictures = True
        self._writer.add_text("eval/nearest_texts", as_markdown(pictures), step)
        self._writer.flush()

    def close(self, error: BaseException | None) -> None:
        self._writer.close()


class Wandb:
    """Writes to a W&B run, with our `step` on the x axis of its charts.

    W&B's own counter would refuse the steps that come again after a kill.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self._wandb = wandb = importlib.import_module("wandb")
        arguments: dict[str, Any] = {
            "project": job.logging.wandb_project,
            "name": job.name,
            "id": _wandb_id(folder / WANDB_ID_FILE),
            "resume": "allow",
            "dir": str(folder),
            "config": recorded(job),
            "settings": wandb.Settings(
                console="off", silent=True, init_timeout=_WANDB_INIT_S, finish_timeout=_WANDB_FINISH_S
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
            why = str(error).partition("\n")[0]
            log.warning(
                "W&B cannot be reached (%s): this start is logged offline; "
                "`wandb sync` uploads what is in %s",
                why,
                folder / WANDB,
            )
            wandb.teardown()  # its own process still holds the run
            self._offline = True
            self._run = wandb.init(mode="offline", **arguments)
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Mapping[str, object]) -> None:
        tagged = {tag(name): value for name, value in numbers(values).items()}
        self._run.log({"step": values["step"], **tagged})

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        from PIL import Image

        rows = [
            [
                self._wandb.Image(Image.open(BytesIO(picture.png))),
                masked(picture.caption),
                picture.place or None,
                "\n".join(masked(text) for text, _ in picture.nearest),
            ]
            for picture in pictures
        ]
        table = self._wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log({"step": step, "eval/nearest_texts": table})

    def close(self, error: BaseException | None) -> None:
        # A rank that fails does not wait for a network.
        if error is None or isinstance(error, Preempted) or self._offline:
            self._run.finish()
            self._wandb.teardown()  # only then has its own process written everything to disk


def job_text(job: Job) -> str:
    """Returns what the job's file sets, as a code block of Markdown, without [env] and secrets."""
    table = {name: section for name, section in own_keys(job).items() if name != "env"}
    return "\n".join(f"    {line}" for line in tomli_w.dumps(masked_values(table)).splitlines())


def _say_errors_of_its_thread_once() -> None:
    """Keeps TensorBoard's thread from printing an OSError, which the next `write` or `close` raises again."""
    otherwise = threading.excepthook

    def hook(raised: threading.ExceptHookArgs) -> None:
        of_tensorboard = type(raised.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and issubclass(raised.exc_type, OSError)):
            otherwise(raised)

    threading.excepthook = hook


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Returns the finite numbers by name, without the step; writers cannot draw the others."""
    return {
        name: float(value)
        for name, value in values.items()
        if name != "step"
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def _wandb_id(path: Path) -> str:
    """Returns the id in the file; without a file, makes a new id and writes it there."""
    if not path.exists():
        write_whole(path, secrets.token_hex(8) + "\n")
    return read_plain(path).strip()


GROUPS = (
    ("eval", r"((ema|mix)_)?(zero_shot_|retrieval_)"),
    ("goodput", r"useful_share$|lost_"),
    ("train", r"(loss|lr|grad_norm|logit_scale|logit_bias|epoch|samples|scaler_scale)$"),
    (
        "health",
        r"bad_samples|generation$|copied_|copies_|slow|straggler|non_finite|.*(cpu_share|rss_bytes|gpu_)",
    ),
    ("perf", r""),
)
"""Group and pattern of the names in it; the first that fits counts."""


def tag(name: str) -> str:
    """Returns the name with its group, such as `train/loss`."""
    group = next(group for group, pattern in GROUPS if re.match(pattern, name))
    return f"{group}/{name}"
