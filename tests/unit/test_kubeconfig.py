"""Kubeconfigs that are none: each is named, and none is waited for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("kubernetes")
from kubernetes.config import kube_config

from trainer.errors import ClusterError
from trainer.launch.kubernetes.cluster import connect

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
