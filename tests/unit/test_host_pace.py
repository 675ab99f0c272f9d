"""A host that its GPU waits for is told so once, and no other."""

import logging
import time

import pytest

from trainer.telemetry.records import Lap
from trainer.train.loop import HostPace


def said(
    pace: HostPace,
    laps: list[Lap],
    waited_s: float,
    caplog: pytest.LogCaptureFixture,
    elsewhere_s: float = 0.0,
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
    (message,) = said(HostPace(advises=True), [SHORT, *[LONG] * 12], 0.0, caplog)
    assert message.startswith("speed        the GPU waits for the host, which needs 50.0 ms for a step: ")
    assert "model.cuda_graphs = true" in message


def test_waits_in_the_reduction_are_waits(caplog: pytest.LogCaptureFixture) -> None:
    assert said(HostPace(advises=True), [LONG] * 13, 0.0, caplog, elsewhere_s=0.05) == []
