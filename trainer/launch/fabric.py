"""Finds what follows from `resources.fabric` for the text that a scheduler gets.

Everything comes from the network's row in `trainer.config.fabrics`. Pure; imports no torch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.config import Image, Job
from trainer.config.fabric_fit import fabric_of
from trainer.launch.rank_env import rank_environment

if TYPE_CHECKING:
    from trainer.config.fabrics import Line


def cluster_environment(job: Job, world_size: int) -> dict[str, str]:
    """Returns the variables of every rank on a cluster; the job's own keys win over those of its network."""
    own = rank_environment(job, world_size)
    return {name: value for name, value in _variables(job).items() if name not in own} | own


def refusal(job: Job, scheduler: str) -> Iterator[str]:
    """Yields a sentence if the scheduler's text cannot have what the network needs."""
    row = fabric_of(job)
    if row and scheduler in row.refused:
        yield f'resources.fabric = "{row.name}" does not work with [{scheduler}]: {row.refused[scheduler]}'


def pins_memory(job: Job) -> bool:
    """Returns whether the ranks pin memory for RDMA, for which the system must not limit it."""
    row = fabric_of(job)
    return row is not None and row.rdma


def conflicts(job: Job) -> Iterator[str]:
    """Yields a sentence for each variable of the network that the job sets to another value."""
    own = rank_environment(job, job.resources.world_size)
    for line in _lines(job):
        if own.get(line.name, line.value) != line.value:
            yield (
                f'resources.fabric = "{job.resources.fabric}" sets {line.name} = {line.value}, but the job '
                f"sets {own[line.name]}, which wins: {line.why}"
            )


def plugin_advice(job: Job) -> Iterator[str]:
    """Yields a sentence if the image lacks the plugin of the job's network, or has that of another one.

    A base of the site's own may bring the plugin, so that nothing is said about one.
    """
    row, given = fabric_of(job), job.image.plugins
    if row is None and not given:
        return
    from trainer.config.image_plugins import PLUGINS, plugins_for

    plain = job.image.base == Image.model_fields["base"].default and job.stack.torch != "base"
    for plugin in plugins_for(row.name) if row and plain else ():
        if plugin.origin == "archive" and plugin.name not in given:
            yield (
                f'resources.fabric = "{plugin.fabric}" needs {plugin.name} in the image: image.plugins = '
                f'["{plugin.name}"] installs it'
            )
    for name in given:
        if row is None or PLUGINS[name].fabric != row.name:
            yield (
                f'image.plugins: {name} is for resources.fabric = "{PLUGINS[name].fabric}", so that the '
                "ranks get none of its variables"
            )


def _variables(job: Job) -> dict[str, str]:
    return {line.name: line.value for line in _lines(job)}


def _lines(job: Job) -> "list[Line]":
    """Returns the variables of the job's network, and of the plugins that its image has for it."""
    row = fabric_of(job)
    if row is None:
        return []
    from trainer.config.image_plugins import plugins_for

    plugins = [plugin for plugin in plugins_for(row.name) if plugin.name in job.image.plugins]
    replaced = {name for plugin in plugins for name in plugin.replaces}
    own = [line for line in row.variables if line.name not in replaced]
    return own + [line for plugin in plugins for line in plugin.variables]
