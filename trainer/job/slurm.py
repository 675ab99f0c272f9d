"""`[slurm]`: what sbatch is asked for beside `[resources]`."""

import re

from pydantic import field_validator

from trainer.job.fields import Section, Text

_SLURM_TIME = re.compile(r"\d+(:[0-5]\d){0,2}|\d+-([01]?\d|2[0-3])(:[0-5]\d){0,2}", re.ASCII)
_NO_SPACE = re.compile(r"[!-~]+")


class Slurm(Section):
    """What sbatch asks for beside [resources]. Rendering the batch script comes in a later release."""

    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    time: Text | None = None
    """Limit on the run time: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. None: the partition's own."""

    @field_validator("partition", "account", "qos")
    @classmethod
    def _one_word(cls, value: str | None) -> str | None:
        if value is not None and not _NO_SPACE.fullmatch(value):
            raise ValueError(f'"{value}" must be one word of ASCII characters')
        return value

    @field_validator("time")
    @classmethod
    def _a_time_limit(cls, value: str | None) -> str | None:
        if value is not None and not _SLURM_TIME.fullmatch(value):
            forms = '"90" (minutes), "30:00" (MM:SS), "12:30:00" (HH:MM:SS), "2-12" (D-HH), "2-12:30" or "2-12:30:00"'
            raise ValueError(f'"{value}" is no time limit of Slurm; write it as {forms}')
        return value
