"""Starts a rank in a worker pod: replaces itself by `python -m trainer.rank` with the pod's variables.

Run as `python -m trainer.launch.kubernetes.pod.rank JOB [--set KEY=VALUE ...]`. A process that ssh starts has
none of its pod's variables: not those of the image, of the manifest, of its Secrets and ConfigMaps, or of
device plugins. They are read from the pod's first process and never cross the network. Imports no torch.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.errors import EXIT_BAD_INPUT, InputError
from trainer.launch.kubernetes.pod.names import rendezvous
from trainer.text.terminal import say

_FIRST_PROCESS = Path("/proc/1/environ")
_OF_THE_LAUNCHER = ("OMPI_", "OPAL_", "PMIX_", "PRTE_")


def environment(pod: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Returns the pod's variables, with those that mpirun gives this rank on top.

    Variables that the pod lacks are taken from ssh.
    """
    by_launcher = {name: value for name, value in own.items() if name.startswith(_OF_THE_LAUNCHER)}
    together = {**own, **pod, **by_launcher}
    return together | rendezvous(together).variables()


def read_environment(path: Path = _FIRST_PROCESS) -> dict[str, str]:
    """Returns the variables of the pod's first process.

    Raises InputError if the kernel does not show them.
    """
    try:
        entries = path.read_bytes().split(b"\0")
    except OSError as problem:
        raise InputError(
            f"{path} cannot be read ({problem.strerror}): a worker's first process must be "
            "trainer.launch.kubernetes.pod.worker"
        ) from None
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if b"=" in entry)


def main(arguments: list[str]) -> int:
    """Become the rank; returns an exit code only if that is not possible."""
    try:
        variables = environment(read_environment(), os.environ)
        os.execve(sys.executable, [sys.executable, "-P", "-m", "trainer.rank", *arguments], variables)
    except InputError as problem:
        say(problem)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
