"""The page of `clipship search` in a real browser: typing, keys, states, and nothing in the console."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.browser import CHROMIUM, Browser
from tests.support.search_index import digits, index_of, search_model, serving, weights
from trainer.search.server import Server

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine (tests/debian-packages.txt)"
)

COUNT = 60
HOSTILE = "<img src=x onerror='window.broken = 1'>.png"
NAMES = "[...document.querySelectorAll('#results span')].map(one => one.textContent)"
STATE = "document.querySelector('#state').textContent"
AT = "[...document.querySelectorAll('#results a')].indexOf(document.activeElement)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("search")
    pictures = digits(folder / "pictures with <b> & a name", COUNT - 1)
    Image.new("RGB", (30, 90), "red").save(pictures / HOSTILE)
    with serving(index_of(search_model(weights(folder)), pictures)) as running:
        yield running


def until(page: Browser, condition: str) -> None:
    """Waits in the page until a JavaScript condition holds; fails if it does not within a minute."""
    waiting = (
        "new Promise(done => { const begun = Date.now(); "
        f"(function look() {{ ({condition}) ? done(true) : Date.now() - begun > 60000 ? done(false) : "
        "setTimeout(look, 20) })() })"
    )
    answer = page.call("Runtime.evaluate", expression=waiting, awaitPromise=True)
    assert answer["result"].get("value") is True, (condition, page.value("document.body.innerText"))


def type_text(page: Browser, text: str) -> None:
    page.call("Input.insertText", text=text)


def found(page: Browser, server: Server, text: str, count: int) -> None:
    """Waits until the page shows the nearest pictures to the text."""
    names = [match.name for match in server.index.nearest(text, count)]
    until(page, f"JSON.stringify({NAMES}) === JSON.stringify({json.dumps(names)})")


def test_a_text_that_is_typed_shows_the_nearest_pictures(page: Browser, server: Server) -> None:
    page.open(server.url)
    assert page.value("document.title") == "Search pictures with <b> & a name"
    assert page.value("document.activeElement.id") == "text"
    assert page.value(STATE).startswith("Type a few words")
    type_text(page, "a handwritten seven")
    found(page, server, "a handwritten seven", 24)
    assert page.value(STATE) == "The nearest 24 of 60 pictures, nearest first."
    shown: list[Any] = page.value(
        "[...document.querySelectorAll('#results b')].map(one => Number(one.textContent))"
    )
    assert shown == [round(match.similarity, 3) for match in server.index.nearest("a handwritten seven", 24)]
    until(page, "document.querySelector('#results img').naturalWidth === 40")
    page.value("document.querySelector('#more').click()")
    found(page, server, "a handwritten seven", 48)
    until(page, f"{AT} === 24")
    page.value("document.querySelector('#more').click()")
    found(page, server, "a handwritten seven", COUNT)
    assert page.value("document.querySelector('#more').hidden") is True
    until(page, "[...document.querySelectorAll('#results img')].at(-1).complete")
    assert page.value("window.broken === undefined")
    assert page.errors() == []
    assert {url.startswith(server.url) for url in page.requests()} == {True}


def test_keys_lead_through_the_pictures(page: Browser, server: Server) -> None:
    page.open(server.url)
    type_text(page, "zero")
    page.press("Enter")
    found(page, server, "zero", 24)
    columns = page.value(
        "(links => links.filter(one => one.offsetTop === links[0].offsetTop).length)"
        "([...document.querySelectorAll('#results a')])"
    )
    assert 2 < columns < 10
    places = []
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "ArrowUp"):
        page.press(key)
        places.append(page.value(AT))
    assert places == [0, 1, columns + 1, columns, 0, -1]
    assert page.value("document.activeElement.id") == "text"
    page.press("ArrowDown")
    page.press("/")
    assert page.value("[document.activeElement.id, document.activeElement.value]") == ["text", "zero"]
    page.press("Escape")
    until(page, "document.querySelectorAll('#results li').length === 0")
    assert page.value(STATE).startswith("Type a few words")
    assert page.value("location.hash") == ""
    assert page.errors() == []


def test_a_page_that_is_loaded_again_shows_the_same_search(page: Browser, server: Server) -> None:
    page.open("about:blank")
    page.open(f"{server.url}#a%20red%20ball")
    found(page, server, "a red ball", 24)
    assert page.value("document.querySelector('#text').value") == "a red ball"
    page.value("location.hash = 'seven'")
    until(page, "document.querySelector('#text').value === 'seven'")
    found(page, server, "seven", 24)
    page.open("about:blank")
    page.open(f"{server.url}#%E0%A4%A")  # no UTF-8
    assert page.value("document.querySelector('#text').value") == ""
    assert page.errors() == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, False), (1280, True)])
def test_no_text_lies_on_another_and_the_console_has_no_error(
    page: Browser, server: Server, tmp_path: Path, width: int, dark: bool
) -> None:
    page.open("about:blank")
    page.open(f"{server.url}#seven", width, dark)
    found(page, server, "seven", 24)
    assert page.overlapping() == []
    assert page.value("document.documentElement.scrollWidth") <= width
    picture = tmp_path / "search.png"  # kept by pytest for people to look at
    picture.write_bytes(page.picture())
    ground, ink = page.value("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    brightness = [sum(map(int, color.strip("rgb()").split(","))) for color in (ground, ink)]
    assert brightness[0] < 150 < brightness[1] if dark else brightness[1] < 150 < brightness[0]
    assert page.errors() == []


def test_page_says_that_the_search_has_ended(page: Browser, server: Server) -> None:
    with serving(server.index) as other:
        page.open(other.url)
    page.call("Network.setBlockedURLs", urls=["*search?*"])  # connections that are kept open are still served
    type_text(page, "seven")
    until(page, "document.querySelector('#state').classList.contains('failed')")
    page.call("Network.setBlockedURLs", urls=[])
    assert page.value(STATE).startswith("No answer: the search has ended in its terminal.")
