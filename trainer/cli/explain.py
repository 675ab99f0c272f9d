"""The command `clipship explain`: the keys of the job file, as their JSON Schema describes them. No torch."""

import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from trainer.cli import suggested
from trainer.cli.options import Command, json_option
from trainer.cli.output import print_json
from trainer.config import schema_words
from trainer.errors import InputError
from trainer.presets.files import schema_places
from trainer.text.near import near

_WIDEST = 100
_INDENT = "  "
_SUGGESTED = 5


@click.command(cls=Command)
@click.argument("name", metavar="[KEY]", default="", shell_complete=suggested.key_names)
@json_option("Print the JSON Schema of KEY.")
def command(name: str, as_json: bool) -> None:
    """Say what KEY of the job file means: type, unit, default, range, what it does.

    KEY is a section, a key with its section, or the name of a key alone. Without KEY all sections are listed.

    Examples:
      clipship explain
      clipship explain optim
      clipship explain optim.lr
      clipship explain warmup_steps    every key of that name
    """
    places = schema_places()
    found = [name] if name in places else [key for key in places if key.rpartition(".")[2] == name]
    if not found:
        raise InputError(_unknown(name, places))
    if as_json:
        shown = places[found[0]] if len(found) == 1 else {key: places[key] for key in found}
        print_json(shown, pretty=True)
        return
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    click.echo("\n\n".join("\n".join(_about(key, places, width)) for key in found))


def _about(key: str, places: dict[str, dict[str, Any]], width: int) -> Iterator[str]:
    place = places[key]
    if key:
        yield f"[{key}]" if "properties" in place else key
        for paragraph in place["description"].split("\n\n"):
            yield textwrap.fill(_plain(paragraph), width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    if "properties" in place:
        if key:
            yield ""
        yield from _list(place, width)
        return
    yield ""
    facts = [schema_words.kind(place)]
    facts += [f"in {place['x-unit']}"] if "x-unit" in place else []
    facts += [schema_words.PATHS[place["x-path"]]] if "x-path" in place else []
    facts.append(_needed(key, places))
    facts.append(schema_words.resumed(place))
    facts += [f"see also: {', '.join(others)}"] if (others := _goes_with(key, places)) else []
    for fact in map(_plain, facts):
        yield textwrap.fill(fact, width, initial_indent=f"{_INDENT}- ", subsequent_indent=_INDENT * 2)


def _list(section: dict[str, Any], width: int) -> Iterator[str]:
    """Yields a line for each key of a section: its name and the first sentence about it."""
    names = [f"[{name}]" if "properties" in place else name for name, place in section["properties"].items()]
    column = max(map(len, names)) + 2
    for name, place in zip(names, section["properties"].values(), strict=True):
        sentence = re.split(r"(?<=\.)\s", _plain(place["description"]), maxsplit=1)[0].rstrip(".")
        yield f"{name:<{column}}{textwrap.shorten(sentence, max(12, width - column), placeholder=' ...')}"


def _needed(key: str, places: dict[str, dict[str, Any]]) -> str:
    section, _, name = key.rpartition(".")
    required = name in places[section].get("required", ())
    return "required" if required else f"default {schema_words.default(places[key].get('default'))}"


def _goes_with(key: str, places: dict[str, dict[str, Any]]) -> list[str]:
    """Returns keys that this key's description names, and those whose descriptions name this key."""
    section = key.rpartition(".")[0]
    here = places[key]["description"]
    return [
        other
        for other, place in places.items()
        if other not in ("", key)
        and (
            _names(here, other, section)
            or _names(place.get("description", ""), key, other.rpartition(".")[0])
        )
    ]


def _names(text: str, key: str, section: str) -> bool:
    """Returns whether a text about a key of this section names `key`; in its own section without it."""
    own, _, name = key.rpartition(".")
    forms = [key] if own else []
    if own == section and "_" in name:  # a single word may mean something else
        forms.append(name)
    return any(form in text and re.search(rf"(?<![\w.-]){re.escape(form)}(?![\w-])", text) for form in forms)


def _plain(text: str) -> str:
    return text.replace("`", "")


def _unknown(name: str, places: dict[str, dict[str, Any]]) -> str:
    last = name.rpartition(".")[2]
    keys = [key for key in places if key]  # but not the whole job
    found = near(name, keys, _SUGGESTED, 0.75)
    found += [key for key in keys if near(last, [key.rpartition(".")[2]], least=0.8)]
    found += [key for key in keys if last and last in key.rpartition(".")[2]]
    nearest = list(dict.fromkeys(found))[:_SUGGESTED]
    hint = f"did you mean {', '.join(nearest)}?" if nearest else "`clipship explain` lists the sections"
    return f"the job file has no key {name}: {hint}"
