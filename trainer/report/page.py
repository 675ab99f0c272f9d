"""Makes one HTML page about a run, which loads nothing from elsewhere. No torch.

The template escapes everything from the run folder, and the page's own policy lets the browser run only the
one script that it has. The environment of all ranks is one table, however many they are, which marks what
differs.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trainer.errors import InputError
from trainer.report.figures import evaluation_charts, training_charts
from trainer.report.folder import Numbers, RunFacts, clean, read_run
from trainer.report.headline import checkpoint_rows, metric_rows, not_finite, status, tiles
from trainer.report.suites import listed
from trainer.report.template import page_templates
from trainer.report.times import marked, restart_rows, restart_steps, time_charts
from trainer.report.wording import ranks
from trainer.run.layout import REPORT_FILE
from trainer.safe_io.atomic import write_whole
from trainer.text.wording import many

_RANKS = 64
_KEYS = ("rank", "node", "state", "phase", "step", "phase_s", "collectives", "collective", "stack")


def write_report(run_folder: Path, output: Path | None = None, reload_s: float | None = None) -> Path:
    """Replaces the page, whole or not at all; returns its path (RUN/report.html).

    With `reload_s`, a browser loads it again every so many seconds. Raises InputError if the run cannot be
    read or the page cannot be written.
    """
    return write_page(output or run_folder / REPORT_FILE, page(read_run(run_folder), reload_s))


def write_page(path: Path, text: str) -> Path:
    """Replaces a page, whole or not at all; returns its path. Raises InputError if it cannot be written."""
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "Is a folder")
        write_whole(path, text)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written: {error.strerror}; choose another file with --output FILE"
        ) from None
    return path


def render(template: str, reload_s: float | None, **facts: Any) -> str:
    """Returns the text of a page from its template, which also gets the style and the script.

    With `reload_s`, a browser loads the page again every so many seconds.
    """
    script = _source("page.js") + (_source("reload.js") if reload_s else "")
    environment = page_templates("trainer.report")
    environment.filters |= {"clean": lambda value: clean(str(value)), "json_in_script": _json_in_script}
    text = environment.get_template(template).render(
        reload_s=reload_s,
        style=_source("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **facts,
    )
    return text.encode(errors="replace").decode()  # half of a surrogate pair, as JSON may hold, is no text


def page(facts: RunFacts, reload_s: float | None = None) -> str:
    """Returns the page's text, the same for the same facts."""
    metrics, began_again = facts.metrics, restart_steps(facts.times)
    stages = restart_steps(facts.times, stages=True)
    marks = sorted({*began_again, *stages})
    return render(
        "page.html.j2",
        reload_s,
        name=str(facts.job.get("name") or facts.folder.resolve().name),
        subtitle=_subtitle(facts),
        status=status(facts),
        not_finite=not_finite(metrics.records),
        tiles=tiles(facts),
        training=marked(training_charts(metrics.records), _last_step(metrics.records), marks),
        evaluation=marked(evaluation_charts(metrics.evaluations), _last_step(metrics.evaluations), marks),
        began_again=began_again,
        stages=stages,
        times=time_charts(facts.times),
        restarts=restart_rows(facts),
        metrics=metric_rows(metrics.evaluations),
        checkpoints=checkpoint_rows(metrics.checkpoints),
        details=facts.exit.get("details"),
        stuck=_stuck_ranks(facts.diagnosis),
        environment=environment_table(facts.environment),
        facts=facts,
    )


def _last_step(events: Sequence[Numbers]) -> float:
    return events[-1]["step"] if events else 1


def _subtitle(facts: RunFacts) -> str:
    """Returns model, precision, loss, global batch and world in one line."""
    model, optim = (
        section if isinstance(section := facts.job.get(name), dict) else {} for name in ("model", "optim")
    )
    ranks = len(facts.environment)
    nodes = len({environment.get("node") for environment in facts.environment})
    parts = [
        Path(str(model.get("name", ""))).name,
        str(model.get("precision", "")),
        f"{optim['loss']} loss" if "loss" in optim else "",
        f"global batch {optim['global_batch_size']}" if "global_batch_size" in optim else "",
        f"{many(ranks, 'rank')} on {many(nodes, 'node')}" if ranks else "",
        facts.environment[0].get("backend", "") if ranks else "",
    ]
    return " · ".join(part for part in parts if part)


def _json_in_script(text: str) -> Markup:
    """Returns JSON that a script element can hold: none of its characters can end the element."""
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _stuck_ranks(diagnosis: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what each rank did when a limit passed, the late ones first; `late` marks them."""
    late = listed(diagnosis, "late")
    known = [rank for rank in listed(diagnosis, "ranks") if isinstance(rank, dict)]
    rows = [{key: rank.get(key, "") for key in _KEYS} | {"late": rank.get("rank") in late} for rank in known]
    return sorted(rows, key=lambda row: not row["late"])[:_RANKS]


def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


_OWN = {"node", "device"}
"""Keys that each rank may have with a value of its own."""
_VALUES = 12


@dataclass(frozen=True)
class Fact:
    """One row of the table."""

    name: str
    values: Sequence[tuple[str, str]]
    """Value and the ranks that have it; no ranks are named if all have it."""
    differs: bool
    """True if ranks differ that should be equal."""


def environment_table(environments: Sequence[Mapping[str, str]]) -> list[Fact]:
    """Returns a row for each key but the rank's own number; a rank that lacks a key has "missing"."""
    names = dict.fromkeys(name for environment in environments for name in environment if name != "rank")
    return [_fact(name, environments) for name in names]


def _fact(name: str, environments: Sequence[Mapping[str, str]]) -> Fact:
    ranks_of: dict[str, list[int]] = {}
    for place, environment in enumerate(environments):
        rank = environment.get("rank", "")
        ranks_of.setdefault(environment.get(name, "missing"), []).append(
            int(rank) if rank.isdecimal() else place
        )
    if len(ranks_of) == 1:
        return Fact(name, [(next(iter(ranks_of)), "")], differs=False)
    values = [(value, ranks(those)) for value, those in list(ranks_of.items())[:_VALUES]]
    if len(ranks_of) > _VALUES:
        values.append((f"and {len(ranks_of) - _VALUES} more", ""))
    return Fact(name, values, differs=name not in _OWN)
