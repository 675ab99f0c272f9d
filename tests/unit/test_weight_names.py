"""Weights of other programs and of other sizes: what they are is said, and what was done with them."""

import json
import logging
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.check import found as found_by_check
from tests.support.check import problems
from tests.support.jobs import MODELS, VIT, tiny_job
from tests.support.steps import untrained
from trainer.errors import InputError

TINY: dict[str, Any] = json.loads(Path(VIT).read_text())


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in untrained(tiny_job()).model.state_dict().items()}


@pytest.mark.parametrize("key", ["init", "pretrained"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "model.", "model._orig_mod."])
def test_names_of_wrappers_are_taken_off_and_said(
    tmp_path: Path, state: dict[str, torch.Tensor], key: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": {"loss.weight": torch.zeros(2), **wrapped}}, tmp_path / "weights.pt")
    with caplog.at_level(logging.INFO, "clipship"):
        model = untrained(tiny_job(model={key: str(tmp_path / "weights.pt")})).model
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert f"{prefix!r} is taken off the names of {len(state)} tensors; 1 others" in caplog.text


def _script(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/code/__torch__.py", "class Model: pass")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"), "a pointer of Git LFS"),
        (_script, "a TorchScript archive"),
    ],
)
def test_files_that_are_no_weights_are_called_what_they_are(tmp_path: Path, write: Any, said: str) -> None:
    path = tmp_path / "weights.pt"
    write(path)
    name = f"weights.pt is {said}"
    for key in ("init", "pretrained"):
        job = tiny_job(model={key: str(path)})
        assert name in problems(job)
        with pytest.raises(InputError, match=name):
            untrained(job)


def _wide(tmp_path: Path) -> str:
    vision, text = {**TINY["vision_cfg"], "width": 64}, {**TINY["text_cfg"], "width": 64}
    (tmp_path / "wide.json").write_text(json.dumps({**TINY, "vision_cfg": vision, "text_cfg": text}))
    return str(tmp_path / "wide.json")


def test_weights_of_another_width_are_bad_input(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(InputError, match=r"model.init: .* does not fit the model .*only resolution"):
        untrained(tiny_job(config=_wide(tmp_path), model={"init": str(tmp_path / "model.pt")}))
    for name in ("manifest.json", "model.json"):
        (tmp_path / name).write_text(json.dumps(TINY))
    said = problems(tiny_job(model={"name": _wide(tmp_path), "init": str(tmp_path)}))
    assert re.search("towers are 48 and 32 wide, and those of .*wide.json are 64 and 64", said)
    assert problems(tiny_job(model={"init": str(tmp_path)})) == ""


def test_positions_that_are_interpolated_are_said(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, tmp_path / "weights.pt")
    keys = {"init": str(tmp_path / "weights.pt"), "image_size": 96, "context_length": 20}
    notes = "\n".join(untrained(tiny_job(model=keys)).notes)
    assert "visual.positional_embedding is interpolated from 17 positions to 145" in notes
    assert "positional_embedding is interpolated from 16 positions to 20" in notes


@pytest.mark.parametrize(("model", "said"), [("tiny-resnet.json", True), ("tiny-vit.json", False)])
def test_a_tower_that_ignores_checkpointing_is_said(model: str, said: bool) -> None:
    """open_clip's ResNet has an empty `set_grad_checkpointing`."""
    for wanted in (True, False):
        job = tiny_job(model={"name": str(MODELS / model), "grad_checkpointing": wanted})
        for found in (found_by_check(job)["warnings"], untrained(job).notes):
            told = [text for text in found if "grad_checkpointing does nothing in the image tower" in text]
            assert bool(told) == (said and wanted)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (100, "4 pixels of an edge unseen; 96 or 104 loses none"),
        ((32, 33), "1 pixel of an edge unseen; 32 x 32 or 40 x 40 loses none"),
        (96, ""),
    ],
)
def test_pixels_that_no_patch_sees_are_said(size: Any, said: str) -> None:
    job = tiny_job(model={"image_size": size})
    for found in (found_by_check(job)["warnings"], untrained(job).notes):
        assert any(said in text for text in found) if said else not any("patches" in text for text in found)
