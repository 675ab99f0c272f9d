"""Evaluation samples that are larger than usual or whose class has no name.

They are found before the end of a run, not only at it.
"""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.jobs import tiny_job
from trainer.comm.protocol import Comm
from trainer.config.batch_plan import plan
from trainer.data import pictures
from trainer.data.shard_files import write_shards
from trainer.errors import InputError, Preempted
from trainer.evaluate.evaluation import Evaluation, Metrics
from trainer.model.build import build_model


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Four pictures of 40 x 40 of the classes 0 to 3, with a caption each."""
    picture = io.BytesIO()
    Image.new("RGB", (40, 40)).save(picture, "png")
    write_shards(
        (
            (f"{n}", {"png": picture.getvalue(), "cls": str(n).encode(), "txt": f"picture {n}".encode()})
            for n in range(4)
        ),
        tmp_path,
        8,
    )
    return str(tmp_path / "*.tar")


def evaluate(comm: Comm, run_folder: Path | None = None, most_pixels: int = 1600, **settings: Any) -> Metrics:
    """One evaluation by an untrained model."""
    job = tiny_job(eval=settings, data={"max_image_pixels": most_pixels})
    return Evaluation(job, comm, run_folder)(build_model(job, plan(job, 1), comm))


def test_images_of_an_evaluation_may_have_as_many_pixels_as_the_job_allows(
    shard: str, tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pictures.decode, "__defaults__", (1000,)
    )  # what holds where the job's own is not passed on
    names = ("a", "b", "c", "d")
    for settings in ({"zero_shot": (shard,), "class_names": names}, {"retrieval": (shard,)}):
        assert evaluate(alone, tmp_path, **settings)
        with pytest.raises(
            InputError, match=r"sample 0: the image has 40 x 40 pixels; data\.max_image_pixels allows 1,599"
        ):
            evaluate(alone, most_pixels=1599, **settings)


def test_a_sample_of_a_class_without_a_name_is_named(shard: str, alone: Comm) -> None:
    with pytest.raises(
        InputError,
        match=(
            r"eval.zero_shot: .*\.tar.*: sample 3 has class number 3, but eval.class_names gives 3 names, "
            r"for the numbers from 0 to 2"
        ),
    ):
        evaluate(alone, zero_shot=(shard,), class_names=("a", "b", "c"))


@pytest.mark.parametrize(
    ("key", "rounds"),
    [("zero_shot", 2), ("retrieval", 2), ("retrieval", 4)],
    ids=["zero-shot", "retrieval", "ranking"],
)
def test_an_evaluation_is_given_up_before_the_next_round_when_asked_to_stop(
    shard: str, alone: Comm, key: str, rounds: int
) -> None:
    """Four images in rounds of one, then their ranking; after so many rounds a stop is wished."""
    answers = iter([False] * rounds + [True])
    job = tiny_job(eval={key: (shard,), "class_names": ("a", "b", "c", "d"), "batch_size": 1})
    clip = build_model(job, plan(job, 1), alone)
    clip.model.train()
    with pytest.raises(Preempted):
        Evaluation(job, alone)(clip, lambda: next(answers))
    assert next(answers, None) is None
    assert clip.model.training
