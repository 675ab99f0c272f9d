"""Translation of a command line of open_clip_train: keys of a job file, and flags that become none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config.loader import key_defaults
from trainer.from_open_clip.line import Line
from trainer.text.wording import many

Fate = Literal["key", "built in", "not wanted", "not supported yet"]
"""Result of translating a flag. key: keys of the job file; built in: nothing, because every run does it."""


@dataclass(frozen=True)
class Setting:
    """A key's value, and a comment that explains a value that is not simply the flag's."""

    value: Any
    comment: str = ""


@dataclass
class Translation:
    """Result of a command line, filled by one flag after the other."""

    settings: dict[str, Setting] = field(default_factory=dict)
    """Values by dotted key."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Flags that become no key, and why; the training does not depend on them."""
    refused: dict[str, str] = field(default_factory=dict)
    """Flags that cannot be honoured, and why."""
    notes: list[str] = field(default_factory=list)
    """Remarks on the job as a whole."""

    def set(self, key: str, value: Any, comment: str = "", *, named: bool = True) -> None:
        """Sets a key; without `named`, only if the value is not the key's default."""
        if named or value != key_defaults()[key]:
            self.settings[key] = Setting(value, comment)

    def set_weights(
        self, flag: str, key: str, weights: Sequence[float], count: int, one: str, besides: str = ""
    ) -> None:
        """Sets a key to weights of several things, or refuses the flag if not each of them has one above 0.

        `one` is the word for a thing, `besides` more of what is so here.
        """
        if len(weights) != count or min(weights) <= 0:
            self.refused[flag] = (
                f"not supported yet: {many(count, one)} with {many(len(weights), 'number')}; each {one} has "
                f"a number above 0 here{besides}"
            )
        else:
            self.set(key, weights)

    def left_out(self) -> list[str]:
        """Returns a sentence for each flag that is in no key."""
        dropped = [f"{flag} becomes no key: {why}" for flag, why in self.dropped.items()]
        return dropped + [f"{flag} is left out: {why}" for flag, why in self.refused.items()]


Translate = Callable[["Flag", Line, Translation], None]


@dataclass(frozen=True)
class Flag:
    """A row of the table: one flag of open_clip_train, and what becomes of it."""

    name: str
    """The flag with its dashes."""
    fate: Fate
    text: str
    """Explains how its value is translated, or why it is not, for the page and for messages."""
    keys: tuple[str, ...] = ()
    """Dotted keys that it may set."""
    translate: Translate | None = None
    """Function that sets the keys; None for a flag that becomes none."""
    takes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of argparse's add_argument: type, default, choices, action, nargs."""
    from_4: Mapping[str, Any] = field(default_factory=dict)
    """Those of them that are others from release 4 on."""
    release: str = ""
    """Release that alone has the flag; "" if all have it."""
    also: str = ""
    """Another name of the flag, "" if it has none."""
    harmless: bool = False
    """True if the training is the same without the flag."""
    idle: Callable[[Line], str] = lambda _line: ""
    """Function that returns why the flag has no effect in open_clip_train itself; "" if it has one."""

    def takes_in(self, release: str) -> Mapping[str, Any]:
        """Returns the arguments of argparse's add_argument in a release."""
        return {**self.takes, **self.from_4} if release == "4" else self.takes

    def default_in(self, release: str) -> Any:
        """Returns the value in open_clip_train if the command line does not give the flag."""
        return self.takes_in(release).get("default")

    def apply(self, line: Line, result: Translation) -> None:
        """Adds to the result what becomes of the flag in this command line."""
        differs = line[self.name] != self.default_in(line.release)
        if differs and (why := self.idle(line)):
            result.dropped[self.name] = why
        elif self.translate is not None:
            self.translate(self, line, result)
        elif differs and self.fate != "built in" and not self.harmless:
            result.refused[self.name] = f"{self.fate}: {self.text}"
        elif self.name in line.named and differs:
            result.dropped[self.name] = self.text


def copy(change: Callable[[Any], Any] = lambda value: value) -> Translate:
    """Returns the translation of a flag whose value, changed by the function, becomes the only key's."""

    def translate(flag: Flag, line: Line, result: Translation) -> None:
        value = line[flag.name]
        if value is not None:
            result.set(flag.keys[0], change(value), named=flag.name in line.named)

    return translate


def switch(value: Any = True) -> Translate:
    """Returns the translation of a switch that gives its first key this value."""

    def translate(flag: Flag, line: Line, result: Translation) -> None:
        if line[flag.name]:
            result.set(flag.keys[0], value)

    return translate
