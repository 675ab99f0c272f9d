"""Regular expressions that are compiled on first use: a command compiles none that it does not need."""

import re
from functools import cached_property
from typing import Any, cast


class _Pattern:
    def __init__(self, text: str, flags: int) -> None:
        self._text, self._flags = text, flags

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self._text, self._flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Returns a pattern as `re.compile` does; re.error is raised on first use."""
    return cast("re.Pattern[str]", _Pattern(text, flags))
