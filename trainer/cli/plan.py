"""The command `clipship plan`: what to expect of a run before it starts. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from trainer.cli import suggested
from trainer.cli.options import Finite, Group, json_option
from trainer.cli.output import print_json
from trainer.cli.plan_scaling import scaling
from trainer.errors import InputError
from trainer.text.table import by_topic
from trainer.text.terminal import say
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.estimate.faults import Outcome, Plan
    from trainer.plan.goodput_values import Value

_SPARES = 3
"""Numbers of spare nodes that are compared, beside none."""
_MEASURED = ("step_s", "start_s", "detect_s", "restart_s", "checkpoint_s", "write_s")
_SECONDS = Finite(min=0)
_SHARE = Finite(min=0, max=1)


@click.group(cls=Group)
def command() -> None:
    """Say what to expect of a run before it starts.

    Examples:
      clipship plan goodput --nodes 128 --mtbf-hours 5000 --checkpoint-s 2 --restart-s 60 --spares 2
      clipship plan scaling job.toml --fabric NDR --gpus 1024
    """


command.add_command(scaling)


@command.command()
@click.argument("run", metavar="[JOB or RUN]", required=False, shell_complete=suggested.runs)
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes that train, without spares.")
@click.option("--spares", type=click.IntRange(min=0), help="Spare nodes beside them.")
@click.option(
    "--min-nodes",
    type=click.IntRange(min=1),
    help="Fewest nodes with which the run goes on; without it, all of them.",
)
@click.option(
    "--mtbf-hours",
    type=Finite(min=1e-6),
    help="Mean hours between two faults of one node. [default: 5000]",
)
@click.option(
    "--node-loss-share",
    type=_SHARE,
    help="Share of the faults that take the node out of the run until it is repaired. [default: 1]",
)
@click.option("--repair-hours", type=_SECONDS, help="Hours until a lost node is back. [default: 24]")
@click.option(
    "--interval-s",
    type=Finite(min=0, min_open=True),
    help="Seconds of training between two checkpoints. [default: 1800]",
)
@click.option("--checkpoint-s", type=_SECONDS, help="Seconds that training waits at one. [default: 1]")
@click.option("--write-s", type=_SECONDS, help="Seconds until it is whole, beside training. [default: 0]")
@click.option("--detect-s", type=_SECONDS, help="Seconds from a fault to the decision. [default: 1]")
@click.option(
    "--restart-s", type=_SECONDS, help="Seconds from the decision to the first step again. [default: 60]"
)
@click.option("--start-s", type=_SECONDS, help="Seconds from the run's begin to its first step. [default: 0]")
@click.option("--step-s", type=Finite(min=0, min_open=True), help="Seconds of one step. [default: 1]")
@click.option(
    "--memory-share",
    type=_SHARE,
    help="Share of the faults after which the last step survives in memory. [default: 0]",
)
@click.option(
    "--overhead-share",
    type=_SHARE,
    help="Share of the time of training that data, evaluation and stragglers take. [default: 0]",
)
@click.option(
    "--fault-times",
    multiple=True,
    metavar="S,...",
    help="Simulate these faults instead of drawn ones: seconds since the run's begin, each alone or with "
    ":process, :node (it is lost) or :all (no state in memory is left). May be repeated.",
)
@click.option(
    "--run-s",
    type=Finite(min=0, min_open=True),
    help="Seconds to simulate with --fault-times; without it, up to a minute after the last fault.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the drawn faults.")
@json_option("Print one line of JSON instead of the table.")
def goodput(run: str | None, as_json: bool, **given: Any) -> None:
    """Simulate a run with faults: useful share of its time, best checkpoint interval, worth of spare nodes.

    Values that are not given come from RUN, where it measured them (time of a step, of a checkpoint, of a
    restart), from its JOB, or from the defaults. Faults come at random, independently of each other, from
    --seed. Useful is the time in steps that counted; work also counts the nodes that did them.

    Examples:
      clipship plan goodput --nodes 128 --checkpoint-s 2 --restart-s 60
      clipship plan goodput runs/first-run --nodes 128 --spares 2
      clipship plan goodput job.toml --fault-times 60,130:node --run-s 600 --json
    """
    from trainer.estimate.faults import expect, parse_faults, simulate

    times, run_s, seed = given.pop("fault_times"), given.pop("run_s"), given.pop("seed")
    plan, sources = _plan(run, given)
    if times:
        faults = parse_faults(times, plan)
        outcome = simulate(plan, faults, run_s or faults[-1].at + 60.0)
    elif run_s is not None:
        raise InputError(
            "--run-s says how long the faults of --fault-times are simulated: give both, or none"
        )
    else:
        if not as_json:
            say(f"simulating {many(plan.nodes, 'node')}")
        outcome = expect(plan, seed)
    result = _result(plan, outcome, seed, drawn=not times)
    if as_json:
        print_json(result)
        return
    for line in by_topic(_rows(plan, outcome, sources, result), 14):
        click.echo(line)


def _plan(run: str | None, given: Mapping[str, Any]) -> "tuple[Plan, dict[str, str]]":
    """Returns the plan, and the source of each of its values that is no default."""
    from trainer.estimate.faults import HOUR_S, Plan

    values: dict[str, Value] = {}
    if run is not None:
        from trainer.plan.goodput_values import values_of

        values = values_of(run)
    fields = {name: value.value for name, value in values.items()}
    renamed = {"mtbf_hours": ("node_mtbf_s", HOUR_S), "repair_hours": ("repair_s", HOUR_S)}
    chosen = {}
    for name, value in given.items():
        field, factor = renamed.get(name, (name, None))
        if value is not None:
            chosen[field] = value if factor is None else value * factor
    plan = Plan(**{**fields, **chosen})
    if plan.min_nodes is not None and plan.min_nodes > plan.nodes:
        raise InputError(f"--min-nodes {plan.min_nodes} is more than the {plan.nodes} nodes that train")
    sources = {name: value.source for name, value in values.items()}
    return plan, {**sources, **dict.fromkeys(chosen, "given")}


def _result(plan: "Plan", outcome: "Outcome", seed: int, *, drawn: bool) -> dict[str, Any]:
    """Returns all figures as --json prints them."""
    from trainer.estimate.faults import best_interval_s, daly_s, expect, young_s

    to_disk_s = plan.mtbf_s / (1 - plan.memory_share) if plan.memory_share < 1 else None
    result = {
        "plan": {name: value for name, value in asdict(plan).items() if value != float("inf")},
        "mtbf_s": plan.mtbf_s,
        "run_s": outcome.run_s,
        "faults": outcome.faults,
        "useful_share": round(outcome.useful_share, 5),
        "work_share": round(outcome.work_share, 5),
        "lost_share": {cause: round(lost / outcome.run_s, 5) for cause, lost in outcome.lost_s.items()},
    }
    if not drawn:
        return result
    best = best_interval_s(plan, seed)
    at_best = expect(replace(plan, interval_s=best), seed) if best is not None else None
    spares = {count: expect(replace(plan, spares=count), seed) for count in _spare_counts(plan)}
    return {
        **result,
        "seed": seed,
        "best_interval_s": best,
        "best_useful_share": None if at_best is None else round(at_best.useful_share, 5),
        "young_s": None if to_disk_s is None else young_s(plan.checkpoint_s, to_disk_s),
        "daly_s": None if to_disk_s is None else daly_s(plan.checkpoint_s, to_disk_s),
        "spares": [
            {
                "spares": count,
                "useful_share": round(found.useful_share, 5),
                "work_share": round(found.work_share, 5),
                "work_per_node": round(found.work_share * plan.nodes / (plan.nodes + count), 5),
            }
            for count, found in spares.items()
        ],
    }


def _spare_counts(plan: "Plan") -> list[int]:
    return sorted({*range(_SPARES + 1), plan.spares})


def _rows(
    plan: "Plan", outcome: "Outcome", sources: Mapping[str, str], result: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    from trainer.estimate.faults import CAUSES, HOUR_S
    from trainer.report.wording import number, percent, span

    def of(name: str) -> str:
        source = sources.get(name, "default")
        return f"{span(getattr(plan, name))} ({source})"

    fewest = f", at least {plan.min_nodes}" if plan.min_nodes is not None else ""
    yield "nodes", f"{number(plan.nodes)} and {many(plan.spares, 'spare')}{fewest}"
    if "seed" in result:
        source = sources.get("node_mtbf_s", "default")
        each = f"one in {number(plan.node_mtbf_s / HOUR_S)} h on a node ({source})"
        lost = f"{percent(plan.node_loss_share)} lose it for {number(plan.repair_s / HOUR_S)} h"
        yield "faults", f"{each}: one in {span(plan.mtbf_s)} in all; {lost}"
    else:
        yield "faults", f"{number(outcome.faults)} at given times in {span(outcome.run_s)}"
    memory = f"after {percent(plan.memory_share)} of the faults the last step survives in memory"
    yield "assumed", f"a checkpoint every {of('interval_s')}; {memory}"
    for name in _MEASURED:
        yield "", f"{name} {of(name)}"
    if plan.overhead_share:
        source = sources.get("overhead_share", "default")
        yield "", f"overhead_share {percent(plan.overhead_share)} ({source})"
    yield "useful", f"{percent(outcome.useful_share)} of the time; work {percent(outcome.work_share)}"
    for cause, lost_s in sorted(outcome.lost_s.items(), key=lambda pair: -pair[1]):
        if lost_s > 0:
            yield "lost", f"{percent(lost_s / outcome.run_s):>7}  {CAUSES[cause]}"
    if "seed" in result:
        yield "interval", _interval_text(result)
        for row in result["spares"]:
            shares = [percent(row[name]) for name in ("useful_share", "work_share", "work_per_node")]
            chosen = " (this plan)" if row["spares"] == plan.spares else ""
            text = f"useful {shares[0]}, work {shares[1]}, work per allocated node {shares[2]}{chosen}"
            yield many(row["spares"], "spare"), text


def _interval_text(result: Mapping[str, Any]) -> str:
    from trainer.report.wording import percent, span

    if result["daly_s"] is None:
        return "no fault needs a checkpoint on disk: save for the loss of all nodes, and for what comes after"
    if result["best_interval_s"] is None:
        return "a checkpoint costs nothing: save as often as it can be written"
    return (
        f"best {span(result['best_interval_s'])}: {percent(result['best_useful_share'])} "
        f"(Young {span(result['young_s'])}, Daly {span(result['daly_s'])})"
    )
