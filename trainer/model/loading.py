"""Turns exceptions that are raised while a model is made into errors that say whose fault it is.

They come from open_clip, torch and the hub. Weights or a config that cannot be used are the user's fault
(InputError, exit code 2), and so is a tensor that this machine's memory could never hold. A hub that does not
answer is nobody's (StorageError, exit code 1: a later start may reach it). Another lack of memory passes
through. No message repeats torch's advice to load files that run code.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from open_clip.pretrained import download_pretrained_from_hf
from torch import nn

from trainer.checkpoint.weights import cause, has_bias
from trainer.config import Job
from trainer.config.hubs import HUBS, hub_of
from trainer.errors import InputError, StorageError
from trainer.model.catalog import weights_file
from trainer.model.hub import hub_weights
from trainer.sysinfo.memory import host_bytes, is_out_of_memory
from trainer.text.wording import many

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

    `pretrained` is the weights file, or open_clip's tag.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        explained = _too_large(error, job)
        if explained is None and not is_out_of_memory(error):
            explained = _explained(error, job, pretrained)
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


def check_finite(model: nn.Module, file: Path | None) -> None:
    """Raises InputError, which names the tensors, if a model that a file was loaded into holds NaN."""
    state = model.state_dict().items() if file else ()
    if bad := [name for name, tensor in state if not bool(tensor.isfinite().all())]:
        raise InputError(
            f"the weights in {file} hold NaN or infinity in {many(len(bad), 'tensor')}: "
            f"{', '.join(bad[:3])}{', ...' if len(bad) > 3 else ''}; choose others"
        )


def check_hub_weights(job: Job) -> None:
    """Raises InputError if the model is a hub's and the hub has no weights.

    open_clip would use random ones.
    """
    if job.model.name.startswith(_HUB) and job.model.pretrained is None:
        with loading(job, None):
            download_pretrained_from_hf(job.model.name.removeprefix(_HUB), cache_dir=job.model.cache_dir)


def _explained(error: Exception, job: Job, pretrained: str | None) -> InputError | None:
    """Returns the error to raise instead; None if the fault can only be in this program or in open_clip."""
    name = job.model.name
    source = _not_reached(error)
    if source is not None:
        what, hub = _of_hubs(job, pretrained)
        if job.offline:
            return InputError(
                f"{what} is not in the cache ({cause(source)}), and ranks may not ask the hub "
                "(model.offline): `clipship fetch JOB` downloads it beforehand"
            )
        return StorageError(
            f"{what} cannot be fetched, because {hub} does not answer ({cause(source)}): start again when it "
            "does, or let `clipship fetch JOB` fill model.cache_dir on a machine that reaches it; with "
            "model.offline = true ranks then ask nobody"
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


def _of_hubs(job: Job, pretrained: str | None) -> tuple[str, str]:
    """Returns what a job takes from hubs, of which any may be missing, and the hubs' names."""
    model, parts = job.model, dict[str, str]()
    if pretrained and not os.path.isfile(pretrained):
        parts[pretrained] = pretrained
    if model.name.startswith(_HUB) or (pretrained is None and model.text is None):
        parts[model.name] = model.name
    if hub_of(model.text or ""):
        parts[f"the text tower {model.text} (model.text)"] = model.text or ""
    if model.init == "timm":
        parts[f"timm's weights of {model.name} (model.init)"] = model.name
    hubs = {hub_of(name) or HUBS[0] for name in parts.values()} or HUBS[:1]
    return " or ".join(parts) or model.name, " or ".join(row.title for row in HUBS if row in hubs)


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
    """Returns the innermost exception that means that no server answered, or that one failed.

    Returns None if there is none. open_clip wraps these exceptions, and so do the hubs' clients.
    """
    found = None
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        status = getattr(getattr(error, "response", None), "status_code", None) or getattr(
            error, "code", None
        )
        failed = isinstance(status, int) and (status >= _SERVER_FAILS or status == _TOO_MANY_REQUESTS)
        silent = not isinstance(status, int) and not names.isdisjoint(_NOT_REACHED)
        if (failed or silent) and isinstance(error, Exception):
            found = error
        error = error.__cause__ or error.__context__
    return found
