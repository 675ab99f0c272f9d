"""The command `clipship diff`: what differs between runs. Imports no torch."""

import shutil
from collections.abc import Iterator, Sequence

import click

from trainer.cli import suggested
from trainer.cli.options import Command, json_option
from trainer.cli.output import print_json
from trainer.errors import InputError
from trainer.report.differences import Difference, differences
from trainer.report.folder import read_run
from trainer.text.terminal import shown

_GAP = "  "
_WIDEST = 160


@click.command(cls=Command)
@click.argument("runs", metavar="RUN RUN...", nargs=-1, required=True, shell_complete=suggested.runs)
@json_option("Print one JSON object: topic -> name -> run -> text.")
def command(runs: tuple[str, ...], as_json: bool) -> None:
    """Show in what runs differ: job, data, environment and results.

    Each RUN is a run folder, a job file, or the name of a run in ./runs. What is equal is left out.

    Examples:
      clipship diff first-run try-2
      clipship diff runs/* --json
    """
    from trainer.launch.submission import find_run

    folders = list(dict.fromkeys(find_run(run) for run in runs))
    if len(folders) < 2:
        raise InputError(f"{runs[0]} alone has nothing to differ from: name two runs or more")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    found = differences([read_run(folder) for folder in folders])
    if as_json:
        print_json(_table(names, found))
        return
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    click.echo("\n".join(map(shown, _lines(names, found, width))) or "no difference")


def _table(names: Sequence[str], found: Sequence[Difference]) -> dict[str, dict[str, dict[str, str]]]:
    table: dict[str, dict[str, dict[str, str]]] = {}
    for each in found:
        table.setdefault(each.topic, {})[each.name] = dict(zip(names, each.values, strict=True))
    return table


def _lines(names: Sequence[str], found: Sequence[Difference], width: int) -> Iterator[str]:
    """Yields a table with a column for each run; rows that are too wide for it go below each other."""
    if not found:
        return
    first = max(len(_GAP + each.name) for each in found)
    column = max(4, (width - first) // len(names) - len(_GAP))
    fitting = [each for each in found if all(len(value) <= column for value in each.values)]
    widths = [
        max([len(name[:column]), *(len(each.values[place]) for each in fitting)])
        for place, name in enumerate(names)
    ]

    def row(head: str, values: Sequence[str]) -> str:
        cells = [value[:size].ljust(size) for value, size in zip(values, widths, strict=True)]
        return _GAP.join([head.ljust(first), *cells]).rstrip()

    yield row("", names)
    topic = ""
    for each in found:
        if each.topic != topic:
            topic = each.topic
            yield topic
        if each in fitting:
            yield row(_GAP + each.name, each.values)
        else:
            yield _GAP + each.name
            for name, value in zip(names, each.values, strict=True):
                yield f"{_GAP * 2}{name}: {value}"
