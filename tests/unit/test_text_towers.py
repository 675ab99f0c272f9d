"""Text towers of transformers: built from a folder, exact over micro-batches, locked as open_clip's are."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor, nn

from tests.support.check import problems
from tests.support.jobs import VIT, tiny_job
from tests.support.steps import (
    Clip,
    accumulating,
    built,
    drawn,
    grads,
    micro_batches,
    same,
    state_of,
    step_of,
    train_step,
    untrained,
    weights_of,
)
from tests.support.text_towers import CASES, make_tower
from tools import models_page
from tools.models_page import PAGE, page, row, rows_of
from trainer.comm.protocol import Comm
from trainer.config import Job, Model
from trainer.errors import InputError
from trainer.model.catalog import MODELS_OF_4
from trainer.model.packages import needed
from trainer.model.text_tower import TextTower

TEXTS = ["a digit zero", "写数字零", "a", "digit three 图片"]


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every request to a hub fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a hub was asked")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", refuse)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", refuse)


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("towers")
    return {kind: make_tower(folder / kind, kind) for kind in CASES}


def job_with(tower: Path, **model: Any) -> Job:
    return tiny_job(model={"text": str(tower), **model})


def text_of(clip: Clip) -> nn.Module:
    return clip.model.text  # type: ignore[return-value]


@pytest.mark.parametrize("kind", CASES)
def test_any_kind_of_tower_begins_with_the_weights_of_its_folder(towers: dict[str, Path], kind: str) -> None:
    from safetensors.torch import load_file

    clip = untrained(job_with(towers[kind]))
    tokens = clip.tokenizer(TEXTS)
    assert tokens.shape == (4, 16)
    assert clip.model.encode_text(tokens).shape == (4, 32)  # type: ignore[operator]
    there = load_file(towers[kind] / "model.safetensors")
    ours = text_of(clip).transformer.state_dict()  # type: ignore[union-attr]
    shared = [name for name in ours if name in there]
    assert len(shared) > 10 or kind in ("m2m_100", "mt5")
    assert all(torch.equal(ours[name], there[name]) for name in shared)


@pytest.mark.parametrize("key", ["pretrained", "init"])
def test_another_tokenizer_than_that_of_the_weights_is_told(tmp_path: Path, key: str) -> None:
    other = str(make_tower(tmp_path / "other", weights=False))
    torch.save(untrained(tiny_job()).model.state_dict(), tmp_path / "weights.pt")
    plain = json.loads(Path(VIT).read_text())
    words = {"hf_tokenizer_name": other, "pool_type": "eos", "eos_id": 3}
    theirs = {**plain, "text_cfg": {**plain["text_cfg"], **words}}
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))

    def told(name: str) -> list[str]:
        notes = untrained(tiny_job(model={"name": name, key: str(tmp_path / "weights.pt")})).notes
        return [note for note in notes if "names the tokenizer" in note]

    assert told(VIT) == []
    for file, content in (("open_clip_config.json", {"model_cfg": theirs}), ("model.json", theirs)):
        (tmp_path / file).write_text(json.dumps(content))
        (note,) = told(VIT)
        assert f"names the tokenizer {other}, and this model takes open_clip's own" in note
        assert told(str(tmp_path / "theirs.json")) == []
        (tmp_path / file).unlink()
    (tmp_path / "model.json").write_text(json.dumps(plain))
    (note,) = told(str(tmp_path / "theirs.json"))
    assert f"names the tokenizer open_clip's own, and this model takes {other}" in note


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_models_config_may_change_values_of_its_towers(tmp_path: Path, pretrained: bool) -> None:
    folder = make_tower(tmp_path, "modernbert", dtype="float16")
    changed = {"max_position_embeddings": 24, "embedding_dropout": 0.0}
    tower = TextTower(str(folder), 32, pretrained=pretrained, model_config=changed)
    config = tower.transformer.config
    assert (tower.context_length, config.max_position_embeddings, config.embedding_dropout) == (24, 24, 0.0)
    assert {p.dtype for p in tower.transformer.parameters()} == {torch.float32}
    assert not any(module.p for module in tower.modules() if isinstance(module, nn.Dropout))


@pytest.mark.parametrize("kind", CASES)
def test_micro_batches_cut_captions_and_recomputed_activations_change_no_gradient(
    towers: dict[str, Path], kind: str, alone: Comm
) -> None:
    """With dropout, whose draws are those of the sample and of the step."""

    def found(size: int = 16, length: int = 24, step: int = 0, **keys: Any) -> dict[str, Tensor]:
        model = {"precision": "fp64", "text": str(towers[kind]), "context_length": 24, **keys}
        job = accumulating(size, model=model)
        clip = built(job, alone)
        images, _ = drawn(clip.model, 16)
        tokens = clip.tokenizer(TEXTS * 4)
        assert clip.kernels.caption_length is not None
        assert clip.kernels.caption_length(tokens) == 8 < tokens.shape[1]
        one = train_step(job, alone, clip.model.train())
        one.gradients(micro_batches(images, tokens[:, :length], size), step)
        return grads(clip.model)

    whole = found()
    for other in (found(size=4), found(length=8), found(grad_checkpointing=True)):
        torch.testing.assert_close(other, whole, rtol=1e-9, atol=1e-12)
    draws = kind != "m2m_100"  # all of its dropout is in functions
    assert same(found(step=1), whole) is not draws
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.parametrize("kind", ["bert", "m2m_100"])
def test_groups_at_a_towers_end_learn_the_projection_first_and_the_embeddings_last(
    towers: dict[str, Path], kind: str, alone: Comm
) -> None:
    learning = []
    for groups in range(4):
        model = built(job_with(towers[kind], lock_text=True, lock_text_unlocked_layers=groups), alone).model
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        learning.append({name for name in names if name.startswith("text.")})
    assert learning[:2] == [set(), {"text.proj.weight"}]
    assert learning[1] < learning[2] < learning[3]
    last, first = learning[2] - learning[1], learning[3] - learning[2]
    assert any(".1." in name for name in last)
    assert any(".0." in name for name in first)
    assert not any("embeddings" in name or (".0." in name and ".1." not in name) for name in last)
    assert not any("embeddings" in name for name in first)


def test_one_group_too_many_is_refused(towers: dict[str, Path], alone: Comm) -> None:
    with pytest.raises(InputError, match="leaves the whole text tower unlocked"):
        built(job_with(towers["bert"], lock_text=True, lock_text_unlocked_layers=4), alone)


def test_a_projection_that_is_left_out_needs_equal_widths(tmp_path: Path) -> None:
    folder = make_tower(tmp_path / "wide", "bert", hidden_size=64)
    with pytest.raises(InputError, match="64 wide and the features are 32"):
        untrained(job_with(folder, text_projection="none"))


def test_keys_of_a_hugging_face_tower_are_refused_without_one() -> None:
    with pytest.raises(InputError, match=r"model\.text_pooling = mean belongs to a text tower of Hugging"):
        untrained(tiny_job(model={"text_pooling": "mean"}))


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def one_word_more(folder: Path) -> None:
    with (folder / "vocab.txt").open("a") as file:
        file.write("kitten\n")


def other_padding(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": 4}))


@pytest.mark.parametrize(
    ("harm", "length", "said"),
    [
        (without("config.json"), None, "no config.json"),
        (without("vocab.txt"), None, "no vocabulary"),
        (one_word_more, None, "such as 'kitten', have no row among the tower's 21"),
        (other_padding, None, "pads with token 0, and the tower's config has pad_token_id = 4"),
        (lambda _: None, 41, "model.context_length = 41 .* at most 40"),
    ],
)
def test_a_folder_that_makes_no_tower_is_refused(
    tmp_path: Path, harm: Callable[[Path], object], length: int | None, said: str
) -> None:
    folder = make_tower(tmp_path)
    harm(folder)
    with pytest.raises(InputError, match=said):
        untrained(job_with(folder, context_length=length))


def test_what_a_checkpoint_keeps_builds_the_same_tower(towers: dict[str, Path], tmp_path: Path) -> None:
    clip = untrained(job_with(towers["bert"]))
    torch.save(clip.model.state_dict(), tmp_path / "model.pt")
    for name, text in clip.files.items():
        (tmp_path / name).write_bytes(text)
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["text_cfg"]["hf_model_name"] == str(towers["bert"])
    again = untrained(job_with(tmp_path, name=VIT, pretrained=str(tmp_path / "model.pt")))
    assert same(state_of(clip.model), state_of(again.model))
    assert torch.equal(clip.tokenizer(TEXTS), again.tokenizer(TEXTS))


def test_weights_without_a_bias_begin_siglip_with_that_of_its_paper(tmp_path: Path) -> None:
    begin = weights_of(tiny_job(), tmp_path / "clip.pt")
    clip = untrained(tiny_job(model={"pretrained": begin}, optim={"loss": "siglip"}))
    assert float(clip.model.logit_bias.detach()) == -10  # type: ignore[operator]
    assert "no logit bias" in clip.notes[0]
    torch.save(clip.model.state_dict(), tmp_path / "siglip.pt")
    loaded = untrained(tiny_job(model={"pretrained": str(tmp_path / "siglip.pt")}, optim={"loss": "siglip"}))
    assert loaded.notes == ()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_tokenizer_that_pads_on_the_left_gives_the_features_of_captions_without_padding(
    tmp_path: Path, pooling: str
) -> None:
    folder = make_tower(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"padding_side": "left"}))
    clip = untrained(job_with(folder, text_pooling=pooling))
    clip.model.eval()
    encode: Any = clip.model.encode_text
    for caption in TEXTS:
        whole = clip.tokenizer([caption])
        ids = whole[whole != 0][None]
        torch.testing.assert_close(encode(whole), encode(ids), atol=1e-5, rtol=0)
    assert any("pads on the left" in note for note in clip.notes)
    kept = json.loads(clip.files["model.json"])["text_cfg"]["tokenizer_kwargs"]
    assert kept == {"padding_side": "right"}


def test_a_tower_that_pools_another_token_than_the_captions_end_is_refused(tmp_path: Path) -> None:
    plain = json.loads(Path(VIT).read_text())
    plain["text_cfg"]["hf_tokenizer_name"] = str(make_tower(tmp_path / "words", weights=False))
    (tmp_path / "model.json").write_text(json.dumps(plain))
    with pytest.raises(InputError, match='set "pool_type": "eos" and "eos_id": 3'):
        untrained(tiny_job(model={"name": str(tmp_path / "model.json")}))


def test_special_tokens_without_a_row_are_read_as_their_letters(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tower(tmp_path)
    words = AutoTokenizer.from_pretrained(folder)
    words.add_special_tokens({"additional_special_tokens": ["<a>"]})
    words.save_pretrained(folder)
    assert words("<a>").input_ids[1] == 21, "the tower has 21 rows"
    clip = untrained(job_with(folder))
    assert int(clip.tokenizer(["a <a> digit"]).max()) < 21


# Models that open_clip has from release 4 on: modern text towers and NaFlex towers.

of_4 = pytest.mark.open_clip("4")
KNOWN = {file.stem for file in Path(open_clip.__file__).parent.glob("model_configs/*.json")}
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
    assert set(KNOWN) >= MODELS_OF_4


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
    assert list(rows) == sorted({*KNOWN, *MODELS_OF_4})
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
    for name in KNOWN:
        assert row(name) == rows[name]


def test_the_page_is_in_the_menu() -> None:
    assert "models.md" in (Path(PAGE).parents[1] / "mkdocs.yml").read_text()
