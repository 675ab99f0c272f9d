"""Runs the commands that a launcher asks for facts: ssh, mpirun, Slurm's. Imports no torch."""

import subprocess
from typing import Any


def answer_of(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command without input, to its end; returns its exit code, stdout and stderr.

    What is no text in this machine's encoding, as a host's greeting may be, is replaced. `options` are those
    of `subprocess.run`. Raises FileNotFoundError if there is no such command.
    """
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        **options,
    )
