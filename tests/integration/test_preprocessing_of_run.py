"""Preprocessing that belongs to weights stays with them in a run, its stages, checkpoints and exports."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import VIT, tiny_job
from tests.support.runs import clipship, tiny_run
from trainer.errors import InputError
from trainer.model.build import untrained

SIGLIP = {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "resize_mode": "squash"}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights as open_clip's are on a hub, with a config that says how their images are prepared."""
    folder = tmp_path / "hub"
    folder.mkdir()
    config = json.loads(Path(VIT).read_text(encoding="utf-8"))
    about = {"model_cfg": config, "preprocess_cfg": {**SIGLIP, "mean": 0.5, "size": [224, 224]}}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    torch.save(untrained(tiny_job()).model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder / "open_clip_pytorch_model.bin"


def prepared(**model: Any) -> dict[str, Any]:
    """How a model of these keys has its images prepared."""
    network: Any = untrained(tiny_job(model=model)).model
    known = network.visual.preprocess_cfg
    return {key: [*known[key]] if isinstance(known[key], tuple) else known[key] for key in SIGLIP}


def test_it_stays_with_the_weights_through_stages_a_resume_and_an_export(
    tmp_path: Path, weights: Path
) -> None:
    run = tiny_run(
        tmp_path,
        model={"pretrained": str(weights)},
        optim={"steps": 2},
        checkpoint={"every_steps": 1, "keep": 9},
    )
    path = tmp_path / "tiny.toml"
    path.write_text(path.read_text() + "\n[[stage]]\noptim.steps = 2\n")
    done = run.start(1)
    shutil.rmtree(run.run / "checkpoints" / "step-00000004")
    (run.run / "result.json").unlink()
    done = run.start(1)
    assert "start        step 3, from" in done.stdout, done.stdout + done.stderr
    for step in range(1, 5):
        manifest = json.loads((run.run / f"checkpoints/step-{step:08d}/manifest.json").read_text())
        assert manifest["preprocessing"] == SIGLIP, step
    clipship("export", run.run, tmp_path / "exported", "--to", "open_clip")
    assert prepared(name=f"local-dir:{tmp_path}/exported") == SIGLIP
    written: Any = json.loads((tmp_path / "exported" / "open_clip_config.json").read_text())
    assert {key: written["preprocess_cfg"][key] for key in SIGLIP} == SIGLIP


def test_what_the_job_sets_counts_before(weights: Path) -> None:
    own = (0.1, 0.2, 0.3)
    assert prepared(pretrained=str(weights), image_mean=own) == {**SIGLIP, "mean": [*own]}
    assert prepared(init=str(weights)) == SIGLIP


def test_what_is_no_preprocessing_is_refused_with_the_key_to_set(weights: Path) -> None:
    about = {"preprocess_cfg": {**SIGLIP, "resize_mode": "stretch"}}
    weights.with_name("open_clip_config.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"cannot be used: set model\.image_resize_mode"):
        untrained(tiny_job(model={"pretrained": str(weights)}))
    assert prepared(pretrained=str(weights), image_resize_mode="longest")["resize_mode"] == "longest"


def test_a_run_that_began_with_a_folder_is_exported_with_its_own_weights(
    tmp_path: Path, weights: Path
) -> None:
    run = tiny_run(tmp_path, model={"name": f"local-dir:{weights.parent}"}, optim={"steps": 1})
    run.start(1)
    trained = torch.load(run.run / "checkpoints/step-00000001/model.pt")
    clipship("export", run.run, tmp_path / "exported", "--to", "open_clip")
    found = untrained(tiny_job(model={"name": f"local-dir:{tmp_path}/exported"})).model
    assert not torch.equal(trained["visual.proj"], torch.load(weights)["visual.proj"])
    for name, value in found.state_dict().items():
        assert torch.equal(value, trained[name]), name
    assert prepared(name=f"local-dir:{tmp_path}/exported") == SIGLIP


def test_a_damaged_checkpoint_begins_no_training(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, optim={"steps": 1})
    run.start(1)
    file = run.run / "checkpoints/step-00000001/model.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for key in ("pretrained", "init"):
        with pytest.raises(InputError, match=r"its checksum differs from that in manifest\.json"):
            untrained(tiny_job(model={key: str(file)}))
