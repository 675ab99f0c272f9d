"""Asks a run's supervisors to stop it, from outside of the run: whatever the launcher does with signals. No torch, no event loop."""

import json
import socket
from contextlib import suppress
from typing import Any

from trainer.health.tree import OUTSIDER, Meeting, proof

ANSWER_S = 2.0


def ask_to_stop(meeting: Meeting, number: int) -> bool:
    """Tell rank 0's supervisor that signal `number` came; False where it does not answer."""
    with suppress(OSError, ValueError):  # TimeoutError is an OSError
        return _ask(meeting, number)
    return False


def _ask(meeting: Meeting, number: int) -> bool:
    with socket.create_connection((meeting.host, meeting.port), ANSWER_S) as connection, connection.makefile("rwb") as file:
        nonce = str(json.loads(file.readline())["nonce"])
        _send(file, {"rank": OUTSIDER, "node": "", "port": 0, "proof": proof(meeting.token, nonce)})
        if not file.readline():
            return False
        _send(file, {"kind": "stop", "signal": number, "rank": 0, "node": meeting.host})
        return True


def _send(file: Any, message: dict[str, object]) -> None:
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()
