"""Headers that are read by hops are those that reading everything finds, and large members are not read."""

import io
import tarfile
from collections.abc import Sequence
from typing import BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

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


def test_large_members_are_passed_over_and_small_ones_are_read_in_large_parts() -> None:
    large = tar_of(
        [(f"{number:03d}", ending, 3 * 2**20) for number in range(4) for ending in ("jpg", "txt")], 0
    )
    fetched: list[int] = []
    assert len(read_headers(hopping(large, fetched), SELECTION).entry) == 4
    assert sum(fetched) < hops.FIRST_BYTES + 9 * hops.LEAST_BYTES < len(large) / 10
    small = tar_of(
        [(f"{number:04d}", ending, 40_000) for number in range(250) for ending in ("jpg", "txt")], 0
    )
    fetched.clear()
    assert len(read_headers(hopping(small, fetched), SELECTION).entry) == 250
    assert sum(fetched) <= len(small)
    assert fetched[:3] == [2**20, 2**21, 2**22]
    assert set(fetched[3:-1]) == {2**22}


def test_filters_are_decided_while_the_headers_are_read() -> None:
    """Small samples are read once, and of large ones their headers and what the filters need."""
    filters = ("min_side >= 64", "score > 0")
    image = io.BytesIO()
    Image.new("RGB", (64, 64)).save(image, "jpeg")
    for size, fetched_at_most in ((40_000, 1.05), (3 * 2**20, 0.07)):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for number in range(100 if size < 2**20 else 8):
                for ending, begin, of_member in (
                    ("jpg", image.getvalue(), size),
                    ("json", b'{"score": %d}' % (number % 2), None),
                    ("txt", b"c", 1),
                ):
                    info = tarfile.TarInfo(f"{number:04d}.{ending}")
                    info.size = of_member or len(begin)
                    tar.addfile(info, io.BytesIO(begin.ljust(info.size, b"\0")))
        fetched: list[int] = []
        found = read_headers(hopping(out.getvalue(), fetched), SELECTION._replace(filters=filters))
        assert found.entry.filtered == {"score > 0": len(found.entry)}
        assert not found.entry.left_out
        assert found == (read_headers(out, SELECTION._replace(filters=filters)))
        assert sum(fetched) < fetched_at_most * len(out.getvalue())
        assert len(fetched) <= 9
