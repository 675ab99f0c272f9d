"""Guards against NaN or infinite gradients: records the samples, then stops the run or skips the step."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.comm.protocol import Comm
from trainer.config.recovery import Health
from trainer.run.layout import NON_FINITE
from trainer.safe_io.atomic import write_json
from trainer.text.wording import many
from trainer.train.step import StepResult

log = logging.getLogger("clipship")

_OTHERS_S = 30.0
"""Longest wait for the other ranks' samples, which a slow disk may delay."""


class NonFinite(RuntimeError):
    """Raised when a step's gradient is NaN or infinite; the text says where its samples are recorded."""


class NonFiniteGuard:
    """Checks the gradient of each step and counts skipped steps in a row, the same on all ranks."""

    def __init__(self, settings: Health, run_folder: Path, comm: Comm) -> None:
        self._settings, self._folder, self._comm = settings, run_folder / NON_FINITE, comm
        self._world = comm.world
        self._skipped = 0

    def check(self, step: int, result: StepResult, keys: Sequence[str]) -> None:
        """Checks one step's gradient; every rank calls it after every step.

        Raises NonFinite on all ranks alike.
        """
        if result.finite:
            self._skipped = 0
            return
        self._skipped += 1
        where = self._record(step, result, keys)
        what = f"the gradient of step {step} is NaN or infinite (its norm is {float(result.grad_norm):g})"
        ways = "A smaller optim.lr, a longer optim.warmup_steps or optim.grad_clip_norm may help"
        if self._settings.non_finite == "stop" and not result.scaled:
            self._await_others()
            raise NonFinite(
                f"{what}. Its samples are {where}. {ways}; health.non_finite = skip skips such steps."
            )
        if self._skipped >= self._settings.non_finite_in_a_row:
            self._await_others()
            raise NonFinite(
                f"{what}, like every gradient of the last {many(self._skipped, 'step')}. "
                f"Their samples are {where}. {ways}."
            )
        if self._world.rank == 0:
            log.warning("%-12s %s: step skipped, %d in a row", "not finite", what, self._skipped)

    def _await_others(self) -> None:
        """Collective: waits until all ranks have recorded their samples; the first to leave ends the others.

        A rank that has failed meanwhile, or is late, keeps no other from saying what it has found.
        """
        with suppress(RuntimeError, TimeoutError):
            self._comm.barrier(_OTHERS_S)

    def _record(self, step: int, result: StepResult, keys: Sequence[str]) -> str:
        """Writes the step's samples to the run folder; returns where they are.

        A full disk does not end the run.
        """
        # Of ranks that share a gradient, the one with a non-finite loss is where it came from.
        share = float(result.loss_share)
        about = {
            "step": step,
            "rank": self._world.rank,
            "node": self._world.node,
            "loss_share": share,
            "keys": list(keys),
        }
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._folder / f"step-{step:08d}-rank-{self._world.rank:05d}.json", about)
        except OSError as error:
            log.warning("%-12s the samples of step %d are NOT WRITTEN: %s", "not finite", step, error)
            return f"not recorded ({error})"
        return f"in {self._folder}"
