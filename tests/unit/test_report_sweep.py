"""The page about a sweep, on run folders as ranks leave them."""

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.processes import ended_on_failure
from tests.support.report_folders import failed_run, long_run
from trainer.cli import main as cli
from trainer.report.compare import MOST_RUNS
from trainer.run.sweep_record import SweepRecord, read_sweep, record_sweep, sweep_folder

Capture = pytest.CaptureFixture[str]


def evaluated(folder: Path, top1: float) -> None:
    long_run(folder, steps=100, every=50)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 100, "zero_shot_top1": top1, "zero_shot_samples": 50}) + "\n")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Folder of a sweep of four runs: two are done, one has failed, one has not begun."""
    runs = tmp_path / "runs"
    evaluated(runs / "a-lr-1", 0.25)
    evaluated(runs / "a-lr-2", 0.75)
    failed_run(runs / "a-lr-3")
    folder = sweep_folder(runs, "a")
    record_sweep(folder, SweepRecord("a", {f"a-lr-{lr}": {"optim.lr": f"{lr}e-4"} for lr in (1, 2, 3)}))
    record_sweep(folder, SweepRecord("a", {"a-lr-4<b>": {"optim.lr": "4e-4", "seed": "1"}}))
    return folder


RECORDS = """
import sys
from pathlib import Path
from trainer.run.sweep_record import SweepRecord, record_sweep
print("ready", flush=True)
sys.stdin.readline()
for seed in range(20):
    record_sweep(Path(sys.argv[1]), SweepRecord("a", {f"a-{sys.argv[2]}-{seed}": {}}))
"""


def test_sweeps_of_one_job_that_start_together_are_all_recorded(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path, "a")
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                ended_on_failure(
                    subprocess.Popen(
                        [sys.executable, "-c", RECORDS, str(folder), name],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                    )
                )
            )
            for name in "bcd"
        ]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
    assert len(read_sweep(folder).runs) == 60


def table(page: str) -> list[list[str]]:
    """Rows of the page's table of results, a mark before what is highlighted."""
    rows = re.findall(r"<tr>(.*?)</tr>", page.partition("<h2>Results</h2>")[2].partition("</table>")[0])
    return [
        [
            ("* " if 'class="own"' in attributes else "") + re.sub(r"<[^>]*>", "", text)
            for attributes, text in re.findall(r"<t[hd]([^>]*)>(.*?)</t[hd]>", row)
        ]
        for row in rows
    ]


def test_each_run_has_a_row_with_its_values_and_results(sweep: Path, capsys: Capture) -> None:
    assert cli.main(["report", str(sweep)]) == 0
    assert capsys.readouterr().out == f"{sweep / 'sweep.html'}\n"
    page = (sweep / "sweep.html").read_text()
    title, first, second, third, fourth = table(page)
    assert title[:5] == ["run", "optim.lr", "seed", "state", "step"]
    at = title.index("zero-shot top-1")
    assert (first[:4], first[at]) == (["a-lr-1", "1e-4", "", "done"], "25.0 %")
    assert (second[1], second[at]) == ("2e-4", "* 75.0 %")
    assert third[3].startswith("failed")
    assert fourth[:4] == ["a-lr-4&lt;b&gt;", "4e-4", "1", "not begun"]
    assert not [name for name in title if "samples" in name and name != "samples/s"]  # counts


def test_a_sweep_of_many_runs_draws_the_curves_of_the_best(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    names = [f"a-seed-{seed}" for seed in range(MOST_RUNS + 2)]
    for place, name in enumerate(names):
        evaluated(runs / name, 0.05 * place)
    folder = sweep_folder(runs, "a")
    record_sweep(folder, SweepRecord("a", {name: {"seed": name[-1]} for name in names}))
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "sweep.html").read_text()
    assert f"Curves of the {MOST_RUNS} best runs." in page
    drawn = page.partition("<h2>Training</h2>")[2]
    assert [name for name in names if name in drawn] == names[2:]


def test_where_the_runs_are_seen_a_list_makes_the_record_that_the_report_needs(
    tmp_path: Path, capsys: Capture
) -> None:
    """Runs on a cluster were submitted on a machine that has the record and not their folders."""
    job = tmp_path / "job.toml"
    job.write_text('name = "a"\n[data]\nformat = "synthetic"\n[optim]\nglobal_batch_size = 16\nsteps = 100\n')
    words = ["sweep", str(job), "--grid", "seed=0,1", "--list"]
    assert cli.main(words) == 0
    assert "clipship report" not in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    long_run(tmp_path / "runs" / "a-seed-1", steps=100, every=50)
    assert cli.main(words) == 0
    folder = sweep_folder(tmp_path / "runs", "a")
    assert f"clipship report {folder}" in capsys.readouterr().err
    assert cli.main(["report", str(folder)]) == 0
    assert [row[:3] for row in table((folder / "sweep.html").read_text())[1:]] == [
        ["a-seed-0", "0", "not begun"],
        ["a-seed-1", "1", "done"],
    ]


def test_a_sweep_is_named_alone_and_needs_its_record(sweep: Path, capsys: Capture) -> None:
    assert cli.main(["report", str(sweep), str(sweep.parent / "a-lr-1")]) == 2
    assert "it has a page of its own, so name it alone" in capsys.readouterr().err
    (sweep / "sweep.json").write_text("{")
    assert cli.main(["report", str(sweep)]) == 2
    assert "sweep.json cannot be read" in capsys.readouterr().err


def test_names_in_a_record_lead_to_no_other_folder(tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path, "a")
    record_sweep(folder, SweepRecord("a", {"../../etc": {}, "a-1": {}, "..": {}}))
    assert list(read_sweep(folder).runs) == ["a-1"]
