"""What ends a phase on this rank, and what is raised for it: its own error, a peer's, or a lack of memory.

Peers may wait inside a tensor-parallel collective or a pipeline, and cannot be released to try again. So all ranks end,
and learn why through the mailbox. Of a lack of memory `OutOfMemory` says, as plain data, what the next launch can learn
from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_hotspa.data.collator import PhaseBatch
from hf_hotspa.engine.phase import PhaseRunner, peak_memory
from hf_hotspa.errors import PhaseMemoryError, TransferError
from hf_hotspa.parallel.agreement import Mailbox, hotspa_cause, lost_peer
from hf_hotspa.strategy import Strategy

_MIB = 1 << 20
_HOST_TEXTS = ("can't allocate memory", "not enough memory")
"""What torch says, in a plain `RuntimeError`, when the host has no memory left."""


@dataclass(frozen=True)
class OutOfMemory:
    """What is known of a lack of memory.

    Args:
        step: The mini-batch, counted from 1.
        act: What the phase did: `load`, `compute` or `return`.
        pack_tokens: Tokens of the largest pack that had been begun; 0 before the first one.
        predicted_bytes: What the strategy was expected to take on a rank.
        held_bytes: The most that this rank had held by then.
        text: What the allocator said.
        is_whole: The prediction counts activations and optimizer states too, as with `auto`; else weights, gradients,
            master store and switch buffers alone.
    """

    rank: int
    step: int
    act: str
    strategy: str
    pack_tokens: int
    pack_sequences: int
    predicted_bytes: int
    held_bytes: int
    text: str
    is_whole: bool = False

    def error(self, where: str) -> PhaseMemoryError:
        """The error to raise."""
        pack = f"a pack of {self.pack_tokens} tokens in {self.pack_sequences} sequences"
        return PhaseMemoryError(
            f"rank {self.rank} ran out of memory in the {self.act} of strategy {self.strategy}"
            + (f" with {pack}" if self.pack_tokens else "")
            + f"; predicted {self.predicted_bytes / _MIB:,.1f} MiB{'' if self.is_whole else ' before activations'}, held at most {self.held_bytes / _MIB:,.1f} MiB: "
            + self.text,
            where=where,
            why="its peers wait for it inside collectives and cannot try again",
            fix="start again with resume_from_checkpoint=True: auto then makes smaller packs for this strategy; with "
            "strategies of your own, lower the tokens after @, or use more tp or pp",
        )


def memory_cause(error: BaseException) -> BaseException | None:
    """The lack of memory that an error is, or was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError | torch.OutOfMemoryError):
            return cause
        if type(cause) is RuntimeError and any(text in str(cause) for text in _HOST_TEXTS):
            return cause
        cause = cause.__cause__
    return None


def out_of_memory(
    failure: BaseException,
    phase: PhaseBatch,
    runner: PhaseRunner,
    step: int,
    predicted: Mapping[Strategy, float],
) -> OutOfMemory | None:
    """What is known of a failure that is a lack of memory; None when it is another one.

    Args:
        failure: What the phase raised on this rank.
        step: The mini-batch, counted from 1.
        predicted: Bytes on a rank by strategy, activations included, where a memory model knows them.
    """
    cause = memory_cause(failure)
    if cause is None:
        return None
    act = runner.act
    if act != "return" and isinstance(hotspa_cause(failure), TransferError):
        act = runner.overlapped_act  # in the thread of switches, before or beside the computation
    # a rank with the last stage alone knows how far it came: packs that it had not begun are not to blame
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
    """Explains the failures of phases, on the main thread and in the thread of switches.

    Args:
        mailbox: Where ranks leave their errors.

    Attributes:
        out_of_memory: What is known of a lack of memory on this rank, until it is taken away.
        predicted_bytes: What each strategy should take on a rank, where a memory model knows; for messages.
    """

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self._rank, self._mailbox = rank, mailbox
        self.out_of_memory: OutOfMemory | None = None
        self.predicted_bytes: Mapping[Strategy, float] = {}

    def phase_begins(self, phase: PhaseBatch, runner: PhaseRunner, step: int, where: str) -> None:
        """From now on failures are those of this phase.

        Args:
            step: The mini-batch, counted from 1.
        """
        self._now = phase, runner, step, where

    def explain(self, failure: Exception) -> Exception:
        """What to raise for a failure of the phase under way: the failure, or the error of a peer that caused it.

        The error is left for the other ranks. A switch beside the computation tells of its failure in its own thread:
        the computation may wait for it in vain for long.
        """
        phase, runner, step, where = self._now
        place = f"{where}, strategy {runner.mesh.strategy}"
        shortage = out_of_memory(failure, phase, runner, step, self.predicted_bytes)
        if shortage is not None:
            self.out_of_memory = self.out_of_memory or shortage  # the other thread may have been the first to note it
            return self._mailbox.explain(self.out_of_memory.error(place), place)
        return self._mailbox.explain(hotspa_cause(failure) or lost_peer(failure, self._rank, place) or failure, place)
