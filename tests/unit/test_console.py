"""Lines of a rank's log say which generation of ranks wrote them."""

import logging
from dataclasses import replace

import pytest

from trainer.world.console import rank_formatter
from trainer.world.launchers import SINGLE, World

ALONE = World(0, 1, 0, 1, "a", SINGLE)


@pytest.mark.parametrize(
    ("generation", "level", "line"),
    [
        (1, logging.INFO, "INFO step 4"),
        (2, logging.INFO, "INFO step 4"),
        (1, logging.WARNING, "WARNING step 4"),
        (2, logging.WARNING, "WARNING [generation 2] step 4"),
        (12, logging.ERROR, "ERROR [generation 12] step 4"),
    ],
)
def test_what_is_wrong_names_its_generation_from_the_second_on(
    generation: int, level: int, line: str
) -> None:
    record = logging.LogRecord("clipship", level, "", 0, "step %d", (4,), None)
    world = replace(ALONE, generation=generation)
    for _ in range(2):  # several handlers format one record
        assert rank_formatter(world, "%(levelname)s ").format(record) == line
        assert rank_formatter(world).format(record) == line.partition(" ")[2]
