"""The seconds of a restart by part."""

from trainer.supervise.restarts import RestartClock, parts_text


def test_each_part_lasts_from_the_end_of_the_one_before() -> None:
    clock = RestartClock(100.0)
    clock.end_part("detect", 100.4)
    clock.end_part("end", 100.5)
    clock.end_ranks_parts({"running": 103.5, "connected": 104.0, "restored": 106.0, "stepped": 106.25})
    clock.end_part("redone", 107.0)
    assert clock.parts == {
        "detect": 0.4,
        "end": 0.1,
        "start": 3.0,
        "connect": 0.5,
        "restore": 2.0,
        "first_step": 0.25,
        "redone": 0.75,
    }


def test_a_moment_before_the_last_one_takes_no_time() -> None:
    clock = RestartClock(100.0)
    clock.end_part("detect", 101.0)
    clock.end_ranks_parts({"running": 99.0, "connected": 101.5})
    assert clock.parts == {"detect": 1.0, "start": 0.0, "connect": 0.5}


def test_status_names_the_parts_that_took_time() -> None:
    parts = {"first_step": 0.26, "detect": 0.41, "end": 0.04, "unknown": 3.0, "start": None}
    assert parts_text(parts) == "deciding 0.4 s, the first step 0.3 s"
    assert parts_text({}) == parts_text(None) == parts_text([1]) == ""
