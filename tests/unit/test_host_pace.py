"""A host that its GPU waits for is told so once, and no other."""

import logging
import time

import pytest

from trainer.telemetry.records import Lap
from trainer.train.loop import HostPace


def said(
    pace: HostPace, laps: list[Lap], waited_s: float, elsewhere_s: float, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """Returns what is said over the laps, in each of which the host waits so long for the GPU."""
    caplog.set_level(logging.INFO, "clipship")
    for number, lap in enumerate(laps, 1):
        with pace.waiting():
            time.sleep(waited_s)
        pace.record(lap, 30.0 + number * elsewhere_s)
    return [record.getMessage() for record in caplog.records]


SHORT, LONG = Lap(10, compute_s=0.01), Lap(10, compute_s=0.5)


def test_a_host_that_never_waits_is_told_once_what_helps(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = said(HostPace(advises=True), [SHORT, *[LONG] * 12], 0.0, 0.0, caplog)
    assert message.startswith("speed        the GPU waits for the host, which needs 50.0 ms for a step: ")
    assert "model.cuda_graphs = true" in message


@pytest.mark.parametrize(
    ("advises", "laps", "waited_s", "elsewhere_s"),
    [
        (False, [LONG] * 13, 0.0, 0.0),
        (True, [LONG] * 5, 0.0, 0.0),
        (True, [SHORT] * 13, 0.001, 0.0),
        (True, [LONG] * 13, 0.0, 0.05),
        (True, [Lap(10, compute_s=0.5, data_s=0.25)] * 13, 0.0, 0.0),
    ],
    ids=["another rank", "too few steps", "a GPU that works", "waits in the reduction", "a slow loader"],
)
def test_others_are_told_nothing(
    advises: bool, laps: list[Lap], waited_s: float, elsewhere_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(HostPace(advises=advises), laps, waited_s, elsewhere_s, caplog) == []
