"""Decoding: crops follow from the seed, pixels are close to Pillow's, odd files are decoded or refused."""

import io
import logging
import random
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from open_clip.transform import image_transform
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import ColorJitter, RandAugment

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.loading import rank_batches
from tests.support.pictures import picture
from trainer.config.loader import job_from_table
from trainer.data.augment import augmentation
from trainer.data.bad_samples import Skipped
from trainer.data.pictures import Decoding, OfMiddle, decode
from trainer.data.pixels import RandomCrop, normalised, resize, upright_jpeg
from trainer.data.reading import TALLY
from trainer.data.sample import BadSample, RawSample
from trainer.data.sample_filter import size_of

PHOTOGRAPHS = [Image.fromarray(photograph) for photograph in load_sample_images().images]
CROP = RandomCrop((224, 224))


def encoded(picture: Image.Image, kind: str = "jpeg", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def raw(image: bytes) -> RawSample:
    return RawSample("k", "shard.tar", image, ("c",))


def difference(one: NDArray[np.uint8], other: Image.Image) -> float:
    """Mean over all pixels and channels, of 255."""
    return float(np.abs(one.astype(float) - np.asarray(other)).mean())


@pytest.mark.parametrize(("size", "seed"), [((512, 384), 0), ((640, 427), 1), ((1601, 1067), 2)])
def test_pixels_are_those_of_pillows_bicubic_antialias(size: tuple[int, int], seed: int) -> None:
    image = encoded(PHOTOGRAPHS[seed % 2].resize(size, Image.Resampling.BICUBIC), quality=90)
    found = CROP(raw(image), seed)[:3].permute(1, 2, 0).numpy()
    box = CROP.box(size[1], size[0], seed)
    corners = (box.left, box.top, box.left + box.width, box.top + box.height)
    whole = Image.open(io.BytesIO(image)).resize((224, 224), Image.Resampling.BICUBIC, box=corners)
    assert difference(found, whole) <= 2


def test_crops_are_frozen_across_versions() -> None:
    """A run resumed with another Python must find the same pixels: these numbers may never change."""
    frozen = [(0, 5, 384, 507), (1, 11, 383, 468), (0, 3, 382, 485)]
    assert [tuple(CROP.box(384, 512, seed)) for seed in (0, 1, 2**62)] == frozen


def test_normalised_bytes_are_what_totensor_and_normalize_give() -> None:
    image = CROP(raw(encoded(PHOTOGRAPHS[0])), 1)
    mean, std = torch.tensor([0.48, 0.46, 0.41]), torch.tensor([0.27, 0.26, 0.28])
    expected = (image[:3].float() / 255 - mean[:, None, None]) / std[:, None, None]
    assert torch.allclose(normalised(image[None], mean, std)[0], expected, atol=1e-6)


RED = (200, 30, 40)
GREY_16_BIT = np.full((60, 80), 30_000, dtype=np.uint16)
PGM_16_BIT = b"P5 80 60 65535\n" + np.full((60, 80), 200, dtype=">u2").tobytes()


def red(mode: str = "RGB", size: tuple[int, int] = (80, 60)) -> Image.Image:
    return Image.new("RGB", size, RED).convert(mode)


def grey_32_bit(value: int) -> bytes:
    return encoded(Image.fromarray(np.full((60, 80), value, dtype=np.int32)), "tiff")


def half_transparent() -> bytes:
    picture = red("RGBA")
    picture.putalpha(0)
    return encoded(picture, "png")


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        pytest.param(lambda: encoded(red("CMYK")), RED, id="cmyk"),
        pytest.param(lambda: encoded(Image.new("L", (80, 60), 90)), (90, 90, 90), id="grey"),
        pytest.param(lambda: encoded(Image.fromarray(GREY_16_BIT), "png"), (117, 117, 117), id="16-bit"),
        pytest.param(lambda: grey_32_bit(117), (117, 117, 117), id="32-bit of 8"),
        pytest.param(lambda: grey_32_bit(30_000), (117, 117, 117), id="32-bit of 16"),
        pytest.param(lambda: grey_32_bit(117 << 20), (234, 234, 234), id="32-bit of 27"),
        pytest.param(lambda: grey_32_bit(-5), (0, 0, 0), id="32-bit below 0"),
        pytest.param(lambda: PGM_16_BIT, (0, 0, 0), id="16-bit pgm, dark"),
        pytest.param(lambda: encoded(red().quantize(4), "png"), RED, id="palette"),
        pytest.param(half_transparent, (255, 255, 255), id="alpha"),
        pytest.param(lambda: encoded(red("LA"), "png"), (82, 82, 82), id="grey-alpha"),
        pytest.param(lambda: encoded(red(), "webp", lossless=True), RED, id="webp"),
        pytest.param(lambda: encoded(red(), progressive=True), RED, id="progressive"),
    ],
)
def test_unusual_images_are_seen_as_a_viewer_shows_them(
    image: Callable[[], bytes], colour: tuple[int, int, int]
) -> None:
    found = CROP(raw(image()), 3)
    assert (found.dtype, found.shape) == (torch.uint8, (4, 224, 224))
    assert np.abs(found[:3].float().mean((1, 2)).numpy() - colour).max() < 6


@pytest.mark.parametrize("fill", [1, 2, 9])
def test_bytes_before_a_marker_hide_no_orientation(fill: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = encoded(PHOTOGRAPHS[0], exif=exif, quality=95)  # so large that a wrong length leads into it
    for at in (2, image.index(b"\xff\xe1"), image.index(b"\xff\xdb")):
        filled = image[:at] + b"\xff" * fill + image[at:]
        assert not upright_jpeg(filled)
        assert size_of(filled) == decode(raw(filled)).size == PHOTOGRAPHS[0].size[::-1]
    plain = encoded(PHOTOGRAPHS[0])
    assert upright_jpeg(plain[:2] + b"\xff" * fill + plain[2:])


XMP = b'<x:xmpmeta><rdf:RDF><rdf:Description tiff:Orientation="%d"/></rdf:RDF></x:xmpmeta>'


@pytest.mark.parametrize(
    ("in_xmp", "in_exif", "upright"), [(6, None, False), (6, 1, True), (1, None, True), (1, 6, False)]
)
def test_training_and_evaluation_turn_an_image_alike(in_xmp: int, in_exif: int | None, upright: bool) -> None:
    exif = Image.Exif()
    if in_exif is not None:
        exif[0x0112] = in_exif
    picture = Image.new("RGB", (80, 60), "white")
    picture.paste((0, 0, 0), (0, 0, 40, 60))
    image = encoded(picture, exif=exif.tobytes(), xmp=XMP % in_xmp, quality=95)
    assert upright_jpeg(image) is upright
    size = (60, 80) if upright else (80, 60)
    trained = RandomCrop(size, scale=(1, 1), ratio=(size[1] / size[0],) * 2)(raw(image), 0)
    assert difference(trained[:3].permute(1, 2, 0).numpy(), decode(raw(image))) < 2
    assert size_of(image) == ((80, 60) if upright else (60, 80)), "as filters measure it"


def test_the_middle_of_a_long_picture_is_the_same_as_of_the_whole() -> None:
    transform = image_transform(32, is_train=False)
    long = PHOTOGRAPHS[0].resize((3001, 60))
    assert torch.allclose(OfMiddle(transform)(long), transform(long), atol=0.05)


ODD = {
    "a maker that is a number": struct.pack(">HHIf", 0x010F, 11, 1, 1.0),
    "a resolution that is text": struct.pack(">HHI4s", 0x011A, 2, 4, b"abc"),
    "parts that are a fraction": struct.pack(">HHII", 0x8769, 5, 1, 40),
}


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("entry", ODD.values(), ids=ODD)
def test_odd_metadata_beside_the_orientation_do_not_end_a_run(kind: str, entry: bytes) -> None:
    oriented = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", 2) + oriented + entry + bytes(40)
    image = encoded(Image.new("RGB", (80, 60)), kind, exif=exif)
    assert decode(raw(image)).size == size_of(image) == (60, 80)
    assert CROP(raw(image), 0).shape == (4, 224, 224)


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_damaged_exif_does_not_lose_the_image(kind: str) -> None:
    image = encoded(red(), kind, exif=b"Exif\0\0nonsense")
    assert CROP(raw(image), 0).shape == (4, 224, 224)
    assert size_of(image) == red().size


def png_that_claims(width: int, height: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("image", "cause", "what"),
    [
        (lambda: b"nonsense", "not an image", "an unknown format: 8 bytes that begin with b'nonsense'"),
        (lambda: b"", "not an image", "an unknown format: 0 bytes"),
        (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n" * 9, "not an image", "an unknown format"),
        (
            lambda: png_that_claims(10_000, 6_000),
            "too many pixels",
            "10000 x 6000 pixels; data.max_image_pixels allows 50,000,000",
        ),
        (lambda: png_that_claims(100_000, 6_000), "too many pixels", "data.max_image_pixels allows 50,000,"),
        (lambda: encoded(Image.new("L", (8000, 7500))), "too many pixels", "8000 x 7500 pixels"),
        (lambda: encoded(PHOTOGRAPHS[0])[:20_000], "damaged image", "cannot be decoded"),
    ],
)
def test_what_cannot_be_decoded_names_shard_key_and_cause(
    image: Callable[[], bytes], cause: str, what: str
) -> None:
    with pytest.raises(BadSample, match=r"^shard\.tar: sample k: the image ") as caught:
        CROP(raw(image()), 0)
    assert caught.value.cause == cause
    assert what in str(caught.value)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_every_cut_image_is_a_bad_sample_and_nothing_else(kind: str) -> None:
    image = encoded(PHOTOGRAPHS[1].resize((64, 48)), kind)
    for size in range(0, len(image) - 40, 97):
        with pytest.raises(BadSample):
            CROP(raw(image[:size]), 0)


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 600))
def test_no_damage_to_a_header_brings_another_error(noise: bytes, at: int) -> None:
    image = bytearray(encoded(red(), quality=50))
    image[at : at + len(noise)] = noise
    with suppress(BadSample):
        assert CROP(raw(bytes(image)), 0) is not None


@pytest.mark.parametrize(("height", "width"), [(384, 507), (150, 180)])
def test_resizing_into_a_batch_gives_the_bytes_of_interpolate(height: int, width: int) -> None:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (height + 20, width + 20, 4), dtype=np.uint8)[10:-10, 10:-10]
    batch = torch.zeros(3, 224, 200, 4, dtype=torch.uint8).permute(0, 3, 1, 2)
    resize(pixels, batch[1])
    image = torch.from_numpy(pixels.copy())[None].permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(image, size=(224, 200), mode="bicubic", antialias=True)
    assert torch.equal(batch[1], expected[0])
    assert not batch[[0, 2]].any(), "its neighbours are as they were"


# Augmentation after the crop: torchvision's and open_clip's own functions are what it must equal.

JITTER = (0.4, 0.3, 0.2, 0.1)
OWN_STREAM, ERASING_STREAM = 2**63, 2**64
"""What is added to a sample's seed: a run resumed with another release must draw the same."""


@pytest.fixture(scope="module")
def noisy() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def seeds(count: int) -> list[int]:
    draw = random.Random(0)
    return [draw.getrandbits(63) for _ in range(count)]


def same(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


class Drawn(ColorJitter):  # type: ignore[misc]
    """torchvision's class with the values and the order that ours draws from a seed."""

    def __init__(self, values: tuple[float, float, float, float], draw: random.Random) -> None:
        super().__init__(*values)
        self._values, self._draw = values, draw

    def forward(self, img: Image.Image) -> Any:
        factors = [self._draw.uniform(max(0.0, 1 - each), 1 + each) for each in self._values[:3]]
        factors.append(self._draw.uniform(-self._values[3], self._values[3]))
        order = sorted(range(4), key=lambda _: self._draw.random())
        limits = (self.brightness, self.contrast, self.saturation, self.hue)
        for factor, limit in zip(factors, limits, strict=True):
            assert limit is None or limit[0] <= factor <= limit[1], "within what torchvision draws from"
        drawn = [None if limit is None else factor for factor, limit in zip(factors, limits, strict=True)]
        self.get_params = lambda *_: (torch.tensor(order), *drawn)
        return super().forward(img)


def changes(**settings: Any) -> Any:
    return augmentation(tiny_job(data={"augment": settings}).data.augment)


@pytest.mark.parametrize("values", [JITTER, (0.5, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.5), (2.0, 2.0, 2.0, 0.5)])
def test_open_clips_classes_do_the_same_with_the_same_draws(
    noisy: Image.Image, monkeypatch: pytest.MonkeyPatch, values: tuple[float, float, float, float]
) -> None:
    theirs = [open_clip.transform.color_jitter(*values, p=0.5), open_clip.transform.gray_scale(p=0.5)]
    ours = changes(color_jitter=values, color_jitter_prob=0.5, gray_scale_prob=0.5)
    kinds = set()
    for seed in seeds(40):
        draw = random.Random(seed + OWN_STREAM)
        monkeypatch.setattr(open_clip.transform.random, "random", draw.random)
        theirs[0].transf = Drawn(values, draw)
        expected = theirs[1](theirs[0](noisy))
        assert same(ours(noisy, seed), expected)
        kinds.add((same(expected, noisy), np.ptp(np.asarray(expected), axis=2).max() == 0))
    assert len(kinds) == 3, "unchanged, changed, and gray"


def test_rand_augment_is_torchvisions(noisy: Image.Image) -> None:
    ours = changes(rand_augment_ops=2, rand_augment_magnitude=12)
    pictures = []
    for seed in seeds(20):
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        expected = RandAugment(2, 12)(noisy)
        torch.set_rng_state(before)
        pictures.append(ours(noisy, seed))
        assert same(pictures[-1], expected)
        assert torch.equal(torch.get_rng_state(), before), "torch's generator goes on as if nothing was drawn"
    assert len({np.asarray(each).tobytes() for each in pictures}) > 10


@pytest.mark.parametrize("count", [1, 3])
def test_timms_rectangles_are_filled_with_noise(noisy: Image.Image, count: int) -> None:
    ours = changes(erase_prob=0.5, erase_count=count)
    theirs = RandomErasing(0.5, mode="pixel", max_count=count, device="cpu")
    changed = []
    for seed in seeds(60):
        random.seed(seed + ERASING_STREAM)
        left = theirs(torch.zeros(3, noisy.height, noisy.width))[0].numpy() == 0
        random.seed(3)
        after, before = np.asarray(ours(noisy, seed)), np.asarray(noisy)
        assert random.random() == random.Random(3).random(), (
            "Python's generator goes on as if nothing was drawn"
        )
        assert np.array_equal(after[left], before[left])
        noise = after[~left]
        assert np.mean(noise == before[~left]) < 0.1 if noise.size > 500 else True
        changed.append(noise)
        assert same(ours(noisy, seed), Image.fromarray(after))
    assert 15 < sum(noise.size > 0 for noise in changed) < 45
    assert np.concatenate(changed).mean() == pytest.approx(127.5, abs=2)


# Transparent parts of pictures: one key decides, a run counts them, and exports say what they were.


def icon() -> bytes:
    """A PNG whose transparent half holds black, and whose other half is red."""
    pixels = np.zeros((32, 32, 4), dtype=np.uint8)
    pixels[:, 16:] = (255, 0, 0, 255)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(("value", "colour"), [("white", (255, 255, 255)), ("drop_alpha", (0, 0, 0))])
def test_the_key_decides_the_colour_of_transparent_parts(value: str, colour: tuple[int, ...]) -> None:
    decoding = Decoding.by(tiny_job(data={"transparency": value}).data)
    raw = RawSample("a", "0.tar", icon(), ())
    assert decode(raw, decoding).getpixel((0, 0)) == colour
    cropped = RandomCrop((32, 32), scale=(1, 1), ratio=(1, 1), decoding=decoding)(raw, 0)
    assert tuple(cropped[:3, 16, 2].tolist()) == colour


def test_a_job_that_goes_on_from_open_clips_checkpoint_takes_its_pictures() -> None:
    job: dict[str, Any] = {"name": "a", "optim": {"global_batch_size": 8, "steps": 1}}
    white = {"transparency": "white"}
    for resume, own, wanted in (
        ("epoch_1.pt", {}, "drop_alpha"),
        ("epoch_1.pt", white, "white"),
        ("step-1", {}, "white"),
    ):
        table = {**job, "data": {"train": ["a.tar"], **own}, "checkpoint": {"resume": f"a/{resume}"}}
        assert job_from_table(table, "job.toml").data.transparency == wanted


def test_a_command_line_of_open_clip_train_keeps_its_pictures() -> None:
    words = ["--train-data", "a.tar", "--train-num-samples", "100"]
    assert 'transparency = "drop_alpha"' in clipship("from-open-clip", "--", *words, code=0).out


class Icons:
    """A source of icons and of photographs without transparency."""

    left_out: Any = None

    def __len__(self) -> int:
        return 8

    def shard_sizes(self) -> list[int]:
        return [8]

    def read(self, index: int) -> RawSample:
        return RawSample(str(index), "0.tar", icon() if index % 4 == 0 else picture(index), ("a",))


def test_a_run_counts_and_names_pictures_with_transparent_parts(caplog: pytest.LogCaptureFixture) -> None:
    batches = rank_batches(Icons(), (8, 1), 4, pixels=RandomCrop((8, 8)), epochs=1)
    skipped = Skipped(1.0)
    TALLY.pop()
    with caplog.at_level(logging.INFO):
        for batch in batches:
            skipped.record(len(batch.keys), batch.bad, batch.alone, batch.reading.transparent)
    assert skipped.figures["transparent_pictures"] == 2
    (said,) = [record.getMessage() for record in caplog.records if "transparent parts" in record.getMessage()]
    assert "data.transparency" in said
