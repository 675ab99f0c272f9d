"""Decides whether a run without an exit record still lives; if not, since when, why, and how to resume it.

There are two sources. The kernel releases the lock of the run folder when rank 0's process ends, in whatever
way: on the node where it ran, that is certain. On another node, which the lock may not reach, only the age of
the files that a living run keeps writing is known. Imports no torch and asks no scheduler.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config.phases import LIMIT_KEYS, NOTHING_DONE, SILENT
from trainer.report.folder import RunFacts, last_lines, read_job
from trainer.run.checkpoints import newest_whole, saved_step
from trainer.run.layout import (
    CHECKPOINTS,
    ENVIRONMENT_FILE,
    EXIT_FILE,
    JOB_FILE,
    LOCK,
    METRICS_FILE,
    RANK_STATS_FILE,
    rank_logs,
)
from trainer.run.lock import Holder, is_held
from trainer.run.start_job import ranks_before
from trainer.safe_io.plain import MOST_BYTES, last_text
from trainer.text.paste import word
from trainer.text.wording import duration, many

State = Literal["ended", "alive", "starting", "quiet", "dead"]

_WRITTEN = (METRICS_FILE, RANK_STATS_FILE, JOB_FILE, ENVIRONMENT_FILE, "logs/rank-*.log", "checkpoints/*")
"""Files that a living run keeps writing, as patterns below the run folder."""
_USUAL_PAUSES = 5
"""Factor over the usual pause between two records, beyond which a silent run counts as quiet."""
_LEAST_QUIET_S = 60.0
_RESTART_S = 10.0
"""Seconds after a run's last sign in which its supervisors may be about to restart its ranks."""
_DEFAULT_LIMIT_S = 1800.0
_DMESG_S = 3.0
_KILLED = re.compile(r"[Oo]ut of memory.*?[Kk]illed process (\d+) \(([^)]*)\)")
_START = re.compile(r"start of rank (\d+) of (\d+) on (\S+), process (\d+), by (\S+)")
_COMPLAINTS = (" ERROR ", " CRITICAL ", "Error", "Traceback")
_LOGS = 64
"""Largest number of logs that are searched for last lines; a run may have thousands."""
_SHOWN = 300
"""Characters that are shown of a last line."""


@dataclass(frozen=True)
class Liveness:
    """State of a run, as its folder shows it."""

    state: State
    """quiet: silent for longer than usual, for no known reason. dead: its processes are gone and left no
    record."""
    last: float
    """Time when the run last wrote anything, in seconds since the epoch; 0 if it never did."""
    holder: Holder
    certain: bool
    """True if the state is known from the processes, False if only from the age of files."""


def inspect(folder: Path, facts: RunFacts, now: float | None = None, node: str | None = None) -> Liveness:
    """Returns the run's state from the lock and the times of its files.

    `now` and `node` default to this moment and this machine.
    """
    now, node = time.time() if now is None else now, node or os.uname().nodename
    held, holder = is_held(folder)
    last = _last_written(folder)
    certain = held is False and holder.node == node
    return Liveness(
        _state(facts, held, certain, last, _time(folder / LOCK), now), last, holder, certain or bool(held)
    )


def _state(facts: RunFacts, held: bool | None, certain: bool, last: float, begun: float, now: float) -> State:
    if facts.result.get("reason") == "done" or facts.exit:
        return "ended"
    if not held and begun > last and abs(now - begun) < _limit(facts, ["init_s"]):
        return "starting"  # a new start's supervisor touches the lock before rank 0 takes it
    if certain and last:
        return "starting" if _may_restart(facts.job) and abs(now - last) < _RESTART_S else "dead"
    silent = now - max(last, begun)
    if not held and silent > _limit(facts, [LIMIT_KEYS[phase] for phase in SILENT]):
        return "dead"
    return "quiet" if silent > _usual(facts) else "alive"


def _may_restart(job: Mapping[str, Any]) -> bool:
    """Returns whether the job's `[recovery]` allows a restart of the ranks, between which no rank lives."""
    recovery = job.get("recovery")
    return bool(isinstance(recovery, dict) and recovery.get("max_restarts"))


def _limit(facts: RunFacts, keys: Sequence[str]) -> float:
    limits: Mapping[str, Any] = facts.job.get("timeouts", {})
    values = [limits.get(key) for key in keys]
    return sum(float(value) if isinstance(value, int | float) else _DEFAULT_LIMIT_S for value in values)


def _usual(facts: RunFacts) -> float:
    """Returns the seconds of silence that are normal for the run."""
    records = facts.metrics.records
    if len(records) < 2:
        return _limit(facts, [LIMIT_KEYS[phase] for phase in NOTHING_DONE])
    steps = records[-1]["step"] - records[-2]["step"]
    pause = steps * max(record.get("step_s", 0.0) for record in records[-2:])
    return max(_LEAST_QUIET_S, _USUAL_PAUSES * pause)


def is_dead(folder: Path) -> bool:
    """Returns whether the run's processes are certainly gone and left no record.

    It is cheap enough to be called repeatedly; see `inspect`.
    """
    held, holder = is_held(folder)
    if held is not False or holder.node != os.uname().nodename or (folder / EXIT_FILE).exists():
        return False
    last = _last_written(folder)
    return 0.0 < last >= _time(folder / LOCK) and not (
        abs(time.time() - last) < _RESTART_S and _may_restart(read_job(folder))
    )


def rows(facts: RunFacts, liveness: Liveness, job: str, to: str | None) -> Iterator[tuple[str, str]]:
    """Yields topic and text about a run that is dead, quiet, starting, or has ended without being done.

    `job` is the job file as the user calls it, `to` the scheduler that the run was submitted to.
    """
    ago = duration(max(0.0, time.time() - liveness.last))
    when = time.strftime("%F %T", time.localtime(liveness.last))
    if liveness.state == "dead":
        holder = liveness.holder
        if liveness.certain and (other := _locked_by(holder.process)):
            who, why = f"process {holder.process} on {holder.node} writes to {other}: this is a copy", ""
        elif liveness.certain:
            who = f"its process {holder.process} on {holder.node} is gone"
            why = killed_for_memory(facts.folder, kernel_log())
        else:
            who, why = _remote_silence(liveness), _unknown(liveness)
        yield "dead", f"since {when}, {ago} ago: {who}, and no rank recorded why it ended"
        if why:
            yield "why", why
        yield from _last_line(facts.folder)
    elif liveness.state == "quiet":
        holder = liveness.holder
        where = f"; process {holder.process} on {holder.node} holds the run folder" if holder.node else ""
        text = f"the run has written nothing for {ago}, longer than usual{where}"
        yield "quiet", f"{text}: see `clipship logs`, and check that its nodes are up"
    elif liveness.state == "starting":
        yield "state", "starting: no rank has opened the run folder yet"
    if liveness.state == "dead" or (liveness.state == "ended" and facts.result.get("reason") != "done"):
        yield "resume", resume_hint(facts, job, to)


def _remote_silence(liveness: Liveness) -> str:
    where = (
        f"process {liveness.holder.process} on {liveness.holder.node}, another machine,"
        if liveness.holder.node
        else "the run"
    )
    return f"{where} has written nothing since, for longer than [timeouts] allows"


def _unknown(liveness: Liveness) -> str:
    where = f" on {liveness.holder.node}" if liveness.holder.node else ""
    return f"not known here: `dmesg`{where} says whether memory ran out, unless the node itself is lost"


def killed_for_memory(folder: Path, kernel: str | None) -> str:
    """Returns a sentence that says whether the kernel killed a rank because memory ran out.

    `kernel` is the kernel's log, None if this user may not read it.
    """
    if kernel is None:
        return (
            "not known: only root may read the kernel's log here; `sudo dmesg | grep -i 'killed process'` "
            "says whether memory ran out"
        )
    ranks = {process: rank for rank, process in _processes(folder)}
    for process, name in reversed(_KILLED.findall(kernel)):
        if int(process) in ranks:
            return (
                f"memory ran out: the kernel killed rank {ranks[int(process)]}, process {process} "
                f"({name}), and all others ended with it"
            )
    other = _KILLED.findall(kernel)
    more = f"; it names process {other[-1][0]} ({other[-1][1]}), for which memory ran out" if other else ""
    return (
        "something killed it with SIGKILL, or its machine stopped: the kernel's log names no rank for which "
        f"memory ran out{more}"
    )


def kernel_log() -> str | None:
    """Returns the kernel's log; None if there is none or this user may not read it."""
    try:
        answer = subprocess.run(
            ["dmesg"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_DMESG_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.decode(errors="replace") if answer.returncode == 0 else None


def _processes(folder: Path) -> Iterator[tuple[int, int]]:
    """Yields rank and process of each rank's last start, from its log."""
    for _, log in rank_logs(folder)[:_LOGS]:
        with suppress(OSError):
            if begins := _START.findall(last_text(log, MOST_BYTES)):
                yield int(begins[-1][0]), int(begins[-1][3])


def _locked_by(process: int) -> Path | None:
    """Returns the run folder that a process of this machine holds, by its open files."""
    with suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            if (path := link.readlink()).name == LOCK:
                return path.parent
    return None


def _last_line(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the last line of the newest log that ends with an error, else of the newest log."""
    logs = sorted(rank_logs(folder), key=lambda each: _time(each[1]), reverse=True)[:_LOGS]
    ends = [
        (rank, lines) for rank, log in logs if (lines := [line for line in last_lines(log) if line.strip()])
    ]
    complaining = [(rank, lines) for rank, lines in ends if any(text in lines[-1] for text in _COMPLAINTS)]
    for rank, lines in (complaining or ends)[:1]:
        yield "last line", f"[{rank}] {lines[-1][:_SHOWN]}"


def resume_hint(facts: RunFacts, job: str, to: str | None) -> str:
    """Returns the command that starts the run again, and the step at which it then begins."""
    if saved := newest_whole(facts.folder / CHECKPOINTS):
        where = f"it resumes at step {saved[0]}"
    elif removed := saved_step(facts.folder / METRICS_FILE):
        where = f"first put its checkpoints back: that of step {removed} was saved, and none is there"
    else:
        where = "no checkpoint was saved: it starts from the beginning"
    name, own = facts.job.get("name"), facts.folder.resolve().name
    if name not in (own, None):
        where = f"first rename the folder to {word(str(name))}, which the run is called; then {where}"
    resumes = f"`clipship resume {word(facts.folder)}"
    has_job = (facts.folder / JOB_FILE).is_file()
    nodes = {rank.get("node") for rank in facts.environment}
    ranks = f"{many(len(facts.environment), 'rank')} on {many(len(nodes), 'node')}"
    if to:
        command = f"{resumes}`" if has_job else f"`clipship submit {word(job)} --to {to}`"
        command += ", unless its scheduler starts it again by itself"
    elif any(ranks_before(facts.folder, facts.environment)):
        command = f"{resumes}`"
    elif facts.environment:
        command = f"start its {ranks} again, as before"
    elif has_job:
        command = f"{resumes} --nproc 1`, with your number of ranks"
    else:
        command = "start it again, as before"
    return f"{command}; {where}"


def _last_written(folder: Path) -> float:
    return max((_time(path) for pattern in _WRITTEN for path in folder.glob(pattern)), default=0.0)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
