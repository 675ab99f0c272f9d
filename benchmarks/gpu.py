"""A training step on one GPU: ours and open_clip_train's, in alternating turns of one run.

`make bench-gpu` runs both trainers as they are, on one batch in page-locked memory that comes again and
again, so that no image is decoded. A turn is one process; a pair is one turn of each side, one after the
other. The last line on stdout is JSON. Without a GPU nothing is run, and the JSON says so. On a null GPU
everything is run, and the times mean nothing.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.gpu_cases import CASES, GpuCase, largest_batch
from trainer.config.gpus import gpu_named

SIDES = ("ours", "theirs")
NULL = "NULLGPU_LIBRARY"


@click.command(help=__doc__)
@click.option(
    "--cases", default=",".join(CASES), show_default=True, help="Cases to run, with commas between."
)
@click.option("--pairs", default=5, show_default=True, help="Turns of each side.")
@click.option("--steps", default=50, show_default=True, help="Steps of a turn that count.")
@click.option("--skip", default=15, show_default=True, help="Steps before them.")
@click.option("--batch", type=int, help="Samples of a step, in place of the case's own number.")
def main(cases: str, pairs: int, steps: int, skip: int, batch: int | None) -> None:
    """Run the benchmark."""
    gpu = _probe()
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
        results[name] = summary(case, samples, _turns(name, samples, pairs, steps, skip), str(gpu["name"]))
        print(f"{name:<13}{samples:>5} samples  {_text(results[name])}", flush=True)
    print(json.dumps({"benchmark": "gpu", "gpu": gpu["name"], "times_mean_nothing": null, "cases": results}))


def summary(
    case: GpuCase, samples: int, turns: Sequence[tuple[dict[str, Any], dict[str, Any]]], gpu: str
) -> dict[str, Any]:
    """Returns medians over the pairs; each pair has what ours and theirs measured.

    `host` is the processors' time of our process in a step as a share of theirs. MFU is None for a GPU that
    the table of `trainer.config.gpus` lacks, and for captions that are not whole.
    """
    rates = {
        side: statistics.median(samples / pair[number]["step_s"] for pair in turns)
        for number, side in enumerate(SIDES)
    }
    row = gpu_named(gpu)
    peak = row.tflops["bf16"] * 1e12 if row and case.caption_tokens is None else None
    return {
        "samples": samples,
        "speed": statistics.median(theirs["step_s"] / ours["step_s"] for ours, theirs in turns),
        "host": statistics.median(ours["cpu_s"] / theirs["cpu_s"] for ours, theirs in turns),
        **{f"{side}_samples_s": rate for side, rate in rates.items()},
        **{f"{side}_mfu": rate * case.flops / peak if peak else None for side, rate in rates.items()},
        **{
            f"{side}_peak_gib": max(pair[number]["peak_bytes"] for pair in turns) / 2**30
            for number, side in enumerate(SIDES)
        },
    }


def _text(result: dict[str, Any]) -> str:
    mfu = result["ours_mfu"]
    return (
        f"{result['speed']:.3f} times open_clip_train's speed ({result['ours_samples_s']:,.0f} and "
        f"{result['theirs_samples_s']:,.0f} samples/s{f', MFU {mfu:.2f}' if mfu else ''}), peak "
        f"{result['ours_peak_gib']:.1f} and {result['theirs_peak_gib']:.1f} GiB, "
        f"{result['host']:.2f} of its processor time"
    )


def _turns(
    name: str, samples: int, pairs: int, steps: int, skip: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Runs the pairs; every second one begins with the other side."""
    turns = []
    for number in range(pairs):
        order = SIDES if number % 2 == 0 else SIDES[::-1]
        pair = {side: _turn(side, name, samples, steps, skip) for side in order}
        turns.append((pair["ours"], pair["theirs"]))
    return turns


def _turn(side: str, name: str, samples: int, steps: int, skip: int) -> dict[str, Any]:
    done = _side(side, name, str(samples), str(steps), str(skip))
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        raise SystemExit(f"{side} failed at {name}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    measured: dict[str, Any] = json.loads(lines[-1])
    return measured


def _probe() -> dict[str, Any] | None:
    """Returns the GPU's name and bytes; None if torch sees no GPU."""
    gpu: dict[str, Any] | None = json.loads(_side("probe").stdout.strip().splitlines()[-1])
    return gpu


def _side(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu_side", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
