"""States of a run at its coordinator, and the table of what leads from one to another. Pure; no torch.

Whoever wants to know what happens if a supervisor is lost while ranks start looks up STARTING: it takes
`Lost`, which is a FAULT, which leads to DECIDING. What is not in the table is refused: a message that a state
does not take is dropped, an event that it does not allow is an error that ends the supervisor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from trainer.supervise import messages
from trainer.supervise.messages import Message


class State(Enum):
    """State of a run: its row of the table says what the coordinator waits for."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DECIDING = "deciding"
    ENDING = "ending"
    AGREEING = "agreeing"
    CLAIMED = "claimed"
    ENDED = "ended"


class Event(Enum):
    """Event that leads from one state to another."""

    STEP = "a step was done that no generation had done"
    LEAVE = "the ranks leave: the run is asked to stop, more ranks can start, or a rank is done"
    FAULT = "the first cause of a failure is known"
    RESTART = "the ranks are to start again"
    RANKS_ENDED = "all who are there have ended their ranks"
    AGREED = "it is known which members make the next world, and where their ranks meet"
    CHANGED = "a member has come or gone meanwhile"
    START = "every supervisor is told to start its rank"
    END = "it is decided how the run ends"
    CUT_OFF = "others go on without this coordinator"


@dataclass(frozen=True)
class Row:
    """One state: what it waits for, the messages that it takes, and where each event leads."""

    waits_for: str
    takes: frozenset[type[Message]]
    leads_to: Mapping[Event, State]


WITH_RANKS = frozenset({State.STARTING, State.RUNNING, State.STOPPING})
"""States in which ranks run and are watched."""
BETWEEN = frozenset({State.ENDING, State.AGREEING, State.CLAIMED})
"""States between two generations: the ranks of one are being ended, those of the next do not run yet."""

_ALWAYS = frozenset({messages.Joined, messages.Lost, messages.Cut, messages.StopRequest, messages.Ended})
_OF_RANKS = frozenset(
    {messages.Done, messages.Failed, messages.Report, messages.Stack, messages.Progress, messages.BadNode}
)
_OVER = {Event.END: State.ENDED, Event.CUT_OFF: State.ENDED}

TABLE: Mapping[State, Row] = {
    State.STARTING: Row(
        "the first new step of this generation",
        _ALWAYS | _OF_RANKS | {messages.Late},
        {
            Event.STEP: State.RUNNING,
            Event.LEAVE: State.STOPPING,
            Event.FAULT: State.DECIDING,
            **_OVER,
        },
    ),
    State.RUNNING: Row(
        "a failure, a request to stop, or a rank that is done",
        _ALWAYS | _OF_RANKS | {messages.Late},
        {Event.LEAVE: State.STOPPING, Event.FAULT: State.DECIDING, Event.CUT_OFF: State.ENDED},
    ),
    State.STOPPING: Row(
        "all ranks to have saved and left",
        _ALWAYS | _OF_RANKS | {messages.Late},
        {
            Event.STEP: State.STOPPING,
            Event.LEAVE: State.STOPPING,
            Event.FAULT: State.DECIDING,
            Event.RESTART: State.ENDING,  # they have left so that more of them can start
            **_OVER,
        },
    ),
    State.DECIDING: Row(
        "the policy's word on a failure, for which it looks at the run folder",
        _ALWAYS | _OF_RANKS,
        {Event.LEAVE: State.DECIDING, Event.RESTART: State.ENDING, **_OVER},
    ),
    State.ENDING: Row(
        "every supervisor to say that its rank has ended, or to be lost",
        _ALWAYS,
        {Event.RANKS_ENDED: State.AGREEING, **_OVER},
    ),
    State.AGREEING: Row(
        "a world of those who are there, the wait before the restart, and a place where the ranks meet",
        _ALWAYS | {messages.Meeting},
        {
            Event.AGREED: State.CLAIMED,
            Event.CHANGED: State.ENDING,
            Event.RESTART: State.ENDING,  # by the launcher, since a supervisor is lost
            Event.FAULT: State.DECIDING,  # likewise, and it is a fault of its own
            **_OVER,
        },
    ),
    State.CLAIMED: Row(
        "the run folder to say that this coordinator owns the next generation",
        _ALWAYS,
        {Event.START: State.STARTING, Event.CHANGED: State.ENDING, **_OVER},
    ),
    State.ENDED: Row("nothing", frozenset(), {}),
}


class IllegalEvent(RuntimeError):
    """An event that a state does not allow: a mistake in this program."""


def following(state: State, event: Event) -> State:
    """Returns the state to which an event leads. Raises IllegalEvent if the table does not have it."""
    if event not in TABLE[state].leads_to:
        raise IllegalEvent(f"{event.name} ({event.value}) in state {state.name}")
    return TABLE[state].leads_to[event]
