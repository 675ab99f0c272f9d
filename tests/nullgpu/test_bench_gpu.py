"""Both sides of `make bench-gpu` run from their main functions to the end of a turn. Times mean nothing."""

import json
import subprocess
import sys

import pytest


@pytest.mark.full
def test_both_sides_run_on_a_null_gpu() -> None:
    options = ["--cases", "B-32,SigLIP-B-16", "--pairs", "1", "--steps", "3", "--skip", "3", "--batch", "16"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["times_mean_nothing"] is True
    for case in result["cases"].values():
        assert case["ours_mfu"] is None
        assert 2 < case["ours_peak_gib"] < 1.05 * case["theirs_peak_gib"]
