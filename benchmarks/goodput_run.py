"""Runs one side of `benchmarks.goodput` from its start to its last step, with faults on the way."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable

from benchmarks.goodput_faults import Fault
from benchmarks.goodput_nodes import Process
from benchmarks.goodput_sides import Side
from benchmarks.goodput_story import Moment, Seen, Story

STOPPED_S = 120.0
"""Seconds after which a stopped rank goes on by itself, where nothing notices it."""
SUPERVISOR_STOPPED_S = 30.0
"""Seconds after which a stopped supervisor goes on; the run has gone on without it by then."""
_UNTIL_NEXT_S = 5.0
_APART_S = 25.0
_SECOND_S = 2.0
_STARTS = 3
"""Starts without a new step after which a run is given up."""


class Runner:
    """Starts a side as often as it takes, follows its steps, and makes the faults."""

    def __init__(self, side: Side, faults: Iterable[Fault], limit_s: float) -> None:
        """`limit_s` is the time after which the run is given up."""
        self._side, self._faults, self._limit_s = side, iter(faults), limit_s
        self._began = time.monotonic()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self.story = Story(time.time())

    def run(self) -> Story:
        """Runs to the end; the faults begin with the first step."""
        story, over = self.story, threading.Event()
        follower = threading.Thread(target=self._follow, args=(over,), daemon=True)
        faults = threading.Thread(target=self._make_faults, args=(over,), daemon=True)
        try:
            self._start()
            follower.start()
            faults.start()
            self._until_done()
        finally:
            over.set()
            self._end()
        follower.join()
        faults.join()
        story.output = self._side.output.read_text(errors="replace")
        return story

    def _until_done(self) -> None:
        """Starts the run again whenever it has ended before its last step."""
        story = self.story
        while self._now() < self._limit_s and not story.done:
            if not self._runs():
                if self._side.is_done():
                    story.done = True
                    continue
                self._note_end()
                if self._is_hopeless():
                    break
                self._start()
            time.sleep(0.05)
        story.seconds = self._now()

    def _end(self) -> None:
        """Ends all that still runs: the launchers, and what they have started on the nodes."""
        with self._lock:
            for process in self._processes:
                if process.poll() is None:
                    process.kill()
        self._side.nodes.close()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _runs(self) -> bool:
        with self._lock:
            return any(process.poll() is None for process in self._processes)

    def _start(self) -> None:
        self.story.starts += 1
        if self.story.starts > 1:
            self._side.nodes.kill_all()
            time.sleep(1.0)
        with self._lock:
            self._processes = self._side.start()

    def _is_hopeless(self) -> bool:
        """Returns whether the last starts have all ended without a new step."""
        starts = [seen.start for seen in self.story.seen]
        return self.story.starts - max(starts, default=0) >= _STARTS

    def _note_end(self) -> None:
        """The last fault has ended the run, which is now started again."""
        story = self.story
        if story.moments:
            last = story.moments[-1]
            story.moments[-1] = Moment(last.at_s, last.kind, last.of_node, ended_run=True)
        what = story.moments[-1].kind if story.moments else "no fault"
        print(f"  {self._now():6.1f} s: the run has ended ({what}); it is started again", file=sys.stderr)

    def _follow(self, over: threading.Event) -> None:
        story, last = self.story, Seen(0.0, 0, 0, 0)
        while not over.wait(self._side.poll_s):
            generation, step = self._side.last_step()
            seen = Seen(self._now(), story.starts, generation, step)
            if step < last.step:
                story.redone.append(max(seen.step for seen in story.seen) - step)
            elif step and (seen.life, step) != (last.life, last.step):
                story.seen.append(seen)
            last = seen

    def _make_faults(self, over: threading.Event) -> None:
        while not self.story.seen and not over.wait(0.1):
            pass
        first_s = self._now()
        for fault in self._faults:
            while self._now() < first_s + fault.at_s or not self._is_well():
                if over.wait(0.05):
                    return
            known = len(self.story.moments)
            try:
                _COMMIT[fault.kind](self, fault, over)
            except (LookupError, TimeoutError) as error:
                self.story.not_made.append(f"{fault.kind}: {error}")
            for moment in self.story.moments[known:]:
                print(f"  {moment.at_s:6.1f} s: {moment.kind}", file=sys.stderr, flush=True)

    def _is_well(self) -> bool:
        """Returns whether the run has recovered from the last fault some seconds ago."""
        moments = self.story.moments
        if not moments:
            return True
        took_s = self.story.recovery_s(moments[-1])
        return took_s is not None and self._now() > moments[-1].at_s + took_s + _UNTIL_NEXT_S

    def _note(self, kind: str, *, of_node: bool = False) -> None:
        self.story.moments.append(Moment(self._now(), kind, of_node))

    def _rank(self, wanted: Callable[[int], bool], draw: float) -> Process:
        ranks = self._side.ranks()
        chosen = [rank for rank in sorted(ranks) if wanted(rank)]
        if not chosen:
            raise LookupError(f"no such rank among {sorted(ranks)}")
        return ranks[chosen[int(draw * len(chosen))]]

    def _kill(self, kind: str, wanted: Callable[[int], bool], draw: float) -> Process:
        victim = self._rank(wanted, draw)
        self._note(kind)
        victim.signal(signal.SIGKILL)
        return victim

    def kill_rank(self, fault: Fault, over: threading.Event) -> None:
        self._kill(fault.kind, lambda rank: rank > 0, fault.draw)

    def kill_rank_0(self, fault: Fault, over: threading.Event) -> None:
        self._kill(fault.kind, lambda rank: rank == 0, fault.draw)

    def stop_rank(self, fault: Fault, over: threading.Event) -> None:
        victim = self._rank(lambda rank: True, fault.draw)
        self._note(fault.kind)
        _stop(victim, STOPPED_S)

    def lose_node(self, fault: Fault, over: threading.Event) -> None:
        ranks = self._side.ranks()
        first = ranks[0].node
        others = sorted({process.node for process in ranks.values()} - {first})
        node = first if fault.kind.startswith("coordinator") else others[int(fault.draw * len(others))]
        self._note(fault.kind, of_node=True)
        self._side.nodes.lose(node, self._side.supervisor)
        with self._lock:
            self._processes += self._side.replace_node(node)

    def kill_loader(self, fault: Fault, over: threading.Event) -> None:
        ranks = sorted(self._side.ranks())
        loader = self._side.loader(ranks[int(fault.draw * len(ranks))])
        if loader is None:
            raise LookupError("no loader process was found")
        self._note(fault.kind)
        loader.signal(signal.SIGKILL)

    def kill_supervisor(self, fault: Fault, over: threading.Event) -> None:
        victim = self._supervisor(fault)
        self._note(fault.kind)
        victim.signal(signal.SIGKILL)

    def stop_supervisor(self, fault: Fault, over: threading.Event) -> None:
        victim = self._supervisor(fault)
        self._note(fault.kind)
        _stop(victim, SUPERVISOR_STOPPED_S)

    def _supervisor(self, fault: Fault) -> Process:
        others = len(self._side.ranks()) - 1
        rank = 0 if fault.kind.startswith("coordinator") else 1 + int(fault.draw * others)
        if (found := self._side.supervisor_of(rank)) is None:
            raise LookupError(f"the supervisor of rank {rank} was not found")
        return found

    def kill_in_checkpoint(self, fault: Fault, over: threading.Event) -> None:
        deadline = self._now() + 120.0
        victims = self._side.ranks()
        while not self._side.saves():
            if over.wait(0.002) or self._now() > deadline:
                raise TimeoutError("no checkpoint was written meanwhile")
        self._note(fault.kind)
        victims[int(fault.draw * len(victims))].signal(signal.SIGKILL)

    def kill_in_recovery(self, fault: Fault, over: threading.Event) -> None:
        """Kills a rank, and a rank of those that start in its stead as soon as there is one."""
        before = {process.pid for process in self._side.ranks().values()}
        self._kill(fault.kind, lambda rank: True, fault.draw)
        deadline = self._now() + 60.0
        over.wait(_SECOND_S)
        while not (new := self._fresh(before)):
            if over.wait(0.1) or self._now() > deadline:
                raise TimeoutError("the ranks did not start again")
        self._note(fault.kind)
        new[int(fault.draw * len(new))].signal(signal.SIGKILL)

    def _fresh(self, before: set[int]) -> list[Process]:
        return [process for process in self._side.ranks().values() if process.pid not in before]

    def kill_twice(self, fault: Fault, over: threading.Event) -> None:
        self._kill(fault.kind, lambda rank: True, fault.draw)
        at_s = self._now() + _APART_S
        while self._now() < at_s or not self._is_well():
            if over.wait(0.1):
                return
        self._kill(fault.kind, lambda rank: True, 1.0 - fault.draw - 1e-9)


def _stop(victim: Process, seconds: float) -> None:
    """Stops a process, which continues after so many seconds if it still lives."""
    victim.signal(signal.SIGSTOP)
    timer = threading.Timer(seconds, victim.signal, [signal.SIGCONT])
    timer.daemon = True
    timer.start()


_COMMIT: dict[str, Callable[[Runner, Fault, threading.Event], None]] = {
    "rank killed": Runner.kill_rank,
    "rank 0 killed": Runner.kill_rank_0,
    "rank stopped": Runner.stop_rank,
    "node lost": Runner.lose_node,
    "coordinator's node lost": Runner.lose_node,
    "loader process killed": Runner.kill_loader,
    "rank killed in a checkpoint": Runner.kill_in_checkpoint,
    "rank killed, another in the recovery": Runner.kill_in_recovery,
    "rank killed twice in a minute": Runner.kill_twice,
    "supervisor killed": Runner.kill_supervisor,
    "coordinator killed": Runner.kill_supervisor,
    "supervisor stopped": Runner.stop_supervisor,
}
