"""Lines that fit a terminal."""

import io

import pytest

from trainer.text.fitting import fit_to, fitted

STEP = (
    "step  4/20  epoch 1  loss 3.1  lr 1.00e-04  grad 2.0  scale 14.3  9 samples/s  data 0% comm 1%  ETA 0:20"
)


@pytest.mark.parametrize(
    ("line", "columns", "expected"),
    [
        ("short\n", 40, "short\n"),
        ("batch        32 = 2 ranks x 16\n", 25, "batch        32 = 2 ranks\n             x 16\n"),
        ("no topic but many words here", 20, "no topic but many\n  words here"),
        ("result       /" + "a" * 40, 20, "result       /" + "a" * 40),
        (STEP, len(STEP), STEP),
        (STEP, 100, STEP.replace("data 0% comm 1%  ", "")),
        (STEP, 60, "step  4/20  loss 3.1  lr 1.00e-04  9 samples/s  ETA 0:20"),
        (STEP, 20, "step  4/20  loss 3.1  9 samples/s  ETA 0:20"),
    ],
)
def test_a_line_is_folded_between_words_and_a_step_loses_parts(
    line: str, columns: int, expected: str
) -> None:
    assert fitted(line, columns) == expected


def test_what_is_no_terminal_gets_whole_lines() -> None:
    assert fit_to(io.StringIO(), STEP) == STEP
