"""What people see of a run folder: the page of `clipship report`, and what `clipship status` says."""

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.command_line import clipship

LOSS = {"step": 1, "loss": 1.0}


@dataclass(frozen=True)
class Drawn:
    """A chart of a page."""

    svg: str
    note: str
    legend: list[str]
    x_labels: list[str]
    y_labels: list[str]
    hover: dict[str, Any]
    """What the pointer shows: `x`, `head` of each point, `names`, `texts` and `y` of each line."""


def shown(*folders: Path) -> str:
    """Returns the page about a run, or the one that compares several."""
    path = folders[0].parent / "shown.html"
    assert called("report", *map(str, folders), "--output", str(path)) == f"{path}\n"
    return path.read_text()


def called(*words: str) -> str:
    """Returns what a command that must succeed prints on stdout."""
    return clipship(*words, code=0).out


def state(folder: Path) -> dict[str, Any]:
    """Returns the object of `clipship status --json`."""
    found: dict[str, Any] = json.loads(called("status", str(folder), "--json"))
    return found


def status(folder: Path | str) -> dict[str, str]:
    """Returns the rows of `clipship status`; of rows with one topic, the last."""
    lines = called("status", str(folder)).splitlines()
    return {line[:12].strip(): line[12:] for line in lines}


def written(folder: Path, *lines: dict[str, Any], name: str = "metrics.jsonl") -> Path:
    """Writes lines of metrics.jsonl, or of another such file, into a run folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").touch()
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def tiles(page: str) -> dict[str, tuple[str, str]]:
    """Returns the headline's numbers, each with its note, by their labels."""
    found = re.findall(r"<li><span>(.*?)</span><strong>(.*?)</strong><small>(.*?)</small></li>", page)
    return {label: (value, note) for label, value, note in found}


def table(page: str, name: str = "") -> list[list[str]]:
    """Returns the text of the cells of the rows of the first table of a class, or of what follows a word."""
    part = page.partition(f'<table class="{name}">' if name else "<table>")[2].partition("</table>")[0]
    return [
        [text(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", part, re.DOTALL)
    ]


def text(markup: str) -> str:
    """Returns the text of a piece of a page."""
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", markup).split()))


def charts(page: str) -> dict[str, Drawn]:
    """Returns the page's charts by their titles."""
    found = {}
    for figure in re.findall(r'<figure class="chart.*?</figure>', page, re.DOTALL):
        title, _, note = re.findall(r"<figcaption>(.*?)</figcaption>", figure)[0].partition(" <small>")
        found[html.unescape(title)] = Drawn(
            svg=re.findall(r"<svg[^>]*>(.*?)</svg>", figure, re.DOTALL)[0],
            note=text(note),
            legend=[text(name) for name in re.findall(r"<li>(.*?)</li>", figure)],
            x_labels=re.findall(r'<span class="x"[^>]*>(.*?)</span>', figure),
            y_labels=re.findall(r'<span class="y"[^>]*>(.*?)</span>', figure),
            hover=json.loads(re.findall(r"<script[^>]*>(.*?)</script>", figure, re.DOTALL)[0]),
        )
    return found
