"""Opens an index of 10,000 shards of 10,000 samples each: `python -m benchmarks.data_index FOLDER`.

Prints the seconds that it takes and the MB of the whole process. That is VmHWM, which begins with the
program; `ru_maxrss` would include the memory of the process that started it.

The index is generated: its catalogue is whole, the files of rows are links to one. No shard exists, so
nothing can be read but the index.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from trainer.data.entry import Content, Entry
from trainer.data.files import Stamp
from trainer.data.index import open_index, rows_file, write_catalogue, write_rows
from trainer.data.lanes import LaneOrder, Lanes
from trainer.data.shards import open_indexed
from trainer.data.tar import PLACE, Rows, Selection

SHARDS, SAMPLES = 10_000, 10_000
SELECTION = Selection(("jpg",), "txt")
BATCH = 4096


def paths(folder: Path) -> list[str]:
    return [str(folder.parent / f"{number:05d}.tar") for number in range(SHARDS)]


@contextmanager
def generated(parent: Path) -> Iterator[Path]:
    """A folder with the index, removed afterwards."""
    with tempfile.TemporaryDirectory(dir=parent) as beside:
        folder = Path(beside) / "index"
        folder.mkdir()
        places = np.zeros(SAMPLES, dtype=PLACE)
        places["image_at"] = np.arange(SAMPLES) * 40_000
        places["image_size"], places["text_size"], places["key_end"] = (
            38_000,
            60,
            np.arange(1, SAMPLES + 1) * 9,
        )
        keys = np.frombuffer(b"".join(b"%09d" % number for number in range(SAMPLES)), dtype=np.uint8)
        names = paths(folder)
        entry = Entry(0, "", SAMPLES, "", {}, {"jpg": SAMPLES, "txt": SAMPLES})
        content = Content(entry, Rows(places, keys).payload)
        first = rows_file(folder, names[0], SELECTION)
        entry = write_rows(first, Stamp(SAMPLES * 40_000, "0"), content)
        for name in names[1:]:
            rows_file(folder, name, SELECTION).hardlink_to(first)
        write_catalogue(folder, SELECTION, {f"../{Path(name).name}": entry for name in names})
        yield folder


def most_memory_mb() -> float:
    """Returns the largest memory in MB that this process has had since it began to run its own program."""
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) / 1024


def main(folder: Path) -> None:
    start = time.perf_counter()
    index = open_index(paths(folder), SELECTION, folder)
    source = open_indexed(index, SELECTION, "captions")
    opened = time.perf_counter() - start
    assert len(source) == SHARDS * SAMPLES
    order = LaneOrder(source.shard_sizes(), Lanes(105, BATCH), seed=0, epoch=0, batch=BATCH)
    ends = []
    for position in (0, len(source) * 9 // 10):
        start = time.perf_counter()
        for sample in order.samples(position, position + BATCH).tolist():
            index.rows(sample // SAMPLES) if sample % 500 == 0 else None
        ends.append(time.perf_counter() - start)
    print(
        json.dumps(
            {
                "index_open_s": round(opened, 2),
                "index_mb": round(most_memory_mb()),
                "index_first_s": ends[0],
                "index_at_90_percent_s": ends[1],
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
