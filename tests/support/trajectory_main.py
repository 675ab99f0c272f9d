"""Trains twice on the same samples: by the `main` of open_clip_train 4, and by our step.

`python -m tests.support.trajectory_main CASE ...`, with a checkout of open_clip's main first on the path.
Both have the same command line, from which `clipship from-open-clip` makes our job. Ours gets the batches
that `main` has loaded, patches of pictures of any shape included: loading and augmentation are not compared.
Prints a JSON line for each case: the losses of both, and the largest differences of a weight and of a moment
in the checkpoint that `main` writes.
"""

import json
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import Tensor, nn
from webdataset.tariterators import tar_file_expander

from tests.support.jobs import COCA, VIT, few_words
from tests.support.naflex import NAFLEX, PATCH, SHAPES, TOKENS, picture, rows_of_patches
from tests.support.pictures import encoded
from tests.support.steps import built, set_rate, train_step
from tests.support.trajectory_rank import SIGLIP
from trainer.checkpoint import foreign
from trainer.comm.connect import connect
from trainer.config import Job
from trainer.config.loader import job_from_table
from trainer.data.pack import PackedSample, write_shard
from trainer.from_open_clip.job_file import job_file
from trainer.train.step import MicroBatch
from trainer.world.launchers import detect

STEPS, BATCH = 20, 8
WORDS = 1000
CONFIGS = {
    "clip": json.loads(Path(few_words(VIT)).read_text()),
    "sigmoid": SIGLIP,
    "coca": json.loads(Path(few_words(COCA)).read_text()),
    "naflex": json.loads(Path(few_words(NAFLEX)).read_text()),
}
"""Configs by the names of the cases: the tokenizer follows from a name with siglip, the loss from coca."""
CONFIGS["naflex"]["vision_cfg"]["image_seq_len"] = TOKENS
FLAGS = {
    "sigmoid": ("--siglip", "--beta2", "0.95"),
    "clip": ("--grad-clip-norm", "1"),
    "naflex": (
        *("--siglip", "--use-naflex", "--naflex-seq-lens", str(TOKENS), "--naflex-patch-sizes", str(PATCH)),
        *("--naflex-max-tokens-per-batch", str(BATCH * TOKENS), "--naflex-batch-divisor", str(BATCH)),
    ),
}


class Watched:
    """Makes `main`'s task, and remembers its first weights, its batches and its losses."""

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.losses: list[float] = []

    def create_task(self, *args: Any, **keys: Any) -> Any:
        task = open_clip.create_task(*args, **keys)
        self.model: nn.Module = task.trainable_module
        self.begin = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        task.register_forward_hook(self._see)
        return task

    def _see(self, _task: nn.Module, inputs: tuple[dict[str, Tensor]], output: Any) -> None:
        images: Any = inputs[0]["image"]
        rows = images if isinstance(images, Tensor) else rows_of_patches(images)
        self.batches.append((rows, inputs[0]["text"]))
        self.losses.append(float(output[0]["loss"].detach()))


def samples() -> Iterator[PackedSample]:
    """Yields as many samples as four batches have, of several shapes."""
    for number in range(4 * BATCH):
        png = encoded(picture(*SHAPES[number % len(SHAPES)], seed=number))
        yield f"{number:04d}", {"png": png, "txt": f"picture number {number}".encode()}


def tokenizer_of_few_words(*args: Any, **keys: Any) -> Callable[[str | list[str]], Tensor]:
    tokenizer = open_clip.get_tokenizer(*args, **keys)
    return lambda texts: tokenizer(texts) % WORDS


def theirs(line: list[str]) -> Watched:
    # Their data.py imports pandas, for tables alone.
    sys.modules.setdefault("pandas", module_from_spec(ModuleSpec("pandas", None)))
    from open_clip_train import data, main

    # The webdataset of its requirements is older, and marks no end of a shard.
    data.tar_file_expander = partial(tar_file_expander, eof_value=None)
    main.get_tokenizer = tokenizer_of_few_words
    watched = Watched()
    main.create_task = watched.create_task
    main.main(line)
    return watched


def job_of(line: list[str], config: Path) -> Job:
    """Returns the job of the command line, in float64 and with open_clip's own modules."""
    table = tomllib.loads(job_file(line, 1, "4")[0])
    table["model"] |= {"name": str(config), "precision": "fp64", "kernels": "plain"}
    return job_from_table(table, "the command line")


def ours(job: Job, watched: Watched, checkpoint: Path) -> dict[str, Any]:
    world = detect({}, "here")
    comm = connect(job, world, {})
    model = built(job, comm).model.train()
    model.load_state_dict(watched.begin)
    step = train_step(job, comm, model)
    losses = []
    for number, batch in enumerate(watched.batches):
        set_rate(step, job, number, STEPS)
        losses.append(float(step([MicroBatch(*batch)], number).loss_share))
    weights = worst(dict(model.state_dict()), dict(watched.model.state_dict()))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moments = {names[id(p)]: state["exp_avg"].clone() for p, state in step.optimizer.state.items()}
    written = foreign.whole_state(foreign.read(checkpoint), step, job.optim.optimizer).optimizer
    comm.close()
    return {
        "ours": losses,
        "weights": weights,
        "moments": worst(moments, {name: state["exp_avg"] for name, state in written.items()}),
    }


def worst(own: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Returns the largest difference of values in tensors of one name."""
    assert own.keys() == other.keys()
    return max(float((own[name] - other[name]).abs().max()) for name in own)


def main(*cases: str) -> None:
    torch.set_default_dtype(torch.float64)  # `main` has no name for it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shard(samples(), folder / "shard.tar")
        for case in cases:
            config = folder / f"tiny-{case}.json"
            config.write_text(json.dumps(CONFIGS[case]))
            open_clip.add_model_config(config)
            line = [
                "--train-data", str(folder / "shard.tar"), "--train-num-samples", str(STEPS * BATCH),
                "--batch-size", str(BATCH), "--workers", "0", "--epochs", "1", "--model", config.stem,
                "--precision", "fp32", "--device", "cpu", "--lr", "1e-3", "--warmup", "3",
                "--logs", str(folder), "--name", case, *FLAGS.get(case, ()),
            ]  # fmt: skip
            watched = theirs(line)
            own = ours(job_of(line, config), watched, folder / case / "checkpoints" / "epoch_1.pt")
            print(json.dumps({"case": case, "theirs": watched.losses, **own}))


if __name__ == "__main__":
    main(*sys.argv[1:])
