"""The command `clipship plan`: what to expect of a run before it starts. Imports no torch."""

import click

from trainer.cli.options import Group
from trainer.cli.plan_scaling import scaling


@click.group(cls=Group)
def command() -> None:
    """Say what to expect of a run before it starts.

    Examples:
      clipship plan scaling job.toml --fabric NDR --gpus 1024
    """


command.add_command(scaling)
