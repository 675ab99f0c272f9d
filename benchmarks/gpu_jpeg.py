"""Can the GPU decode the JPEGs of its own step? `python -m benchmarks.gpu_jpeg`. The last line is JSON.

A process on two cores decodes photographs by torchvision's `decode_jpeg(device="cuda")` and resizes them to
the model's size: alone, then beside steps of ViT-B-32, which are timed with it and without. `decode SECONDS`
is that process: after each batch it prints the time and the samples so far.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.data import photographs
from benchmarks.gpu import NULL, probe, turn
from benchmarks.gpu_cases import CASES, largest_batch

CASE, STEPS, SKIP = "B-32", 80, 10
PICTURES, BATCH, CORES = 512, 64, 2
ALONE_S, STARTS_S, LONGEST_S = 10.0, 60.0, 600.0


def decode(seconds: float) -> None:
    """Decodes batches for so long."""
    from torchvision.io import decode_jpeg

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-CORES:])
    files = [parts["jpg"] for _, parts in photographs(512, 384, PICTURES)]
    tensors = [torch.from_numpy(np.frombuffer(file, np.uint8).copy()) for file in files]
    done, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        batch = [tensors[(done + number) % PICTURES] for number in range(BATCH)]
        images = torch.stack(decode_jpeg(batch, device="cuda"))
        F.interpolate(images.half(), (224, 224), mode="bilinear", antialias=True).to(torch.uint8)
        torch.cuda.synchronize()
        done += BATCH
        print(time.monotonic(), done, flush=True)


def started(seconds: float, log: IO[str]) -> "subprocess.Popen[str]":
    """Starts to decode, and returns behind the first batch; exits with what is skipped if none comes."""
    command = [sys.executable, "-m", "benchmarks.gpu_jpeg", "decode", str(seconds)]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + STARTS_S
    while os.fstat(log.fileno()).st_size == 0:
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            said = (process.communicate()[1].strip().splitlines() or ["nothing"])[-1]
            where = "a null GPU has no nvJPEG" if NULL in os.environ else "nothing was decoded"
            print(json.dumps({"skipped": f"{where}: exit code {process.returncode}, {said}"}))
            raise SystemExit(0)
        time.sleep(0.05)
    return process


def rate(log: IO[str], since: float, until: float) -> float:
    """Returns the samples a second that were decoded between two times."""
    log.seek(0)
    points = [tuple(map(float, line.split())) for line in log]
    inside = [point for point in points if since <= point[0] <= until]
    if len(inside) < 2:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def main() -> None:
    """Measure."""
    with tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        started(ALONE_S, log).wait()
        alone = rate(log, began, time.monotonic())
    gpu = probe()
    assert gpu is not None
    samples = largest_batch(CASES[CASE], int(gpu["bytes"]))
    words = ("ours", CASE, samples, STEPS, SKIP)
    step_s = turn(*words)["step_s"]
    with tempfile.TemporaryFile("w+") as log:
        process = started(LONGEST_S, log)
        beside_s, end = turn(*words)["step_s"], time.monotonic()
        process.kill()
        process.wait()
        beside = rate(log, end - STEPS * beside_s, end)
    found: dict[str, Any] = {
        "decoded_samples_s": round(alone),
        "decoded_beside_samples_s": round(beside),
        "step_samples_s": round(samples / step_s),
        "step_slower": round(beside_s / step_s, 3),
    }
    print(
        f"{alone:,.0f} samples/s decoded alone, {beside:,.0f} beside a step that takes "
        f"{found['step_slower']} times as long; it trains {samples / beside_s:,.0f} then"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else decode(float(sys.argv[2]))
