"""Headers that are read by hops are those that reading everything finds, and large members are not read."""

import io
import tarfile
from collections.abc import Sequence
from typing import BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import hops
from trainer.data.hops import Hopping
from trainer.data.tar import Selection, read_headers

SELECTION = Selection(("jpg", "png"), "txt")
SMALL = {"FIRST_BYTES": 1024, "LEAST_BYTES": 512, "MOST_BYTES": 4096, "HOP": 2048}

keys = st.text("ab.ö猫/", min_size=1, max_size=6) | st.just("long" * 60)
members = st.tuples(
    keys, st.sampled_from(["jpg", "png", "txt", "json", ""]), st.integers(0, 9000) | st.integers(0, 700)
)


def tar_of(wanted: Sequence[tuple[str, str, int]], kind: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for key, ending, size in wanted:
            info = tarfile.TarInfo(f"{key}.{ending}" if ending else key)
            info.size = size
            tar.addfile(info, io.BytesIO(b"\0" * size))
    return out.getvalue()


def hopping(content: bytes, fetched: list[int]) -> BinaryIO:
    def fetch(begin: int, size: int) -> bytes:
        assert size > 0
        assert begin + size <= len(content)
        fetched.append(size)
        return content[begin : begin + size]

    return cast(BinaryIO, Hopping(len(content), fetch))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(members, max_size=9), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])),
        min_size=1,
        max_size=2,
    ),
    st.none() | st.tuples(st.floats(0, 1), st.sampled_from(["cut", "flip"])),
)
def test_hops_find_what_reading_everything_finds(
    archives: list[tuple[list[tuple[str, str, int]], int]], harm: tuple[float, str] | None
) -> None:
    """In tars of both kinds with long and odd names, that follow each other, whole and damaged."""
    content = bytearray(b"".join(tar_of(wanted, kind) for wanted, kind in archives))
    if harm is not None:
        place = int(harm[0] * (len(content) - 1))
        if harm[1] == "cut":
            del content[place:]
        else:
            content[place] ^= 0xFF
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(hops, name, value)
        found = read_headers(hopping(bytes(content), []), SELECTION)
    assert found == (read_headers(io.BytesIO(bytes(content)), SELECTION))
