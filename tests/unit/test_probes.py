"""kNN and linear probe: scikit-learn's own classifiers find the same, and suites measure by them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.neighbors import KNeighborsClassifier

from tests.support.jobs import tiny_job
from tests.support.suites import captioned, class_folders, classification, colour_clip, suite_job
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.errors import InputError
from trainer.evaluate.probes import Labelled, fit, knn
from trainer.evaluate.ranking import exact
from trainer.evaluate.rounds import Rounds
from trainer.evaluate.suite import measure_suite
from trainer.evaluate.suite_data import find_sets, rows_of
from trainer.model.build import untrained


def digits(numbers: range) -> Labelled:
    """Real features with real classes: the pixels of digits, with noise so that probes make mistakes."""
    found, draw = load_digits(), np.random.default_rng(numbers.start)
    pixels = torch.tensor(found.data[numbers] + draw.normal(0, 6, (len(numbers), 64)))
    return Labelled(exact(pixels), torch.tensor(found.target[numbers]), {})


TRAIN, TEST = digits(range(400)), digits(range(600, 900))


def counts(predicted: Any) -> list[list[int]]:
    labels = TEST.labels.numpy()
    own = np.bincount(labels, minlength=10)
    return [own.tolist(), np.bincount(labels[predicted == labels], minlength=10).tolist()]


@pytest.mark.parametrize(("ranks", "columns"), [(1, 2**16), (2, 50)])
def test_the_neighbours_of_scikit_learn_vote_alike(
    ranks: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.evaluate.probes.COLUMNS", columns)
    monkeypatch.setattr("trainer.evaluate.probes.ROWS", 64)
    found = run_ranks(ranks, lambda comm: knn(TRAIN, TEST, Rounds(comm)))
    theirs = KNeighborsClassifier(
        20, metric="cosine", algorithm="brute", weights=lambda distances: np.exp((1 - distances) / 0.07)
    ).fit(TRAIN.features.double().numpy(), TRAIN.labels.numpy())
    predicted = theirs.predict(TEST.features.double().numpy())
    for each in found:
        assert each.by_class.tolist() == counts(predicted)
    assert 0.5 < found[0].top1 < 0.95, "probes that are always right would hide mistakes"
    balanced = balanced_accuracy_score(TEST.labels.numpy(), predicted)
    assert found[0].mean_per_class_recall == pytest.approx(balanced)


@pytest.mark.parametrize("decay", [1e-5, 1.0])
def test_the_fit_is_that_of_scikit_learn(decay: float) -> None:
    theirs = LogisticRegression(C=1 / (decay * len(TRAIN.labels)), tol=1e-9, max_iter=10_000)
    theirs.fit(TRAIN.features.double().numpy(), TRAIN.labels.numpy())
    layer = fit(TRAIN, 10, decay)
    logits = TEST.features.double() @ layer[:, :-1].T + layer[:, -1]
    expected = theirs.predict_proba(TEST.features.double().numpy())
    np.testing.assert_allclose(logits.softmax(1).numpy(), expected, atol=5e-4)


def test_fewer_training_samples_than_neighbours_all_vote(alone: Comm) -> None:
    few = Labelled(TRAIN.features[:3], torch.tensor([0, 1, 1]), {})
    assert int(knn(few, TEST, Rounds(alone)).by_class[0].sum()) == len(TEST.labels)


@pytest.fixture
def walls(tmp_path: Path) -> Path:
    """Folders of colours to learn from, under the names of other classes, and to judge: 3 of 4 right."""
    folder = tmp_path / "walls"
    names = {"red": "warm", "green": "cold", "blue": "cold", "white": "warm"}
    class_folders(folder / "train", [(colour, name) for colour, name in names.items() for _ in range(2)])
    class_folders(folder / "test", [("red", "warm"), ("green", "cold"), ("blue", "cold"), ("blue", "warm")])
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_suite_measures_own_folders_by_probes_beside_zero_shot(walls: Path, ranks: int) -> None:
    job = suite_job(("knn:own", "linear:own"), None, walls)
    results = run_ranks(ranks, lambda comm: measure_suite(colour_clip(), job, comm))
    for found in results:
        assert [(each["name"], each["task"], each["samples"], each["value"]) for each in found] == [
            ("knn:own/walls", "knn", 4, 0.75),
            ("linear:own/walls", "linear", 4, 0.75),
        ]
        assert found[0]["metrics"]["knn_mean_per_class_recall"] == 0.75


def test_a_probe_of_features_that_are_not_finite_has_no_figures(walls: Path, alone: Comm) -> None:
    clip = untrained(tiny_job())
    torch.nn.init.constant_(clip.model.get_parameter("visual.proj"), torch.nan)
    (result,) = measure_suite(clip, suite_job(("knn:own",), None, walls), alone)
    assert "features are not finite" in result["error"]


def test_sets_without_a_training_set_are_not_measured(tmp_path: Path, walls: Path) -> None:
    classification(tmp_path / "wds_vtab-pets_test", [("red", 0)], ("red",))
    (missing,) = find_sets(suite_job(("linear:vtab/pets",), tmp_path).eval).missing
    assert re.search(r"no folder .*wds_vtab-pets_test/train, from which a probe learns", missing.why)
    (walls / "train" / "third").mkdir()
    (missing,) = find_sets(suite_job(("knn:own",), None, walls).eval).missing
    assert "does not have the classes of" in missing.why


def test_names_of_probes_are_checked_as_others_are(tmp_path: Path) -> None:
    captioned(tmp_path / "wds_flickr30k", [("red", "red")])
    with pytest.raises(InputError, match='"knn:flickr30k": its samples have captions and no classes'):
        find_sets(suite_job(("knn:flickr30k",), tmp_path).eval)
    with pytest.raises(InputError, match='called "knn:vtab/pet"; did you mean vtab/pets'):
        rows_of(("knn:vtab/pet",))
    assert {row.metric for row in rows_of(("linear:datacomp",))} == {"linear_top1"}
    assert all(not row.name.endswith("flickr30k") for row in rows_of(("linear:datacomp",)))
    assert [row.folder for row in rows_of(("knn:vtab/pets", "vtab/pets"))] == ["wds_vtab-pets"] * 2
