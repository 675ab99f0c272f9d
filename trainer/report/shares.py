"""Draws the parts of a step's time as stacked shares. Pure; no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.report.charts import (
    Chart,
    Label,
    Series,
    grid,
    height,
    step_labels,
    step_scale,
    steps_text,
    stretches,
    width,
)
from trainer.report.scale import Scale
from trainer.report.wording import percent, time_of


@dataclass(frozen=True)
class _Block:
    """Steps after `left` up to `right`."""

    left: float
    right: float
    seconds: Sequence[float]
    """Seconds of one step, by part."""

    def below(self, part: int) -> float:
        """Returns the share of all parts before this one."""
        return sum(self.seconds[:part]) / (sum(self.seconds) or 1.0)


def share_chart(title: str, parts: Sequence[Series], note: str = "") -> Chart:
    """Draws shares of a step's time over steps.

    Values are seconds of one step, averaged since the series' previous step; each block is as wide as these
    steps.
    """
    blocks = _blocks(parts)
    x, y = step_scale(blocks[-1].right if blocks else 1), Scale(0.0, 1.0)
    stairs = (
        f'<path class="area c{part.color}" d="{_stairs(blocks, number, x, y)}"/>'
        for number, part in enumerate(parts)
        if blocks
    )
    return Chart(
        title=title,
        note=note,
        svg="".join(stairs) + grid(y),
        x_labels=step_labels(x),
        y_labels=[Label(100 - 100 * share, f"{share:.0%}") for share in y.ticks()],
        legend=[(part.name, part.color) for part in parts],
        hover=_hover(parts, blocks, x),
        y_title="share of a step's time",
    )


def _blocks(parts: Sequence[Series]) -> list[_Block]:
    steps = parts[0].steps
    spans = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    blocks = []
    for some in stretches(len(steps)):
        whole = sum(spans[some]) or 1
        seconds = [
            sum(span * value for span, value in zip(spans[some], part.values[some], strict=True)) / whole
            for part in parts
        ]
        blocks.append(_Block(steps[some][0] - spans[some][0], steps[some][-1], seconds))
    return blocks


def _stairs(blocks: Sequence[_Block], part: int, x: Scale, y: Scale) -> str:
    """Returns an SVG path along the part's upper edge and back along its lower one."""
    there = [f"V{height(y, block.below(part + 1)):g}H{width(x, block.right):g}" for block in blocks]
    back = [f"V{height(y, block.below(part)):g}H{width(x, block.left):g}" for block in reversed(blocks)]
    return f"M{width(x, blocks[0].left):g} {height(y, 0.0):g}" + "".join(there + back) + "Z"


def _hover(parts: Sequence[Series], blocks: Sequence[_Block], x: Scale) -> str:
    return json.dumps(
        {
            "x": [round(100 * x.place((block.left + block.right) / 2), 2) for block in blocks],
            "head": [steps_text(block.left + 1, block.right) for block in blocks],
            "names": [part.name for part in parts],
            "colors": [part.color for part in parts],
            "texts": [[_text(block, part) for block in blocks] for part in range(len(parts))],
            "y": [],
        }
    )


def _text(block: _Block, part: int) -> str:
    return f"{percent(block.below(part + 1) - block.below(part))}, {time_of(block.seconds[part])}"
