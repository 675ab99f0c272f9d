"""Draws SVG pictures: `python learning_render.py PICTURES OUT SIDE`.

Each line of PICTURES is a JSON list, a name and an SVG; the picture is OUT/NAME.png, SIDE pixels wide and
high, on white. Runs in an environment of its own, so it imports nothing of this project.
"""

import io
import json
import sys
from pathlib import Path

import resvg_py
from PIL import Image


def main(pictures: str, out: str, side: int) -> None:
    with open(pictures, encoding="utf-8") as lines:
        for line in lines:
            name, svg = json.loads(line)
            drawn = resvg_py.svg_to_bytes(
                svg_string=svg, width=side, height=side, background="#ffffff", skip_system_fonts=True
            )
            Image.open(io.BytesIO(drawn)).convert("RGB").save(Path(out, f"{name}.png"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
