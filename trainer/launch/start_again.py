"""Starts all supervisors again after a fault, under a launcher that ends all when one is gone.

MPI does that. The supervisors then ask for the next generation of the run by a file in the run folder; they
have the same token, so it is the same start. Imports no torch.
"""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED
from trainer.launch.commands import answer_of
from trainer.launch.hosts import ANSWER_S, KEEP_ALIVE, SSH_OPTIONS
from trainer.run.exit_files import exit_record_of
from trainer.run.launcher_word import requested_start
from trainer.run.retry import every, shown, until
from trainer.sysinfo.addresses import is_here

_POLL_S = 0.5
_ASK_AGAIN_S = 5.0


def run_generations(
    start_once: Callable[[int], int],
    asked_after: Callable[[int], int],
    wait_until_ready: Callable[[], str],
    say: Callable[[str], None],
    was_stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Starts all supervisors with the number of each generation in turn; returns the last exit code.

    `asked_after` returns which generation the run asks for after this one, 0 for none; others may have begun
    in between without the launcher. `wait_until_ready` returns why the next one cannot start, "" if it can;
    if it cannot, the run has failed. `was_stopped` returns whether somebody asked the run to stop: if that
    came when no supervisor could hear it any more, the run ends as one that was.
    """
    generation = 1
    while True:
        code = start_once(generation)
        generation = asked_after(generation)
        if not generation:
            return code
        if was_stopped():
            say("asked to stop between two starts of the ranks; the run can go on from its checkpoint")
            return EXIT_PREEMPTED
        if problem := wait_until_ready():
            say(f"no restart: {problem}")
            return EXIT_FAILED


def asked_after(run_folder: Path, start: str, generation: int, *, shown_s: float = 0.0) -> int:
    """Returns which later generation the run asks for; 0 if it asks for none or has ended.

    A shared file system may show a file of another host only after `shown_s` seconds.
    """

    def look() -> int:
        """Returns the generation; 0 while there is no request, and -1 if there will be none."""
        if exit_record_of(run_folder, start) is not None:
            return -1
        request = requested_start(run_folder, start)
        asked = request.record.generation if request is not None else 0
        return asked if asked > generation else 0

    return max(0, shown(look, run_folder, shown_s, _POLL_S))


def wait_for_hosts(names: list[str], limit_s: float) -> str:
    """Waits until ssh reaches each host; returns which it does not reach within the limit, "" for none."""
    left, end = [name for name in names if not is_here(name)], time.monotonic() + limit_s

    def answers(name: str) -> bool:
        remaining_s = min(ANSWER_S, max(1.0, end - time.monotonic()))
        try:
            answer = answer_of("ssh", *SSH_OPTIONS, *KEEP_ALIVE, name, "true", timeout=remaining_s)
        except subprocess.TimeoutExpired:
            return False
        return answer.returncode == 0

    def reached() -> bool:
        left[:] = [name for name in left if not answers(name)]
        return not left

    until(reached, every(_ASK_AGAIN_S, limit_s))
    return f"ssh does not reach {', '.join(left)} within {limit_s:g} s" if left else ""
