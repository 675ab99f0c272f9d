"""Shards of webdataset's ShardWriter and of img2dataset train as they are."""

import io
import json
import tarfile
from pathlib import Path

import webdataset
from PIL import Image

from trainer.config import Data
from trainer.data.check import check_data
from trainer.data.source import open_source


def jpeg(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(file, "jpeg")
    return file.getvalue()


def captions(data: Data) -> list[tuple[str, tuple[str, ...]]]:
    source = open_source(data)
    return [(raw.key, raw.captions) for raw in map(source.read, range(len(source)))]


def test_shards_of_webdatasets_own_writer_train_as_they_are(tmp_path: Path) -> None:
    with webdataset.ShardWriter(f"{tmp_path}/%06d.tar", maxcount=3, verbose=0) as writer:
        for number in range(7):
            writer.write(
                {
                    "__key__": f"a.b/{number:03d}",
                    "jpg": jpeg(number),
                    "txt": f"number {number}",
                    "json": {"n": number},
                }
            )
    data = Data(train=(f"{tmp_path}/{{000000..000002}}.tar",))
    assert check_data(data) is None, "nothing beside the shards counts them"
    assert captions(data) == [(f"a.b/{number:03d}", (f"number {number}",)) for number in range(7)]


def test_what_img2dataset_leaves_trains_as_it_is_and_its_statistics_count(tmp_path: Path) -> None:
    """Writes img2dataset's webdataset output.

    Each key has jpg, txt and json members, each shard a parquet table and a `_stats.json`; an image that
    failed has no members.
    """
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard:05d}.tar", "w") as tar:
            for number in range(3):
                key = f"{shard:05d}{number:04d}"
                row = {
                    "url": "https://example.org/x.jpg",
                    "key": key,
                    "status": "success",
                    "width": 8,
                    "height": 8,
                    "exif": "{}",
                }
                for ending, content in (
                    ("jpg", jpeg(number)),
                    ("json", json.dumps(row).encode()),
                    ("txt", f"picture {key}".encode()),
                ):
                    member = tarfile.TarInfo(f"{key}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        statistics = {
            "count": 4,
            "successes": 3,
            "failed_to_download": 1,
            "failed_to_resize": 0,
            "duration": 1.5,
            "status_dict": {},
        }
        (tmp_path / f"{shard:05d}_stats.json").write_text(json.dumps(statistics))
        (tmp_path / f"{shard:05d}.parquet").write_bytes(b"PAR1")
    data = Data(train=(f"{tmp_path}/*.tar",))
    assert check_data(data) == 6
    assert captions(data) == [
        (f"{shard:05d}{number:04d}", (f"picture {shard:05d}{number:04d}",))
        for shard in range(2)
        for number in range(3)
    ]
