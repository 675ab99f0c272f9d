"""A row of the table is all that a new accelerator needs: a run on a device that only this test knows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from tests.support.runs import LIMIT_S, TinyRun

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no device that is written in Python",
)


def trained(run: TinyRun, *command: str, **resources: str) -> str:
    job = run.write(
        resources=resources,
        optim={"steps": 3},
        checkpoint={"every_steps": 2},
        health={"preflight": False},  # it would time products that a GPU does in a millisecond
    )
    done = subprocess.run(
        [sys.executable, "-m", *command[:1], str(job), *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_device_that_only_a_row_names_trains_as_the_cpu_does(tmp_path: Path) -> None:
    fake, cpu, record = TinyRun(tmp_path / "fake"), TinyRun(tmp_path / "cpu"), tmp_path / "calls.json"
    for run in (fake, cpu):
        run.folder.mkdir()
    said = trained(fake, "tests.support.fake_accelerator", str(record))
    trained(cpu, "trainer.train", device="cpu")
    assert "not tried here: Fake" in said
    assert fake.losses() == pytest.approx(cpu.losses(), rel=1e-6)
    assert list(fake.losses()) == [1, 2, 3]
    assert fake.result()["device"] == "Fake Accelerator"
    assert [folder.name for folder in sorted((fake.run / "checkpoints").glob("step-*"))] == [
        folder.name for folder in sorted((cpu.run / "checkpoints").glob("step-*"))
    ]
    calls = json.loads(record.read_text())
    assert calls["aten.mm.default"] > 0
    assert calls["streams"] >= 3
    assert calls["manual_seed"] == 3, "one for each step"
