"""Lines of a rank's log say which generation of ranks wrote them."""

import logging
from dataclasses import replace

import pytest

from trainer.supervise.console import rank_formatter
from trainer.supervise.world import SINGLE, World

ALONE = World(0, 1, 0, 1, "a", SINGLE)


@pytest.mark.parametrize(
    ("generation", "line"), [(1, "INFO step 4"), (2, "INFO [generation 2] step 4"), (12, None)]
)
def test_records_name_their_generation_from_the_second_on(generation: int, line: str | None) -> None:
    record = logging.LogRecord("clipship", logging.INFO, "", 0, "step %d", (4,), None)
    world = replace(ALONE, generation=generation)
    assert rank_formatter(world, "%(levelname)s ").format(record) == (line or "INFO [generation 12] step 4")
    assert rank_formatter(world).format(record) == (line or "INFO [generation 12] step 4")[5:]
