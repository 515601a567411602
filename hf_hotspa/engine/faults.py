"""What ends a mini-batch, and what is raised for it: a rank's own error, a peer's, a lack of memory, numbers that are not finite.

Peers may wait inside a tensor-parallel collective or a pipeline, and cannot be released to try again. So all ranks end,
and learn why through the mailbox. Of a lack of memory `OutOfMemory` says, as plain data, what the next launch can learn from; a
file in the output directory keeps it.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from hf_hotspa.costs.json_file import read_json, write_json
from hf_hotspa.data.collator import PhaseBatch
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.engine.phase import PhaseRunner, peak_memory
from hf_hotspa.errors import HotspaConfigError, HotspaError, NonFiniteError, PhaseMemoryError, TransferError
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel.agreement import Agreement, Mailbox, hotspa_cause, lost_peer
from hf_hotspa.strategy import Bucket, Strategy

logger = logging.getLogger(__name__)

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
    failure: BaseException, phase: PhaseBatch, runner: PhaseRunner, step: int, predicted: Mapping[Strategy, float]
) -> OutOfMemory | None:
    """What is known of a failure on this rank in a mini-batch, counted from 1, that is a lack of memory; None for
    others. `predicted` are bytes on a rank by strategy, activations included, where a memory model knows."""
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

    Attributes:
        out_of_memory: What is known of a lack of memory on this rank, until it is taken away.
        predicted_bytes: What each strategy should take on a rank, where a memory model knows; for messages.
    """

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self._rank, self._mailbox = rank, mailbox
        self.out_of_memory: OutOfMemory | None = None
        self.predicted_bytes: Mapping[Strategy, float] = {}

    def phase_begins(self, phase: PhaseBatch, runner: PhaseRunner, step: int, where: str) -> None:
        """From now on failures are those of this phase; `step` is counted from 1."""
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


# -- what the next launch should know ----------------------------------------------------------------------------------

# What a run notes of a lack of memory, for the next launch: `auto` makes smaller packs for that strategy, and given buckets
# that failed before are warned of. One JSON file in the output directory.


FILE = "hotspa_out_of_memory.json"
_KIND, _VERSION = "hotspa_out_of_memory", 1
_REMEDY = f"delete {FILE}: it only says what to avoid"
_SMALLER = 0.75
"""How much smaller the packs become that failed."""


def record(folder: str | Path, shortage: OutOfMemory) -> None:
    """Adds an entry to the file. Never raises: the lack of memory is the error that counts."""
    try:
        try:
            entries = _entries(folder)
        except HotspaError:  # damaged: what is known now counts
            entries = []
        write_json(Path(folder, FILE), _KIND, _VERSION, {"entries": [*entries, asdict(shortage)]})
    except OSError as error:
        logger.warning("%s could not be written, so the next launch will not know of it: %s", FILE, error)


def note(folder: str | Path, failures: PhaseFailures) -> None:
    """Adds what is known of a lack of memory on this rank to the file, once. Never raises."""
    shortage, failures.out_of_memory = failures.out_of_memory, None
    if shortage is not None:
        record(folder, shortage)


def largest_packs(folder: str | Path) -> dict[str, int]:
    """Strategy -> the most tokens that its packs should have; 0 where its weights did not fit. Empty without a file.

    Raises:
        HotspaConfigError: the file is damaged.
    """
    most: dict[str, int] = {}
    for entry in _entries(folder):
        name, tokens = entry["strategy"], int(entry["pack_tokens"] * _SMALLER)
        most[name] = min(tokens, most.get(name, tokens))
    return most


def fewest_tokens(shortages: Iterable[Mapping[str, int]]) -> dict[Strategy, int]:
    """The answers of `largest_packs` on all ranks as one."""
    most: dict[Strategy, int] = {}
    for of_rank in shortages:
        for name, tokens in of_rank.items():
            strategy = Strategy.parse(name)
            most[strategy] = min(tokens, most.get(strategy, tokens))
    return most


def warn_of_known(folder: str | Path, buckets: Sequence[Bucket]) -> None:
    """Warns of buckets that ran out of memory before. Never raises."""
    try:
        entries = _entries(folder)
    except HotspaError as error:
        logger.warning("%s", error)
        return
    for bucket in buckets:
        failed = [e for e in entries if Strategy.parse(e["strategy"]) == bucket.strategy]
        tokens = min((entry["pack_tokens"] for entry in failed), default=None)
        if tokens is not None and bucket.capacity >= tokens:
            what = f"with a pack of {tokens} tokens" if tokens else "before its first pack"
            logger.warning(
                "%s ran out of memory in an earlier run %s (%s): lower the tokens after @, or use more tp or pp",
                bucket,
                what,
                Path(folder, FILE),
            )


def _entries(folder: str | Path) -> list[dict[str, Any]]:
    """The entries of the file, checked; none without a file."""
    path = Path(folder, FILE)
    if not path.exists():
        return []
    entries: Any = read_json(path, _KIND, _VERSION, _REMEDY).get("entries")
    good = isinstance(entries, list) and all(
        isinstance(e, dict) and isinstance(e.get("strategy"), str) and type(e.get("pack_tokens")) is int
        for e in entries
    )
    if not good or any(entry["pack_tokens"] < 0 for entry in entries):
        raise HotspaConfigError("its entries are not what a run writes", where=str(path), fix=_REMEDY)
    checked: list[dict[str, Any]] = entries
    for entry in checked:
        Strategy.parse(entry["strategy"])
    return checked


# -- numbers that are not finite ---------------------------------------------------------------------------------------

# What is said about a mini-batch whose loss or gradient is not finite: which parameter, strategy, pack and rows.
#
# The search runs after the collective that found the numbers, when nothing is in flight and the weights are unchanged.


_ROWS_SHOWN = 8
_FIX = "lower the learning rate, clip gradients, or look for broken samples in this mini-batch"
_UNCHANGED = "the weights were not changed"
_CHANGED = (
    "packs before it in this mini-batch have changed the weights already, on each stage others; go on from a checkpoint"
)


def raise_non_finite(
    plan: MiniBatchPlan,
    phases: Mapping[Strategy, PhaseRunner],
    master: MasterStore,
    agreement: Agreement,
    loss: float,
    where: str,
    is_unchanged: bool = True,
) -> NoReturn:
    """Raises the same error on every rank. Collective.

    Args:
        phases: The runners, which still know the losses of their packs.
        is_unchanged: Whether no weight has been changed by this mini-batch.

    Raises:
        NonFiniteError: naming the first parameter whose gradient is not finite, and the first pack whose loss is not.
    """
    why = _UNCHANGED if is_unchanged else _CHANGED
    places = agreement.gather([float(number) for number in _first_bad_pack(plan, phases)])
    for phase, replica, pack in places.int().tolist():
        if phase >= 0:
            where = f"{where}, {_describe(plan, phase, replica, pack)}"
            break

    def check_gradients() -> None:
        if names := master.non_finite_parameters():
            raise NonFiniteError(
                f"the gradient of {names[0]!r} is not finite ({len(names)} parameters on this rank), the loss is {loss}",
                where=where,
                why=why,
                fix=_FIX,
            )

    agreement.run(where, check_gradients)
    raise NonFiniteError(f"the loss is {loss}", where=where, why=why, fix=_FIX)


def _first_bad_pack(plan: MiniBatchPlan, phases: Mapping[Strategy, PhaseRunner]) -> tuple[int, int, int]:
    """(phase, replica, pack) of the first pack on this rank whose loss is not finite; (-1, -1, -1) without any."""
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
