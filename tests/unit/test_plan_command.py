"""`clipship plan goodput`: what it prints, and the values that it takes from a run or a job."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.report_folders import restarted_run
from trainer.cli.main import main
from trainer.estimate import faults
from trainer.plan.goodput_values import values_of

CLUSTER = ("--nodes", "64", "--checkpoint-s", "5", "--restart-s", "60", "--mtbf-hours", "1000")


@pytest.fixture(autouse=True)
def _few_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a fifth of the faults: `test_goodput_plan.py` holds how exact the simulation is."""
    monkeypatch.setattr(faults, "_FAULTS", 400.0)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "goodput", *arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mtbf-hours", "inf"), "inf is no finite number"),
        (("--mtbf-hours", "1e-320"), "is not in the range"),
        (("--overhead-share", "nan"), "nan is no finite number"),
        (("--fault-times", "60", "--run-s", "inf"), "inf is no finite number"),
        (("--fault-times", ","), "--fault-times names no fault"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "goodput", *words]) == 2
    assert said in capsys.readouterr().err


def test_table_says_the_share_the_interval_and_what_spares_buy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "goodput", *CLUSTER, "--spares", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "nodes         64 and 1 spare"
    assert rows[1].startswith("faults        one in 1,000 h on a node (given): one in 15:37:30 in all; ")
    assert "              restart_s 1:00 (given)" in rows
    assert any(row.startswith("useful ") for row in rows)
    (interval,) = (row for row in rows if row.startswith("interval "))
    assert "Young 12:30, Daly 12:27" in interval
    spares = [row for row in rows if "work per allocated node" in row]
    names = [" ".join(row.split()[:2]) for row in spares]
    assert names == ["0 spares", "1 spare", "2 spares", "3 spares"]
    assert [row.endswith("(this plan)") for row in spares] == [False, True, False, False]


def test_json_has_all_figures_and_one_seed_gives_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    first = plan(capsys, *CLUSTER, "--seed", "3")
    assert first == plan(capsys, *CLUSTER, "--seed", "3")
    assert first != plan(capsys, *CLUSTER, "--seed", "4")
    assert first["useful_share"] + sum(first["lost_share"].values()) == pytest.approx(1, abs=1e-3)
    assert first["best_interval_s"] == pytest.approx(first["daly_s"], rel=0.1)
    shares = [row["useful_share"] for row in first["spares"]]
    assert shares == sorted(shares)
    assert first["plan"]["node_mtbf_s"] == 3_600_000


def test_given_fault_times_are_simulated_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--memory-share", "1", "--detect-s", "1", "--restart-s", "9", "--checkpoint-s", "0")
    found = plan(capsys, *arguments, "--fault-times", "60,130.5", "--fault-times", "200", "--run-s", "600")
    assert (found["faults"], found["run_s"]) == (3, 600)
    assert found["useful_share"] == pytest.approx((600 - 3 * 10 - 2 * 0.5) / 600, abs=1e-4)
    assert "best_interval_s" not in found
    assert main(["plan", "goodput", "--fault-times", "60"]) == 0
    assert "1 at given times in 2:00" in capsys.readouterr().out


def test_values_of_a_run_are_those_that_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = restarted_run(tmp_path / "run")
    (folder / "job.toml").write_text(
        'name = "run"\n[data]\nformat = "synthetic"\n[model]\nname = "ViT-B-32"\n'
        "[optim]\nglobal_batch_size = 512\nsteps = 2000\n[checkpoint]\nevery_steps = 50\n"
        "[recovery]\nmax_restarts = 3\nspare_nodes = 1\n"
    )
    with open(folder / "goodput.jsonl", "a") as times:  # of the last start
        times.write('{"event": "save", "step": 1100, "time": 90050.0}\n')
    values = {name: (value.value, value.source) for name, value in values_of(str(folder)).items()}
    assert values["step_s"] == (1.0, "measured")
    assert values["detect_s"] == (pytest.approx(70.4), "measured")
    assert values["restart_s"] == (pytest.approx(29.6), "measured")
    assert values["start_s"] == (60.0, "measured")
    assert values["overhead_share"] == (pytest.approx(45 / (45 + 860 + 195)), "measured")
    assert values["checkpoint_s"] == (0.0, "measured")
    assert values["spares"] == (1, "job")
    assert values["memory_share"] == (1.0, "job"), "recovery.keep_in_memory"
    assert values["interval_s"] == (50.0, "job")
    assert "node_mtbf_s" not in values, "one fault says little about the time between faults"
    found = plan(capsys, str(folder), "--restart-s", "5")
    assert (found["plan"]["restart_s"], found["plan"]["detect_s"]) == (5, pytest.approx(70.4))


def test_values_of_a_job_that_has_no_run_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    assert main(["init", "--preset", "slurm", str(job)]) == 0
    capsys.readouterr()
    assert plan(capsys, str(job))["plan"]["nodes"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-run",), "no-such-run is not a run"),
        (("--min-nodes", "3", "--nodes", "2"), "--min-nodes 3 is more than the 2 nodes"),
        (("--fault-times", "soon"), "fault 'soon': give seconds since the begin"),
        (("--run-s", "60"), "give both, or none"),
        (("--nodes", "0"), "--nodes"),
    ],
)
def test_bad_input_is_one_message(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["plan", "goodput", *arguments]) == 2
    assert message in capsys.readouterr().err
