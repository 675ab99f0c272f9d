"""The preload loads what a rank of a job needs, and leaves to the rank what it cannot load."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.jobs import tiny_job
from trainer.config.loader import dump_job
from trainer.model import build, light_import
from trainer.run.job_limits import job_if_readable
from trainer.train.preload import preload


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(dump_job(tiny_job()))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["FILE", "--set", "model.name=hf-hub:nobody/nothing"],
        ["FILE", "--set", "model.name=no-such-model"],
        ["FILE.none"],
        [],
    ],
)
def test_a_model_or_a_job_that_is_not_here_is_left_to_the_rank(job_file: Path, words: list[str]) -> None:
    build._tokenizer.cache_clear()
    preload([word.replace("FILE", str(job_file)) for word in words])
    assert build._tokenizer.cache_info().currsize == 0


def test_a_module_is_imported_as_if_a_package_were_not_installed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("")
    (tmp_path / "user.py").write_text("try:\n    import slow\nexcept ImportError:\n    slow = None\n")
    program = (
        "from trainer.model.light_import import import_without\n"
        "import_without(['slow'], 'user')\n"
        "import user, slow\n"
        "print(user.slow is None, slow.__name__)\n"
        "import_without(['slow'], 'user')\n"
        "assert slow is __import__('slow')\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True slow\n"


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ((), {"wandb", "horovod", "transformers"}),
        (("comm.backend=horovod",), {"wandb", "transformers"}),
        (("model.name=roberta-ViT-B-32",), {"wandb", "horovod"}),
        (("model.teacher=xlm-roberta-base-ViT-B-32", "model.teacher_pretrained=x"), {"wandb", "horovod"}),
        (("model.name=coca_ViT-B-32",), {"wandb", "horovod"}),
        (("model.name=hf-hub:nobody/nothing",), {"wandb", "horovod"}),
        (("seed=-1",), {"wandb"}),
    ],
)
def test_what_the_models_of_a_job_do_not_need_is_not_imported(
    job_file: Path, change: Sequence[str], left_out: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[set[str], str]] = []
    monkeypatch.setattr(
        light_import, "import_without", lambda absent, name: asked.append((set(absent), name))
    )
    words = [str(job_file), *(word for each in change for word in ("--set", each))]
    light_import.import_open_clip(job_if_readable(words))
    assert asked == [(left_out, "open_clip")]
