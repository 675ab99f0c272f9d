"""Finds which ranks were late from what each did when a limit passed, and writes the text for people.

All functions are pure. No torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.supervise.rank.rank_report import RankReport
from trainer.text.paste import word

_STOPPED = ("stopped by a signal", "stopped by a debugger", "ended", "gone")
_NAMED = 8
_STACK_LINES = 14
_LIMIT = re.compile(r"longer than .*?(timeouts\.\w+)")


def cut_off(other: str) -> str:
    """Returns the reason that a supervisor gives when it reaches no other supervisor."""
    return f"its node has lost the network: it can no longer reach {other}"


@dataclass(frozen=True)
class Missing:
    """A rank that sent no report; `node` is "" if it never joined."""

    rank: int
    node: str


@dataclass(frozen=True)
class Diagnosis:
    """State of all ranks when a limit passed."""

    what: str
    """Text that names the limit and the rank that noticed."""
    reports: Sequence[RankReport]
    missing: Sequence[Missing]

    @property
    def late(self) -> list[RankReport]:
        """Ranks that reported and that the others waited for; see `late_ranks`."""
        return (
            late_ranks(self.reports)
            if not self.missing
            else [report for report in self.reports if report.state in _STOPPED]
        )

    def late_or_missing(self) -> list[tuple[int, str]]:
        """Returns rank and node of each missing or late rank."""
        return [(missing.rank, missing.node) for missing in self.missing] + [
            (report.rank, report.node) for report in self.late
        ]

    def to_json(self, exit_code: int, stacks: Mapping[int, str]) -> dict[str, Any]:
        """Returns the contents of diagnosis.json; `stacks` holds Python stacks by rank."""
        return {
            "exit_code": exit_code,
            "what": self.what,
            "late": [rank for rank, _ in self.late_or_missing()],
            "missing": [missing.rank for missing in self.missing],
            "ranks": [{**report.to_json(), "stack": stacks.get(report.rank, "")} for report in self.reports],
        }


def late_ranks(reports: Sequence[RankReport]) -> list[RankReport]:
    """Returns the ranks that the others waited for.

    These are the stopped ranks if there are any; else those that have begun fewer collectives than others;
    else those that wait in no collective; else all.
    """
    stopped = [report for report in reports if report.state in _STOPPED]
    if stopped:
        return stopped
    fewest = min((report.collectives for report in reports), default=0)
    behind = [report for report in reports if report.collectives == fewest]
    if len(behind) < len(reports):
        return behind
    return [report for report in reports if not report.waiting] or behind


def text(diagnosis: Diagnosis, stacks: Mapping[int, str], file: str) -> str:
    """Returns the text that is printed last: the late ranks, what they did, and one rank that waited.

    It ends with the limit, since stacks may have pushed the headline off the screen, and with how to go on.
    """
    lines = [_missing(missing) for missing in diagnosis.missing[:_NAMED]]
    late = diagnosis.late
    for report in late[:_NAMED]:
        lines += [f"  late: {_describe(report)}", *_indented(stacks.get(report.rank, ""))]
    if max(len(late), len(diagnosis.missing)) > _NAMED:
        lines.append(f"  ... {len(late) + len(diagnosis.missing)} in all")
    numbers = {report.rank for report in late}
    others = [report for report in diagnosis.reports if report.rank not in numbers]
    if others:
        lines.append(
            f"  not late: {_describe(others[0])}"
            + (f", and {len(others) - 1} more" if len(others) > 1 else "")
        )
    if file:
        lines.append(f"  state of every rank: {file}")
    if key := _LIMIT.search(diagnosis.what):
        run = word(Path(file).parent) if file else "RUN"
        lines.append(f"  {diagnosis.what}")
        lines.append(f"  if it needs longer: clipship resume {run} --set {key[1]}=SECONDS")
    return "\n".join(lines)


def _missing(missing: Missing) -> str:
    if not missing.node:
        unreachable = (
            "no other rank can reach its node" if missing.rank == 0 else "it cannot reach rank 0's node"
        )
        return f"  late: rank {missing.rank}, which never joined: it was not started, or {unreachable}"
    return (
        f"  late: rank {missing.rank} on {missing.node}: its supervisor does not answer; "
        "the node has failed, is frozen or has lost the network"
    )


def _describe(report: RankReport) -> str:
    """Returns a line like `rank 1 on n2 (process 77, sleeping), 12 s in step, step 7; no collective yet`."""
    where = (
        f"{report.phase}" if report.phase in ("init", "shutdown") else f"{report.phase}, step {report.step}"
    )
    kernel = f" in {report.kernel}" if report.kernel else ""
    last = "no collective yet"
    if report.collectives:
        state = "waits in" if report.waiting else "has passed"
        last = f"{state} collective {report.collectives} ({report.collective})"
    return (
        f"rank {report.rank} on {report.node} (process {report.pid}, {report.state}{kernel}), "
        f"{report.phase_s:.0f} s in {where}; {last}"
    )


def _indented(stack: str) -> list[str]:
    """Returns the first lines of the main thread's stack, indented.

    faulthandler's text has the main thread last, with its innermost frame first.
    """
    threads = [
        part for part in stack.replace("Current thread", "\nCurrent thread").split("\n\n") if part.strip()
    ]
    lines = [line for line in (threads[-1] if threads else "").splitlines() if line.strip()]
    return [f"        {line.strip()}" for line in lines[:_STACK_LINES]]
