"""`make simulate SEEDS=10000`: plays schedules of faults; the last line is JSON."""

import json
import os
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import click

from tests.simulated.schedule import Fault, Outcome, run_schedule
from tests.simulated.world import Plan
from trainer.supervise.coordinate.states import TABLE


def shrunk(outcome: Outcome) -> list[Fault]:
    """Returns those of its faults without which no invariant that it breaks is broken, left out in turn."""
    faults = outcome.faults
    broken = {invariant for invariant, _ in outcome.problems}
    for fault in list(faults):
        fewer = [each for each in faults if each is not fault]
        if broken & {invariant for invariant, _ in run_schedule(outcome.seed, fewer).problems}:
            faults = fewer
    return faults


def show(outcome: Outcome, *, lines: bool) -> None:
    """Shows a broken schedule, and the command that plays it again."""
    print(f"seed {outcome.seed}: {outcome.plan}")
    for invariant, what in outcome.problems[:3]:
        print(f"  {invariant}: {what}")
    for fault in shrunk(outcome) if outcome.problems else outcome.faults:
        print(f"  {fault}")
    for at_s, node, line in outcome.lines if lines else ():
        print(f"  {at_s:9.2f} {node:4} {line}")
    print(f"  again: make simulate SEED={outcome.seed}", flush=True)


def play_large(seed: int, members: int) -> None:
    """Plays a seed's faults in a job with eight supervisors on each node, and exits."""
    outcome = run_schedule(seed, plan=Plan(members // 8, 8, 0, "keeps", "torch", steps=40, min_nodes=1))
    print(*outcome.faults, sep="\n")
    messages, sent = outcome.sent
    summary = {
        "members": members,
        "problems": outcome.problems[:3],
        "simulated_s": round(outcome.simulated_s, 1),
        "processor_s": round(time.process_time(), 1),
        "recovered_s": outcome.recovered_s,
        "messages_per_member": round(messages / members, 1),
        "bytes_per_member": round(sent / members),
    }
    print(json.dumps(summary))
    sys.exit(bool(outcome.problems))


@click.command(help=__doc__)
@click.option("--seeds", default=500, show_default=True, help="Number of schedules.")
@click.option("--first", default=0, show_default=True, help="First seed.")
@click.option("--seed", type=int, help="Play this one alone, and show what was said in it.")
@click.option("--members", type=int, help="Play one schedule, with so many supervisors.")
@click.option("--processes", default=os.cpu_count(), show_default=True)
def main(seeds: int, first: int, seed: int | None, members: int | None, processes: int) -> None:
    """Play schedules; exit with 1 if an invariant was broken."""
    if members is not None:
        play_large(seed or 0, members)
    if seed is not None:
        outcome = run_schedule(seed)
        show(outcome, lines=True)
        sys.exit(bool(outcome.problems))
    began, broken = time.monotonic(), 0
    kinds, transitions, recovered = Counter[str](), set[tuple[str, str]](), list[float]()
    with ProcessPoolExecutor(processes) as pool:
        for outcome in pool.map(run_schedule, range(first, first + seeds), chunksize=4):
            kinds.update(fault.kind for fault in outcome.faults)
            transitions |= outcome.transitions
            recovered += outcome.recovered_s
            if outcome.problems:
                broken += 1
                if broken <= 10:
                    show(outcome, lines=False)
    every = {(state.name, event.name) for state, row in TABLE.items() for event in row.leads_to}
    took_s = time.monotonic() - began
    summary = {
        "schedules": seeds,
        "schedules_per_second": round(seeds / took_s, 1),
        "broken": broken,
        "faults": dict(sorted(kinds.items())),
        "transitions": len(transitions & every),
        "transitions_missed": sorted(" ".join(each) for each in every - transitions),
        "recovery_median_s": round(statistics.median(recovered), 1) if recovered else None,
        "recovery_most_s": max(recovered, default=None),
    }
    print(json.dumps(summary))
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
