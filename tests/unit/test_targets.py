"""`model.targets`: features that a teacher has stored, against the teacher itself, and what is refused."""

import dataclasses
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch import Tensor

from tests.support.check import problems
from tests.support.command_line import clipship
from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.pictures import noise
from tests.support.thread_ranks import run_ranks
from tests.support.training import setup_of
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.data.arena import Arena
from trainer.data.bad_samples import Skipped
from trainer.data.distributed_index import data_rows, open_targets, open_together
from trainer.data.pack import write_shard
from trainer.data.patches import Budget, PatchCrop
from trainer.data.pixels import RandomCrop
from trainer.data.sample import BadSample
from trainer.data.views import crop_of_views, view_seed
from trainer.errors import InputError
from trainer.evaluate.embed import embed
from trainer.model.build import untrained
from trainer.model.teacher import build_teacher
from trainer.plan.trained import embed_job
from trainer.train.prefetch import global_batches
from trainer.train.setup import TrainSetup
from trainer.train.step import TrainStep

COUNTS = (9, 7, 8)
"""Samples of each shard."""
BATCH, STEPS = 8, 5
WEIGHT = 0.4
SIGLIP = {"loss": "siglip", "distill_temperature": 0.3}
EMBEDDING = ("eval.batch_size=4", "data.workers=0")
WHOLE = {"crop_scale": (1.0, 1.0), "augment": {"crop_ratio": (1.0, 1.0)}}
"""Keys of [data] with which training sees the pictures as an evaluation does."""


def sample(number: int) -> tuple[str, dict[str, bytes]]:
    """A picture of noise, with one to three captions, some of many words."""
    lines = [f"{number} " + "noise " * (number * line % 9) for line in range(1, 2 + number % 3)]
    return f"k{number:02d}", {"png": noise(number), "txt": "\n".join(lines).encode()}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Shards, a teacher's weights, and the folder of its features in float32."""

    shards: str
    weights: str
    folder: str


def weights_of(config: str, seed: int, path: Path) -> str:
    teacher = tiny_job(config=config).model_copy(update={"seed": seed})
    torch.save(untrained(teacher).model.state_dict(), path)
    return str(path)


def embedded(
    weights: str, config: str, shards: str, out: Path, of: Job | None = None, views: int = 0, *settings: str
) -> str:
    job = embed_job(weights, config, [shards], 1, (*EMBEDDING, *settings), of)
    run_ranks(1, lambda comm: embed(job, comm, "fp32", str(out), str(views)))
    return str(out)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("stored")
    (folder / "shards").mkdir()
    first = 0
    for shard, count in enumerate(COUNTS):
        write_shard(map(sample, range(first, first + count)), folder / "shards" / f"{shard}.tar")
        first += count
    shards = f"{folder}/shards/*.tar"
    weights = weights_of(VIT, 9, folder / "teacher.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.data.feature_files.GROUP_BYTES", 1)  # a row group for each block of samples
        return Stored(shards, weights, embedded(weights, VIT, shards, folder / "features"))


def job_of(stored: Stored, *folders: str, micro: int = BATCH, **sections: Any) -> Job:
    optim: dict[str, Any] = {"global_batch_size": BATCH, "max_batch_size_per_gpu": micro, "steps": STEPS}
    optim.update(optimizer="sgd", distill_weight=WEIGHT)
    data = {"format": "auto", "train": (stored.shards,), **WHOLE, **sections.pop("data", {})}
    model = {"targets": folders or (stored.folder,), **sections.pop("model", {})}
    return tiny_job(data=data, model=model, optim={**optim, **sections.pop("optim", {})}, **sections)


def live(job: Job, weights: str) -> Job:
    """The same with the teacher itself."""
    changes = {"targets": (), "teacher": VIT, "teacher_pretrained": weights}
    return job.model_copy(update={"model": job.model.model_copy(update=changes)})


def begun(job: Job, comm: Comm, steps_done: int = 0) -> TrainSetup:
    sections = {name: getattr(job, name).model_dump() for name in ("data", "model", "optim")}
    folder = Path(job.data.train[0]).parent.parent / "runs" / str(comm.world.rank)
    name = sections["model"].pop("name")
    setup = setup_of(folder, comm, dict, steps_done=steps_done, config=name, **sections)
    source = open_together(job, comm)
    teacher = build_teacher(job, setup.plan, comm, setup.clip)
    step = TrainStep(job, setup.plan, comm, setup.clip.model.train(), teacher)
    targets = open_targets(job, source, comm)
    return dataclasses.replace(setup, source=source, targets=targets, train_step=step)


def trained(setup: TrainSetup, steps: int) -> list[float]:
    """The losses of steps, summed over the ranks."""
    first, batches = setup.start.steps_done, global_batches(setup, Skipped(1.0))
    shares = [
        float(setup.train_step(batch, step).loss_share)
        for step, batch in enumerate(islice(batches, steps), first)
    ]
    return [sum(each) for each in zip(*setup.comm.all_gather_object(shares), strict=True)]


def weights_in(setup: TrainSetup) -> dict[str, Tensor]:
    return setup.train_step.model.state_dict()


@pytest.fixture(scope="module")
def of_siglip(stored: Stored) -> Stored:
    """The same of a teacher that was trained with a sigmoid, and has a logit bias."""
    folder = Path(stored.folder).parent
    siglip = tiny_job(optim={"loss": "siglip"}).model_copy(update={"seed": 9})
    weights = {**untrained(siglip).model.state_dict(), "logit_bias": torch.tensor(-1.5)}
    torch.save(weights, folder / "siglip.pt")
    given = (str(folder / "siglip.pt"), VIT, stored.shards, folder / "siglip", None, 0)
    return Stored(stored.shards, given[0], embedded(*given, "optim.loss=siglip"))


@pytest.mark.parametrize("optim", [{}, SIGLIP, {"loss": "siglip"}])
def test_losses_and_weights_are_those_of_the_teacher_itself(
    stored: Stored, of_siglip: Stored, alone: Comm, optim: dict[str, Any]
) -> None:
    of = of_siglip if optim else stored
    job = job_of(of, optim=optim)
    here, there = begun(job, alone), begun(live(job, of.weights), alone)
    assert trained(here, STEPS) == pytest.approx(trained(there, STEPS), rel=1e-6)
    for name, tensor in weights_in(there).items():
        torch.testing.assert_close(weights_in(here)[name], tensor, rtol=0, atol=1e-6, msg=name)
    plain = begun(job_of(of, optim={**optim, "distill_weight": 0.0}), alone)
    assert trained(plain, STEPS) != pytest.approx(trained(begun(job, alone), STEPS), rel=1e-3)


def test_siglip_refuses_features_of_a_teacher_without_a_logit_bias(stored: Stored) -> None:
    said = problems(job_of(stored, optim={"loss": "siglip"}))
    assert re.search(r"model\.targets: .*0\.parquet is of .*, which has no logit bias", said)


def test_of_several_teachers_the_mean_counts(stored: Stored, tmp_path: Path, alone: Comm) -> None:
    other = embedded(weights_of(RESNET, 5, tmp_path / "r.pt"), RESNET, stored.shards, tmp_path / "other")

    def first_loss(*folders: str, weight: float = WEIGHT) -> float:
        return trained(begun(job_of(stored, *folders, optim={"distill_weight": weight}), alone), 1)[0]

    one, two, both = first_loss(stored.folder), first_loss(other), first_loss(stored.folder, other)
    assert both == pytest.approx((one + two) / 2, rel=1e-6)
    assert one != pytest.approx(two, rel=1e-3)


def opened(job: Job, alone: Comm) -> tuple[Any, Any]:
    """The samples, and the same beside their targets."""
    source: Any = open_together(job, alone)
    targets = open_targets(job, source, alone)
    assert targets is not None
    return source, targets.beside(source)


def rows_in(folder: str) -> list[dict[str, Any]]:
    files = sorted(Path(folder).glob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def expected_target(rows: list[dict[str, Any]], key: str) -> np.ndarray[Any, Any]:
    own = [row for row in rows if row["key"] == key]
    return np.array([own[0]["image"], *(row["text"] for row in own)], dtype=np.float32)


def test_samples_that_filters_leave_out_move_no_target(stored: Stored, alone: Comm) -> None:
    with_scores = {"scores": (stored.folder,), "filters": ("clip_score >= 0",)}
    _, beside = opened(job_of(stored, data=with_scores), alone)
    assert 3 < len(beside) < sum(COUNTS)
    rows = rows_in(stored.folder)
    for number in range(len(beside)):
        raw = beside.read(number)
        assert raw.target is not None
        assert np.array_equal(raw.target, expected_target(rows, raw.key))


def about_of(file: str) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(parquet.read_metadata(file).metadata[b"clipship"])
    return about


def changed_copy(stored: Stored, folder: Path, change: Callable[[Any], Any], **about: Any) -> str:
    """The folder of features with changed rows, and other values of its metadata."""
    folder.mkdir()
    for file in Path(stored.folder).glob("*.parquet"):
        table = parquet.read_table(file)
        known = {**about_of(str(file)), **about}
        changed = change(table).replace_schema_metadata({"clipship": json.dumps(known)})
        parquet.write_table(changed, folder / file.name, row_group_size=4)
    return str(folder)


def replaced(table: Any, name: str, values: Any) -> Any:
    """The table with other values of a column."""
    return table.set_column(table.schema.get_field_index(name), name, values)


def test_a_sample_without_a_usable_row_is_a_bad_one(stored: Stored, tmp_path: Path, alone: Comm) -> None:
    def lessened(table: Any) -> Any:
        keys, numbers = table["key"].to_pylist(), table["caption"].to_pylist()
        table = replaced(table, "key", pyarrow.array(["k00" if key == "k06" else key for key in keys]))
        kept = [
            key != "k03" and (key, number) != ("k05", 2) for key, number in zip(keys, numbers, strict=True)
        ]
        problems = [f"broken {key}" if key == "k04" else None for key in keys]
        lost = pyarrow.array([key == "k04" for key in keys])
        for name in ("image", "text"):
            column = pyarrow.compute.if_else(lost, None, table[name].combine_chunks())
            table = replaced(table, name, column)
        return replaced(table, "problem", pyarrow.array(problems)).filter(pyarrow.array(kept))

    job = job_of(stored, changed_copy(stored, tmp_path / "features", lessened))
    _, beside = opened(job, alone)
    places = beside.read_block(0, 9, arena := Arena()).places
    for number, said in (
        (0, "its key comes twice"),
        (3, "0.parquet has no row of it"),
        (4, "broken k04"),
        (5, "3 captions, and 2 text"),
    ):
        message = f"sample k0{number}: model.targets: .*{said}"
        with pytest.raises(BadSample, match=message) as caught:
            beside.read(number)
        assert caught.value.cause == "no stored target"
        with pytest.raises(BadSample, match=message):
            beside.read_at(places[number], arena)
    skipped = Skipped(1.0)
    batches = list(islice(global_batches(begun(job, alone), skipped), 3))
    assert skipped.by_cause == Counter({"no stored target": skipped.count})
    assert skipped.count >= 3
    assert {"k03", "k04", "k05"}.isdisjoint(key for batch in batches for key in batch[0].keys)


def same(table: Any) -> Any:
    return table


def test_folders_that_do_not_fit_are_refused_on_all_ranks(stored: Stored, tmp_path: Path) -> None:
    mixed = changed_copy(stored, tmp_path / "mixed", same)
    lacking = changed_copy(stored, tmp_path / "lacking", same)
    os.remove(f"{lacking}/1.parquet")
    table = parquet.read_table(f"{mixed}/2.parquet")
    about = {**about_of(f"{mixed}/2.parquet"), "made_by": "0" * 32, "model": "another"}
    parquet.write_table(table.replace_schema_metadata({"clipship": json.dumps(about)}), f"{mixed}/2.parquet")
    changed = changed_copy(stored, tmp_path / "changed", same, changed="1")
    for folder, said in (
        (changed, r"0\.parquet is of another version of .*0\.tar\. Remove it"),
        (mixed, "holds features of several models"),
        (lacking, "lacks 1 of 3 files, one for each shard; the first is 1.parquet"),
        (str(tmp_path / "none"), "is no folder: `clipship embed TEACHER SHARDS --out FOLDER` makes one"),
    ):
        job = job_of(stored, folder)

        def refused(comm: Any, job: Job = job, said: str = said) -> None:
            source = open_together(job, comm)
            with pytest.raises(InputError, match=rf"model\.targets: .*{said}"):
                open_targets(job, source, comm)

        run_ranks(2, refused)


def test_other_features_make_another_run(stored: Stored, tmp_path: Path, alone: Comm) -> None:
    def rows_of(job: Job) -> list[object]:
        source: Any = open_together(job, alone)
        return data_rows(job.data, source, open_targets(job, source, alone))

    other = changed_copy(stored, tmp_path / "features", same, made_by="0" * 32)
    assert rows_of(job_of(stored, stored.folder)) != rows_of(job_of(stored, other))


AUGMENTED = {
    "crop_scale": (0.3, 1.0),
    "augment": {"color_jitter": (0.3, 0.3, 0.3, 0.1), "color_jitter_prob": 0.8, "gray_scale_prob": 0.3},
}
"""Changes that draw from generators of their own, so that ranks may be threads."""
VIEWS = 3


@pytest.fixture(scope="module")
def of_views(stored: Stored) -> str:
    """The folder of the features of three views of each sample."""
    out = Path(stored.folder).parent / "views"
    return embedded(stored.weights, VIT, stored.shards, out, job_of(stored, data=AUGMENTED), VIEWS)


def test_a_stored_view_is_what_the_teacher_makes_of_the_picture_that_the_student_gets(
    stored: Stored, of_views: str, alone: Comm
) -> None:
    setup = begun(job_of(stored, of_views, data=AUGMENTED), alone)
    teacher: Any = untrained(tiny_job()).model.eval()
    teacher.load_state_dict(torch.load(stored.weights))
    rows = {row["key"]: row["image"] for row in rows_in(of_views)}
    crop = crop_of_views(setup.clip.images.crop)
    raws = {raw.key: raw for raw in map(setup.source.read, range(len(setup.source)))}
    seen = set()
    for step in islice(global_batches(setup, Skipped(1.0)), STEPS):
        for number, key in enumerate(step[0].keys):
            pictures = [crop(raws[key], view_seed(0, raws[key], view)) for view in range(VIEWS)]
            [drawn] = [
                at for at, each in enumerate(pictures) if torch.equal(each[:3], step[0].images[number][:3])
            ]
            image = step[0].judgements[0][0][number]
            assert torch.equal(image, torch.tensor(rows[key][drawn]))
            seen.add((key, drawn))
        assert step[0].normalise is not None
        with torch.no_grad():
            made = teacher.encode_image(step[0].normalise(step[0].images), normalize=True)
        torch.testing.assert_close(step[0].judgements[0][0], made, rtol=0, atol=1e-6)
    assert {drawn for _, drawn in seen} == set(range(VIEWS))
    assert len(seen) > len(raws)  # other views in the second epoch


@pytest.mark.parametrize("kind", ["views", "sigmoids"])
def test_a_resume_and_two_ranks_have_the_same_views_and_the_same_sigmoids(
    stored: Stored, of_views: str, of_siglip: Stored, monkeypatch: pytest.MonkeyPatch, alone: Comm, kind: str
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # threads cannot set one
    if kind == "views":
        job = job_of(stored, of_views, data=AUGMENTED, model={"precision": "fp64"})
    else:
        job = job_of(of_siglip, micro=4, optim=SIGLIP, model={"precision": "fp64"})
    losses, cut = trained(begun(job, alone), STEPS), begun(job, alone)
    assert trained(cut, 2) == losses[:2]
    again = dataclasses.replace(begun(job, alone, steps_done=2), train_step=cut.train_step)
    assert trained(again, STEPS - 2) == losses[2:]
    two = run_ranks(2, lambda comm: trained(begun(job, comm), STEPS))
    assert two[0] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("size", [64, 224, 448])
def test_models_of_any_image_size_see_the_same_part_of_a_view(size: int) -> None:
    part = crop_of_views(RandomCrop((336, 336), scale=(0.1, 1.0)))
    for seed, (height, width) in enumerate([(3000, 2000), (640, 480), (90, 1200), (64, 64), (31, 33)]):
        box = part.box(height, width, seed)
        assert dataclasses.replace(part, size=(size, size)).box(height, width, seed) == box


def test_views_of_another_job_are_refused(stored: Stored, of_views: str, tmp_path: Path) -> None:
    def message(job: Job, seed: int = 0) -> str:
        said = problems(job.model_copy(update={"seed": seed}))
        return said.removeprefix("clipship: ").splitlines()[0]

    fits = job_of(stored, of_views, data=AUGMENTED)
    assert problems(fits) == ""
    assert "seed is 0 there and 1 here. Remove it" in message(fits, seed=1)
    other = message(job_of(stored, of_views, data={**AUGMENTED, "crop_scale": (0.5, 1.0)}))
    assert "pictures or captions: data.crop_scale is [0.3, 1.0] there and [0.5, 1.0] here. Remove it" in other
    assert other.endswith(f"--of JOB --views {VIEWS}")
    both = message(job_of(stored, of_views, stored.folder, data=AUGMENTED))
    assert both == f"model.targets: {of_views} has 3 views of a picture and {stored.folder} 0: store as many"


def test_features_of_views_are_not_those_of_pictures(stored: Stored, of_views: str) -> None:
    said = clipship("duplicates", of_views, "--out", f"{of_views}/near.parquet", code=2).err
    assert "features of views, not of whole pictures" in said
    with pytest.raises(InputError, match="made otherwise than those asked for"):
        embedded(stored.weights, VIT, stored.shards, Path(of_views))
    row = rows_in(of_views)[0]
    cosines = [float(np.dot(view, row["text"])) for view in row["image"]]
    assert len(cosines) == VIEWS
    assert row["cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)


def test_models_that_take_pictures_of_any_shape_have_no_views() -> None:
    with pytest.raises(InputError, match=r"a model with model\.image_tokens takes none"):
        crop_of_views(PatchCrop(Budget(16, (4, 4))))


def test_views_need_the_job_that_draws_them() -> None:
    said = clipship("embed", "ViT-B-32:openai", "a.tar", "--views", 2, code=2).err
    assert "name the job with --of" in said
