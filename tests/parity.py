"""`make parity`: the gradient of ranks against that of one process that holds the whole batch.

It compares on 1, 2 and 4 ranks, every backend and launcher. Prints a line for each case and ends with
one line of JSON; the exit code is 1 if a case is above the bound. Without Horovod its half is left out, and
the last line says so.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from tests.support.start import STARTS, told
from tests.support.warm.start import warm_starts

BOUND = 1e-12  # relative, float64
RANKS = (1, 2, 4)


def main() -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # as in tests.conftest: ranks share the cores
    has_horovod = importlib.util.find_spec("horovod") is not None
    print(
        f"{'ranks':>5} {'backend':8} {'launcher':14} {'model':12} {'loss':7} {'positives':9} {'tile':>4} "
        f"{'accumulation':>12} {'relative error':>15}"
    )
    with warm_starts():
        rows = [
            row
            for backend, launcher in (*STARTS, ("fsdp", "clipship"))
            if backend != "horovod" or has_horovod
            for row in _rows(backend, launcher)
        ]
    worst = max(row["relative_error"] for row in rows)
    left_out = [] if has_horovod else ["horovod"]
    print(
        json.dumps({"worst_relative_error": worst, "bound": BOUND, "rows": len(rows), "left_out": left_out})
    )
    return int(worst > BOUND)


def _rows(backend: str, launcher: str) -> Iterator[dict[str, Any]]:
    for ranks in RANKS:
        for row in told(backend, launcher, ranks, "tests.support.parity_rank", backend):
            print(_line(row), flush=True)
            yield row


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['ranks']:>5} {row['backend']:8} {row['launcher']:14} {row['model']:12} {row['loss']:7} "
        f"{row['positives']:9} "
        f"{row['tile']:>4} {row['accumulation']:>12} {row['relative_error']:>15.2e}"
    )


if __name__ == "__main__":
    sys.exit(main())
