"""The grid of `clipship sweep`: combinations of values, and names of runs."""

from pathlib import Path

import pytest

from tests.support.jobs import tiny_job
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.sweep import trials


def test_each_value_meets_each_other_value_and_brackets_and_quotes_hold_commas() -> None:
    found = [" ".join(row) for row in trials.combinations(["optim.lr=1e-4,3e-4", "seed=0, 1"])]
    assert found == [f"optim.lr={lr} seed={seed}" for lr in ("1e-4", "3e-4") for seed in (0, 1)]
    grid = ["data.train=['a.tar', 'b.tar'],'{00..01},c.tar'"]
    assert trials.combinations(grid) == [("data.train=['a.tar', 'b.tar']",), ("data.train='{00..01},c.tar'",)]


@pytest.mark.parametrize(
    ("grids", "said"),
    [
        (["optim.lr"], "give KEY=VALUE,VALUE"),
        (["seed=1,,2"], "a value between two commas is missing"),
        (["data.train=['a,b"], "a bracket or quote is open"),
        (["seed=0", "seed=1"], "is given twice"),
        (["name=a,b"], "a folder of its own"),
        ([f"{key}={','.join(map(str, range(30)))}" for key in ("seed", "optim.steps")], "900 runs"),
    ],
)
def test_what_is_no_grid_is_refused(grids: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        trials.combinations(grids)


def test_a_name_is_safe_as_a_folder_and_no_other_runs() -> None:
    rows = [("data.train=/a/b c.tar", "seed=0"), ("data.train=../x", "seed=1")]
    assert trials.names("run", rows) == ["run-train--a-b-c.tar-seed-0", "run-train-..-x-seed-1"]
    with pytest.raises(InputError, match="would be named run-seed-1"):
        trials.names("run", trials.combinations(["seed=1,1"]))


def test_runs_of_a_job_whose_name_reads_as_toml_have_folders_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(dump_job(tiny_job().model_copy(update={"name": '"x"#1'})))
    found = trials.find_sweep(path, (), ["seed=0,1"], None).trials
    assert [trial.job.name for trial in found] == ['"x"#1-seed-0', '"x"#1-seed-1']
    assert [trial.folder.name for trial in found] == [trial.name for trial in found]
