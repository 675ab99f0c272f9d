"""`clipship eval RUN --suite NAME` on a real run: the table, the JSON, any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import TinyRun, clipship
from tests.support.suites import captioned, class_folders, classification


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, a public data set of each task, and an own one."""
    folder = tmp_path_factory.mktemp("suite")
    own = {"names": ["own"], "root": "root", "folders": ["shades"]}
    TinyRun(folder).write(optim={"steps": 2}, eval={"suite": own})
    colours = ("red", "green", "blue", "white")
    classification(
        folder / "root" / "wds_vtab-pets_test", [(colours[n % 4], n % 3) for n in range(11)], colours
    )
    captioned(folder / "root" / "wds_flickr30k", [(colours[n % 4], f"one\nof {n}") for n in range(7)])
    class_folders(folder / "shades", [(colour, colour) for colour in colours])
    clipship("run", "tiny.toml", cwd=folder)
    return folder


def evaluated(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    ran = clipship("eval", "runs/tiny", *words, cwd=folder)
    (line,) = ran.stdout.splitlines()
    return json.loads(line), ran.stderr


def values(found: dict[str, Any]) -> dict[str, Any]:
    return {
        each["name"]: (each["value"], each["samples"], each["metrics"]) for each in found["suite"]["sets"]
    }


def test_a_suite_prints_a_table_and_leaves_json_whatever_the_number_of_ranks(folder: Path) -> None:
    suite = ("--suite", "vtab", "--suite", "flickr30k")
    found, said = evaluated(folder, *suite)
    assert list(values(found)) == ["vtab/pets", "flickr30k"]
    assert found["suite"]["mean"] == pytest.approx(sum(value for value, *_ in values(found).values()) / 2)
    assert len(found["suite"]["missing"]) == 18
    assert "not measured: vtab/dtd: there is no folder" in said
    assert "from: https://huggingface.co/datasets/djghosh/wds_vtab-dtd_test" in said
    table = said[said.index("data set  ") :].splitlines()
    assert table[0].split() == ["data", "set", "metric", "value", "samples", "seconds"]
    assert table[1].startswith("vtab/pets             mean per-class recall")
    assert table[3].startswith("mean of 2 of 20 sets")
    evaluations = folder / "runs" / "tiny" / "evaluations"
    written = json.loads((evaluations / "vtab+flickr30k-step-00000002.json").read_text())
    assert {**written["sets"][0], "seconds": 0} == {**found["suite"]["sets"][0], "seconds": 0}
    assert (written["step"], written["names"]) == (2, ["vtab", "flickr30k"])
    several, _ = evaluated(folder, *suite, "--nproc", "3", "--json")
    assert several["world_size"] == 3
    assert values(several) == values(found)


def test_without_options_the_jobs_suite_is_measured_as_zero_shot_measures_it(folder: Path) -> None:
    found, said = evaluated(folder)
    ((name, (value, samples, _)),) = values(found).items()
    assert (name, samples) == ("own/shades", 4)
    assert "own/shades" in said
    alone, said = evaluated(folder, "--zero-shot", "shades")
    assert (alone["zero_shot_top1"], "suite" in alone) == (value, False)


def test_nothing_on_disk_is_an_error_before_anything_starts(folder: Path) -> None:
    words = ("--suite", "imagenet", "--suite-root", "elsewhere")
    ran = clipship("eval", "runs/tiny", *words, cwd=folder, code=2)
    assert "nothing of imagenet is on disk, and nothing is downloaded" in ran.stderr
    assert f"there is no folder {folder}/elsewhere/wds_imagenet1k_test" in ran.stderr
    assert "importing torch" not in ran.stderr


def test_check_names_the_sets_on_disk(folder: Path) -> None:
    ran = clipship("check", "tiny.toml", "--set", 'eval.suite.names=["own", "retrieval"]', cwd=folder)
    assert "own, retrieval: 2 of 6 sets on disk: flickr30k, own/shades" in ran.stdout + ran.stderr
    wrong = clipship("check", "tiny.toml", "--set", 'eval.suite.names=["retreival"]', cwd=folder, code=2)
    assert "did you mean retrieval?" in wrong.stderr
