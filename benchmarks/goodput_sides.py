"""Our side and open_clip_train's in `benchmarks.goodput`: how each is started, and who its processes are."""

import json
import os
import re
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.data import their_python
from benchmarks.goodput_nodes import NAMES, Nodes, Process, ranks_by_log
from trainer.run import goodput_log
from trainer.run.layout import CHECKPOINTS, METRICS_FILE, RESULT_FILE
from trainer.sysinfo.addresses import free_port

PER_NODE = 2
GOES_ON = ("recovery.max_restarts=100", "recovery.keep_every_steps=1")
"""Settings of a run with faults, none of which may cost more than the step that it cuts off."""
BATCH = 64
EPOCH_STEPS = 22
_TAIL = 8192
"""Steps of an epoch on both sides; the rest of the demo's 1,442 samples is left out of theirs."""


class Side(ABC):
    """A run of one side on the nodes; it may have to be started several times."""

    supervisor: str
    """Module that supervises ranks on a node."""
    poll_s: float
    """Seconds between two looks at its last step."""

    def __init__(self, nodes: Nodes, folder: Path, steps: int) -> None:
        self.nodes, self.folder, self.steps = nodes, folder, steps
        self.output = folder / "output"

    @abstractmethod
    def start(self) -> list["subprocess.Popen[bytes]"]:
        """Starts the run, or goes on with it; it is over once all processes have ended."""

    def replace_node(self, name: str) -> list["subprocess.Popen[bytes]"]:
        """Starts what takes the place of a node that was lost, unless the side does that itself."""
        return []

    @abstractmethod
    def ranks(self) -> dict[int, Process]:
        """Returns the processes of the ranks."""

    @abstractmethod
    def last_step(self) -> tuple[int, int]:
        """Returns generation and number of the last step that was recorded; (0, 0) before the first."""

    @abstractmethod
    def saves(self) -> bool:
        """Returns whether a checkpoint is being written."""

    @abstractmethod
    def is_done(self) -> bool:
        """Returns whether the run has reached its last step and saved."""

    def loader(self, rank: int) -> Process | None:
        """Returns a loader process of the rank: one without children that the rank, or its server, forked."""
        processes = self.nodes.processes()
        own = self.ranks().get(rank)
        if own is None:
            return None
        parents = {process.pid: process.parent for process in processes}
        leaves = [
            process
            for process in processes
            if process.pid not in parents.values() and own.pid in _ancestors(process.pid, parents)
        ]
        return next((leaf for leaf in leaves if not leaf.runs("resource_tracker")), None)

    def supervisor_of(self, rank: int) -> Process | None:
        """Returns the process that supervises the rank; None if it is not found."""
        processes = self.nodes.processes()
        own = self.ranks().get(rank)
        return next((each for each in processes if own is not None and each.pid == own.parent), None)

    def _run(self, command: list[str], variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        with open(self.output, "ab") as output:
            return subprocess.Popen(
                command,
                env={**variables},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


class Ours(Side):
    """`clipship run --hosts` on nodes of two ranks each."""

    supervisor, poll_s = "trainer.rank", 0.01

    def __init__(
        self,
        nodes: Nodes,
        folder: Path,
        steps: int,
        job: Path,
        backend: str,
        *,
        names: Sequence[str] = NAMES[:2],
        settings: Sequence[str] = (),
    ) -> None:
        """`settings` are overrides of the job, KEY=VALUE."""
        super().__init__(nodes, folder, steps)
        # Of its kind, but as long as this side is asked to be; paths in it are relative to its folder.
        self._job = job.with_name(f"{folder.name}.toml")
        text = re.sub(r"(?m)^epochs = \d+", f"steps = {steps}", job.read_text())
        self._job.write_text(re.sub(r"(?ms)^\[eval\].*?(?=^\[)", "", text))  # theirs evaluates nothing, too
        self.run_folder = folder / "runs" / "goodput"
        self._overrides = [
            "name=goodput",
            f"logging.runs={folder / 'runs'}",
            "logging.every_steps=1",
            f"comm.backend={backend}",
            "comm.launcher=clipship",  # in each run the same
            "resources.cpus_per_gpu=1",  # as theirs: OMP_NUM_THREADS is 1
            *settings,
        ]
        self._names = names

    def start(self) -> list["subprocess.Popen[bytes]"]:
        hosts = ",".join(f"{name}:{PER_NODE}" for name in self._names)
        settings = [word for override in self._overrides for word in ("--set", override)]
        command = [sys.executable, "-P", "-m", "trainer.cli", "run", str(self._job), "--hosts", hosts]
        variables = {**self.nodes.variables, "PYTHONPATH": str(Path(__file__).parents[1])}
        return [self._run([*command, *settings], variables)]

    def ranks(self) -> dict[int, Process]:
        return ranks_by_log(self.nodes.processes())

    def last_step(self) -> tuple[int, int]:
        try:
            with open(self.run_folder / METRICS_FILE, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                lines = file.read().splitlines()
        except OSError:
            return 0, 0
        for line in reversed(lines):
            with suppress(ValueError):  # the first line may be cut, the last one half written
                record = json.loads(line)
                if "loss" in record:
                    return record.get("generation", 1), record["step"]
        return 0, 0

    def saves(self) -> bool:
        folder = self.run_folder / CHECKPOINTS
        return folder.is_dir() and any(name.endswith(".partial") for name in os.listdir(folder))

    def is_done(self) -> bool:
        return (self.run_folder / RESULT_FILE).exists()

    def records(self) -> list[dict[str, float]]:
        """Returns the records of steps in the order in which they stand."""
        lines = (self.run_folder / METRICS_FILE).read_text().splitlines()
        return [event for event in map(json.loads, lines) if "loss" in event]

    def restarts(self) -> list[dict[str, Any]]:
        """Returns the restarts that the run recorded, of all its starts, in the order of their times."""
        lines = {
            (event.get("start"), event.get("generation"), event.get("time")): event
            for event in goodput_log.read(self.run_folder)
            if event["event"] == "restart"
        }  # a restart's line comes again once more is known
        return list(lines.values())

    def result(self) -> dict[str, Any]:
        """Returns result.json; empty if the run is not done."""
        path = self.run_folder / RESULT_FILE
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def weights(self) -> dict[str, Any]:
        """Returns the final weights by name, as tensors. Raises FileNotFoundError if the run is not done."""
        import torch

        path = self.run_folder / CHECKPOINTS / f"step-{self.steps:08d}" / "model.pt"
        return dict(torch.load(path, map_location="cpu", weights_only=True))


class Theirs(Side):
    """open_clip_train under torchrun, an agent on each node; it goes on from its checkpoint of each epoch."""

    supervisor, poll_s = "torch.distributed.run", 0.5

    def __init__(self, nodes: Nodes, folder: Path, steps: int, job: Path, cache: Path) -> None:
        super().__init__(nodes, folder, steps)
        self._job, self._python = job, their_python(cache)
        self._starts, self._port = 0, 0
        self._used: list[str] = []

    def start(self) -> list["subprocess.Popen[bytes]"]:
        self._starts += 1
        self._port = free_port("127.0.0.1")
        self._used = list(NAMES[:2])
        return [self._start_agent(name) for name in self._used]

    def replace_node(self, name: str) -> list["subprocess.Popen[bytes]"]:
        """Starts an agent on the spare node at once.

        One that waited there from the beginning would disturb each restart: sometimes it takes another
        agent's place, which then ends the run.
        """
        spare = next(each for each in NAMES if each not in self._used)
        self._used[self._used.index(name)] = spare
        return [self._start_agent(spare)]

    def _start_agent(self, name: str) -> "subprocess.Popen[bytes]":
        agent = [
            str(self._python), "-m", self.supervisor, "--nnodes=2", f"--nproc-per-node={PER_NODE}",
            "--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}",
            f"--rdzv-id={self._starts}", "--local-addr=127.0.0.1",
            str(Path(__file__).with_name("goodput_open_clip.py")),
            str(self._job.with_name("digits-clip.json")),
        ]  # fmt: skip
        variables = {name: value for name, value in self.nodes.variables.items() if name != "PYTHONPATH"}
        arguments = [
            "--train-data", str(self._job.parent / "digits" / "train" / "shard-{000000..000005}.tar"),
            "--train-num-samples", str(EPOCH_STEPS * BATCH), "--dataset-type", "webdataset",
            "--batch-size", str(BATCH // (2 * PER_NODE)), "--workers", "1",
            "--epochs", str(self.steps // EPOCH_STEPS), "--lr", "1e-3", "--wd", "0.1", "--warmup", "40",
            "--grad-clip-norm", "1.0", "--precision", "fp32", "--device", "cpu", "--dist-backend", "gloo",
            "--local-loss", "--gather-with-grad", "--log-every-n-steps", "1", "--logs", str(self.folder),
            "--name", "goodput", "--save-frequency", "1", "--save-most-recent", "--resume", "latest",
        ]  # fmt: skip
        # torchrun takes --logs, whoever it is for, as an option of its own.
        variables["OPEN_CLIP_ARGUMENTS"] = shlex.join(arguments)
        return self._run(["ssh", name, f"exec {shlex.join(agent)}"], variables)

    def ranks(self) -> dict[int, Process]:
        processes = self.nodes.processes()
        ranks = {process.pid: process for process in processes if "LOCAL_RANK" in process.variables}
        return {
            int(process.variables["RANK"]): process
            for process in ranks.values()
            if process.parent not in ranks
        }

    def last_step(self) -> tuple[int, int]:
        """Counts each beginning of training as a generation."""
        try:
            text = (self.folder / "goodput" / "out.log").read_text(errors="replace")
        except OSError:
            return 0, 0
        steps = re.findall(r"Train Epoch: (\d+) \[\s*(\d+)/", text)
        step = int(steps[-1][0]) * EPOCH_STEPS + int(steps[-1][1]) // BATCH if steps else 0
        return text.count("Start epoch"), step

    def saves(self) -> bool:
        return (self.folder / "goodput" / "checkpoints" / "tmp.pt").exists()

    def is_done(self) -> bool:
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return f"goodput: all {self.steps // EPOCH_STEPS} epochs are done" in text


def _ancestors(pid: int, parents: Mapping[int, int]) -> set[int]:
    found = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found | {pid}
