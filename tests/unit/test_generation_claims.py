"""Claims of generations in the run folder: one coordinator gets each number."""

from pathlib import Path

from trainer.run.generations import GenerationClaim, claim, newest_claim, remove_claims


def its(generation: int, member: int = 0, start: str = "now") -> GenerationClaim:
    return GenerationClaim(start, generation, member, f"n{member}", "h", 7)


def test_second_claim_of_a_generation_learns_whose_it_is(tmp_path: Path) -> None:
    assert claim(tmp_path, its(2)) is None
    assert claim(tmp_path, its(2, 5)) == its(2)
    assert claim(tmp_path, its(3, 5)) is None
    assert newest_claim(tmp_path, "now") == its(3, 5)


def test_claim_that_is_half_written_belongs_to_somebody(tmp_path: Path) -> None:
    (tmp_path / "generations").mkdir()
    (tmp_path / "generations" / "00002.json").touch()
    other = claim(tmp_path, its(2))
    assert other is not None
    assert other.member == -1
    assert newest_claim(tmp_path, "now") is None


def test_claims_of_earlier_starts_do_not_count_and_are_removed(tmp_path: Path) -> None:
    claim(tmp_path, its(9, start="before"))
    claim(tmp_path, its(2))
    assert newest_claim(tmp_path, "now") == its(2)
    remove_claims(tmp_path, "now")
    assert [path.name for path in (tmp_path / "generations").iterdir()] == ["00002.json"]


def test_without_claims_there_is_no_newest(tmp_path: Path) -> None:
    assert newest_claim(tmp_path, "now") is None
