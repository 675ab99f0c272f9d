"""Pictures and captions that are functions of a sample's number, so that a model can learn without any file.

No torch.
"""

import numpy as np
from numpy.typing import NDArray

from trainer.data.sample import LeftOut, Numbering, RawSample

NOISE = 64
# These are added to the noise, so that no channel passes 255.
COLOURS = {
    "red": (180, 20, 20),
    "green": (20, 140, 40),
    "blue": (30, 50, 180),
    "yellow": (180, 170, 30),
    "white": (190, 190, 190),
}
SHAPES = ("square", "disc", "cross", "ring")
PLACES = {
    "top left": (0.3, 0.3),
    "top right": (0.3, 0.7),
    "bottom left": (0.7, 0.3),
    "bottom right": (0.7, 0.7),
    "middle": (0.5, 0.5),
}
SIDE = 64


class SyntheticSource:
    """Source of coloured shapes on noise, 64 x 64 pixels.

    Neighbouring numbers differ in colour, then shape, then place.
    """

    left_out = LeftOut()

    def __init__(self, samples: int) -> None:
        self._numbering = Numbering([samples])

    def __len__(self) -> int:
        return self._numbering.samples

    def shard_sizes(self) -> list[int]:
        return [self._numbering.samples]

    def read(self, index: int) -> RawSample:
        _, number = self._numbering.locate(index)
        rest, colour_number = divmod(number, len(COLOURS))
        place_number, shape_number = divmod(rest, len(SHAPES))
        colour, shape, place = (
            list(COLOURS)[colour_number],
            SHAPES[shape_number],
            list(PLACES)[place_number % len(PLACES)],
        )
        image = np.random.default_rng(number).integers(0, NOISE, (SIDE, SIDE, 3), dtype=np.uint8)
        image[_mask(shape, *PLACES[place])] += np.array(COLOURS[colour], dtype=np.uint8)
        captions = (
            f"a {colour} {shape} at the {place}",
            f"at the {place}: a {colour} {shape}",
        )
        return RawSample(f"{number:09d}", "synthetic data", image, captions)


def _mask(shape: str, row: float, column: float) -> NDArray[np.bool_]:
    """Returns [SIDE, SIDE], true inside a shape about a third as wide as the picture."""
    down, across = np.indices((SIDE, SIDE)) / SIDE - np.array([row, column])[:, None, None]
    distance, larger = np.hypot(down, across), np.maximum(abs(down), abs(across))
    masks = {
        "square": larger < 0.15,
        "disc": distance < 0.17,
        "cross": (np.minimum(abs(down), abs(across)) < 0.05) & (larger < 0.17),
        "ring": (distance < 0.18) & (distance > 0.1),
    }
    return np.asarray(masks[shape])
