"""`clipship report`: whatever a run folder holds, there is a page, and it says what the folder says."""

import json
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.command_line import clipship
from tests.support.report_folders import failed_run, long_run, timed_out_run
from tests.support.report_pages import LOSS, called, charts, shown, state, table, tiles, written
from trainer.cli.main import main
from trainer.data import store
from trainer.report.board import Text, row, write_board

KEYS = (
    "loss", "lr", "samples", "epoch", "samples_per_s", "compute_s", "data_s", "zero_shot_top1", "checkpoint",
    "checkpoint_bytes", "write_s", "reason", "exit_code", "steps", "seconds", "world_size", "rank", "node",
    "details", "late", "ranks", "stack", "image", "texts", "scores", "own", "names", "step", "ema", "sets",
    "missing", "name", "title", "metric", "value", "metrics", "gpu_joules",
)  # fmt: skip
BOARD_FILE = "retrieval_board.json"
HOSTILE = '<script>alert("1")</script>'
Capture = pytest.CaptureFixture[str]


def values(page: str) -> dict[str, str]:
    return {label: value for label, (value, _) in tiles(page).items()}


def ended(page: str) -> str:
    """The word beside the run's name."""
    (word,) = re.findall(r'<h1>.*?<span class="status [a-z]+">(.*?)</span>', page)
    return str(word)


def environment_rows(page: str) -> list[list[str]]:
    return table(page.partition("<h2>Environment</h2>")[2])


def test_finished_run_is_done_with_its_numbers_in_front(tmp_path: Path) -> None:
    page = shown(long_run(tmp_path / "run", steps=2000))
    assert ended(page) == "done"
    found = tiles(page)
    assert (found["steps"], found["samples"]) == (("2,000", "of 2,000"), ("1.024 M", "epoch 21"))
    assert (found["time"], found["GPU-hours"]) == (("41:00", "4 ranks"), ("2.73", "one GPU per rank"))
    assert "HF_TOKEN" in page
    assert "a-secret" not in page, "of the environment"
    assert shown(tmp_path / "run") == page


def test_stopped_run_can_go_on(tmp_path: Path) -> None:
    folder = failed_run(tmp_path / "run")
    record = json.loads((folder / "exit.json").read_text())
    (folder / "exit.json").write_text(json.dumps({**record, "exit_code": 75, "reason": "asked to stop"}))
    page = shown(folder)
    assert ended(page) == "stopped"
    assert "asked to stop. The same command resumes" in page


BROKEN = (b"", b"{", b"null", b'"\xff\x00"', b"[1, null, {}]", b'{"ranks": 3, "late": 4, "rank": "x"}')


@pytest.mark.parametrize("content", BROKEN)
def test_file_that_is_broken_does_not_hide_the_others(tmp_path: Path, content: bytes) -> None:
    folder = timed_out_run(tmp_path / "run")
    names = ("job.toml", *(f"{name}.json" for name in ("result", "exit", "diagnosis", "environment")))
    for name in (*names, "metrics.jsonl", BOARD_FILE):
        whole = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        (folder / name).write_bytes(content)
        page = shown(folder)
        assert "<h2>Training</h2>" in page
        assert "node-1" in page
        assert content != b"{" or name == "metrics.jsonl" or f"{name} cannot be read" in page
        (folder / name).write_bytes(whole)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.integers(min_value=10**400, max_value=10**401),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
)
a_line = st.fixed_dictionaries(
    {"step": st.integers(0, 4)}, optional={key: junk for key in KEYS if key != "step"}
)


@settings(max_examples=20, deadline=None)
@given(st.lists(a_line, max_size=4), st.dictionaries(st.sampled_from(KEYS), junk))
def test_known_keys_with_values_of_any_kind_make_a_page(
    events: list[dict[str, Any]], content: dict[str, Any]
) -> None:
    with TemporaryDirectory() as name:
        folder = written(Path(name, "run"), *events)
        (folder / "job.toml").write_text("[optim]\nsteps = []\nloss = {}\n[model]\nname = 7")
        (folder / "evaluations").mkdir()
        suite = {**SUITE, "sets": [content, PETS], "missing": events}
        (folder / "evaluations" / "a.json").write_text(json.dumps(suite))
        for file in ("result.json", "exit.json", "diagnosis.json", "evaluations/b.json"):
            (folder / file).write_text(json.dumps(content))
        for file in ("environment.json", BOARD_FILE):
            (folder / file).write_text(json.dumps(events))
        page = shown(folder)
        assert "<h2>Training</h2>" in page
        assert all(0 <= float(end) <= 100 for end in re.findall(r"M0 0H([\d.]+)V10H0Z", page))


def test_lines_of_metrics_are_sorted_out_by_what_they_say(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "loss": 3.0, "lr": 0.1, "generation": 2}',
        '{"step": 2, "loss": NaN}',
        '{"step": 2, "zero_shot_top1": 0.5, "generation": 2}',
        '{"step": 2, "checkpoint": "step-00000002", "checkpoint_bytes": 9, "write_s": 0.1}',
        *('{"step": true, "loss": 1}', '{"loss": 1}', "7", '{"step": 3, "lo'),
    ]
    (written(tmp_path) / "metrics.jsonl").write_text("\n".join(lines))
    page = shown(tmp_path)
    assert charts(page)["Loss"].hover["head"] == ["step 1", "step 2"]
    assert table(page, "metrics")[1:] == [["zero-shot top-1", "50.0 %", "50.0 % at step 2"]]
    assert table(page, "checkpoints")[1:] == [["2", "step-00000002", "9 bytes", "100 ms"]]
    assert "metrics.jsonl: 4 of 8 lines cannot be read" in page
    assert "The loss is NaN or infinite at step 2." in page


def test_best_value_is_named_where_the_last_is_worse_and_one_that_only_the_result_has_is_shown(
    tmp_path: Path,
) -> None:
    page = shown(long_run(tmp_path / "run", steps=40, every=20))
    assert ["zero-shot top-1", "70.0 %", "70.0 % at step 40"] in table(page, "metrics")
    lines = ({"step": 1, "zero_shot_top1": 0.75}, {"step": 2, "zero_shot_top1": 0.5})
    found = tiles(shown(written(tmp_path, *lines)))
    assert found == {"zero-shot top-1": ("50.0 %", "best 75.0 % at step 1")}


def test_environment_has_one_line_a_key_and_marks_what_should_not_differ(tmp_path: Path) -> None:
    page = shown(long_run(tmp_path / "run"))
    assert environment_rows(page) == [
        ["node", "node-0 ranks 0-1 node-1 ranks 2-3"],
        ["backend", "torch (nccl)"],
        ["device", "cuda:0 ranks 0, 2 cuda:1 ranks 1, 3"],
        ["torch", "2.14.1 ranks 0-2 2.14.0 rank 3"],
        ["numpy", "2.4.6"],
    ]
    assert re.findall(r'<tr class="differs"><th>(\w+)', page) == ["torch"]
    many = [{"rank": str(rank), "node": f"n{rank // 8}"} for rank in range(1024)]
    (tmp_path / "run" / "environment.json").write_text(json.dumps(many))
    ((_, nodes),) = environment_rows(shown(tmp_path / "run"))
    assert nodes.endswith("n11 ranks 88-95 and 116 more")


def test_hostile_text_is_escaped_wherever_it_comes_from(tmp_path: Path) -> None:
    folder = failed_run(
        tmp_path / "run", name=HOSTILE, reason=HOSTILE, details=HOSTILE, log=f"\x1b[31m{HOSTILE}\x00"
    )
    (folder / "environment.json").write_text(json.dumps([{"rank": "0", HOSTILE: HOSTILE}, {"rank": "1"}]))
    ranks = [dict.fromkeys(("rank", "node", "state", "stack"), HOSTILE)]
    (folder / "diagnosis.json").write_text(json.dumps({"late": [0], "ranks": ranks}))
    written(folder, {"step": 1, HOSTILE: 0.1}, {"step": 2, HOSTILE: 0.2}, {"step": 1, "checkpoint": HOSTILE})
    restart = {"generation": 2, "cause": HOSTILE, "rank": 1, "node": "n1", "from_step": 4, "seconds": None}
    (folder / "restarts.json").write_text(json.dumps({"restarts": [restart]}))
    write_board(folder, [row(Image.new("L", (4, 4)), [Text(HOSTILE, 1.0, own=True)])])
    (entry,) = json.loads((folder / BOARD_FILE).read_text())
    (folder / BOARD_FILE).write_text(json.dumps([{**entry, "image": 'x" onerror="alert(1)'}]))
    page = shown(folder)
    assert "<script>alert" not in page
    assert 'base64,x&#34; onerror=&#34;alert(1)"' in page
    assert page.count("&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;") >= 15
    assert not {"\x1b", "\x00"} & set(page)
    (found,) = table(page, "restarts")[1:]
    assert (found[1], found[3], found[7]) == ("", HOSTILE, "none yet"), "without the times of the run"


def test_unfinished_run_has_the_time_left_at_the_speed_of_its_last_records(tmp_path: Path) -> None:
    """Without the first step after each new start."""
    folder = long_run(tmp_path / "run", steps=1000, every=100, finished=False)
    took = {1: 90.5, 900: 0.5, 901: 60.5, 910: 0.5}
    written(folder, *({**LOSS, "step": n, "step_s": s, "samples_per_s": 50 / s} for n, s in took.items()))
    begins = [
        {"event": "begin", "start": start, "from_step": step, "time": 1000.0 + step}
        for start, step in (("a", 0), ("b", 900))
    ]
    written(folder, *begins, name="goodput.jsonl")
    assert tiles(shown(folder))["time left"] == ("0:45", "at its last speed")
    assert state(folder)["samples_per_s"] == 100.0


def test_gpu_hours_count_each_start_and_generation_with_the_ranks_that_it_had(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run", steps=40)
    lines = [
        {"event": "begin", "start": "a", "generation": 1, "ranks": 8, "began": 100.0, "time": 200.0},
        {"event": "restart", "start": "a", "generation": 2, "ranks": 6, "time": 1000.0, "step": 2},
        {"event": "begin", "start": "a", "generation": 2, "began": 100.0, "time": 1100.0},
        {"event": "end", "start": "a", "exit_code": 75, "time": 1500.0},
        {"event": "begin", "start": "b", "generation": 1, "began": 5000.0, "time": 5010.0},
        {"event": "end", "start": "b", "exit_code": 0, "time": 5100.0},
    ]
    written(folder, *lines, name="goodput.jsonl")
    found = state(folder)
    assert found["gpu_hours"] == pytest.approx((8 * 900 + 6 * 500 + 4 * 100) / 3600), "the last had four"
    assert found["taken_s"] == 1500


@pytest.mark.parametrize(
    ("joules", "told"), [(0.0, None), (1800, "0.5 Wh"), (9e6, "2.5 kWh"), (7.2e9, "2 MWh")]
)
def test_energy_is_the_sum_of_the_records(tmp_path: Path, joules: float, told: str | None) -> None:
    lines = [{**LOSS, "step": step, "gpu_joules": joules / 2} for step in (1, 2)]
    assert values(shown(written(tmp_path, *lines))).get("energy of GPUs") == told


PETS = {
    "name": "vtab/pets", "title": "Oxford-IIIT Pet", "metric": "mean_per_class_recall",
    "metric_title": "mean per-class recall", "value": 0.75, "samples": 3669, "seconds": 1.0,
    "metrics": {"top1": 0.5, "mean_per_class_recall": 0.75},
}  # fmt: skip
SUITE = {
    "names": ["vtab", "cars"],
    "step": 300,
    "ema": False,
    "sets": [
        PETS,
        {**PETS, "title": "<b>Other</b>", "value": 0.25},
        {"name": "cars", "error": "0 is damaged"},
    ],
    "missing": [{"name": "vtab/dtd", "why": "there is no folder x", "source": "words"}],
}


def with_suites(folder: Path, *files: dict[str, Any]) -> Path:
    (long_run(folder, steps=40) / "evaluations").mkdir()
    for number, content in enumerate(files):
        (folder / "evaluations" / f"{number}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("value", [None, "0.5", True, float("nan"), 1.5, 10**400])
def test_what_is_no_share_gets_no_bar(tmp_path: Path, value: Any) -> None:
    suite = {**SUITE, "sets": [PETS, {**PETS, "value": value}]}
    assert len(table(shown(with_suites(tmp_path / "run", suite)), "suite")) == 3


def test_command_writes_into_the_run_folder_and_prints_the_path(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    assert called("report", str(folder)) == f"{folder / 'report.html'}\n"
    address = f"memory://{tmp_path.name}/page.html"
    assert called("report", str(folder), "--output", address) == f"{address}\n"
    assert store.read(address) == shown(folder).encode() == (folder / "report.html").read_bytes()
    store.remove(address)
    assert list(tmp_path.rglob("*.partial")) == []


@pytest.mark.parametrize(
    ("run", "output", "message"),
    [
        ("no", "o.html", "no is not a run: give a run folder, a job file, or the name of a run in ./runs"),
        ("empty", "o.html", "empty is not a run: "),
        ("run", "no/o.html", "cannot be written: No such file or directory; choose another file with"),
        ("run", "empty", "cannot be written: Is a folder"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    tmp_path: Path, run: str, output: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    long_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert message in " ".join(
        clipship("report", tmp_path / run, "--output", tmp_path / output, code=2).err.split()
    )
    assert sorted(tmp_path.rglob("*")) == before


# `clipship report RUN1 RUN2 ...`: curves over each other, and what differs.


def test_page_has_a_curve_of_each_run_and_the_keys_that_differ(tmp_path: Path) -> None:
    one, two = long_run(tmp_path / "one"), long_run(tmp_path / "two", steps=1200)
    page = shown(one, two)
    assert page.count('class="line c2"') > 6
    assert table(page, "differences") == [["", "one", "two"], ["optim.steps", "2000", "1200"]]
    assert "Loss over samples" not in page
    job = two / "job.toml"
    job.write_text(job.read_text().replace("512", "1024"))
    assert charts(shown(one, two))["Loss over samples"].hover["head"][-1] == "1,024,000 samples"


def test_empty_unfinished_and_equal_runs_are_compared_too(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one"), long_run(tmp_path / "two", finished=False)
    (one / "job.toml").write_text("not [ toml")
    page = shown(one, two)
    assert "one: job.toml cannot be read" in page
    assert "not finished" in page
    page = shown(one, written(tmp_path / "three"))
    assert "No step has been logged yet." in page
    assert "Job, data and environment are equal." in page


def test_hostile_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    one = failed_run(tmp_path / "one", name=HOSTILE)
    two = long_run(tmp_path / f"two {HOSTILE.replace('/', '')}")
    (two / "environment.json").write_text(json.dumps([{"rank": "0", HOSTILE: HOSTILE}]))
    written(two, *({"step": step, HOSTILE: step / 1000} for step in (1, 2)))
    page = shown(one, two)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_command_writes_beside_the_first_run_and_tells_runs_of_one_name_apart(tmp_path: Path) -> None:
    runs = [written(tmp_path / name / "run", LOSS) for name in ("one", "two")]
    assert called("report", *map(str, runs)) == f"{tmp_path / 'one' / 'comparison.html'}\n"
    page = (tmp_path / "one" / "comparison.html").read_text()
    assert charts(page)["Loss"].legend == ["one/run", "two/run"]
    assert page == shown(*runs)


def test_too_many_runs_and_one_run_twice_are_refused(tmp_path: Path) -> None:
    runs = [str(written(tmp_path / str(number), LOSS)) for number in range(9)]
    too_many, twice = "9 runs are too many for one page: give at most 8", "a run is named twice"
    for folders, said in ((runs, too_many), ([runs[0], f"{runs[0]}/."], twice)):
        assert said in clipship("report", *folders, code=2).err
    assert called("report", *runs[1:])


# `clipship report RUN --watch`: the page is kept up to date until the run ends.

EVERY_S = 5.0


@pytest.mark.parametrize("interrupted", [False, True])
def test_page_is_written_until_the_run_ends_and_loads_itself_again_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Also where Ctrl-C ends the watch before the run does."""
    folder = long_run(tmp_path / "run", steps=100, every=50, finished=False)
    waits, pages = [], []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        pages.append((folder / "report.html").read_text())
        if len(waits) == 2 and interrupted:
            raise KeyboardInterrupt
        if len(waits) == 2:
            (folder / "result.json").write_text('{"reason": "done"}')

    monkeypatch.setattr(time, "sleep", wait)
    printed = clipship("report", folder, "--watch", code=130 if interrupted else 0)
    assert printed.out == f"{folder / 'report.html'}\n"
    assert "kept up to date until the run ends" in printed.err
    assert waits == [EVERY_S, EVERY_S]
    for page in pages:
        assert 'data-reload="5.0"' in page
        assert "location.reload" in page
    last = (folder / "report.html").read_text()
    assert "data-reload" not in last
    assert "location.reload" not in last
    assert last == shown(folder)


def test_a_run_that_waits_in_a_queue_is_waited_for(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "queued"
    submitted = {"to": "slurm", "id": "7", "at": "2026-01-01T00:00:00+00:00", "details": {}}
    (folder / "artefacts").mkdir(parents=True)
    (folder / "artefacts" / "submission.json").write_text(json.dumps(submitted))
    waits: list[float] = []

    def start(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            failed_run(folder)

    monkeypatch.setattr(time, "sleep", start)
    assert main(["report", str(folder)]) == 2, "there is nothing to show"
    assert "has no job.toml" in capsys.readouterr().err
    assert main(["report", str(folder), "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{folder / 'report.html'}\n"
    assert f"no rank has started yet: {folder}." in printed.err
    assert waits == [EVERY_S, EVERY_S]
    (tmp_path / "other").mkdir()
    assert main(["report", str(tmp_path / "other"), "--watch"]) == 2, "a folder that is no run"
    assert "is not a run: " in capsys.readouterr().err
