"""Masks secrets in text that others read: one table finds them, one function masks them.

Imports no other module of this package. References of a shell (`$HF_TOKEN`, `$(cat FILE)`)
and of Kubernetes (`secret:NAME:KEY`) hold no value and stay as they are.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MASK = "***"

_SECRET_WORDS = frozenset(
    (
        *(
            "token",
            "secret",
            "password",
            "passwd",
            "passphrase",
            "credential",
            "credentials",
            "signature",
            "sig",
        ),
        *("authorization", "bearer", "jwt", "apikey", "accesskey", "secretkey", "privatekey"),
    )
)
_KINDS_OF_KEY = frozenset(
    (
        *("api", "access", "secret", "private", "account", "storage", "shared", "encryption", "signing"),
        *("subscription", "master", "service"),
    )
)
"""Words that make a secret's name when they stand before `key`. Other keys, such as image_key, are not
secrets."""
_KINDS_OF_URL = frozenset({"notify", "webhook", "hook"})
"""Words that make a secret's name when they stand before `url`: who knows such an address can post there."""
_QUERY_NAMES = frozenset({"key", "auth", "code"})
"""Names that mean a secret in the query of a URL and something harmless elsewhere."""
_HEADERS = frozenset(
    {"authorization", "proxy-authorization", "cookie", "set-cookie", "private-token", "job-token", "api-key"}
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SCHEME = r"(?:Basic|Bearer|Token|Digest|Negotiate)"
_REFERENCE = re.compile(
    r"\$(?:\w+|\{[^}]{0,200}\}|\([^)]{0,500}\))"  # a shell's reference
    r"|^(?:secret|configmap):.*"  # a reference of [kubernetes.env]
    rf"|\b{_SCHEME}(?=\s)",  # names how a credential is sent, and is none itself
    re.I,
)
_HARMLESS = re.compile(r"[~.]*/.*|[-+]?[\d.]+(?:e[-+]?\d+)?|true|false|yes|no|on|off|none", re.I | re.S)
"""Values that are not secret even if their name looks like a secret's: paths, numbers, switches."""
_VALUE = re.compile(r"\"(?P<double>[^\"\n]*)|'(?P<single>[^'\n]*)|(?P<bare>[^\s&;'\"#]+)")
_OUTSIDE_QUOTES = re.compile(rf"(?:{_SCHEME}(?:\\?\s)+)?(?:\\.|[^\s'\"])+", re.I)

Span = tuple[int, int]


@dataclass(frozen=True)
class Kind:
    """One kind of secret: its name for people, its pattern, and a function that finds the value.

    The function returns where the value is in the match.
    """

    what: str
    pattern: re.Pattern[str]
    value: Callable[[re.Match[str]], Span | None] = lambda match: match.span("secret")


def _of_name(match: re.Match[str]) -> Span | None:
    """Returns the span of the value after `NAME=` if the name is a secret's, else None."""
    before = match.string[match.start() - 1 : match.start()]
    if not is_secret_name(match["name"]) and not (
        before in ("?", "&") and match["name"].lower() in _QUERY_NAMES
    ):
        return None
    return _next_value(match)


def _of_option(match: re.Match[str]) -> Span | None:
    return _next_value(match) if is_secret_name(match["name"]) else None


def _next_value(match: re.Match[str]) -> Span | None:
    value = _VALUE.match(match.string, match.end())
    return value.span(value.lastgroup or 0) if value else None


def _of_header(match: re.Match[str]) -> Span | None:
    """Returns the span of the header's value.

    It ends at the quote that precedes the header's name or at the end of the line; without a quote it ends
    with the shell word.
    """
    name = match["name"].lower()
    if name not in _HEADERS and not (name.startswith("x-") and is_secret_name(name)):
        return None
    text, start = match.string, match.end()
    quote = text[match.start() - 1 : match.start()]
    if quote and quote in "'\"":
        end = re.compile(rf"[{quote}\n]|\Z").search(text, start)
        return start, end.start() if end else len(text)
    value = _OUTSIDE_QUOTES.match(text, start)
    return value.span() if value else None


_KINDS = (
    Kind("a password in an address", re.compile(r"https?://(?P<secret>[^\s/?#]+)@", re.I)),
    Kind(
        "a password in an address",
        re.compile(r"://(?!\[)(?P<secret>[^\s/?#@:]*:(?!\d+(?:[/?#\s]|$))(?:(?!://)\S)*)@"),
    ),
    Kind(
        "a signature, a token or a password",
        re.compile(r"(?<![\w.%-])(?P<name>[\w.%-]++)(?:[ \t]*+=(?!=)[ \t]*+|[\"'][ \t]*+:[ \t]*+(?=[\"']))"),
        _of_name,
    ),
    Kind("a password of a command", re.compile(r"(?<!\S)--(?P<name>[\w-]++)[ \t]++(?!-)"), _of_option),
    Kind(
        "a password of a command",
        re.compile(r"(?<!\S)(?:-[uU]|--(?:proxy-)?user)[ =]?(?P<secret>['\"]?[^\s:'\"]*+:[^\s'\"]+)"),
    ),
    Kind("a header with credentials", re.compile(r"(?<![\w-])(?P<name>[\w-]++):[ \t]*+"), _of_header),
    Kind(
        "a token",
        re.compile(
            r"\b(?P<secret>hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
            r"|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
            r"|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35})"
        ),
    ),
    Kind(
        "a token",  # a JSON Web Token; what is ahead is looked at once for all places where one may begin
        re.compile(
            r"(?<![\w-])(?=[\w-]++\.eyJ[\w-]{10,}+\.[\w-])[\w-]*?"
            r"\b(?P<secret>eyJ[\w-]{10,}+\.eyJ[\w-]{10,}+\.[\w-]++)"
        ),
    ),
    Kind(
        "a private key",
        re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?P<secret>.+?)(?=-----END|\Z)", re.S),
    ),
)
"""Table of all kinds of secrets; a new kind is a new row."""


def masked(text: str) -> str:
    """Returns the text with three stars in place of each secret. Masking twice changes nothing."""
    parts: list[str] = []
    done = 0
    for start, end in sorted(span for _, span in _spans(text)):
        if end > done:
            parts += [text[done : max(start, done)], MASK if start >= done else ""]
            done = end
    return "".join([*parts, text[done:]])


def masked_values(value: Any, name: str = "") -> Any:
    """Returns a copy of JSON-like data with each text masked, and each value whose name is a secret's."""
    if isinstance(value, Mapping):
        named = str(value.get("name", "")) if {"name", "value"} <= value.keys() else ""  # a variable of a pod
        return {
            key: masked_values(inner, named if key == "value" else str(key)) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked_values(inner, name) for inner in value]
    if isinstance(value, str):
        return MASK if _is_named_secret(name, value) else masked(value)
    return value


def secret_in(text: str) -> str | None:
    """Returns the kind of the first secret in the text, such as "a token"; None if there is none."""
    return next((what for what, _ in _spans(text)), None)


def looks_secret(name: str, value: str) -> str | None:
    """Returns, in a few words, why the value of this name is likely to be a secret; None if it is not."""
    return secret_in(value) or ("a secret by its name" if _is_named_secret(name, value) else None)


def is_secret_name(name: str) -> bool:
    """Returns whether the name is a secret's.

    HF_TOKEN, apiKey and CLIPSHIP_NOTIFY_URL are, TOKENIZERS_PARALLELISM and image_key are not.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    pairs = pairwise(words)
    return not _SECRET_WORDS.isdisjoint(words) or any(
        (after == "key" and before in _KINDS_OF_KEY) or (after == "url" and before in _KINDS_OF_URL)
        for before, after in pairs
    )


def _is_named_secret(name: str, value: str) -> bool:
    return is_secret_name(name) and not _HARMLESS.fullmatch(value) and _has_a_value(value)


def _has_a_value(text: str) -> bool:
    """Returns whether the text holds more than references and masks."""
    return re.search(r"\w", _REFERENCE.sub("", text)) is not None


def _spans(text: str) -> Iterator[tuple[str, Span]]:
    """Yields kind and span of each secret.

    Each search continues after the value that it found, so the time is linear in the text's length.
    """
    for kind in _KINDS:
        at = 0
        while match := kind.pattern.search(text, at):
            span = kind.value(match)
            at = max(match.end(), match.start() + 1, span[1] if span else 0)
            if span is not None and _has_a_value(text[slice(*span)]):
                yield kind.what, span
