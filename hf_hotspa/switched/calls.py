"""Calls of the switched model and the steps that they belong to: a call's request, what the caller's autograd gets, and
the gradients that come back.

Shapes: B rows of L columns in a call's batch, with D documents; V logits of a token.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import HotspaError, PlanMismatchError, UnsupportedError
from hf_hotspa.parallel.agreement import rank_names
from hf_hotspa.parallel.head_loss import AuxiliaryLoss
from hf_hotspa.parallel.loss import TokenLoss
from hf_hotspa.rows.read_row import IGNORED_LABEL
from hf_hotspa.switched.passes import (
    FLAT_COLUMNS,
    Document,
    Documents,
    Mode,
    Passes,
    Results,
    TrainedStep,
    Upstream,
    Wanted,
    facts_of,
)
from hf_hotspa.switched.scores import WITH_ARG_MAX
from hf_hotspa.switched.tape import Comparison
from hf_hotspa.typed import reading_state

Batch = Mapping[str, Tensor | None]
Facts = Sequence[NDArray[np.int64]]  # each rank's `facts_of` of its batch


class Leaf(torch.autograd.Function):
    """Passes numbers to the caller's graph as leaves; `take` gets their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, take: Callable[..., None], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.take = take
        return tuple(map(Tensor.clone, values))  # callers change them in place (`loss *= ...`)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.take(*gradients)
        return None, None, *[None] * len(gradients)


ANCHOR = torch.zeros((), requires_grad=True)  # first argument of each `Leaf`; must require a gradient, never gets one


class LazyLogits(Tensor):
    """Logits that are computed at first use, which is collective; most callers never use them. Their arg-max, of which
    accuracies are made, needs no table of them."""

    whole: Callable[[], Tensor]  # returns them, as a plain tensor
    best: Callable[[], Tensor]  # returns their arg-max over the vocabulary

    @staticmethod
    def __new__(cls, fetch: Callable[[], Tensor], best: Callable[[], Tensor]) -> "LazyLogits":
        lazy: LazyLogits = torch.Tensor._make_subclass(cls, torch.empty(0))
        lazy.whole, lazy.best = cache(fetch), cache(best)
        return lazy

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        named = cast(dict[str, object], kwargs or {})
        is_arg_max = func in (Tensor.argmax, torch.argmax) and not named.get("keepdim")
        if is_arg_max and (args[1:] in ((-1,), (2,)) or (not args[1:] and named.get("dim") in (-1, 2))):
            return cast(LazyLogits, args[0]).best()

        def real(x: object) -> object:
            return x.whole() if isinstance(x, LazyLogits) else x

        with torch._C.DisableTorchFunctionSubclass():
            given, named = tree_map(real, (args, named))
        return func(*given, **named)


# -- requests ---------------------------------------------------------------------------------------------------------


class Asked(TypedDict, total=False):
    """Arguments of `SwitchedModel.forward` beside a batch's first ones."""

    labels: Tensor | None  # int64 [B, L], not shifted; -100 for none
    shift_labels: Tensor | None  # instead of labels, already shifted
    num_items_in_batch: float | Tensor | None  # the divisor of the sum of cross entropies; None: this batch's labels
    fused_lm_head: bool  # whether to return TRL's output
    output_router_logits: bool | None
    logits_to_keep: int | Tensor  # the number of last logit columns, or an index of columns; 0: all
    # the expected gradients by the log-probabilities, or a multiple of them, [B, L - 1] ([B, L] with shift_labels): the
    # batch is trained at once. If others come, it is trained again.
    expected_seeds: Tensor | None
    return_dict: bool | None
    # returns `Compared`: each token with a label is compared with a teacher (`Teacher.against`). Then `expected_seeds`
    # are by the divergences.
    against: Comparison | None


class Compared(NamedTuple):
    """A comparison with a teacher, [B, L - 1] each ([B, L] with shift_labels): of the distribution of the token behind."""

    divergence: Tensor  # fp32 or wider, with gradient; 0 without a label
    entropy: Tensor  # the student's, likewise
    label_mask: Tensor  # bool, whether there is a label


@dataclass(eq=False)
class Request:
    """What a caller requests for a batch."""

    batch: Batch
    num_items: float | None  # the divisor of the sum of cross entropies; None for this rank's labels
    columns: Sequence[str]  # the fields of TRL's output; none for transformers' output
    fields: int  # how many of the first `scores.FIELDS` to compute; 0 for a loss alone, or nothing
    wants_loss: bool  # whether to compute the cross entropy
    aux: bool  # whether to compute the auxiliary loss
    kept: int | Tensor  # the number of last logit columns, or an index of columns; 0: all
    expected: Tensor | None  # [B, L - 1] or [B, L], see `Asked.expected_seeds`
    trains: bool  # whether gradients will come
    training: bool
    given_items: float | Tensor | None  # `num_items` as given
    function: Callable[..., Tensor] | None  # the model object's custom loss, if it has one
    adapters: tuple[str, ...] | None = None  # the names of those that act; None in a model without any
    against: Comparison | None = None
    changes: str = ""  # earlier changes of the model object, as text
    side: Mapping[str, Any] = field(default_factory=dict)  # what `SideInputs` are made of

    @classmethod
    def of_tokens(cls, given: Mapping[str, Any], trains: bool, training: bool) -> "Request":
        """For what a model without a vocabulary's head is read by (`model.model_kind.Readout`): its labels stay here."""
        batch = {name: given.get(name) for name in ("input_ids", "attention_mask", "position_ids")}
        own = {"labels": None, "shift_labels": None, "seq_idx": None} | dict.fromkeys(FLAT_COLUMNS)
        return cls(batch | own, None, (), 0, False, False, 0, None, trains, training, None, None)

    def __str__(self) -> str:
        words = ["forward", "training mode" if self.training else "eval mode"]
        words.append("with gradients" if self.trains else "without gradients")
        if self.wants_loss or self.columns:
            words.append("for the loss" if self.wants_loss else f"for {self.fields} numbers of each token")
        if self.batch.get("shift_labels") is not None:
            words.append("labels shifted")
        if self.aux:
            words.append("with the balance loss of routers")
        if self.expected is not None:
            words.append("with expected seeds")
        if self.against is not None:
            words.append(f"compared with {self.against}")
        if self.adapters is not None:
            words.append(f"with the adapter {', '.join(self.adapters)}" if self.adapters else "without adapters")
        return ", ".join(words) + self.changes

    def error(self, rank: int) -> UnsupportedError | None:
        """An error if it is to compare tokens, and has no labels."""
        if self.batch.get("labels") is not None or self.batch.get("shift_labels") is not None:
            return None
        return UnsupportedError(
            "a forward with against and without labels",
            where=f"rank {rank}",
            why="the tokens with a label are compared",
            fix="give labels, -100 at tokens that do not count",
        )


_UNREAD = frozenset({"use_cache", "return_dict", "cu_seq_lens_k", "max_length_q", "max_length_k", "past_key_values"})
"""Arguments of a forward without effect in training."""


def is_unread(name: str, value: object) -> bool:
    """Whether an argument of a forward can be ignored, or belongs to the batch."""
    return value is None or value is False or name in _UNREAD or name in ("seq_idx", *FLAT_COLUMNS)


def unreadable(
    input_ids: Tensor | None, others: Mapping[str, object], columns: Sequence[str], rank: int
) -> UnsupportedError | None:
    """Returns an error for arguments of a forward, None if they are valid. `others`: all without a parameter of their
    name; `columns`: which of these a token loss reads."""
    wrong = [name for name, value in others.items() if not is_unread(name, value) and name not in columns]
    if input_ids is not None and not wrong:
        return None
    return UnsupportedError(
        f"the forward of a switched model was called with {wrong}" if wrong else "a forward without input_ids",
        where=f"rank {rank}",
        why="rows are read from input_ids, attention_mask, position_ids and labels, and packed again",
        fix="leave these arguments out" if wrong else "give input_ids",
    )


def labels_of_columns(labels: Tensor, num_columns: int, kept: int | Tensor) -> Tensor:
    """Labels [B, L], which may be given for the kept logits alone, as by ms-swift: the label behind each predicts it."""
    columns = torch.arange(num_columns, device=labels.device)
    places = columns[kept.to(labels.device)] if isinstance(kept, Tensor) else columns[-kept:] if kept else columns[:0]
    if labels.dim() != 2 or len(places) != labels.shape[1]:
        return labels  # an error names the shapes
    of_all = labels.new_full((len(labels), num_columns), IGNORED_LABEL)
    of_all[:, places[:-1] + 1] = labels[:, 1:]
    return of_all


def too_many_logits(shape: tuple[int, int], steps: "Steps") -> UnsupportedError | None:
    """The error for logits of more than `logit_bytes`; None for fewer."""
    passes, most = steps.passes, steps.logit_bytes
    size = math.prod(shape[:1] if passes.pools else shape) * passes.num_logits * passes.wide.itemsize
    if size <= most:
        return None
    return UnsupportedError(
        f"the logits of {shape[0]} rows of {shape[1]} tokens take {size:,} bytes, and the limit is {most:,}",
        where=f"rank {passes.engine.rank}",
        why="logits, and the gradients by them, are in host memory of the rank that has the rows",
        fix="use the loss or log-probabilities (fused_lm_head=True) instead of logits, smaller batches, or a larger "
        "logit_bytes",
    )


# -- assumed gradients ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfLoss:
    """The gradient of the model's own loss, times the number of ranks, as a Trainer computes it."""


@dataclass(frozen=True)
class EveryToken:
    """The same gradient by each log-probability of all ranks' labels, as of their sum or mean."""

    times_probability: bool = False  # that, times each token's probability, as of dynamic fine-tuning (dft)
    of_rank: bool = False  # as of the mean over the labels of a rank in a call


Assumed: TypeAlias = OfLoss | EveryToken | Tensor  # what is assumed; the tensor: [B, L - shift], by the caller


@dataclass(frozen=True)
class Multiple:
    """The actual gradients are this multiple of the assumed ones."""

    factor: float


class Odd(Enum):
    """Actual and assumed gradients without one factor between them."""

    ANY = 0  # both are zero, or there are no labels: every factor fits
    NONE = 2  # no factor fits


Fit = Multiple | Odd


# -- a call -----------------------------------------------------------------------------------------------------------


@dataclass
class Arrived:
    """The gradients that the caller's backwards have brought to a call."""

    factor: float = 0.0  # by its loss
    auxiliary: float = 0.0
    scores: Tensor | None = None  # [2, B, L], by log-probability and entropy
    logits: Tensor | None = None  # [B, L, V]
    reads_padding: bool = False  # whether one of these came at padding
    any: bool = False  # whether any backward came


class Call:
    """A call of this rank, and what all ranks know of it.

    Attributes:
        shape, device: B and L, and of the caller's tensors.
        shift: Columns that the results lack: 1, or 0 for labels that are already shifted.
        everything: The documents of all ranks; `ranges` by rank; `mine` of this one.
        denominators, labels: Each rank's divisor of its sum of cross entropies, and number of targets that count.
        places: The row and the columns of this rank's documents.
        mask: bool [B, L], the tokens whose target counts.
        results, has, head: The results so far for this rank's documents, what these are, and their divisor of logits and
            what they are compared with.
        assumed: What it was trained with at once: its loss, or fp64 [B, L] by its log-probabilities.
        own: This call's part of the engine's token loss of all ranks.
        arrived: The gradients so far.
    """

    def __init__(
        self,
        batch: Batch,
        documents: Sequence[Document],  # this rank's, in the order of `mine`
        facts: Facts,
        of: Documents,  # the documents of its step, or its own without gradients
        steps: "Steps",
        training: bool,
    ) -> None:
        ids = batch["input_ids"]
        assert ids is not None
        self.shape, self.device = (ids.shape[0], ids.shape[1]), ids.device
        self.shift = int(batch.get("shift_labels") is None)
        self.documents, self.of_step, self.version, self.training = documents, of, steps.version, training
        self.ranges = of.add(facts, documents, steps.engine.rank)
        self.mine, self.everything = self.ranges[steps.engine.rank], range(self.ranges[0].start, self.ranges[-1].stop)
        self.denominators, self.labels = list[float](), list[int]()
        for of_rank, numbers in zip(facts, self.ranges, strict=True):
            self.denominators.append(float(of_rank[:1].view(np.float64)[0]))
            self.labels.append(sum(of.labels[numbers.start : numbers.stop]))
        self.places, self.mask = list[tuple[int, slice]](), torch.zeros(self.shape, dtype=torch.bool)
        for document in documents:
            self.places.append((document.row, slice(document.begin, document.begin + len(document.ids))))
            self.mask[self.places[-1]] = torch.from_numpy(document.targets != IGNORED_LABEL)
        self.results, self.has, self.own = Results(), Wanted(fields=-1), 0.0
        self.head: tuple[float, Comparison | None] = 1.0, None
        self.assumed: OfLoss | Tensor | None = None
        self.arrived = Arrived()

    def lay_out(self, of_documents: Sequence[Tensor], dtype: torch.dtype, rest: Sequence[int] = ()) -> Tensor:
        """Lays out results [length, *rest] of each document as [B, L, *rest], 0 at padding."""
        out = torch.zeros(*self.shape, *rest, dtype=dtype)
        for place, values in zip(self.places, of_documents, strict=True):
            out[place] = values.to(dtype)
        return out.to(self.device)

    def lay_out_logits(self, of_documents: Sequence[Tensor], dtype: torch.dtype, width: int, pools: bool) -> Tensor:
        """[B, L, V], or of documents (`Passes.pools`) [B, V]."""
        if not pools:
            return self.lay_out(of_documents, dtype, (width,))
        out = torch.zeros(self.shape[0], width, dtype=dtype)
        for (row, _), values in zip(self.places, of_documents, strict=True):
            out[row] = values[0].to(dtype)
        return out.to(self.device)

    def column(self, index: int, dtype: torch.dtype) -> Tensor:
        """[B, L - shift] of a field of the results."""
        out = self.lay_out([self.results.tokens[number][:, index] for number in self.mine], dtype)
        return out[:, : self.shape[1] - self.shift]

    def sums_of_tokens(self) -> dict[int, float]:
        """The sum of log-probabilities of each document of this rank."""
        return {number: float(self.results.tokens[number][:, 0].double().sum()) for number in self.mine}

    def auxiliary(self, loss: AuxiliaryLoss) -> tuple[Tensor, Tensor]:
        """An auxiliary loss of this rank's batch, and its gradient by the sums."""
        sums = torch.zeros(loss.num_sums, dtype=torch.float64)
        for number in self.mine:
            sums += self.results.auxiliary[number]
        return loss.of_sums(sums, sum(len(document.ids) for document in self.documents))

    def add_factor(self, gradient: Tensor) -> None:
        self.arrived.any = True
        self.arrived.factor += float(gradient)

    def add_auxiliary(self, gradient: Tensor) -> None:
        self.arrived.any = True
        self.arrived.auxiliary += float(gradient)

    def add_scores(self, of_log_probs: Tensor, of_entropy: Tensor | None = None) -> None:
        """Adds gradients [B, L - shift]. Sums over rows also reach places without a label, whose number is 0."""
        arrived, width = self.arrived, self.shape[1] - self.shift
        arrived.any = True
        if arrived.scores is None:
            dtype = torch.promote_types(of_log_probs.dtype, torch.float32)
            arrived.scores = torch.zeros(2, *self.shape, dtype=dtype)
        for total, gradient in zip(arrived.scores, (of_log_probs, of_entropy), strict=True):
            if gradient is not None:
                total[:, :width] += gradient.to(total) * self.mask[:, :width]

    def add_logits(self, gradient: Tensor) -> None:
        arrived, padding = self.arrived, torch.ones(self.shape, dtype=torch.bool)
        arrived.any = True
        for place in self.places:
            padding[place] = False
        arrived.reads_padding |= gradient.dim() == 3 and bool(gradient[padding.to(gradient.device)].any())
        if arrived.logits is None:
            arrived.logits = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)).clone()
        else:
            arrived.logits += gradient

    def of_document(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Splits [B, L, ...] into [length, ...] of each document of this rank."""
        return zip(self.mine, map(whole.__getitem__, self.places), strict=True)

    def of_logits(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The same of what `lay_out_logits` returns."""
        if whole.dim() == 3:
            return self.of_document(whole)
        return zip(self.mine, (whole[row : row + 1] for row, _ in self.places), strict=True)

    def probabilities(self) -> Tensor:
        """The probability of each label, [B, L] fp64 on the host; not 0."""
        log_probs = self.lay_out([self.results.tokens[number][:, 0] for number in self.mine], torch.float64)
        return log_probs.to("cpu").exp().clamp(min=torch.finfo(torch.float32).tiny)

    def fit(self, steps: "Steps", tolerance: float) -> Fit:
        """Compares the actual gradients with the assumed ones."""
        engine, scores = steps.engine, self.arrived.scores
        if not self.labels[engine.rank] and steps.own is None:
            return Odd.ANY
        if not isinstance(self.assumed, Tensor):
            factor = self.arrived.factor / engine.world_size
            return Multiple(factor) if math.isfinite(factor) else Odd.NONE
        size = float((self.assumed * self.assumed).sum())
        if scores is None or size == 0.0:
            if scores is None or not bool(scores[0].any()):
                return Multiple(0.0) if size else Odd.ANY
            return Odd.NONE
        actual = scores[0].double()
        factor = float((actual * self.assumed).sum()) / size
        off = float((actual - factor * self.assumed).abs().max())
        return Multiple(factor) if off <= tolerance * float(actual.abs().max()) else Odd.NONE

    def rest(self, rank: int, again: bool) -> Tensor | None:
        """[2, B, L] still to be trained, or None; `again`: with what was trained at once."""
        scores, factor = self.arrived.scores, self.arrived.factor
        if isinstance(self.assumed, OfLoss) and again and self.labels[rank] and factor:
            of_loss = self.mask.double() * (-factor / self.denominators[rank])
            of_loss = torch.stack([of_loss, torch.zeros_like(of_loss)])
            return of_loss if scores is None else scores + of_loss
        if isinstance(self.assumed, Tensor) and scores is not None and not again:
            return torch.stack([torch.zeros_like(scores[1]), scores[1]])
        return scores


# -- a step -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Window:
    """Announced batches of one step."""

    batches: Sequence[Batch]
    num_items: float | None  # their losses' divisor; None for each one's own labels

    def is_next(self, index: int, request: Request) -> bool:
        """Whether the request is its batch `index`, with the same denominator."""
        if self.num_items != request.num_items or request.against is not None:
            return False
        for name, one in self.batches[index].items():
            other = request.batch.get(name)
            if one is None or other is None:
                if one is not other:
                    return False
            elif one.shape != other.shape or not bool((one.to(other) == other).all()):
                return False
        return True


def _documents_of(
    window: Window, read: Callable[[Batch], list[Document]]
) -> tuple[list[list[Document]], HotspaError | None]:
    """The documents of announced batches; none of them after an error, which is returned."""
    try:
        return [read(batch) for batch in window.batches], None
    except HotspaError as wrong:
        return [[] for _ in window.batches], wrong


@dataclass(eq=False)
class Step(TrainedStep):
    """What each step of the optimizer begins anew."""

    calls: list[Call] = field(default_factory=list)
    window: Window | None = None  # its announced batches, if any are still to come
    waiting: list[Call] = field(default_factory=list)  # the calls of these


class Steps:
    """The steps of an engine's training, for a model and the frozen ones on its replicas.

    Attributes:
        logit_bytes: See `SwitchedModel`.
        own: The engine's token loss, if it has one.
        now: The present step.
        number: Steps before it in the run.
        version: Of the weights.
    """

    def __init__(self, engine: HotSPaEngine, logit_bytes: int) -> None:
        self.engine, self.logit_bytes, self.now = engine, logit_bytes, Step()
        self.number = self.version = 0
        loss = engine.options.loss
        self.own = loss if isinstance(loss, TokenLoss) else None
        self.columns = self.own.columns if self.own is not None else ()
        self.passes = Passes(engine, self.columns, self.drop)
        self.assumptions = Assumptions(self)

    @property
    def place(self) -> str:
        return f"step {self.number + 1}"

    def drop(self) -> None:
        """Drops the calls that were not flushed, and their gradients. On all ranks."""
        self.passes.let_go()
        if self.now.calls:
            self.engine.drop_gradients()
            self.engine.master.bind_gradients(())  # an optimizer skips parameters without a gradient
        self.now = Step()

    def enrol(self, window: Window, read: Callable[[Batch], list[Document]], training: bool) -> None:
        """Adds the calls of an announced step. Collective. Raises `HotspaError`: on every rank: one cannot read a batch,
        or has announced another number."""
        documents, error = _documents_of(window, read)
        values = chain.from_iterable(facts_of(mine, window.num_items) for mine in documents)
        arrived = self.passes.exchange.facts([error is not None, len(documents), *values])
        if any(int(part[0]) or int(part[1]) != len(documents) for part in arrived):
            self.drop()
            self.engine.agreement.check({}, error, self.place)
            raise PlanMismatchError(
                "ranks have announced different numbers of batches",
                where=self.place,
                fix="announce as many batches on all ranks; a batch may have no rows",
            )
        step, rest = self.now, [part[2:] for part in arrived]
        step.waiting = []
        for batch, mine in zip(window.batches, documents, strict=True):
            ends = [2 + 3 * int(part[1]) for part in rest]
            facts = [part[:end] for part, end in zip(rest, ends, strict=True)]
            rest = [part[end:] for part, end in zip(rest, ends, strict=True)]
            step.waiting.append(Call(batch, mine, facts, step.documents, self, training))
        step.window = window
        step.calls += step.waiting


class Meeting:
    """Where all ranks meet before a joint action: if theirs differ, all raise, and none waits for another."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._of_model, self.sizes = steps, "", list[int]()  # each rank's last `size`

    def of_model(self, name: str) -> "Meeting":
        """The same for another model, which messages name after the action."""
        other = copy(self)
        other._of_model = name
        return other

    def __call__(self, what: object, error: HotspaError | None = None, flag: bool = False, size: int = 0) -> list[bool]:
        """Returns each rank's flag when all ranks are about to do the same: `what`, as text. Collective. Raises
        `HotspaError`: on every rank: the first rank's error, or that they are about to do different things.
        `size`: how many numbers this rank is about to send."""
        steps, engine, is_cleared = self._steps, self._steps.engine, False
        if steps.now.calls and engine.updates is None:  # the caller may have cleared gradients that others count on
            is_cleared = engine.master.are_cleared(steps.now.gradient_version)
        agreement = engine.agreement
        if agreement.group is None:  # one rank
            self.sizes = [size]
            if error is not None or is_cleared:
                steps.drop()
            if error is not None:
                raise error
            return [flag]
        text = f"{what}{self._of_model}"
        values = [zlib.crc32(text.encode()), error is not None, is_cleared, flag, size]
        codes, failed, cleared, flags, sizes = agreement.gather([*map(float, values)]).T.tolist()
        self.sizes = [*map(int, sizes)]
        differ = len(set(codes)) > 1
        if any(failed) or any(cleared) or differ:
            steps.drop()
        if any(failed):  # checked first: the other ranks may be about to do more
            agreement.check({}, error, steps.place)
        if differ:
            raise self._different(text)
        return [*map(bool, flags)]

    def _different(self, what: str) -> PlanMismatchError:
        texts = self._steps.engine.agreement.texts(what)
        by_text = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
        return PlanMismatchError(
            "ranks are about to do different things: "
            + "; ".join(f"{rank_names(ranks)}: {text}" for text, ranks in by_text.items()),
            where=self._steps.place,
            why="each call of a switched model is collective, and ranks train parts of one order of the same rows",
            fix="give all ranks the same rows, samplers and seeds, and make the same calls on them; `for batch in model.batches(loader)` gives batches without rows to ranks "
            "whose loaders have ended",
        )


class Reading(IntEnum):
    """What a caller reads of logits; a greater one includes the others."""

    NONE = 0
    ARG_MAX = 1
    LOGITS = 2


@dataclass
class Looks:
    """What callers read of logits after a loss, by training mode and gradients: `before`, in the last step or call, and
    `now`, in this one."""

    before: dict[tuple[bool, bool], Reading] = field(default_factory=dict)
    now: dict[tuple[bool, bool], Reading] = field(default_factory=dict)

    def turn(self, mode: tuple[bool, bool]) -> None:
        """Begins a step or call of this mode."""
        self.before[mode] = self.now.pop(mode, Reading.NONE)

    def note(self, mode: tuple[bool, bool], reading: Reading) -> None:
        self.now[mode] = max(self.now.get(mode, Reading.NONE), reading)


# -- gradients --------------------------------------------------------------------------------------------------------


class Assumptions:
    """Which gradients are assumed before a caller's backward, and how the actual ones compare.

    Attributes:
        expects: The gradients of calls for log-probabilities that name none; None if unknown.
        looks: At the model's logits.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._engine = steps, steps.engine
        self.expects: EveryToken | None = None
        self._was_wrong = False  # others have come: it is not assumed any more
        self.looks = Looks()
        self._tolerance = 64 * torch.finfo(steps.passes.wide).eps

    def state_dict(self) -> dict[str, object]:
        """Returns what a resumed run needs to compute the same bits; JSON-ready."""
        looks = [[*mode, int(reading)] for mode, reading in self.looks.before.items() if reading]
        return {"looks": looks, "was_wrong": self._was_wrong}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. Raises `HotspaConfigError`: it is damaged."""
        with reading_state("what gradients will be", "the first step may be trained twice"):
            given = [(*mode, Reading.LOGITS)[:3] for mode in state.get("looks", ())]  # older checkpoints have no third
            looks = {(bool(training), bool(trains)): Reading(reading) for training, trains, reading in given}
            self._was_wrong = bool(state.get("was_wrong"))  # older checkpoints have none
        self.looks.before = looks

    def known(self, request: Request) -> EveryToken | Tensor | None:
        """What can be assumed of the gradients by the log-probabilities of a request."""
        if (
            request.expected is not None
            or request.against is not None
            or self._was_wrong
            or self._engine.updates is not None
        ):
            return request.expected
        return self.expects

    def assume(self, calls: Sequence[Call], assumed: Assumed) -> Upstream:
        """Returns the upstream gradients of calls to train at once, and stores them in the calls."""
        world = self._engine.world_size
        if isinstance(assumed, Tensor):
            (call,) = calls
            whole = torch.zeros(call.shape, dtype=torch.float64)
            whole[:, : call.shape[1] - call.shift] = assumed.detach().to("cpu", torch.float64)
            call.assumed = whole = whole * call.mask
            return Upstream(
                tokens={n: p[:, None] / world for n, p in call.of_document(whole) if bool(p.any())}, columns=1
            )
        weights = torch.zeros(len(calls[0].of_step.lengths), dtype=torch.float64)
        num_labels, of_rank = 0, isinstance(assumed, EveryToken) and assumed.of_rank
        for call in calls:
            num_labels += sum(call.labels)
        for call in calls:
            for owner, (numbers, labels) in enumerate(zip(call.ranges, call.labels, strict=True)):
                if labels:
                    every = labels * world if of_rank else num_labels
                    divisor = call.denominators[owner] if isinstance(assumed, OfLoss) else every
                    weights[numbers.start : numbers.stop] = -1.0 / divisor
            every = call.labels[self._engine.rank] * world if of_rank else num_labels
            call.assumed = assumed if isinstance(assumed, OfLoss) else call.mask.double() * (-world / max(every, 1))
        return Upstream(weights, isinstance(assumed, EveryToken) and assumed.times_probability)

    def compare(self, beside: Iterable[float]) -> tuple[Multiple | None, Upstream, Tensor]:
        """Compares the actual gradients of all ranks with the assumed ones. Collective.

        Returns:
            The factor for the gradients of what was trained at once, None if it must be trained again; the upstream
            gradients still to be trained; and every rank's numbers `beside`, fp64 [ranks, numbers].
        """
        calls, gather = self._steps.now.calls, self._engine.agreement.gather
        mine, has_more = list[float](), False
        for call in calls:
            has_more |= call.arrived.scores is not None or call.arrived.logits is not None
            if call.assumed is not None:
                fit = call.fit(self._steps, self._tolerance)
                mine += (1.0, fit.factor) if isinstance(fit, Multiple) else (float(fit.value), 0.0)
        upstream = self._rest(calls, again=False) if has_more else Upstream()
        row = [*mine, float(upstream.columns), float(len(upstream.logits)), *beside]
        table = gather(row) if self._engine.world_size > 1 else torch.tensor([row], dtype=torch.float64)
        codes, sizes, numbers = table.tensor_split([len(mine), len(mine) + 2], dim=1)
        fit = self._factor(codes.view(len(table), -1, 2))
        if fit is Odd.NONE:
            self._was_wrong |= any(isinstance(call.assumed, Tensor) for call in calls)
            upstream = self._rest(calls, again=True)
            sizes = gather([float(upstream.columns), float(len(upstream.logits))])
        for call in calls:
            call.arrived.logits = None
        upstream.columns = int(sizes[:, 0].max())
        if bool(sizes[:, 1].any()):
            of_all = self._steps.passes.exchange.facts(sorted(upstream.logits))
            upstream.of_logits = frozenset(int(number) for part in of_all for number in part)
        if self._steps.passes.auxiliary is not None:
            upstream.auxiliary = self._auxiliary(self._steps.passes.auxiliary)
        return (None if fit is Odd.NONE else fit if isinstance(fit, Multiple) else Multiple(1.0)), upstream, numbers

    def _factor(self, codes: Tensor) -> Fit:
        """What fits all of [ranks, calls at once, kind and factor]."""
        own, stages = self._steps.own is not None, self._engine.updates is not None
        if own and bool((codes[..., 0] == 1.0).all()):  # each rank has the same part of a token loss: the mean counts
            codes = codes.mean(0, keepdim=True)
        kinds, factors = codes.flatten(0, 1).unbind(1)
        factors = factors[kinds == 1.0]
        fit: Fit = Odd.ANY
        if len(factors):
            fit = Multiple(float(factors[0]))
            off = (factors - fit.factor).abs() > self._tolerance * abs(fit.factor)
        if bool((kinds == Odd.NONE.value).any()) or (len(factors) and bool(off.any())):
            fit = Odd.NONE
        if (fit is Odd.NONE and own) or (stages and fit not in (Odd.ANY, Multiple(1.0))):
            raise UnsupportedError(
                "the loss was multiplied by another factor than the number of processes"
                if stages
                else "the calls of a step multiply the token loss by different factors",
                where=self._steps.place,
                why="stages have updated after every pack" if stages else "the batches of a step are trained together",
                fix="train on the loss that forward returns, times the number of processes",
            )
        return fit

    def _rest(self, calls: Sequence[Call], again: bool) -> Upstream:
        """The gradients of this rank's documents still to be trained; `again`: also of what was trained at once."""
        world, tokens, has_entropy, upstream = self._engine.world_size, dict[int, Tensor](), False, Upstream()
        for call in calls:
            rest = call.rest(self._engine.rank, again)
            for number, part in call.of_document(rest.permute(1, 2, 0)) if rest is not None else ():
                if bool((of_rank := part / world).any()):
                    tokens[number] = of_rank
                    has_entropy |= bool(of_rank[:, 1].any())
            if call.arrived.logits is not None:
                parts = call.of_logits(call.arrived.logits)
                upstream.logits |= {n: part / world for n, part in parts if bool(part.any())}
        upstream.tokens, upstream.columns = tokens, bool(tokens) + has_entropy
        return upstream

    def _auxiliary(self, loss: AuxiliaryLoss) -> Tensor | None:
        """Upstream gradients fp64 [D, ...] of an auxiliary loss. Collective."""
        calls = self._steps.now.calls
        mine = torch.zeros(len(calls), loss.num_seeds, dtype=torch.float64)
        for index, call in enumerate(calls):
            if call.arrived.auxiliary:
                mine[index] = call.auxiliary(loss)[1] * call.arrived.auxiliary / self._engine.world_size
        of_all = self._engine.agreement.gather(mine.flatten().tolist()).view(-1, len(calls), loss.num_seeds)
        if not bool(of_all.any()):
            return None
        table = torch.zeros(len(self._steps.now.documents.lengths), loss.num_seeds, dtype=torch.float64)
        for index, call in enumerate(calls):
            for rank, numbers in enumerate(call.ranges):
                table[numbers.start : numbers.stop] = of_all[rank, index]
        return table

    def active(self, upstream: Upstream) -> set[int]:
        """The documents with a gradient; the others are not run. Collective."""
        mine, active = set(upstream.tokens) | set(upstream.logits), set[int]()
        for part in self._steps.passes.exchange.facts(sorted(mine)) if upstream.columns or upstream.of_logits else ():
            active.update(part.tolist())
        if upstream.auxiliary is not None:
            active |= set(upstream.auxiliary.any(1).nonzero().flatten().tolist())
        return active


class Runner:
    """Computes what the callers of one model get, in the cheapest way; the same on all ranks.

    Attributes:
        temperature: The divisor of logits of TRL's output.
        is_of_own: Whether the loss is the engine's token loss.
    """

    def __init__(
        self, steps: Steps, meet: Meeting, prepare: Callable[[Request], None] | None, store: MasterStore | None
    ) -> None:
        """`prepare`: makes the replicas act as a request wants; None if they act in one way only."""
        self.steps, self.meet, self._passes, self._assumptions = steps, meet, steps.passes, steps.assumptions
        self.prepare, self.store, self.temperature = prepare, store, 1.0
        self.is_of_own = steps.own is not None and store is None
        self.looks = steps.assumptions.looks if store is None else Looks()

    def run(self, call: Call, request: Request) -> None:
        """Computes what is known to be read."""
        if self.prepare is not None:
            self.prepare(request)
        mode = request.training, request.trains
        if not request.trains:
            self.looks.turn(mode)
        if request.batch.get("shift_labels") is None and request.batch.get("labels") is None:
            return
        if request.wants_loss and self.is_of_own:
            self._run_own(call, request)
            return
        reading = self.looks.before.get(mode, Reading.NONE) if request.wants_loss else Reading.NONE
        needs_logits = reading is Reading.LOGITS or (request.wants_loss and request.function is not None)
        if reading is Reading.ARG_MAX:
            request.fields = WITH_ARG_MAX
        if request.trains and call.has.fields < 0 and not request.aux and not needs_logits:
            self._train_at_once(call, request)
        is_loss = request.wants_loss and isinstance(call.assumed, OfLoss)
        if not is_loss and (call.has.fields < max(request.fields, 1) or call.has.auxiliary < request.aux):
            self._score(call, request, needs_logits)

    def _run_own(self, call: Call, request: Request) -> None:
        """Computes the engine's token loss over all ranks. Each rank gets an equal part."""
        if request.aux and not call.has.auxiliary:
            self._score(call, request)
        items = max(sum(call.labels), 1) if request.num_items is None else request.num_items
        together = [call] if request.num_items is None or not request.trains else [call, *self.steps.now.waiting]
        if not request.trains:
            results = self.score(together, request, Wanted(own=True))
            results.own /= items
        elif call.assumed is None:
            mode, own = Mode(self.steps.number, request.training), Upstream(own=(1.0 / items, 1.0))
            some = [number for one in together for number in one.everything]
            results = self._passes.train(self.steps.now, some, mode, Wanted(), own)
            for one in together:
                one.assumed = OfLoss()
        else:
            return
        for one in together:
            one.own = results.own / len(together) / self.steps.engine.world_size

    def read(self, call: Call, request: Request) -> None:
        """Computes the numbers of a model's tokens that has no vocabulary's head."""
        self.run(call, request)
        if not call.has.logits:
            self._score(call, request, with_logits=True, fields=0)

    def _score(self, call: Call, request: Request, with_logits: bool = False, fields: int = 1) -> None:
        together = [call] if (with_logits and fields) or not request.trains else [call, *self.steps.now.waiting]
        if with_logits:
            self.meet("score with logits", too_many_logits(call.shape, self.steps))
        wanted = Wanted(max(request.fields, fields), logits=with_logits, auxiliary=request.aux)
        for one in together:
            one.head = self.temperature if request.columns else 1.0, request.against
        results = self.score(together, request, wanted)
        for one in together:
            one.results, one.has = results, wanted

    def score(
        self, calls: Sequence[Call], request: Request, wanted: Wanted, some: Sequence[int] | None = None
    ) -> Results:
        """Scores the documents of calls, or some of them without keeping graphs. Collective."""
        mode, of_step = Mode(self.steps.number, request.training, *calls[0].head), request.trains and some is None
        some = [number for one in calls for number in one.everything] if some is None else some
        return self._passes.score(calls[0].of_step, some, mode, wanted, store=self.store, of_step=of_step)

    def _train_at_once(self, call: Call, request: Request) -> None:
        """Trains a call, and the others that were announced with it, before the caller's backward has brought the
        gradients, if something is known of them. Documents whose given gradients are all 0 have a forward only."""
        assumed = OfLoss() if request.wants_loss else self._assumptions.known(request)
        if assumed is None:
            return
        calls = [call] if isinstance(assumed, Tensor) else [call, *self.steps.now.waiting]
        for one in calls:
            one.head = self.temperature if request.columns else 1.0, request.against
        upstream, results, active = self._assumptions.assume(calls, assumed), Results(), set[int]()
        for one in calls:
            active.update(one.everything)
        wanted = Wanted(request.fields, sums=request.wants_loss and not request.fields)
        if isinstance(assumed, Tensor):
            idle, active = active, self._assumptions.active(upstream)
            if idle := idle - active:
                results = self.score(calls, request, wanted, sorted(idle))
        if active:
            mode = Mode(self.steps.number, request.training, *call.head)
            trained = self._passes.train(self.steps.now, sorted(active), mode, wanted, upstream)
            results = replace(trained, tokens=results.tokens | trained.tokens)
        for one in calls:
            one.results, one.has = results, wanted
            if isinstance(assumed, EveryToken) and isinstance(one.assumed, Tensor) and assumed.times_probability:
                one.assumed = one.assumed * one.probabilities()
