"""A step on one GPU, ours and open_clip_train's in alternating turns: `make bench-gpu`.

It runs both trainers as they are, on one batch in page-locked memory that comes again and
again, so that no image is decoded. A turn is one process; a pair is one turn of each side, one after the
other. Other cases run our side alone, some with changes, some on all GPUs. The last line on stdout is JSON.
Without a GPU nothing is run, and the JSON says so. On a null GPU everything is run, and the times mean
nothing.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.gpu_cases import CASES, OPEN_CLIP, GpuCase, largest_batch
from trainer.config.gpus import gpu_named

SIDES = ("ours", "theirs")
Turn = dict[str, dict[str, Any]]
"""Measurements of each side of a pair."""
NULL = "NULLGPU_LIBRARY"


@click.command(help=__doc__)
@click.option(
    "--cases",
    default=",".join(name for name, case in CASES.items() if case.against == OPEN_CLIP),
    show_default=True,
    help=f"Cases to run, with commas between: {', '.join(CASES)}. Most run our side alone.",
)
@click.option("--pairs", default=5, show_default=True, help="Turns of each side.")
@click.option("--steps", default=50, show_default=True, help="Steps of a turn that count.")
@click.option("--skip", default=15, show_default=True, help="Steps before them.")
@click.option("--batch", type=int, help="Samples of a step, in place of the case's own number.")
def main(cases: str, pairs: int, steps: int, skip: int, batch: int | None) -> None:
    """Run the benchmark."""
    gpu = probe()
    if gpu is None:
        print("torch sees no GPU on this machine: the benchmark of the step was not run")
        print(json.dumps({"benchmark": "gpu", "skipped": "torch sees no GPU"}))
        return
    null = NULL in os.environ
    print(
        f"{gpu['name']}, {gpu['bytes'] / 2**30:.1f} GiB"
        + (": a null GPU, times mean nothing" if null else "")
    )
    results = {}
    for name in cases.split(","):
        case = CASES[name]
        samples = batch or largest_batch(case, int(gpu["bytes"]))
        turns = _turns(name, samples, pairs, steps, skip)
        results[name] = summary(case, samples, turns, str(gpu["name"]))
        print(f"{name:<13}{samples:>5} samples  {_text(results[name])}", flush=True)
    print(json.dumps({"benchmark": "gpu", "gpu": gpu["name"], "times_mean_nothing": null, "cases": results}))


def summary(case: GpuCase, samples: int, turns: Sequence[Turn], gpu: str) -> dict[str, Any]:
    """Returns medians over the pairs, or why there are none.

    Samples and rates are those of one GPU. A side's `host_ms` is the processors' time of its process in a
    step, and `host` ours as a share of theirs. MFU is None for a GPU that the table of `trainer.config.gpus`
    lacks, and for captions that are not whole.
    """
    if skipped := next((side for turn in turns for side in turn.values() if "skipped" in side), None):
        return skipped
    row = gpu_named(gpu)
    peak = row.tflops["bf16"] * 1e12 if row and case.caption_tokens is None else None
    result: dict[str, Any] = {"samples": samples}
    for side in turns[0]:
        rate = statistics.median(samples / turn[side]["step_s"] for turn in turns)
        result[f"{side}_samples_s"] = rate
        result[f"{side}_mfu"] = rate * case.flops / peak if peak else None
        result[f"{side}_peak_gib"] = max(turn[side]["peak_bytes"] for turn in turns) / 2**30
        result[f"{side}_taken_gib"] = max(turn[side]["taken_bytes"] for turn in turns) / 2**30
        result[f"{side}_host_ms"] = 1e3 * statistics.median(turn[side]["cpu_s"] for turn in turns)
        result[f"{side}_first_s"] = turns[0][side]["first_s"]
    if "theirs" in turns[0]:
        result["speed"] = statistics.median(t["theirs"]["step_s"] / t["ours"]["step_s"] for t in turns)
        result["host"] = statistics.median(t["ours"]["cpu_s"] / t["theirs"]["cpu_s"] for t in turns)
    return result


def _text(result: dict[str, Any]) -> str:
    """Returns what is said of a case: its speed beside open_clip_train's, or alone."""
    if "skipped" in result:
        return f"not tried: {result['skipped']}"
    mfu, beside = result["ours_mfu"], "theirs_samples_s" in result
    ours = f"{result['ours_samples_s']:,.0f}"
    peak = f"peak {result['ours_peak_gib']:.1f} of {result['ours_taken_gib']:.1f}"
    if beside:
        ours += f" and {result['theirs_samples_s']:,.0f}"
        peak += f" and {result['theirs_peak_gib']:.1f} of {result['theirs_taken_gib']:.1f}"
    return (
        (f"{result['speed']:.3f} times open_clip_train's speed: " if beside else "")
        + f"{ours} samples/s{f', MFU {mfu:.2f}' if mfu else ''}, {peak} GiB, "
        + f"{result['ours_host_ms']:.1f} ms of a processor"
        + (f" ({result['host']:.2f} of its)" if beside else "")
        + f", first step after {result['ours_first_s']:.0f} s"
    )


def _turns(name: str, samples: int, pairs: int, steps: int, skip: int) -> list[Turn]:
    """Runs the pairs, or our side alone; every second pair begins with the other side."""
    sides = SIDES if CASES[name].against == OPEN_CLIP else SIDES[:1]
    return [
        {side: turn(side, name, samples, steps, skip) for side in (sides, sides[::-1])[number % 2]}
        for number in range(pairs)
    ]


def turn(side: str, name: str, samples: int, steps: int, skip: int) -> dict[str, Any]:
    done = _side(side, name, str(samples), str(steps), str(skip))
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        raise SystemExit(f"{side} failed at {name}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    measured: dict[str, Any] = json.loads(lines[-1])
    return measured


def probe() -> dict[str, Any] | None:
    """Returns the GPU's name and bytes; None if torch sees no GPU."""
    gpu: dict[str, Any] | None = json.loads(_side("probe").stdout.strip().splitlines()[-1])
    return gpu


def _side(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu_side", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
