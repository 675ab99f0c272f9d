"""Says whether an installed open_clip is one that the trainer is written for. Imports no open_clip."""

import re

PACKAGE = "open_clip_torch"
FROM, BELOW = (3, 3), (4,)
"""Releases of open_clip_torch that pyproject.toml allows; with 4, a tenth of the tests of models fail."""


def unsupported(release: str) -> str:
    """Returns a sentence about a release of open_clip_torch that was not tried; "" for the others."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if not numbers or FROM <= numbers < BELOW:
        return ""
    return (
        f"open_clip_torch {release} is none of the releases that Clipship is written for: install one from "
        "3.3 to below 4 (pip install 'open_clip_torch>=3.3,<4')"
    )
