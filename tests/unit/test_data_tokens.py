"""The quick tokenizer gives open_clip's tokens, whatever the text."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip import get_tokenizer
from open_clip.tokenizer import SimpleTokenizer

from trainer.data import tokens
from trainer.data.tokens import QuickTokenizer, quick

THEIRS = get_tokenizer("ViT-B-32")
OURS = quick(get_tokenizer("ViT-B-32"))

TEXTS = st.one_of(
    st.text(max_size=60),
    st.text("abc XYZ'&;<>_0123.,-\t\n\\x1b[", max_size=80),
    st.sampled_from(["<end_of_text>", "&amp;amp;", "l\u2019\u00e9t\u00e9"]),
)


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=4))
def test_tokens_are_those_of_open_clip(texts: list[str]) -> None:
    assert torch.equal(OURS(texts), THEIRS(texts))


def test_long_texts_are_cut_as_open_clip_cuts_them() -> None:
    texts = ["word " * count for count in (74, 75, 76, 77, 200)]
    assert torch.equal(OURS(texts), THEIRS(texts))


def test_a_full_cache_of_words_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_WORDS", 3)
    texts = ["one two three four five", "<end_of_text> six seven one two"]
    ours = QuickTokenizer(SimpleTokenizer())
    assert torch.equal(ours(texts), THEIRS(texts))
    assert torch.equal(ours(texts), THEIRS(texts))
    assert len(ours._known) <= 3


def test_the_tokenizer_is_pickled_for_loader_processes() -> None:
    assert torch.equal(pickle.loads(pickle.dumps(OURS))(["a cat"]), THEIRS(["a cat"]))


def test_other_tokenizers_are_left_alone() -> None:
    def other(texts: list[str]) -> torch.Tensor:
        return torch.zeros(len(texts), 3)

    assert quick(other) is other
    masked = SimpleTokenizer(reduction_mask="random")
    assert quick(masked) is masked
