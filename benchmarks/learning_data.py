"""The data of `make bench-learning`: emoji in four styles, with their names in English and Chinese.

The pictures are those of Noto, Twemoji, OpenMoji and Fluent as SVG, the words those of Unicode's CLDR, all
from packages of npm: pinned by version and checksum, fetched by npm into the benchmark's cache and never
committed. Pictures are drawn once. Three styles are for training, in which a picture is two samples: one with
an English caption and one with a Chinese one, each a name and two words about it, which differ from style to
style. The fourth style is held out, and asked for by the names alone.
"""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, share
from trainer.data.pack import PackedSample, write_shards
from trainer.safe_io.folders import whole_folder

STYLES = {
    "noto": (
        "@iconify-json/noto",
        "1.2.9",
        "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
    ),
    "twemoji": (
        "@iconify-json/twemoji",
        "1.2.5",
        "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7",
    ),
    "openmoji": (
        "@iconify-json/openmoji",
        "1.2.29",
        "03181e2c156cab35cf4a62f1f7886bd971d59212e75ac3f189d5a4cae3930fc5",
    ),
    "fluent": (
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
    ),
}
"""Package, version and sha256 of each style."""
WORDS = ("emojibase-data", "17.0.0", "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a")
LANGUAGES = ("en", "zh")
RENDERER = "resvg-py==0.5.0"
SIDE = 64
PER_SHARD = 512
_TAGS = 2
"""Words beside the name in a caption."""


@dataclass(frozen=True)
class Concept:
    """An emoji that all styles have: its code points, and in each language its name and further words."""

    code: str
    names: Mapping[str, str]
    tags: Mapping[str, Sequence[str]]

    def caption(self, language: str, number: int, styles: int) -> str:
        """Returns the caption in the training style of that number: each has further words of its own."""
        tags = [tag for tag in self.tags[language] if tag != self.names[language]]
        return ", ".join([self.names[language], *tags[number::styles][:_TAGS]])


@dataclass(frozen=True)
class EmojiSet:
    """Files and number of the packed samples."""

    train: str
    samples: int
    held_out: Path
    """JSON lines: the picture's file, and the names in each language."""


def packed(cache: Path, held_out: str) -> EmojiSet:
    """Returns the data for that style held out; fetches, draws and packs what is missing."""
    out = cache / f"emoji-{fingerprint()}-without-{held_out}"
    pictures = _pictures(cache)
    found = concepts(cache)
    train = [style for style in STYLES if style != held_out]
    if not out.exists():
        print(f"packing {len(train) * len(found)} pictures in two languages", file=sys.stderr)
        with whole_folder(out) as folder:
            (folder / "train").mkdir()
            write_shards(training_samples(found, train, pictures), folder / "train", PER_SHARD)
            rows = [
                json.dumps([str(pictures / f"{held_out}-{each.code}.png"), *map(each.names.get, LANGUAGES)])
                for each in found
            ]
            (folder / "held-out.jsonl").write_text("\n".join(rows), encoding="utf-8")
    shards = len(list((out / "train").glob("*.tar")))
    samples = len(found) * len(train) * len(LANGUAGES)
    return EmojiSet(f"{out}/train/shard-{{000000..{shards - 1:06d}}}.tar", samples, out / "held-out.jsonl")


def training_samples(
    found: Sequence[Concept], styles: Sequence[str], pictures: Path
) -> Iterator[PackedSample]:
    """Yields each concept in each style and language, in an order that is random and always the same."""
    order = [(each, style, language) for each in found for style in styles for language in LANGUAGES]
    random.Random(0).shuffle(order)
    for concept, style, language in order:
        picture = pictures / f"{style}-{concept.code}.png"
        caption = concept.caption(language, styles.index(style), len(styles))
        yield (
            f"{style}-{concept.code}-{language}",
            {
                "png": picture.read_bytes(),
                "txt": caption.encode(),
                "json": json.dumps({"emoji": concept.code}).encode(),
            },
        )


def fingerprint() -> str:
    """Returns a name for what is fetched and how it is drawn and packed."""
    made_of = (STYLES, WORDS, LANGUAGES, RENDERER, SIDE, _TAGS, "png, txt, json")
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:8]


def concepts(cache: Path) -> list[Concept]:
    """Returns what all four styles show, in Unicode's order."""
    drawn = [set(_icons(cache, style)) for style in STYLES]
    return common_concepts(
        {language: _read(cache, WORDS, f"{language}/data.json") for language in LANGUAGES}, drawn
    )


def common_concepts(
    words: Mapping[str, Sequence[Mapping[str, Any]]], drawn: Sequence[set[str]]
) -> list[Concept]:
    """Returns the emoji that have a name in each language and a picture in each style."""
    by_code = {
        language: {bare(entry["hexcode"]): entry for entry in entries} for language, entries in words.items()
    }
    first = next(iter(by_code.values()))
    codes = [code for code in first if all(code in codes for codes in [*drawn, *by_code.values()])]
    return [
        Concept(
            code,
            {language: entries[code]["label"] for language, entries in by_code.items()},
            {language: entries[code].get("tags", []) for language, entries in by_code.items()},
        )
        for code in codes
    ]


def bare(code: str) -> str:
    """Returns code points without the selector of a coloured picture, which styles give or leave out."""
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def svg(icons: Mapping[str, Any], name: str) -> str:
    """Returns an icon of an Iconify set as SVG; no emoji that all styles have is an alias of another."""
    icon = icons["icons"][name]
    left, top, width, height = (
        icon.get(key, icons.get(key, missing))
        for key, missing in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'
    )


def _icons(cache: Path, style: str) -> dict[str, str]:
    """Returns the names of the style's icons by code points."""
    return {bare(code): name for code, name in _read(cache, STYLES[style], "chars.json").items()}


def _pictures(cache: Path) -> Path:
    """Returns the folder of the pictures, STYLE-CODE.png, drawn where it is missing."""
    out = cache / f"emoji-{fingerprint()}-pictures"
    if not out.exists():
        found = concepts(cache)
        print(f"drawing {len(found)} emoji in {len(STYLES)} styles", file=sys.stderr)
        with whole_folder(out) as folder:
            listed = folder / "pictures.jsonl"
            with open(listed, "w", encoding="utf-8") as lines:
                for style, package in STYLES.items():
                    icons, names = _read(cache, package, "icons.json"), _icons(cache, style)
                    for each in found:
                        row = [f"{style}-{each.code}", svg(icons, names[each.code])]
                        lines.write(json.dumps(row) + "\n")
            script = Path(__file__).with_name("learning_render.py")
            subprocess.run([_renderer(cache), script, listed, folder, str(SIDE)], check=True)
            listed.unlink()
    return out


def _renderer(cache: Path) -> Path:
    """An environment with the package that draws SVG, made where it is missing."""
    home = cache / RENDERER.replace("==", "-")
    python, done = home / "bin" / "python", home / "installed"
    if not done.exists():
        print(f"installing {RENDERER} in {home}", file=sys.stderr)
        environment(home)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, RENDERER], check=True, stdout=sys.stderr)
        done.touch()
    share(home)
    return python


def _read(cache: Path, package: tuple[str, str, str], member: str) -> Any:
    """Returns a JSON file of a package."""
    with tarfile.open(_fetched(cache, *package)) as tar:
        file = tar.extractfile(f"package/{member}")
        assert file is not None
        return json.load(file)


def _fetched(cache: Path, package: str, version: str, sha256: str) -> Path:
    """Returns the package's archive, fetched by npm where it is missing."""
    archive = cache / "npm" / f"{package.replace('@', '').replace('/', '-')}-{version}.tgz"
    if not archive.exists():
        if shutil.which("npm") is None:
            raise SystemExit("npm, which fetches the pictures, is not installed: install Node.js")
        print(f"fetching {package} {version}", file=sys.stderr)
        archive.parent.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--ignore-scripts", "--silent", f"{package}@{version}"]
        subprocess.run(command, cwd=archive.parent, check=True, stdout=sys.stderr)
    check_sum(archive, sha256)
    return archive


def check_sum(archive: Path, sha256: str) -> None:
    """Removes an archive that is not the pinned one and raises SystemExit."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        archive.unlink()
        raise SystemExit(f"{archive} has the sha256 {found}, not {sha256}: it was removed; start again")
