"""Table of the plugins through which NCCL uses a network: how each gets into an image, and what it needs.

A plugin is one row of fabrics.toml, and one script in docker/plugins/ that installs it or looks for it. Pure;
imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.fabrics import Line, NcclRange, rows


@dataclass(frozen=True)
class Archive:
    """A file that the build downloads, or takes from image.site.sources."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Plugin:
    """One plugin of NCCL."""

    name: str
    """Value in `image.plugins`."""
    title: str
    fabric: str
    """Network in `trainer.config.fabrics` that it is for."""
    origin: Literal["archive", "base", "node"]
    """Origin: the build installs it, image.base has it, or the nodes mount it into the pods."""
    why: str
    source: str
    archive: Archive | None = None
    script: str = ""
    """File in docker/plugins/; empty for a plugin of the nodes."""
    systems: tuple[str, ...] = ()
    """Distributions in docker/stacks.toml that it supports; empty for all."""
    nccl: NcclRange | None = None
    variables: tuple[Line, ...] = ()
    """Variables of every rank on its network, beside those of the network."""
    replaces: tuple[str, ...] = ()
    """Variables of its network that do not hold with it."""

    @property
    def line(self) -> Line:
        text = {
            "archive": f'image.plugins = ["{self.name}"]',
            "base": f'image.plugins = ["{self.name}"], on a base that has it',
            "node": "of the nodes",
        }[self.origin]
        return Line(self.title, text, self.why, self.source)


def _plugin(name: str, fields: Mapping[str, Any]) -> Plugin:
    archive = Archive(**fields["archive"]) if "archive" in fields else None
    return Plugin(name=name, **{**fields, "archive": archive})


PLUGINS = {name: _plugin(name, fields) for name, fields in rows("plugin").items()}
"""Rows by name."""


def plugins_for(fabric: str) -> tuple[Plugin, ...]:
    """Returns the plugins that are for a network."""
    return tuple(row for row in PLUGINS.values() if row.fabric == fabric)
