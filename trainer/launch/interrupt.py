"""The line for people that `clipship run` prints when it gets a signal, before any rank has received it.

Imports no torch.
"""

import signal

from trainer.config.phases import NOTHING_DONE
from trainer.world.heartbeat import RankState

AGREED_AFTER = 2
"""Steps until all ranks know of one rank's request and stop at the same step; see
`trainer.comm.consensus`."""


def line_for_signal(
    number: int, times: int, state: RankState | None, *, begun: bool, here: bool, saves: bool
) -> str:
    """Returns the line for the signal when it comes for the first or second time; "" for later ones.

    `state` is what rank 0 is doing, None if not known; `begun` says that it was known before. `here` says
    that rank 0 runs on this machine, so that it will be known. `saves` says that there are steps and
    checkpoints.
    """
    if times > 2 or (times > 1 and number != signal.SIGINT):
        return ""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    if times > 1:
        return f"clipship: {name} again: exiting at once, nothing more is saved"
    again = "; press Ctrl-C again to exit at once" if number == signal.SIGINT else ""
    return f"clipship: {name}{_now(state, begun, here, saves)}{again}"


def _now(state: RankState | None, begun: bool, here: bool, saves: bool) -> str:
    if state is None and begun:
        return ": the ranks have ended, exiting"
    if not saves:
        return ": exiting"
    if state is None and not here:
        return ": asking the ranks to save their step and to exit"
    if state is None or state.phase in NOTHING_DONE:
        return " before the first step is done: there is nothing to save, exiting"
    if state.phase == "shutdown":
        return " while the ranks exit: everything is saved"
    where = (
        f"step {state.step}" if state.phase in ("data", "step") else f"the {state.phase} of step {state.step}"
    )
    return f" in {where}: saving at about step {state.step + AGREED_AFTER}, then exiting"
