"""Checks of `trainer.image.selftest`, and the options that `clipship image verify` derives from labels."""

import json
from typing import Any

import pytest

from trainer.image import selftest, verify
from trainer.image.builder import Stored

FOUND = {"torch": "2.9.0a0", "cuda": "13.0", "nccl": "2.27.7", "archs": ["8.0", "9.0"]}


def checked(monkeypatch: pytest.MonkeyPatch, **expected: str) -> dict[str, Any]:
    monkeypatch.setattr(selftest, "_output", lambda command: json.dumps(FOUND))
    return selftest._checked_libraries(expected)


@pytest.mark.parametrize(
    "expected",
    [
        {"torch_min": "2.6.0"},
        {"torch_min": "2.9.0"},
        {"gpus": "8.0,8.6,9.0"},
        {"archs": "8.0,9.0"},
        {"cuda": "13.0", "nccl": "2.27.7"},
    ],
    ids=str,
)
def test_libraries_with_the_promised_versions_are_reported(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str, str]
) -> None:
    assert checked(monkeypatch, **expected) == FOUND


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ({"torch": "2.9.0"}, "torch is 2.9.0a0, but the stack has 2.9.0"),
        ({"torch_min": "2.10.0"}, "the trainer needs 2.10.0 or newer"),
        ({"gpus": "8.0,10.0"}, "no code for 10.0"),
        ({"archs": "8.6"}, "no code for 8.6"),
        ({"nccl": "2.30.7"}, "nccl is 2.27.7, but the stack has 2.30.7"),
    ],
    ids=str,
)
def test_libraries_with_other_versions_are_named(
    monkeypatch: pytest.MonkeyPatch, expected: dict[str, str], said: str
) -> None:
    with pytest.raises(selftest.SelfTestFailed, match=said):
        checked(monkeypatch, **expected)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            {"org.clipship.torch": "2.14.1", "org.clipship.nccl": "2.30.7"},
            ["--torch", "2.14.1", "--nccl", "2.30.7"],
        ),
        (
            {"org.clipship.torch": "2.14.1", "org.clipship.cuda": "13.0", "org.clipship.nccl": "2.30.7"},
            [
                "--torch",
                "2.14.1",
                "--cuda",
                "13.0",
                "--nccl",
                "2.30.7",
                "--archs",
                "7.5,8.0,8.6,9.0,10.0,12.0",
            ],
        ),
        (
            {
                "org.clipship.torch": "2.14.1",
                "org.clipship.cuda": "13.0",
                "org.clipship.nccl": "2.30.7",
                "org.clipship.platform": "linux/arm64",
            },
            ["--torch", "2.14.1", "--cuda", "13.0", "--nccl", "2.30.7", "--archs", "8.0,9.0,10.0,11.0,12.0"],
        ),
        ({"org.clipship.torch": "base", "org.clipship.cuda": "13.0"}, ["--cuda", "13.0"]),
        ({"org.clipship.compiler": "g++"}, ["--compiler"]),
        ({}, []),
    ],
    ids=str,
)
def test_verify_asks_for_what_the_labels_promise(labels: dict[str, str], words: list[str]) -> None:
    stored = Stored("sha256:1", (), {"Labels": labels}, 1)
    assert verify._expectations(stored) == words
