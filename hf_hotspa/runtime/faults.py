"""A rank that runs out of memory inside a phase: what is known of it, as plain data and as an error.

Its peers may wait inside a tensor-parallel collective or a pipeline, and cannot be released to try again. So all ranks
end (through the mailbox), and `OutOfMemory` is what the next launch can learn from.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_hotspa.data.collator import PhaseBatch
from hf_hotspa.errors import PhaseMemoryError
from hf_hotspa.runtime.measures import peak_memory
from hf_hotspa.runtime.memory import MemoryForecast
from hf_hotspa.runtime.phase import PhaseRunner
from hf_hotspa.strategy import Strategy

_MIB = 1 << 20
_HOST_TEXTS = ("can't allocate memory", "not enough memory")
"""What torch says, in a plain `RuntimeError`, when the host has no memory left."""


@dataclass(frozen=True)
class OutOfMemory:
    """What is known of a lack of memory.

    Args:
        rank: Where it was.
        step: The mini-batch, counted from 1.
        act: What the phase did: `load`, `compute` or `return`.
        strategy: The strategy of the phase.
        pack_tokens: Tokens of the largest pack that had been begun; 0 before the first one.
        pack_sequences: Its sequences.
        predicted_bytes: What the strategy was expected to take on a rank: with `auto` all of it, else weights,
            gradients, master store and switch buffers alone.
        held_bytes: The most that this rank had held by then.
        text: What the allocator said.
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

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready plain data."""
        return asdict(self)

    def error(self, where: str) -> PhaseMemoryError:
        """The error to raise.

        Args:
            where: The mini-batch and the strategy, for the message.
        """
        pack = f"a pack of {self.pack_tokens} tokens in {self.pack_sequences} sequences"
        return PhaseMemoryError(
            f"rank {self.rank} ran out of memory in the {self.act} of strategy {self.strategy}"
            + (f" with {pack}" if self.pack_tokens else "")
            + f"; predicted {self.predicted_bytes / _MIB:,.1f} MiB, held at most {self.held_bytes / _MIB:,.1f} MiB: "
            + self.text,
            where=where,
            why="its peers wait for it inside collectives and cannot try again; the weights were not changed",
            fix="start again with resume_from_checkpoint=True: auto then makes smaller packs for this strategy; with "
            "strategies of your own, lower the tokens after @, or use more tp or pp",
        )


def memory_cause(error: BaseException) -> BaseException | None:
    """The lack of memory that an error is, or was raised from."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError | torch.OutOfMemoryError):
            return found
        if type(found) is RuntimeError and any(text in str(found) for text in _HOST_TEXTS):
            return found
        found = found.__cause__
    return None


def out_of_memory(
    failure: BaseException,
    phase: PhaseBatch,
    runner: PhaseRunner,
    step: int,
    forecast: MemoryForecast,
    predicted: Mapping[Strategy, float],
) -> OutOfMemory | None:
    """What is known of a failure that is a lack of memory; None when it is another one.

    Args:
        failure: What the phase raised on this rank.
        phase: What this rank ran.
        runner: What ran it.
        step: The mini-batch, counted from 1.
        forecast: What the engine had counted before it allocated.
        predicted: Bytes on a rank by strategy, activations included, where a memory model knows them.
    """
    cause = memory_cause(failure)
    if cause is None:
        return None
    # a last stage knows how far it came; packs come in descending cost, so the first ones are the largest
    begun = len(runner.replica.losses) + 1 if runner.replica.is_last else len(phase.micro_batches)
    packs = [] if runner.act == "load" else phase.micro_batches[:begun]
    largest = max(packs, key=lambda pack: pack.num_tokens, default=None)
    text = str(cause).strip().splitlines()[0][:300] if str(cause).strip() else "no further text"
    return OutOfMemory(
        rank=runner.mesh.rank,
        step=step,
        act=runner.act,
        strategy=str(runner.mesh.strategy),
        pack_tokens=largest.num_tokens if largest is not None else 0,
        pack_sequences=len(largest.lengths) if largest is not None else 0,
        predicted_bytes=int(predicted.get(runner.mesh.strategy, forecast.total)),
        held_bytes=peak_memory(runner.replica.device),
        text=f"{type(cause).__name__}: {text}",
    )
