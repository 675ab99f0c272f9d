"""`clipship report`: whatever a run folder holds, there is a page, and it says what the folder says."""

import base64
import json
import os
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.support.report_folders import environment, failed_run, long_run, restarted_run, timed_out_run
from trainer.cli import main as cli
from trainer.data import store
from trainer.errors import InputError
from trainer.report.board import BOARD_FILE, BoardRow, Text, read_rows, row, write_board
from trainer.report.figures import training_charts
from trainer.report.folder import last_lines, read_metrics, read_run
from trainer.report.headline import metric_rows, not_finite, status, tiles
from trainer.report.page import Fact, environment_table, page, write_report
from trainer.report.times import marked, restart_rows, restart_steps, time_charts

KEYS = (
    "loss", "lr", "samples", "epoch", "samples_per_s", "compute_s", "data_s", "zero_shot_top1", "checkpoint",
    "checkpoint_bytes", "write_s", "reason", "exit_code", "steps", "seconds", "world_size", "rank", "node",
    "details", "late", "ranks", "stack", "image", "texts", "scores", "own",
)  # fmt: skip


def shown(folder: Path) -> str:
    return page(read_run(folder))


def values(folder: Path) -> dict[str, str]:
    return {tile.label: tile.value for tile in tiles(read_run(folder))}


def test_finished_run_is_done_with_its_numbers_in_front(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run", steps=2000)
    assert status(read_run(folder)).word == "done"
    found = values(folder)
    expected = {
        "steps": "2,000",
        "samples": "1.024 M",
        "zero-shot top-1": "70.0 %",
        "image to text R@1": "45.0 %",
        "time": "41:00",
    }
    assert found.items() >= expected.items()
    assert "first line of rank" not in shown(folder)


def test_unfinished_run_says_so_and_shows_rank_0s_last_lines(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run", finished=False)
    assert status(read_run(folder)).word == "not finished"
    assert read_run(folder).logs == {0: ["2026-01-01 INFO first line of rank 0"]}


def test_failed_run_names_the_rank_its_reason_its_trace_and_its_last_words(tmp_path: Path) -> None:
    text = shown(failed_run(tmp_path / "run"))
    cause = "rank 2 on node-1: ValueError: no such thing"
    for words in ("failed, exit code 1", cause, "Traceback", "last words"):
        assert words in text
    assert read_run(tmp_path / "run").logs.keys() == {2}


def test_timed_out_run_shows_every_rank_with_the_late_one_first(tmp_path: Path) -> None:
    text = shown(timed_out_run(tmp_path / "run"))
    assert "timed out" in text
    assert text.index("1 (late)") < text.index("<td>0</td><td>node-0</td>")
    assert "Python stack of rank 1" in text
    assert "Python stack of rank 0" not in text


def test_stopped_run_can_go_on(tmp_path: Path) -> None:
    folder = failed_run(tmp_path / "run")
    record = json.loads((folder / "exit.json").read_text())
    (folder / "exit.json").write_text(json.dumps({**record, "exit_code": 75, "reason": "asked to stop"}))
    assert status(read_run(folder)).kind == "stopped"
    assert "The same command resumes" in shown(folder)


def test_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('name = "x"')
    assert "No step has been logged yet" in shown(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "job.toml",
        "metrics.jsonl",
        "result.json",
        "exit.json",
        "diagnosis.json",
        "environment.json",
        BOARD_FILE,
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[[[",
        b"null",
        b"7",
        b'"\xff\x00"',
        b"[1, null, {}]",
        b'{"ranks": 3, "late": 4, "rank": "x"}',
    ],
)
def test_file_that_is_broken_does_not_hide_the_others(tmp_path: Path, name: str, content: bytes) -> None:
    folder = timed_out_run(tmp_path / "run")
    (folder / name).write_bytes(content)
    text = shown(folder)
    assert "<h2>Training</h2>" in text
    assert "node-1" in text


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.integers(min_value=10**400, max_value=10**401),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
)


a_line = st.fixed_dictionaries({"step": st.integers(0, 4)}, optional=dict.fromkeys(KEYS, junk))


@settings(max_examples=30, deadline=None)
@given(st.lists(a_line, max_size=4), st.dictionaries(st.sampled_from(KEYS), junk))
def test_known_keys_with_values_of_any_kind_make_a_page(
    events: list[dict[str, Any]], table: dict[str, Any]
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        (folder / "job.toml").write_text("[optim]\nsteps = []\nloss = {}\n[model]\nname = 7")
        for file in ("result.json", "exit.json", "diagnosis.json"):
            (folder / file).write_text(json.dumps(table))
        for file in ("environment.json", BOARD_FILE):
            (folder / file).write_text(json.dumps(events))
        assert "<h2>Training</h2>" in shown(folder)


def test_broken_file_is_named(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    (folder / "environment.json").write_text('[{"rank')
    assert "environment.json cannot be read" in shown(folder)


def test_lines_of_metrics_are_sorted_out_by_what_they_say(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"step": 1, "loss": 3.0, "lr": 0.1}',
        '{"step": 2, "loss": NaN}',
        '{"step": 2, "zero_shot_top1": 0.5}',
        '{"step": 2, "checkpoint": "step-00000002", "checkpoint_bytes": 9, "write_s": 0.1}',
        '{"step": true, "loss": 1}',
        '{"loss": 1}',
        "7",
        '{"step": 3, "lo',
    ]
    path.write_text("\n".join(lines))
    remarks: list[str] = []
    found = read_metrics(path, remarks)
    assert [record["step"] for record in found.records] == [1, 2]
    assert found.evaluations == [{"step": 2, "zero_shot_top1": 0.5}]
    assert [event["checkpoint"] for event in found.checkpoints] == ["step-00000002"]
    assert remarks == ["metrics.jsonl: 4 of 8 lines cannot be read"]
    assert not_finite(found.records) == "The loss is NaN or infinite at step 2."


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "-Infinity", "null", "1e999", "9" * 400])
def test_loss_that_no_chart_can_show_is_told(tmp_path: Path, loss: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 1.0}}\n{{"step": 2, "loss": {loss}}}\n')
    assert "The loss is NaN or infinite at step 2." in shown(tmp_path)


def test_evaluation_that_only_the_result_has_is_shown(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run", steps=40, every=20)
    assert ("zero-shot top-1", "70.0 %", "70.0 % at step 40") in metric_rows(
        read_run(folder).metrics.evaluations
    )


def test_best_value_is_named_where_the_last_is_worse(tmp_path: Path) -> None:
    lines = ['{"step": 1, "zero_shot_top1": 0.75}', '{"step": 2, "zero_shot_top1": 0.5}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [(tile.value, tile.note) for tile in tiles(read_run(tmp_path))] == [
        ("50.0 %", "best 75.0 % at step 1")
    ]


def test_environment_has_one_line_a_key_and_marks_what_should_not_differ() -> None:
    table = environment_table([environment(rank) for rank in range(4)])
    assert table == [
        Fact("node", [("node-0", "ranks 0-1"), ("node-1", "ranks 2-3")], differs=False),
        Fact("backend", [("torch (nccl)", "")], differs=False),
        Fact("device", [("cuda:0", "ranks 0, 2"), ("cuda:1", "ranks 1, 3")], differs=False),
        Fact("torch", [("2.14.1", "ranks 0-2"), ("2.14.0", "rank 3")], differs=True),
        Fact("numpy", [("2.4.6", "")], differs=False),
    ]


def test_environment_of_many_ranks_stays_short() -> None:
    (fact,) = environment_table([{"rank": str(rank), "node": f"n{rank // 8}"} for rank in range(1024)])
    assert len(fact.values) == 13
    assert fact.values[-1] == ("and 116 more", "")


def test_secrets_of_the_environment_are_not_in_the_page(tmp_path: Path) -> None:
    text = shown(long_run(tmp_path / "run"))
    assert "HF_TOKEN" in text
    assert "a-secret" not in text


HOSTILE = '<script>alert("1")</script>'


def test_hostile_text_is_escaped_wherever_it_comes_from(tmp_path: Path) -> None:
    folder = failed_run(
        tmp_path / "run", name=HOSTILE, reason=HOSTILE, details=HOSTILE, log=f"\x1b[31m{HOSTILE}\x00"
    )
    (folder / "environment.json").write_text(json.dumps([{"rank": "0", HOSTILE: HOSTILE}, {"rank": "1"}]))
    (folder / "diagnosis.json").write_text(
        json.dumps({"late": [0], "ranks": [dict.fromkeys(("rank", "node", "state", "stack"), HOSTILE)]})
    )
    hostile_events = [{"step": step, HOSTILE: step / 1000} for step in (1, 2)] + [
        {"step": 1, "checkpoint": HOSTILE}
    ]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(event) for event in hostile_events))
    write_board(folder, [row(Image.new("L", (4, 4)), [Text(HOSTILE, 1.0, own=True)])])
    text = shown(folder)
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;") >= 14
    assert "\x1b" not in text
    assert "\x00" not in text


def test_board_is_read_as_it_was_written(tmp_path: Path) -> None:
    texts = [Text("a cat", 0.5, own=False), Text("a dog", 0.25, own=True)]
    write_board(tmp_path, [row(Image.new("RGBA", (1000, 500), "red"), texts)])
    (found,) = read_rows(json.loads((tmp_path / BOARD_FILE).read_text()))
    assert found.texts == texts
    with Image.open(BytesIO(base64.b64decode(found.image))) as image:
        assert (image.size, image.getpixel((0, 0))) == ((224, 112), (255, 0, 0))


def test_own_caption_that_is_not_among_the_nearest_has_its_place(tmp_path: Path) -> None:
    folder, picture = long_run(tmp_path / "run"), Image.new("RGB", (4, 4))
    other = [Text("a cat", 0.5, own=False)]
    write_board(folder, [row(picture, other, HOSTILE, 1037)])
    assert "Its own: &lt;script&gt;" in shown(folder)
    assert "place 1,037" in shown(folder)
    write_board(folder, [row(picture, [Text("a dog", 0.5, own=True)], "a dog", 1)])
    assert "Its own" not in shown(folder)


def test_no_image_of_the_board_ends_its_element(tmp_path: Path) -> None:
    write_board(long_run(tmp_path / "run"), [BoardRow('x" onerror="alert(1)', [])])
    assert 'base64,x&#34; onerror=&#34;alert(1)"' in shown(tmp_path / "run")


def test_generation_of_a_line_is_no_metric_of_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0, "generation": 2}\n{"step": 1, "zero_shot_top1": 0.5, "generation": 2}\n'
        '{"step": 1, "generation": 2}\n'
    )
    found = read_metrics(tmp_path / "metrics.jsonl", [])
    assert found.evaluations == [{"step": 1, "zero_shot_top1": 0.5}]
    assert found.records[0]["generation"] == 2


def test_time_of_the_run_is_drawn_by_cause_and_its_restarts_are_listed(tmp_path: Path) -> None:
    facts = read_run(restarted_run(tmp_path / "run"))
    bar, columns = time_charts(facts.times)
    shares = {text.split()[0]: float(text.split()[1]) for text, _ in bar.legend}
    assert sum(shares.values()) == pytest.approx(100, abs=0.3)
    assert shares.keys() == {"useful", "start", "data", "detection", "recovery", "redone"}
    ends = [float(end) for end in re.findall(r"0H([\d.]+)V300", bar.svg)]
    assert ends == sorted(ends)
    assert ends[-1] == 1000
    heads = json.loads(columns.hover)["head"]
    assert heads == [
        "generation 1, from step 0 to 1,100",
        "generation 2, from step 900 to 1,100",
        "generation 1, from step 1,100 to 1,100",
    ]
    assert [label.text for label in columns.x_labels][-1].endswith(" min")
    (row,) = restart_rows(facts)
    assert (row.generation, row.who, row.from_step, row.seconds) == ("2", "rank 3 on node-1", "900", "41.5 s")
    assert row.began == "22:10"
    assert row.parts == "deciding 0.4 s, starting processes 9.0 s"
    left_out = "left out: node node-1: it has failed twice"
    assert (row.cause, row.ranks) == (f"killed by SIGKILL in step, step 1200; {left_out}", "6")


def test_restarts_are_marked_on_the_curves(tmp_path: Path) -> None:
    facts = read_run(restarted_run(tmp_path / "run"))
    assert restart_steps(facts.times) == [900, 1100]
    (chart,) = marked(training_charts(facts.metrics.records)[:1], 2000, [900, 1100])
    assert re.findall(r'class="mark" d="M(\d+) 0V300"', chart.svg) == ["450", "550"]
    text = shown(facts.folder)
    assert "the ranks began again, and went on from steps 900, 1100." in text
    assert text.count('class="mark"') > 2 * 6


def test_run_without_times_has_its_restarts_from_the_last_start(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    assert "<h2>Time</h2>" not in shown(folder)
    restart = {"generation": 2, "cause": HOSTILE, "rank": 1, "node": "n1", "from_step": 4, "seconds": None}
    (folder / "restarts.json").write_text(json.dumps({"restarts": [restart]}))
    (row,) = restart_rows(read_run(folder))
    assert (row.cause, row.seconds, row.began) == (HOSTILE, "none yet", "")
    assert "<script>alert" not in shown(folder)
    assert "<h2>Time</h2>" in shown(folder)


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert last_lines(path)[-1] == "line 99999"
    assert len(last_lines(path)) == 40


def test_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    assert shown(folder) == shown(folder)


def test_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    assert len(shown(long_run(tmp_path / "run", steps=20_000, every=2))) < 600_000


def test_command_writes_into_the_run_folder_and_prints_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = long_run(tmp_path / "run")
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert cli.main(["report", str(folder), "--output", str(tmp_path / "other.html")]) == 0
    address = f"memory://{tmp_path.name}/page.html"
    assert cli.main(["report", str(folder), "--output", address]) == 0
    assert store.read(address) == (tmp_path / "other.html").read_bytes()
    store.remove(address)
    assert (tmp_path / "other.html").read_text() == (folder / "report.html").read_text()
    assert list(tmp_path.rglob("*.partial")) == []


@pytest.mark.parametrize(
    ("run", "output", "message"),
    [
        ("no", "o.html", "no is not a folder"),
        ("empty", "o.html", "is not a run folder: it has no job.toml"),
        (
            "run",
            "no/o.html",
            "cannot be written: No such file or directory; choose another file with --output",
        ),
        ("run", "empty", "cannot be written: Is a folder"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    tmp_path: Path, run: str, output: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    long_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message):
        write_report(tmp_path / run, tmp_path / output)
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
