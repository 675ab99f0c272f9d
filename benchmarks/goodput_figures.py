"""Figures of `benchmarks.goodput`, from what was seen of a run and from what it recorded itself."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.goodput_sides import BATCH, PER_NODE, Ours
from benchmarks.goodput_story import Moment, Story

NODES = 2
_CLOCKS_S = 0.05
"""Largest difference between the times of a fault here and in the run's own record of it."""


def figures(side: Ours, story: Story, whole: Ours, without: Story) -> dict[str, Any]:
    """Returns the figures of our run with faults; `whole` is the run without any."""
    result, lost_twice = side.result(), samples(side, whole)
    share, recorded_s = result.get("useful_share"), result.get("seconds", 0.0)
    full = whole.result()["useful_share"]
    return {
        "steps": side.steps,
        "faults": list(rows(story, side.restarts())),
        "seconds_per_fault": round(story.seconds / max(1, len(story.moments)), 1),
        "useful_share": share,
        "useful_share_without_faults": full,
        "useful_share_ratio": None if share is None else round(share / full, 4),
        "lost_s": result.get("lost_s"),
        "lost_s_without_faults": whole.result()["lost_s"],
        "unrecorded_share": round(abs(1 - recorded_s / story.seconds), 4),
        "recovery_s_median_rank": median_s(story, of_node=False),
        "recovery_s_median_node": median_s(story, of_node=True),
        "steps_redone_max": max(story.redone, default=0),
        "bit_equal": story.done and bit_equal(side, whole),
        "samples_lost": lost_twice[0],
        "samples_twice": lost_twice[1],
        "not_made": len(story.not_made),
        "ended_run": sum(moment.ended_run for moment in story.moments),
        "step_s": round(step_s(side), 4),
        "step_s_without_faults": round(step_s(whole), 4),
        "seconds": round(story.seconds, 1),
        "seconds_without_faults": round(without.seconds, 1),
        "done": story.done,
    }


def rows(story: Story, restarts: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Yields a row for each fault; `restarts` are those that the run recorded, in their order."""
    left = list(restarts)
    for moment in story.moments:
        took_s, row = story.recovery_s(moment), {"kind": moment.kind, "at_s": round(moment.at_s, 1)}
        yield {
            **row,
            "recovery_s": None if took_s is None else round(took_s, 1),
            "ended_run": moment.ended_run,
            **_recorded(moment, story.began, left),
        }


def _recorded(moment: Moment, began: float, left: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the run recorded about a fault; takes it, and all before it, out of `left`."""
    at = began + moment.at_s - _CLOCKS_S
    while left and (left[0]["time"] < at or left[0].get("kind") == "taken in"):
        left.pop(0)
    if not left:
        return {}
    restart = left.pop(0)
    parts = restart.get("parts") or {}
    return {"detected_s": round(max(0.0, restart["time"] - at - _CLOCKS_S), 2), "parts": parts}


def median_s(story: Story, *, of_node: bool) -> float | None:
    """Returns the median of the recoveries; None without any, or if the run never recovered."""
    took = [story.recovery_s(moment) for moment in story.moments if moment.of_node == of_node]
    known = [seconds for seconds in took if seconds is not None]
    return round(statistics.median(known), 1) if known and len(known) == len(took) else None


def step_s(side: Ours) -> float:
    """Returns the median seconds of a step, without the first ones."""
    return statistics.median(record["step_s"] for record in side.records()[2:])


def samples(side: Ours, whole: Ours) -> tuple[int, int]:
    """Returns how many samples of the order were lost, and how many counted twice.

    A step takes the positions of the order that its record ends at. One whose loss differs from that of the
    run without faults had other samples than those of its positions.
    """
    times: dict[int, int] = {}
    true_loss = {record["step"]: record["loss"] for record in whole.records()}
    for record in side.records():
        if record["loss"] == true_loss.get(record["step"]):
            last = int(record["samples"])
            times[last] = times.get(last, 0) + 1
    due = [step * BATCH for step in range(1, side.steps + 1)]
    lost = sum(times.get(last, 0) == 0 for last in due) * BATCH
    twice = sum(count - 1 for count in times.values()) * BATCH
    return lost, twice


def bit_equal(one: Ours, other: Ours) -> bool:
    """Returns whether the final weights of two runs are equal, bit for bit."""
    import torch

    mine, its = one.weights(), other.weights()
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


def difference(one: Ours, other: Ours) -> float:
    """Returns the largest relative difference of a final weight tensor between two runs, by norm."""
    mine, its = one.weights(), other.weights()
    return float(max((mine[name] - its[name]).norm() / its[name].norm() for name in its if its[name].norm()))


def steps_on_fewer(side: Ours) -> int:
    """Returns how many steps of a run were done on fewer ranks than it began with."""
    ranks = {restart["generation"]: restart["ranks"] for restart in side.restarts()}
    few = {generation for generation, count in ranks.items() if count < NODES * PER_NODE}
    return sum(record["generation"] in few for record in side.records())
