"""Files that `clipship run` leaves for people: the report's page and TensorBoard's events.

A run that was killed leaves them, too.
"""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.runs import TinyRun
from trainer.cli import main as cli
from trainer.report.folder import read_run
from trainer.report.headline import status, tiles


def test_run_that_was_killed_and_went_on_shows_each_step_once(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.write(optim={"steps": 30}, checkpoint={"every_steps": 3})
    run.start_and_kill(2, at_step=5)
    assert status(read_run(run.run)).word == "not finished"
    assert cli.main(["report", str(run.run)]) == 0
    done = run.start(2)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = read_run(run.run)
    assert (status(facts).word, facts.remarks) == ("done", [])
    assert [record["step"] for record in facts.metrics.records] == list(range(1, 31))
    assert {tile.label: tile.value for tile in tiles(facts)}["steps"] == "30"
    assert facts.metrics.checkpoints[-1]["step"] == 30
    assert len(facts.environment) == 2
    events = EventAccumulator(str(run.run / "tensorboard")).Reload().Scalars("train/loss")
    assert {event.step: round(event.value, 3) for event in events} == {
        step: round(loss, 3) for step, loss in run.losses().items()
    }
    assert len(events) == 30
