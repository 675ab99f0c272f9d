"""A run with a moving average of its weights and a mixture with its first ones, which is killed and goes on.

What it saves, measures and leaves for people is that of a run which nobody disturbed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.jobs import VIT, tiny_job
from tests.support.pictures import digit
from tests.support.report_pages import charts, shown, table, tiles
from tests.support.runs import TinyRun, clipship
from trainer.data.pack import PackedSample, write_shards
from trainer.model.build import untrained

SHARE, STEPS = 0.4, 30


def digits() -> Iterator[PackedSample]:
    for number in range(24):
        png, label = digit(number)
        yield f"{number:02d}", {"png": png, "txt": f"{label} {number}".encode()}


@dataclass(frozen=True)
class Pair:
    """The same job twice."""

    whole: TinyRun
    killed: TinyRun
    shard: Path

    def weights(self, run: TinyRun, file: str = "model.pt") -> dict[str, torch.Tensor]:
        place = run.run / "checkpoints" / f"step-{STEPS:08d}" / file
        found: dict[str, torch.Tensor] = torch.load(place, weights_only=True)
        return found

    def measured(self, weights: dict[str, torch.Tensor]) -> dict[str, float]:
        """Metrics that `clipship eval` prints of them."""
        torch.save(weights, self.shard.with_name("by-hand.pt"))
        words = (self.shard.with_name("by-hand.pt"), "--model", VIT, "--data", self.shard)
        done = clipship("eval", *words, "--json")
        return {name: value for name, value in json.loads(done.stdout).items() if "retrieval_" in name}


@pytest.fixture(scope="module", params=["torch", pytest.param("fsdp", marks=pytest.mark.full)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    [shard] = write_shards(digits(), folder, 24)
    first = untrained(tiny_job().model_copy(update={"seed": 5})).model.state_dict()
    torch.save(first, folder / "first.pt")
    runs = TinyRun(folder, "whole"), TinyRun(folder, "killed")
    for run in runs:
        run.write(
            model={"init": str(folder / "first.pt")},
            optim={"steps": STEPS, "lr": 1e-2, "ema_decay": 0.97, "ema_from_step": 2, "anchor": 2.0},
            comm={"backend": request.param, "deterministic": request.param == "torch"},
            checkpoint={"every_steps": 3},
            eval={"retrieval": [str(folder / shard)], "batch_size": 4, "mix": SHARE},
        )
    whole, killed = runs
    done = whole.start(2)
    assert (done.returncode, done.stdout.count("(EMA)"), done.stdout.count("(mixture)")) == (0, 2, 2), done
    killed.start_and_kill(2, at_step=8)
    assert ">not finished</span>" in shown(killed.run)
    done = killed.start(2)
    return Pair(whole, killed, folder / shard)


@pytest.mark.parametrize("file", ["model.pt", "ema.pt"])
def test_weights_and_their_average_go_on_after_a_kill_to_the_last_bit(pair: Pair, file: str) -> None:
    expected, found = pair.weights(pair.whole, file), pair.weights(pair.killed, file)
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


def test_the_average_and_the_mixture_are_measured_as_the_files_are_by_hand(pair: Pair) -> None:
    weights, first = pair.weights(pair.killed), torch.load(pair.shard.with_name("first.pt"))
    mixed = {name: torch.lerp(first[name], value, SHARE) for name, value in weights.items()}
    result, plain = pair.killed.result(), pair.measured(weights)
    assert {name: result[name] for name in plain} == plain
    for prefix, other in (("ema_", pair.weights(pair.killed, "ema.pt")), ("mix_", mixed)):
        expected = pair.measured(other)
        assert {name: result[f"{prefix}{name}"] for name in expected} == expected != plain


def test_a_run_that_was_killed_and_went_on_shows_each_step_once(pair: Pair) -> None:
    """In its report's page and TensorBoard's events."""
    page = shown(pair.killed.run)
    assert ">done</span>" in page
    assert "<h2>Note</h2>" not in page
    assert charts(page)["Loss"].hover["head"] == [f"step {step}" for step in range(1, STEPS + 1)]
    assert tiles(page)["steps"][0] == str(STEPS)
    assert str(STEPS) in {step for step, *_ in table(page, "checkpoints")}
    assert len(json.loads((pair.killed.run / "environment.json").read_text())) == 2
    events = EventAccumulator(str(pair.killed.run / "tensorboard")).Reload().Scalars("train/loss")
    assert len(events) == STEPS
    assert {event.step: round(event.value, 3) for event in events} == {
        step: round(loss, 3) for step, loss in pair.killed.losses().items()
    }
