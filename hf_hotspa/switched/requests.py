"""What a caller wants of a batch, and batches that it announces before it wants something of them."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_hotspa.data.collator import MiniBatch
from hf_hotspa.errors import HotspaError, PlanMismatchError, UnsupportedError
from hf_hotspa.packing.mini_batch import MiniBatchPlan
from hf_hotspa.parallel.agreement import Agreement, rank_names
from hf_hotspa.rows.features import IGNORED_LABEL
from hf_hotspa.switched.documents import FLAT_COLUMNS, ROW_COLUMNS, Document, Documents, Exchange

Batch = Mapping[str, Tensor | None]


@dataclass(eq=False)
class Request:
    """What a caller wants of a batch.

    Args:
        batch: The tensors that say what its rows are.
        num_items: What the sum of cross entropies is divided by; None for this rank's labels.
        fields: How many of `parallel.scores.FIELDS` are wanted; 0 where a loss alone is, or nothing.
        wants_loss: Whether the caller wants the cross entropy.
        routers: Whether it wants the balance loss of the routers.
        kept: The columns of the logits that are wanted: the last so many, or an index; all for 0.
        expected: [B, L - 1] or [B, L], the gradients by the log-probabilities that will come, or multiples; or None.
        trains: Whether gradients will come.
        adapters: Whether adapters are used.
        given_items: `num_items` as it was given.
    """

    batch: Batch
    num_items: float | None
    fields: int
    wants_loss: bool
    routers: bool
    kept: Any
    expected: Tensor | None
    trains: bool
    adapters: bool
    given_items: Any = None

    @property
    def targets(self) -> dict[str, Any]:
        """The labels, and those that are shifted already, by the names of loss functions."""
        shifted = self.batch.get("shift_labels")
        return {"labels": self.batch.get("labels"), **({} if shifted is None else {"shift_labels": shifted})}

    @property
    def has_labels(self) -> bool:
        return self.batch.get("shift_labels") is not None or self.batch.get("labels") is not None

    def in_words(self, training: bool) -> str:
        """For errors where ranks want different things."""
        words = ["forward", "training mode" if training else "eval mode"]
        words.append("with gradients" if self.trains else "without gradients")
        if self.wants_loss or self.fields:
            words.append("for the loss" if self.wants_loss else f"for {self.fields} numbers of each token")
        if self.batch.get("shift_labels") is not None:
            words.append("labels shifted")
        if self.routers:
            words.append("with the balance loss of routers")
        if self.expected is not None:
            words.append("with expected seeds")
        if not self.adapters:
            words.append("without adapters")
        return ", ".join(words)


_UNREAD = frozenset({"use_cache", "return_dict", "cu_seq_lens_k", "max_length_q", "max_length_k", "past_key_values"})
"""Arguments of a forward that change nothing of what it computes in training."""


def is_unread(name: str, value: Any) -> bool:
    """Whether an argument of a forward need not be looked at, or is read as a part of the batch."""
    return value is None or value is False or name in _UNREAD or name in ("seq_idx", *FLAT_COLUMNS)


def unreadable(
    input_ids: Tensor | None, others: Mapping[str, Any], columns: Sequence[str], rank: int
) -> UnsupportedError | None:
    """What is wrong with the arguments of a forward; None for nothing.

    Args:
        others: Those that no name of its own says.
        columns: Which of them a token loss reads.
    """
    wrong = [name for name, value in others.items() if not is_unread(name, value) and name not in columns]
    if input_ids is not None and not wrong:
        return None
    return UnsupportedError(
        f"the forward of a switched model was called with {wrong}" if wrong else "a forward without input_ids",
        where=f"rank {rank}",
        why="rows are read from input_ids, attention_mask, position_ids and labels, and packed again",
        fix="leave these arguments out" if wrong else "give input_ids",
    )


def facts_of(documents: Sequence[Document], num_items: float | None) -> list[int]:
    """What a rank says of a batch: the bits of what its loss is divided by, its documents, and length and labels of each."""
    labels = [int(np.count_nonzero(document.targets != IGNORED_LABEL)) for document in documents]
    denominator = np.float64(sum(labels) if num_items is None else num_items)
    pairs = zip([len(document.ids) for document in documents], labels, strict=True)
    return [int(denominator.view(np.int64)), len(documents), *(number for pair in pairs for number in pair)]


def denominator_in(facts: NDArray[np.int64]) -> float:
    """What the loss of the batch is divided by on the rank that said so (`facts_of`)."""
    return float(facts[:1].view(np.float64)[0])


def pairs_in(facts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of `facts_of` [documents, 2]: length, and labels."""
    return facts[2:].reshape(-1, 2)


@dataclass(eq=False)
class Window:
    """Batches of one step that were announced, read and exchanged together.

    Args:
        batches: As they were announced.
        num_items: What their losses are divided by; None for each one's own labels.
        step: The number of the step.
        documents: This rank's, of each batch.
        facts: What each rank says of each batch (`facts_of`).
        of_step: The documents of all ranks, as if these batches were the whole step; None after an error.
        prepared: Their plan, and this rank's part.
        error: What this rank found wrong.
        sent_bytes: Bytes of rows that this rank has sent.
        ready: Filled in with nothing when the rest is there, or with what went wrong.
    """

    batches: Sequence[Batch]
    num_items: float | None
    step: int
    documents: list[list[Document]] = field(default_factory=list)
    facts: list[list[NDArray[np.int64]]] = field(default_factory=list)
    of_step: Documents | None = None
    prepared: tuple[MiniBatchPlan, MiniBatch] | None = None
    error: HotspaError | None = None
    sent_bytes: int = 0
    ready: Future[None] = field(default_factory=Future)

    def is_next(self, index: int, request: Request) -> bool:
        """Whether what is asked for is a batch of it, with the same denominator."""
        if self.num_items != request.num_items:
            return False
        announced = self.batches[index]
        for name in announced:
            one, other = announced.get(name), request.batch.get(name)
            if one is None or other is None:
                if one is not other:
                    return False
            elif one.shape != other.shape or not bool((one.to(other) == other).all()):
                return False
        return True


class Announcements:
    """Exchanges and plans announced batches in a thread, over a group that nothing else uses.

    Args:
        exchange: Over that group.
        read: The documents of a batch.
        prepare: The plan of the documents of a step, and this rank's part, when tokens have travelled.
        columns: What a token loss reads beside tokens.
    """

    def __init__(
        self,
        exchange: Exchange,
        read: Callable[[Batch], list[Document]],
        prepare: Callable[[Documents, int, Exchange], tuple[MiniBatchPlan, MiniBatch]],
        columns: tuple[str, ...] = (),
    ) -> None:
        self._exchange, self._read, self._plan = exchange, read, prepare
        self._columns = (*ROW_COLUMNS, *FLAT_COLUMNS, *columns)
        self._jobs: SimpleQueue[Window | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._windows: list[Window] = []
        self._is_broken = False

    def __len__(self) -> int:
        return len(self._windows)

    def add(self, batches: Sequence[Mapping[str, Any]], num_items: float | None, step: int) -> None:
        """The batches of the coming step of this number. Collective.

        Raises:
            PlanMismatchError: not all ranks have announced a step before.
        """
        if self._is_broken:
            raise PlanMismatchError(
                "a step is announced after one that not all ranks had announced",
                why="what is announced is exchanged by all ranks together, and one of them may still wait for the others",
                fix="make another SwitchedModel, or do not announce",
            )
        if self._thread is None:  # it must not keep a process alive that fails while another rank is waited for
            self._thread = Thread(target=self._work, name="hotspa-rows", daemon=True)
            self._thread.start()
        of_rows = [{name: batch.get(name) for name in self._columns} for batch in batches]
        self._windows.append(Window(of_rows, num_items, step))
        self._jobs.put(self._windows[-1])

    def first(self) -> Window:
        """The one that comes next; it may not be ready."""
        return self._windows[0]

    def remove_first(self) -> None:
        """It has come, or another batch has."""
        self._windows.pop(0)

    def close(self) -> None:
        """Ends the thread, where it waits for nobody."""
        if self._thread is not None and not self._is_broken:
            self._jobs.put(None)
            self._thread.join()

    def give_up(self) -> None:
        """Ranks have announced different numbers of steps: what was announced is not used, and nothing can be from now on."""
        self._windows.clear()
        self._is_broken = True

    def _work(self) -> None:
        while (window := self._jobs.get()) is not None:
            try:
                self._prepare(window)
                window.ready.set_result(None)
            except BaseException as failure:
                window.ready.set_exception(failure)

    def _prepare(self, window: Window) -> None:
        exchange, batches = self._exchange, window.batches
        sent_before = exchange.sent_bytes["rows"]
        try:
            window.documents = [self._read(batch) for batch in batches]
        except HotspaError as error:
            window.error, window.documents = error, [[] for _ in batches]
        said = [int(window.error is not None), len(batches)]
        said += [number for documents in window.documents for number in facts_of(documents, window.num_items)]
        arrived = exchange.facts(said)
        if any(int(part[0]) or int(part[1]) != len(batches) for part in arrived):
            return
        for index in range(len(batches)):
            window.facts.append([part[begin:end] for part in arrived for begin, end in [_place(part, index)]])
        window.of_step = Documents()
        for facts, documents in zip(window.facts, window.documents, strict=True):
            window.of_step.add([pairs_in(of_rank) for of_rank in facts], documents, exchange.rank)
        window.prepared = self._plan(window.of_step, window.step, exchange)
        window.sent_bytes = exchange.sent_bytes["rows"] - sent_before


def _place(said: NDArray[np.int64], index: int) -> tuple[int, int]:
    """Where the facts of a batch are in what a rank said of all of them."""
    begin = 2
    for _ in range(index):
        begin += 2 + 2 * int(said[begin + 1])
    return begin, begin + 2 + 2 * int(said[begin + 1])


# -- where all ranks meet ---------------------------------------------------------------------------------------------

# Before ranks do something together they say what: where that differs, all of them raise, and none waits for another.


class Meeting:
    """Where all ranks meet before a collective call.

    Args:
        was_cleared: Whether this rank's caller has cleared gradients that others may still count on.
        drop: Forgets the calls that were not flushed: on all ranks, before they raise, or where one has cleared its gradients.

    Attributes:
        num_announced: Steps that this rank has announced; None where that is over.
        sizes: What each rank said of its `size` last.
    """

    def __init__(self, agreement: Agreement, was_cleared: Callable[[], bool], drop: Callable[[], None]) -> None:
        self._agreement, self._was_cleared, self._drop = agreement, was_cleared, drop
        self.num_announced: int | None = 0
        self.sizes: list[int] = []

    def __call__(
        self, what: str, where: str, error: HotspaError | None = None, flag: bool = False, size: int = 0
    ) -> list[bool]:
        """Returns when all ranks are about to do the same. Collective.

        Args:
            what: What this rank is about to do, in words.
            error: What it found wrong.
            flag: Something that others are to know.
            size: How many numbers this rank is about to send; for `sizes`.

        Returns:
            The flag of each rank.

        Raises:
            HotspaError: on every rank: the error of the first rank that has one, or that they are about to do different things.
        """
        code = float(zlib.crc32(what.encode()))
        values = [code, error is not None, self._was_cleared(), self.num_announced or 0, flag, size]
        codes, failed, cleared, announced, flags, sizes = self._agreement.gather([float(v) for v in values]).T.tolist()
        self.sizes = [int(number) for number in sizes]
        if any(failed):  # before all else: where a rank has an error, the others may have more to do
            self._drop()
            self._agreement.check({}, error, where)
        if len(set(codes)) > 1:
            self._drop()
            raise self._different(what, where)
        if len(set(announced)) > 1:
            self._drop()
            self.num_announced = None
            raise PlanMismatchError(
                f"ranks have announced {', '.join(str(int(n)) for n in announced)} steps",
                where=where,
                why="what is announced is exchanged by all ranks together",
                fix="call announce on all ranks, or on none",
            )
        if any(cleared):
            self._drop()
        return [bool(said) for said in flags]

    def _different(self, what: str, where: str) -> PlanMismatchError:
        texts = self._agreement.texts(what)
        by_text = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
        return PlanMismatchError(
            "ranks are about to do different things: "
            + "; ".join(f"{rank_names(ranks)}: {text}" for text, ranks in by_text.items()),
            where=where,
            why="each call of a switched model is a part of what all ranks do together",
            fix="make the same calls on all ranks; `for batch in model.batches(loader)` gives batches without rows to ranks "
            "whose loaders have ended",
        )
