"""The supervisors' tree: who is whose child, what travels, who is let in, and that an end is noticed."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import clock
from tests.unit.test_coordinator import COMPUTING
from trainer.run.exit_record import ExitRecord
from trainer.supervise import messages
from trainer.supervise.background import on_error, spawn
from trainer.supervise.machine import Machine
from trainer.supervise.network.link import send_stop_request
from trainer.supervise.network.tree import Tree
from trainer.sysinfo.addresses import free_port
from trainer.world.rendezvous import Rendezvous, signed


def rendezvous() -> Rendezvous:
    return Rendezvous("127.0.0.1", free_port("127.0.0.1"), "secret")


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def single(place: Rendezvous, rank: int = 1, node: str = "b", silence_s: float = 60.0) -> Tree:
    return Tree(place, rank, node, silence_s, Machine())


async def grown(
    place: Rendezvous, nodes: list[str], silence_s: float = 60.0
) -> tuple[list[Tree], list[messages.Message]]:
    """A tree with a rank on each of the nodes, and what its root hears."""
    trees = [single(place, rank, node, silence_s) for rank, node in enumerate(nodes)]
    heard: list[messages.Message] = []
    trees[0].at_root = heard.append
    for tree in trees:
        await tree.join(10.0)
    return trees, heard


def losses(heard: list[messages.Message]) -> list[messages.Lost]:
    return [message for message in heard if isinstance(message, messages.Lost)]


async def left(trees: list[Tree]) -> None:
    for tree in reversed(trees):
        await tree.leave()


def test_the_rendezvous_is_restored_from_its_variables() -> None:
    for place in (Rendezvous("node-1", 4711, "t"), Rendezvous("fd00::2", 1, "t")):
        assert Rendezvous.from_env(place.variables()) == place
    assert Rendezvous.from_env({}) is None


async def test_messages_sent_before_joining_are_not_lost() -> None:
    place = rendezvous()
    early = single(place)
    early.up(messages.Done(1, 1, 0))
    joining = asyncio.create_task(early.join(10.0))
    await asyncio.sleep(0.3)  # the root comes later than the others
    trees, heard = await grown(place, ["a"])
    await joining
    await until(lambda: messages.Done(1, 1, 0) in heard)
    await left([*trees, early])


async def test_broken_connection_and_silence_are_told_to_the_root() -> None:
    trees, heard = await grown(rendezvous(), ["a", "b", "c"], silence_s=5.0)
    trees[1].ending = True
    assert trees[1]._parent is not None
    trees[1]._parent.writer.transport.abort()
    await until(lambda: losses(heard))
    assert losses(heard)[0].member == 1
    for task in trees[2]._tasks:  # it hears no more and says no more, and its connection stays
        task.cancel()
    await until(lambda: len(losses(heard)) == 2)
    assert (losses(heard)[1].member, losses(heard)[1].reason) == (2, "it has been silent for 5 s")
    await left(trees)


def guess(nonce: str) -> bytes:
    """What a peer says that has another token."""
    hello = signed("guess", "newcomer", (nonce, "own"), {"rank": 1, "node": "x", "port": 1, "nonce": "own"})
    return json.dumps(hello).encode() + b"\n" + messages.to_line(messages.StopRequest(15, 0, "x"))


NONSENSE: dict[str, bytes | Callable[[str], bytes]] = {
    "another token": guess,
    "http": b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 100,
    "deep": b"[" * 200_000,
    "deep answer": b'{"proof": "x", "nonce": ' + b"[" * 900 + b"]" * 900 + b"}",
    "not ascii": '{"proof": "\u00e9", "nonce": "1"}'.encode(),
    "half a character": b'{"proof": "\\ud800", "nonce": "\\udfff"}',
    "long number": b'{"proof": ' + b"9" * 10_000 + b"}",
    "no names": b"[]",
    "nothing": b"null",
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
async def test_stranger_that_talks_nonsense_does_no_harm(
    said: bytes | Callable[[str], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    place = rendezvous()
    trees, heard = await grown(place, ["a"])
    reader, writer = await asyncio.open_connection(place.host, place.port)
    nonce = json.loads(await reader.readline())["nonce"]
    writer.write((said if isinstance(said, bytes) else said(nonce)) + b"\n")
    assert await reader.read() == b"", "it is sent away"
    writer.close()
    other = single(place)
    await other.join(5.0)
    await until(lambda: [type(message) for message in heard] == [messages.Joined])
    await left([*trees, other])
    assert caplog.text == "", "nothing of the stranger's reaches the output"


ROOT = {"parent": None, "rank": 0, "node": "a"}
WELCOMES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "no proof": lambda hello: json.dumps(ROOT).encode(),
    "a guess": lambda hello: json.dumps(signed("guess", "host", ("fixed", "x"), ROOT)).encode(),
    "its own proof": lambda hello: json.dumps({**hello, "parent": None}).encode(),
    "nonsense": lambda hello: b"[" * 100_000,
}


@pytest.mark.parametrize("name", WELCOMES)
async def test_a_stranger_at_the_roots_port_is_not_taken_for_it(name: str) -> None:
    place = rendezvous()
    told: list[bytes] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"nonce": "fixed"}\n')
        hello = json.loads(await reader.readline())
        writer.write(WELCOMES[name](hello) + b"\n" + messages.to_line(messages.End(0)))
        told.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(greet, place.host, place.port)
    tree = single(place)
    heard: list[messages.Message] = []
    tree.from_above = heard.append
    tree.up(messages.Late(1, "what"))
    with pytest.raises(TimeoutError, match=f"127.0.0.1, port {place.port}") as refused:
        await tree.join(0.5)
    why = "another program answers there, which does not know this run's token"
    assert name == "nonsense" or why in str(refused.value)
    assert not await asyncio.to_thread(send_stop_request, place, 15)
    await tree.leave()
    await until(lambda: len(told) >= 2)
    assert set(told) == {b""}, "it is told nothing of the run"
    assert heard == [], "and what it says is not done"
    server.close()


async def test_request_from_outside_reaches_the_root_and_its_leaving_is_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.supervise.network.link.ANSWER_S", 60.0)  # on a busy machine it comes late
    place = rendezvous()
    assert not send_stop_request(place, 15), "no supervisor is there"
    trees, heard = await grown(place, ["a", "b"])
    assert await asyncio.to_thread(send_stop_request, place, 15)
    await until(lambda: messages.StopRequest(15, 0, place.host, outside=True) in heard)
    assert not await asyncio.to_thread(send_stop_request, Rendezvous(place.host, place.port, "guess"), 15)
    await asyncio.sleep(0.2)
    assert not losses(heard)
    await left(trees)


async def test_call_that_a_dying_root_cuts_off_is_repeated_before_its_death_is_in_doubt() -> None:
    place = rendezvous()
    trees, _ = await grown(place, ["a", "b"])
    await trees[0].leave()
    calls: list[asyncio.StreamWriter] = []

    def dies(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(writer)
        writer.close()
        server.close()

    server = await asyncio.start_server(dies, place.host, place.port)
    trees[1].lose_parent()
    heard: list[messages.Message] = []
    trees[1].at_root = heard.append
    trees[1].up(messages.Late(1, "what"))
    own = 1, trees[1].address
    assert await trees[1].rejoin([(0, (place.host, place.port)), own], 10.0) == {0}
    assert len(calls) == 1
    assert trees[1].is_root
    assert heard == [messages.Late(1, "what")], "what it had to tell comes to itself now"
    await trees[1].leave()


async def test_what_raises_over_a_message_of_another_supervisor_is_heard() -> None:
    trees, _ = await grown(rendezvous(), ["a", "b"])
    raised: list[BaseException] = []

    def at_root(message: messages.Message) -> None:
        raise RuntimeError("broken on purpose")

    on_error(raised.append)
    trees[0].at_root = at_root
    trees[1].up(messages.Late(1, "what"))
    await until(lambda: raised)
    assert [str(error) for error in raised] == ["broken on purpose"]
    await left(trees)


async def test_a_caller_that_cannot_be_accepted_ends_no_supervisor() -> None:
    heard: list[BaseException] = []
    on_error(heard.append)
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    loop.call_exception_handler({"message": "accept failed", "exception": OSError(24, "files")})
    spawn(asyncio.sleep(60), tasks)
    next(iter(tasks)).cancel()
    loop.call_soon(int, "x")
    await asyncio.sleep(0.01)
    assert [type(error) for error in heard] == [ValueError]


def test_supervisor_that_was_stopped_for_a_while_takes_nobody_for_silent() -> None:
    its = clock.Clock()

    async def story() -> None:
        trees, heard = await grown(rendezvous(), ["a", "b"], silence_s=5.0)
        await asyncio.sleep(1.5)  # they have begun to beat
        its.jump(7.0)  # the whole event loop: as SIGSTOP does, nobody reads meanwhile
        await asyncio.sleep(2.5)
        assert losses(heard) == []
        await left(trees)

    clock.run(story(), clock=its)


# Messages between supervisors: what travels comes out as it went in, and anything else is refused.

SAMPLES: list[messages.Message] = [
    messages.Joined(1, "n1", asked=True, signalled=True, in_memory=7, address=("h", 4711), above=0),
    messages.Joined(1, "n1"),
    messages.Failed(2, ExitRecord(0, "n0", 1, "killed", 1.0, restarts=({"rank": 1},)), step=4, killed=True),
    messages.Report(1, COMPUTING),
    messages.Meeting(2, {"MASTER_PORT": "1"}),
    messages.Progress(2, float("inf"), begun=True, ages={"stepped": 0.5}),
    messages.Several((messages.Joined(1, "n1"), messages.Ended(2, 1))),
    messages.CollectStacks((0, 3)),
    messages.Start(2, {"A": "b"}, "0 1 n0"),
    messages.End(1),
    messages.Roster(2, "0 1 n0", "0 2 n0", ((0, ("h", 1)),), ((1, ("h", 2)),)),
    messages.Beat(),
]
"""One of each kind of field; every other message has fields of these kinds only."""


def kinds_of_fields(message: type[messages.Message]) -> set[str]:
    return {str(each.type) for each in vars(message)["__dataclass_fields__"].values()}


def test_each_kind_of_field_has_a_sample() -> None:
    def kinds(types: Any) -> set[str]:
        return set().union(*map(kinds_of_fields, types))

    every = [*messages.Message.__subclasses__(), *messages.AboutRank.__subclasses__()]
    assert kinds(every) == kinds(map(type, SAMPLES))


@pytest.mark.parametrize(
    "table",
    [
        None,
        [],
        {"kind": 7},
        {"kind": ["Stop"]},
        {"kind": "AboutRank"},
        {"kind": "ExitRecord", "rank": 0},
        {"kind": "Regroup"},
        {"kind": "Regroup", "generation": True},
        {"kind": "Regroup", "generation": 2, "more": 1},
        {"kind": "Lost", "member": 1, "node": None, "reason": ""},
        {"kind": "CollectStacks", "ranks": [0, "1"]},
        {"kind": "Joined", "member": 1, "node": "n", "address": ["h"]},
        {"kind": "Failed", "generation": 1, "record": {"rank": 0}},
        {"kind": "Several", "messages": [{"kind": "Nothing"}]},
        {"kind": "Start", "generation": 1, "variables": {"A": 1}},
    ],
)
def test_what_is_no_message_is_refused(table: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        messages.from_table(table)
