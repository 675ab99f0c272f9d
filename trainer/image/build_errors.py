"""Finds the likely cause of a failed build in the output of the failing step: build_errors.toml. Pure."""

import re
from collections.abc import Iterable

from trainer.sysinfo.own_table import own_table

_STEP = re.compile(r"^(?:Step \d+/\d+ : |#\d+ \[| > \[|(?:\[\d+/\d+\] )?STEP \d+/\d+: )", re.MULTILINE)
"""First line of a step, as printed by the classic builder, by BuildKit, in BuildKit's excerpt of the failed
step, or by podman and buildah."""
LAST_LINES = 25
"""Lines of an output that an error repeats."""


def explained(last: Iterable[str]) -> str:
    """Returns the last lines of what failed, and behind them the likely cause if it is known."""
    output = "\n".join(last)
    cause = likely_cause(output)
    return f"{output}\nlikely cause: {cause}" if cause else output


def likely_cause(output: str) -> str | None:
    """Returns the likely cause from the output of the last step, which failed.

    Returns None if nothing in it is known.
    """
    begin = max((match.start() for match in _STEP.finditer(output)), default=0)
    for row in own_table(__file__, "build_errors.toml")["causes"]:
        for pattern in row["patterns"]:
            if matches := list(re.finditer(pattern, output[begin:])):
                return matches[-1].expand(row["cause"])
    return None
