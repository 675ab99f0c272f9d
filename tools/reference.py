"""Writes the reference from the code: job file, JSON Schema, commands, flags of open_clip_train.

`python -m tools.reference` (`make reference`) writes all files; the same code gives the same
bytes. A key's description is the docstring below it, a section's that of its class; pydantic gives type,
default and range. Imports no torch.
"""

import ast
import copy
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo

from tools.from_open_clip_page import from_open_clip_blocks
from trainer.cli.main import cli
from trainer.config import schema_words
from trainer.config.job import Job
from trainer.config.keys import JobPath, may_change, path_of, section_at, section_of, walk
from trainer.config.toml_lines import Key
from trainer.config.types import Section
from trainer.presets.files import SCHEMA
from trainer.sysinfo.own_table import own_table

ROOT = Path(__file__).parents[1]
"""Folder of the checkout."""
WIDTH = 100
"""Columns of a line of prose."""

_ADDED_SCHEMA = "http://json-schema.org/draft-07/schema#"
"""JSON Schema draft 7, the newest that editors' TOML plugins (taplo) understand."""

UNITS: dict[str, str] = own_table(__file__, "units.toml")
"""Unit of a key by the ending of its name; of several endings that fit the longest counts."""


def described(section: type[Section]) -> dict[str, str]:
    """Returns the description of each key of the section: the docstring below it, one line per paragraph.

    It reads them as pydantic's `use_attribute_docstrings` does, but without a cost at every start.
    """
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            for key, below in pairwise(_class(base).body):
                match key, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(text))
                    ):
                        texts[name] = _paragraphs(text)
    return texts


def about_section(section: type[Section]) -> str:
    """Returns the docstring of the section's class; "" if it has none."""
    return _paragraphs(ast.get_docstring(_class(section)) or "")


@cache
def description(key: Key) -> str:
    """Returns the description of a key or section of the job file; "" if it has none."""
    section = section_at(Job, key[:-1]) or Job
    inner = section_of(section.model_fields[key[-1]])
    return described(section).get(key[-1]) or (about_section(inner) if inner else "")


def unit(name: str) -> str | None:
    """Returns the unit of a dotted key by the ending of its name; None for a key without one."""
    endings = [ending for ending in UNITS if name.endswith(ending)]
    return UNITS[max(endings, key=len)] if endings else None


@cache
def _class(section: type[Section]) -> ast.ClassDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(node, ast.ClassDef)
    return node


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


# The JSON Schema


@cache
def job_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a job file.

    Each key has its type, description, default and range; its unit and more are under `x-`.
    """
    whole = Job.model_json_schema()
    schema = _draft_7(_inlined(whole, whole.pop("$defs", {})))
    for key, field in walk(Job):
        _complete(_place(schema, key), key, field)
    title = {"$schema": _ADDED_SCHEMA, "title": "Clipship job file", "description": about_section(Job)}
    return title | {name: schema[name] for name in ("type", "properties", "required", "additionalProperties")}


def _place(schema: dict[str, Any], key: Key) -> dict[str, Any]:
    for name in key:
        schema = schema["properties"][name]
    return schema


def _complete(place: dict[str, Any], key: Key, field: FieldInfo) -> None:
    """Add to a key's schema what pydantic does not write."""
    name, section = ".".join(key), section_of(field) is not None
    place["description"] = description(key)
    if not section:
        _accept_shorthands(place, section_at(Job, key[:-1]) or Job, key[-1])
        if field.default_factory is not None:
            place["default"] = field.get_default(call_default_factory=True)
        if (key_unit := unit(name)) and "boolean" not in _types(place):
            place["x-unit"] = key_unit
        if (mark := path_of(field)) is not None:
            place["x-path"] = mark.kind
    place["x-resumed-run-may-change"] = _may_change(key)


def _accept_shorthands(place: dict[str, Any], section: type[Section], name: str) -> None:
    """Accept what the key's validators convert to the declared type.

    Examples are a number for a text and one text for a list.
    """
    for decorator in section.__pydantic_decorators__.field_validators.values():
        if decorator.info.mode == "before" and name in decorator.info.fields:
            convert: Callable[[object], object] = decorator.func
            for example, kind in ((1, "integer"), ("text", "string")):
                if convert(example) != example and kind not in _types(place):
                    rest = {
                        keyword: place.pop(keyword)
                        for keyword in list(place)
                        if keyword not in ("title", "default", "description")
                    }
                    place["anyOf"] = [{"type": kind}, *rest.get("anyOf", [rest])]


def _may_change(key: Key) -> bool:
    """Returns whether a resumed run may change the key, by its own mark or that of a section around it."""
    return any(may_change(_fields()[key[:length]]) for length in range(1, len(key) + 1))


@cache
def _fields() -> dict[Key, FieldInfo]:
    return dict(walk(Job))


def _types(place: dict[str, Any]) -> set[str]:
    return {kind for part in place.get("anyOf", [place]) if (kind := part.get("type"))}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Returns the schema without references: draft 7 ignores the keywords beside one."""
    if isinstance(node, list):
        return [_inlined(part, definitions) for part in node]
    if not isinstance(node, dict):
        return node
    reference = str(node.get("$ref", "")).rpartition("/")[2]
    own = {name: _inlined(part, definitions) for name, part in node.items() if name != "$ref"}
    return (_inlined(copy.deepcopy(definitions[reference]), definitions) | own) if reference else own


def _draft_7(node: Any) -> Any:
    """Returns the schema in draft 7 instead of 2020-12.

    Patterns are as editors read them, and null is left out because TOML has none.
    """
    if isinstance(node, list):
        return [_draft_7(part) for part in node if part != {"type": "null"}]
    if isinstance(node, str):
        return node.replace(r"\A", "^").replace(r"\z", "$")
    if not isinstance(node, dict):
        return node
    schema = {
        _draft_7(name): _draft_7(part)
        for name, part in node.items()
        if name != "title" or not isinstance(part, str)
    }
    if "prefixItems" in schema:
        schema["items"] = schema.pop("prefixItems")
    if schema.get("default", ...) is None:
        del schema["default"]
    if "patternProperties" in schema:
        schema.setdefault("additionalProperties", False)
    if len(schema.get("anyOf", [])) == 1:
        schema |= schema.pop("anyOf")[0]
    return schema


# The job file's page


_INTRODUCTION = """
One TOML file describes a run. Each section below is a table of that file, each entry one of its keys.
Relative paths start at the job file's folder, and `~/` is the home folder. An unknown key is refused, and
the nearest known one is named. `--set SECTION.KEY=VALUE` changes a key for one command; a relative path in it
starts at the current folder. TOML has no null: where a description says None, the key is left out. A run that
goes on in its run folder may change only the keys that say so here: another learning rate, batch, model or
data makes another run, which needs another name.

Editors complete and check a job file whose first line names the schema, as `clipship init` writes it:
[job-schema.json](job-schema.json).

## Keys outside any section
"""


def job_file_page() -> str:
    """Returns `docs/job-file.md`: every key of the job file."""
    schema = job_schema()
    blocks = [
        "# The job file",
        _GENERATED.format(what="the job file's model, trainer/config/"),
        _paragraphs(_INTRODUCTION),
    ]
    keys = list(walk(Job))
    plain = [(key, field) for key, field in keys if len(key) == 1 and section_of(field) is None]
    sections = [(key, field) for key, field in keys if section_of(field) is not None]
    blocks += [_entry(key, field, schema) for key, field in plain]
    for key, _ in sections:
        blocks += [f"## [{'.'.join(key)}]", description(key)]
        inside = [(inner, field) for inner, field in keys if inner[:-1] == key and section_of(field) is None]
        blocks += [_entry(inner, field, schema) for inner, field in inside]
    return _page(blocks)


def _entry(key: Key, field: FieldInfo, schema: dict[str, Any]) -> str:
    place = _place(schema, key)
    facts = [schema_words.kind(place), *([f"in {place['x-unit']}"] if "x-unit" in place else [])]
    facts.append(
        "required"
        if field.is_required()
        else f"default {schema_words.default(field.get_default(call_default_factory=True))}"
    )
    facts += [_path_text(mark)] if (mark := path_of(field)) else []
    facts.append(schema_words.resumed(place))
    return f"### `{'.'.join(key)}`\n\n{place['description']}\n\n- " + "\n- ".join(facts)


def _path_text(mark: JobPath) -> str:
    return (
        schema_words.PATHS[mark.kind]
        + ("; made if it is missing" if mark.made else "")
        + ("" if mark.ranks else "; only this machine reads it")
    )


# The page of the command line


def cli_page() -> str:
    """Returns `docs/cli.md`: every command with its arguments and options, as click knows them."""
    blocks = ["# The command line", _GENERATED.format(what="the commands in trainer/cli/")]
    for names, command in _commands(cli, ("clipship",)):
        blocks += [
            f"## `{' '.join(names)}`" if len(names) < 3 else f"### `{' '.join(names)}`",
            *_command(names, command),
        ]
    return _page(blocks)


def _commands(
    command: click.Command, names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield names, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=names[-1])
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) is not None and not inner.hidden:
                yield from _commands(inner, (*names, name))


def _command(names: tuple[str, ...], command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(names))
    yield "```text\n" + " ".join([*names, *command.collect_usage_pieces(context)]) + "\n```"
    yield _paragraphs((command.help or "").replace("\b", ""))
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    if options:
        yield "\n".join(f"- {_option(option)}" for option in options)
    if command.epilog:
        yield from _epilog(command.epilog)


def _option(option: click.Option) -> str:
    written = "/".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag or option.count else f" {option.metavar or _metavar(option)}"
    default = f" Default: `{option.default}`." if option.show_default and option.default is not None else ""
    return f"`{written}{value}`: {_paragraphs(option.help or '')}{default}"


def _metavar(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return "[" + "|".join(str(choice) for choice in option.type.choices) + "]"
    return option.type.name.upper()


def _epilog(text: str) -> Iterator[str]:
    r"""Yields the paragraphs of a help text; those that begin with click's `\b` keep their lines."""
    for part in inspect.cleandoc(text).split("\n\n"):
        if part.startswith("\b"):
            yield "```text\n" + part.removeprefix("\b").strip("\n") + "\n```"
        else:
            yield _paragraphs(part)


# The page of open_clip_train's flags


def from_open_clip_page() -> str:
    """Returns `docs/from-open-clip.md`: each flag of open_clip_train beside our keys."""
    title, *blocks = from_open_clip_blocks()
    generated = _GENERATED.format(what="trainer/from_open_clip/")
    return _page(
        [
            title,
            generated,
            *(block if block.startswith(_UNWRAPPED) else _paragraphs(block) for block in blocks),
        ]
    )


# What the pages share

_UNWRAPPED = ("```", "|", "- ")
"""Beginnings of blocks whose lines stay lines."""
_GENERATED = "<!-- Written by `make reference` from {what}; changes here are overwritten. -->"


def _page(blocks: list[str]) -> str:
    return "\n\n".join(_wrapped(block) for block in blocks if block) + "\n"


def _wrapped(block: str) -> str:
    if block.startswith("```"):
        return block
    if block.startswith("|"):
        return _escaped(block)
    return "\n".join(_wrapped_line(line) for line in block.split("\n"))


def _wrapped_line(line: str) -> str:
    if line.startswith(("#", "<!--")):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        _escaped(line), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _escaped(line: str) -> str:
    """Returns the line with Markdown's markup escaped.

    Code in backticks and links within the pages stay.
    """
    parts = line.split("`")
    return "`".join(
        part if number % 2 else re.sub(r"\*|<|\[(?![^]]*\]\([\w.-]+\))", _entity, part)
        for number, part in enumerate(parts)
    )


def _entity(match: re.Match[str]) -> str:
    return "&lt;" if match[0] == "<" else f"\\{match[0]}"


def files() -> dict[Path, str]:
    """Returns every generated file of the checkout with its text."""
    return {
        ROOT / "docs" / "job-file.md": job_file_page(),
        ROOT / "docs" / "cli.md": cli_page(),
        ROOT / "docs" / "from-open-clip.md": from_open_clip_page(),
        SCHEMA: json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n",
    }


def main() -> None:
    """Write the files and name them."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        click.echo(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
