"""The quick tokenizer gives open_clip's tokens, whatever the text."""

import logging
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip import get_tokenizer
from open_clip import tokenizer as open_clip_tokenizer
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

from tests.support.jobs import tiny_job
from tests.support.loading import refusal
from trainer.config import Data
from trainer.data.caption_lengths import CaptionLengths, CaptionMonitor, counter_of
from trainer.data.tokens import quick, with_mask
from trainer.model.light_tokenizer import lengths_for
from trainer.plan.first_samples import FirstSamples

THEIRS = get_tokenizer("ViT-B-32")
OURS = quick(get_tokenizer("ViT-B-32"))

MASKS = ("random", "shuffle", "simple")

TEXTS = st.one_of(
    st.text(max_size=60),
    st.text("abc XYZ'&;<>_0123.,-\t\n\\x1b[", max_size=80),
    st.sampled_from(["<end_of_text>", "&amp;amp;", "l\u2019\u00e9t\u00e9"]),
)


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=4))
def test_tokens_are_those_of_open_clip(texts: list[str]) -> None:
    assert torch.equal(OURS(texts), THEIRS(texts))


def test_long_texts_are_cut_as_open_clip_cuts_them_also_when_the_cache_of_words_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["word " * count for count in (74, 75, 76, 77, 200)]
    assert torch.equal(OURS(texts), THEIRS(texts))
    monkeypatch.setattr("trainer.data.tokens.MOST_WORDS", 3)
    texts, ours = ["one two three four five", "<end_of_text> six seven one two"], quick(SimpleTokenizer())
    for _ in range(2):
        assert torch.equal(ours(texts), THEIRS(texts))


def long_texts(count: int) -> list[str]:
    return [f"{' '.join(f'word{number + part} of' for part in range(30))} end" for number in range(count)]


@pytest.mark.parametrize("kind", MASKS)
def test_masks_take_what_open_clips_take_with_the_same_draws(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = SimpleTokenizer(context_length=16, reduction_mask=kind)
    ours: Any = with_mask(quick(SimpleTokenizer(context_length=16)), kind)
    for seed, text in enumerate([*long_texts(8), "short one"]):
        draw = random.Random(seed)
        monkeypatch.setattr(
            open_clip_tokenizer.torch,
            "randperm",
            lambda count, draw=draw: torch.tensor(sorted(range(count), key=lambda _: draw.random())),
        )
        monkeypatch.setattr(
            open_clip_tokenizer.random,
            "randint",
            lambda low, high, draw=draw: low + int(draw.random() * (high - low + 1)),
        )
        assert torch.equal(ours.masked([text], [seed]), theirs([text]))


def test_masks_draw_anew_for_each_seed_and_alike_for_the_same() -> None:
    (text,) = long_texts(1)
    quick_one = quick(SimpleTokenizer(context_length=16))
    for kind in MASKS:
        masked: Any = with_mask(quick_one, kind)
        drawn = masked.masked([text] * 20, [*range(10), *range(10)])
        assert torch.equal(drawn[:10], drawn[10:])
        assert len({tuple(row) for row in drawn.tolist()}) >= 8
        assert torch.equal(masked([text]), quick_one([text])), "evaluation takes the beginning"
        assert torch.equal(pickle.loads(pickle.dumps(masked)).masked([text], [3]), drawn[3:4])


def test_a_mask_needs_open_clips_own_tokenizer() -> None:
    def other(texts: list[str]) -> torch.Tensor:
        return torch.zeros(len(texts), 4)

    assert quick(other) is other
    assert 'data.text_mask = "random" shortens texts of open_clip' in refusal(with_mask, other, "random")
    assert with_mask(other, None) is other


# Captions that are longer than the text tower takes: counted before a run, in it, and by `data stats`.

SHORT, LONG = "a dog", "一只棕色的狗在绿色的草地上追着一个红色的球"
CAPTIONS = [SHORT, LONG, "Curly “quotes” &amp; naïve words, l'eau", ""]
CAPTIONS_ARE_POSITIVES = {"positives": "captions"}
"""Equal captions, which these tests have, are then no reason for a warning."""


def test_tokens_are_counted_alike_with_and_without_torch() -> None:
    simple = SimpleTokenizer()
    exact = [len(simple.encode(text)) + 2 for text in CAPTIONS]
    of_the_run, found = counter_of(quick(simple)), lengths_for(tiny_job().model, CAPTIONS)
    assert of_the_run is not None
    assert found is not None
    assert (found.most, found.tokens) == (16, exact)
    assert list(map(of_the_run, CAPTIONS)) == exact
    assert exact[1] > 16, "so that the test cuts something"


def test_a_tokenizer_of_transformers_counts_with_the_ends_that_it_adds() -> None:
    class Words:
        def __call__(self, text: str, *, verbose: bool) -> dict[str, list[str]]:
            return {"input_ids": ["[CLS]", *text.split(), "[SEP]"]}

    tokenizer = HFTokenizer.__new__(HFTokenizer)
    tokenizer.tokenizer, tokenizer.clean_fn = Words(), str.strip
    counter = counter_of(tokenizer)
    assert counter is not None
    assert counter(" two words ") == 4
    assert counter_of(object()) is None
    assert lengths_for(tiny_job(config="roberta-ViT-B-32").model, CAPTIONS) is None, (
        "which only the ranks can count"
    )


def test_check_says_how_many_captions_lose_their_end_and_what_to_do(tmp_path: Path) -> None:
    data = captions_of(tmp_path, [LONG] * 2 + [SHORT] * 18)
    said = dict(FirstSamples(tiny_job(data=data)).rows())["captions"]
    assert "in 20 captions; the model takes 16: 10.0% lose their end" in said
    (warning,) = warned(data)
    assert "10% of the captions have more than the 16 tokens that the model takes" in warning
    assert warned({**data, "text_mask": "random"}) == [], "that key says which tokens stay"
    lengths = CaptionLengths(16, len, [SHORT] * 900 + ["x" * 20] * 90 + ["x" * 70] * 10)
    assert "set model.context_length = 24 for 99 % of them" in lengths.warning()
    assert CaptionLengths(16, len, [SHORT] * 99 + ["x" * 30]).warning() == "", "one in a hundred is no reason"


def test_a_run_says_it_once_when_it_has_seen_enough(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        return [record.levelname for record in caplog.records]

    with caplog.at_level(logging.INFO, "clipship"):
        monitor = CaptionMonitor(CaptionLengths(4, len), 5000, Data(train=("a.tar",)))
        monitor.record(["abc"] * 600)
        assert said() == []
        monitor.record(["abcdef"] * 600)
        monitor.record(["abcdef"] * 600)
        assert said() == ["INFO", "WARNING"]
        assert "in 1,000 captions; the model takes 4: 40.0% lose their end" in caplog.text
        caplog.clear()
        short = CaptionMonitor(CaptionLengths(4, len), 6, Data(train=("a.tar",), text_mask="random"))
        short.record(["abcdef"] * 4)
        assert said() == []
        short.record(["abcdef"] * 2)
        assert said() == ["INFO"], "the run has no more, and its text_mask says which tokens stay"


def captions_of(folder: Path, texts: list[str], encoding: str = "utf-8") -> Any:
    rows = ["image,caption", *(f'gone.jpg,"{text}"' for text in texts)]
    (folder / "t.csv").write_bytes("\n".join(rows).encode(encoding))
    return {"format": "auto", "train": (str(folder / "t.csv"),)}


def warned(data: dict[str, Any]) -> list[str]:
    return list(FirstSamples(tiny_job(data=data, optim=CAPTIONS_ARE_POSITIVES)).warnings())


@pytest.mark.parametrize("text", ["学习", "a 学习 b", "校园"])
def test_gbk_that_is_valid_utf_8_is_found(text: str, tmp_path: Path) -> None:
    data = captions_of(tmp_path, ["a dog", *[text] * 3], "gbk")
    (told,) = warned(data)
    assert told == (
        f'3 of 3 captions that are not ASCII, such as "{text.encode("gbk").decode()}", seem to be GBK, which '
        f'is also valid UTF-8 ("{text}"): set data.encoding = "gb18030"'
    )
    assert warned({**data, "encoding": "gb18030"}) == []


ODD = "学习".encode("gbk").decode()


@pytest.mark.parametrize(
    "texts",
    [*([text] * 9 for text in (
        "naïve café, Ångström", "собака бежит", "σκύλος", "כלב רץ", "كلب", "một con chó đang chạy",
        "50 µm, 3 Ω", "一只狗", "“quotes”", "Ελλάδα и Россия", "e\u0301te\u0301",
        "I don\u00e2\u0080\u0099t know", "caf\u00c3\u00a9 \u00e2\u0080\u0094 \u00ce\u00b1")),
     [ODD] * 2, [ODD] * 3 + ["café"] * 300],
)  # fmt: skip
def test_other_writing_is_not_taken_for_it(texts: list[str], tmp_path: Path) -> None:
    assert not [line for line in warned(captions_of(tmp_path, texts)) if "GBK" in line]
