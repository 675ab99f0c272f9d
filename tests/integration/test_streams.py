"""Ranks that train from pipes and see each sample of a pass once.

The start says what a stream cannot promise.
"""

from pathlib import Path

import pytest

from tests.integration.test_bad_input import sample
from tests.support.runs import TinyRun, tiny_run
from trainer.data.pack import write_shards


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("horovod", marks=[pytest.mark.horovod, pytest.mark.full])]
)
def test_two_ranks_train_from_pipes(tmp_path: Path, backend: str) -> None:
    (tmp_path / "shards").mkdir()
    samples = [sample(number, b"not a picture" if number == 11 else None) for number in range(48)]
    write_shards(samples, tmp_path / "shards", 12)
    run = TinyRun(tmp_path)
    data = {
        "format": "webdataset",
        "train": [f"pipe:cat '{tmp_path}/shards/shard-00000{{0..3}}.tar'"],
        "stream_samples": 48,
        "workers": 4,
    }
    run.write(data=data, comm={"backend": backend}, optim={"steps": 6})
    done = run.start(2)
    assert "streams can be read only from their beginning" in done.stdout
    assert "48 samples = 3 steps per epoch" in done.stdout
    assert list(run.losses()) == list(range(1, 7))
    assert run.result()["bad_samples"].keys() == {"not an image"}
    assert 2 <= run.result()["bad_samples"]["not an image"] <= 3, (
        "each of two passes met it, and a third may have begun"
    )
    logs = "".join(path.read_text() for path in (run.run / "logs").iterdir())
    assert "shard-000000.tar': sample 011: " in logs


def test_one_rank_trains_from_standard_input_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    write_shards([sample(number) for number in range(64)], tmp_path / "shards", 64)
    run = TinyRun(tmp_path)
    for steps, code, backend in ((5, 2, "torch"), (4, 0, "horovod")):
        data = {"format": "webdataset", "train": ["-"], "stream_samples": 32, "workers": 2}
        run.write(data=data, comm={"backend": backend}, optim={"steps": steps})
        with (tmp_path / "shards" / "shard-000000.tar").open("rb") as stdin:
            done = run.start(1, "--fresh", code=code, stdin=stdin)
        if steps == 5:
            assert "standard input ended after 64 samples" in done.stderr


def test_fewer_pipes_than_ranks_are_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, data={"format": "webdataset", "train": ["pipe:cat x.tar"], "stream_samples": 48})
    done = run.start(2, code=2)
    assert "1 stream for 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr
    assert not run.run.exists(), "no rank was started"
