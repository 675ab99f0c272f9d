"""A suite of tiny data sets with known answers: what is found on disk, measured, kept and said."""

import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, f1_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

from tests.support.jobs import tiny_job
from tests.support.suites import captioned, class_folders, classification, colour_clip, suite_job
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.data.pack import write_shards
from trainer.errors import InputError
from trainer.evaluate.probes import Labelled, fit, knn
from trainer.evaluate.ranking import exact
from trainer.evaluate.rounds import Rounds
from trainer.evaluate.suite import measure_suite
from trainer.evaluate.suite_data import find_sets, keep_suite, table
from trainer.model.build import Clip, untrained

NAMES = ("red", "green", "blue", "white")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Pets with 1 of 4 red pictures labelled as blue; captions, of which one is another picture's."""
    root = tmp_path / "root"
    pets = [("red", 0), ("red", 0), ("red", 0), ("red", 2), ("green", 1), ("blue", 2)]
    classification(root / "wds_vtab-pets_test", pets, NAMES)
    captioned(
        root / "wds_flickr30k", [("red", "a red one"), ("green", "all green\nor blue"), ("blue", "blue here")]
    )
    captioned(
        root / "wds_muge", [("red", "red"), ("red", "red"), ("green", "green\nblue"), ("white", "white")]
    )
    return root


@pytest.fixture
def shades(tmp_path: Path) -> Path:
    """A folder of class folders: 3 of 4 right."""
    return class_folders(
        tmp_path / "shades", [("red", "red"), ("green", "green"), ("blue", "red"), ("green", "green")]
    )


def measured(job: Job, comm: Comm) -> dict[str, dict[str, Any]]:
    return {result["name"]: result for result in measure_suite(colour_clip(), job, comm)}


def test_sets_with_known_answers(root: Path, shades: Path, alone: Comm) -> None:
    results = measured(suite_job(("vtab/pets", "flickr30k", "muge", "own"), root, shades), alone)
    assert list(results) == ["vtab/pets", "flickr30k", "muge", "own/shades"]
    assert results["vtab/pets"]["metric"] == "mean_per_class_recall"
    assert results["vtab/pets"]["samples"] == 6
    assert results["vtab/pets"]["value"] == pytest.approx((1 + 1 + 1 / 2) / 3)
    assert results["vtab/pets"]["metrics"]["top1"] == pytest.approx(5 / 6)
    assert "top5" not in results["vtab/pets"]["metrics"], "of four classes"
    # Each picture's nearest text is its own; "or blue" is a text of green and nearest to blue.
    assert results["flickr30k"]["metrics"]["i2t_r1"] == pytest.approx(2 / 3)
    assert results["flickr30k"]["metrics"]["t2i_r1"] == pytest.approx(3 / 4)
    assert results["flickr30k"]["value"] == pytest.approx((2 / 3 + 3 / 4) / 2)
    # Four different queries: both red pictures answer "red"; "blue" belongs to green.
    assert results["muge"]["value"] == pytest.approx(3 / 4)
    assert results["own/shades"]["value"] == pytest.approx(3 / 4)
    assert results["own/shades"]["metric"] == "top1"


def test_a_choice_is_a_set_of_captions(root: Path, alone: Comm) -> None:
    """What is equally near is not chosen."""
    samples = [("red", "a red one\na green one"), ("green", "or blue\nall green"), ("blue", "blue here\nred")]
    samples.append(("white", "white\nall white"))
    captioned(root / "wds_sugar_crepe-add_att", samples)
    found = measured(suite_job(("sugar_crepe", "xm3600"), root), alone)
    assert list(found) == ["sugar_crepe/add_att"]
    about = found["sugar_crepe/add_att"]
    assert (about["task"], about["metric_title"], about["samples"]) == ("choice", "right caption chosen", 4)
    assert about["value"] == about["metrics"]["choice_top1"] == 2 / 4
    captioned(root / "wds_sugar_crepe-add_obj", [("red", "red")])
    error = measured(suite_job(("sugar_crepe/add_obj",), root), alone)["sugar_crepe/add_obj"]["error"]
    assert "sample 000 has one caption: a choice takes the right one" in error


def test_a_set_that_cannot_be_opened_does_not_end_the_others(root: Path, alone: Comm) -> None:
    (root / "wds_vtab-pets_test" / "test" / "shard-000000.tar").write_bytes(b"no tar" * 200)
    job = suite_job(("vtab/pets", "flickr30k"), root, on_bad_sample="fail")
    results = measured(job, alone)
    assert "shard-000000.tar" in results["vtab/pets"]["error"]
    assert results["flickr30k"]["samples"] == 3
    classification(root / "wds_cars", [("red", 2)], ("red", "green"))
    error = measured(suite_job(("cars",), root), alone)["cars"]["error"]
    assert re.search(r"data set cars: .*class number 2, but classnames\.txt gives 2", error)


@pytest.mark.parametrize(("ranks", "which"), [(1, 0), (2, 0), (2, -1)])
def test_a_picture_that_cannot_be_read_costs_only_its_set(root: Path, ranks: int, which: int) -> None:
    """The first or the last picture of a set of classes and of one of captions, on one rank or on two."""
    broken = {"vtab/pets": "wds_vtab-pets_test", "flickr30k": "wds_flickr30k"}
    for folder in broken.values():
        spoil((root / folder / "test" / "shard-000000.tar"), which)
    job = suite_job((*broken, "muge"), root, on_bad_sample="fail", batch_size=1)

    for results in run_ranks(ranks, lambda comm: measured(job, comm)):
        assert results["muge"]["value"] == pytest.approx(3 / 4)
        for name, folder in broken.items():
            assert "value" not in results[name]
            assert folder in results[name]["error"]
    skips = suite_job(tuple(broken), root, batch_size=1)
    for results in run_ranks(ranks, lambda comm: measured(skips, comm)):
        for name, samples in (("vtab/pets", 5), ("flickr30k", 2)):
            about = results[name]
            assert (about["samples"], about["bad_samples"]) == (samples, {"not an image": 1})


def spoil(shard: Path, which: int) -> None:
    """Overwrites the beginning of one of the pictures of a shard."""
    content = shard.read_bytes()
    begins = [found.start() for found in re.finditer(rb"\x89PNG", content)]
    at = begins[which]
    shard.write_bytes(content[:at] + bytes(64) + content[at + 64 :])


def test_unknown_names_have_the_nearest_one(root: Path) -> None:
    for name, hint in (
        ("datacmop", "did you mean datacomp?"),
        ("vtab/pet", "did you mean vtab/pets?"),
        ("wilds/fmow", "it is not measured, because its metric"),
        ("\x1b[31mx", r'called "\\u001b\[31mx"'),
    ):
        with pytest.raises(InputError, match=hint if name[0] == "\x1b" else re.escape(hint)):
            find_sets(suite_job((name,), root).eval)


def test_a_suite_without_a_place_asks_for_the_key() -> None:
    with pytest.raises(InputError, match=r"eval\.suite\.root: give the folder .* wds_imagenet1k_test"):
        find_sets(suite_job(("imagenet",)).eval)
    with pytest.raises(InputError, match=r'eval\.suite\.folders: the suite "own" has no folder'):
        find_sets(suite_job(("own",)).eval)
    with pytest.raises(InputError, match="two folders are called x"):
        find_sets(suite_job(("own",), None, Path("a/x"), Path("b/x")).eval)


def test_sets_that_are_not_whole_say_what_they_lack(root: Path, tmp_path: Path) -> None:
    pets = root / "wds_vtab-pets_test"
    (root / "wds_vtab-dtd" / "test").mkdir(parents=True)
    (root / "wds_cars_test").mkdir()
    write_shards([("0", {"png": b"x", "cls": b"0"})], root / "wds_cars_test", 4)
    (pets / "test" / "nshards.txt").write_text("3\n")
    captioned(tmp_path / "odd", [("red", "red")])
    (tmp_path / "odd" / "dataset_type.txt").write_text("multilabel\n")
    job = suite_job(("vtab/pets", "vtab/dtd", "cars", "own"), root, tmp_path / "odd")
    whys = {each.row.name: each.why for each in find_sets(job.eval).missing}
    assert whys["vtab/pets"] == f"{pets}/test holds 2 shards, and nshards.txt says 3"
    assert "neither shards (*.tar) nor a folder for each class" in whys["vtab/dtd"]
    assert f"{root}/wds_cars_test/zeroshot_classification_templates.txt cannot be read" in whys["cars"]
    assert 'says "multilabel"' in whys["own/odd"]
    (pets / "test" / "nshards.txt").write_text("2\n")
    (pets / "zeroshot_classification_templates.txt").write_text("no place for it\n")
    (missing,) = find_sets(suite_job(("vtab/pets",), root).eval).missing
    assert "zeroshot_classification_templates.txt: 'no place for it': this template has no {}" in missing.why


def test_names_that_are_too_long_for_a_file_are_said(tmp_path: Path) -> None:
    long = class_folders(tmp_path / ("o" * 250), [("red", "red")])  # its name with _train is too long
    away = tmp_path / ("p" * 300)
    found = find_sets(suite_job(("own", "knn:own"), away, long, away).eval)
    whys = {each.row.name: each.why for each in found.missing}
    assert whys[f"own/{away.name}"] == f"there is no folder {away}"
    assert f"there is no folder {long / 'train'}" in whys[f"knn:own/{long.name}"]


def test_results_of_many_sets_have_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "job.toml").touch()
    model = tiny_job(model={"pretrained": str(tmp_path / "checkpoints" / "step-00000012" / "model.pt")}).model
    every = tuple(table().sets)
    for names in (every, every[:-1]):
        job = suite_job(names, tmp_path / "none").model_copy(update={"model": model})
        keep_suite(job, {}, [], table=False)
    written = list((tmp_path / "evaluations").iterdir())
    assert {tuple(json.loads(path.read_text())["names"]) for path in written} == {every, every[:-1]}
    assert all(path.name.endswith("-step-00000012.json") for path in written)


# The metrics of a suite are those of CLIP_benchmark's formulas, written again here over whole matrices.
# Both sides see the same features: a fixed projection of pictures of noise, and what a test gives of texts.

CLASSES = 9
PICTURES = 64
Array = NDArray[np.float64]


class Projects(nn.Module):
    """A model with image features by a random projection, and text features by a table."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.projection = torch.randn(3 * side * side, 16, generator=torch.Generator().manual_seed(3))
        self.texts: dict[str, Array] = {}

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        return nn.functional.normalize(images.flatten(1) @ self.projection, dim=1)

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        rows = torch.tensor(np.array(list(self.texts.values())))
        return nn.functional.normalize(rows[tokens[:, 0]].float(), dim=1)

    def tokens(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor([[list(self.texts).index(text)] for text in texts])


def projecting() -> tuple[Clip, Projects]:
    clip = untrained(tiny_job())
    side = clip.eval_transform(Image.new("RGB", (32, 32))).shape[-1]
    model = Projects(side)
    return replace(clip, model=model, tokenizer=model.tokens), model


def noise() -> list[bytes]:
    draw, files = np.random.default_rng(5), [io.BytesIO() for _ in range(PICTURES)]
    for file in files:
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "png")
    return [file.getvalue() for file in files]


def features(clip: Clip, pictures: Iterable[bytes]) -> Array:
    pixels = torch.stack([clip.eval_transform(Image.open(io.BytesIO(each))) for each in pictures])
    found: Array = clip.model.encode_image(pixels).double().numpy()  # type: ignore[operator]
    return found


def written(folder: Path, samples: Iterable[dict[str, bytes]]) -> None:
    (folder / "test").mkdir(parents=True)
    write_shards(((f"{n:03d}", members) for n, members in enumerate(samples)), folder / "test", 40)


def figures_of(root: Path, clip: Clip, name: str, ranks: int) -> dict[str, Any]:
    suite = {"names": (name,), "root": str(root)}
    job = tiny_job(eval={"batch_size": 10, "suite": suite}, data={"workers": 0, "max_bad_share": 0.1})
    results = [found for (found,) in run_ranks(ranks, lambda comm: measure_suite(clip, job, comm))]
    assert all({**each, "seconds": 0} == {**results[0], "seconds": 0} for each in results)
    return results[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_classification_equals_the_formulas_of_clip_benchmark(tmp_path: Path, ranks: int) -> None:
    """The classes have unequal numbers of pictures, and the last one has none."""
    pictures = noise()
    target = np.array([int(math.sqrt(number)) for number in range(PICTURES)])  # 1, 3, 5, ... of each class
    folder = tmp_path / "wds_vtab-pets_test"
    written(folder, ({"png": p, "cls": str(c).encode()} for p, c in zip(pictures, target, strict=True)))
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in "abcdefghi"))
    (folder / "zeroshot_classification_templates.txt").write_text("{c}\n")
    clip, model = projecting()
    images = features(clip, pictures)
    nearby = images[[(n * 7) % PICTURES for n in range(CLASSES)]]  # classes near some of the pictures
    model.texts = dict(zip("abcdefghi", nearby, strict=True))
    found = figures_of(tmp_path, clip, "vtab/pets", ranks)
    order = np.argsort(-(images @ nearby.T), axis=1, kind="stable")
    taken = order[:, 0]
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        balanced = balanced_accuracy_score(target, taken)
    assert found["metrics"] == pytest.approx(
        {
            "top1": np.mean(taken == target),
            "top5": np.mean([t in row[:5] for t, row in zip(target, order, strict=True)]),
            "mean_per_class_recall": balanced,
            "macro_f1": f1_score(target, taken, average="macro", labels=np.unique(target), zero_division=0),
        },
        abs=1e-6,
    )
    assert balanced != pytest.approx(found["metrics"]["top1"], abs=1e-3)
    assert (found["samples"], found["value"]) == (PICTURES, found["metrics"]["mean_per_class_recall"])


def captions_of(number: int, images: Array, model: Projects, count: int) -> list[str]:
    """Captions of a picture, whose features are somewhat near those of the picture."""
    draw, found = np.random.default_rng(number), [f"noise {number} and word {word}" for word in range(count)]
    for text in found:
        model.texts[text] = images[number] + 0.4 * draw.normal(size=16)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_choice_equals_the_formula_of_clip_benchmark(tmp_path: Path, ranks: int) -> None:
    """Each picture has two to four captions; one picture is broken."""
    pictures = noise()
    clip, model = projecting()
    images = features(clip, pictures)
    owned = [captions_of(n, images, model, 2 + n % 3) for n in range(PICTURES)]
    members = [{"png": p, "txt": "\n".join(t).encode()} for p, t in zip(pictures, owned, strict=True)]
    members[20]["png"] = b"broken"
    written(tmp_path / "wds_sugar_crepe-add_att", members)
    (tmp_path / "wds_sugar_crepe-add_att" / "dataset_type.txt").write_text("choice\n")
    right = []
    for number in (n for n in range(PICTURES) if n != 20):
        rows = np.array([model.texts[text] for text in owned[number]])
        right.append(int((rows @ images[number] / np.linalg.norm(rows, axis=1)).argmax()) == 0)
    assert 5 < sum(right) < len(right) - 5
    found = figures_of(tmp_path, clip, "sugar_crepe/add_att", ranks)
    assert (found["samples"], found["value"]) == (len(right), sum(right) / len(right))
    assert found["bad_samples"] == {"not an image": 1}


# kNN and linear probe: scikit-learn's own classifiers find the same, and suites measure by them.


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
        find_sets(suite_job(("knn:vtab/pet",), tmp_path).eval)

    def rows_of(*names: str) -> list[Any]:
        return [each.row for each in find_sets(suite_job(names, tmp_path / "none").eval).missing]

    assert {row.metric for row in rows_of("linear:datacomp")} == {"linear_top1"}
    assert all(not row.name.endswith("flickr30k") for row in rows_of("linear:datacomp"))
    assert [row.folder for row in rows_of("knn:vtab/pets", "vtab/pets")] == ["wds_vtab-pets"] * 2
