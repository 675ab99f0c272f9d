"""A real run whose job holds secrets.

They are in the run's own job file, which only its owner can read, and nowhere else.
"""

import stat
from pathlib import Path

from tests.support.runs import tiny_run


def test_of_a_run_only_its_job_file_holds_secrets(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        optim={"steps": 2},
        env={"HF_TOKEN": "s3cr3t", "PLAIN": "s3cr3t"},
        slurm={"setup": ["export API_KEY=s3cr3t"]},
        kubernetes={"annotations": {"from": "https://user:s3cr3t@host/"}},
    )
    done = run.start(1)
    assert "env.HF_TOKEN looks like a secret" in done.stderr
    assert "s3cr3t" not in done.stdout + done.stderr
    files = [path for path in run.run.rglob("*") if path.is_file()]
    assert {"manifest.json", "rank-00000.log", "result.json"} <= {path.name for path in files}
    holding = [path for path in files if b"s3cr3t" in path.read_bytes()]
    assert holding == [run.run / "job.toml"]
    assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600
