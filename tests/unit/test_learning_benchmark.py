"""The parts of `make bench-learning` that need no network: what is held out, captions, and its figures."""

import hashlib
import io
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.learning import Learned, difference, recalls, seconds_to, summary
from benchmarks.learning_data import Concept, bare, check_sum, common_concepts, svg, training_samples

CAT = Concept(
    "1f431", {"en": "cat", "zh": "猫"}, {"en": ["pet", "cat", "face", "kitty", "fur"], "zh": ["宠物"]}
)
SUN = Concept("2600", {"en": "sun", "zh": "太阳"}, {"en": [], "zh": ["天气", "热"]})


def test_an_emoji_counts_if_all_styles_and_languages_have_it() -> None:
    words: dict[str, list[dict[str, Any]]] = {
        "en": [
            {"hexcode": "2600-FE0F", "label": "sun"},
            {"hexcode": "1F431", "label": "cat", "tags": ["pet"]},
        ],
        "zh": [{"hexcode": "1F431", "label": "猫", "tags": ["宠物"]}, {"hexcode": "2600", "label": "太阳"}],
    }
    found = common_concepts(words, [{"2600", "1f431"}, {"1f431", "2600", "1f436"}])
    assert [(each.code, each.names, each.tags["en"]) for each in found] == [
        ("2600", {"en": "sun", "zh": "太阳"}, []),
        ("1f431", {"en": "cat", "zh": "猫"}, ["pet"]),
    ]
    assert [each.code for each in common_concepts(words, [{"2600"}, {"1f431", "2600"}])] == ["2600"]
    assert bare("1F9D1-200D-2764-FE0F-200D-1F9D1") == "1f9d1-200d-2764-200d-1f9d1"


def test_captions_have_the_name_and_other_words_in_each_style() -> None:
    assert [CAT.caption("en", number, 3) for number in range(3)] == [
        "cat, pet, fur",
        "cat, face",
        "cat, kitty",
    ]
    assert [CAT.caption("zh", number, 3) for number in range(3)] == ["猫, 宠物", "猫", "猫"]


def test_training_sees_every_style_but_the_one_held_out(tmp_path: Path) -> None:
    for style in ("a", "b", "c", "held"):
        for each in (CAT, SUN):
            Image.new("RGB", (2, 2)).save(tmp_path / f"{style}-{each.code}.png")
    samples = list(training_samples([CAT, SUN], ["a", "b", "c"], tmp_path))
    assert sorted(key for key, _ in samples) == sorted(
        f"{style}-{code}-{language}"
        for style in "abc"
        for code in ("1f431", "2600")
        for language in ("en", "zh")
    )
    assert dict(samples)["b-2600-zh"]["txt"].decode() == "太阳, 热"
    assert Image.open(io.BytesIO(dict(samples)["c-2600-en"]["png"])).size == (2, 2)
    assert samples == list(training_samples([CAT, SUN], ["a", "b", "c"], tmp_path))


def test_an_icon_has_its_own_size_or_that_of_its_set() -> None:
    icons = {"width": 36, "height": 32, "icons": {"a": {"body": "<path/>"}, "b": {"body": "", "height": 9}}}
    assert svg(icons, "a").endswith('viewBox="0 0 36 32"><path/></svg>')
    assert 'viewBox="0 0 36 9"' in svg(icons, "b")


def test_an_archive_that_is_not_the_pinned_one_is_removed(tmp_path: Path) -> None:
    archive = tmp_path / "noto.tgz"
    archive.write_bytes(b"pictures")
    check_sum(archive, hashlib.sha256(b"pictures").hexdigest())
    with pytest.raises(SystemExit, match="it was removed"):
        check_sum(archive, hashlib.sha256(b"others").hexdigest())
    assert not archive.exists()


def test_recall_is_the_share_of_names_that_find_their_picture() -> None:
    assert recalls({"en": [0, 1, 4, 5], "zh": [0, 0, 9, 9]}) == {
        "en_r1": 0.25,
        "en_r5": 0.75,
        "zh_r1": 0.5,
        "zh_r5": 0.5,
    }


def test_a_difference_has_the_error_of_a_sample_of_names() -> None:
    """One finds m more of n names: the mean is m/n, and the variance m/n (1 - m/n) n/(n - 1)."""
    n, more = 400, 40
    mine = {"en": [0] * n, "zh": [0] * n}
    yours = {language: [7] * more + [0] * (n - more) for language in mine}
    gain, error = difference([mine, mine], [yours, yours])
    share = more / n
    assert gain == pytest.approx(share)
    assert error == pytest.approx(2 * math.sqrt(share * (1 - share) / (n - 1)))
    assert difference([yours], [mine])[0] == pytest.approx(-share)


def test_a_difference_within_its_error_is_too_small_to_show() -> None:
    def learned(seconds: float, found: int) -> Learned:
        return Learned(seconds, {"en": [0] * found + [9] * (100 - found)})

    ours = [learned(10, 20), learned(20, 40)]
    shown = summary(("ours", "theirs"), [[ours, [learned(30, 39)]]])
    assert shown["shows"] == "too small to show"
    assert shown["ours_s_to_theirs_r1"] == 19.5
    assert (shown["chance_r1"], shown["chance_r5"]) == (0.01, 0.05)
    assert summary(("ours", "theirs"), [[ours, [learned(30, 10)]]])["shows"] == "ours"
    worse = summary(("ours", "theirs"), [[ours, [learned(30, 80)]]])
    assert (worse["shows"], worse["ours_s_to_theirs_r1"]) == ("theirs", None)
    assert seconds_to([learned(10, 0)], 0.0) == 10
