"""A coordinator that a test tells messages: what it says, shows and writes is there to be looked at."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.launch.start_again import asked_after
from trainer.run import launcher_word
from trainer.run.exit_files import ExitFiles, exit_record_of
from trainer.run.exit_record import ExitRecord
from trainer.safe_io.values import read_values
from trainer.supervise import messages
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.coordinator_host import CoordinatorHost
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine
from trainer.supervise.network.tree_plan import TreePlan
from trainer.world.launchers import World

MEETING = {"MASTER_PORT": "4711"}
STOP = messages.StopRequest(signal=15, rank=0, node="n0")
_KEEPS = {"CLIPSHIP_KEEPS_GOING": "1"}
_LAUNCHERS = {"keeps": _KEEPS, "respawns": {**_KEEPS, "CLIPSHIP_RESPAWNS": "1"}}


def failed(
    rank: int, generation: int = 1, *, code: int = 1, cause: str = "killed", at: float = 1.0, **of: Any
) -> messages.Failed:
    """The rank on the node of the same number has failed, in step 6 if nothing else is said."""
    record = ExitRecord(rank, f"n{rank}", code, f"{cause}; and a hint", at, "a trace")
    return messages.Failed(**{"generation": generation, "record": record, "step": 6, **of})


def lost(member: int) -> messages.Lost:
    """The supervisor on the node of the same number is gone."""
    return messages.Lost(member, f"n{member}", "its connection closed")


def done(rank: int, code: int = 0, generation: int = 1, reason: str = "") -> messages.Done:
    """The rank has left as it should."""
    return messages.Done(generation, rank, code, reason)


def restarts_in(folder: Path) -> list[dict[str, Any]]:
    """Returns the restarts that a run folder tells of; none before the file is there."""
    file = folder / "restarts.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["restarts"] if file.exists() else []
    return rows


class Story(Machine):
    """A coordinator on n0 of members on n0, n1 and so on, which have joined it.

    The story stands for all that is around it: machine, rank, end and connections of its supervisor.
    """

    def __init__(
        self,
        folder: Path,
        launcher: str = "",
        *,
        members: int = 2,
        joined: Iterable[int] | None = None,
        member: int = 0,
        spares: int = 0,
        generation: int = 1,
        **of: Any,
    ) -> None:
        """`launcher` keeps the others ("keeps"), starts lost ones again, too ("respawns"), starts all again
        ("lost", "always"), or ends all. `of` are attributes of the story, and limits."""
        self.folder = folder
        self.step, self.kept, self.begun = 5.0, 0, True
        """Of its own rank: the last step, that in memory, and whether it has done anything."""
        self.obedient = True
        """Every supervisor confirms at once that its rank has ended."""
        self.no_port = False
        """It finds nothing where the ranks could meet."""
        self.checkpoint_read_s = 0.0
        """Seconds that the run folder takes to say which checkpoint is the newest."""
        own = {name: of.pop(name) for name in list(of) if name in vars(self)}
        vars(self).update(own)
        self.said: list[messages.Message] = []
        self.rosters: list[messages.Roster] = []
        self.lines: list[str] = []
        self.shown: list[ExitRecord] = []
        self.left_to: list[str] = []
        limits = Limits(run_folder=str(folder), **{"max_restarts": 2, "backoff_s": 0.0, **of})
        env = {"CLIPSHIP_SPARE_NODES": str(spares)}
        env |= _LAUNCHERS.get(launcher, {"CLIPSHIP_STARTS_AGAIN": launcher})
        self.plan, self.address, self.ending = TreePlan(f"n{member}"), ("h", 1), False
        its: Any = self
        self.context = SupervisorContext(
            World(member, members, 0, 1, f"n{member}", "clipship run", generation),
            limits,
            env,
            _Files(self),
            self,
            its,
            keeps_going=launcher in _LAUNCHERS and limits.max_restarts > 0,
            send_up=lambda message: None,
        )
        self.host = CoordinatorHost(self.context, its, its, self.broadcast)
        self.its = self.host.take()
        self.there = set(range(members) if joined is None else joined)
        for each in self.there:
            self.its.receive(messages.Joined(each, f"n{each}"))

    # What a test does.

    async def tell(self, *what: messages.Message | float) -> None:
        """Tells the coordinator messages; a number stands for seconds that pass."""
        for each in what:
            if isinstance(each, messages.Lost):
                self.there.discard(each.member)
            if isinstance(each, messages.Message):
                self.its.receive(each)
            else:
                await asyncio.sleep(each)

    async def request(self, record: ExitRecord, **of: int) -> None:
        """Asks the launcher to start all again, as another supervisor has done before this generation."""
        its = replace(record, generation=self.context.world.generation)
        await self.context.exit_files.request_start(launcher_word.StartRequest(its, **of))

    async def until(self, arrived: Callable[[], object]) -> None:
        while not arrived():
            await asyncio.sleep(0.1)

    async def heard(self, kind: type[messages.Message]) -> None:
        """Waits until a message of this kind has been said."""
        await self.until(lambda: kind in self.kinds)

    async def regrouped(self, generation: int) -> None:
        """Waits until all are told to end their ranks, so that this generation can start."""
        await self.until(lambda: messages.Regroup(generation) in self.said)

    async def restarted(self, generation: int) -> messages.Start:
        """Waits for the start of a generation, and returns the message that starts it."""
        await self.until(lambda: self._start(generation) or self.code is not None)
        start = self._start(generation)
        assert start is not None, self.shown
        return start

    async def left(self) -> int:
        """Waits until all are told to leave; returns the exit code."""
        await self.until(lambda: self.code is not None)
        assert self.code is not None
        return self.code

    async def ended(self) -> ExitRecord:
        """Waits for the end of the run; returns its record in the run folder."""
        code = await self.left()
        record = exit_record_of(self.folder, "now")
        assert record is not None
        assert record.exit_code == code
        return record

    @property
    def kinds(self) -> list[type[messages.Message]]:
        return [type(message) for message in self.said]

    @property
    def code(self) -> int | None:
        """Exit code with which all were told to leave."""
        codes = [message.code for message in self.said if isinstance(message, messages.End)]
        assert len(codes) < 2, "the run ends twice"
        return codes[0] if codes else None

    @property
    def restarts(self) -> list[dict[str, Any]]:
        return restarts_in(self.folder)

    @property
    def word(self) -> dict[str, str]:
        """The last word to the launcher, as a batch script reads it."""
        return read_values(self.folder / launcher_word.WORD)

    def asked_after(self, generation: int) -> int:
        """Returns the generation that the launcher starts after this one; 0 if none."""
        return asked_after(self.folder, "now", generation)

    def _start(self, generation: int) -> messages.Start | None:
        starts = [each for each in self.said if isinstance(each, messages.Start)]
        return next((start for start in starts if start.generation == generation), None)

    # Its machine, and the other supervisors.

    def say(self, line: str) -> None:
        self.lines.append(line)

    def newest_kept(self, env: Mapping[str, str]) -> int:
        return self.kept

    def broadcast(self, message: messages.Message) -> None:
        self.said.append(message)
        if isinstance(message, messages.Regroup) and self.obedient:
            for member in self.there:
                self.its.receive(messages.Ended(message.generation, member))

    def down(self, message: messages.Roster) -> None:
        self.rosters.append(message)

    def drop(self, member: int) -> None:
        """It has no connections."""

    # Its rank.

    def state(self) -> Any:
        return SimpleNamespace(steps_done=self.step)

    @property
    def has_begun(self) -> bool:
        return self.begun

    def moments(self) -> Mapping[str, float]:
        return {}

    async def choose_meeting(self) -> Mapping[str, str]:
        if self.no_port:
            raise OSError("no free port")
        return MEETING

    # Its end.

    def show(self, record: ExitRecord) -> None:
        self.shown.append(record)

    def leave(self, reason: str) -> None:
        self.left_to.append(reason)


class _Files(ExitFiles):
    def __init__(self, story: Story) -> None:
        super().__init__(str(story.folder), "now")
        self._story = story

    async def newest_checkpoint(self) -> int | None:
        await asyncio.sleep(self._story.checkpoint_read_s)
        return await super().newest_checkpoint()
