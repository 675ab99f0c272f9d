"""A model that eight ranks split takes an eighth of the memory, from its start to its checkpoints."""

import json
import subprocess
import sys

GIB = 2**30
SAMPLES = 64


def test_each_of_eight_ranks_trains_vit_bigg_in_less_than_ten_gib_of_state() -> None:
    """Weights, gradients and both moments in float32 are 16 bytes a parameter: 37.8 GiB in all.

    The state is measured with the images of the step. While the model is split and while a checkpoint is put
    together, the device has a block or a part of the tensors whole, never all of them.
    """
    command = [sys.executable, "-m", "tests.support.fsdp_state_rank", str(SAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    whole = 4 * figures["parameters"] / GIB
    assert whole > 9
    assert figures["replaced"]["fused attention"] == 80, "the model is as training has it"
    assert figures["state"] < 4 * whole / 8 + 0.25, figures
    assert figures["splitting"] < whole / 8 + 0.5, figures
    assert figures["step"] < 10, figures
    assert figures["checkpoint"] < figures["state"] + 1, figures
    assert figures["waits"] == []
