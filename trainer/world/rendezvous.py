"""Meeting place of the supervisors of a start, and proofs that they belong to the run. No torch."""

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

RENDEZVOUS = "CLIPSHIP_SUPERVISORS"
"""Variable that holds `host:port` of rank 0's supervisor."""
TOKEN = "CLIPSHIP_TOKEN"
Message = dict[str, Any]
Side = Literal["host", "newcomer"]
"""Speaker in a handshake: the supervisor that was called, or the one that calls."""


@dataclass(frozen=True)
class Rendezvous:
    """Address of rank 0's supervisor, and the token that proves membership of the run."""

    host: str
    port: int
    token: str

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Rendezvous | None":
        """Returns None if the launcher sets no address: each supervisor then works alone."""
        host, _, port = env.get(RENDEZVOUS, "").rpartition(":")
        return cls(host.strip("[]"), int(port), env.get(TOKEN, "")) if host and port.isdigit() else None

    @property
    def start(self) -> str:
        """Id of this start of the run.

        Its files carry the id, so that an older start's are not mistaken for its own.
        """
        return proof(self.token, "start")[:16]

    def variables(self) -> dict[str, str]:
        """Returns the variables that `from_env` reads."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return {RENDEZVOUS: f"{host}:{self.port}", TOKEN: self.token}


def proof(token: str, text: str) -> str:
    """HMAC-SHA256 of the text under the run's token, as hex."""
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def signed(token: str, side: Side, nonces: Sequence[str], message: Message) -> Message:
    """Returns the message with a proof that its sender knows the token.

    `nonces` are the host's and the newcomer's, so no proof serves twice.
    """
    return {**message, "proof": proof(token, json.dumps([side, *nonces, message], sort_keys=True))}


def is_signed(token: str, side: Side, nonces: Sequence[str], message: Message) -> bool:
    """Returns whether `signed` made the message with this token, for this side and these nonces.

    A stranger's message may hold anything.
    """
    try:
        own = signed(token, side, nonces, {name: value for name, value in message.items() if name != "proof"})
    except RecursionError:
        return False
    return hmac.compare_digest(str(message.get("proof")).encode(errors="replace"), str(own["proof"]).encode())
