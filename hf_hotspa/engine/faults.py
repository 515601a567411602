"""What ends a mini-batch, and its errors: a rank's own error, a peer's error, out of memory, non-finite numbers.

Peers may wait inside a tensor-parallel collective or a pipeline, and cannot be released to try again. So all ranks end,
and learn the reason through the mailbox.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from hf_hotspa.data.collator import PhaseBatch
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.phase import PhaseRunner, peak_memory
from hf_hotspa.errors import (
    FIX_OF_NON_FINITE,
    NonFiniteError,
    PhaseMemoryError,
    TransferError,
)
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel.agreement import Agreement, Mailbox, hotspa_cause, lost_peer
from hf_hotspa.strategy import Strategy
from hf_hotspa.typed import Count

_MIB = 1 << 20
_HOST_TEXTS = ("can't allocate memory", "not enough memory")
"""What torch reports, in a plain `RuntimeError`, when host memory runs out."""


@dataclass(frozen=True)
class OutOfMemory:
    """Facts about running out of memory, as plain data."""

    rank: int
    step: int  # the mini-batch, counted from 1
    act: str  # the phase's act: `load`, `compute` or `return`
    strategy: str
    pack_tokens: Count  # tokens of the largest pack begun; 0 before the first one
    pack_sequences: int
    predicted_bytes: int  # of the strategy on a rank
    held_bytes: int  # this rank's peak memory so far
    text: str  # the allocator's message
    # whether the prediction includes activations and optimizer states, as with `auto`, and not only weights, gradients,
    # master store and switch buffers
    is_whole: bool = False

    def error(self, where: str) -> PhaseMemoryError:
        pack = f"a pack of {self.pack_tokens} tokens in {self.pack_sequences} sequences"
        return PhaseMemoryError(
            f"rank {self.rank} ran out of memory in the {self.act} of strategy {self.strategy}"
            + (f" with {pack}" if self.pack_tokens else "")
            + f"; predicted {self.predicted_bytes / _MIB:,.1f} MiB{'' if self.is_whole else ' before activations'}, held at most {self.held_bytes / _MIB:,.1f} MiB: "
            + self.text,
            where=where,
            why="its peers wait for it inside collectives and cannot try again",
            fix="start again with resume_from_checkpoint=True: auto then makes smaller packs for this strategy; with "
            "custom strategies, lower the tokens after @, or use more tp or pp",
        )


def memory_cause(error: BaseException) -> BaseException | None:
    """The out-of-memory error that an error is, or was raised from, if any."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError | torch.OutOfMemoryError):
            return cause
        if type(cause) is RuntimeError and any(text in str(cause) for text in _HOST_TEXTS):
            return cause
        cause = cause.__cause__
    return None


def out_of_memory(
    failure: BaseException, phase: PhaseBatch, runner: PhaseRunner, step: int, predicted: Mapping[Strategy, float]
) -> OutOfMemory | None:
    """Facts about a failure of this rank in a mini-batch, counted from 1, if it ran out of memory. `predicted` are
    bytes on a rank by strategy, including activations, for strategies that a memory model covers."""
    cause = memory_cause(failure)
    if cause is None:
        return None
    act = runner.act
    if act != "return" and isinstance(hotspa_cause(failure), TransferError):
        act = runner.overlapped_act  # in the switch thread, before or beside the computation
    # only a rank with just the last stage knows how far it came: packs not begun are not to blame
    knows = runner.replica.is_last and len(runner.parts) == 1
    begun = len(runner.replica.losses) + 1 if knows else len(phase.micro_batches)
    packs = [] if runner.act == "load" else phase.micro_batches[:begun]
    largest = max(packs, key=lambda pack: pack.num_tokens, default=None)
    text = str(cause).strip().splitlines()[0][:300] if str(cause).strip() else "no further text"
    return OutOfMemory(
        rank=runner.mesh.rank,
        step=step,
        act=act,
        strategy=str(runner.mesh.strategy),
        pack_tokens=largest.num_tokens if largest is not None else 0,
        pack_sequences=len(largest.lengths) if largest is not None else 0,
        predicted_bytes=int(predicted.get(runner.mesh.strategy, runner.forecast.total)),
        held_bytes=peak_memory(runner.replica.device),
        text=f"{type(cause).__name__}: {text}",
        is_whole=runner.mesh.strategy in predicted,
    )


class PhaseFailures:
    """Explains the failures of phases, on the main thread and in the switch thread."""

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self._rank, self.mailbox = rank, mailbox
        # facts about running out of memory on this rank, until the trainer notes them
        self.out_of_memory: OutOfMemory | None = None
        # by strategy, on a rank, if a memory model knows; for messages
        self.predicted_bytes: Mapping[Strategy, float] = {}

    def phase_begins(self, phase: PhaseBatch, runner: PhaseRunner, step: int, where: str) -> None:
        """Attributes later failures to this phase; `step` is counted from 1."""
        self._now = phase, runner, step, where

    def explain(self, failure: Exception) -> Exception:
        """What to raise for a failure of the current phase: the failure, or the peer's error that caused it.

        Also leaves the error for the other ranks. A switch beside the computation reports failures from its own thread:
        the computation may wait for it for a long time.
        """
        phase, runner, step, where = self._now
        place = f"{where}, strategy {runner.mesh.strategy}"
        shortage = out_of_memory(failure, phase, runner, step, self.predicted_bytes)
        if shortage is not None:
            self.out_of_memory = self.out_of_memory or shortage  # the other thread may have noted it first
            return self.mailbox.explain(self.out_of_memory.error(place), place)
        return self.mailbox.explain(hotspa_cause(failure) or lost_peer(failure, self._rank, place) or failure, place)


# -- numbers that are not finite ---------------------------------------------------------------------------------------

# Errors for a non-finite loss or gradient: parameter, strategy, pack and rows.
#
# The search runs after the collective that reported the numbers: nothing is in flight, and the weights are unchanged.


_ROWS_SHOWN = 8
_UNCHANGED = "the weights were not changed"
_CHANGED = "earlier packs of this mini-batch have already changed the weights, different ones on each stage; resume from a checkpoint"


def raise_non_finite(
    plan: MiniBatchPlan,
    phases: Mapping[Strategy, PhaseRunner],  # the runners, with the losses of their packs
    master: MasterStore,
    agreement: Agreement,
    loss: float,
    where: str,
    is_unchanged: bool = True,  # whether this mini-batch has changed no weight
) -> NoReturn:
    """Raises the same error on every rank. Collective. Raises `NonFiniteError`: naming the first parameter with a
    non-finite gradient, the first pack with a non-finite loss."""
    why = _UNCHANGED if is_unchanged else _CHANGED
    places = agreement.gather([float(number) for number in _first_bad_pack(plan, phases)])
    for phase, replica, pack in places.int().tolist():
        if phase >= 0:
            where = f"{where}, {_describe(plan, phase, replica, pack)}"
            break

    def check_gradients() -> None:
        refuse_non_finite(master.non_finite_parameters(), where, why, f", the loss is {loss}")

    agreement.run(where, check_gradients)
    raise NonFiniteError(f"the loss is {loss}", where=where, why=why, fix=FIX_OF_NON_FINITE)


def refuse_non_finite(names: Sequence[str], where: str, why: str = _UNCHANGED, more: str = "") -> None:
    """Raises `NonFiniteError` if there are parameters with a non-finite gradient, naming the first."""
    if names:
        what = f"the gradient of {names[0]!r} is not finite ({len(names)} parameters on this rank){more}"
        raise NonFiniteError(what, where=where, why=why, fix=FIX_OF_NON_FINITE)


def _first_bad_pack(plan: MiniBatchPlan, phases: Mapping[Strategy, PhaseRunner]) -> tuple[int, int, int]:
    """(phase, replica, pack) of this rank's first pack with a non-finite loss; (-1, -1, -1) if none."""
    for index, phase in enumerate(plan.phases):
        runner = phases[phase.bucket.strategy]
        for pack, loss in enumerate(runner.replica.losses):
            if not torch.isfinite(loss):
                return index, runner.mesh.coord.dp, pack
    return -1, -1, -1


def _describe(plan: MiniBatchPlan, phase: int, replica: int, pack: int) -> str:
    packs = plan.phases[phase].replicas[replica]
    rows = list(dict.fromkeys(sequence.row for sequence in packs[pack].sequences))
    shown = ", ".join(map(str, rows[:_ROWS_SHOWN])) + (", ..." if len(rows) > _ROWS_SHOWN else "")
    strategy = plan.phases[phase].bucket.strategy
    return f"strategy {strategy}, replica {replica}, pack {pack + 1} of {len(packs)} (dataset rows {shown})"
