"""Kubeconfigs that are none: each is named, and none is waited for."""

import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("kubernetes")
from kubernetes.config import kube_config

from trainer.errors import ClusterError
from trainer.launch.kubernetes.cluster import connect
from trainer.launch.kubernetes.kinds import KINDS

WRONG: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link to what has no end": lambda path: path.symlink_to("/dev/zero"),
    "no YAML": lambda path: path.write_text("a: [\n"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "control characters": lambda path: path.write_text("a: \0"),
    "a number": lambda path: path.write_text("5"),
    "a list": lambda path: path.write_text("[1, 2]"),
    "depth": lambda path: path.write_text("[" * 5_000),
    "contexts that are none": lambda path: path.write_text("contexts: [3]\ncurrent-context: a\n"),
    "a context that is none": lambda path: path.write_text(
        "contexts: [{name: a, context: 5}]\ncurrent-context: a\nusers: []\nclusters: []\n"
    ),
    "nothing": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_kubeconfig_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    WRONG[kind](tmp_path / "config")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    with pytest.raises(ClusterError, match=r"kube-?config") as raised:
        connect(None)
    assert len(str(raised.value)) < 600


def test_a_page_in_place_of_the_api_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a proxy answers whose user has not signed in."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Sign in</html>" * 100)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "config").write_text(
            f"clusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:{server.server_port}'}}}}]\n"
            "contexts: [{name: a, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n"
            "current-context: a\napiVersion: v1\nkind: Config\n"
        )
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
        with pytest.raises(ClusterError, match="no API server but sends '<html>Sign in") as raised:
            connect(None).read(KINDS["job"], "demo")
        server.shutdown()
    assert len(str(raised.value)) < 600
