"""Evaluation samples that are bad or whose class has no name, and ranks that fail before a run ends."""

import functools
import io
import pkgutil
import threading
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.jobs import tiny_job
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.data.pack import PackedSample, write_shards
from trainer.data.sample import RawSample
from trainer.errors import InputError, Preempted, StorageError
from trainer.evaluate.evaluation import Evaluation, board
from trainer.evaluate.ranking import Pairs, ahead, exact
from trainer.evaluate.rounds import EvaluationFailed
from trainer.model.build import Clip, build_model, untrained


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """The four pictures of `noise`."""
    write_shards(noise(), tmp_path, 8)
    return str(tmp_path / "*.tar")


def made(comm: Comm, settings: dict[str, Any], data: dict[str, Any] | None = None) -> tuple[Job, Clip]:
    """An untrained model, one for all: ranks as threads draw from one generator."""
    job = tiny_job(eval=settings, data=data or {})
    clip = build_model(job, plan(job, 1), comm)
    with _drawing:
        clip.model.load_state_dict(_weights())
    return job, clip


def evaluate(comm: Comm, run_folder: Path | None = None, /, **settings: Any) -> dict[str, Any]:
    job, clip = made(comm, settings, settings.pop("data", None))
    return dict(Evaluation(job, comm, run_folder)(clip))


_drawing = threading.Lock()


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = untrained(tiny_job()).model.state_dict()
    return weights


ZERO_SHOT = {"zero_shot_samples": 3, "zero_shot_bad_samples": 1}
RETRIEVAL = {"retrieval_images": 3, "retrieval_texts": 6, "retrieval_bad_samples": 1}


@pytest.mark.parametrize(("which", "ranks", "batch_size"), [(0, 2, 1), (2, 1, 8), (3, 2, 3)])
def test_a_bad_sample_is_left_out_of_an_evaluation_counted_and_named(
    tmp_path: Path, which: int, ranks: int, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The figures are those of the same set without it."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "rest").mkdir()
    write_shards(noise(broken=(which,)), tmp_path / "bad", 8)
    write_shards((each for each in noise() if each[0] != str(which)), tmp_path / "rest", 8)

    def measured(folder: str, comm: Comm) -> dict[str, Any]:
        sets = (f"{tmp_path}/{folder}/*.tar",)
        shown = tmp_path / f"{folder}{comm.world.rank}"
        shown.mkdir(exist_ok=True)
        names = ("a", "b", "c", "d")
        return evaluate(comm, shown, zero_shot=sets, retrieval=sets, class_names=names, batch_size=batch_size)

    caplog.set_level("INFO")
    (rest,) = run_ranks(1, lambda comm: measured("rest", comm))
    for metrics in run_ranks(ranks, lambda comm: measured("bad", comm)):
        assert metrics == {**rest, **ZERO_SHOT, **RETRIEVAL}
    assert "of 3 images (without 1 bad sample: 1 not an image)" in caplog.text
    assert (
        f"skipped (not an image): {tmp_path}/bad/shard-000000.tar: sample {which}: the image" in caplog.text
    )


@pytest.mark.parametrize("data", [{"on_bad_sample": "fail"}, {"max_bad_share": 0.002}])
def test_an_evaluation_with_more_bad_samples_than_the_job_allows_fails_on_all_ranks(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    """Each rank has fewer than that."""
    write_shards(noise(broken=(0, 1, 2)), tmp_path, 8)

    def failed(comm: Comm) -> str:
        with pytest.raises(EvaluationFailed) as caught:
            evaluate(comm, zero_shot=(f"{tmp_path}/*.tar",), class_names=("a",) * 4, batch_size=1, data=data)
        assert not isinstance(caught.value, StorageError)
        return str(caught.value)

    one, other = run_ranks(2, failed)
    assert one == other, "and exit code 2"
    expected = (
        "bad samples: 3 of 4 (3 not an image)" if "max_bad_share" in data else "sample 0: the image has"
    )
    assert expected in one


def test_a_board_that_cannot_be_made_ends_no_evaluation(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 alone makes it, and the others would wait for it."""
    write_shards(noise(), tmp_path, 8)

    def lost(*_: object, **__: object) -> None:
        raise StorageError("the shard is gone")

    monkeypatch.setattr("trainer.evaluate.evaluation.board", lost)
    assert evaluate(alone, tmp_path, retrieval=(f"{tmp_path}/*.tar",))["retrieval_images"] == 4
    assert "the retrieval board is NOT WRITTEN: the shard is gone" in caplog.text


def test_a_set_without_a_usable_sample_has_no_figures(tmp_path: Path, alone: Comm) -> None:
    write_shards(noise(broken=range(4)), tmp_path, 8)
    for keys in ({"zero_shot": (f"{tmp_path}/*.tar",)}, {"retrieval": (f"{tmp_path}/*.tar",)}):
        with pytest.raises(EvaluationFailed, match="none of the 4 samples can be used"):
            evaluate(alone, class_names=("a",) * 4, **keys)


@pytest.mark.parametrize(
    ("key", "part", "rank"),
    [
        ("zero_shot", "zero_shot.image_features", 0),  # the other one has no sample
        ("zero_shot", "zero_shot.text_features", 0),
        ("zero_shot", "zero_shot._filled", 1),
        ("retrieval", "retrieval._joined", 0),
        ("retrieval", "ranking._is_ahead", 0),
    ],
)
def test_memory_that_runs_out_on_one_rank_fails_on_all(
    shard: str, monkeypatch: pytest.MonkeyPatch, key: str, part: str, rank: int
) -> None:
    """The other ranks would wait in a collective for the one that ends, until the world is lost."""
    original, here = pkgutil.resolve_name(f"trainer.evaluate.{part}"), threading.local()

    def scarce(*arguments: Any) -> Any:
        if here.rank == rank:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*arguments)

    monkeypatch.setattr(f"trainer.evaluate.{part}", scarce)

    def failed(comm: Comm) -> str:
        here.rank = comm.world.rank
        with pytest.raises(EvaluationFailed) as caught:
            evaluate(comm, **{key: (shard,)}, class_names=tuple("abcdefghijklmnopqrst"))
        assert isinstance(caught.value, StorageError), "exit code 1: a later start may have more memory"
        return str(caught.value)

    assert set(run_ranks(2, failed)) == {
        "memory ran out; a smaller eval.batch_size needs less: CUDA out of memory"
    }


def noise(broken: Collection[int] = ()) -> Iterator[PackedSample]:
    """Four pictures of noise of the classes 0 to 3, with two captions each; some are no pictures."""
    draw = np.random.default_rng(5)
    for number in range(4):
        file = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "png")
        picture = bytes(40) if number in broken else file.getvalue()
        captions = f"noise {number}\nanother {number}".encode()
        yield f"{number}", {"png": picture, "cls": str(number).encode(), "txt": captions}


@pytest.mark.parametrize("key", ["zero_shot", "retrieval"])
@pytest.mark.parametrize("broken", ["visual.proj", "text_projection"])
def test_a_model_whose_features_are_not_finite_has_no_figures(
    shard: str, alone: Comm, key: str, broken: str
) -> None:
    job, clip = made(alone, {key: (shard,), "class_names": ("a", "b", "c", "d")})
    torch.nn.init.constant_(clip.model.get_parameter(broken), torch.nan)
    with pytest.raises(EvaluationFailed, match="features are not finite"):
        Evaluation(job, alone)(clip)


def test_a_sample_of_a_class_without_a_name_is_named(shard: str, alone: Comm) -> None:
    said = r"\.tar.*: sample 3 has class number 3, but eval\.class_names gives 3 names, for .* from 0 to 2"
    with pytest.raises(InputError, match=said):
        evaluate(alone, zero_shot=(shard,), class_names=("a", "b", "c"))


@pytest.mark.parametrize(("key", "rounds"), [("zero_shot", 2), ("retrieval", 2), ("retrieval", 4)])
def test_an_evaluation_is_given_up_before_the_next_round_when_asked_to_stop(
    shard: str, alone: Comm, key: str, rounds: int
) -> None:
    """Four images in rounds of one, then their ranking; after so many rounds a stop is wished."""
    answers = iter([False] * rounds + [True])
    job, clip = made(alone, {key: (shard,), "class_names": ("a", "b", "c", "d"), "batch_size": 1})
    clip.model.train()
    with pytest.raises(Preempted):
        Evaluation(job, alone)(clip, lambda: next(answers))
    assert next(answers, None) is None
    assert clip.model.training


# Ranks among images and texts: exact, ties by number, the same in any cut, never a matrix of all pairs.

STEP = 2.0**-24


def brute_force(pairs: Pairs) -> tuple[list[int], list[int]]:
    """Places from 0 in a stable sort of the whole matrix; in integers, so that nothing is rounded."""
    images, texts = ((rows.double() / STEP).long() for rows in (pairs.images_ND, pairs.texts_TD))
    cosines, owner = images @ texts.T, pairs.image_of_T
    text_places, image_places = (
        (-rows).argsort(dim=1, stable=True).argsort(dim=1) for rows in (cosines, cosines.T)
    )
    nearest_own = [int(places[owner == image].min()) for image, places in enumerate(text_places)]
    return nearest_own, image_places.gather(1, owner[:, None])[:, 0].tolist()


def make_pairs(captions: list[int], seed: int, alphabet: int) -> Pairs:
    """Images with so many captions each; few different vectors, so that many cosines are equal."""
    generator = torch.Generator().manual_seed(seed)
    vectors, image_of = torch.randn(alphabet, 5, generator=generator), torch.tensor(captions)
    image_of = torch.arange(len(captions)).repeat_interleave(image_of)
    drawn = torch.randint(alphabet, (len(captions) + len(image_of),), generator=generator)
    features = exact(vectors[drawn])
    return Pairs(features[: len(captions)], features[len(captions) :], image_of)


def last(counts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return list(counts)[-1]


@settings(max_examples=60, deadline=None)
@given(
    captions=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    alphabet=st.integers(1, 40),
    cut=st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 7)),
)
def test_ranks_are_those_of_a_stable_sort_of_all_pairs_in_any_cut(
    captions: list[int], seed: int, alphabet: int, cut: tuple[int, int, int]
) -> None:
    world_size, rows, columns = cut
    pairs = make_pairs(captions, seed, alphabet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.evaluate.ranking.ROWS", rows)
        patch.setattr("trainer.evaluate.ranking.COLUMNS", columns)
        every = world_size * rows
        begins = [range(first, len(captions) + first, every) for first in range(0, every, rows)]
        shares = [last(ahead(pairs, own)) for own in begins]
    found = tuple(torch.stack(parts).sum(0).tolist() for parts in zip(*shares, strict=True))
    assert found == brute_force(pairs)


def test_exact_features_are_whole_steps_near_the_unit_vector() -> None:
    given = torch.randn(50, 512, generator=torch.Generator().manual_seed(1))
    steps = exact(given).double() / STEP
    assert torch.equal(steps, steps.round())
    unit = torch.nn.functional.normalize(given.double(), dim=1)
    assert float((steps * STEP - unit).abs().max()) <= STEP / 2


def test_a_model_with_equal_features_for_everything_finds_nothing() -> None:
    for broken in (torch.ones(100, 8), torch.full((100, 8), torch.nan), torch.full((100, 8), torch.inf)):
        pairs = Pairs(exact(broken), exact(broken), torch.arange(100))
        of_texts, of_images = last(ahead(pairs, [0]))
        assert of_texts.tolist() == of_images.tolist() == list(range(100))


class Three:
    """Three images, of which the first and the last share a caption."""

    def __len__(self) -> int:
        return 3

    def read(self, index: int) -> RawSample:
        captions = (("a", "also a"), ("b",), ("c", "a"))[index]
        return RawSample(str(index), "here", np.zeros((8, 8, 3), dtype=np.uint8), captions, None)


def test_board_shows_the_nearest_different_texts_and_where_its_own_caption_stands() -> None:
    source: Any = Three()
    for to_first, shown, place in (
        ((0.9, 0.8, 0.0, 0.7, 0.9), [("a", True), ("also a", True), ("c", False)], ("a", 1)),
        ((0.2, 0.3, 0.9, 0.7, 0.4), [("b", False), ("c", False), ("a", True)], ("also a", 4)),
    ):
        texts = torch.tensor([[near, 0.0, 0.0] for near in to_first])
        row, *_ = board(Pairs(torch.eye(3), texts, torch.tensor([0, 0, 1, 2, 2])), source, texts=3)
        assert [(text.text, text.own) for text in row.texts] == shown
        assert (row.caption, row.place) == place
