"""A real browser without a window, which tests drive through its debugging pipe.

It opens a page, moves the pointer, and sees errors and requests.
"""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_QUIET = (
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
_KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "/": 191,
}
"""Codes that Windows has given to keys."""
_AT_ONCE = "--allow-pre-commit-input"
"""Pointer and keys reach a page before its first picture; else they are dropped until then."""
_SHOWN = "new Promise(shown => requestAnimationFrame(() => requestAnimationFrame(shown)))"


_OVERLAPPING = """(() => {
  const seen = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const clipped = (box, node) => {
    let {left, top, right, bottom} = box;
    for (let one = node.parentElement; one && one !== document.body; one = one.parentElement) {
      if (getComputedStyle(one).overflow === "visible") continue;
      const edge = one.getBoundingClientRect();
      left = Math.max(left, edge.left); right = Math.min(right, edge.right);
      top = Math.max(top, edge.top); bottom = Math.min(bottom, edge.bottom);
    }
    return {left, top, right, bottom};
  };
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const inside = node.parentElement;
    if (!node.data.trim() || inside.closest("script, style, svg") || !inside.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) seen.push([node, clipped(box, node)]);
  }
  seen.sort(([, one], [, other]) => one.top - other.top);
  const found = [];
  seen.forEach(([node, box], at) => {
    for (let next = at + 1; next < seen.length && seen[next][1].top < box.bottom - LEAST; next++) {
      const [other, its] = seen[next];
      const width = Math.min(box.right, its.right) - Math.max(box.left, its.left);
      const height = Math.min(box.bottom, its.bottom) - its.top;
      if (other === node || width <= LEAST || height <= LEAST) continue;
      found.push([node.data.trim(), other.data.trim()]);
    }
  });
  return found;
})()"""
_LOADED = 'document.readyState === "complete" || new Promise(done => addEventListener("load", done))'
_LEAST_PX = 3
"""Overlap in both directions that counts: boxes of letters are higher than what is drawn in them."""


class Browser:
    """One page. What it says unasked is kept in `events`."""

    def __init__(self, to_browser: IO[bytes], from_browser: IO[bytes]) -> None:
        self._to, self._from = to_browser, from_browser
        self._last, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the browser's protocol."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | (
            {"sessionId": self._session} if self._session else {}
        )
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._read()).get("id") != self._last:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path | str, width: int = 1280, dark: bool = False) -> None:
        """Returns when the page, a file or an address, is loaded and shown."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait_for_load()
        self.call("Runtime.evaluate", expression=_SHOWN, awaitPromise=True)

    def wait_for_load(self) -> None:
        """Returns when a page has been loaded since `events` was last empty, and its scripts have run."""
        while not self._seen("Page.loadEventFired"):
            self.events.append(self._read())
        self.call("Runtime.evaluate", expression=_LOADED, awaitPromise=True)

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def overlapping(self) -> list[list[str]]:
        """Returns pairs of texts in the page that are drawn over each other."""
        pairs: list[list[str]] = self.value(_OVERLAPPING.replace("LEAST", str(_LEAST_PX)))
        return pairs

    def picture(self) -> bytes:
        """Returns the whole page as PNG."""
        whole: str = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        return base64.b64decode(whole)

    def point_at(self, x: float, y: float) -> None:
        """Moves the pointer, in pixels of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Presses a key, of the name that JavaScript has for it, and lets it go."""
        text = {"/": {"text": "/"}, "Enter": {"text": "\r"}}.get(key, {})
        for kind, more in (("keyDown" if text else "rawKeyDown", text), ("keyUp", {})):
            about = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
            self.call("Input.dispatchKeyEvent", **about, **more)

    def errors(self) -> list[Any]:
        """Returns the errors in the console, with exceptions and refused loads."""
        self.value("0")  # what was said until now has arrived with the answer
        logged = [event["params"]["entry"]["text"] for event in self._seen("Log.entryAdded")]
        printed = [event["params"]["args"] for event in self._seen("Runtime.consoleAPICalled")]
        return logged + printed + [event["params"] for event in self._seen("Runtime.exceptionThrown")]

    def requests(self) -> list[str]:
        """Returns the URLs of requests, the page's own included; `data:` URLs are left out."""
        urls = [event["params"]["request"]["url"] for event in self._seen("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith("data:")]

    def _seen(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("method") == method]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser of its own, with an empty profile in that folder."""
    assert CHROMIUM is not None
    root = ["--no-sandbox"] * (os.geteuid() == 0)
    command = [CHROMIUM, *_QUIET, _AT_ONCE, *root, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    (read_commands, write_commands), (read_answers, write_answers) = os.pipe(), os.pipe()
    descriptors = (read_commands, write_answers)
    # The protocol's pipes are the descriptors 3 and 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_answers}', "browser", *command]
    with subprocess.Popen(
        shell, pass_fds=descriptors, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        for descriptor in descriptors:
            os.close(descriptor)
        with open(write_commands, "wb") as to_browser, open(read_answers, "rb") as from_browser:
            try:
                yield Browser(to_browser, from_browser)
            finally:
                process.terminate()
