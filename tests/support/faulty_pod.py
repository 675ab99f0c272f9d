"""The first process of an Indexed Job's pod, whose ranks are those of `tests.support.faulty_rank`.

`python -m tests.support.faulty_pod JOB`; the variable `FAULT` says what they do.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from trainer.launch.kubernetes.pod import node

_popen = subprocess.Popen


def start(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Starts a supervisor and its rank as the pod does, with the module of the fault."""
    words = ["tests.support.faulty_rank" if word == "trainer.rank" else word for word in command]
    return _popen(words, **options)


if __name__ == "__main__":
    subprocess.Popen = start  # type: ignore[assignment, misc]
    sys.exit(node.main(sys.argv[1:]))
