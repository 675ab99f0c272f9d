"""The command `clipship`. Imports the rest of the package when a command needs it, and never torch.

`--help` is fast because nothing heavy is imported here: no pydantic, no model, no launcher.
"""

import errno
import sys
from collections.abc import Sequence

import click

from trainer.cli.commands import COMMANDS, command_of
from trainer.cli.options import NearGroup
from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ClusterError,
    InputError,
    MachineError,
    exit_code_of,
)
from trainer.sysinfo.extras import missing_extra
from trainer.text.terminal import say

_OF_THE_SYSTEM = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), EXIT_BAD_INPUT),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EIO), EXIT_FAILED),
}
"""Exit codes by the number of an error that is no bug: a file that this user may not have, a full disk."""


class Commands(NearGroup):
    """A group that imports the module of a command only when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return command_of(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _show_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version  # slow to import, rarely needed

        try:
            click.echo(f"clipship {version('clipship')}")
        except PackageNotFoundError:
            click.echo("clipship (a checkout that is not installed)")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
A first run, on made-up pictures:
  clipship init --preset laptop job.toml
  clipship check job.toml
  clipship run job.toml --nproc 2 --set optim.steps=40

Exit codes: 0 done, 1 the run failed, 2 bad input, 75 stopped on request and saved, 124 a phase passed
its time limit, 128 + N ended by signal N without saving (130: Ctrl-C twice).""",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Train CLIP from one job file: on this machine, over ssh, on a cluster."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Bad input gives one message on stderr, and so does what the system refuses; a bug keeps its traceback.
    """
    try:
        code = cli.main(arguments, prog_name="clipship", standalone_mode=False)
    except InputError as problem:
        say(problem)
        return exit_code_of(problem)
    except (ClusterError, MachineError) as problem:
        say(problem)
        return EXIT_FAILED
    except click.ClickException as problem:
        problem.show()
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as missing:
        if not (text := missing_extra(missing.name or "")):
            raise
        say(text)
        return EXIT_BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except OSError as problem:
        if problem.errno not in _OF_THE_SYSTEM:
            raise
        say(f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror)
        return _OF_THE_SYSTEM[problem.errno]
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
