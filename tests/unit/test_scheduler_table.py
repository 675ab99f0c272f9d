"""One row in each table of schedulers is all that the command line needs to serve one more."""

import time
from pathlib import Path

from tests.support.jobs import TOY_JOB
from tests.support.toy_scheduler import clipship

JOB = TOY_JOB.replace('"toy"', '"toy run"') + "[nohup]\nnice = 3\n"


def toy_job(folder: Path) -> str:
    """A job file with a section for the toy scheduler."""
    (folder / "job.toml").write_text(JOB)
    return "job.toml"


def test_a_toy_scheduler_renders_checks_submits_and_ends_a_job(tmp_path: Path) -> None:
    job = toy_job(tmp_path)
    script = clipship(tmp_path, "render", "nohup", job)
    assert script.returncode == 0, script.stderr
    assert "renice -n 3" in script.stdout
    assert "'toy run' goes on" in script.stdout
    checked = clipship(tmp_path, "check", job, "--no-data")
    assert "ranks started by bash ([nohup])" in checked.stdout, checked.stderr
    refused = clipship(
        tmp_path, "check", job, "--no-data", "--set", "resources.nodes=2", "--set", "nohup.nicer=1"
    )
    assert "unknown key; did you mean nohup.nice?" in refused.stderr
    submitted = clipship(tmp_path, "submit", job, "--to", "nohup")
    assert submitted.returncode == 0, submitted.stderr
    process = Path("/proc", submitted.stdout.strip())
    try:
        assert process.exists()
        assert "running" in clipship(tmp_path, "status", "toy run").stdout
        limit = time.monotonic() + 60
        while "[0] toy run goes on" not in (said := clipship(tmp_path, "logs", "toy run").stdout):
            assert time.monotonic() < limit, said
    finally:
        cancelled = clipship(tmp_path, "cancel", "toy run")
    assert "was asked to end" in cancelled.stderr
    deadline = time.monotonic() + 30
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "over" in clipship(tmp_path, "status", "toy run").stdout


def test_check_reports_what_a_scheduler_refuses(tmp_path: Path) -> None:
    refused = clipship(tmp_path, "check", toy_job(tmp_path), "--no-data", "--set", "resources.nodes=2")
    assert refused.returncode == 2
    assert "nohup has this node alone" in refused.stderr
