"""What happens when a gradient is no number: the step's samples are recorded, and the run stops or goes on, as the job says."""

import logging
from collections.abc import Sequence
from pathlib import Path

from trainer.job.health import Health
from trainer.step import StepResult
from trainer.whole_file import write_json
from trainer.world import World

log = logging.getLogger("clipship")

FOLDER = "non-finite"
"""In the run folder: a file for each rank and step, with the keys of the samples."""


class NonFinite(RuntimeError):
    """The gradient of a step is no number; the text names the step and where its samples are recorded."""


class Finite:
    """Counts the steps that were left out one after another; the same on all ranks."""

    def __init__(self, settings: Health, run_folder: Path, world: World) -> None:
        self._settings, self._folder, self._world = settings, run_folder / FOLDER, world
        self._left_out = 0

    def judge(self, step: int, result: StepResult, keys: Sequence[str]) -> None:
        """Every rank, after every step. Raises NonFinite on all ranks alike."""
        if result.finite:
            self._left_out = 0
            return
        self._left_out += 1
        where = self._record(step, result, keys)
        what = f"the gradient of step {step} is not finite (its norm is {float(result.grad_norm):g})"
        ways = "a smaller optim.lr, a longer optim.warmup_steps or optim.grad_clip_norm may help"
        if self._settings.non_finite == "stop" and not result.scaled:
            raise NonFinite(f"{what}: its samples are {where}; {ways}, health.non_finite = skip leaves such steps out")
        if self._left_out >= self._settings.non_finite_in_a_row:
            raise NonFinite(f"{what}, as in the {self._left_out} steps up to it: their samples are {where}; {ways}")
        if self._world.rank == 0:
            log.warning("%-12s %s: left out, %d in a row", "not finite", what, self._left_out)

    def _record(self, step: int, result: StepResult, keys: Sequence[str]) -> str:
        """Says where they are; a full disk ends no run."""
        share = float(result.loss_share)  # of the ranks that share a gradient, the one whose loss is no number is where it came from
        about = {"step": step, "rank": self._world.rank, "node": self._world.node, "loss_share": share, "keys": list(keys)}
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._folder / f"step-{step:08d}-rank-{self._world.rank:05d}.json", about)
        except OSError as error:
            log.warning("%-12s the samples of step %d are NOT WRITTEN: %s", "not finite", step, error)
            return f"not recorded ({error})"
        return f"in {self._folder}"
