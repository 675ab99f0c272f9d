"""`clipship logs`: what several ranks say at about the same time comes once."""

from collections.abc import Iterator

from trainer.launch.same_lines import each_once

Line = tuple[str, int, str]


def said(second: float, rank: int, message: str) -> Line:
    stamp = f"2026-01-02 03:{int(second) // 60:02}:{int(second) % 60:02},000 "
    return stamp, rank, f"{stamp}INFO {message}"


def shown(*lines: Line) -> list[str]:
    """The lines without their times."""
    found = [line.partition("] ") for line in each_once(lines)]
    return [f"{ranks}] {text.partition('INFO ')[2] or text}" for ranks, _, text in found]


def test_a_line_of_all_ranks_comes_once_and_at_its_first_place() -> None:
    lines = [said(second, rank, text) for second, text in enumerate("abc") for rank in (0, 1, 2, 5)]
    assert shown(*lines) == ["[0-2,5] a", "[0-2,5] b", "[0-2,5] c"]
    assert shown(said(0, 1, "a"), said(1, 0, "b"), said(2, 0, "a")) == ["[0-1] a", "[0] b"]


def test_ranks_that_differ_have_lines_of_their_own() -> None:
    assert shown(said(0, 0, "node a"), said(0, 1, "node b")) == ["[0] node a", "[1] node b"]


def test_a_line_that_a_rank_repeats_is_shown_as_often() -> None:
    lines = [said(0, 0, "a"), said(1, 0, "a"), said(1, 1, "a"), said(2, 1, "a")]
    assert shown(*lines) == ["[0-1] a", "[0-1] a"]


def test_the_same_words_much_later_are_another_line() -> None:
    assert shown(said(0, 0, "a"), said(6, 1, "a")) == ["[0] a", "[1] a"]
    assert shown(said(0, 0, "a"), said(5, 1, "a")) == ["[0-1] a"]


def test_lines_without_a_time_follow_the_line_before_them() -> None:
    stamp, _, first = said(0, 0, "failed:")
    trace = [(stamp, 0, first), (stamp, 0, "  File x"), (stamp, 0, "  ^^"), (stamp, 0, "  at 0")]
    other = [(stamp, 1, first), (stamp, 1, "  File x"), (stamp, 1, "  ^^"), (stamp, 1, "  at 1")]
    assert shown(*trace, *other) == [
        "[0-1] failed:",
        "[0-1]   File x",
        "[0-1]   ^^",
        "[0]   at 0",
        "[1]   at 1",
    ]
    assert shown(("", 0, "no time"), ("", 1, "no time")) == ["[0-1] no time"]


def test_lines_are_held_back_for_seconds_only() -> None:
    def lines() -> list[Line]:
        return [said(second, 0, str(second)) for second in range(100)]

    seen: list[int] = []

    def watched() -> Iterator[Line]:
        for number, line in enumerate(lines()):
            seen.append(number)
            yield line

    assert next(iter(each_once(watched()))).endswith("INFO 0")
    assert max(seen) == 6
