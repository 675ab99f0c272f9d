"""`clipship run` of tiny jobs, and the files that a run leaves.

Neither ranks nor backend nor launcher change what the model learns.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from tests.support.jobs import COCA, VIT
from tests.support.runs import TinyRun, tiny_run
from trainer.config.loader import load_job
from trainer.sysinfo.addresses import free_port

STEPS = 6
MANY_STEPS = 30
"""Enough to tell learning from the difference between batches."""
BATCH = 16
EPOCH_STEPS = 5

TORCH = pytest.param("torch")
HOROVOD = pytest.param("horovod", marks=pytest.mark.horovod)
both_backends = pytest.mark.parametrize("backend", [TORCH, HOROVOD])
full = pytest.mark.full


def run_of(folder: Path, backend: str, ranks: int, **sections: dict[str, Any]) -> TinyRun:
    """A few steps, into the second epoch, to their end."""
    run = tiny_run(
        folder,
        **{
            **sections,
            "optim": {"steps": STEPS, **sections.get("optim", {})},
            "comm": {"backend": backend, **sections.get("comm", {})},
        },
    )
    done = run.start(ranks)
    (folder / "stdout").write_text(done.stdout)
    return run


Finished = Callable[[str, int, int], TinyRun]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run on a backend, so many ranks and so many passes a step, made once."""
    known: dict[tuple[str, int, int], TinyRun] = {}

    def run(backend: str, ranks: int, passes: int) -> TinyRun:
        if (backend, ranks, passes) not in known:
            limit = {"max_batch_size_per_gpu": BATCH // ranks // passes}
            known[backend, ranks, passes] = run_of(
                tmp_path_factory.mktemp("run"), backend, ranks, optim=limit
            )
        return known[backend, ranks, passes]

    return run


def world(backend: str, ranks: int, passes: int, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(
        backend, ranks, passes, marks=[pytest.mark.horovod] * (backend == "horovod") + [*marks]
    )


@pytest.mark.parametrize(
    ("backend", "ranks", "passes"),
    [
        world("torch", 1, 2, full),
        world("torch", 2, 1, full),
        world("torch", 2, 2),
        world("horovod", 1, 1, full),
        world("horovod", 2, 1),
        world("horovod", 2, 2, full),
    ],
)
def test_every_world_has_the_losses_of_one_process(
    finished: Finished, backend: str, ranks: int, passes: int
) -> None:
    assert_same_losses(finished(backend, ranks, passes), finished("torch", 1, 1), rel=1e-4)


def assert_same_losses(run: TinyRun, other: TinyRun, rel: float) -> None:
    losses = run.losses()
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(other.losses(), rel=rel)


KNOBS: dict[str, dict[str, Any]] = {
    "torch": {"bucket_mb": 0.1, "gradient_as_bucket_view": False},
    "horovod": {"fusion_mb": 1.0, "cycle_ms": 2.0, "hierarchical_allreduce": True},
}


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=full), HOROVOD])
def test_knobs_of_communication_change_no_loss(finished: Finished, tmp_path: Path, backend: str) -> None:
    comm = {backend: KNOBS[backend], "check_replicas_steps": 2, "timeline": [2, 3]}
    env = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_CACHE_CAPACITY": "256"}
    run = run_of(tmp_path, backend, 2, comm=comm, env=env, optim={"max_batch_size_per_gpu": 4})
    assert_same_losses(run, finished("torch", 1, 1), rel=1e-4)
    traces = {path.name: path.read_text() for path in (run.run / "traces").iterdir()}
    assert {f"rank-0000{rank}-steps-2-3.json" for rank in range(2)} == {
        name for name in traces if name.startswith("rank")
    }
    assert all(
        json.loads(text) and "aten::matmul" in text
        for name, text in traces.items()
        if name.startswith("rank")
    )
    timelines = [text for name, text in traces.items() if not name.startswith("rank")]
    assert ["NEGOTIATE_ALLGATHER" in text for text in timelines] == [True] * (backend == "horovod")


CAUSES = "start data checkpoint evaluation stragglers detection recovery redone other"


@both_backends
def test_run_folder_holds_the_job_its_metrics_logs_and_result(finished: Finished, backend: str) -> None:
    run = finished(backend, 2, 1)
    assert load_job(run.run / "job.toml") == load_job(run.folder / "tiny.toml")
    records = [event for event in run.events() if "loss" in event]
    wanted = {"step", "epoch", "samples", "loss", "lr", "grad_norm", "logit_scale", "samples_per_s"}
    wanted |= {"bad_samples", "generation", "step_s", "data_s", "compute_s", "comm_s", "checkpoint_s"}
    times = {"data_s_max", "compute_s_max", "comm_s_min", "data_s_median", "straggler_s"}
    of_run = {"useful_share", *(f"lost_{cause}_s" for cause in CAUSES.split())}
    of_ranks = {"comm_bytes", "comm_share", "slowest_rank", "slowest_by", "cpu_share_max", "rss_bytes_max"}
    assert {key for record in records for key in record} == wanted | times | of_ranks | of_run
    assert all(record.keys() == records[0].keys() for record in records)
    assert [record["samples"] for record in records] == [BATCH * step for step in range(1, STEPS + 1)]
    assert [record["epoch"] for record in records] == [0] * EPOCH_STEPS + [1]
    logs = sorted((run.run / "logs").iterdir())
    assert [path.name for path in logs] == ["rank-00000.log", "rank-00001.log"]
    assert all(path.stat().st_size for path in logs)
    expected = {
        "exit_code": 0,
        "reason": "done",
        "steps": STEPS,
        "samples": STEPS * BATCH,
        "world_size": 2,
        "loss": records[-1]["loss"],
    }
    expected["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result = run.result()
    assert expected.items() <= result.items()
    assert 0 < result["useful_share"] < 1
    assert sum(result["lost_s"].values()) == pytest.approx(
        result["seconds"] * (1 - result["useful_share"]), abs=1.0
    )
    assert [path.name for path in run.run.rglob("*.partial")] == []
    environment = json.loads((run.run / "environment.json").read_text())
    assert [rank["rank"] for rank in environment] == ["0", "1"]
    assert all(
        rank["torch"] == version("torch") and rank["backend"].startswith(backend) for rank in environment
    )


@both_backends
def test_open_clip_loads_the_weights_of_the_checkpoint(finished: Finished, backend: str) -> None:
    place = finished(backend, 2, 1).run / "checkpoints" / f"step-{STEPS:08d}"
    assert json.loads((place / "manifest.json").read_text())["step"] == STEPS
    open_clip.add_model_config(VIT)
    loaded = open_clip.create_model(Path(VIT).stem, pretrained=str(place / "model.pt")).state_dict()
    saved = torch.load(place / "model.pt", weights_only=True)
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


@both_backends
def test_console_says_what_runs_and_then_one_line_a_step(finished: Finished, backend: str) -> None:
    lines = (finished(backend, 2, 1).folder / "stdout").read_text().splitlines()
    start = [line[:13].rstrip() for line in lines if not line.startswith("step ")]
    assert start[:6] == ["run folder", "world", "backend", "model", "batch", "data"]
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [
        f"{step}/{STEPS}" for step in range(1, STEPS + 1)
    ]


def beside_python(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


ROOT = ["--allow-run-as-root"] * (os.geteuid() == 0)
BY_HAND = {
    "torchrun": [beside_python("torchrun"), "--standalone", "--nproc-per-node", "2"],
    "mpirun": [
        *(beside_python("mpirun"), *ROOT, "--bind-to", "none", "-n", "2"),
        *("-x", "MASTER_ADDR", "-x", "MASTER_PORT", sys.executable),
    ],
    "horovodrun": [beside_python("horovodrun"), "--gloo", "-np", "2", sys.executable],
}


def start_by_hand(launcher: str, folder: Path, job: Path) -> "subprocess.CompletedProcess[str]":
    """The command line that a user types, in a folder of no meaning and without PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["OMP_NUM_THREADS"] = "1"
    if launcher == "mpirun":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    command = [*BY_HAND[launcher], "-m", "trainer.train", str(job)]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        pytest.param("torchrun", "torch", marks=full),
        pytest.param("mpirun", "torch", marks=[pytest.mark.mpi, full]),
        pytest.param("mpirun", "horovod", marks=[pytest.mark.mpi, pytest.mark.horovod]),
        pytest.param("horovodrun", "horovod", marks=[pytest.mark.horovod, full]),
    ],
)
def test_ranks_started_by_hand_train_the_same(
    finished: Finished, tmp_path: Path, launcher: str, backend: str
) -> None:
    run = TinyRun(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    done = start_by_hand(
        launcher, tmp_path / "elsewhere", run.write(optim={"steps": STEPS}, comm={"backend": backend})
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_losses(run, finished("torch", 1, 1), rel=1e-4)
    assert len(json.loads((run.run / "environment.json").read_text())) == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_job_that_no_check_has_seen_is_refused_by_its_ranks(tmp_path: Path) -> None:
    job = TinyRun(tmp_path).write(
        model={"name": COCA, "lock_image": True}, optim={"steps": 1, "loss": "coca"}
    )
    done = subprocess.run(
        [sys.executable, "-m", "trainer.train", str(job)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2, done.stderr
    assert "model.lock_image" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        pytest.param("torch", "bf16", marks=full),
        pytest.param("torch", "fp16", marks=full),
        pytest.param("horovod", "bf16", marks=[pytest.mark.horovod, full]),
        pytest.param("horovod", "fp16", marks=pytest.mark.horovod),
    ],
)
def test_half_precision_with_compressed_gradients_learns(
    finished: Finished, tmp_path: Path, backend: str, precision: str
) -> None:
    compression = "bf16" if (backend, precision) == ("torch", "bf16") else "fp16"
    run = run_of(
        tmp_path,
        backend,
        2,
        model={"precision": precision},
        comm={backend: {"compression": compression}},
        optim={"steps": MANY_STEPS},
    )
    assert_learns(run, finished("torch", 1, 1))


def assert_learns(run: TinyRun, exact: TinyRun) -> None:
    """Training from the same weights in another precision learns as much.

    fp16's scaler skips some steps until it has found its factor.
    """
    losses, first = run.losses(), exact.losses()[1]
    assert losses[1] == pytest.approx(first, rel=1e-2)
    assert losses[1] != first
    assert len(losses) == MANY_STEPS
    assert max(losses[step] for step in range(MANY_STEPS - 2, MANY_STEPS + 1)) < 0.8 * first
