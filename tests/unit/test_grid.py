"""The grid of `clipship sweep`: combinations of values, and names of runs."""

import pytest

from trainer.errors import InputError
from trainer.sweep import trials


@pytest.mark.parametrize(
    ("grids", "said"),
    [
        (["optim.lr"], "give KEY=VALUE,VALUE"),
        (["=1,2"], "give KEY=VALUE,VALUE"),
        (["seed=1,,2"], "a value between two commas is missing"),
        (["seed="], "a value between two commas is missing"),
        (["data.train=['a,b"], "a bracket or quote is open"),
        (["seed=0", "seed=1"], "is given twice"),
        (["name=a,b"], "a folder of its own"),
        (
            [f"seed={','.join(map(str, range(30)))}", f"optim.steps={','.join(map(str, range(30)))}"],
            "900 runs",
        ),
    ],
)
def test_what_is_no_grid_is_refused(grids: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        trials.combinations(grids)


def test_two_runs_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match="would be named run-seed-1"):
        trials.names("run", trials.combinations(["seed=1,1"]))
