"""The check that `make gpu-kit` takes to a GPU machine runs here on a null GPU, all but the times."""

import subprocess
import sys
from pathlib import Path


def test_parts_run_and_their_ends_stand_in_the_summary(tmp_path: Path) -> None:
    arguments = ["--only", "machine,profile-B-32", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "summary.md").read_text()
    assert "## machine: exit code 0" in summary
    assert "## profile-B-32: exit code 0" in summary
    assert "TFLOP/s" in summary
    assert (tmp_path / "trace-B-32.json.gz").is_file()
