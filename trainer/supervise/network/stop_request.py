"""Asks a run's supervisors to stop it, from outside the run; independent of how the launcher treats signals.

No torch, no event loop.
"""

import json
import secrets
import socket
from contextlib import suppress
from typing import Any

from trainer.supervise.messages import StopRequest, to_table
from trainer.supervise.network.link import OUTSIDER
from trainer.world.rendezvous import Rendezvous, is_signed, signed

ANSWER_S = 2.0
REPEAT_S = 5.0
"""Signals within this many seconds of the first are one request: launchers and schedulers send several."""
_LINE = 2**16


def send_stop_request(rendezvous: Rendezvous, number: int, *, again: bool = False) -> bool:
    """Tells rank 0's supervisor that signal `number` came.

    Returns False if it does not answer, or another program does.

    `again` means that the user repeated the signal on purpose, so nothing is saved any more.
    """
    # TimeoutError is an OSError; another program may send anything.
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        return _ask(rendezvous, number, again)
    return False


def _ask(rendezvous: Rendezvous, number: int, again: bool) -> bool:
    with (
        socket.create_connection((rendezvous.host, rendezvous.port), ANSWER_S) as connection,
        connection.makefile("rwb") as file,
    ):
        nonces = str(json.loads(file.readline(_LINE))["nonce"]), secrets.token_hex(16)
        about = {"rank": OUTSIDER, "node": "", "port": 0, "nonce": nonces[1]}
        _send(file, signed(rendezvous.token, "newcomer", nonces, about))
        if not is_signed(rendezvous.token, "host", nonces, dict(json.loads(file.readline(_LINE)))):
            return False
        _send(file, to_table(StopRequest(number, 0, rendezvous.host, again, outside=True)))
        return True


def _send(file: Any, message: dict[str, object]) -> None:
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()
