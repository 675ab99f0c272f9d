"""Messages between supervisors: one frozen type for each, and one codec. Pure; no torch.

On a connection a message is a line of JSON with the name of its type as `kind`. Who sends on it has proven
that it belongs to the run; what cannot be read is refused all the same, and closes the connection.
"""

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainer.run.exit_record import ExitRecord
from trainer.supervise.coordinate.membership import WorldPlan, members_of
from trainer.supervise.network.tree_plan import Address
from trainer.supervise.rank.rank_report import RankReport

_KINDS: dict[str, type["Message"]] = {}


@dataclass(frozen=True)
class Message:
    """A message; each type has its own name on the wire."""

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls


@dataclass(frozen=True)
class AboutRank(Message):
    """A message about a rank; the coordinator drops it if the rank's generation is not the present one."""

    generation: int


# From a supervisor to the coordinator. `member` is a supervisor's number, see `membership`.


@dataclass(frozen=True)
class Joined(Message):
    """A supervisor is there, for the first time or again."""

    member: int
    node: str
    idle: bool = False
    """True if it has no rank, or if that is gone."""
    asked: bool = False
    """True if it knows of a request to stop."""
    signalled: bool = False
    """True if that came as a signal to itself."""
    in_memory: int = 0
    """Newest step that its node has kept in memory; 0 if there is none."""
    address: Address | None = None
    above: int | None = None
    """Member above it, if it was in the tree before the present root was that."""
    ran: int = 1
    """Last generation that was started, as far as it has heard."""


@dataclass(frozen=True)
class Lost(Message):
    """A supervisor is gone."""

    member: int
    node: str
    reason: str
    silent: bool = False
    """True if it may live beyond a cut in the network."""


@dataclass(frozen=True)
class Cut(Message):
    """A supervisor's own network is gone: it does not reach `other`, which may be well."""

    member: int
    node: str
    other: str


@dataclass(frozen=True)
class StopRequest(Message):
    """Somebody asks the run to stop, by a signal to a supervisor or from outside."""

    signal: int
    rank: int
    node: str
    again: bool = False
    """True if a person repeats the request on purpose: then nothing is saved any more."""
    outside: bool = False
    """True if the program sent it that started the launcher: then it is no signal of MPI's own."""


@dataclass(frozen=True)
class Done(AboutRank):
    """A rank has ended as it should, with EXIT_DONE or EXIT_PREEMPTED."""

    rank: int
    code: int
    reason: str = ""


@dataclass(frozen=True)
class Failed(AboutRank):
    """A rank has failed, or could not be started."""

    record: ExitRecord
    step: int = 0
    saving: bool = True
    """False if it failed in its work: then that says nothing about what comes when it saves."""
    waiting: bool = False
    """True if it waited in a collective."""
    killed: bool = False
    """True after SIGKILL."""


@dataclass(frozen=True)
class Late(AboutRank):
    """A phase of a rank has passed its limit; `what` is the sentence about it."""

    what: str


@dataclass(frozen=True)
class Report(AboutRank):
    """A rank does this now."""

    report: RankReport


@dataclass(frozen=True)
class Stack(AboutRank):
    """A rank's Python is here now."""

    rank: int
    stack: str


@dataclass(frozen=True)
class Ended(AboutRank):
    """A member's rank has ended, so that `generation` can start; `in_memory` is as in `Joined`."""

    member: int
    in_memory: int = 0


@dataclass(frozen=True)
class Meeting(AboutRank):
    """Variables by which the ranks of `generation` meet, or the problem why there are none."""

    variables: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Progress(AboutRank):
    """Rank 0 has done this; its supervisor tells a coordinator that is elsewhere.

    `ages` are the seconds since each moment of its start, since clocks of two machines differ.
    """

    steps_done: float = 0.0
    begun: bool = False
    ages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BadNode(AboutRank):
    """Rank 0 has found that a node does badly; `why` is the end of a sentence about it."""

    node: str
    why: str


@dataclass(frozen=True)
class Several(Message):
    """Messages that were collected on their way up."""

    messages: tuple[Message, ...]


# From the coordinator to every supervisor.


@dataclass(frozen=True)
class Stop(Message):
    """The ranks are to save and leave; `to_grow`: so that more of them can start."""

    to_grow: bool = False


@dataclass(frozen=True)
class Collect(Message):
    """Every supervisor is to report what its rank does."""


@dataclass(frozen=True)
class CollectStacks(Message):
    """The supervisors of these ranks are to send their Python stacks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Regroup(Message):
    """Every supervisor is to end its rank, and to confirm it by `Ended`, so that `generation` can start."""

    generation: int


@dataclass(frozen=True)
class Meet(Message):
    """The member is to answer by `Meeting`, since its rank will be rank 0."""

    member: int
    generation: int


@dataclass(frozen=True)
class Start(Message):
    """Every supervisor is to start its rank of `generation`, if it has one in `world`."""

    generation: int
    variables: Mapping[str, str]
    world: str = ""
    """World as `WorldPlan.to_text` wrote it; "": the same as before."""


@dataclass(frozen=True)
class End(Message):
    """The run has ended with this exit code."""

    code: int


@dataclass(frozen=True)
class CutOff(Message):
    """All below leave: others may go on without them."""


SUCCESSORS = 8
"""Number of supervisors that may become the coordinator, in a fixed order."""


@dataclass(frozen=True)
class Roster(Message):
    """Every supervisor knows this of the others, so that another can take the coordinator's place.

    A large one takes a while to read, and is seldom needed: members are read from text when somebody asks.
    """

    generation: int
    world_text: str
    """World of that generation."""
    members_text: str
    """All who are there, with and without a rank, as `runs_text` wrote them; "": those of the world."""
    succession: tuple[tuple[int, Address], ...]
    """Numbers and addresses of the coordinator and of those who follow it, in order."""
    beside: tuple[tuple[int, Address], ...] = ()
    """Numbers and addresses of others of the coordinator's node, which may end together with it."""
    ran: int = 0
    """Number of the last generation that was started; who had no rank in it has not heard of its start."""

    @cached_property
    def world(self) -> WorldPlan:
        """World of that generation."""
        return WorldPlan.from_text(self.world_text)

    @cached_property
    def members(self) -> tuple[tuple[int, str], ...]:
        """Numbers and nodes of all who are there."""
        return tuple(members_of(self.members_text or self.world_text))

    @property
    def addresses(self) -> dict[int, Address]:
        """Address of each member whose address is known."""
        return dict([*self.beside, *self.succession])

    def node_of(self, member: int) -> str:
        """Returns the member's node, "" if it is not known."""
        return next((node for number, node in self.members if number == member), "")


# Between neighbours in the tree.


@dataclass(frozen=True)
class Beat(Message):
    """Sign of life, once a second."""


@dataclass(frozen=True)
class JoinAgain(Message):
    """Everybody below is to send `Joined` again, since the root is another one."""


@dataclass(frozen=True)
class Orphaned(Message):
    """The supervisor above is gone, or with `relayed` one further up; `cut`: this machine's network is."""

    member: int
    node: str
    reason: str
    cut: bool = False
    relayed: bool = False


# The codec.


def to_line(message: Message) -> bytes:
    """Returns the message as it travels."""
    return json.dumps(to_table(message), default=to_table).encode() + b"\n"


def to_table(value: Any) -> dict[str, Any]:
    """Returns a message, or a record in one, as a table of its fields."""
    own = {each.name: getattr(value, each.name) for each in fields(value)}
    return {"kind": type(value).__name__, **own} if isinstance(value, Message) else own


def from_table(table: Any) -> Message:
    """Returns the message that `to_table` made. Raises ValueError if it is none of ours."""
    kind = table.get("kind") if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"no kind of message: {kind!r}")
    message: Message = _built(_KINDS[kind], {name: table[name] for name in table if name != "kind"})
    return message


_hints = cache(get_type_hints)


def _built(wanted: type, table: Any) -> Any:
    hints = _hints(wanted)
    if not isinstance(table, dict) or table.keys() - hints.keys():
        raise ValueError(f"no fields of {wanted.__name__}: {table!r}")
    try:
        return wanted(**{name: _read(hints[name], value) for name, value in table.items()})
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def _read(wanted: Any, value: Any) -> Any:
    """Returns the value as a field of the annotated type `wanted`. Raises ValueError if it is none."""
    if wanted is Any or type(value) is wanted:
        return value
    origin, of = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(of[0], value)
    if wanted is Message:
        return from_table(value)
    if is_dataclass(wanted) and isinstance(wanted, type):
        return _built(wanted, value)
    if origin in (tuple, Sequence) and isinstance(value, list):
        each = [of[0]] * len(value) if origin is Sequence or of[-1] is Ellipsis else of
        return tuple(_read(one, item) for one, item in zip(each, value, strict=True))
    if origin is Mapping and isinstance(value, dict):
        return {name: _read(of[1], item) for name, item in value.items()}
    if wanted is float and type(value) is int:
        return float(value)
    raise ValueError(f"{value!r} is no {wanted}")
