"""A checkpoint is whole or not there, and open_clip loads it."""

import hashlib
import json
from pathlib import Path

import open_clip
import pytest
import torch

from tests.jobs import VIT, tiny_job
from trainer import checkpoint, model


@pytest.fixture
def clip() -> torch.nn.Module:
    return model.untrained(tiny_job()).model.eval()


def test_open_clip_loads_the_weights_and_gives_the_same_features(tmp_path: Path, clip: torch.nn.Module) -> None:
    with torch.no_grad():
        clip.get_parameter("logit_scale").fill_(1.25)
    folder = checkpoint.save(tmp_path, 7, clip, {})
    open_clip.add_model_config(VIT)
    loaded = open_clip.create_model(Path(VIT).stem, pretrained=str(folder / checkpoint.WEIGHTS)).eval()
    images, tokens = torch.randn(2, 3, 32, 32), torch.randint(1, 1000, (2, 16))
    with torch.no_grad():
        for ours, theirs in zip(clip(images, tokens), loaded(images, tokens), strict=True):
            assert torch.equal(ours, theirs)


def test_manifest_seals_the_weights_and_says_what_they_are(tmp_path: Path, clip: torch.nn.Module) -> None:
    folder = checkpoint.save(tmp_path, 7, clip, {"model": "tiny"})
    assert folder.name == "step-00000007"
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    weights = (folder / checkpoint.WEIGHTS).read_bytes()
    assert manifest["step"] == 7
    assert manifest["model"] == "tiny"
    assert manifest["files"][checkpoint.WEIGHTS] == {"bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}


def test_weights_hold_nothing_but_tensors(tmp_path: Path, clip: torch.nn.Module) -> None:
    folder = checkpoint.save(tmp_path, 1, clip, {})
    assert set(torch.load(folder / checkpoint.WEIGHTS, weights_only=True)) == set(clip.state_dict())


def test_a_write_that_fails_leaves_the_checkpoint_of_before(tmp_path: Path, clip: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint.save(tmp_path, 7, clip, {"attempt": 1})

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, 7, clip, {"attempt": 2})
    assert json.loads((folder / checkpoint.MANIFEST).read_text())["attempt"] == 1
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["step-00000007"]
