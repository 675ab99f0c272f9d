"""Lines for people about restarts: who goes on from where, and why nobody can. No torch."""

from trainer.run.exit_record import rank_name
from trainer.supervise.coordinate.generation_state import Failure
from trainer.supervise.coordinate.membership import WorldPlan
from trainer.supervise.coordinate.run_state import RunState
from trainer.text.wording import many
from trainer.world.restart_policy import Fault, GoOn


def restart_line(
    run: RunState, failure: Failure, fault: Fault, go_on: GoOn, from_step: int, world: WorldPlan
) -> str:
    """Returns the line that announces a restart."""
    where = f"go on from step {from_step}" if from_step else "start again from the beginning"
    wait = f" in {go_on.wait_s:.0f} s" if go_on.wait_s >= 1 else ""
    others = "all ranks"
    if world.size != run.membership.wanted:
        others = f"{many(world.size, 'rank')} of {run.membership.wanted}"
    bad = "".join(f"; without node {node}: {why}" for node, why in run.membership.unused(world).items())
    if failure.kind == "taken in":
        return f"clipship: {fault.cause}: {others} {where}{bad}"
    who = rank_name(fault.rank, fault.node, failure.record.generation)
    what = fault.cause if failure.kind == "unfit" else f"{who}: {fault.cause}"
    return (
        f"clipship: {what}; restart {go_on.number} of {run.limits.max_restarts}{wait}: {others} {where}{bad}"
    )


def too_few(run: RunState) -> str:
    """Returns the reason why there is no next world."""
    its = run.membership
    key = "recovery.min_nodes" if run.limits.min_nodes is not None else "without recovery.min_nodes, the run"
    return (
        f"{many(len(its.living), 'supervisor')} of {len(its.expected)} "
        f"{'is' if len(its.living) == 1 else 'are'} left, and {key} needs {many(its.fewest, 'rank')}"
    )
