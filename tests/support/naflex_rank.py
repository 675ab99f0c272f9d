"""One rank of trainings on pictures of many shapes: losses are those of one process, also after a resume.

`python -m tests.support.naflex_rank FOLDER BACKEND`. Loader, step and checkpoints are those of a run, in
float64. Rank 0 tells of each case: losses of the ranks, of one process, and after a resume in
the middle of an epoch.
"""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.fsdp_rank import SAMPLES, save
from tests.support.jobs import tiny_job
from tests.support.naflex import NAFLEX, PATCH, SHAPES, TOKENS, picture, whole_precision
from tests.support.rank import joined, tell
from tests.support.steps import set_rate
from tests.support.thread_ranks import one_rank
from tests.support.training import setup_of
from trainer.checkpoint.identity import RunIdentity
from trainer.checkpoint.resume import restore
from trainer.comm.protocol import Comm
from trainer.data.bad_samples import Skipped
from trainer.train.prefetch import global_batches
from trainer.train.setup import TrainSetup

PICTURES, BATCH, STEPS = 24, 8, 5
CUT = 4
"""Step at which the second start begins: the second of three in the second epoch."""
CASES: Mapping[str, Mapping[str, Any]] = {
    "one pass": {},
    "two passes": {"passes": 2},
    "one or two": {"passes": 2, "image_tokens": (TOKENS // 2, TOKENS), "image_patches": (PATCH, PATCH // 2)},
}


def write_table(folder: Path) -> Path:
    """Writes pictures of many shapes and the table of their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["image,caption"]
    for number in range(PICTURES):
        picture(*SHAPES[number % len(SHAPES)], seed=number).save(folder / f"{number}.png")
        lines.append(f"{number}.png,picture number {number}")
    table = folder / "table.csv"
    table.write_text("\n".join(lines))
    return table


def sections(table: Path, backend: str, ranks: int, passes: int = 1, **model: Any) -> dict[str, Any]:
    """Returns the sections of a job whose ranks make so many passes a step of the most patches an image."""
    return {
        "data": {"format": "auto", "train": (str(table),), "crop_scale": (0.3, 1.0)},
        "model": {"precision": "fp64", "image_tokens": TOKENS, **model},
        "optim": {
            "global_batch_size": BATCH,
            "steps": STEPS,
            "loss": "siglip",
            "max_image_tokens_per_gpu": BATCH // ranks // passes * TOKENS,
        },
        "comm": {"backend": backend},
    }


def losses(setup: TrainSetup, until: int) -> list[float]:
    """Returns the losses of the steps from the start of `setup` on; collective."""
    found = []
    batches = global_batches(setup, Skipped(1.0))
    for step, micro in zip(range(setup.start.steps_done, until), batches, strict=False):
        set_rate(setup.train_step, setup.job, step, STEPS)
        share = float(setup.train_step(micro, step).loss_share)
        found.append(sum(setup.comm.all_gather_object(share)))
    return found


def of_case(folder: Path, comm: Comm, job: Mapping[str, Any], *, resumes: bool) -> dict[str, list[float]]:
    """Returns the losses of an undisturbed training, and of one that is cut and resumed."""

    def begun(name: str) -> TrainSetup:
        return setup_of(folder / f"{name}-{comm.world.rank}", comm, dict, config=NAFLEX, **job)

    found = {"whole": losses(begun("whole"), STEPS)}
    if resumes:
        cut = begun("cut")
        found["before"] = losses(cut, CUT)
        save(folder / "saved", cut.train_step, comm, CUT, cut.job)
        again = begun("again")
        start = restore(again.job, comm, folder / "saved", again.train_step, RunIdentity(again.job, SAMPLES))
        found["after"] = losses(dataclasses.replace(again, start=start), STEPS)
    return found


def main(folder: Path, backend: str) -> None:
    with joined(tiny_job(config=NAFLEX, **sections(folder, backend, 1))) as comm:
        ranks, rank = comm.world.size, comm.world.rank
        table = write_table(folder / f"pictures-{rank}")
        for name, more in CASES.items():
            if BATCH // ranks < more.get("passes", 1):
                continue
            row = of_case(folder / name, comm, sections(table, backend, ranks, **more), resumes=True)
            alone = sections(table, "torch", 1, **{**more, "passes": 1})
            one: Any = one_rank()
            if rank == 0:
                expected = of_case(folder / f"{name} alone", one, alone, resumes=False)
                tell({"case": name, "one": expected["whole"], **row})


if __name__ == "__main__":
    with whole_precision():
        main(Path(sys.argv[1]), sys.argv[2])
