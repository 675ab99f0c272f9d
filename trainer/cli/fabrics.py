"""The command `clipship fabrics`: networks between nodes, and what a job gets for each.

Reads `trainer.config.fabrics`; uses no network and no torch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from trainer.cli.options import Group
from trainer.cli.output import print_lines
from trainer.errors import InputError
from trainer.text.near import did_you_mean
from trainer.text.table import aligned, by_topic

if TYPE_CHECKING:
    from trainer.config.fabrics import Fabric, Line


@click.group(cls=Group, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List networks between nodes (resources.fabric), and what a job gets for each.

    Examples:
      clipship fabrics
      clipship fabrics explain efa
    """
    if ctx.invoked_subcommand is None:
        print_lines(aligned(list(_list())))


@command.command()
@click.argument("name", metavar="FABRIC")
def explain(name: str) -> None:
    """Explain what follows from a network: each setting with its reason and its source."""
    from trainer.config.fabrics import FABRICS

    if name not in FABRICS:
        raise InputError(
            f"{name} is no fabric that Clipship knows: use one of {', '.join(FABRICS)}"
            f"{did_you_mean(name, FABRICS)}"
        )
    row = FABRICS[name]
    print_lines([f"{row.name}: {row.title}", *by_topic(_explain(row))])


def _list() -> Iterator[tuple[str, ...]]:
    from trainer.config.fabrics import FABRICS

    yield "fabric", "network", "NCCL", "variables"
    for row in FABRICS.values():
        names = ", ".join(line.name for line in row.variables[:2])
        names += f" and {len(row.variables) - 2} more" if len(row.variables) > 2 else ""
        yield row.name, row.title, str(row.nccl or "any"), names


def _explain(row: "Fabric") -> Iterator[tuple[str, str]]:
    if row.nccl:
        yield from _entry("NCCL", str(row.nccl), row.nccl.why, row.nccl.source)
    for topic, lines in (*row.sections, *_plugin_sections(row.name)):
        for line in lines:
            yield from _entry(topic, f"{line.name} = {line.value}", line.why, line.source)


def _plugin_sections(fabric: str) -> "Iterator[tuple[str, tuple[Line, ...]]]":
    from trainer.config.fabrics import Line
    from trainer.config.image_plugins import plugins_for

    for plugin in plugins_for(fabric):
        yield "plugin", (plugin.line,)
        if plugin.archive:
            why = f"its sha256 is {plugin.archive.sha256}; image.site.sources may have a copy"
            yield "archive", (Line(plugin.archive.name, plugin.archive.url, why, plugin.source),)
        yield "with it", plugin.variables


def _entry(topic: str, text: str, why: str, source: str) -> Iterator[tuple[str, str]]:
    yield topic, text
    yield "", f"  {why}"
    yield "", f"  source: {source}"
