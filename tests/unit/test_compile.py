"""torch.compile for the blocks of a model.

The tests show which blocks these are, what they compute, and what a machine must have for it.
"""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.support.check import problems
from tests.support.jobs import RESNET, few_words, tiny_job
from tests.support.steps import built
from tests.support.thread_ranks import run_ranks
from trainer.model.compile import compile_blocks

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of torch's own tracing, others in each version


def test_blocks_with_synchronised_batch_norm_are_left_alone_and_counted(tmp_path: Path) -> None:
    config = json.loads(Path(few_words(RESNET)).read_text())
    config["vision_cfg"]["layers"] = [2, 1, 1, 1]
    (tmp_path / "tiny-compiled-resnet.json").write_text(json.dumps(config))
    job = tiny_job(config=str(tmp_path / "tiny-compiled-resnet.json"))
    clip, _ = run_ranks(2, lambda comm: built(job, comm))
    said = "2 blocks, each at its first pass; 2 blocks with synchronised batch norm cannot be compiled"
    assert str(compile_blocks(clip.model)) == said


def test_a_machine_without_a_compiler_or_headers_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    said = problems(tiny_job(model={"compile": True}))
    assert "needs a C++ compiler (no-such-compiler -O1) and Python's headers" in said
    assert "g++ and python3-dev" in said
    assert problems(tiny_job()) == ""


@pytest.mark.parametrize("other", ["compile", "grad_checkpointing"])
def test_cuda_graphs_exclude_what_changes_a_pass(other: str) -> None:
    with pytest.raises(ValidationError, match=f"cuda_graphs = true excludes {other} = true"):
        tiny_job(model={"cuda_graphs": True, other: True})


def test_a_job_that_compiles_keeps_the_compiler_in_its_image() -> None:
    assert tiny_job(model={"compile": True}).compiler_in_image
    assert tiny_job(image={"compiler": True}).compiler_in_image
    assert not tiny_job().compiler_in_image
    with pytest.raises(ValidationError, match="is for numerical proofs"):
        tiny_job(model={"compile": True, "precision": "fp64"})
    with pytest.raises(ValidationError, match=r"image\.compiler = false"):
        tiny_job(model={"compile": True}, image={"compiler": False})
