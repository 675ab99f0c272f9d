"""Files of features as `clipship embed` writes them, with values of a test's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

ABOUT: dict[str, Any] = {
    "made_by": "x",
    "model": "m",
    "size": 1,
    "changed": "c",
    "samples": 2,
    "rows": 2,
    "bad": {},
    "width": 2,
    "logit_scale": 100.0,
    "logit_bias": None,
    "read_by": {},
    "views": 0,
}


def vectors_of(vectors: Any) -> Any:
    """A column of these vectors, [rows, width]."""
    return pyarrow.FixedSizeListArray.from_arrays(np.ravel(vectors), np.shape(vectors)[1])


def features(path: Path, about: object, drop: str = "", statistics: bool = True, **columns: Any) -> str:
    """A file of the features of samples k0 and k1, or of these columns."""
    ones = vectors_of(np.ones((2, 2), dtype=np.float16))
    count = len(columns.get("row", range(2)))
    table = {
        "shard": ["0.tar"] * count,
        "key": ["k0", "k1"],
        "row": np.arange(count),
        "caption": np.zeros(count, dtype=np.int64),
        "image": ones,
        "text": ones,
        "cosine": [1.0] * count,
        "problem": pyarrow.array([None] * count, type=pyarrow.string()),
    }
    table = {name: value for name, value in {**table, **columns}.items() if name != drop}
    text = about if isinstance(about, str) else json.dumps(about)
    held = pyarrow.table(table).replace_schema_metadata({"clipship": text})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(held, path, write_statistics=statistics)
    return str(path)
