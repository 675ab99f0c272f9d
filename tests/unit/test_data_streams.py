"""Streams are read again and again, shared by ranks and loader processes, and named where they are bad."""

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from tests.support.jobs import tiny_job
from tests.support.loading import open_job, rank_batches, refusal
from tests.support.tables import write_parquet
from trainer.config import Data
from trainer.config.batch_plan import plan
from trainer.data.captions import choice_by
from trainer.data.eval_blocks import eval_blocks
from trainer.data.lanes import LaneOrder, Lanes, choose_lanes
from trainer.data.loader import Batch
from trainer.data.pack import write_shard
from trainer.data.processes import Borrowed, BufferPool
from trainer.data.reading_plan import reading_rows
from trainer.data.sample import BadSample, RawSample, Source
from trainer.data.source import open_source
from trainer.data.streams import loader_processes
from trainer.errors import InputError, StorageError

Packed = tuple[str, dict[str, bytes]]


def packed(key: str, **members: bytes) -> Packed:
    return key, members or {"jpg": f"image of {key}".encode(), "txt": f"caption of {key}".encode()}


def pipe(folder: Path, name: str, *samples: Packed) -> str:
    write_shard(samples, folder / f"{name}.tar")
    return f"pipe:cat '{folder / name}.tar'"


def source(*streams: str, window: int = 1, seed: int = 0) -> Any:
    return open_job(seed=seed, train=streams, format="webdataset", stream_samples=10, shuffle_window=window)


def keys(found: Source, count: int) -> list[str]:
    return [found.read(0).key for _ in range(count)]


def test_streams_come_one_after_the_other_and_begin_again(tmp_path: Path) -> None:
    found = source(pipe(tmp_path, "a", packed("a1"), packed("a2")), pipe(tmp_path, "b", packed("b1")))
    raw = found.read(7)
    assert (raw.key, raw.image, raw.captions) == ("a1", b"image of a1", ("caption of a1",))
    assert raw.origin.startswith("pipe:cat ")
    assert keys(found, 6) == ["a2", "b1", "a1", "a2", "b1", "a1"]
    assert len(found) == 10
    assert found.shard_sizes() == [10]
    assert keys(pickle.loads(pickle.dumps(found)), 1) == ["a1"], "another process begins by itself"


def test_each_rank_has_streams_of_its_own_and_none_is_left_over(tmp_path: Path) -> None:
    streams = tuple(pipe(tmp_path, name, packed(name)) for name in "abc")
    settings: dict[str, Any] = {"train": streams, "format": "webdataset", "stream_samples": 10}
    shares = [open_job(2, rank, **settings) for rank in range(2)]
    assert [set(keys(share, 4)) for share in shares] == [{"a", "c"}, {"b"}]
    assert [loader_processes(share, 4) for share in shares] == [2, 1]
    assert loader_processes(open_job(format="synthetic"), 4) == 4
    assert "3 streams for 4 ranks, but ranks cannot share a stream" in refusal(open_job, 4, **settings)


def test_a_bad_sample_is_named_and_the_next_one_comes(tmp_path: Path) -> None:
    found = source(
        pipe(tmp_path, "a", packed("mute", jpg=b"x"), packed("empty", jpg=b"x", txt=b" \n"), packed("good"))
    )
    with pytest.raises(BadSample, match=r"sample mute: no \.txt") as missing:
        found.read(0)
    assert missing.value.cause == "no .txt"
    with pytest.raises(BadSample, match="sample empty: captions are empty"):
        found.read(0)
    assert found.read(0).key == "good"


def test_all_tars_of_a_command_are_read(tmp_path: Path) -> None:
    for number in range(4):
        write_shard([packed(f"{number}a"), packed(f"{number}b")], tmp_path / f"000{number}.tar")
    found = source(f"pipe:cat {tmp_path}/000*.tar")
    once = [f"{number}{letter}" for number in range(4) for letter in "ab"]
    assert keys(found, 16) == [*once, *once]
    packed_too = source(f"pipe:for tar in {tmp_path}/000*.tar; do gzip -c $tar; done")
    assert keys(packed_too, 9) == [*once, "0a"]


def test_one_stream_that_never_gives_a_sample_ends_the_run_beside_others(tmp_path: Path) -> None:
    found = source(pipe(tmp_path, "a", packed("a")), "pipe:false", pipe(tmp_path, "b", packed("b")))
    assert found.read(0).key == "a"
    with pytest.raises(StorageError, match=r"pipe:false: cannot be read after 3 attempts .*exit code 1"):
        found.read(0)


def test_a_command_that_fails_for_long_is_a_bad_sample_and_for_all_streams_the_end(tmp_path: Path) -> None:
    found = source(pipe(tmp_path, "a", packed("a")), pipe(tmp_path, "b", packed("b")) + " 2>/dev/null")
    assert keys(found, 2) == ["a", "b"]
    (tmp_path / "b.tar").unlink()
    assert found.read(0).key == "a"
    with pytest.raises(BadSample, match=r"b\.tar' 2>/dev/null: cannot be read after 3 .*exit code 1") as bad:
        found.read(0)
    assert str(bad.value).count("pipe:") == 1
    alone = source(pipe(tmp_path, "c", packed("c")) + " 2>/dev/null")
    assert alone.read(0).key == "c"
    (tmp_path / "c.tar").unlink()
    for kind in (BadSample, StorageError):
        with pytest.raises(kind):
            alone.read(0)


def test_a_stream_names_what_a_shard_names(tmp_path: Path) -> None:
    members = [
        packed("x.v2.0"),
        packed("x.v2.1"),
        packed("empty", jpg=b"", txt=b"t"),
        packed("a"),
        packed("a"),
    ]
    found = source(pipe(tmp_path, "0", *members, packed("last")))
    bad: list[str] = []
    while True:
        try:
            assert found.read(0).key == "last"
            break
        except BadSample as error:
            bad.append(error.cause)
    shards = open_source(Data(train=(f"{tmp_path}/0.tar",), image_key=("jpg",), max_bad_share=1))
    assert Counter(bad) == shards.left_out.by_cause
    assert shards.left_out.count == 5


@pytest.mark.parametrize("order", [("jpg", "txt"), ("txt", "jpg")])
@pytest.mark.parametrize(("most", "count"), [(100, 6), (1, 11)])
def test_halves_that_lie_apart_are_one_bad_sample_as_in_a_shard(
    order: tuple[str, ...], most: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.streams._KEYS", most)
    halves = [packed(key, **{ending: b"x"}) for ending in order for key in "abcde"]
    found = source(pipe(tmp_path, "0", *halves, packed("mute", jpg=b"x"), packed("last")))
    for _ in range(count):
        with pytest.raises(BadSample):
            found.read(0)
    assert found.read(0).key == "last"
    if most == 100:
        shards = open_source(Data(train=(f"{tmp_path}/0.tar",), image_key=("jpg",), max_bad_share=1))
        assert shards.left_out.count == count


def test_a_stream_that_is_no_tar_is_named_and_asked_once() -> None:
    found = source("pipe:echo hello")
    for kind in (BadSample, InputError):
        with pytest.raises(
            kind, match="pipe:echo hello: the stream cannot be read: not a readable tar"
        ) as no:
            found.read(0)
        assert "uncompressed" not in str(no.value)
    assert not isinstance(no.value, StorageError)


def test_a_cut_stream_loses_none_of_the_samples_that_wait_to_be_drawn(tmp_path: Path) -> None:
    whole = tmp_path / "whole.tar"
    write_shard(
        [*(packed(f"{number:03}") for number in range(100)), packed("last", jpg=bytes(100_000), txt=b"b")],
        whole,
    )
    found = source(f"pipe:head -c 230000 '{whole}'", window=1000)
    seen = keys(found, 100)
    with pytest.raises(BadSample, match="the stream cannot be read"):
        found.read(0)
    assert sorted(seen) == [f"{number:03}" for number in range(100)]


@pytest.mark.parametrize(
    ("cut", "kinds", "said"),
    [
        (False, [InputError], "standard input ended after 2 samples and cannot be read again"),
        (True, [BadSample, InputError], "-: the stream cannot be read"),
    ],
)
def test_standard_input_is_read_once_by_the_rank_itself_and_one_that_is_cut_is_not_called_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool, kinds: list[type[InputError]], said: str
) -> None:
    shard = tmp_path / "0.tar"
    write_shard([packed("a"), packed("b"), *([packed("c")] if cut else [])], shard)
    if cut:
        os.truncate(shard, 4612)
    found = source("-")
    assert loader_processes(found, 4) == 0
    with shard.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert keys(found, 2) == ["a", "b"]
        for kind in kinds:
            with pytest.raises(kind, match=said):
                found.read(0)


# Shares, micro-batches, evaluation blocks and random numbers of ranks, tested in one process.


class Dots:
    """Sample n is one pixel of colour n, with three captions that name it, and label n."""

    left_out: Any = None

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return sum(self._sizes)

    def shard_sizes(self) -> list[int]:
        return list(self._sizes)

    def read(self, index: int) -> RawSample:
        image = np.full((1, 1, 3), index, dtype=np.uint8)
        captions = (f"{index} one", f"{index} two", f"{index} three")
        return RawSample(str(index), "dots", image, captions, index, caption_counts=(1, 2))


def to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()


def noisy(raw: RawSample, seed: int) -> Tensor:
    """The seed is all that augmentation may draw from."""
    assert isinstance(raw.image, np.ndarray)
    return torch.from_numpy(raw.image).permute(2, 0, 1) + seed % 199


def lengths(captions: list[str]) -> Tensor:
    return torch.tensor([[len(caption), int(caption.split()[0])] for caption in captions])


def batches(source: Dots, ranks: int = 1, rank: int = 0, batch: int = 8, **how: Any) -> list[Batch]:
    how = {"seed": 5, "pixels": noisy, "tokenizer": lengths, "epochs": 2, **how}
    return list(rank_batches(source, (3, 2), batch, ranks, rank=rank, **how))


def in_order(batches: list[list[Batch]]) -> list[tuple[int, int, str, str]]:
    """(epoch, position, key, caption) of all ranks' samples, by epoch and position."""
    return sorted(
        (batch.epoch, position, key, caption)
        for of_rank in batches
        for batch in of_rank
        for position, key, caption in zip(batch.positions.tolist(), batch.keys, batch.captions, strict=True)
    )


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) >= 8),
    starts=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 7)), max_size=4
    ),
)
def test_kills_and_other_worlds_change_no_global_batch(
    sizes: list[int], starts: list[tuple[int, int, int]]
) -> None:
    """Each start has other ranks and micro-batches, and is killed; the last finishes the three epochs."""
    source, an_epoch = Dots(*sizes), sum(sizes) // 8
    whole = in_order([batches(source, epochs=3)])
    seen: list[list[Batch]] = []
    done = 0
    for ranks, accumulation, count in [*starts, (1, 1, 3 * an_epoch)]:
        stop = min(done + count, 3 * an_epoch)
        if done == stop:
            continue
        epoch, batch = divmod(done, an_epoch)
        how = {"accumulation": accumulation, "epochs": 3, "start_epoch": epoch, "start_batch": batch}
        for rank in range(ranks):
            seen.append(batches(source, ranks, rank, **how)[: (stop - done) * accumulation])
        done = stop
    assert in_order(seen) == whole


@pytest.mark.parametrize("name", ["random", "first", "longest", "weights"])
def test_each_choice_of_captions_is_the_same_on_any_ranks_and_after_a_resume(name: str) -> None:
    source = Dots(20, 12)
    weighted = {"caption_key": ("json:a", "json:b"), "caption_weights": (3.0, 0.5)}
    keys: dict[str, Any] = weighted if name == "weights" else {"caption_choice": name}
    job = tiny_job(data={"format": "auto", "train": ("a.tar",), **keys})
    choice: dict[str, Any] = {"caption_choice": choice_by(job.data)}
    alone = batches(source, **choice)
    assert in_order([batches(source, 2, rank, **choice) for rank in range(2)]) == in_order([alone])
    resumed = [batches(source, 2, rank, start_epoch=1, start_batch=2, **choice) for rank in range(2)]
    assert in_order(resumed) == in_order([alone[6:]])
    taken = {caption.split()[1] for batch in alone for caption in batch.captions}
    assert taken == {"first": {"one"}, "longest": {"three"}}.get(name, {"one", "two", "three"})


def test_a_start_beyond_the_epoch_and_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="start_batch 2 of 2"):
        batches(Dots(16), start_batch=2)
    assert "global_batch_size = 8 is more than the 7 usable samples" in refusal(batches, Dots(7))


def test_made_up_pictures_are_rgb_bytes_that_follow_from_their_number_alone() -> None:
    image, same = (
        open_source(Data(format="synthetic", synthetic_samples=count)).read(0).image for count in (1, 150)
    )
    assert np.array_equal(np.asarray(image), np.asarray(same))
    assert isinstance(image, np.ndarray)
    assert image.shape == (64, 64, 3)
    assert image.dtype == np.uint8
    with pytest.raises(IndexError):
        open_source(Data(format="synthetic", synthetic_samples=1)).read(1)


def blocks(source: Dots, ranks: int, block: int) -> list[Any]:
    how: dict[str, Any] = {"world_size": ranks, "block": block, "transform": to_tensor, "workers": 0}
    found = [eval_blocks(source, rank=rank, **how) for rank in range(ranks)]
    return sorted((block for of_rank in found for block in of_rank), key=lambda block: block.numbers)


@pytest.mark.parametrize(("samples", "ranks"), [(1, 2), (5, 7), (18, 4)])
def test_evaluation_blocks_are_the_same_in_any_world_and_the_last_is_filled_with_zeros(
    samples: int, ranks: int
) -> None:
    alone, shared = blocks(Dots(samples), 1, 4), blocks(Dots(samples), ranks, 4)
    assert [number for block in shared for number in block.numbers] == list(range(samples))
    for one, other in zip(shared, alone, strict=True):
        assert one.numbers == other.numbers
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    missing = -samples % 4
    assert shared[-1].labels.tolist() == [*range(samples + missing - 4, samples), *[-1] * missing]
    assert not shared[-1].images[4 - missing :].any()


# The order of lanes: each sample once, the same in each release, and as many lanes as memory takes.


@st.composite
def orders(draw: st.DrawFn) -> tuple[LaneOrder, list[int]]:
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=8))
    lanes = draw(st.sampled_from([1, 2, 4, 8]))
    batch = lanes * draw(st.sampled_from([1, 3]))
    block = draw(st.integers(1, 80))
    seed, epoch = draw(st.integers(0, 2**31)), draw(st.integers(0, 99))
    return LaneOrder(sizes, Lanes(block, lanes), seed=seed, epoch=epoch, batch=batch), sizes


@settings(deadline=None)
@given(orders(), st.data())
def test_an_epoch_has_each_sample_once_but_for_less_than_a_batch_and_may_begin_anywhere(
    made: tuple[LaneOrder, list[int]], data: st.DataObject
) -> None:
    order, sizes = made
    samples = order.samples(0, len(order)).tolist()
    assert len(set(samples)) == len(samples) == len(order)
    assert set(samples) <= set(range(sum(sizes)))
    assert 0 <= sum(sizes) - len(order) < order.batch
    begin = data.draw(st.integers(0, len(order)))
    end = data.draw(st.integers(begin, len(order)))
    assert order.samples(begin, end).tolist() == samples[begin:end]


def test_order_and_seeds_are_frozen_across_versions() -> None:
    """A run resumed with another release must find the same samples: these numbers may never change."""
    long = LaneOrder([5, 2, 6], Lanes(3, 2), seed=7, epoch=2, batch=4)
    assert long.samples(0, 99).tolist() == [6, 5, 10, 11, 4, 3, 8, 9, 2, 7, 1, 0]
    short = LaneOrder([5, 2, 6], Lanes(50, 4), seed=7, epoch=2, batch=4)
    assert short.samples(0, 99).tolist() == [8, 9, 6, 1, 7, 11, 2, 4, 12, 10, 5, 3]
    weighted = LaneOrder([9, 2, 16], Lanes(4, 2), weights=[1, 0.5, 2], seed=7, epoch=2, batch=2)
    assert weighted.samples(0, 16).tolist() == [8, 14, 7, 24, 18, 23, 16, 5, 15, 4, 17, 3, 21, 9, 22, 23]
    first, *_ = batches(Dots(5, 2, 6), seed=7)
    assert first.images[:, 0].flatten().tolist() == [45, 33, 26, 20, 156, 10, 87, 127], "the seeds of pixels"
    assert [caption.split()[1] for caption in first.captions] == (
        ["one", "two", "one", "three", "three", "three", "one", "two"]
    )


def test_a_long_epoch_costs_as_much_memory_as_it_has_blocks() -> None:
    order = LaneOrder([10_000] * 10_000, Lanes(1000, 4096), seed=1, epoch=3, batch=4096)
    assert len(np.unique(order.samples(90_112_000, 90_116_096))) == 4096
    assert order.nbytes <= 100_000 * 17 + 4096 * 8 + 4096 * 4000


def test_row_groups_are_blocks_and_as_many_are_open_as_fit(tmp_path: Path) -> None:
    columns = {"image": ["a.png"] * 4000, "caption": ["c"] * 4000}
    source: Any = open_source(Data(train=(write_parquet(tmp_path / "t.parquet", columns, 1000),)))
    (entry,) = source.index.entries
    object.__setattr__(entry, "size", 40_000 * 4000)

    def chosen(batch: int, ranks: int, room_mb: int) -> object:
        data = Data(train=("0.tar",), row_group_cache_mb=room_mb)
        return choose_lanes(data, source, batch, ranks, 2**30)

    assert chosen(64, 1, 512) == Lanes(1000, 8)
    assert chosen(64, 4, 512) == Lanes(1000, 32)
    assert chosen(64, 1, 1) == Lanes(1000, 1)
    assert chosen(28, 4, 100) == Lanes(1000, 4), "with 7 lanes, ranks would read row groups of others again"


def test_check_says_what_a_rank_reads_at_once(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(bytes(10_000_000))

    def said(train: str, batch: int, ranks: int, **data: Any) -> list[tuple[str, str]]:
        job = tiny_job(data={"format": "auto", "train": (train,), **data}, optim={"global_batch_size": batch})
        return list(reading_rows(job, plan(job, ranks)))

    text = (
        "blocks of 4 MiB, each once: in a new run a rank reads up to {} MB before its first step, has at "
        "most {} MB of them open, and reads {} MB ahead"
    )
    assert said("http://store.example/{0..9}.tar", 64, 1) == [("reading", text.format(134, 268, 67))]
    assert said("http://store.example/0.tar", 64, 4, read_ahead_mb=500) == [
        ("reading", text.format(34, 67, 524))
    ]
    assert said("http://store.example/0.tar", 8192, 2) == [("reading", text.format(537, "1,074", 67))]
    assert said(str(tmp_path / "0.tar"), 64, 1) == [("reading", text.format(10, 10, 10))]
    named = text.replace("4 MiB", "20,000 samples")
    several = "http://store.example/0.tar"
    assert said(several, 2, 1, block_samples=20_000) == [("reading", named.format(537, "1,074", 67))]
    row_groups = "row groups, each once: a rank has at most 537 MB of them open, and reads 67 MB ahead"
    assert said("http://store.example/{0..9}.parquet", 64, 1) == [("reading", row_groups)]
    assert said("0.arrow", 64, 1) == []
    job = tiny_job()
    assert list(reading_rows(job, plan(job, 1))) == [], "synthetic data are not read"


# Buffers of a loader process are used again, and never while the rank still has the batch.

ORDER = (0, 3, 1, 2)
SHAPE = (2, 5, 4, 3)


def filled(pool: BufferPool, value: int) -> Tensor:
    """A batch as the loader fills it: [2, 3, 5, 4], channels last in memory."""
    return pool.empty(SHAPE).permute(ORDER).fill_(value)


def lend(pool: BufferPool, value: int) -> Any:
    lent = pool.lend(filled(pool, value), ORDER)
    assert lent is not None
    return lent


def test_a_buffer_is_used_again_when_the_rank_has_let_go_of_its_last_tensor() -> None:
    pool, rank = BufferPool(0, 0), Borrowed()
    got = rank.tensor(lend(pool, 1))
    view = got[1:, :2]
    del got
    second = lend(pool, 2)
    assert second.number == 1
    assert bool((view == 1).all()), "the rank still had a view of the first batch"
    del view
    third = lend(pool, 3)
    assert (third.number, third.memory) == (0, None), "the rank has this memory already"
    assert bool((rank.tensor(third) == 3).all())
    assert bool((rank.tensor(second) == 2).all())


def test_beyond_the_largest_number_of_buffers_a_batch_has_memory_of_its_own() -> None:
    pool = BufferPool(0, 0)
    lents = [lend(pool, 0) for _ in range(32)]
    more = filled(pool, 9)
    assert len(lents) == 32
    assert pool.lend(more, ORDER) is None
    assert more.is_shared()
    assert bool((more == 9).all())


def test_buffers_of_different_loaders_are_told_apart_and_outlive_their_loader() -> None:
    rank = Borrowed()
    sent = [lend(BufferPool(loader, 0), loader) for loader in (1, 2)]
    one, other = map(rank.tensor, sent)
    rank.forget(1)
    assert (int(one.min()), int(other.min())) == (1, 2)
    with pytest.raises(KeyError):
        rank.tensor(sent[0]._replace(memory=None))
