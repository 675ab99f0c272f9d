"""How a rank starts in a worker pod: `python -m trainer.pod.rank JOB [--set KEY=VALUE ...]` becomes `python -m trainer.rank`.

A process that ssh starts has none of its pod's variables: not the image's, not those of the manifest, its Secrets and ConfigMaps, not those
that device plugins add. They are taken from the pod's first process; nothing of them crosses the network. No torch.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.errors import EXIT_BAD_INPUT, InputError
from trainer.pod.names import meeting

_FIRST_PROCESS = Path("/proc/1/environ")
_OF_THE_LAUNCHER = ("OMPI_", "OPAL_", "PMIX_", "PRTE_")


def environment(pod: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The pod's variables, and on top what mpirun tells this rank; where the pod says nothing, what ssh set."""
    told = {name: value for name, value in own.items() if name.startswith(_OF_THE_LAUNCHER)}
    together = {**own, **pod, **told}
    return together | meeting(together).variables()


def read_environment(path: Path = _FIRST_PROCESS) -> dict[str, str]:
    """Of the pod's first process. Raises InputError where the kernel does not show it."""
    try:
        entries = path.read_bytes().split(b"\0")
    except OSError as problem:
        raise InputError(f"{path} cannot be read ({problem.strerror}): a worker's first process must be trainer.pod.worker") from None
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if b"=" in entry)


def main(words: list[str]) -> int:
    """Does not return where all is well."""
    try:
        variables = environment(read_environment(), os.environ)
        os.execve(sys.executable, [sys.executable, "-P", "-m", "trainer.rank", *words], variables)
    except InputError as problem:
        print(f"clipship: {problem}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
