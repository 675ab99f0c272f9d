"""The command `clipship fabrics`: networks between nodes, and what a job gets for each.

Reads `trainer.config.fabrics`; uses no network and no torch.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from trainer.errors import InputError
from trainer.text.fitting import fit_to
from trainer.text.near import did_you_mean

if TYPE_CHECKING:
    from trainer.config.fabric_row import Fabric, Line

_COLUMNS = "{:<10}{:<34}{:<18}{}"


@click.group(
    invoke_without_command=True,
    epilog="""\b
Examples:
  clipship fabrics
  clipship fabrics explain efa""",
)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List networks between nodes (resources.fabric), and what a job gets for each."""
    if ctx.invoked_subcommand is None:
        for line in _list():
            click.echo(fit_to(sys.stdout, line))


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
    for line in _explain(FABRICS[name]):
        click.echo(fit_to(sys.stdout, line))


def _list() -> Iterator[str]:
    from trainer.config.fabrics import FABRICS

    yield _COLUMNS.format("fabric", "network", "NCCL", "variables")
    for row in FABRICS.values():
        names = ", ".join(line.name for line in row.variables[:2])
        names += f" and {len(row.variables) - 2} more" if len(row.variables) > 2 else ""
        yield _COLUMNS.format(row.name, row.title, str(row.nccl or "any"), names)


def _explain(row: "Fabric") -> Iterator[str]:
    yield f"{row.name}: {row.title}"
    if row.nccl:
        yield from _entry("NCCL", str(row.nccl), row.nccl.why, row.nccl.source)
    for topic, lines in (*row.sections, *_plugin_sections(row.name)):
        for line in lines:
            yield from _entry(topic, f"{line.name} = {line.value}", line.why, line.source)


def _plugin_sections(fabric: str) -> "Iterator[tuple[str, tuple[Line, ...]]]":
    from trainer.config.fabric_row import Line
    from trainer.config.image_plugins import plugins_for

    for plugin in plugins_for(fabric):
        yield "plugin", (plugin.line,)
        if plugin.archive:
            why = f"its sha256 is {plugin.archive.sha256}; image.site.sources may have a copy"
            yield "archive", (Line(plugin.archive.name, plugin.archive.url, why, plugin.source),)
        yield "with it", plugin.variables


def _entry(topic: str, text: str, why: str, source: str) -> Iterator[str]:
    yield f"{topic:<12}{text}"
    yield f"{'':<12}  {why}"
    yield f"{'':<12}  source: {source}"
