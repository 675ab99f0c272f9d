"""The real trainer, one rank of which does something bad at a given moment.

`python -m tests.support.faulty_rank JOB` is a supervisor and its rank, as `python -m trainer.rank JOB` is.
The variable `FAULT` in the job's [env] is DEED:RANK:PHASE:STEP. A fifth field names the one generation of
ranks in which it happens, and commas separate several faults. Deeds:

- kill, stop (SIGSTOP), slow (sleeps for good), raise, exit (code 7);
- freeze (stops its supervisor, too), halt (stops its supervisor alone), orphan (kills its supervisor);
- lose (kills all processes of its node, at once);
- signal (SIGUSR2 to its supervisor), signal-all (every rank does so), term (SIGTERM to its supervisor);
- nap (sleeps 12 s, or NAP_S), lag (sleeps a second now and at every later step);
- wait (until the test makes the file `go` beside that of the moment);
- memory (asks for more than it may have), fill (the run folder's disk, once a checkpoint is whole);
- quota (the next flush of a file is refused, as NFS does it), back (the clock is set back, see `clock_back`);
- unplug (its machine's network), worker-kill and worker-stop (a loader process);
- nan (this rank's loss of that step is NaN).

In the phase `step` the deed waits until the nodes have the step before whole in their memory: ranks seal
their parts a little apart, and the late one would be killed before it has. The phase `keeping` is the moment
in which a step's part in memory is half written. In the phase `preflight`, whose only deed is `wrong`, this
rank gets wrong sums while the preflight checks the collectives.

Deeds of the phase `start`, before the supervisor begins:

- absent (the rank never comes), gone (its supervisor is killed, once);
- port and meeting (another process has the port);
- unreachable (MASTER_ADDR leads nowhere), path (OTHER_PATH comes first for its modules).

LOCK_WAIT_S, with or without a fault, is the time for which a start waits for the run folder.
"""

import errno
import json
import multiprocessing.forkserver
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import clock_back
from tests.support.net_hosts import INTERFACE
from trainer.run import lock as run_lock
from trainer.supervise import main as rank
from trainer.sysinfo.children import processes_with, signal_all
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import detect
from trainer.world.rendezvous import Rendezvous
from trainer.world.state_parts import newest_step

MOMENT = "FAULT_MOMENT"
"""A file that gets the time at which the fault happened."""
THEN = "FAULT_THEN"
"""Seconds by phase, as JSON: limits from the fault on, on every rank. Healthy phases before it have time."""
FILL_S = 60.0
KEPT_S = 30.0
MOMENT_S = 30.0


def install(fault: str) -> None:
    """From now on, entering the phase at the step is the fault's moment."""
    deed, victim, phase, step, *generation = fault.split(":")
    world = detect(os.environ, os.uname().nodename)
    here = world.rank
    if generation and generation != [str(world.generation)]:
        return
    if phase == "keeping":
        keep_badly(deed, int(step), mine=str(here) == victim)
        return
    if phase == "preflight":
        if str(here) == victim:
            add_wrongly()
        return
    enter = Heartbeat.begin_phase
    then = json.loads(os.environ.get(THEN, "{}"))

    def fall(self: Heartbeat, entered: Any, at: int = 0) -> None:
        due = entered == phase and (at >= int(step) if deed == "lag" else str(at) == step)
        mine = str(here) == victim or deed == "signal-all"
        if due and then and not mine:
            await_moment()
        if due:
            self.limits = {**self.limits, **then}
        enter(self, entered, at)
        if due and mine:
            if entered == "step" and deed != "lag":
                await_kept(at - 1)
            commit(deed)

    Heartbeat.begin_phase = fall  # type: ignore[method-assign, assignment]


def keep_badly(deed: str, step: int, *, mine: bool) -> None:
    """Does the deed when this rank has written a step's part into memory and not sealed it."""
    from trainer.checkpoint.memory_state import PartWriter

    seal = PartWriter.seal

    def sealed(self: PartWriter, buffer: int, at: int, about: Mapping[str, Any]) -> None:
        if mine and at == step:
            commit(deed)
        seal(self, buffer, at, about)

    PartWriter.seal = sealed  # type: ignore[method-assign, assignment]


def add_wrongly() -> None:
    """Makes one of this rank's sums wrong in each check of the collectives, as bad memory does."""
    from trainer.comm.torch_backend import TorchBackend
    from trainer.preflight import network_probe

    check, add = network_probe.wrong_collectives, TorchBackend.all_reduce

    def add_one_wrongly(self: TorchBackend, tensor: Any, *others: Any, **named: Any) -> Any:
        total = add(self, tensor, *others, **named)
        total.view(-1)[0] += 1
        return total

    def checked(comm: Any) -> tuple[str, ...]:
        TorchBackend.all_reduce = add_one_wrongly  # type: ignore[method-assign]
        try:
            return check(comm)
        finally:
            TorchBackend.all_reduce = add  # type: ignore[method-assign]

    network_probe.wrong_collectives = checked


def begin_badly(fault: str) -> None:
    """Before the supervisor begins."""
    deed, victim, _, _ = fault.split(":")
    if victim not in (str(detect(os.environ, os.uname().nodename).rank), "all"):
        return
    note_moment()
    match deed:
        case "absent":
            time.sleep(600)
        case "gone" if "CLIPSHIP_RESPAWNED" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        case "port":
            keep_busy(int(os.environ["MASTER_PORT"]))
        case "meeting":
            keep_busy(int(os.environ["CLIPSHIP_SUPERVISORS"].rpartition(":")[2]))
        case "unreachable":
            os.environ["MASTER_ADDR"] = "192.0.2.1"  # nobody's (RFC 5737)
        case "path":
            os.environ["PYTHONPATH"] = f"{os.environ['OTHER_PATH']}:{os.environ['PYTHONPATH']}"


def keep_busy(port: int) -> None:
    """As long as this process lives."""
    BUSY.append(socket.create_server(("", port)))


BUSY: list[socket.socket] = []


def await_moment() -> None:
    """Returns at the fault: a victim that is late would otherwise have only the short limits to get there."""
    limit = time.monotonic() + MOMENT_S
    while not Path(os.environ[MOMENT]).exists() and time.monotonic() < limit:
        time.sleep(0.01)


def await_kept(step: int) -> None:
    """Returns once each node of this machine that has the step before in memory has this one, too."""
    limit = time.monotonic() + KEPT_S
    while is_one_behind(step) and time.monotonic() < limit:
        time.sleep(0.005)


def is_one_behind(step: int) -> bool:
    """Returns whether a node has the step before, and not this one; a node that is lost has older ones."""
    run = Rendezvous.from_env(os.environ)
    return run is not None and any(
        newest_step(folder, run.start) == step - 1 > 0 for folder in Path("/dev/shm").glob("clipship-state-*")
    )


def note_moment() -> None:
    """The first time counts."""
    file = Path(os.environ[MOMENT])
    if not file.exists():
        file.write_text(str(time.time()))


def commit(deed: str) -> None:
    note_moment()
    match deed:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "freeze":
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "halt":
            os.kill(os.getppid(), signal.SIGSTOP)
        case "orphan":
            os.kill(os.getppid(), signal.SIGKILL)
        case "lose":
            lose_node()
        case "slow":
            time.sleep(600)
        case "wait":
            while not go_file(Path(os.environ[MOMENT])).exists():
                time.sleep(0.01)
        case "unplug":
            subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)
        case "nap":
            time.sleep(float(os.environ.get("NAP_S", "12")))
        case "lag":
            time.sleep(1)
        case "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 2**26
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            import torch

            torch.zeros(2**30)
        case "fill":
            fill(Path(os.environ["FULL_DISK"]))
        case "quota":
            refuse_a_flush()
        case "back":
            Path(os.environ[clock_back.SET]).touch()
        case "worker-kill":
            os.kill(loader_process(), signal.SIGKILL)
        case "worker-stop":
            os.kill(loader_process(), signal.SIGSTOP)
        case "nan":
            spoil_loss()
        case "raise":
            raise ValueError("a fault of the test")
        case "exit":
            os._exit(7)
        case "signal" | "signal-all":
            os.kill(os.getppid(), signal.SIGUSR2)
        case "term":
            os.kill(os.getppid(), signal.SIGTERM)


def go_file(moment: Path) -> Path:
    """Returns the file for which the deed `wait` waits."""
    return moment.with_name("go")


def lose_node() -> None:
    """Kills all processes of this node; they are stopped first, so that none learns of another's end."""
    marks = (os.fsencode(f"{name}={os.environ[name]}") for name in (MOMENT, "CLIPSHIP_NODE"))
    of_run, of_node = (set(processes_with(mark, "environ")) for mark in marks)
    others, parent = (of_run & of_node) - {os.getpid()}, os.getppid()
    signal_all(others, signal.SIGSTOP)
    signal_all(others - {parent}, signal.SIGKILL)
    signal_all((parent, os.getpid()), signal.SIGKILL)  # this process may end with its parent, at once


def fill(folder: Path) -> None:
    """To the last byte, once a checkpoint is whole: the one before may still be under way."""
    limit = time.monotonic() + FILL_S
    while not list(folder.glob("*/checkpoints/step-*")):
        assert time.monotonic() < limit, "no checkpoint becomes whole"
        time.sleep(0.05)
    with open(folder / "filling", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**16))
        except OSError:
            return


def refuse_a_flush() -> None:
    """Once."""
    whole = os.fsync

    def refused(_file: int) -> None:
        os.fsync = whole
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    os.fsync = refused  # type: ignore[assignment]


def loader_process() -> int:
    """The first child of the server that loader processes are forked from."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return int(Path(f"/proc/{server}/task/{server}/children").read_text().split()[0])


def spoil_loss() -> None:
    """Once."""
    from trainer.train.step import TrainStep

    whole = TrainStep._contrast

    def spoiled(self: TrainStep, *inputs: object) -> object:
        TrainStep._contrast = whole  # type: ignore[method-assign]
        return whole(self, *inputs) * float("nan")  # type: ignore[arg-type]

    TrainStep._contrast = spoiled  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    fault = os.environ.get("FAULT", "")
    if "CLIPSHIP_RANK_DIR" in os.environ:
        from trainer.train import main as train

        for each in fault.split(",") if fault and ":start:" not in fault else ():
            install(each)
        run_lock.WAIT_S = float(os.environ.get("LOCK_WAIT_S", run_lock.WAIT_S))
        train.command()
    else:
        if ":start:" in fault:
            begin_badly(fault)
        sys.exit(rank.main(sys.argv[1:], "tests.support.faulty_rank"))
