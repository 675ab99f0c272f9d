"""A run that measures a mixture of its weights with those of its begin, also after a kill, and by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.test_ema_of_run import digits
from tests.support.jobs import VIT, tiny_job
from tests.support.runs import LIMIT_S, TinyRun
from trainer.config.results import MIX
from trainer.data.shard_files import write_shards
from trainer.model.build import untrained

SHARE, STEPS = 0.4, 20


@pytest.mark.parametrize("backend", ["torch", pytest.param("fsdp", marks=pytest.mark.full)])
def test_the_mixture_of_a_killed_run_is_that_of_both_files(tmp_path: Path, backend: str) -> None:
    [shard] = write_shards(digits(), tmp_path, 24)
    first = untrained(tiny_job().model_copy(update={"seed": 5})).model.state_dict()
    torch.save(first, tmp_path / "first.pt")
    run = TinyRun(tmp_path)
    run.write(
        model={"init": str(tmp_path / "first.pt")},
        optim={"steps": STEPS, "lr": 1e-2, "anchor": 2.0},  # which takes the same copy of the first weights
        comm={"backend": backend},
        checkpoint={"every_steps": 3},
        eval={"retrieval": [str(tmp_path / shard)], "batch_size": 4, "mix": SHARE},
    )
    run.start_and_kill(2, at_step=8)
    done = run.start(2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(mixture)") == 2, done.stdout
    trained = torch.load(run.run / "checkpoints" / f"step-{STEPS:08d}" / "model.pt", weights_only=True)
    mixed = {name: torch.lerp(first[name], value, SHARE) for name, value in trained.items()}
    torch.save(mixed, tmp_path / "mixed.pt")
    command = [sys.executable, "-m", "trainer.cli.main", "eval", str(tmp_path / "mixed.pt"), "--model", VIT]
    by_hand = subprocess.run(
        [*command, "--data", str(tmp_path / shard), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert by_hand.returncode == 0, by_hand.stderr
    expected = {name: value for name, value in json.loads(by_hand.stdout).items() if "retrieval" in name}
    result = run.result()
    assert {name: result[f"{MIX}{name}"] for name in expected if f"{MIX}{name}" in result} == expected
    assert {name: result[name] for name in expected} != expected
