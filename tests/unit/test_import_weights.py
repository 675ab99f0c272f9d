"""Released weights of Chinese-CLIP and transformers: converted, they give the same features."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.steps import untrained
from tests.support.text_towers import make_tower
from trainer.model.key_names import from_open_clip, to_open_clip
from trainer.model.released import names_of

Import = Callable[..., tuple[dict[str, Any], str]]
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}

VISION |= {"image_size": 32, "patch_size": 8, "hidden_act": "quick_gelu"}


def transformers() -> Any:
    import transformers

    return transformers


def chinese_model() -> Any:
    """A small random ChineseCLIPModel."""
    library = transformers()
    text = {"vocab_size": 21, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"intermediate_size": 64, "max_position_embeddings": 40}
    torch.manual_seed(1)
    config = library.ChineseCLIPConfig(text_config=text, vision_config=VISION, projection_dim=32)
    return library.ChineseCLIPModel(config).eval()


def original(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a ChineseCLIPModel under Chinese-CLIP's own names, in half precision as released."""
    ours = to_open_clip(model.state_dict(), "transformers ChineseCLIPModel")
    names = from_open_clip(ours, "Chinese-CLIP")
    return {f"module.{name}": tensor.half() for name, tensor in names.items()}


CONFIG = """{
  "embed_dim": 32, "quick_gelu": true,
  "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
  "text_cfg": {"context_length": 16, "vocab_size": 100, "width": 32, "heads": 2, "layers": 2}
}"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "small.json").write_text(CONFIG)
    return str(tmp_path / "small.json")


@pytest.mark.parametrize("form", ["original", "transformers"])
def test_chinese_clip_gives_the_features_that_transformers_gives(
    tmp_path: Path, config: str, form: str, imported: Import
) -> None:
    theirs = chinese_model()
    source = tmp_path / "released.pt"
    state = original(theirs) if form == "original" else theirs.state_dict()
    torch.save({"epoch": 1, "state_dict": state} if form == "original" else state, source)
    keys, said = imported(source)
    assert "Chinese" in said
    assert (keys["text_pooling"], keys["context_length"]) == ("cls", 52)
    tower = make_tower(tmp_path / "bert", weights=False)
    clip = untrained(
        tiny_job(
            model={
                "name": config,
                "text": str(tower),
                "text_pooling": "cls",
                "pretrained": keys["pretrained"],
            }
        )
    )
    clip.model.eval()
    tokens = clip.tokenizer(["写数字零", "a digit"])
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        text = theirs.text_projection(
            theirs.text_model(tokens, attention_mask=(tokens != 0).long()).last_hidden_state[:, 0]
        )
        image = theirs.visual_projection(theirs.vision_model(images).pooler_output)
        close: Any = {"rtol": 0, "atol": 2e-3 if form == "original" else 1e-5}
        torch.testing.assert_close(clip.model.encode_text(tokens), text, **close)  # type: ignore[operator]
        torch.testing.assert_close(clip.model.encode_image(images), image, **close)  # type: ignore[operator]


@pytest.fixture
def imported() -> Import:
    """Imports weights to out.safetensors beside them: the keys that fit them, and what is said of them."""

    def call(source: Path) -> tuple[dict[str, Any], str]:
        shown = clipship("import", source, source.with_name("out.safetensors"), code=0)
        return tomllib.loads(shown.out)["model"], shown.err

    return call


def refused(source: Path) -> str:
    """What is said of weights that cannot be imported."""
    target = source.with_name("out.safetensors")
    said = clipship("import", source, target, code=2).err
    assert not target.exists()
    return said


def clip_model(act: str = "quick_gelu", **changes: Any) -> Any:
    """A small random CLIPModel."""
    library = transformers()
    text: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    }
    text |= {"num_attention_heads": 2, "max_position_embeddings": 16, "hidden_act": act}
    text |= {"eos_token_id": 99, "bos_token_id": 98, "pad_token_id": 0}
    torch.manual_seed(3)
    config = library.CLIPConfig(
        text_config={**text, **changes}, vision_config={**VISION, "hidden_act": act}, projection_dim=32
    )
    return library.CLIPModel(config).eval()


@pytest.mark.parametrize("act", ["quick_gelu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("changes", [{}, {"eos_token_id": 50, "layer_norm_eps": 1e-2}])
def test_a_clip_of_transformers_gives_its_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, changes: dict[str, Any], imported: Import
) -> None:
    # open_clip 4 compares the END token with that of a tokenizer, and these models have none of their own.
    monkeypatch.setattr(open_clip.factory, "_validate_special_tokens", lambda *_: None, raising=False)
    theirs = clip_model(act, **changes)
    theirs.save_pretrained(tmp_path)
    keys, _ = imported(tmp_path / "model.safetensors")
    assert keys["name"] == str(tmp_path / "out.json")
    ours: Any = untrained(tiny_job(model={key: keys[key] for key in ("name", "pretrained")})).model.eval()
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    tokens[:, :4] = torch.tensor([98, 5, 7, theirs.config.text_config.eos_token_id])
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        pooled = theirs.text_model(tokens).pooler_output
        torch.testing.assert_close(
            ours.encode_text(tokens), theirs.text_projection(pooled), atol=1e-5, rtol=0
        )
        image = theirs.visual_projection(theirs.vision_model(images).pooler_output)
        torch.testing.assert_close(ours.encode_image(images), image, atol=1e-5, rtol=0)


def test_without_a_config_the_activation_is_not_guessed(tmp_path: Path, imported: Import) -> None:
    save_file(clip_model("gelu").state_dict(), tmp_path / "model.safetensors")
    keys, said = imported(tmp_path / "model.safetensors")
    assert keys["name"] == "?"
    for part in ("GELU or QuickGELU", "preprocessor_config.json", "tokenizer is taken to be OpenAI's"):
        assert part in said


def test_the_files_beside_the_weights_say_how_pictures_and_captions_are_handled(
    tmp_path: Path, imported: Import
) -> None:
    clip_model("gelu").save_pretrained(tmp_path)
    about = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 2, "size": {"shortest_edge": 36}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0}))
    keys, said = imported(tmp_path / "model.safetensors")
    assert keys["image_mean"] == [0.5] * 3
    assert keys["image_std"] == [0.25] * 3
    assert (keys["image_interpolation"], keys["image_resize_mode"]) == ("bilinear", "shortest")
    assert "resizes to {'shortest_edge': 36}" in said
    config = json.loads((tmp_path / "out.json").read_text())
    assert config["text_cfg"]["hf_tokenizer_name"] == str(tmp_path)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-32-quickgelu", "ViT-L-14-336-quickgelu", "ViT-B-16"])
def test_a_model_of_open_clip_is_found_by_its_config(name: str) -> None:
    assert names_of(open_clip.get_model_config(name))[0] == name


def _part(*kept: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        state = clip_model().state_dict()
        wanted = {name: tensor for name, tensor in state.items() if name.startswith(kept)}
        save_file(wanted, folder / "model.safetensors")

    return write


POINTER = "version https://git-lfs.github.com/spec/v1\n"
NO_IMAGES = "no image tower, or one without"


@pytest.mark.parametrize(
    ("write", "name", "said"),
    [
        (
            lambda folder: save_file({"some.weight": torch.zeros(2)}, folder / "other.safetensors"),
            "other.safetensors",
            "names of none of these formats: Chinese-CLIP",
        ),
        (
            lambda folder: (folder / "broken.pt").write_bytes(b"no weights"),
            "broken.pt",
            "no weights that can be read safely",
        ),
        (
            lambda folder: torch.save(
                {**original(chinese_model()), "module.extra.weight": torch.zeros(1)}, folder / "more.pt"
            ),
            "more.pt",
            "Chinese-CLIP has no parameter called extra.weight",
        ),
        (lambda folder: (folder / "a.pt").write_text(POINTER), "a.pt", "a.pt is a pointer of Git LFS"),
        (
            lambda folder: clip_model("relu").save_pretrained(folder),
            "model.safetensors",
            "hidden_act is relu: a model of open_clip has one of quick_gelu",
        ),
        (_part("text_model."), "model.safetensors", NO_IMAGES),
        (_part("text_model.", "text_projection.", "vision_model."), "model.safetensors", NO_IMAGES),
    ],
)
def test_other_weights_are_refused(
    tmp_path: Path, write: Callable[[Path], None], name: str, said: str
) -> None:
    """Those of Stable Diffusion's text encoder are for model.text."""
    write(tmp_path)
    found = refused(tmp_path / name)
    assert said in found
    assert (said == NO_IMAGES) == ("is one for model.text: give" in found)
    assert not list(tmp_path.glob("out*"))


def test_the_command_prints_the_keys_and_replaces_nothing_unasked(tmp_path: Path, imported: Import) -> None:
    source, target = tmp_path / "released.pt", tmp_path / "out.safetensors"
    torch.save({"state_dict": original(chinese_model())}, source)
    keys, _ = imported(source)
    assert keys["text_pooling"] == "cls"
    assert load_file(target)["logit_scale"].dtype == torch.float32
    before = target.stat().st_mtime_ns
    clipship("import", source, target, code=2)
    assert target.stat().st_mtime_ns == before
    said = clipship("import", source, tmp_path / "out.pt", "--force", code=2).err
    assert "must end with .safetensors" in said


def openai_files(folder: Path, *added: str, **changes: Any) -> None:
    """Writes OpenAI's tokenizer as transformers does, with added tokens and other settings."""
    simple = open_clip.tokenizer.SimpleTokenizer()
    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    words = {special.get(word, word): number for word, number in simple.encoder.items()}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, simple.bpe_ranks)))
    tokenizer = transformers().CLIPTokenizer.from_pretrained(folder, **changes)
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(folder)


def test_openais_tokenizer_is_told_from_one_with_added_tokens(tmp_path: Path, imported: Import) -> None:
    for folder, added in ((tmp_path / "plain", ()), (tmp_path / "added", ("<sks>",))):
        rows = 49408 + len(added)
        theirs = clip_model("gelu", vocab_size=rows, eos_token_id=49407, bos_token_id=49406)
        theirs.save_pretrained(folder)
        openai_files(folder, *added)
        keys, _ = imported(folder / "model.safetensors")
        ours = untrained(tiny_job(model={key: keys[key] for key in ("name", "pretrained")}))
        ours.model.eval()
        config = json.loads((folder / "out.json").read_text())
        assert ("hf_tokenizer_name" in config["text_cfg"]) == bool(added)
        own = transformers().AutoTokenizer.from_pretrained(folder)
        for caption in ("a photo of a cat", "a photo of <sks> Dog"):
            found = ours.model.encode_text(ours.tokenizer([caption]))  # type: ignore[operator]
            out = theirs.get_text_features(**own([caption], return_tensors="pt"))
            features = out if isinstance(out, torch.Tensor) else out.pooler_output
            torch.testing.assert_close(found, features, atol=1e-5, rtol=0)


def test_a_tokenizer_with_openais_words_and_other_settings_is_not_replaced(
    tmp_path: Path, imported: Import
) -> None:
    clip_model("gelu", vocab_size=49408, eos_token_id=49407, bos_token_id=49406).save_pretrained(tmp_path)
    openai_files(tmp_path)
    path = tmp_path / "tokenizer.json"
    about = json.loads(path.read_text())
    about["normalizer"] = {"type": "NFC"}  # it keeps capitals
    path.write_text(json.dumps(about))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    imported(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "out.json").read_text())
    assert config["text_cfg"]["hf_tokenizer_name"] == str(tmp_path)


def test_odd_lists_of_added_tokens_are_no_traceback(tmp_path: Path, imported: Import) -> None:
    clip_model("gelu").save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0}))
    for odd in (1, ["a", None], [{"id": 1}]):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": odd}))
        for path in tmp_path.glob("out*"):
            path.unlink()
        assert imported(tmp_path / "model.safetensors")[0]["name"] == str(tmp_path / "out.json")
