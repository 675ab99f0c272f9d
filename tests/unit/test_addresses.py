"""Addresses that stand in others' data choose no protocol, no endpoint and no folder that is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import VIT, tiny_job
from trainer.cli.main import main
from trainer.config import Data, Job
from trainer.config.loader import dump_job
from trainer.data.check import check_data
from trainer.data.image_cells import image_bytes
from trainer.data.sample import BadSample
from trainer.errors import InputError
from trainer.plan.trained import evaluation_job
from trainer.search.features import ShardPictures

CHAINS = ("simplecache::http://127.0.0.1:9/0.tar", "http://127.0.0.1:9/a::reference://b", "s3://a::file:///b")
FOREIGN = (*CHAINS, "reference://a", "file:///etc/passwd", "{s3,reference}://a/0.tar", "http:/a://b")


def trained_by(folder: Path, **sections: Any) -> Path:
    """A checkpoint whose manifest says that a job with these sections trained it."""
    step = folder / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (step / "model.pt").touch()
    job = tiny_job(model={"name": VIT}).model_dump(mode="json")
    for name, section in sections.items():
        job[name] = {**job[name], **section}
    (step / "manifest.json").write_text(json.dumps({"step": 1, "job": job}))
    return step


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.plan.trained.check_evaluated", lambda _job: None)


@pytest.mark.parametrize("chain", CHAINS)
def test_no_chain_of_file_systems_is_opened(chain: str) -> None:
    with pytest.raises(InputError, match=r"is a chain of file systems \(::\), which are not opened"):
        check_data(Data(train=(chain,)))


@pytest.mark.parametrize("address", FOREIGN)
@pytest.mark.parametrize("key", ["retrieval", "zero_shot"])
def test_a_checkpoint_names_no_address_of_another_protocol(
    tmp_path: Path, key: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = trained_by(tmp_path, eval={key: [address]})
    assert main(["eval", str(step)]) == 2
    told = capsys.readouterr().err
    assert "evaluated on" in told
    assert "give the data with --data or --zero-shot" in told
    assert evaluation_job(str(step), None, {"retrieval": ("a.tar",), "zero_shot": ()}, 1, ()).eval.retrieval


@pytest.mark.parametrize("address", FOREIGN)
def test_a_picture_and_a_shard_of_features_have_no_address_of_another_protocol(address: str) -> None:
    with pytest.raises(BadSample, match=r"address of none of|is a chain"):
        image_bytes(address, "t.parquet", "0", 1000)
    with pytest.raises(InputError, match=r"address of none of|is a chain"):
        ShardPictures(Path(), tiny_job(), {"a": (address, 0)}).decoded("a")


def test_a_checkpoint_chooses_no_endpoint_and_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own: dict[str, Any] = {"data": {"storage": {"endpoint": "https://mine.example.org"}, "cache": "/mine"}}
    theirs: dict[str, Any] = {
        "data": {"storage": {"endpoint": "https://evil.example.org", "anonymous": True}, "cache": "/evil"},
        "model": {"cache_dir": "/evil"},
        "eval": {"retrieval": ["s3://bucket/0.tar"]},
    }

    def evaluated(name: Path, *texts: str) -> Job:
        return evaluation_job(str(name), None, {}, 1, texts)

    job = evaluated(trained_by(tmp_path / "runs" / "own", **theirs))
    assert (job.data.storage.given, job.data.cache, job.model.cache_dir) == ({}, None, None)
    assert "data.storage and data.cache of the run that trained it are not used" in capsys.readouterr().err
    file = tmp_path / "job.toml"
    text = dump_job(tiny_job(name="own", logging={"runs": str(tmp_path / "runs")}, **own))
    for path in (file, tmp_path / "runs" / "own" / "job.toml"):
        path.write_text(text)
    job = evaluated(file)
    assert job.data.storage.given == own["data"]["storage"]
    assert (job.data.cache, job.model.cache_dir) == ("/mine", None)
