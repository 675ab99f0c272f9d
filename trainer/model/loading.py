"""Turns exceptions that are raised while a model is made into errors that say whose fault it is.

They come from open_clip, torch and the hub. Weights or a config that cannot be used are the user's fault
(InputError, exit code 2), and so is a tensor that this machine's memory could never hold. A hub that does not
answer is nobody's (StorageError, exit code 1: a later start may reach it). Another lack of memory passes
through. No message repeats torch's advice to load files that run code. That the hub cannot be reached is told
beforehand: its own client tries each file six times, over 23 s, with two lines for each try.
"""

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from open_clip.pretrained import download_pretrained_from_hf

from trainer.checkpoint.weights import cause, has_bias
from trainer.config import Job, Model
from trainer.config.hubs import HUBS, hub_of
from trainer.config.training import HUB_TEXT
from trainer.errors import InputError, StorageError
from trainer.model.catalog import HUB, read_config, weights_file
from trainer.model.hub import hub_weights
from trainer.run.retry import retried
from trainer.sysinfo.memory import host_bytes, is_out_of_memory
from trainer.text.terminal import one_line

_NOT_REACHED = (
    "ConnectionError",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "TimeoutError",
    "TransportError",
    "URLError",
    "gaierror",
)
"""Names of the exceptions, or of their bases, that the hub's clients raise if no server answers; they belong
to several libraries.
"""
_SERVER_FAILS, _TOO_MANY_REQUESTS = 500, 429
_ENVIRONMENT = (OSError, RuntimeError)
"""Exceptions that open_clip raises for missing files or packages; other exceptions about one of its own
models are bugs.
"""
_ASKED = re.compile(r"tried to allocate (\d+) bytes|(Storage size calculation overflowed)")
"""Part of torch's message about memory that it did not get, with the bytes of one tensor."""
_HUB = "hf-hub:"
_SHAPES = "Error(s) in loading state_dict"


@contextmanager
def loading(job: Job, pretrained: str | None) -> Iterator[None]:
    """Wraps code that makes a model, its weights or its tokenizer.

    `pretrained` is the weights file, or open_clip's tag. If the hub cannot be reached, its cache has to do.
    """
    away = ""
    try:
        with cache_alone_without_hub() if may_ask_hub(job.model, pretrained) else nullcontext("") as away:
            yield
    except InputError:
        raise
    except Exception as error:
        explained = _too_large(error, job)
        if explained is None and not is_out_of_memory(error):
            explained = _explained(error, job, pretrained, away)
        if explained is None:
            raise
        raise explained from None


def pretrained_file(job: Job) -> str | None:
    """Returns the file of `model.pretrained`, from a hub if no cache has it; a tag unchanged."""
    given = job.model.pretrained
    if given is None or hub_of(given) is None:
        return given and weights_file(given)
    with loading(job, given):
        return str(hub_weights("model.pretrained", given, job.model.cache_dir))


def check_weights(pretrained: str | None) -> bool:
    """Returns whether the weights file has the bias of the siglip loss; False for tags.

    Raises InputError if the file holds no weights, or others than its checkpoint's seal says.
    """
    return pretrained is not None and os.path.isfile(pretrained) and has_bias(Path(pretrained))


def check_hub_weights(job: Job) -> None:
    """Raises InputError if the model is a hub's and the hub has no weights.

    open_clip would use random ones.
    """
    if job.model.name.startswith(_HUB) and job.model.pretrained is None:
        with loading(job, None):
            download_pretrained_from_hf(job.model.name.removeprefix(_HUB), cache_dir=job.model.cache_dir)


def _explained(error: Exception, job: Job, pretrained: str | None, away: str) -> InputError | None:
    """Returns the error to raise instead; None if the fault can only be in this program or in open_clip.

    `away` says why the hub cannot be reached, if it is known.
    """
    name = job.model.name
    source = _not_reached(error)
    if source is not None and job.offline:
        return InputError(
            f"{_of_hubs(job, pretrained)} is not in the cache ({cause(source)}), and ranks may "
            "not ask the hub (model.offline): `clipship fetch JOB` downloads it beforehand"
        )
    if source is not None:
        return StorageError(
            f"{_of_hubs(job, pretrained)} cannot be fetched, because the hub does not answer "
            f"({away or cause(source)}): start again when it does, or set model.offline = true to use "
            "only what the cache (model.cache_dir) holds"
        )
    if isinstance(error, ImportError):
        return InputError(
            f"model.name: {name} needs a package that is not installed ({cause(error)}): "
            "install it, or choose another model"
        )
    theirs = name.endswith(".json") or ":" in name or job.model.text is not None
    if pretrained is None and not (theirs or isinstance(error, _ENVIRONMENT)):
        return None
    if pretrained is None and job.model.text is not None:
        return InputError(
            f"open_clip cannot build the model {name} with the text tower {job.model.text} (model.text): "
            f"{cause(error)}"
        )
    if pretrained is None:
        return InputError(f"model.name: open_clip cannot build the model {name}: {cause(error)}")
    return InputError(
        f"{pretrained} cannot be loaded as {name}: {_lines(error)}\nis model.name (--model) right?"
    )


def _of_hubs(job: Job, pretrained: str | None) -> str:
    """Returns what a job takes from hubs, of which any may be missing."""
    model, weights = job.model, pretrained and not os.path.isfile(pretrained)
    own = model.name.startswith(_HUB) or (weights is None and model.text is None)
    parts = [
        pretrained if weights else "",
        model.name if own else "",
        f"the text tower {model.text} (model.text)" if hub_of(model.text or "") else "",
        f"timm's weights of {model.name} (model.init)" if model.init == "timm" else "",
    ]
    return " or ".join(part for part in parts if part) or model.name


def _too_large(error: Exception, job: Job) -> InputError | None:
    """Returns the error to raise if one tensor of the model is larger than the memory of this machine."""
    match = _ASKED.search(str(error))
    if match is None or (match[1] and int(match[1]) <= host_bytes()):
        return None
    size = f"has a tensor of {int(match[1]) / 2**30:,.0f} GiB" if match[1] else "has a tensor without end"
    parts = f"{job.model.name} with the text tower {job.model.text}" if job.model.text else job.model.name
    return InputError(
        f"model.name: {parts} {size}, and this machine has {host_bytes() / 2**30:,.0f} GiB of memory: are "
        "the sizes in its config right?"
    )


def _lines(error: Exception) -> str:
    """Returns the error's first lines: the second one says which tensors have another shape."""
    lines = (
        str(error).splitlines()[:4]
        if isinstance(error, RuntimeError) and str(error).startswith(_SHAPES)
        else []
    )
    return "\n".join(lines) or cause(error)


def _not_reached(error: BaseException | None) -> Exception | None:
    """Returns the exception behind this one which means that no server answered, or that it failed.

    Returns None if there is none. open_clip wraps these exceptions.
    """
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        status = getattr(getattr(error, "response", None), "status_code", None) or getattr(
            error, "code", None
        )
        failed = isinstance(status, int) and (status >= _SERVER_FAILS or status == _TOO_MANY_REQUESTS)
        silent = not isinstance(status, int) and not names.isdisjoint(_NOT_REACHED)
        if (failed or silent) and isinstance(error, Exception):
            return error
        error = error.__cause__ or error.__context__
    return None


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
        or (pretrained is not None and not os.path.isfile(pretrained) and not _elsewhere(pretrained))
        or model.init == "timm"
        or (isinstance(text, dict) and "hf_tokenizer_name" in text)
    )


def _elsewhere(name: str) -> bool:
    """Returns whether a name is on another hub than Hugging Face's."""
    return hub_of(name) not in (None, HUBS[0])


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
