"""The table of accelerators, and what a job gets from its row."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pydantic import ValidationError

from tests.support.jobs import TOY_JOB, tiny_job
from trainer.cli.main import main
from trainer.comm import accelerator
from trainer.sysinfo.accelerators import ACCELERATORS
from trainer.world.launchers import devices_given


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_collectives_of_rows_that_are_tried_are_torchs_own_choice(name: str) -> None:
    row = ACCELERATORS[name]
    assert dist.Backend.default_device_backend_map[row.device_type] == row.collectives


def test_a_job_that_names_a_row_gets_it_though_torch_lacks_its_plugin() -> None:
    row = accelerator.chosen("ascend")
    assert (row.name, accelerator.usable_devices(row)) == ("ascend", 0)


def test_a_row_says_which_variables_give_a_process_devices() -> None:
    rocm, ascend = ACCELERATORS["rocm"], ACCELERATORS["ascend"]
    of_amd = {"ROCR_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2"}
    assert devices_given(of_amd, rocm) == "ROCR_VISIBLE_DEVICES=0,1"
    assert devices_given({**of_amd, "HIP_VISIBLE_DEVICES": ""}, rocm) == ""
    assert devices_given({"CUDA_VISIBLE_DEVICES": "0"}, ascend) == ""


def refused(**sections: Any) -> str:
    with pytest.raises(ValidationError) as problem:
        tiny_job(**sections)
    return str(problem.value)


def test_what_only_cuda_has_is_refused_for_others() -> None:
    assert "table for CUDA" in refused(resources={"accelerator": "rocm", "gpu": "H100"})
    assert "variables in [env]" in refused(resources={"accelerator": "ascend", "fabric": "ib"})
    assert "a format of CUDA" in refused(resources={"accelerator": "rocm"}, model={"precision": "tf32"})
    tiny_job(resources={"accelerator": "cuda", "gpu": "H100"}, model={"precision": "tf32"})


@pytest.mark.parametrize("name", ["rocm", "cuda"])
def test_check_says_that_a_row_was_not_tried_and_what_is_off(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(TOY_JOB)
    settings = (f"resources.accelerator={name}", "model.cuda_graphs=true", "model.cudnn_benchmark=true")
    words = [word for setting in settings for word in ("--set", setting)]
    assert main(["check", str(tmp_path / "job.toml"), *words]) == 0
    shown = capsys.readouterr().out
    off = "model.cuda_graphs, model.cudnn_benchmark"
    why = f'it is made for CUDA, and resources.accelerator = "{name}"'
    assert ("not tried here: ROCm" in shown, off in shown, why in shown) == (name == "rocm",) * 3, shown
