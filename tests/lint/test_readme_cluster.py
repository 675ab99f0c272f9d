"""The sections that README adds for a cluster are enough for both schedulers, as they stand."""

import re
import tomllib
from pathlib import Path

import pytest
import tomli_w

from trainer.cli.main import main
from trainer.presets.files import preset_text

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_snippet_of_the_page_renders_for_each_scheduler(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (snippet,) = (block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "[slurm]" in block)
    job = tomllib.loads(preset_text("laptop"))
    for name, section in tomllib.loads(snippet).items():
        job[name] = {**job.get(name, {}), **section}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job))
    for scheduler in ("slurm", "kubernetes"):
        assert main(["render", scheduler, str(tmp_path / "job.toml")]) == 0
    assert 'claimName: "shared"' in capsys.readouterr().out
