"""Keeps the newest steps of a run in the memory of each node, off the training's way.

Weights and optimizer are equal on all ranks, so the ranks of a node each copy their own share of them, and
together they hold one whole step; the step before it stays until the newer one is complete.

On the CPU a rank copies between two steps, with all its threads. On a GPU it only marks the end of the step:
a thread then copies on a stream of its own, into memory that is pinned, beside the next forward and backward
pass. Parameters change in place, and only in the optimizer's step: the GPU makes that wait for the copy, the
host does not. Buffers (batch norm's statistics) change in the forward pass, so a copy of them is made on the
GPU at the mark.

What can be lost: a rank begins to overwrite step N - 1 with step N + 1 only after its optimizer's step N + 1,
for which all ranks have finished the backward pass of N + 1. On the CPU they have sealed N by then, so each
node has N or N + 1 whole, and a restart repeats at most one step. On a GPU a rank waits, in its thread, until
the ranks of its own node have sealed N; another node may be a step behind, and if all nodes that have N are
lost with their memory, a restart begins at N - 1.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.memory_layout import Layout, NamedTensor, NotKept, as_bytes, named_tensors
from trainer.checkpoint.memory_state import PartWriter
from trainer.checkpoint.state import TrainState
from trainer.comm.accelerator import is_cuda
from trainer.internals import copy_all
from trainer.world.state_parts import BUFFERS

SHARE = 0.02
"""Largest share of the steps' time that keeping them may cost."""
MEASURED = 10
"""Steps that are measured before the choice; each of them is kept."""
_LEAST_STEP_S = 1e-6
_UNKNOWN = -1e6


class Cadence:
    """Measures the cost of keeping a step and chooses every how many steps one is kept.

    Pure. All ranks choose the same number at the same step, since the ranks of a node must keep the same
    steps.
    """

    def __init__(self, every: int | None = None) -> None:
        """`every` is the choice of an earlier generation of ranks; None measures."""
        self.every = every or 1
        """A step is kept if it is a multiple of this number."""
        self.chosen = every is not None
        """True once `every` is chosen for good."""
        self._steps: list[float] = []
        self._costs: list[float] = []
        self._beside: list[float] = []

    def is_due(self, step: int) -> bool:
        """Returns whether this step is kept."""
        return step % self.every == 0

    def record(self, step_s: float, cost_s: float, waited_s: float = 0.0) -> None:
        """Records a step that was kept.

        These are its own seconds, those that keeping it added to any step, and those for which it first
        waited until the one before was complete: these are gone where steps are kept less often.
        """
        if not self.chosen and len(self._steps) < MEASURED:
            self._steps.append(step_s)
            self._costs.append(cost_s)
            self._beside.append(waited_s)

    @property
    def share(self) -> float | None:
        """Cost of keeping a step on this rank, as a share of a step's time; None until it is measured.

        The median step counts, since the first ones and single ones take longer for other reasons.
        """
        return self._in_steps(self._costs) if len(self._steps) == MEASURED else None

    @property
    def beside(self) -> float:
        """Steps that go by until a step that is kept is complete, once it is measured."""
        return 1 + self._in_steps(self._beside)

    @property
    def own_need(self) -> float:
        """Least `every` with which keeping costs no more than SHARE; far below 0 while it is measured.

        A step that is kept every n steps costs c, and waits for the one before where that takes longer than
        n steps: c + max(0, beside - n) <= SHARE * n.
        """
        if (share := self.share) is None:
            return _UNKNOWN
        return max(share / SHARE, (share + self.beside) / (1 + SHARE))

    def receive(self, total: float, ranks: int) -> bool:
        """Takes the sum of all ranks' `own_need`; returns True when it makes the choice, which is once."""
        if self.chosen or total < 0:
            return False
        self.chosen = True
        self.every = max(1, math.ceil(total / ranks - 1e-9))
        return True

    def _in_steps(self, seconds: list[float]) -> float:
        return median(seconds) / max(_LEAST_STEP_S, median(self._steps))


_PEERS_S = 10.0
"""Longest wait for the other ranks of the node; one that can keep no step must not hold up the others."""
_POLL_S = 0.001

Record = Mapping[str, object]


class MemoryKeeper:
    """Keeps one rank's share of each step that is due."""

    def __init__(
        self,
        folder: Path | None,
        start: str,
        train: TrainState,
        part: int,
        parts: int,
        *,
        first_buffer: int = 0,
        every: int | None = None,
        run: Mapping[str, Any] | None = None,
        failed: Callable[[str], None] = lambda reason: None,
        chosen: Callable[[Cadence], None] = lambda cadence: None,
    ) -> None:
        """`part` of `parts` is this rank among those of its node; `first_buffer` may be overwritten first.

        Without a folder this rank keeps nothing. `every` is the cadence of an earlier generation. `run` says
        what the run is, for those who go on from its steps. `failed`
        hears once why no step can be kept any more, and the training goes on; `chosen` hears the cadence.
        """
        self.cadence = Cadence(every)
        self._folder, self._start, self._train, self._chosen = folder, start, train, chosen
        self._part, self._parts, self._buffer = part, parts, first_buffer
        self._failed, self._run = failed, run
        self._gone = folder is None
        self._tensors: list[NamedTensor] = []
        self._states = -1
        self._writer: PartWriter | None = None
        self._copy: _SyncCopy | _AsyncCopy | None = None
        self._waited_s = 0.0
        self._step_at: float | None = None
        self._hook = train.optimizer.register_step_pre_hook(lambda *_: self.before_change())

    @property
    def bytes(self) -> int:
        """Bytes of the state in each of the two buffers of the node; 0 before the first step is kept."""
        return self._writer.layout.size if self._writer else 0

    @property
    def own_need(self) -> float:
        """This rank's number in the sum that `receive` takes."""
        return 1.0 if self._gone else self.cadence.own_need

    def receive(self, total: float, ranks: int) -> None:
        """Takes the sum of all ranks' `own_need`, the same on all of them, a step later."""
        if self.cadence.receive(total, ranks) and not self._gone:  # else it has measured nothing
            self._chosen(self.cadence)

    def keep(
        self,
        step: int,
        record: "Future[Record] | None",
        skipped: Mapping[str, int] | None = None,
        skipped_before: Mapping[str, int] | None = None,
    ) -> None:
        """Keeps this step, after its update, if it is due; `record` is its line of metrics.jsonl.

        `skipped` counts by cause the samples that this rank has skipped until now, `skipped_before` those of
        all ranks before them.

        The line is empty for a step that is not logged. On the CPU it is there already. On a GPU it comes a
        step later, when the gradient is known to be finite, and the step is complete only then. So no step is
        ever restored without its record, or if its gradient ended the run. Every rank of the node calls it
        after each step.
        """
        began = time.perf_counter()
        step_s = None if self._step_at is None else began - self._step_at
        self._step_at = began
        if self._gone or not self.cadence.is_due(step):
            return
        fresh = self._writer is None
        try:
            self._begin(step, record, {"own": dict(skipped or {}), "before": dict(skipped_before or {})})
        except (OSError, NotKept) as error:
            self._give_up(str(error))
            return
        self._step_at = time.perf_counter()
        if step_s is not None and not fresh and self._copy is not None:
            stalled_s = max(0.0, self._copy.copy_s - step_s)  # of the GPU, which waits with its next update
            cost_s = self._step_at - began - self._copy.settled_s + self._waited_s + stalled_s
            self.cadence.record(step_s, cost_s, self._copy.settled_s)
        self._waited_s = 0.0

    def before_change(self) -> None:
        """Makes the next change of the parameters wait for a copy that still reads them."""
        if self._copy is not None:
            began = time.perf_counter()
            self._copy.before_update()
            self._waited_s += time.perf_counter() - began

    def close(self) -> None:
        """Waits until the last step is complete. Not collective."""
        self._hook.remove()
        if self._copy is not None:
            self._copy.close()

    def _begin(self, step: int, record: "Future[Record] | None", skipped: Mapping[str, Any]) -> None:
        if self._states != len(self._train.optimizer.state):
            self._lay_out()
        assert self._copy is not None
        every = self.cadence.every if self.cadence.chosen else 0

        def about() -> Mapping[str, Any]:
            values = None if record is None else dict(record.result())
            return {"record": values or None, "every": every, "skipped": skipped}

        self._copy.start(self._buffer, step, about)
        self._buffer = (self._buffer + 1) % BUFFERS

    def _lay_out(self) -> None:
        """Finds the tensors of the state and takes the memory for them: at the first step that is kept."""
        if self._copy is not None:
            self._copy.close()
        self._tensors = named_tensors(self._train)
        self._states = len(self._train.optimizer.state)
        layout = Layout.of(self._tensors, self._run)
        assert self._folder is not None
        self._writer = PartWriter(self._folder, self._start, layout, self._part, self._parts)
        device = self._tensors[0].tensor.device
        self._copy = (
            _AsyncCopy(self._writer, self._tensors, self._train, device)
            if is_cuda(device)  # another accelerator cannot pin the memory that ranks share
            else _SyncCopy(self._writer, self._tensors)
        )

    def _give_up(self, reason: str) -> None:
        self._gone = True
        self._failed(reason)


_About = Callable[[], Mapping[str, Any]]
"""Function that gives the small values of a step; it may wait for them."""


class _SyncCopy:
    """Copies on the CPU, at once."""

    copy_s = 0.0
    """Seconds of the last copy beside the training."""
    settled_s = 0.0
    """Seconds for which the last copy waited until the one before was complete."""

    def __init__(self, writer: PartWriter, tensors: list[NamedTensor]) -> None:
        self._writer = writer
        self._sources = _sources(writer, [tensor for *_, tensor in tensors])
        self._targets = [_targets(writer, row) for row in writer.rows]

    def start(self, buffer: int, step: int, about: _About) -> None:
        self._writer.open_buffer(buffer)
        if self._sources:
            copy_all(self._targets[buffer], self._sources)
        self._writer.seal(buffer, step, about())

    def before_update(self) -> None:
        """Does nothing: the copy is complete."""

    def close(self) -> None:
        """Does nothing: the copy is complete."""


class _AsyncCopy:
    """Copies from a GPU in a thread and on a stream of its own, into pinned memory."""

    def __init__(
        self, writer: PartWriter, tensors: list[NamedTensor], train: TrainState, device: torch.device
    ) -> None:
        """Raises NotKept if the memory cannot be pinned."""
        self.copy_s = self.settled_s = 0.0
        self._writer, self._device = writer, device
        for row in writer.rows:
            _pin(row)
        changed = {buffer.data_ptr() for buffer in train.model.buffers()}
        self._volatile = [tensor for *_, tensor in tensors if tensor.data_ptr() in changed]
        self._copies = [torch.empty_like(tensor) for tensor in self._volatile]
        replaced = {
            tensor.data_ptr(): copy for tensor, copy in zip(self._volatile, self._copies, strict=True)
        }
        stable = [replaced.get(tensor.data_ptr(), tensor) for *_, tensor in tensors]
        self._sources = _sources(writer, stable)
        self._targets = [_targets(writer, row) for row in writer.rows]
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()
        self._issued, self._sealed = threading.Event(), threading.Event()
        self._issued.set()
        self._sealed.set()
        self._last_step = 0
        self._error: BaseException | None = None
        self._work: queue.SimpleQueue[tuple[int, int, _About, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="state in memory", daemon=True)
        self._thread.start()

    def start(self, buffer: int, step: int, about: _About) -> None:
        self._settle()
        if self._copies:
            copy_all(self._copies, self._volatile)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        self._issued.clear()
        self._sealed.clear()
        self._work.put((buffer, step, about, done))

    def before_update(self) -> None:
        """Lets the GPU, not the host, wait for the copy."""
        self._issued.wait()
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        for row in self._writer.rows:
            if row.numel():
                torch.cuda.cudart().cudaHostUnregister(row.data_ptr())

    def _settle(self) -> None:
        began = time.perf_counter()
        self._sealed.wait()
        self.settled_s = time.perf_counter() - began
        if self._error is not None:
            raise NotKept(f"{type(self._error).__name__}: {self._error}") from self._error

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while (work := self._work.get()) is not None:
            try:
                self._copy(*work)
            except Exception as error:  # the next step's `start` gives it to the training thread
                self._error = error
            finally:
                self._issued.set()
                self._sealed.set()

    def _copy(self, buffer: int, step: int, about: _About, done: torch.cuda.Event) -> None:
        self._wait_for_others()
        self._writer.open_buffer(buffer)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(done)
            if self._sources:
                copy_all(self._targets[buffer], self._sources, non_blocking=True)
            self._copied.record(self._stream)
        self._issued.set()
        began = time.perf_counter()
        while not self._copied.query():
            time.sleep(_POLL_S)
        self.copy_s = time.perf_counter() - began
        self._writer.seal(buffer, step, about())
        self._last_step = step

    def _wait_for_others(self) -> None:
        """Waits until the node's ranks have completed the last step: the one before is overwritten now."""
        deadline = time.monotonic() + _PEERS_S
        while self._last_step and not self._writer.others_have(self._last_step):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)


def _sources(writer: PartWriter, tensors: list[Tensor]) -> list[Tensor]:
    pieces = writer.layout.pieces(writer.begin, writer.end)
    return [as_bytes(tensors[piece.entry])[piece.begin : piece.end] for piece in pieces]


def _targets(writer: PartWriter, row: Tensor) -> list[Tensor]:
    pieces = writer.layout.pieces(writer.begin, writer.end)
    ends = ((piece.offset - writer.begin, piece.end - piece.begin) for piece in pieces)
    return [row[offset : offset + size] for offset, size in ends]


def _pin(row: Tensor) -> None:
    """Pins the memory of a row, so that a GPU copies into it beside its other work. Raises NotKept."""
    if not row.numel():
        return
    try:
        code = int(torch.cuda.cudart().cudaHostRegister(row.data_ptr(), row.nbytes, 0))
    except RuntimeError as error:
        raise NotKept(f"the memory cannot be pinned: {error}") from None
    if code:
        raise NotKept(f"the memory cannot be pinned: CUDA error {code}")
