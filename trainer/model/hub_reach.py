"""Tells beforehand that the Hugging Face hub cannot be reached.

The hub's own client tries each file six times, over 23 s, with two lines for each try. No torch.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from urllib.parse import urlsplit

from trainer.config import Model
from trainer.config.training import HUB_TEXT
from trainer.errors import InputError
from trainer.model.catalog import HUB, read_config
from trainer.run.retry import retried
from trainer.text.terminal import one_line

log = logging.getLogger("clipship")

_ENDPOINT = "https://huggingface.co"
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_WAITS_S = (0.5, 1.5)
"""Seconds to wait before the second and the third try: a name server may be busy for a moment."""
_CONNECT_S = 3.0


def may_ask_hub(model: Model, pretrained: str | None) -> bool:
    """Returns whether the model has a part that a hub keeps, which may be in the cache already.

    `pretrained` is the weights file, or open_clip's tag.
    """
    text = read_config(model.name).get("text_cfg")
    return (
        model.name.startswith(HUB)
        or (model.text or "").startswith(HUB_TEXT)
        or (pretrained is not None and not os.path.isfile(pretrained))
        or model.init == "timm"
        or (isinstance(text, dict) and "hf_tokenizer_name" in text)
    )


@contextmanager
def cache_alone_without_hub() -> Iterator[str]:
    """Lets the block use only the hub's cache if the hub cannot be reached; yields why, "" if it can.

    Through a proxy it counts as reachable.
    """
    import huggingface_hub.constants as constants  # takes a tenth of a second, and few jobs need it

    if constants.HF_HUB_OFFLINE or any(map(os.environ.get, _PROXIES)):
        yield ""
        return
    endpoint = os.environ.get("HF_ENDPOINT") or _ENDPOINT
    try:
        where = urlsplit(endpoint)
        host, port = where.hostname or "", where.port or (80 if where.scheme == "http" else 443)
    except ValueError as problem:
        raise InputError(
            f"HF_ENDPOINT = {one_line(endpoint)} is no address ({problem}): give one such as {_ENDPOINT}, or "
            "unset it"
        ) from None
    why = _unreachable(host, port)
    if why:
        log.info("%-12s %s: only what the cache has is used", "hub", why)
    constants.HF_HUB_OFFLINE = bool(why)
    try:
        yield why
    finally:
        constants.HF_HUB_OFFLINE = False


@cache
def _unreachable(host: str, port: int) -> str:
    def connect() -> None:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()

    try:
        retried(connect, _WAITS_S, lambda error: isinstance(error, OSError))
    except OSError as error:
        return f"{host} cannot be reached, {error.strerror or error}"
    return ""
