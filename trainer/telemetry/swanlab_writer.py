"""SwanLab. Its package is imported when the writer is opened."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config import Job
from trainer.config.loader import recorded
from trainer.errors import InputError
from trainer.run.layout import SWANLAB, SWANLAB_ID_FILE
from trainer.telemetry.figures import tagged
from trainer.telemetry.pictures import Picture, as_markdown
from trainer.telemetry.services import WAIT_S, lasting_id, waits, why
from trainer.text.masking import masked

log = logging.getLogger("clipship")

_NO_KEY = ("no API key", "no TTY")
"""Words of SwanLab's errors where it has no key; a wrong one reads like a network that is gone."""
_QUIET: dict[str, Any] = {
    "interactive": False,
    "terminal": {"proxy_type": "none"},
    "probe": {"git": False, "requirements": False, "runtime": False},
}
"""Settings under which it asks nobody, leaves the console alone, and tells nothing of the run's start."""


class SwanLab:
    """Writes to a SwanLab run, which all starts share; steps that come again after a kill are sent again."""

    name = "SwanLab"

    def __init__(self, job: Job, folder: Path) -> None:
        self._swanlab: Any = importlib.import_module("swanlab")
        self._run: Any = None
        if self._swanlab.has_run():  # which `close` has left alone
            log.warning(
                "SwanLab is still sending what the stage before has logged: it gets nothing of this one; "
                "metrics.jsonl has all of it"
            )
            return
        arguments: dict[str, Any] = {
            "project": job.logging.swanlab_project,
            "name": job.name,
            "log_dir": str(folder / SWANLAB),
            "config": recorded(job),
            "id": lasting_id(folder / SWANLAB_ID_FILE),
            "settings": self._swanlab.Settings(**_QUIET),
        }
        self._folder = folder / SWANLAB
        self._offline = job.logging.swanlab == "offline"
        # Its `finish` knows no limit. A thread that can be left alone calls it, and `init` before: so SwanLab
        # leaves signals alone, which only the main thread may set.
        self._thread = ThreadPoolExecutor(1, "SwanLab")
        begin = partial(self._swanlab.init, **arguments)
        try:
            self._run = self._thread.submit(begin, mode=job.logging.swanlab, resume="allow").result()
        except Exception as error:  # its own errors and those of its HTTP library
            if any(words in why(error) for words in _NO_KEY):
                raise InputError(
                    f"SwanLab: {why(error)} The variable SWANLAB_API_KEY gives a rank its key; without a "
                    "user, set logging.swanlab=offline; without SwanLab, logging.swanlab=off"
                ) from None
            log.warning(
                "SwanLab cannot be reached, or refuses the key (%s): this start is logged offline; "
                "`swanlab sync` uploads what is in %s",
                why(error),
                self._folder,
            )
            self._offline = True
            self._run = self._thread.submit(begin, mode="offline").result()

    def write(self, values: Mapping[str, object]) -> None:
        if self._run is not None:
            self._run.log(tagged(values), step=values["step"])

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        if self._run is None:
            return
        images = [
            self._swanlab.Image(picture.image(), caption=masked(picture.caption)) for picture in pictures
        ]
        text = self._swanlab.Text(as_markdown(pictures))
        self._run.log({"eval/pictures": images, "eval/nearest_texts": text}, step=step)

    def close(self, error: BaseException | None) -> None:
        if self._run is not None and (waits(error) or self._offline):
            finished = self._thread.submit(self._run.finish, *(() if error is None else ("aborted",)))
            try:
                finished.result(WAIT_S)
            except TimeoutError:
                text = "SwanLab did not get all of this start in %.0f s; `swanlab sync` uploads what is in %s"
                log.warning(text, WAIT_S, self._folder)
