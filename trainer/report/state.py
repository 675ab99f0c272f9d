"""State of a run as `clipship status --json` prints it. Imports no torch and asks no scheduler."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.report.cost import energy_j, gpu_hours, left_s, samples_per_s, taken_s, total_steps
from trainer.report.folder import RunFacts, has_started, read_run
from trainer.report.liveness import State, inspect
from trainer.report.progress import last_checkpoint
from trainer.report.reading import reading_of
from trainer.telemetry.goodput import account

_ENDS = ("exit_code", "reason", "rank", "node", "time")


def state_of(folder: Path) -> dict[str, Any]:
    """Returns the fields of a run folder; before its first rank has started only `state`.

    Names and units are those of metrics.jsonl; epochs count from 0. What is not known is None.
    """
    if not has_started(folder):
        return {"state": "none"}
    facts = read_run(folder, recent=True)
    liveness = inspect(folder, facts)
    return {
        "state": liveness.state,
        "done": facts.result.get("reason") == "done",
        "last_sign": liveness.last or None,
        **_progress(facts, liveness.state),
        "evaluation": facts.metrics.evaluations[-1] if facts.metrics.evaluations else None,
        "checkpoint": _checkpoint(facts),
        "copies": dict(facts.copies) or None,
        **_costs(facts),
        "reading": reading_of(facts.metrics),
        "restarts": len(facts.restarts),
        "end": {name: facts.exit.get(name) for name in _ENDS} if facts.exit else None,
        "remarks": list(facts.remarks),
    }


def _progress(facts: RunFacts, state: State) -> dict[str, Any]:
    records = facts.metrics.records
    last: Mapping[str, float] = records[-1] if records else {}
    return {
        "step": last.get("step"),
        "steps": total_steps(facts),
        "epoch": last.get("epoch"),
        "loss": last.get("loss"),
        "samples_per_s": samples_per_s(facts),
        "left_s": left_s(facts) if state == "alive" else None,
    }


def _checkpoint(facts: RunFacts) -> dict[str, Any] | None:
    last = last_checkpoint(facts)
    return {"step": last[0], "path": str(last[1])} if last else None


def _costs(facts: RunFacts) -> dict[str, Any]:
    times = account(facts.times)
    return {
        "taken_s": taken_s(facts),
        "gpu_hours": gpu_hours(facts),
        "energy_j": energy_j(facts),
        "useful_share": times.useful_share,
        "lost_s": dict(times.lost_s),
    }
