"""The quick tokenizer gives open_clip's tokens, whatever the text."""

import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip import get_tokenizer
from open_clip import tokenizer as open_clip_tokenizer
from open_clip.tokenizer import SimpleTokenizer

from tests.support.loading import refusal
from trainer.data.tokens import quick, with_mask

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
