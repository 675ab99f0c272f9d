"""TensorBoard events and W&B's offline files, read back as their own tools read them."""

import importlib
import importlib.util
import json
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.command_line import clipship
from tests.support.jobs import TOY_JOB, tiny_job
from tests.support.webhook import webhook
from trainer.config import Job
from trainer.errors import InputError
from trainer.report.board import Text, row, write_board
from trainer.telemetry.metrics import Telemetry
from trainer.telemetry.pictures import Picture
from trainer.telemetry.writers import open_writers
from trainer.train.loop import eval_pictures

OFFLINE = {"wandb": "offline", "wandb_project": "digits"}
has_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def log_events(job: Job, folder: Path, events: list[dict[str, Any]], steps_done: int = 0) -> None:
    """One start of a run, to its end."""
    with Telemetry(
        folder / "metrics.jsonl", 10, steps_done, open_writers(job, folder, steps_done)
    ) as telemetry:
        for event in events:
            telemetry.event(event)


def nobody() -> str:
    """An address at which no server answers."""
    with webhook() as service:
        return service.address.partition("/hook")[0]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value by tag, as TensorBoard shows them."""
    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_figures_are_grouped_by_what_they_tell_and_are_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    tags = {
        *("train/loss", "train/samples", "perf/comm_s_min", "perf/something_new", "eval/retrieval_i2t_r1"),
        *("goodput/lost_data_s", "health/rss_bytes_max", "health/slowest_by"),
    }
    (board,) = open_writers(tiny_job(), tmp_path, 0)
    board.write({"step": 1, **{tag.partition("/")[2]: 3.0 for tag in tags}})
    assert scalars(tmp_path) == {tag: [(1, 3.0)] for tag in tags}
    board.close(None)


def test_tensorboard_shows_the_job_of_each_start_without_its_environment(tmp_path: Path) -> None:
    job = tiny_job(optim={"lr": 0.125, "steps": 6}).model_copy(update={"env": {"HF_TOKEN": "a-secret"}})
    for done in (0, 1):
        log_events(job, tmp_path, [{"step": done + 1, "loss": 2.0}], steps_done=done)
    texts = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("job/text_summary")
    assert [text.step for text in texts] == [1, 2]
    assert b"    lr = 0.125" in texts[0].tensor_proto.string_val[0]
    assert b"a-secret" not in b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())


def test_tensorboard_forgets_the_steps_that_come_again_and_takes_finite_numbers_only(tmp_path: Path) -> None:
    log_events(tiny_job(), tmp_path, [{"step": step, "loss": 1.0} for step in range(1, 6)])
    again = [{"step": step, "loss": 2.0, "lr": float("nan"), "kept": True} for step in range(4, 8)]
    log_events(tiny_job(), tmp_path, again, steps_done=3)
    assert scalars(tmp_path)["train/loss"] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 2)]
    assert scalars(tmp_path).keys() == {"train/loss", "health/generation"}


def _pictures(folder: Path) -> list[Picture]:
    """The pictures of a run's board: two of different sizes, one with captions that act on Markdown."""
    dog, cat = Text("a dog", 0.5, own=True), Text("a cat", 0.4, own=False)
    odd = Text("| *x* <b>\n", 0.3, own=False)
    red, blue = Image.new("RGB", (30, 20), "red"), Image.new("RGB", (10, 40), "blue")
    write_board(folder, [row(red, [dog, cat], "a dog", 1), row(blue, [odd], "token=hf_" + 34 * "a", 7)])
    return eval_pictures(folder)


def test_tensorboard_shows_pictures_once_and_their_nearest_texts_at_each_evaluation(tmp_path: Path) -> None:
    pictures = _pictures(tmp_path)
    with Telemetry(None, 10, 0, open_writers(tiny_job(), tmp_path, 0)) as telemetry:
        telemetry.show(2, pictures)
        telemetry.show(4, pictures)
        telemetry.show(6, [])
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (strip,) = read.Images("eval/pictures")
    assert (strip.step, strip.width, strip.height) == (2, 48, 40)
    seen = Image.open(BytesIO(strip.encoded_image_string)).convert("RGB")
    assert (seen.getpixel((5, 5)), seen.getpixel((36, 30))) == ((255, 0, 0), (0, 0, 255))
    texts = read.Tensors("eval/nearest_texts/text_summary")
    assert [text.step for text in texts] == [2, 4]
    assert texts[0].tensor_proto.string_val[0].decode().splitlines() == [
        "| picture | own caption | its place | nearest texts |",
        "| --- | --- | --- | --- |",
        "| 1 | a dog | 1 | **a dog**; a cat |",
        r"| 2 | token=\*\*\* | 7 | \| \*x\* \<b\>\\n |",
    ]


def test_a_board_that_is_damaged_shows_no_picture(tmp_path: Path) -> None:
    for content in ("{", "{}", '[{"image": "x"}]'):
        (tmp_path / "retrieval_board.json").write_text(content)
        assert eval_pictures(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('wandb = "offline"', "python -m pip install 'clipship[wandb]'"),
        ('wandb = "online"', "--set logging.wandb=off"),
        ('mlflow = "mlflow.example.org"', "logging.mlflow"),
        ('mlflow = "https://user:a-pass-word@mlflow.example.org"', "logging.mlflow"),
    ],
)
def test_a_job_whose_service_cannot_be_used_is_refused_before_it_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    said: str,
) -> None:
    """A package that is missing, or an address without a scheme or with a password."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    path = tmp_path / "job.toml"
    path.write_text(f'{TOY_JOB}[logging]\nruns = "{tmp_path}"\n')
    clipship("check", path, code=0)
    path.write_text(f'{TOY_JOB}[logging]\nruns = "{tmp_path}"\n{settings}\n')
    told = " ".join(clipship("check", path, code=2).err.split())
    assert said in told
    assert "a-pass-word" not in told


@has_wandb
def test_starts_of_one_run_are_one_run_of_wandb_with_the_job_but_not_its_environment(tmp_path: Path) -> None:
    """A rank that fails leaves what was logged offline; pictures are a table."""
    job = tiny_job(logging=OFFLINE).model_copy(update={"env": {"HF_TOKEN": "a-secret"}})
    first = Telemetry(tmp_path / "metrics.jsonl", 10, 0, open_writers(job, tmp_path, 0))
    with suppress(ValueError), first:
        first.event({"step": 1, "loss": 2.5})
        first.event({"step": 1, "zero_shot_top1": 0.5})
        raise ValueError
    with Telemetry(tmp_path / "metrics.jsonl", 10, 1, open_writers(job, tmp_path, 1)) as second:
        second.event({"step": 2, "loss": 2.0})
        second.show(2, _pictures(tmp_path))
    paths = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    lines = [line for path in paths for line in history(path) if "health/generation" in line]
    assert sorted(lines, key=lambda line: (line["step"], "train/loss" not in line)) == [
        {"step": 1, "train/loss": 2.5, "health/generation": 1},
        {"step": 1, "eval/zero_shot_top1": 0.5, "health/generation": 1},
        {"step": 2, "train/loss": 2.0, "health/generation": 1},
    ]
    found = [record.run for path in paths for record in records(path) if record.run.run_id]
    name = (tmp_path / "wandb-id").read_text().strip()
    assert {(run.run_id, run.project, run.display_name) for run in found} == {(name, "digits", "tiny")}
    config = {entry.key: entry.value_json for run in found for entry in run.config.update}
    assert json.loads(config["optim"])["global_batch_size"] == 16
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"a-secret" in path.read_bytes()] == []
    (file,) = tmp_path.rglob("nearest_texts_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["picture", "own caption", "its place", "nearest texts"]
    assert [line[1:] for line in table["data"]] == [
        ["a dog", 1, "a dog\na cat"],
        ["token=***", 7, "| *x* <b>\n"],
    ]


@has_wandb
@pytest.mark.parametrize("key", ["", "short"])
def test_wandb_that_knows_no_user_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    nowhere(monkeypatch, tmp_path, key)
    with pytest.raises(InputError, match=r"(?s)W&B: .*API key.*logging\.wandb=offline"):
        open_writers(tiny_job(logging={"wandb": "online"}), tmp_path, 0)


@has_wandb
def test_wandb_that_cannot_be_reached_is_logged_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere(monkeypatch, tmp_path, key="0" * 40)
    monkeypatch.setattr("trainer.telemetry.wandb_writer.WAIT_S", 1.0)
    log_events(tiny_job(logging={"wandb": "online"}), tmp_path, [{"step": 1, "loss": 2.5}])
    assert "W&B cannot be reached" in caplog.text
    (run,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert [row["train/loss"] for row in history(run)] == [2.5]


def nowhere(monkeypatch: pytest.MonkeyPatch, home: Path, key: str) -> None:
    """A server that refuses connections, and a home folder without a login."""
    monkeypatch.setenv("WANDB_BASE_URL", nobody())
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_API_KEY", key)


def history(path: Path) -> list[dict[str, Any]]:
    """The logged rows of a W&B file, without those that it adds itself."""
    rows = [record.history.item for record in records(path) if record.history.item]
    named = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows
    ]
    return [{name: row[name] for name in row if not name.startswith("_")} for row in named]


def records(path: Path) -> Iterator[Any]:
    """Reads a file of W&B, which has the format of LevelDB's log.

    It consists of blocks of 32 KiB; each piece has its checksum, length and kind before it.
    """
    Record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record

    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(whole)
            whole = b""


def test_mlflow_has_one_run_with_the_job_for_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's client, and in place of a server its store in files; a second start fails."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    job = mlflow_job(store, experiment="digits").model_copy(update={"env": {"HF_TOKEN": "a-secret"}})
    log_events(job, tmp_path, [{"step": 1, "loss": 2.5}, {"step": 1, "zero_shot_top1": 0.5}])
    client, name = mlflow.MlflowClient(store), (tmp_path / "mlflow-run").read_text().strip()
    assert client.get_run(name).info.status == "FINISHED"
    second = Telemetry(tmp_path / "metrics.jsonl", 10, 1, open_writers(job, tmp_path, 1))
    with suppress(ValueError), second:
        second.event({"step": 2, "loss": 2.0, "bad": float("nan")})
        second.show(2, _pictures(tmp_path))
        raise ValueError
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (name, "tiny", "FAILED")
    files = {file.path for file in client.list_artifacts(name, "eval")}
    assert files == {"eval/pictures.png", "eval/nearest_texts-00000002.md"}
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in losses] == [(1, 2.5), (2, 2.0)]
    assert run.data.metrics.keys() == {"train/loss", "eval/zero_shot_top1", "health/generation"}
    assert run.data.params["optim.global_batch_size"] == "16"
    assert not any("secret" in value for value in run.data.params.values())


def test_a_server_of_mlflow_that_is_gone_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = nobody()
    # The error has the address of the request: a number in it is not the server's answer.
    job = tiny_job(logging={"tensorboard": False, "mlflow": address, "mlflow_experiment": "run-403"})
    log_events(job, tmp_path, [{"step": 1, "loss": 2.5}])
    assert "MLflow cannot be reached" in caplog.text
    assert not (tmp_path / "mlflow-run").exists()


def test_a_server_of_mlflow_that_denies_access_is_bad_input(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with webhook() as service:
        service.status = 403
        job = tiny_job(logging={"tensorboard": False, "mlflow": service.address})
        with pytest.raises(InputError, match=r"MLFLOW_TRACKING_TOKEN.*logging\.mlflow=off"):
            open_writers(job, tmp_path, 0)


def mlflow_job(store: str, experiment: str = "clipship") -> Job:
    job = tiny_job(logging={"tensorboard": False, "mlflow_experiment": experiment, "mlflow": "http://x"})
    return job.model_copy(update={"logging": job.logging.model_copy(update={"mlflow": store})})


def test_swanlab_offline_has_what_metrics_jsonl_has(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    settings = {"tensorboard": False, "swanlab": "offline", "swanlab_project": "digits"}
    job = tiny_job(logging=settings).model_copy(update={"env": {"HF_TOKEN": "a-secret"}})
    with Telemetry(None, 10, 0, open_writers(job, tmp_path, 0)) as telemetry:
        telemetry.event({"step": 1, "loss": 2.5})
        telemetry.event({"step": 2, "loss": 2.0, "zero_shot_top1": 0.5})
        telemetry.show(2, _pictures(tmp_path))
    (file,) = (tmp_path / "swanlab").glob("run-*/*.swanlab")
    found = list(swanlab_records(file))
    starts = [record.start for record in found if record.WhichOneof("record_type") == "start"]
    name = (tmp_path / "swanlab-id").read_text().strip()
    assert [(start.project, start.name, start.id) for start in starts] == [("digits", "tiny", name)]
    scalars = [record.scalar for record in found if record.WhichOneof("record_type") == "scalar"]
    assert [(each.step, each.key, each.value.number) for each in scalars] == [
        (1, "train/loss", 2.5),
        (1, "health/generation", 1),
        (2, "train/loss", 2.0),
        (2, "eval/zero_shot_top1", 0.5),
        (2, "health/generation", 1),
    ]
    media = [record.media.key for record in found if record.WhichOneof("record_type") == "media"]
    assert media == ["eval/pictures", "eval/nearest_texts"]
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"a-secret" not in files
    assert sys.executable.encode() not in files, "it does not tell how the run was started"


def test_swanlab_without_a_key_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"SwanLab: .*SWANLAB_API_KEY.*logging\.swanlab=offline"):
        open_writers(tiny_job(logging={"tensorboard": False, "swanlab": "online"}), tmp_path, 0)


def test_swanlab_that_cannot_be_reached_is_logged_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own attempts take 8 seconds, so they are left out."""
    swanlab = pytest.importorskip("swanlab")
    begin = swanlab.init

    def init(mode: str, **arguments: Any) -> Any:
        if mode == "online":
            raise RuntimeError("Failed to initialize the SwanLab client.")
        return begin(mode=mode, **arguments)

    monkeypatch.setattr(swanlab, "init", init)
    job = tiny_job(logging={"tensorboard": False, "swanlab": "online"})
    log_events(job, tmp_path, [{"step": 1, "loss": 2.5}])
    assert "SwanLab cannot be reached" in caplog.text
    assert len(list((tmp_path / "swanlab").glob("run-*/*.swanlab"))) == 1


def test_swanlab_that_never_takes_the_end_of_a_run_keeps_it_no_longer_than_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swanlab = pytest.importorskip("swanlab")
    monkeypatch.setattr("trainer.telemetry.swanlab_writer.WAIT_S", 0.1)
    interrupt = signal.getsignal(signal.SIGINT)
    job = tiny_job(logging={"tensorboard": False, "swanlab": "offline"})
    (writer,) = open_writers(job, tmp_path, 0)
    assert signal.getsignal(signal.SIGINT) is interrupt, "the rank's own signals stay its own"
    answers, finish = threading.Event(), swanlab.Run.finish
    monkeypatch.setattr(swanlab.Run, "finish", lambda run: answers.wait(60) and finish(run))
    writer.close(None)
    log_events(job, tmp_path, [{"step": 2, "loss": 2.0}])
    answers.set()
    while swanlab.has_run():
        time.sleep(0.01)
    assert "it gets nothing of this one" in caplog.text
    assert (
        f"did not get all of this start in 0 s; `swanlab sync` uploads what is in {tmp_path}" in caplog.text
    )


def swanlab_records(path: Path) -> Iterator[Any]:
    """Reads a file of SwanLab as `swanlab sync` does."""
    Record = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2").Record
    reader = importlib.import_module("swanlab.sdk.internal.core_python.store").DataStoreReader()
    reader.open(path)
    yield from map(Record.FromString, reader)
    reader.close()
