"""Both sides of `make bench-gpu` run from their main functions to the end of a turn. Times mean nothing."""

import json
import subprocess
import sys

import pytest


@pytest.mark.full
@pytest.mark.parametrize(
    ("cases", "samples", "share"), [("B-32,SigLIP-B-16", 16, 1.05), ("B-32-accumulated", 1024, 1.0)]
)
def test_both_sides_run_on_a_null_gpu(cases: str, samples: int, share: float) -> None:
    """Our peak is at most a share of open_clip_train's."""
    options = ["--cases", cases, "--pairs", "1", "--steps", "3", "--skip", "3", "--batch", str(samples)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["times_mean_nothing"] is True
    for case in result["cases"].values():
        assert case["ours_mfu"] is None
        assert 2 < case["ours_peak_gib"] < share * case["theirs_peak_gib"]
