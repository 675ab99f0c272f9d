"""A suite of tiny data sets with known answers: what is found on disk, measured, kept and said."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.suites import captioned, class_folders, classification, colour_clip, suite_job
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.data.pack import write_shards
from trainer.errors import InputError
from trainer.evaluate.suite import measure_suite
from trainer.evaluate.suite_data import find_sets, keep_suite, table

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
