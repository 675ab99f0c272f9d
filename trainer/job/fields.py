"""What every section of the job file is made of: its base class, and the kinds of values. No torch."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

NO_NUL = r"\A[^\x00]*\z"
ONE_LINE = r"\A[^\x00\r\n]*\z"
RELEASE = r"\d+(\.\d+)+"
VERSION = rf"\A{RELEASE}\z"
COMPUTE_CAPABILITY = r"\A\d+\.\d\z"
ABSOLUTE_PATH = r"\A/[A-Za-z0-9_.+/-]*\z"
"""Of characters that no shell and no Dockerfile takes for more than themselves."""
VARIABLE = r"\A[A-Za-z_][A-Za-z0-9_]*\z"

Text = Annotated[str, StringConstraints(min_length=1, pattern=NO_NUL)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]

VariableName = Annotated[str, StringConstraints(pattern=VARIABLE)]
VariableValue = Annotated[str, StringConstraints(pattern=NO_NUL)]


STANDARD_INPUT = "-"


def is_stream(name: str) -> bool:
    """Whether the name is of something that can only be read from its beginning on: `pipe:COMMAND`, or `-` for standard input."""
    return name.startswith("pipe:") or name == STANDARD_INPUT


def is_remote(name: str) -> bool:
    """Whether the name is no path: a stream, or a URL such as s3://bucket/0000.tar."""
    return is_stream(name) or "://" in name


class Section(BaseModel):
    """A table of the job file: frozen, strict (no "8" for 8), unknown keys refused.

    Built when it is first used: a command waits for the tables that it reads, not for each one twice.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)


Table = TypeVar("Table", bound=Section)


def left_out(table: type[Table]) -> Table:
    """The default of a table that a job file may leave out: the defaults of its keys. Made with the job, not at an import."""
    return Field(default_factory=table.model_construct)
