"""The supervisors' tree: who is whose child, what travels, who is let in, and that an end is noticed."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from tests.listeners import listeners, outer_address
from tests.support import clock
from trainer.supervise.machine import Machine
from trainer.supervise.messages import (
    Done,
    End,
    Joined,
    Late,
    Lost,
    Message,
    Orphaned,
    Stop,
    StopRequest,
    to_line,
)
from trainer.supervise.network.link import send_stop_request
from trainer.supervise.network.tree import Tree
from trainer.sysinfo.addresses import free_port
from trainer.world.rendezvous import Rendezvous, signed


def rendezvous() -> Rendezvous:
    return Rendezvous("127.0.0.1", free_port("127.0.0.1"), "secret")


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def grown(
    place: Rendezvous, nodes: list[str], silence_s: float = 60.0
) -> tuple[list[Tree], list[Message]]:
    """A tree with a rank on each of the nodes, and what its root hears."""
    trees = [Tree(place, rank, node, silence_s, Machine()) for rank, node in enumerate(nodes)]
    heard: list[Message] = []
    trees[0].at_root = heard.append
    for tree in trees:
        await tree.join(10.0)
    return trees, heard


def losses(heard: list[Message]) -> list[Lost]:
    return [message for message in heard if isinstance(message, Lost)]


async def left(trees: list[Tree]) -> None:
    for tree in reversed(trees):
        await tree.leave()


def test_the_rendezvous_is_restored_from_its_variables() -> None:
    for place in (Rendezvous("node-1", 4711, "t"), Rendezvous("fd00::2", 1, "t")):
        assert Rendezvous.from_env(place.variables()) == place
    assert Rendezvous.from_env({}) is None


async def test_messages_reach_the_root_and_everybody() -> None:
    trees, heard = await grown(rendezvous(), ["a", "a", "b", "c", "c", "d"])
    told: list[int] = []

    def note(rank: int, message: Message) -> None:
        told.append(rank)

    for tree in trees:
        tree.from_above = partial(note, tree.rank)
        tree.up(Done(1, tree.rank, 0))
    await until(lambda: len([message for message in heard if isinstance(message, Done)]) == 6)
    assert {message.member for message in heard if isinstance(message, Joined)} == {1, 2, 3, 4, 5}
    trees[0].down(Stop())
    await until(lambda: sorted(told) == [0, 1, 2, 3, 4, 5])
    await left(trees)


async def test_messages_sent_before_joining_are_not_lost() -> None:
    place = rendezvous()
    early = Tree(place, 1, "b", 60.0, Machine())
    early.up(Done(1, 1, 0))
    joining = asyncio.create_task(early.join(10.0))
    await asyncio.sleep(0.3)  # the root comes later than the others
    trees, heard = await grown(place, ["a"])
    await joining
    await until(lambda: Done(1, 1, 0) in heard)
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


async def test_loss_of_the_root_is_told_to_all_below_at_once() -> None:
    trees, _ = await grown(rendezvous(), ["a", "b", "b"])
    heard: dict[int, list[Message]] = {1: [], 2: []}
    for rank, its in heard.items():
        trees[rank].from_above = its.append
    trees[0].ending = True
    await trees[0].leave()
    await until(lambda: all(heard.values()))
    assert heard[1] == [Orphaned(0, "a", "its connection closed", cut=False, relayed=False)]
    assert heard[2][0] == Orphaned(0, "a", "its connection closed", relayed=True)
    await left(trees[1:])


async def test_a_peer_without_the_token_is_refused() -> None:
    place = rendezvous()
    trees, heard = await grown(place, ["a"])
    reader, writer = await asyncio.open_connection(place.host, place.port)
    nonce = json.loads(await reader.readline())["nonce"]
    hello = signed("guess", "newcomer", (nonce, "own"), {"rank": 1, "node": "x", "port": 1, "nonce": "own"})
    writer.write(json.dumps(hello).encode() + b"\n" + to_line(StopRequest(15, 0, "x")))
    assert await reader.read() == b""
    writer.close()
    assert heard == []
    await left(trees)


NONSENSE = {
    "http": b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 100,
    "deep": b"[" * 200_000,
    "deep answer": b'{"proof": "x", "nonce": ' + b"[" * 900 + b"]" * 900 + b"}",
    "not ascii": '{"proof": "\u00e9", "nonce": "1"}'.encode(),
    "half a character": b'{"proof": "\\ud800", "nonce": "\\udfff"}',
    "long number": b'{"proof": ' + b"9" * 10_000 + b"}",
    "no names": b"[]",
    "nothing": b"null",
}


@pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in NONSENSE.items()])
async def test_stranger_that_talks_nonsense_does_no_harm(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    place = rendezvous()
    trees, heard = await grown(place, ["a"])
    reader, writer = await asyncio.open_connection(place.host, place.port)
    await reader.readline()
    writer.write(line + b"\n")
    assert await reader.read() == b"", "it is sent away"
    writer.close()
    other = Tree(place, 1, "b", 60.0, Machine())
    await other.join(5.0)
    await until(lambda: [type(message) for message in heard] == [Joined])
    await left([*trees, other])
    assert caplog.text == "", "nothing of the stranger's reaches the output"


@asynccontextmanager
async def squatter(place: Rendezvous, answer: bytes) -> AsyncIterator[list[bytes]]:
    """A stranger at the port where rank 0's supervisor should be, who lets everybody in.

    Gives the messages that the stranger received after that.
    """
    told: list[bytes] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"nonce": "fixed"}\n')
        await reader.readline()
        writer.write(answer + b"\n" + to_line(End(0)))
        told.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(greet, place.host, place.port)
    try:
        yield told
    finally:
        server.close()


WELCOMES = {
    "no proof": b'{"parent": null, "rank": 0, "node": "a"}',
    "a guess": json.dumps(
        signed("guess", "host", ("fixed", "x"), {"parent": None, "rank": 0, "node": "a"})
    ).encode(),
    "nonsense": b"[" * 100_000,
}


@pytest.mark.parametrize("answer", [pytest.param(answer, id=name) for name, answer in WELCOMES.items()])
async def test_a_stranger_at_the_roots_port_is_not_taken_for_it(answer: bytes) -> None:
    place = rendezvous()
    async with squatter(place, answer) as told:
        tree = Tree(place, 1, "b", 60.0, Machine())
        heard: list[Message] = []
        tree.from_above = heard.append
        tree.up(Late(1, "what"))
        with pytest.raises(TimeoutError, match=f"127.0.0.1, port {place.port}"):
            await tree.join(0.5)
        assert not await asyncio.to_thread(send_stop_request, place, 15)
        await tree.leave()
        await until(lambda: len(told) >= 2)
        assert set(told) == {b""}, "it is told nothing of the run"
        assert heard == [], "and what it says is not done"


async def test_a_stranger_that_sends_ones_own_proof_back_is_not_taken_for_the_root() -> None:
    place = rendezvous()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"nonce": "fixed"}\n')
        hello = json.loads(await reader.readline())
        writer.write(json.dumps({**hello, "parent": None}).encode() + b"\n")
        writer.write(json.dumps(hello).encode() + b"\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(echo, place.host, place.port)
    tree = Tree(place, 1, "b", 60.0, Machine())
    with pytest.raises(
        TimeoutError, match="another program answers there, which does not know this run's token"
    ):
        await tree.join(0.5)
    await tree.leave()
    server.close()


async def test_supervisors_listen_only_where_the_others_reach_them() -> None:
    own = outer_address()
    place = Rendezvous(own, free_port(own), "secret")
    before = set(listeners(os.getpid()))  # another test's, if this process has run some
    trees, _ = await grown(place, ["a", "b", "b"])
    try:
        opened = set(listeners(os.getpid())) - before
        assert {listener.address for listener in opened} == {own}
    finally:
        await left(trees)


async def test_request_from_outside_reaches_the_root_and_its_leaving_is_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.supervise.network.link.ANSWER_S", 60.0)  # on a busy machine it comes late
    place = rendezvous()
    trees, heard = await grown(place, ["a", "b"])
    assert await asyncio.to_thread(send_stop_request, place, 15)
    await until(lambda: StopRequest(15, 0, place.host, outside=True) in heard)
    assert not await asyncio.to_thread(send_stop_request, Rendezvous(place.host, place.port, "guess"), 15)
    await asyncio.sleep(0.2)
    assert not losses(heard)
    await left(trees)


def test_a_stop_request_says_if_no_supervisor_is_there() -> None:
    assert not send_stop_request(rendezvous(), 15)


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
    own = 1, trees[1].address
    assert await trees[1].rejoin([(0, (place.host, place.port)), own], 10.0) == {0}
    assert len(calls) == 1
    assert trees[1].is_root
    await trees[1].leave()
