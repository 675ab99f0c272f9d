"""The report in a real browser.

Charts have points, the pointer shows values, nothing is loaded, and hostile text does not run.
"""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.support.browser import CHROMIUM, Browser
from tests.support.report_folders import failed_run, long_run, restarted_run, timed_out_run
from tests.support.report_pages import shown
from trainer.report.board import Text, row, write_board
from trainer.report.page import write_report

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (tests/debian-packages.txt)"
)

HOSTILE = (
    "</script><script>window.broken = 1</script>"
    """<img src="http://example.invalid/x" onerror="window.broken = 1">'"&"""
)


def charts(page: Browser) -> dict[str, int]:
    """Points by the chart's title."""
    figures = "[...document.querySelectorAll('.chart')]"
    title = "f.querySelector('figcaption').firstChild.textContent.trim()"
    found: dict[str, int] = page.value(
        f"Object.fromEntries({figures}.map(f => [{title}, "
        f"JSON.parse(f.querySelector('script').text).x.length]))"
    )
    return found


def test_every_chart_has_its_points(page: Browser, tmp_path: Path) -> None:
    page.open(write_report(long_run(tmp_path / "run", steps=2000, every=20)))
    training = dict.fromkeys(
        ["Loss", "Learning rate", "Throughput", "Step time", "Gradient norm", "Logit scale"], 101
    )
    assert charts(page).items() >= training.items()
    measured = dict.fromkeys(
        ["zero-shot", "retrieval image to text", "retrieval text to image", "retrieval median rank"], 20
    )
    assert charts(page) == training | measured
    widths = page.value(
        "[...document.querySelectorAll('.plot svg')]"
        ".map(s => s.querySelector('.line, .area').getBBox().width)"
    )
    assert len(widths) == 10
    assert min(widths) > 900
    assert page.errors() == []


def test_pointer_shows_the_value_of_the_nearest_step(page: Browser, tmp_path: Path) -> None:
    page.open(write_report(long_run(tmp_path / "run", steps=100, every=50)))
    frame = page.value(
        "(() => { const b = document.querySelector('.plot').getBoundingClientRect(); "
        "return [b.left, b.top, b.width] })()"
    )
    assert page.value("document.querySelector('.tip').hidden") is True
    page.point_at(frame[0] + 0.6 * frame[2], frame[1] + 20)
    assert page.value("document.querySelector('.tip').innerText").splitlines()[0] == "step 50"
    assert page.value("document.querySelector('.tip').checkVisibility()") is True
    page.point_at(frame[0] - 200, frame[1])
    assert page.value("document.querySelector('.tip').hidden") is True
    assert page.errors() == []


def test_arrow_keys_show_one_point_after_another(page: Browser, tmp_path: Path) -> None:
    page.open(write_report(long_run(tmp_path / "run", steps=100, every=50)))
    for key in ("Tab", "ArrowLeft"):
        page.press(key)
    assert page.value("document.querySelector('.tip').innerText").splitlines()[0] == "step 50"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report and a comparison that have something of everything."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        restarted_run(folder / "first-run"),
        long_run(folder / "a-run-whose-name-is-long-and-has-no-blank", steps=120_000, every=1000),
        timed_out_run(folder / "try-3"),
        failed_run(folder / "try-4"),
    ]
    shown(*runs)
    pages = {"report": write_report(runs[0], reload_s=3600.0), "failed": write_report(runs[2])}
    return {**pages, "comparison": folder / "shown.html"}


SCREENS = {"desktop": (1280, False), "phone": (360, False), "dark": (1280, True), "dark phone": (360, True)}


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", ["report", "failed", "comparison"])
def test_no_text_lies_on_another_or_is_wider_than_the_window_and_all_is_seen_on_its_ground(
    page: Browser, pages: dict[str, Path], tmp_path: Path, name: str, screen: str
) -> None:
    width, dark = SCREENS[screen]
    page.open(pages[name], width, dark)
    page.value("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert page.overlapping() == []
    assert page.value("document.documentElement.scrollWidth") <= width
    picture = tmp_path / f"{name}-{screen}.png"  # kept by pytest for people to look at
    picture.write_bytes(page.picture())
    with Image.open(picture) as image:
        assert image.width == width
        (brightness,) = image.convert("L").resize((1, 1)).tobytes()
    assert brightness < 80 if dark else brightness > 200
    ground, ink = page.value("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    ground, ink = (sum(map(int, color.strip("rgb()").split(","))) for color in (ground, ink))
    assert ground < 150 and ink > 600 if dark else ground > 600 and ink < 150
    assert page.errors() == []


def test_text_that_lies_on_another_is_found(page: Browser, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<p>above</p><p style='position: relative; top: -30px'>below</p><p>apart</p>")
    page.open(broken)
    assert page.overlapping() == [["above", "below"]]


def test_pointer_on_a_comparison_shows_each_run_that_has_a_value_there(
    page: Browser, pages: dict[str, Path]
) -> None:
    page.open(pages["comparison"])
    page.value("document.querySelector('.chart').focus()")
    left, top, width = page.value(
        "(b => [b.left, b.top, b.width])(document.querySelector('.plot').getBoundingClientRect())"
    )
    names = "[...document.querySelectorAll('.tip:not([hidden]) div')].map(d => d.innerText.split(' ')[0])"
    page.point_at(left + 1, top + 20)
    assert page.value(names) == ["first-run", "a-run-whose-name-is-long-and-has-no-blank", "try-3", "try-4"]
    page.point_at(left + 0.9 * width, top + 20)
    assert page.value(names) == ["a-run-whose-name-is-long-and-has-no-blank"]
    assert page.errors() == []


@pytest.mark.parametrize("width", [360, 1280])
def test_time_by_cause_fills_its_chart_and_a_narrow_window(page: Browser, tmp_path: Path, width: int) -> None:
    page.open(write_report(restarted_run(tmp_path / "run")), width)
    assert page.value("document.documentElement.scrollWidth") <= width
    assert charts(page)["Time of the run by cause"] == 6
    assert charts(page)["Time by cause, for each start and generation"] == 3
    drawn = page.value(
        "[...document.querySelectorAll('.bar .area')].reduce((s, a) => s + a.getBBox().width, 0)"
    )
    assert drawn == pytest.approx(1000, abs=2)
    assert page.errors() == []


def test_page_loads_nothing_but_itself(page: Browser, tmp_path: Path) -> None:
    report = write_report(long_run(tmp_path / "run"))
    page.open(report)
    assert page.requests() == [report.resolve().as_uri()]
    assert (
        page.value("[...document.querySelectorAll('.board img')].filter(i => i.naturalWidth == 224).length")
        == 4
    )


def test_page_of_a_run_that_goes_on_loads_itself_again_until_the_run_ends(
    page: Browser, tmp_path: Path
) -> None:
    steps = "document.querySelector('.tiles strong').textContent"
    keep = "window.setInterval = (again, wait) => { window.again = again; window.wait = wait; }"
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source=keep)["identifier"]
    folder = long_run(tmp_path / "run", steps=100, every=50, finished=False)
    page.open(write_report(folder, reload_s=5.0))
    assert (page.value(steps), page.value("wait")) == ("100", 5000)
    assert page.value("document.querySelector('.status.live').checkVisibility()") is True
    page.value("[...document.querySelectorAll('details')].at(-1).open = true")
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 120, "loss": 1.0}\n')
    write_report(folder, reload_s=5.0)
    page.events.clear()
    page.value("again()")
    page.wait_for_load()
    assert page.value(steps) == "120"
    assert page.value("[...document.querySelectorAll('details')].at(-1).open") is True
    write_report(folder)
    page.events.clear()
    page.value("again()")
    page.wait_for_load()
    assert page.value("[document.documentElement.dataset.reload, window.again]") == [None, None]
    assert page.errors() == []
    page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


def test_hostile_names_and_log_lines_are_shown_and_not_run(page: Browser, tmp_path: Path) -> None:
    folder = failed_run(tmp_path / "run", name=HOSTILE, reason=HOSTILE, details=HOSTILE, log=HOSTILE)
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write(
            json.dumps({"step": 200, HOSTILE: 0.5}) + "\n" + json.dumps({"step": 300, HOSTILE: 0.6}) + "\n"
        )
    write_board(folder, [row(Image.new("RGB", (9, 9)), [Text(HOSTILE, 0.5, own=False)])])
    report = write_report(folder)
    page.open(report)
    assert page.value("window.broken === undefined")
    assert page.requests() == [report.resolve().as_uri()]
    assert page.errors() == []
    shown = page.value("document.body.innerText")
    assert shown.count(HOSTILE) == 7, shown  # name, reason, details, chart, metric, board, log
    assert page.value("document.title") == HOSTILE
