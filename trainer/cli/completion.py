"""The command `clipship completion`. `trainer.cli.suggested` has what the shell then suggests. No torch."""

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from trainer.cli.options import Command, NearChoice

_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_BASH_ADDS, _BASH_JOINS = (
    "COMPREPLY+=($value)",
    "COMPREPLY+=($value); [[ $value != *= ]] || compopt -o nospace",
)


@click.command(cls=Command)
@click.argument("shell", type=NearChoice(list(_SHELLS)))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, presets, runs and keys of the job file in SHELL.

    Examples:
      source <(clipship completion bash)        for this shell
      clipship completion bash > ~/.local/share/bash-completion/completions/clipship
      clipship completion zsh > "${fpath[1]}/_clipship"
      clipship completion fish > ~/.config/fish/completions/clipship.fish
    """
    made = _SHELLS[shell](context.find_root().command, {}, "clipship", "_CLIPSHIP_COMPLETE")
    text = made.source_template % made.source_vars()
    click.echo(text.replace(_BASH_ADDS, _BASH_JOINS))  # a key goes on with its value, without a space
