"""Models that open_clip has from release 4 on: modern text towers and NaFlex towers."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.check import problems
from tests.support.jobs import tiny_job
from tests.support.steps import built, micro_batches, step_of
from tools import models_page
from tools.models_page import PAGE, page, row, rows_of
from trainer.comm.protocol import Comm
from trainer.config import Job, Model
from trainer.model.catalog import MODELS_OF_4, known_models
from trainer.model.packages import needed

of_4 = pytest.mark.open_clip("4")
WORDS = 1024
VISION = {"image_size": 32, "layers": 2, "width": 48, "head_width": 16, "patch_size": 8}
MODERN: dict[str, Any] = {
    "text_arch": "modern",
    "context_length": 16,
    "variable_text": True,
    "vocab_size": WORDS + 3,
    "width": 32,
    "heads": 2,
    "layers": 2,
    "mlp_ratio": 2.6666667,
    "eos_id": WORDS,
    "pad_id": WORDS + 1,
    "bos_id": WORDS + 2,
    "pos_embed": "rope",
    "mlp_type": "swiglu",
    "norm_type": "rmsnorm",
    "norm_eps": 1e-6,
    "attn_gated": True,
    "tokenizer_type": "tiktoken",
    "tiktoken_name": "r50k_base",
}
"""Text tower of moderntext-ViT-B-32-256 with smaller numbers."""
CONFIGS: dict[str, dict[str, Any]] = {
    "causal": {"vision_cfg": VISION, "text_cfg": MODERN | {"pool_type": "eos", "attention_mode": "causal"}},
    "masked": {
        "vision_cfg": VISION,
        "text_cfg": MODERN | {"pool_type": "map", "attention_mode": "bidirectional", "qk_norm": True},
    },
    "naflex": {
        "vision_cfg": {
            "image_size": 32,
            "image_seq_len": 16,
            "timm_model_name": "naflexvit_base_patch16_gap",
            "timm_model_pretrained": False,
            "timm_model_kwargs": {
                "patch_size": 8,
                "pos_embed_grid_size": [4, 4],
                "embed_dim": 48,
                "depth": 2,
                "num_heads": 3,
            },
        },
        "text_cfg": MODERN | {"pool_type": "eos", "attention_mode": "causal"},
    },
}


@pytest.fixture
def tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with a vocabulary of characters: the real ones are fetched."""
    fake: Any = ModuleType("tiktoken")
    encoding = SimpleNamespace(
        n_vocab=WORDS, encode_ordinary=lambda text: [ord(each) % WORDS for each in text]
    )
    fake.get_encoding = lambda _name: encoding
    monkeypatch.setitem(sys.modules, "tiktoken", fake)


def job_of(kind: str, folder: Path, most: int | None = None, kernels: str = "fast") -> Job:
    path = folder / f"tiny-{kind}.json"
    path.write_text(json.dumps({"embed_dim": 32, **CONFIGS[kind]}))
    optim = {"global_batch_size": 8, "max_batch_size_per_gpu": most}
    return tiny_job(config=str(path), model={"precision": "fp64", "kernels": kernels}, optim=optim)


def losses(job: Job, comm: Comm) -> list[float]:
    """Returns the losses of three steps on the same samples."""
    clip = built(job, comm)
    tokens = clip.tokenizer(["a", "a dog", "two dogs, and a cat", "", "x y", "a very long one", "b", "c"])
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step, size = step_of(job, comm), job.optim.max_batch_size_per_gpu or 8
    assert isinstance(size, int)
    return [float(step(micro_batches(images, tokens, size), number).loss_share) for number in range(3)]


@of_4
@pytest.mark.usefixtures("tiktoken")
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_training_is_the_same_with_accumulation_and_with_plain_modules(
    kind: str, tmp_path: Path, alone: Comm
) -> None:
    fast = losses(job_of(kind, tmp_path), alone)
    assert fast[-1] != fast[0]
    assert losses(job_of(kind, tmp_path, most=2), alone) == pytest.approx(fast, rel=1e-12)
    assert losses(job_of(kind, tmp_path, kernels="plain"), alone) == pytest.approx(fast, rel=1e-12)


@of_4
@pytest.mark.usefixtures("tiktoken")
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_captions_cut_behind_the_longest_have_the_same_features(
    kind: str, tmp_path: Path, alone: Comm
) -> None:
    job = job_of(kind, tmp_path)
    clip = built(job, alone)
    tokens = clip.tokenizer(["a", "six tk", ""])
    assert clip.kernels.caption_length is not None
    length = clip.kernels.caption_length(tokens)
    assert length == 8 < tokens.shape[1]
    whole, cut = (clip.model.encode_text(tokens[:, :most]) for most in (16, length))  # type: ignore[operator]
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-14)


@of_4
@pytest.mark.usefixtures("tiktoken")
def test_a_run_from_random_weights_is_quiet(
    tmp_path: Path, alone: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of("causal", tmp_path)
    built(job, alone)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@of_4
def test_the_names_are_those_of_the_checkout() -> None:
    assert set(known_models()) >= MODELS_OF_4


@of_4
def test_models_of_no_images_are_refused_before_anything_starts() -> None:
    for name in ("CLAP-HTSAT-tiny", "naflexgenlap_betwixt"):
        assert f"{name} is a model of audio and text" in problems(tiny_job(config=name), "--no-data")
        assert not needed(Model(name=name)).packages
    said = problems(tiny_job(config="naflexgenlip_b16"), "--no-data")
    assert "naflexgenlip_b16 is a model that writes captions and compares none" in said
    assert needed(Model(name="moderntext-ViT-B-32-256")).packages == ("tiktoken",)


@pytest.mark.open_clip("3.3")
@pytest.mark.parametrize("name", ["moderntext-ViT-B-32-256", "CLAP-HTSAT-tiny"])
def test_a_model_of_a_later_release_is_named_as_one(name: str) -> None:
    said = problems(tiny_job(config=name), "--no-data")
    assert f"{name} is a model of open_clip 4, and an older release" in said


# The table of all models: it has each of open_clip's, and what it says of them holds.


def there() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_has_a_row_for_each_model_and_its_counts() -> None:
    rows = rows_of(there())
    assert list(rows) == sorted({*known_models(), *MODELS_OF_4})
    assert page(there(), rows) == there()
    assert all("| trains" in line or "| refused: it is" in line for line in rows.values())
    trained = sum("| trains" in rows[name] for name in MODELS_OF_4)
    assert f"configs of {len(rows) - len(MODELS_OF_4)} models, and all of them train here" in there()
    assert f"{len(MODELS_OF_4)} more: {trained} train here" in there()


def test_rows_that_are_not_made_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models_page, "PAGE", tmp_path / "models.md")
    monkeypatch.setattr(models_page, "row", lambda name: f"| {name} | 3.3 | made anew |")
    models_page.PAGE.write_text(there())
    assert models_page.main(["RN50"]) == 0
    before, after = rows_of(there()), rows_of(models_page.PAGE.read_text())
    assert after == {**before, "RN50": "| RN50 | 3.3 | made anew |"}


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_model_that_is_said_to_train_trains_as_its_row_says() -> None:
    rows = rows_of(there())
    assert {name: row(name) for name in known_models()} == {name: rows[name] for name in known_models()}


def test_the_page_is_in_the_menu() -> None:
    assert "models.md" in (Path(PAGE).parents[1] / "mkdocs.yml").read_text()
