"""`clipship report`: whatever a run folder holds, there is a page, and it says what the folder says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.report_folders import failed_run, long_run, restarted_run, timed_out_run
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
    expected = {
        "steps": ("2,000", "of 2,000"),
        "samples": ("1.024 M", "epoch 21"),
        "zero-shot top-1": ("70.0 %", "at step 2,000"),
        "image to text R@1": ("45.0 %", "at step 2,000"),
        "time": ("41:00", "4 ranks"),
        "GPU-hours": ("2.73", "one GPU per rank"),
    }
    assert tiles(page).items() >= expected.items()
    assert "No step has been logged yet" in shown(written(tmp_path / "empty"))
    for absent in ("first line of rank", "<h2>Time</h2>", "<h2>Suite", "time left"):
        assert absent not in page
    assert "HF_TOKEN" in page
    assert "a-secret" not in page, "of the environment"
    assert shown(tmp_path / "run") == page


def test_unfinished_run_says_so_and_shows_rank_0s_last_lines(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run", finished=False)
    (folder / "logs" / "rank-00000.log").write_text("".join(f"line {n}\n" for n in range(100_000)))
    page = shown(folder)
    assert ended(page) == "not finished"
    assert page.count("<summary>Rank ") == 1
    assert re.findall(r"line \d+", page) == [f"line {n}" for n in range(99_960, 100_000)]


def test_failed_run_names_the_rank_its_reason_its_trace_and_its_last_words(tmp_path: Path) -> None:
    page = shown(failed_run(tmp_path / "run"))
    assert ended(page) == "failed, exit code 1"
    for words in ("rank 2 on node-1: ValueError: no such thing", "Traceback", "last words"):
        assert words in page
    assert re.findall(r"<summary>Rank (\d+)", page) == ["2"]


def test_timed_out_run_shows_every_rank_with_the_late_one_first(tmp_path: Path) -> None:
    page = shown(timed_out_run(tmp_path / "run"))
    assert ended(page) == "timed out"
    assert [rank[0] for rank in table(page.partition("What each rank did")[2])] == [
        "rank", "1 (late)", "0", "2", "3",
    ]  # fmt: skip
    assert re.findall(r"Python stack of rank (\d)", page) == ["1"]


def test_stopped_run_can_go_on(tmp_path: Path) -> None:
    folder = failed_run(tmp_path / "run")
    record = json.loads((folder / "exit.json").read_text())
    (folder / "exit.json").write_text(json.dumps({**record, "exit_code": 75, "reason": "asked to stop"}))
    page = shown(folder)
    assert ended(page) == "stopped"
    assert "asked to stop. The same command resumes" in page


BROKEN = (
    b"", b"{", b"[[[", b"null", b"7", b'"\xff\x00"', b"[1, null, {}]", b'{"ranks": 3, "late": 4, "rank": "x"}'
)  # fmt: skip


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
        if content == b"{" and name != "metrics.jsonl":
            assert f"{name} cannot be read" in page
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
        '{"step": 2, "generation": 2}',
        '{"step": true, "loss": 1}',
        '{"loss": 1}',
        "7",
        '{"step": 3, "lo',
    ]
    (written(tmp_path) / "metrics.jsonl").write_text("\n".join(lines))
    page = shown(tmp_path)
    assert charts(page)["Loss"].hover["head"] == ["step 1", "step 2"]
    assert table(page, "metrics")[1:] == [["zero-shot top-1", "50.0 %", "50.0 % at step 2"]]
    assert table(page, "checkpoints")[1:] == [["2", "step-00000002", "9 bytes", "100 ms"]]
    assert "metrics.jsonl: 4 of 9 lines cannot be read" in page
    assert "The loss is NaN or infinite at step 2." in page


@pytest.mark.parametrize("loss", ["Infinity", "-Infinity", "null", "1e999", "9" * 400])
def test_loss_that_no_chart_can_show_is_told(tmp_path: Path, loss: str) -> None:
    written(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 1.0}}\n{{"step": 2, "loss": {loss}}}\n')
    assert "The loss is NaN or infinite at step 2." in shown(tmp_path)


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
    (folder / "diagnosis.json").write_text(
        json.dumps({"late": [0], "ranks": [dict.fromkeys(("rank", "node", "state", "stack"), HOSTILE)]})
    )
    hostile_events = [{"step": step, HOSTILE: step / 1000} for step in (1, 2)]
    written(folder, *hostile_events, {"step": 1, "checkpoint": HOSTILE})
    restart = {"generation": 2, "cause": HOSTILE, "rank": 1, "node": "n1", "from_step": 4, "seconds": None}
    (folder / "restarts.json").write_text(json.dumps({"restarts": [restart]}))
    write_board(folder, [row(Image.new("L", (4, 4)), [Text(HOSTILE, 1.0, own=True)])])
    page = shown(folder)
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;") >= 15
    assert not {"\x1b", "\x00"} & set(page)
    (found,) = table(page, "restarts")[1:]
    assert (found[1], found[3], found[7]) == ("", HOSTILE, "none yet"), "without the times of the run"


def test_board_shows_pictures_and_the_place_of_a_caption_that_is_not_among_the_nearest(
    tmp_path: Path,
) -> None:
    folder, picture = long_run(tmp_path / "run"), Image.new("RGBA", (1000, 500), "red")
    other = [Text("a cat", 0.5, own=False)]
    write_board(folder, [row(picture, other, HOSTILE, 1037)])
    page = shown(folder)
    assert "<span>a cat</span><small>0.500</small>" in page
    assert '<li class="missed"><span>Its own: &lt;script&gt;' in page
    assert "<small>place 1,037</small>" in page
    write_board(folder, [row(picture, [Text("a dog", 0.5, own=True)], "a dog", 1)])
    page = shown(folder)
    assert "Its own" not in page
    assert '<li class="own"><span>a dog</span><small>0.500 ✓</small>' in page
    (entry,) = json.loads((folder / BOARD_FILE).read_text())
    assert f"base64,{entry['image']}" in page
    hostile = [{**entry, "image": 'x" onerror="alert(1)'}, {"image": 5}]
    (folder / BOARD_FILE).write_text(json.dumps(hostile))
    page = shown(folder)
    assert 'base64,x&#34; onerror=&#34;alert(1)"' in page
    assert page.count("<article>") == 1


def test_time_of_the_run_is_drawn_by_cause_and_its_restarts_are_listed(tmp_path: Path) -> None:
    page = shown(restarted_run(tmp_path / "run"))
    bar, columns = (chart for title, chart in charts(page).items() if title.startswith("Time "))
    shares = {text.split()[0]: float(text.split()[1]) for text in bar.legend}
    assert sum(shares.values()) == pytest.approx(100, abs=0.3)
    assert shares.keys() == {"useful", "start", "data", "detection", "recovery", "redone"}
    ends = [float(end) for end in re.findall(r"0H([\d.]+)V300", bar.svg)]
    assert ends == sorted(ends)
    assert ends[-1] == 1000
    assert columns.hover["head"] == [
        "generation 1, from step 0 to 1,100",
        "generation 2, from step 900 to 1,100",
        "generation 1, from step 1,100 to 1,100",
    ]
    assert columns.x_labels[-1].endswith(" min")
    assert dict(zip(*table(page, "restarts"), strict=True)) == {
        "generation": "2",
        "began after": "22:10",
        "fault of": "rank 3 on node-1",
        "cause": "killed by SIGKILL in step, step 1200; left out: node node-1: it has failed twice",
        "at step": "1200",
        "went on from": "900",
        "ranks": "6",
        "new step after": "41.5 s",
        "spent on": "deciding 0.4 s, starting processes 9.0 s",
    }
    assert "the ranks began again, and went on from steps 900, 1100." in page
    loss = charts(page)["Loss"].svg
    assert re.findall(r'class="mark" d="M(\d+) 0V300"', loss) == ["450", "550"]
    assert page.count('class="mark"') > 2 * 6
    assert values(page)["time"] == "26:50"


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


@pytest.mark.parametrize(
    ("job", "log", "steps"),
    [
        ("[optim]\nepochs = 2\n", "INFO begins", None),
        ("[optim]\nepochs = 2\n", "INFO step   20/4000  epoch 1\nINFO step   40/4000  epoch 1", 4000),
        ("[optim]\nsteps = 60\n[[stage]]\nsteps = 80\n", "INFO step 100/140  epoch 1", 140),
        ("[optim]\nsteps = 60\n", "INFO step 100/140  epoch 1", 60),
    ],
    ids=["epochs alone", "epochs", "stages", "steps"],
)
def test_length_of_an_unfinished_run_is_in_its_job_or_its_log(
    tmp_path: Path, job: str, log: str, steps: int | None
) -> None:
    folder = long_run(tmp_path / "run", steps=40, every=20, finished=False)
    (folder / "job.toml").write_text(job)
    (folder / "logs" / "rank-00000.log").write_text(f"{log}\n")
    found = tiles(shown(folder))
    assert found["steps"][1] == (f"of {steps:,}" if steps else "")
    assert ("time left" in found) == bool(steps)
    assert state(folder)["steps"] == steps


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
    ("device", "hours"), [("cpu", None), ("cuda:0", 2460.5 / 3600), ("NVIDIA H100 80GB HBM3", 2460.5 / 3600)]
)
def test_run_on_cpus_has_no_gpu_hours(tmp_path: Path, device: str, hours: float | None) -> None:
    folder = long_run(tmp_path / "run", steps=40)
    (folder / "environment.json").write_text(json.dumps([{"rank": "0", "device": device}]))
    assert state(folder)["gpu_hours"] == hours
    assert ("GPU-hours" in values(shown(folder))) == bool(hours)


@pytest.mark.parametrize(
    ("joules", "told"), [(0.0, None), (1800, "0.5 Wh"), (3.6e6, "1 kWh"), (9e6, "2.5 kWh"), (7.2e9, "2 MWh")]
)
def test_energy_is_the_sum_of_the_records(tmp_path: Path, joules: float, told: str | None) -> None:
    lines = [{**LOSS, "step": step, "gpu_joules": joules / 2} for step in (1, 2)]
    assert values(shown(written(tmp_path, *lines))).get("energy of GPUs") == told


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61.4, "1:01"), (3723, "1:02:03")])
def test_duration_reads_like_a_clock(tmp_path: Path, seconds: float, text: str) -> None:
    (written(tmp_path) / "result.json").write_text(json.dumps({"reason": "done", "seconds": seconds}))
    assert values(shown(tmp_path))["time"] == text


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


def test_the_page_has_a_bar_for_each_set_of_a_suite_and_the_reasons_of_the_others(tmp_path: Path) -> None:
    folder = with_suites(tmp_path / "run", SUITE)
    (folder / "evaluations" / "half.json").write_text('{"names": [')
    page = shown(folder)
    assert "<h2>Suite vtab, cars <small>step 300</small>" in page
    assert "half.json cannot be read" in page
    assert table(page, "suite")[1:] == [
        ["Oxford-IIIT Pet", "mean per-class recall", "75.0 %", "", "3,669"],
        ["<b>Other</b>", "mean per-class recall", "25.0 %", "", "3,669"],
        ["mean of 2", "", "50.0 %", "", ""],
    ]
    assert '<tr title="top1 50.0 %, mean_per_class_recall 75.0 %"><th>Oxford' in page
    assert re.findall(r"M0 0H(\d+\.\d+)V10H0Z", page) == ["75.00", "25.00"]
    assert table(page.partition("Not measured (2)")[2]) == [
        ["cars", "0 is damaged"],
        ["vtab/dtd", "there is no folder x"],
    ]


def test_each_suite_is_shown_at_its_newest_step_and_the_average_beside(tmp_path: Path) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"step": 900},
        {},
        {"step": 600, "ema": True},
        {"step": 100, "names": ["imagenet"]},
    )
    page = shown(with_suites(tmp_path / "run", *({**SUITE, **change} for change in changes)))
    assert re.findall(r"<h2>Suite (.*?)</small>", page) == [
        "imagenet <small>step 100",
        "vtab, cars <small>step 900",
        "vtab, cars <small>step 600, EMA",
    ]


@pytest.mark.parametrize("value", [None, "0.5", True, float("nan"), 1.5, -0.1, [0.5], 10**400])
def test_what_is_no_share_gets_no_bar(tmp_path: Path, value: Any) -> None:
    suite = {**SUITE, "sets": [PETS, {**PETS, "value": value}]}
    assert len(table(shown(with_suites(tmp_path / "run", suite)), "suite")) == 3


def test_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    assert len(shown(long_run(tmp_path / "run", steps=4000, every=2))) < 600_000


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
        (
            "run",
            "no/o.html",
            "cannot be written: No such file or directory; choose another file with --output",
        ),
        ("run", "empty", "cannot be written: Is a folder"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    tmp_path: Path, capsys: Capture, run: str, output: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    long_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", str(tmp_path / run), "--output", str(tmp_path / output)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_report_is_made_without_torch(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    code = (
        "import sys; from trainer.cli import main as cli; cli.main(); "
        "assert not {'torch', 'numpy', 'tensorboard'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, "report", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""}
    )
    assert (done.returncode, done.stderr) == (0, "")
