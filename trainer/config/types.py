"""Base class and value types of all sections of the job file. Imports no torch."""

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

NO_NUL = r"\A[^\x00]*\z"
ONE_LINE = r"\A[^\x00\r\n]*\z"
RELEASE = r"\d+(\.\d+)+"
VERSION = rf"\A{RELEASE}\z"
COMPUTE_CAPABILITY = r"\A\d+\.\d\z"
ABSOLUTE_PATH = r"\A/[A-Za-z0-9_.+/-]*\z"
"""Pattern of an absolute path, with characters that no shell and no Dockerfile treats specially."""
REGION = r"\A[A-Za-z0-9_.-]{1,64}\z"
VARIABLE = r"\A[A-Za-z_][A-Za-z0-9_]*\z"

Text = Annotated[str, StringConstraints(min_length=1, pattern=NO_NUL)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Gibibytes = Annotated[float, Field(gt=0, le=1_000_000)]
Mebibytes = Annotated[float, Field(gt=0, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]

VariableName = Annotated[str, StringConstraints(pattern=VARIABLE)]
VariableValue = Annotated[str, StringConstraints(pattern=NO_NUL)]


STANDARD_INPUT = "-"


def is_stream(name: str) -> bool:
    """Returns whether the name is a stream, which can only be read from its beginning.

    Streams are `pipe:COMMAND`, and `-` for standard input.
    """
    return name.startswith("pipe:") or name == STANDARD_INPUT


def is_remote(name: str) -> bool:
    """Returns whether the name is no path, but a stream or a URL such as s3://bucket/0000.tar."""
    return is_stream(name) or "://" in name


def refuse(names: Iterable[str], why: str) -> None:
    """Raises ValueError with the names and the reason, if there is any name."""
    if listed := ", ".join(names):
        raise ValueError(f"{listed}: {why}")


def refuse_names(names: Iterable[str], pattern: re.Pattern[str], allowed: str) -> None:
    """Raises ValueError that lists the names that do not match the pattern, and says what is allowed."""
    refuse((f'"{name}"' for name in names if not pattern.fullmatch(name)), allowed)


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Returns a validator that keeps each value; `check` raises ValueError for one that it refuses.

    None, which stands for an unset key, passes.
    """

    def validated(value: Any) -> Any:
        if value is not None:
            check(value)
        return value

    return validated


def each(check: Callable[[str], object]) -> Callable[[Any], Any]:
    """Returns a validator whose check is that of each text of a list, or of each value of a table."""

    def check_all(texts: Any) -> None:
        for text in texts.values() if isinstance(texts, dict) else texts:
            check(text)

    return checked(check_all)


def fits(pattern: re.Pattern[str], otherwise: str) -> Callable[[Any], Any]:
    """Returns a validator of texts that match the pattern; `{}` in the message is one that does not."""

    def check(text: str) -> None:
        if not pattern.fullmatch(text):
            raise ValueError(otherwise.format(text))

    return checked(check)


def names_fit(pattern: re.Pattern[str], allowed: str) -> Callable[[Any], Any]:
    """Returns a validator of a name, or of several, by `refuse_names`."""
    return checked(lambda names: refuse_names([names] if isinstance(names, str) else names, pattern, allowed))


def one_or_many(value: object) -> object:
    """Returns the value of a key that is a list: a text alone is a list of one."""
    return (value,) if isinstance(value, str) else value


class Section(BaseModel):
    """A table of the job file: frozen, strict (no "8" for 8), unknown keys refused.

    Its validator is built on first use: a table is built once, as a part of the job's.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)

    hatch: ClassVar[str] = ""
    """Sentence for an unknown key of this section: where to give what has no key of its own.

    {option} and {variable} stand for the key's name, spelled as an option or as a variable.
    """


class SchedulerSection(Section):
    """Section of one scheduler, which a row of `trainer.config.schedulers` names."""

    @property
    def uses_image(self) -> bool:
        """True if ranks run in the job's container image, so that this machine's packages are not theirs."""
        return True

    @property
    def environment(self) -> str:
        """Words for what the ranks run in; "" if it is the job's image, image.tag."""
        return ""

    @property
    def without_gpus(self) -> bool:
        """True if the section asks for no GPU."""
        return False


AnySection = TypeVar("AnySection", bound=Section)


def optional_section(table: type[AnySection]) -> AnySection:
    """Returns the field of a table that a job file may leave out; its keys then have their defaults.

    The default is made with the job, not at import.
    """
    field: AnySection = Field(default_factory=table.model_construct)
    return field
