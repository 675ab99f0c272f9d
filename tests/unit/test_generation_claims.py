"""Claims of generations in the run folder: one coordinator gets each number."""

import errno
import os
import resource
from pathlib import Path

import pytest

from trainer.run.generations import GenerationClaim, claim, newest_claim, remove_claims


def its(generation: int, member: int = 0, start: str = "now") -> GenerationClaim:
    return GenerationClaim(start, generation, member, f"n{member}", "h", 7)


def test_second_claim_of_a_generation_learns_whose_it_is(tmp_path: Path) -> None:
    assert claim(tmp_path, its(2)) is None
    assert claim(tmp_path, its(2, 5)) == its(2)
    assert claim(tmp_path, its(3, 5)) is None
    assert newest_claim(tmp_path, "now") == its(3, 5)


def test_an_empty_claim_belongs_to_somebody_and_is_void_after_some_seconds(tmp_path: Path) -> None:
    """A file system without links shows one if its maker dies before it has written it."""
    path = tmp_path / "generations" / "00002.json"
    path.parent.mkdir()
    path.touch()
    with pytest.raises(OSError, match=r"00002\.json, which another supervisor has made, cannot be read"):
        claim(tmp_path, its(2))
    assert newest_claim(tmp_path, "now") is None
    os.utime(path, (0, 0))
    for member in (0, 5):
        assert claim(tmp_path, its(2, member)) == its(2, member), "its own, which each passes over"
    assert claim(tmp_path, its(3)) is None
    assert claim(tmp_path, its(3, 5)) == its(3)


@pytest.mark.parametrize("links", [True, False])
def test_a_claim_that_cannot_be_written_leaves_its_number_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refused)
    (tmp_path / "generations").mkdir()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))  # as on a disk without room
    try:
        with pytest.raises(OSError, match="File too large"):
            claim(tmp_path, its(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert os.listdir(tmp_path / "generations") == []
    assert claim(tmp_path, its(2, 5)) is None
    assert claim(tmp_path, its(2)) == its(2, 5)
    assert os.listdir(tmp_path / "generations") == ["00002.json"]


def refused(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_claims_of_earlier_starts_do_not_count_and_are_removed(tmp_path: Path) -> None:
    claim(tmp_path, its(9, start="before"))
    claim(tmp_path, its(2))
    assert newest_claim(tmp_path, "now") == its(2)
    remove_claims(tmp_path, "now")
    assert [path.name for path in (tmp_path / "generations").iterdir()] == ["00002.json"]


def test_without_claims_there_is_no_newest(tmp_path: Path) -> None:
    assert newest_claim(tmp_path, "now") is None
