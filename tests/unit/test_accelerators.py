"""The table of accelerators, and what a job gets from its row."""

from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from tests.support.jobs import tiny_job
from trainer.comm.accelerator import accelerator_of, chosen, on_accelerator, usable_devices
from trainer.config import Resources
from trainer.plan.describe import Facts, all_warnings
from trainer.plan.unused_keys import unused_keys
from trainer.sysinfo.accelerators import ACCELERATORS, ASCEND, CPU, CUDA, ROCM, Accelerator
from trainer.world.launchers import devices_given


def test_a_job_may_name_each_row_but_the_cpu_which_is_a_device() -> None:
    kinds, _ = get_args(Resources.model_fields["accelerator"].annotation)
    assert set(get_args(kinds)) == ACCELERATORS.keys() - {"cpu"}


@pytest.mark.parametrize("row", [CPU, CUDA], ids=lambda row: row.name)
def test_the_collectives_of_rows_that_are_tried_are_torchs_own_choice(row: Accelerator) -> None:
    assert dist.Backend.default_device_backend_map[row.device_type] == row.collectives


def test_a_device_belongs_to_the_row_for_which_torch_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    assert accelerator_of(device) is CUDA
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert accelerator_of(device) is ROCM
    assert usable_devices(CUDA) == 0
    assert not any(map(on_accelerator, (torch.device("cpu"), torch.device("meta"))))


def test_a_job_that_names_a_row_gets_it_though_torch_lacks_its_plugin() -> None:
    assert chosen("ascend") is ASCEND
    assert usable_devices(ASCEND) == 0


@pytest.mark.parametrize(
    ("row", "env", "given"),
    [
        (ROCM, {"ROCR_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2"}, "ROCR_VISIBLE_DEVICES=0,1"),
        (ROCM, {"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "0"}, ""),
        (
            ASCEND,
            {"ASCEND_RT_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0"},
            "ASCEND_RT_VISIBLE_DEVICES=3",
        ),
        (ASCEND, {"CUDA_VISIBLE_DEVICES": "0"}, ""),
    ],
)
def test_a_row_says_which_variables_give_a_process_devices(
    row: Accelerator, env: dict[str, str], given: str
) -> None:
    assert devices_given(env, row) == given


def refused(**sections: Any) -> str:
    with pytest.raises(ValidationError) as problem:
        tiny_job(**sections)
    return str(problem.value)


def test_what_only_cuda_has_is_refused_for_others() -> None:
    assert "table for CUDA" in refused(resources={"accelerator": "rocm", "gpu": "H100"})
    assert "variables in [env]" in refused(resources={"accelerator": "ascend", "fabric": "ib"})
    assert "a format of CUDA" in refused(resources={"accelerator": "rocm"}, model={"precision": "tf32"})
    tiny_job(resources={"accelerator": "cuda", "gpu": "H100"}, model={"precision": "tf32"})


def test_check_says_that_a_row_was_not_tried_and_what_is_off() -> None:
    job = tiny_job(resources={"accelerator": "rocm"}, model={"cuda_graphs": True, "cudnn_benchmark": True})
    assert dict(unused_keys(job)) == {
        (
            "model.cuda_graphs",
            "model.cudnn_benchmark",
        ): 'it is made for CUDA, and resources.accelerator = "rocm"'
    }
    said = list(all_warnings(Facts.of(job, 1, 64, local=False, files=False)))
    assert [warning for warning in said if warning.startswith("not tried here: ROCm")]
    tried = tiny_job(resources={"accelerator": "cuda"}, model={"cuda_graphs": True})
    assert not any(
        "not tried here" in text for text in all_warnings(Facts.of(tried, 1, 64, local=False, files=False))
    )
