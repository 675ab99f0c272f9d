"""One turn of `make bench-gpu`: `python -m benchmarks.gpu_side ours|theirs CASE SAMPLES STEPS SKIP`.

Each side is its own trainer from its main function on; only the data are replaced. The last line on stdout is
JSON: what was measured, or why nothing was. A case of several ranks runs on all GPUs. `probe` prints the name
and bytes of the GPU as JSON, or null.
"""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.gpu_cases import CASES, GpuCase, Skipped
from trainer.world.launchers import detect


class StepTimer:
    """Times what lies between two returns of the optimizer's `step`, then leaves the process."""

    def __init__(self, steps: int, skip: int) -> None:
        self.first, self.last, self.done = skip, skip + steps, 0
        self.started = time.perf_counter()
        register_optimizer_step_post_hook(self._step_done)

    def _step_done(self, *_: object) -> None:
        self.done += 1
        if self.done == 1:
            torch.cuda.synchronize()
            self.first_s = time.perf_counter() - self.started
        if self.done == self.first:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.began, self.cpu_began = time.perf_counter(), time.process_time()
        elif self.done == self.last:
            torch.cuda.synchronize()
            spent = {
                "step_s": time.perf_counter() - self.began,
                "cpu_s": time.process_time() - self.cpu_began,
            }
            measured = {name: seconds / (self.last - self.first) for name, seconds in spent.items()}
            measured |= {
                "first_s": self.first_s,
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "taken_bytes": torch.cuda.memory_reserved(),
            }
            if detect(os.environ, os.uname().nodename).rank == 0:
                say(measured)
            os._exit(0)  # what a trainer does at its end is no part of a step


def say(measured: Mapping[str, Any]) -> None:
    """Prints the last line of a turn."""
    print(json.dumps(measured), file=sys.__stdout__, flush=True)


def tokens_of(case: GpuCase, samples: int) -> Tensor:
    """Returns captions, int64 [samples, context length], padded with zeros.

    Each ends with the largest id, which ends a caption for CLIP's tokenizer.
    """
    context = case.shape.text.tokens
    ends = torch.full((samples,), context - 1)
    if case.caption_tokens is not None:
        generator = torch.Generator().manual_seed(0)
        ends = torch.randint(2, 2 * case.caption_tokens - 3, (samples,), generator=generator).clamp(
            max=context - 1
        )
    tokens = torch.randint(1, 1000, (samples, context), dtype=torch.int64)
    tokens[torch.arange(samples), ends] = case.vocabulary - 1
    tokens[torch.arange(context) > ends[:, None]] = 0
    return page_locked(tokens)


def page_locked(tensor: Tensor) -> Tensor:
    """Returns the tensor in memory from which a GPU copies without waiting, if there is a GPU."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


class NoTokenizer:
    """Takes the place of a tokenizer, which may have to be fetched, and is not used."""

    context_length = 77

    def __call__(self, texts: list[str], *_: object) -> Tensor:
        return torch.zeros(len(texts), self.context_length, dtype=torch.int64)


def ours(case: GpuCase, samples: int, steps: int, folder: Path) -> None:
    """Runs `trainer.train` on images as bytes, as our loader gives them.

    Ranks that train together share the folder, which has their job.
    """
    import trainer.model.build as build
    import trainer.train.main as program
    import trainer.train.opened as opened
    import trainer.train.prefetch as prefetch
    from trainer.config.loader import dump_job
    from trainer.data.loader import Batch
    from trainer.train.setup import TrainSetup

    if case.changes:  # they come with Triton
        from benchmarks.gpu_changes import apply

        apply(case.changes)
    size = samples // case.accumulation
    images = page_locked(torch.randint(0, 256, (size, 4, *case.shape.image_size), dtype=torch.uint8))
    batch = Batch(images, tokens_of(case, size), 0, 0, 0, torch.arange(size), [""] * size, [""] * size)

    def loaded(setup: TrainSetup) -> Iterator[Batch]:
        return iter([batch] * steps * case.accumulation)

    prefetch._loaded = loaded
    # No case has a tower of transformers: all that a model's text part would fetch is its tokenizer.
    build.text_source = lambda *_, **__: None  # type: ignore[attr-defined]
    build._tokenizer = lambda *_: NoTokenizer()  # type: ignore[assignment]
    build.quick = lambda tokenizer: tokenizer  # type: ignore[attr-defined]
    # A tokenizer's package, too, may be missing.
    opened.check_packages = lambda job: None  # type: ignore[attr-defined]
    path = folder / "job.toml"
    if not path.exists():
        path.write_text(dump_job(case.job(samples, steps)))
    program.main(path)


def ranks(name: str, samples: int, steps: int, words: list[str]) -> int:
    """Starts our side on each GPU of the machine; returns the exit code of the first rank that failed."""
    from trainer.config.loader import dump_job
    from trainer.launch.local import start_ranks

    case, count = CASES[name], torch.cuda.device_count()
    if case.backend == "horovod":
        _check_horovod()
    job = case.job(samples, steps, count)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(dump_job(job))
        own = (sys.executable, "-m", "benchmarks.gpu_side", "ours", name, *words, folder)
        return start_ranks(own, job, nproc=count, hosts=None)


def _check_horovod() -> None:
    """Raises Skipped if there is no Horovod here, or one that takes gradients off the GPU."""
    if importlib.util.find_spec("horovod") is None:
        raise Skipped("Horovod is not installed")
    if not importlib.import_module("horovod.torch").nccl_built():
        raise Skipped("Horovod is installed without NCCL")


@dataclass
class TheirData:
    """One batch again and again, in the form of open_clip_train's DataInfo and of its loader."""

    batch: tuple[Tensor, Tensor]
    num_batches: int
    num_samples: int

    @property
    def dataloader(self) -> "TheirData":
        return self

    def set_epoch(self, _epoch: int) -> None:
        """Does nothing."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self.batch] * self.num_batches)


def theirs(case: GpuCase, samples: int, steps: int, folder: Path) -> None:
    """Runs `open_clip_train` on normalised float images, as its loader gives them."""
    if importlib.util.find_spec("pandas") is None:
        with contextlib.suppress(ImportError):
            importlib.import_module("wandb")  # it looks for the real one
        sys.modules["pandas"] = ModuleType("pandas")  # it is imported, and used for tables of samples alone
        sys.modules["pandas"].__spec__ = ModuleSpec("pandas", None)
    import open_clip_train.main as program

    size = samples // case.accumulation
    images = page_locked(torch.randn(size, 3, *case.shape.image_size))
    data = TheirData((images, tokens_of(case, size)), steps * case.accumulation, samples * steps)
    replaced: dict[str, Callable[..., Any]] = {
        "get_data": lambda *_, **__: {"train": data},
        "get_tokenizer": lambda *_, **__: NoTokenizer(),
    }
    for name, function in replaced.items():
        setattr(program, name, function)
    program.main(their_arguments(case, samples, steps, folder))


def their_arguments(case: GpuCase, samples: int, steps: int, folder: Path) -> list[str]:
    """Returns the options that open_clip's README gives for speed, with ours where both have one."""
    given = {
        "model": case.model,
        "batch-size": samples // case.accumulation,
        "accum-freq": case.accumulation,
        "precision": {"bf16": "amp_bf16", "fp32": "fp32"}[case.precision],
        "dataset-type": "synthetic",
        "train-num-samples": samples * steps,
        "workers": 0,
        "epochs": 1,
        "warmup": 5,
        "lr": 1e-4,
        "log-every-n-steps": 10,
        "logs": str(folder),
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [*words, "--local-loss", "--gather-with-grad", *(["--siglip"] if case.loss == "siglip" else [])]


def probe() -> dict[str, Any] | None:
    """Returns the GPU's name and bytes; None if torch sees no GPU."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return {"name": found.name, "bytes": found.total_memory}


def main(arguments: list[str]) -> None:
    """Runs one turn."""
    if arguments == ["probe"]:
        print(json.dumps(probe()))
        return
    side, name, *words = arguments
    samples, steps, skip = map(int, words[:3])
    last = skip + steps + 5
    try:
        if CASES[name].backend and not words[3:]:
            raise SystemExit(ranks(name, samples, last, words))
        timer = StepTimer(steps, skip)
        with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(sys.stderr):
            folder = Path(words[3] if words[3:] else own)
            {"ours": ours, "theirs": theirs}[side](CASES[name], samples, last, folder)
    except Skipped as why:
        say({"skipped": str(why)})
        return
    raise SystemExit(f"{side} ended after {timer.done} steps, before the one that ends the turn")


if __name__ == "__main__":
    main(sys.argv[1:])
