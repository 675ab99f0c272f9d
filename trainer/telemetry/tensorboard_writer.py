"""TensorBoard's event files. torch is imported when a writer is opened."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w

from trainer.config import Job
from trainer.config.loader import own_keys
from trainer.telemetry.figures import tagged
from trainer.telemetry.pictures import Picture, as_markdown, strip
from trainer.text.masking import masked_values


class TensorBoard:
    """Writes TensorBoard event files.

    Steps that a killed run did after its last checkpoint are purged, since they come again.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, steps_done: int, job: str) -> None:
        """`job` is what each start shows under Text, as Markdown."""
        from torch.utils.tensorboard import SummaryWriter

        _say_errors_of_its_thread_once()
        self._writer = SummaryWriter(str(folder), purge_step=steps_done + 1)
        self._writer.add_text("job", job, steps_done + 1)
        self._has_pictures = False

    def write(self, values: Mapping[str, object]) -> None:
        step = values["step"]
        for name, value in tagged(values).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a kill loses no more here than in metrics.jsonl

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        if not self._has_pictures:  # each evaluation has the same ones
            self._writer.add_image("eval/pictures", strip(pictures), step, dataformats="HWC")
            self._has_pictures = True
        self._writer.add_text("eval/nearest_texts", as_markdown(pictures), step)
        self._writer.flush()

    def close(self, error: BaseException | None) -> None:
        self._writer.close()


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
