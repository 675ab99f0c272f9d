"""Positives of a step: which samples are a group on any number of ranks, and the gradient's definition."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.jobs import tiny_job
from tests.support.loading import rank_batches
from tests.support.pictures import picture
from tests.support.tables import write_arrow, write_parquet
from trainer.config import Data, Job
from trainer.config.batch_plan import plan
from trainer.data.bad_samples import Skipped
from trainer.data.loader import Batch
from trainer.data.pack import write_shard
from trainer.data.sample import BadSample
from trainer.data.source import open_source
from trainer.model.build import untrained
from trainer.plan.first_samples import FirstSamples

SAMPLES, LENGTH = 8, 16
GROUPS = (0, 1, 0, 2, 1, 0, 3, 4)
"""Numbers of the samples' groups: equal ones are on both of two ranks, and in several micro-batches."""
NUMBERS = torch.tensor(GROUPS)
ROWS = 24
IMAGES = [number % 5 for number in range(ROWS)]
CAPTIONS = [number % 7 for number in range(ROWS)]
IDS: list[Any] = [(n % 3, str(n % 3), None, "", f"g{n % 4}")[n % 5] for n in range(ROWS)]
"""Ids that are numbers, the same as texts, null, empty, and other texts."""


def same(groups: Tensor | Sequence[object]) -> list[list[bool]]:
    return [[bool(one == two) for two in groups] for one in groups]


def alike(values: Sequence[object]) -> list[list[bool]]:
    """Says who is a positive of whom by what they share; a sample without a value is alone."""
    return [
        [i == j or (one is not None and one == two) for j, two in enumerate(values)]
        for i, one in enumerate(values)
    ]


def caption(number: int) -> str:
    return "a picture of " + "very " * (number % 3) + f"thing {number}"


def name(number: int) -> str:
    return f"k{number:02d}"


def shards_in(folder: Path) -> str:
    """Shards of all samples; every seventh has no JSON, and others no id in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(2):
        rows = range(shard * ROWS // 2, (shard + 1) * ROWS // 2)
        about = {n: {"about": {"group": IDS[n]} if n % 2 else {"group": IDS[n], "x": 1}} for n in rows}
        members = {n: {"png": picture(IMAGES[n]), "txt": caption(CAPTIONS[n]).encode()} for n in rows}
        for n in rows:
            members[n] |= {"json": json.dumps(about[n]).encode()} if n % 7 else {}
        write_shard(((name(n), members[n]) for n in rows), folder / f"{shard}.tar")
    return f"{folder}/*.tar"


def table_in(folder: Path, form: str) -> str:
    """A table of all samples; in a .csv, pictures are files and all ids are texts."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = [None if each is None else str(each) for each in IDS]
    if form == "csv":
        for number in range(5):
            (folder / f"{number}.png").write_bytes(picture(number))
        lines = [f"{IMAGES[n]}.png,{caption(CAPTIONS[n])},{ids[n] or ''}" for n in range(ROWS)]
        (folder / "t.csv").write_text("\n".join(["image,caption,group", *lines]))
        return str(folder / "t.csv")
    columns = {
        "image": [picture(number) for number in IMAGES],
        "caption": list(map(caption, CAPTIONS)),
        "about": [{"group": each} for each in ids],
    }
    write = write_parquet if form == "parquet" else write_arrow
    return write(folder / f"t.{form}", columns, per_group=5)


FORMS: dict[str, tuple[Callable[[Path], str], str]] = {
    "shards": (shards_in, "json:about.group"),
    "parquet": (lambda folder: table_in(folder, "parquet"), "about.group"),
    "arrow": (lambda folder: table_in(folder, "arrow"), "about.group"),
    "csv": (lambda folder: table_in(folder, "csv"), "group"),
}


def expected(kind: Any, form: str) -> list[object]:
    """Returns what each sample shares, by the values that it was made of."""
    if kind != "groups":
        return list({"captions": CAPTIONS, "images": IMAGES}[kind])
    held = [None if form == "shards" and n % 7 == 0 else each for n, each in enumerate(IDS)]
    return [None if each in (None, "") else str(each) for each in held]


def job_on(data: str, kind: Any, group_by: str | None, ranks: int = 1, micro: int = 6) -> Job:
    return tiny_job(
        data={"format": "auto", "train": (data,), "group_by": group_by},
        optim={"positives": kind, "global_batch_size": 12, "max_batch_size_per_gpu": micro // ranks},
    )


def batches_of(job: Job, rank: int, ranks: int, **how: Any) -> list[Batch]:
    """One rank's micro-batches of two steps: all samples of an epoch."""
    clip, split = untrained(job), plan(job, ranks)
    how |= {"pixels": clip.images.crop, "tokenizer": clip.tokenizer, "positives": job.optim.positives}
    how |= {"rank": rank, "seed": job.seed, "epochs": 1}
    return list(rank_batches(open_source(job.data), (4, 12), 12, ranks, split.accumulation, **how))


def place(key: str, form: str) -> int:
    """The number of the sample with that key."""
    if form == "csv":
        return -1
    if form == "shards":
        return int(key[1:])
    group, row = map(int, key.split(":"))
    return 5 * group + row


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["shards", "parquet", "arrow"])
@pytest.mark.parametrize("kind", ["captions", "images", "groups"])
def test_samples_that_share_it_are_a_group_on_all_ranks(
    tmp_path: Path, kind: Any, form: str, ranks: int
) -> None:
    made, group_by = FORMS[form]
    job = job_on(made(tmp_path), kind, group_by if kind == "groups" else None, ranks)
    batches = [batch for rank in range(ranks) for batch in batches_of(job, rank, ranks)]
    shared = expected(kind, form)
    keys = [key for batch in batches for key in batch.keys]
    assert len(set(keys)) == ROWS
    groups = torch.cat([batch.groups for batch in batches if batch.groups is not None])
    assert groups.dtype == torch.int64
    assert same(groups) == alike([shared[place(key, form)] for key in keys])
    alone = {key for batch in batches for key in batch.alone}
    assert alone == {key for key in keys if shared[place(key, form)] is None}


@pytest.mark.parametrize("form", FORMS)
def test_check_counts_ids_and_names_the_samples_without_one(tmp_path: Path, form: str) -> None:
    made, group_by = FORMS[form]
    first = FirstSamples(job_on(made(tmp_path), "groups", group_by))
    held = expected("groups", form)[: 12 if form == "shards" else ROWS]  # of its first file
    ids = len({each for each in held if each is not None})
    assert f"{ids} ids in data.group_by of the first {len(held)} samples" in dict(first.rows())["groups"]
    without = [line for line in first.warnings() if "group_by" in line]
    assert len(without) == 1
    assert f"{held.count(None)} of its first {len(held)} samples have no id" in without[0]
    plain = FirstSamples(job_on(made(tmp_path), "pairs", None))
    assert "groups" not in dict(plain.rows())
    assert not [line for line in plain.warnings() if "group_by" in line]


@pytest.mark.parametrize(
    ("value", "said"), [([1], "list"), (True, "bool"), (1.5, "float"), ({"a": 1}, "dict")]
)
def test_an_id_of_another_kind_makes_a_bad_sample(tmp_path: Path, value: Any, said: str) -> None:
    about = [json.dumps({"g": each}).encode() for each in ("a", value)]
    members = [{"png": picture(0), "txt": b"c", "json": each} for each in about]
    write_shard(((name(n), each) for n, each in enumerate(members)), tmp_path / "a.tar")
    source = open_source(Data(train=(str(tmp_path / "a.tar"),), group_by="json:g", max_bad_share=1.0))
    cause = f"its id in data.group_by is neither a text nor a whole number but {said}"
    assert source.left_out.by_cause == {cause: 1}
    assert len(source) == 1
    columns = {"image": [picture(0)], "caption": ["c"], "g": [value]}
    table = open_source(Data(train=(write_parquet(tmp_path / "a.parquet", columns),), group_by="g"))
    with pytest.raises(BadSample, match=f"neither a text nor a whole number but {said}") as caught:
        table.read(0)
    assert caught.value.cause == "bad group"


def test_json_that_cannot_be_read_is_a_bad_sample_and_no_lone_one(tmp_path: Path) -> None:
    members = {"png": picture(0), "txt": b"c"}
    write_shard([("a", members), ("b", {**members, "json": b"{"})], tmp_path / "a.tar")
    source = open_source(Data(train=(str(tmp_path / "a.tar"),), group_by="g", max_bad_share=1.0))
    assert source.left_out.by_cause == {".json, which data.group_by needs, cannot be read": 1}


def test_samples_without_an_id_are_counted_and_the_first_are_named(caplog: pytest.LogCaptureFixture) -> None:
    skipped = Skipped(1.0)
    skipped.record(8, ())
    skipped.record(8, (), ("a", "b\n", "c", "d"))
    skipped.record(8, (), ("e",))
    assert skipped.figures.items() >= {"bad_samples": 0, "samples_without_group": 5}.items()
    [message] = caplog.messages
    assert "4 of the last 8 samples, such as a, b\\n, c. metrics" in message


def samples() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, 32, 32, generator=draw, dtype=torch.float64)
    return images, torch.randint(1, 1000, (SAMPLES, LENGTH), generator=draw), NUMBERS
