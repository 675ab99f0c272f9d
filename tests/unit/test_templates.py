"""Templates: what renders them reads no code that another could have put into a cache."""

from pathlib import Path

import pytest

from trainer.cli.main import main
from trainer.launch import templates

JOB = """name = "x"
[data]
format = "synthetic"
[optim]
global_batch_size = 8
steps = 1
[slurm]
python = "/p/python"
"""


def test_rendering_keeps_no_code_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    templates._environment.cache_clear()
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["render", "slurm", str(tmp_path / "job.toml")]) == 0
    assert "#SBATCH" in capsys.readouterr().out
    assert not cache.exists()
