"""Reads a job file (TOML) into the typed model, and writes one. Touches that one file only; imports no torch."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from trainer.errors import InputError
from trainer.job import Job, Section, is_remote
from trainer.job_problems import problem_texts
from trainer.overrides import Override, apply_overrides, parse_overrides
from trainer.toml_lines import Key, key_lines, line_of

_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors", ".npz")


def load(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The job in the file, with `key=value` overrides applied and its relative paths made absolute.

    Raises InputError with every problem, one a line, each with its place: `job.toml:12: optim.lr: ...`.
    """
    text = _read(path)
    job = _validated(_parse(text, path), str(path), key_lines(text), overrides)
    return resolve_paths(job, Path(os.path.abspath(path)).parent)


def from_table(table: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> Job:
    """The job of a table that no file holds, read as by `load`; `origin` stands in messages, relative paths start at the working folder."""
    return resolve_paths(_validated(table, origin, {}, overrides), Path.cwd())


def _is_image_file(name: str) -> bool:
    """Rather than a name in a registry."""
    return name.startswith(("./", "../", "~/")) or ("://" not in name and name.endswith((".sif", ".sqsh")))


def dump(job: Job) -> str:
    """TOML text that loads to an equal job; unset keys are left out, defaults are written."""
    return tomli_w.dumps(job.model_dump(exclude_none=True))


def resolve_paths(job: Job, base: Path) -> Job:
    """The job with every relative path joined to `base` (absolute), and `~/` replaced by the home folder. Idempotent."""

    def path(name: str) -> str:
        return str(base / _at_home(name))

    def known(name: str | None) -> str | None:
        return None if name is None else path(name)

    data, model, evaluation, site, slurm = job.data, job.model, job.eval, job.image.site, job.slurm
    is_weights = model.pretrained is not None and ("/" in model.pretrained or model.pretrained.endswith(_WEIGHTS))
    changes: dict[str, Section] = {
        "data": data.model_copy(update={"train": _patterns(data.train, base), "index": data.index and path(data.index)}),
        "model": model.model_copy(
            update={
                "name": path(model.name) if model.name.endswith(".json") else model.name,
                "pretrained": path(model.pretrained) if model.pretrained and is_weights else model.pretrained,
                "cache_dir": model.cache_dir and path(model.cache_dir),
            }
        ),
        "eval": evaluation.model_copy(
            update={
                "retrieval": _patterns(evaluation.retrieval, base),
                "zero_shot": _patterns(evaluation.zero_shot, base),
                "class_names": _file_or_list(evaluation.class_names, base),
                "templates": _file_or_list(evaluation.templates, base),
            }
        ),
        "checkpoint": job.checkpoint.model_copy(
            update={"resume": wanted if (wanted := job.checkpoint.resume) in ("auto", "never") else path(wanted)}
        ),
        "image": job.image.model_copy(
            update={
                "site": site.model_copy(
                    update={
                        "certificates": tuple(path(name) for name in site.certificates),
                        "wheelhouse": known(site.wheelhouse),
                        "pip_conf": known(site.pip_conf),
                        "apt_auth": known(site.apt_auth),
                    }
                )
            }
        ),
        "logging": job.logging.model_copy(update={"runs": path(job.logging.runs)}),
    }
    if "slurm" in job.model_fields_set:  # a job without that section stays one
        changes["slurm"] = slurm.model_copy(
            update={
                "image": path(slurm.image) if slurm.image and _is_image_file(slurm.image) else slurm.image,
                "python": path(slurm.python) if slurm.python and "/" in slurm.python else slurm.python,
            }
        )
    return job.model_copy(update=changes)


def _at_home(name: str) -> str:
    return os.path.expanduser(name) if name.startswith("~/") else name


def _file_or_list(value: str | tuple[str, ...], base: Path) -> str | tuple[str, ...]:
    return str(base / _at_home(value)) if isinstance(value, str) else value


def _patterns(names: Sequence[str], base: Path) -> tuple[str, ...]:
    """The base folder's own special characters are escaped: a folder may be called `run[1]`."""
    escaped = "".join(f"[{c}]" if c in "*?[" else f"\\{c}" if c in "\\{}," else c for c in str(base))
    return tuple(name if is_remote(name) else os.path.join(escaped, _at_home(name)) for name in names)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such job file; `clipship init --preset laptop {path}` writes one") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give the job file itself, for example {path / 'job.toml'}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}): a job file is a TOML text file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{path}: not a job file: its values are nested too deeply") from None
    except ValueError as error:
        raise InputError(_syntax_problem(str(error), text, path)) from None


def _syntax_problem(problem: str, text: str, path: Path) -> str:
    """tomllib puts the line at the end of its sentence; ours stands in front."""
    at = re.search(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$", problem)
    line = at[1] if at and at[1] else str(text.count("\n") + 1)
    column = f", column {at[2]}" if at and at[2] else ""
    what = problem[: at.start()] if at else problem
    return f"{path}:{line}: not valid TOML{column}: {what}; texts stand in quotes, sections in [brackets]"


def _validated(table: dict[str, Any], origin: str, lines: Mapping[Key, int], overrides: Sequence[str]) -> Job:
    changes = parse_overrides(overrides)
    apply_overrides(table, changes)
    try:
        return Job.model_validate(_with_tuples(table))
    except ValidationError as error:
        of_text = [problem["loc"] for problem in error.errors(include_url=False) if problem["type"] == "string_type"]
    meant = [change for change in changes if change.is_bare() and any(loc[: len(change.key)] == change.key for loc in of_text)]
    apply_overrides(table, [replace(change, value=change.text) for change in meant])
    try:
        return Job.model_validate(_with_tuples(table))
    except ValidationError as error:
        raise InputError("\n".join(_placed(problem_texts(error), origin, lines, changes))) from None


def _with_tuples(value: object) -> object:
    """Strict validation takes tuples alone, TOML has lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(_with_tuples(inner) for inner in value) if isinstance(value, list) else value


def _placed(problems: Sequence[tuple[Key, str]], origin: str, lines: Mapping[Key, int], changes: Sequence[Override]) -> list[str]:
    """The problems in the file's order: `job.toml:12: optim.lr: ...`, or `--set optim.lr: ...` where an override has to do with the key."""
    placed: list[tuple[int, str]] = []
    for key, problem in problems:
        line = line_of(lines, key)
        change = next((c for c in reversed(changes) if key[: len(c.key)] == c.key or (key and c.key[: len(key)] == key)), None)
        place = f"--set {'.'.join(change.key)}" if change else f"{origin}:{line}" if line else origin
        about = "" if not key or (change and change.key == key) else f"{'.'.join(key)}: "
        placed.append((line or 0, f"{place}: {about}{problem}"))
    return [text for _, text in sorted(placed, key=lambda found: found[0])]
