"""The metrics of a suite are those of CLIP_benchmark's formulas, written again here over whole matrices.

Both sides see the same features: a tiny model's, of pictures of noise.
"""

import io
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import balanced_accuracy_score, f1_score

from tests.support.jobs import tiny_job
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Data, Eval
from trainer.config.batch_plan import plan
from trainer.data.pictures import decode
from trainer.data.sample import Source
from trainer.data.shard_files import PackedSample, write_shards
from trainer.data.source import open_images, open_labelled
from trainer.evaluate.features import evaluating, image_features, text_features
from trainer.evaluate.retrieval import Retrieval, retrieval
from trainer.evaluate.rounds import EvaluationFailed, Rounds
from trainer.evaluate.suite import choice, is_first_nearest
from trainer.evaluate.zero_shot import ZeroShot, classify
from trainer.model.build import Clip, build_model

CLASSES = 9
PICTURES = 64
JOB = tiny_job(eval={"batch_size": 10})
Array = NDArray[np.float64]


def noise() -> Iterator[PackedSample]:
    """Pictures of noise; the classes have unequal numbers of them, and the last one has none."""
    draw = np.random.default_rng(5)
    for number in range(PICTURES):
        file = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "png")
        label = int(math.sqrt(number))  # 1, 3, 5, ... pictures of each class
        captions = [f"noise of number {number} and word {word}" for word in range(1 + number % 3)]
        members = {"png": file.getvalue(), "cls": str(label).encode(), "txt": "\n".join(captions).encode()}
        yield f"{number:03d}", members


@pytest.fixture
def shards(tmp_path: Path) -> tuple[str, ...]:
    write_shards(noise(), tmp_path, 40)
    return (str(tmp_path / "*.tar"),)


@pytest.fixture
def clip(alone: Comm) -> Clip:
    torch.manual_seed(3)
    return build_model(JOB, plan(JOB, 1), alone)


def features_of_pictures(clip: Clip, source: Source) -> Array:
    pixels = torch.stack([clip.eval_transform(decode(source.read(n))) for n in range(len(source))])
    with evaluating(clip.model):
        return image_features(clip, pixels, "fp32", torch.device("cpu")).double().numpy()


def test_classification_equals_the_formulas_of_clip_benchmark(
    shards: tuple[str, ...], clip: Clip, alone: Comm
) -> None:
    source = open_labelled(Eval(zero_shot=shards, class_names=tuple("abcdefghi")))
    images = features_of_pictures(clip, source)
    nearby = images[[(n * 7) % PICTURES for n in range(CLASSES)]]  # classes near some of the pictures
    result = classify(clip, source, torch.from_numpy(nearby).float(), JOB, Rounds(alone))
    target = np.array([source.read(n).label for n in range(PICTURES)])
    order = np.argsort(-(images @ nearby.T), axis=1, kind="stable")
    taken = order[:, 0]
    assert len(set(taken)) > 4, "a model that takes one class for all shows no mistake in the formulas"
    recalls = [np.mean(taken[target == label] == label) for label in np.unique(target)]
    assert len(recalls) == CLASSES - 1
    expected = {
        "top1": np.mean(taken == target),
        "top5": np.mean([t in row[:5] for t, row in zip(target, order, strict=True)]),
        "recall": np.mean(recalls),
    }
    measured = {
        "top1": result.top1 / result.samples,
        "top5": result.top5 / result.samples,
        "recall": result.mean_per_class_recall(),
    }
    assert measured == pytest.approx(expected, abs=1e-6)
    assert expected["recall"] != pytest.approx(expected["top1"], abs=1e-3)
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        balanced = balanced_accuracy_score(target, taken)
    assert result.mean_per_class_recall() == pytest.approx(balanced, abs=1e-6)
    macro = f1_score(target, taken, average="macro", labels=np.unique(target), zero_division=0)
    assert result.macro_f1() == pytest.approx(macro, abs=1e-6)


def test_mean_per_class_recall_and_f1_of_known_counts() -> None:
    """Class 0: 1 of 4 right, and 2 taken for it; class 1: 3 of 3, and 6 taken; class 2 has no samples."""
    result = ZeroShot(7, 4, 7, torch.tensor([[4, 3, 0], [1, 5, 1], [1, 3, 0]]))
    assert result.mean_per_class_recall() == pytest.approx((1 / 4 + 3 / 3) / 2)
    assert result.macro_f1() == pytest.approx((2 * 1 / 5 + 2 * 3 / 8) / 2)


def test_retrieval_equals_the_formulas_of_clip_benchmark(
    shards: tuple[str, ...], clip: Clip, alone: Comm
) -> None:
    source = open_images(Data(train=shards))
    metrics = retrieval(clip, source, JOB, Rounds(alone)).metrics()
    owned = [(n, caption) for n in range(len(source)) for caption in source.read(n).captions]
    with evaluating(clip.model):
        tokens = clip.tokenizer([caption for _, caption in owned])
        texts = text_features(clip, tokens, "fp32", torch.device("cpu")).double().numpy()
    scores = features_of_pictures(clip, source) @ texts.T
    image_of = np.array([n for n, _ in owned])
    by_text, by_image = np.argsort(-scores, axis=0).T, np.argsort(-scores, axis=1)
    expected = {}
    for k in (1, 5, 10):
        expected[f"retrieval_t2i_r{k}"] = np.mean(
            [n in row[:k] for n, row in zip(image_of, by_text, strict=True)]
        )
        expected[f"retrieval_i2t_r{k}"] = np.mean([n in image_of[row[:k]] for n, row in enumerate(by_image)])
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert 0 < expected["retrieval_t2i_r5"] < expected["retrieval_t2i_r10"] < 1


@pytest.fixture
def choices(tmp_path: Path) -> tuple[str, ...]:
    """Each picture has two to four captions; one picture is broken."""
    samples = [(key, {**members, "txt": members["txt"] + b"\none caption more"}) for key, members in noise()]
    samples[20] = ("020", {**samples[20][1], "png": b"broken"})
    (tmp_path / "choices").mkdir()
    write_shards(iter(samples), tmp_path / "choices", 40)
    return (str(tmp_path / "choices" / "*.tar"),)


@pytest.mark.parametrize("ranks", [1, 2])
def test_choice_equals_the_formula_of_clip_benchmark(
    choices: tuple[str, ...], clip: Clip, ranks: int
) -> None:
    source = open_images(Data(train=choices))
    right = []
    with evaluating(clip.model):
        for number in (n for n in range(len(source)) if n != 20):
            raw = source.read(number)
            pixels = clip.eval_transform(decode(raw))[None]
            image = image_features(clip, pixels, "fp32", torch.device("cpu"))
            texts = text_features(clip, clip.tokenizer(list(raw.captions)), "fp32", torch.device("cpu"))
            right.append(int((image @ texts.T)[0].argmax()) == 0)
    assert 5 < sum(right) < len(right) - 5
    job = tiny_job(eval={"batch_size": 10}, data={"workers": 0, "max_bad_share": 0.1})
    for result in run_ranks(ranks, lambda comm: choice(clip, source, job, Rounds(comm))):
        assert (result.samples, result.right) == (len(right), sum(right))
        assert result.bad == {"not an image": 1}


def test_what_is_equally_near_is_not_chosen() -> None:
    images = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    cosines = torch.tensor([0.5, 0.4, 0.3, 0.1, 0.3, -0.2, -0.1])
    assert is_first_nearest(cosines, images).tolist() == [True, False, False]


def test_a_choice_of_one_caption_is_refused(shards: tuple[str, ...], clip: Clip, alone: Comm) -> None:
    source = open_images(Data(train=shards))
    with pytest.raises(EvaluationFailed, match="sample 000 has one caption: a choice takes the right one"):
        choice(clip, source, JOB, Rounds(alone))


def test_a_query_of_several_images_is_found_by_the_nearest_of_them() -> None:
    """Texts 0, 2 and 3 are one query, which images at the places 7, 2 and 9 answer."""
    ranks = Retrieval(torch.tensor([1, 1]), torch.tensor([7, 1, 2, 9]), torch.tensor([40, 12, 40, 40]))
    assert sorted(ranks.of_queries().tolist()) == [1, 2]
