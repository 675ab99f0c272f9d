"""Distillation on ranks and in micro-batches, against open_clip's own loss on the whole batch."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor

from tests.support.check import problems
from tests.support.jobs import COCA, VIT, few_words, small_job, tiny_job
from tests.support.loading import rank_batches
from tests.support.pictures import picture
from tests.support.step_ranks import gradients_of_ranks
from tests.support.steps import (
    Clip,
    MicroBatch,
    built,
    drawn,
    grads,
    same,
    state_of,
    train_step,
    untrained,
    weights_of,
)
from tests.support.tables import write_arrow, write_parquet
from trainer.comm.protocol import Comm
from trainer.config import Data, Job
from trainer.config.batch_plan import plan
from trainer.data.bad_samples import Skipped
from trainer.data.loader import Batch
from trainer.data.pack import write_shard
from trainer.data.sample import BadSample
from trainer.data.source import open_source
from trainer.errors import InputError
from trainer.model import open_clip_api
from trainer.model.teacher import build_teacher, whole_captions
from trainer.plan.first_samples import FirstSamples

SAMPLES = 8
WEIGHT = 0.4


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of a teacher, of the student's size and another seed."""
    path = tmp_path_factory.mktemp("teacher") / "teacher.pt"
    return weights_of(small_job().model_copy(update={"seed": 9}), path)


def job_with(
    weights: str,
    micro: int = SAMPLES,
    teacher: str = few_words(VIT),
    temperature: float | None = None,
    **model: Any,
) -> Job:
    optim = {"global_batch_size": SAMPLES, "max_batch_size_per_gpu": micro, "steps": 4}
    keys = {"teacher": teacher, "teacher_pretrained": weights, "precision": "fp64", **model}
    return small_job(
        model=keys, optim={**optim, "distill_weight": WEIGHT, "distill_temperature": temperature}
    )


def samples() -> tuple[Tensor, Tensor]:
    return drawn(untrained(small_job()).model.double(), SAMPLES)


def open_clips(job: Job, teacher: torch.nn.Module, student: torch.nn.Module) -> Tensor:
    """open_clip's loss of the whole batch in one process."""
    images, tokens = samples()
    with torch.no_grad():
        image, text, scale = teacher(images, tokens)[:3]
    temperature = job.optim.distill_temperature
    judged = image, text, scale if temperature is None else torch.tensor(1 / temperature, dtype=torch.float64)
    contrast, distilled = open_clip.loss.DistillClipLoss()(*student(images, tokens)[:3], *judged)
    return contrast + WEIGHT * distilled  # type: ignore[no-any-return]


def by_sigmoids(job: Job, teacher: torch.nn.Module, student: torch.nn.Module) -> Tensor:
    """The sigmoid loss of the matrix of all pairs and the soft labels in closed form."""
    images, tokens = samples()
    with torch.no_grad():
        image, text, scale, bias = teacher(images, tokens)
        odds = scale * image @ text.T + bias
        if job.optim.distill_temperature is not None:
            odds = (image @ text.T + bias / scale) / job.optim.distill_temperature
    image, text, scale, bias = student(images, tokens)
    chances = (scale * image @ text.T + bias).sigmoid()
    contrast, distilled = (
        -(label * chances.log() + (1 - label) * (1 - chances).log()).sum() / SAMPLES
        for label in (torch.eye(SAMPLES, dtype=torch.float64), odds.sigmoid())
    )
    return contrast + WEIGHT * distilled  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def sigmoid_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of a teacher that has a logit bias, of another scale and bias than the student begins with."""
    path = tmp_path_factory.mktemp("sigmoid") / "teacher.pt"
    made = untrained(small_job(optim={"loss": "siglip"}).model_copy(update={"seed": 9})).model.state_dict()
    changed = {"logit_scale": torch.tensor(2.0), "logit_bias": torch.tensor(-1.5)}
    torch.save({**made, **changed}, path)
    return str(path)


@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize(("ranks", "micro", "temperature"), [(1, 8, None), (2, 4, None), (2, 2, 0.3)])
def test_ranks_and_micro_batches_have_the_loss_and_gradient_of_the_whole_batch(
    weights: str,
    sigmoid_weights: str,
    loss: str,
    ranks: int,
    micro: int,
    temperature: float | None,
    alone: Comm,
) -> None:
    made = job_with(weights if loss == "clip" else sigmoid_weights, micro, temperature=temperature)
    job = made.model_copy(update={"optim": made.optim.model_copy(update={"loss": loss})})
    teacher = build_teacher(job, plan(job, ranks), alone, untrained(job))
    assert teacher is not None
    found, gradients = gradients_of_ranks(job, ranks, samples(), teacher)
    student = untrained(job).model.double().train()
    expected = (open_clips if loss == "clip" else by_sigmoids)(job, teacher.model, student)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-11, atol=1e-14)
    assert gradients.keys() == grads(student).keys()
    for name, gradient in grads(student).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-13, msg=name)


def test_siglip_refuses_a_teacher_whose_logits_have_no_bias(weights: str, alone: Comm) -> None:
    made = job_with(weights)
    job = made.model_copy(update={"optim": made.optim.model_copy(update={"loss": "siglip"})})
    with pytest.raises(InputError, match=r"has no logit bias, and optim.loss = .siglip. learns from"):
        build_teacher(job, plan(job, 1), alone, untrained(job))


def test_a_teacher_has_its_weights_learns_nothing_and_changes_no_seeded_weight(
    weights: str, alone: Comm
) -> None:
    job = job_with(weights)
    student = built(job, alone)
    assert same(state_of(untrained(small_job()).model), state_of(untrained(job).model))
    teacher = build_teacher(job, plan(job, 1), alone, student)
    assert teacher is not None
    before, saved = state_of(teacher.model), torch.load(weights)
    assert all(torch.equal(tensor.float(), saved[name]) for name, tensor in before.items())
    train_step(job, alone, student.model.train(), teacher)([MicroBatch(*samples())], 0)
    assert same(state_of(teacher.model), before)


def test_captions_are_whole_for_a_teacher(alone: Comm) -> None:
    clip: Clip = built(small_job(), alone)
    assert clip.kernels.caption_length is not None
    assert whole_captions(clip).kernels.caption_length is None


def test_a_teacher_that_takes_other_samples_is_refused(weights: str, alone: Comm) -> None:
    job = job_with(weights, image_size=24)
    with pytest.raises(InputError, match=r"model\.teacher: .*images of another size"):
        build_teacher(job, plan(job, 1), alone, built(job, alone))


@pytest.mark.parametrize(
    ("name", "pretrained", "said"),
    [
        ("ViT-B-31", "openai", "model.teacher: unknown model 'ViT-B-31'; did you mean"),
        ("ViT-B-32", "opanai", "model.teacher_pretrained: ViT-B-32 has no weights called 'opanai'"),
        ("ViT-B-32", "/none.pt", "model.teacher_pretrained: there is no weights file"),
        ("roberta-ViT-B-32", "laion2b_s12b_b32k", "must read captions by the same tokenizer"),
    ],
)
def test_check_names_what_is_wrong_with_a_teacher(name: str, pretrained: str, said: str) -> None:
    assert said in problems(job_with(pretrained, teacher=name))


# CoCa's loss on ranks and in micro-batches, against open_clip's own loss on the whole batch.

LENGTH = 16
CONTRAST, CAPTION = 0.7, 1.5


def _job(micro: int = SAMPLES, **optim: Any) -> Job:
    keys = {"loss": "coca", "global_batch_size": SAMPLES, "max_batch_size_per_gpu": micro}
    keys |= {"contrast_weight": CONTRAST, "caption_weight": CAPTION, "steps": 4, **optim}
    return small_job(config=COCA, model={"precision": "fp64"}, optim=keys)


def _samples() -> tuple[Tensor, Tensor]:
    """Images, and captions of different lengths with padding behind them."""
    images, tokens = drawn(untrained(_job()).model.double(), SAMPLES, length=LENGTH)
    for row, length in zip(tokens, [16, 3, 9, 5, 2, 12, 7, 4], strict=True):
        row[length:] = 0
    return images, tokens


def _open_clips(job: Job) -> tuple[Tensor, dict[str, Tensor]]:
    """open_clip's loss of the whole batch in one process, and the gradient of each parameter."""
    model = untrained(job).model.double().train()
    loss = open_clip.loss.CoCaLoss(CAPTION, CONTRAST)
    images, tokens = _samples()
    out = model(images, tokens)
    logits, labels = open_clip_api.next_token_logits(out["logits"]), tokens[:, 1:]
    contrast, captions = loss(out["image_features"], out["text_features"], logits, labels, out["logit_scale"])
    whole: Tensor = contrast + captions
    whole.backward()
    return whole.detach(), grads(model)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2)])
def test_ranks_and_micro_batches_have_open_clips_loss_and_gradient(ranks: int, micro: int) -> None:
    loss, gradients = gradients_of_ranks(_job(micro), ranks, _samples())
    expected_loss, expected = _open_clips(_job())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-14)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13, msg=name)


def test_without_tokens_to_write_the_loss_is_that_of_the_contrast() -> None:
    images, tokens = _samples()
    tokens[:, 1:] = 0
    loss, gradients = gradients_of_ranks(_job(2), 2, (images, tokens))
    contrast, _ = gradients_of_ranks(_job(caption_weight=0.0), 1, (images, tokens))
    torch.testing.assert_close(loss, contrast, rtol=1e-12, atol=1e-14)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_all_parameters_begin_with_defined_values_that_follow_from_the_seed() -> None:
    job = _job()
    first, second = (untrained(job).model for _ in range(2))
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    projection = first.get_parameter("text_decoder.text_projection")
    assert projection.std().item() == pytest.approx(projection.shape[0] ** -0.5, rel=0.02)


# Positives of a step: which samples are a group on any number of ranks, and the gradient's definition.

GROUPS = (0, 1, 0, 2, 1, 0, 3, 4)
"""Numbers of the samples' groups: equal ones are on both of two ranks, and in several micro-batches."""
NUMBERS = torch.tensor(GROUPS)
ROWS = 24
IMAGES = [number % 5 for number in range(ROWS)]
CAPTIONS = [number % 7 for number in range(ROWS)]
IDS: list[Any] = [(n % 3, str(n % 3), None, "", f"g{n % 4}")[n % 5] for n in range(ROWS)]
"""Ids that are numbers, the same as texts, null, empty, and other texts."""


def equal_pairs(groups: Tensor | Sequence[object]) -> list[list[bool]]:
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
    assert equal_pairs(groups) == alike([shared[place(key, form)] for key in keys])
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


def grouped() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, 32, 32, generator=draw, dtype=torch.float64)
    return images, torch.randint(1, 1000, (SAMPLES, LENGTH), generator=draw), NUMBERS
