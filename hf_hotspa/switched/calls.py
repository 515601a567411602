"""One call of the switched model: its request, what the caller's autograd gets, and the gradients that come back.

Shapes: B rows of L columns in a call's batch, with D documents; V logits of a token.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_hotspa.errors import HotspaError, PlanMismatchError, UnsupportedError
from hf_hotspa.parallel.agreement import Agreement, rank_names
from hf_hotspa.parallel.head_loss import AuxiliaryLoss
from hf_hotspa.rows.read_row import IGNORED_LABEL
from hf_hotspa.switched.passes import (
    FLAT_COLUMNS,
    ROW_COLUMNS,
    Document,
    Documents,
    Exchange,
    Numbers,
    Passes,
    Seeds,
    facts_of,
)
from hf_hotspa.typed import reading_state

Batch = Mapping[str, Tensor | None]


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
    """Logits that are computed at first use, which is collective; most callers never use them.

    Attributes:
        whole: Returns the logits, as a plain tensor.
    """

    whole: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, fetch: Callable[[], Tensor]) -> "LazyLogits":
        lazy: LazyLogits = torch.Tensor._make_subclass(cls, torch.empty(0))
        lazy.whole = cache(fetch)
        return lazy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def real(x: Any) -> Any:
            return x.whole() if isinstance(x, LazyLogits) else x

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(real, (args, kwargs or {}))
        return func(*args, **kwargs)


class Call:
    """A call of this rank, and what all ranks know of it.

    Attributes:
        shape: B and L.
        device: Of the caller's tensors.
        everything: The documents of all ranks.
        denominators: Each rank's divisor of its sum of cross entropies.
        labels: Each rank's number of targets that count.
        places: The row and the columns of this rank's documents.
        mask: bool [B, L], the tokens whose target counts.
        temperature: The divisor of logits in `numbers`.
        fields: Their numbers of each token: 0 for sums alone, -1 for nothing.
        with_aux, with_logits: Whether `numbers` has these; the same on all ranks.
        assumed: The seeds if trained at once: a factor of the loss, or [B, L] of log-probabilities; else None.
        factor: The loss's factor in the caller's backward.
        seeds: [2, B, L], the gradient by log-probability and entropy.
        logit_seeds: [B, L, V], the gradient by the logits.
        of_aux: The gradient by the auxiliary loss.
        own: This call's part of the engine's token loss of all ranks.
        reads_padding: Whether a gradient by logits came at padding.
        went_back: Whether any backward came.
    """

    temperature, fields = 1.0, -1
    factor = of_aux = own = 0.0
    with_aux = with_logits = reads_padding = went_back = False
    assumed: float | Tensor | None = None
    seeds: Tensor | None = None
    logit_seeds: Tensor | None = None

    def __init__(
        self,
        batch: Batch,
        documents: Sequence[Document],  # this rank's, in the order of `mine`
        facts: Sequence[NDArray[np.int64]],  # each rank's `facts_of` of its batch
        of_step: Documents,  # the documents of its step, or the call's own without gradients
        rank: int,
        version: int,  # of the weights at the call
        training: bool,
    ) -> None:
        ids = batch["input_ids"]
        assert ids is not None
        # shift: columns that a number of each token lacks: 1, or 0 for labels that are already shifted
        self.shape, self.device, self.shift = (ids.shape[0], ids.shape[1]), ids.device, 1
        if batch.get("shift_labels") is not None:
            self.shift = 0
        self.documents, self.of_step, self.version, self.training = documents, of_step, version, training
        self.ranges = of_step.add(facts, documents, rank)  # the numbers of each rank's documents
        self.mine, self.everything = self.ranges[rank], range(self.ranges[0].start, self.ranges[-1].stop)
        self.denominators, self.labels = list[float](), list[int]()
        for of_rank, numbers in zip(facts, self.ranges, strict=True):
            self.denominators.append(float(of_rank[:1].view(np.float64)[0]))
            self.labels.append(sum(of_step.labels[numbers.start : numbers.stop]))
        self.places, self.mask = list[tuple[int, slice]](), torch.zeros(self.shape, dtype=torch.bool)
        for document in documents:
            self.places.append((document.row, slice(document.begin, document.begin + len(document.ids))))
            self.mask[self.places[-1]] = torch.from_numpy(document.targets != IGNORED_LABEL)
        self.numbers = Numbers()  # the results for this rank's documents

    def lay_out(self, of_documents: Sequence[Tensor], dtype: torch.dtype, rest: Sequence[int] = ()) -> Tensor:
        """Lays out numbers [length, *rest] of each document as [B, L, *rest], 0 at padding."""
        out = torch.zeros(*self.shape, *rest, dtype=dtype)
        for place, values in zip(self.places, of_documents, strict=True):
            out[place] = values.to(dtype)
        return out.to(self.device)

    def column(self, index: int, dtype: torch.dtype) -> Tensor:
        """[B, L - shift] of a field of the numbers."""
        out = self.lay_out([self.numbers.tokens[number][:, index] for number in self.mine], dtype)
        return out[:, : self.shape[1] - self.shift]

    def probabilities(self) -> Tensor:
        """The probability of each label, [B, L] fp64 on the host; not 0."""
        log_probs = self.lay_out([self.numbers.tokens[number][:, 0] for number in self.mine], torch.float64)
        return log_probs.to("cpu").exp().clamp(min=torch.finfo(torch.float32).tiny)

    def auxiliary(self, loss: AuxiliaryLoss) -> tuple[Tensor, Tensor]:
        """An auxiliary loss of this rank's batch, and the gradient by its seeds."""
        sums = torch.zeros(loss.num_sums, dtype=torch.float64)
        for number in self.mine:
            sums += self.numbers.auxiliary[number]
        return loss.of_sums(sums, sum(len(document.ids) for document in self.documents))

    def add_factor(self, gradient: Tensor) -> None:
        self.went_back = True
        self.factor += float(gradient)

    def add_aux_factor(self, gradient: Tensor) -> None:
        self.went_back = True
        self.of_aux += float(gradient)

    def add_seeds(self, of_log_probs: Tensor, of_entropy: Tensor | None = None) -> None:
        """Adds gradients [B, L - shift]. Sums over rows also reach places without a label, whose number is 0."""
        self.went_back = True
        if self.seeds is None:
            dtype = torch.promote_types(of_log_probs.dtype, torch.float32)
            self.seeds = torch.zeros(2, *self.shape, dtype=dtype)
        width, mask = self.shape[1] - self.shift, self.mask[:, : self.shape[1] - self.shift]
        for total, gradient in zip(self.seeds, (of_log_probs, of_entropy), strict=True):
            if gradient is not None:
                total[:, :width] += gradient.to(total) * mask

    def add_logit_seeds(self, gradient: Tensor) -> None:
        self.went_back = True
        padding = torch.ones(self.shape, dtype=torch.bool)
        for place in self.places:
            padding[place] = False
        self.reads_padding |= bool(gradient[padding.to(gradient.device)].any())
        if self.logit_seeds is None:
            self.logit_seeds = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)).clone()
        else:
            self.logit_seeds += gradient

    def of_document(self, whole: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Splits [B, L, ...] into [length, ...] of each document of this rank."""
        return zip(self.mine, map(whole.__getitem__, self.places), strict=True)

    def ratio(self, rank: int, tolerance: float, own: bool = False) -> float:
        """Returns real over assumed seeds of log-probabilities: infinity if any ratio fits, NaN if they are not a
        multiple; `own`: the loss is a part of the loss of all ranks."""
        if not self.labels[rank] and not own:
            return float("inf")
        if isinstance(self.assumed, float):
            return self.factor / self.assumed
        assert self.assumed is not None
        assumed = self.assumed.double()
        size = float((assumed * assumed).sum())
        if self.seeds is None or size == 0.0:
            is_zero = self.seeds is None or not bool(self.seeds[0].any())
            return (0.0 if size else float("inf")) if is_zero else float("nan")
        real = self.seeds[0].double()
        ratio = float((real * assumed).sum()) / size
        off = float((real - ratio * assumed).abs().max())
        return ratio if off <= tolerance * float(real.abs().max()) else float("nan")

    def final_seeds(self, rank: int, again: bool) -> Tensor | None:
        """[2, B, L] still to be trained, or None; `again`: ignores what was trained at once."""
        seeds = self.seeds
        if self.assumed is None:
            return seeds
        if isinstance(self.assumed, float):  # seeds by log-probabilities are not in the loss
            if not again or not self.labels[rank] or not self.factor:
                return seeds
            of_loss = self.mask.double() * (-self.factor / self.denominators[rank])
            of_loss = torch.stack([of_loss, torch.zeros_like(of_loss)])
            return of_loss if seeds is None else seeds + of_loss
        if seeds is None or again:
            return seeds
        return torch.stack([torch.zeros_like(seeds[1]), seeds[1]])

    def constant(self, rank: int, tolerance: float, by_probability: bool = False) -> float:
        """The seed of every log-probability, with `by_probability` divided by its token's probability; infinity without
        labels, NaN if the seeds differ."""
        if not self.labels[rank]:
            return float("inf")
        if self.seeds is None or self.logit_seeds is not None or bool(self.seeds[1].any()):
            return float("nan")
        seeds = self.seeds[0]
        if by_probability:
            seeds = seeds / self.probabilities()
        seeds = seeds[self.mask].double()
        mean = float(seeds.mean())
        return mean if float((seeds - mean).abs().max()) <= tolerance * abs(mean) else float("nan")


@dataclass
class Assumed:
    """The assumed gradients of a caller's loss by its log-probabilities, up to a factor common to all ranks."""

    by_loss: float = 0.0  # the factor of the model's own loss; 0 for another loss
    by_token: float = 0.0  # the gradient by every log-probability, or with `by_mean` by its mean over a rank's batch
    by_mean: bool = False
    by_probability: bool = False  # whether each token's probability multiplies it, as in dynamic fine-tuning (dft)
    given: Tensor | None = None  # [B, L - shift], by the caller

    def scaled(self, factor: float) -> "Assumed":
        """Scales it to the real gradients of the last step."""
        return Assumed(0.0, self.by_token * factor, self.by_mean, self.by_probability)

    @classmethod
    def learnt(cls, both: Sequence[Tensor], calls: Sequence[Call], tolerance: float) -> "Assumed":
        """Learns what the losses of a step have in common (unknown gradients if nothing), from fp64 [ranks, calls] of
        `Call.constant` without and with probabilities."""
        plain, weighed = (cls._of_constants(constants, calls, tolerance) for constants in both)
        weighed.by_probability = True
        return plain if plain.by_token or not weighed.by_token else weighed

    @classmethod
    def _of_constants(cls, constants: Tensor, calls: Sequence[Call], tolerance: float) -> "Assumed":
        by_token = common(constants.flatten(), tolerance)
        if by_token is not None:
            return cls(by_token=by_token)
        labels = torch.tensor([[float(call.labels[rank]) for call in calls] for rank in range(len(constants))])
        by_mean = common((constants * labels.clamp(min=1)).flatten(), tolerance)
        return cls(by_token=by_mean or 0.0, by_mean=True)


def common(values: Tensor, tolerance: float) -> float | None:
    """The common value of fp64 numbers, infinity standing for any; None if they differ, or one is NaN."""
    values = values[~values.isinf()]
    if not len(values):
        return 1.0
    first = float(values[0])
    return first if bool(((values - first).abs() <= tolerance * abs(first)).all()) else None


# -- errors of a call -------------------------------------------------------------------------------------------------


def too_many_logits(call: Call, passes: Passes, most: int) -> UnsupportedError | None:
    """The error for logits of more than `most` bytes; None for fewer."""
    size = call.shape[0] * call.shape[1] * passes.num_logits * passes.wide.itemsize
    if size <= most:
        return None
    return UnsupportedError(
        f"the logits of {call.shape[0]} rows of {call.shape[1]} tokens take {size:,} bytes, and the limit is {most:,}",
        where=f"rank {passes.engine.rank}",
        why="logits, and the gradients by them, are in host memory of the rank that has the rows",
        fix="use the loss or log-probabilities (fused_lm_head=True) instead of logits, smaller batches, or a larger "
        "logit_bytes",
    )


# -- the gradients of calls -------------------------------------------------------------------------------------------


class CallGradients:
    """Reads the gradients that callers' backwards bring in a step, and predicts the next step's.

    Args:
        own: Whether the loss is the engine's token loss.
        place: Names the present step, for messages.
        looks: Whether logits were read in the last step or call, by mode; the model updates it.

    Attributes:
        expected: The last backward's factor of the loss.
        linear: What the last step's gradients by log-probabilities had in common.
    """

    def __init__(
        self, passes: Passes, own: bool, place: Callable[[], str], looks: dict[tuple[bool, bool], bool]
    ) -> None:
        self._passes, self._engine, self._own, self._place, self._looks = passes, passes.engine, own, place, looks
        self.expected, self.linear = float(self._engine.world_size), Assumed()
        self._tolerance = 64 * torch.finfo(passes.wide).eps

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to compute the same bits; JSON-ready."""
        world, looks = self._engine.world_size, [list(mode) for mode, looked in self._looks.items() if looked]
        linear = {name: getattr(self.linear, name) for name in ("by_token", "by_mean", "by_probability")}
        return {"expected": self.expected, "world": world, "looks": looks} | linear

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. Raises `HotspaConfigError`: it is damaged."""
        with reading_state("what gradients will be", "the first step may be trained twice"):
            expected = float(state["expected"])
            # a Trainer multiplies by the number of ranks, which may have changed
            self.expected = float(self._engine.world_size) if expected == state.get("world") else expected
            by_probability = bool(state.get("by_probability"))  # older checkpoints have none
            self.linear = Assumed(0.0, float(state["by_token"]), bool(state["by_mean"]), by_probability)
            looks = {(bool(training), bool(trains)): True for training, trains in state.get("looks", ())}
        self._looks.clear()
        self._looks.update(looks)

    def assume(self, calls: Sequence[Call], known: "Assumed") -> Seeds:
        """Returns the seeds of calls to train at once, and stores them in the calls."""
        rank, world = self._engine.rank, self._engine.world_size
        if known.given is not None:
            (call,) = calls
            assumed = torch.zeros(call.shape, dtype=torch.float64)
            assumed[:, : call.shape[1] - call.shift] = known.given.detach().to("cpu", torch.float64)
            call.assumed = assumed * call.mask
            tokens = {n: part[:, None] / world for n, part in call.of_document(call.assumed) if bool(part.any())}
            return Seeds(tokens=tokens, columns=1)
        weights = torch.zeros(len(calls[0].of_step.lengths), dtype=torch.float64)
        for call in calls:
            own = 0.0
            for owner, (numbers, labels) in enumerate(zip(call.ranges, call.labels, strict=True)):
                if not labels:
                    continue
                seed = known.by_token / labels if known.by_mean else known.by_token
                if known.by_loss:
                    seed = -known.by_loss / call.denominators[owner]
                weights[numbers.start : numbers.stop] = seed / world
                if owner == rank:
                    own = seed
            call.assumed = known.by_loss or call.mask.double() * own
        return Seeds(weights, known.by_probability)

    def compare(
        self, calls: Sequence[Call], documents: Documents, beside: Iterable[float]
    ) -> tuple[float | None, Seeds, Tensor]:
        """Compares the real seeds of all ranks with the assumed ones, and predicts the next step's. Collective.
        `beside`: numbers to gather along, as many on every rank.

        Returns:
            The factor for the gradients of what was trained at once, None if it must be trained again; the seeds still
            to be trained; and every rank's numbers `beside`, fp64 [ranks, numbers].
        """
        rank, tolerance, gather = self._engine.rank, self._tolerance, self._engine.agreement.gather
        ratios, weighed, at_once, have_seeds = list[float](), list[float](), list[bool](), False
        for call in calls:
            have_seeds |= call.seeds is not None or call.logit_seeds is not None
            at_once.append(call.assumed is not None)
            ratios.append(call.ratio(rank, tolerance, self._own) if at_once[-1] else call.constant(rank, tolerance))
            weighed.append(0.0 if at_once[-1] else call.constant(rank, tolerance, True))
        seeds = self._own_seeds(calls, again=False) if have_seeds else Seeds()
        mine = [*ratios, *weighed, float(seeds.columns), float(len(seeds.logits)), *beside]
        table = gather(mine) if self._engine.world_size > 1 else torch.tensor([mine], dtype=torch.float64)
        n = len(calls)
        rows, weighed_rows, sizes, numbers = table.tensor_split([n, 2 * n, 2 * n + 2], dim=1)
        scale = self._scale(calls, rows, weighed_rows, torch.tensor(at_once))
        if scale is None:
            seeds = self._own_seeds(calls, again=True)
            sizes = gather([float(seeds.columns), float(len(seeds.logits))])
        for call in calls:
            call.logit_seeds = None
        seeds.columns = int(sizes[:, 0].max())
        if bool(sizes[:, 1].any()):
            of_all = self._passes.exchange.facts(sorted(seeds.logits))
            seeds.of_logits = frozenset(int(number) for part in of_all for number in part)
        if self._passes.auxiliary is not None:
            seeds.auxiliary = self._auxiliary_seeds(calls, documents)
        return scale, seeds, numbers

    def _scale(self, calls: Sequence[Call], rows: Tensor, weighed: Tensor, at_once: Tensor) -> float | None:
        """See `compare`. `rows` [ranks, calls] has the factor of what was trained at once (`at_once` [calls]), or the
        seed of all log-probabilities; `weighed`, this seed over its token's probability."""
        rank, tolerance, stages = self._engine.rank, self._tolerance, self._engine.updates is not None
        if self._own:  # each rank has the same part of a token loss: the factor is the mean
            rows[:, at_once] = rows[:, at_once].mean(0)
        if not bool(at_once.any()):
            if not bool(rows.isinf().all()):
                self.linear = Assumed.learnt((rows, weighed), calls, tolerance)
            return 1.0
        scale = common(rows[:, at_once].flatten(), tolerance)
        if (scale is None and self._own) or (scale != 1.0 and stages):
            raise UnsupportedError(
                "the loss was multiplied by other factors than in the previous step"
                if stages
                else "the calls of a step multiply the token loss by different factors",
                where=self._place(),
                why="stages have updated after every pack" if stages else "the batches of a step are trained together",
                fix="train on the loss that forward returns, times the number of processes",
            )
        factors = list[float]()  # of the model's own loss
        for call in calls:
            if isinstance(call.assumed, float):
                factors.append(call.factor if call.labels[rank] else float("inf"))
        if scale is None:
            self.linear = Assumed()
            of_all = self._engine.agreement.gather(factors or [self.expected])
            self.expected = common(of_all.flatten(), tolerance) or self.expected
        elif factors:
            self.expected *= scale or 1.0
        elif scale:
            self.linear = self.linear.scaled(scale)
        return scale

    def _own_seeds(self, calls: Sequence[Call], again: bool) -> Seeds:
        """The seeds of this rank's documents still to be trained; `again`: also of what was trained at once."""
        world, tokens, has_entropy, seeds = self._engine.world_size, dict[int, Tensor](), False, Seeds()
        for call in calls:
            if again or call.seeds is not None:
                final = call.final_seeds(self._engine.rank, again)
                for number, part in call.of_document(final.permute(1, 2, 0)) if final is not None else ():
                    if bool((of_rank := part / world).any()):
                        tokens[number] = of_rank
                        has_entropy |= bool(of_rank[:, 1].any())
            if call.logit_seeds is not None:
                parts = call.of_document(call.logit_seeds)
                seeds.logits |= {n: part / world for n, part in parts if bool(part.any())}
        seeds.tokens, seeds.columns = tokens, bool(tokens) + has_entropy
        return seeds

    def _auxiliary_seeds(self, calls: Sequence[Call], documents: Documents) -> Tensor | None:
        loss = self._passes.auxiliary
        assert loss is not None
        mine = torch.zeros(len(calls), loss.num_seeds, dtype=torch.float64)
        for index, call in enumerate(calls):
            if call.of_aux:
                mine[index] = call.auxiliary(loss)[1] * call.of_aux / self._engine.world_size
        of_all = self._engine.agreement.gather(mine.flatten().tolist()).view(-1, len(calls), loss.num_seeds)
        if not bool(of_all.any()):
            return None
        table = torch.zeros(len(documents), loss.num_seeds, dtype=torch.float64)
        for index, call in enumerate(calls):
            for rank, numbers in enumerate(call.ranges):
                table[numbers.start : numbers.stop] = of_all[rank, index]
        return table

    def active(self, seeds: Seeds) -> set[int]:
        """The documents with a seed; the others are not run. Collective."""
        mine = set(seeds.tokens) | set(seeds.logits)
        active = set[int]()
        for part in self._passes.exchange.facts(sorted(mine)) if seeds.columns or seeds.of_logits else ():
            active.update(part.tolist())
        if seeds.auxiliary is not None:
            active |= set(seeds.auxiliary.any(1).nonzero().flatten().tolist())
        return active


# -- requests ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """What a caller requests for a batch."""

    batch: Batch
    num_items: float | None  # the divisor of the sum of cross entropies; None for this rank's labels
    fields: int  # how many of the first `parallel.scores.FIELDS` to compute; 0 for a loss alone, or nothing
    wants_loss: bool  # whether to compute the cross entropy
    aux: bool  # whether to compute the auxiliary loss
    kept: Any  # the number of last logit columns, or an index of columns; 0: all
    expected: Tensor | None  # [B, L - 1] or [B, L], the expected gradients by the log-probabilities, or multiples
    trains: bool  # whether gradients will come
    training: bool
    adapters: bool
    given_items: Any  # `num_items` as given
    function: Any  # the model object's custom loss function; None for the loss of causal language models
    changes: str = ""  # earlier changes of the model object, as text

    def __str__(self) -> str:
        words = ["forward", "training mode" if self.training else "eval mode"]
        words.append("with gradients" if self.trains else "without gradients")
        if self.wants_loss or self.fields:
            words.append("for the loss" if self.wants_loss else f"for {self.fields} numbers of each token")
        if self.batch.get("shift_labels") is not None:
            words.append("labels shifted")
        if self.aux:
            words.append("with the balance loss of routers")
        if self.expected is not None:
            words.append("with expected seeds")
        if not self.adapters:
            words.append("without adapters")
        return ", ".join(words) + self.changes


_UNREAD = frozenset({"use_cache", "return_dict", "cu_seq_lens_k", "max_length_q", "max_length_k", "past_key_values"})
"""Arguments of a forward without effect in training."""


def is_unread(name: str, value: Any) -> bool:
    """Whether an argument of a forward can be ignored, or belongs to the batch."""
    return value is None or value is False or name in _UNREAD or name in ("seq_idx", *FLAT_COLUMNS)


def unreadable(
    input_ids: Tensor | None, others: Mapping[str, Any], columns: Sequence[str], rank: int
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


@dataclass(eq=False)
class Window:
    """Announced batches of one step, read and exchanged together."""

    batches: Sequence[Batch]
    num_items: float | None  # their losses' divisor; None for each one's own labels
    step: int  # the number of the step
    documents: list[list[Document]] = field(default_factory=list)  # this rank's, of each batch
    facts: list[list[NDArray[np.int64]]] = field(default_factory=list)  # each rank's `facts_of` of each batch
    # the documents of all ranks, planned as if these batches were the complete step; None after an error
    of_step: Documents | None = None
    error: HotspaError | None = None  # this rank's error
    sent_bytes: int = 0  # bytes of rows that this rank has sent
    ready: Future[None] = field(default_factory=Future)  # done when the rest is set; has the exception if this failed

    def is_next(self, index: int, request: Request) -> bool:
        """Whether the request is its batch `index`, with the same denominator."""
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
    """Exchanges and plans announced batches in a thread, over a group with no other use.

    Attributes:
        windows: The coming steps; the first one may not be ready.
        number: How many steps this rank has announced; 0 if announcing is no longer possible.
    """

    def __init__(
        self,
        exchange: Exchange,  # over this group
        read: Callable[[Batch], list[Document]],  # reads the documents of a batch
        # plans some documents of a step over this group
        plan: Callable[[Documents, Iterable[int], int, Exchange], Any],
        columns: tuple[str, ...] = (),  # what a token loss reads beside tokens
    ) -> None:
        self._exchange, self._read, self._plan = exchange, read, plan
        self._columns = (*ROW_COLUMNS, *FLAT_COLUMNS, *columns)
        self._jobs: SimpleQueue[Window | None] = SimpleQueue()
        self._thread: Thread | None = None
        self.windows, self.number = list[Window](), 0
        self._is_broken = False

    def add(self, batches: Sequence[Mapping[str, Any]], num_items: float | None, step: int) -> None:
        """Adds the batches of a coming step. Collective. Raises `PlanMismatchError`: not all ranks have announced an
        earlier step."""
        if self._is_broken:
            raise PlanMismatchError(
                "a step is announced after one that not all ranks had announced",
                why="all ranks exchange announced batches together, and one of them may still wait for the others",
                fix="make another SwitchedModel, or do not announce",
            )
        if self._thread is None:  # daemon: must not keep a failing process alive that waits for another rank
            self._thread = Thread(target=self._work, name="hotspa-rows", daemon=True)
            self._thread.start()
        of_rows = [{name: batch.get(name) for name in self._columns} for batch in batches]
        self.windows.append(Window(of_rows, num_items, step))
        self._jobs.put(self.windows[-1])
        self.number += 1

    def close(self) -> None:
        """Ends the thread, unless it may wait for another rank."""
        if self._thread is not None and not self._is_broken:
            self._jobs.put(None)
            self._thread.join()

    def give_up(self) -> None:
        """Drops all announcements, now and later: ranks have announced different numbers."""
        self.windows.clear()
        self._is_broken, self.number = True, 0

    def _work(self) -> None:
        while (window := self._jobs.get()) is not None:
            try:
                self._prepare(window)
                window.ready.set_result(None)
            except BaseException as failure:
                window.ready.set_exception(failure)

    def _prepare(self, window: Window) -> None:
        exchange, batches = self._exchange, window.batches
        sent_before = exchange.sent["rows_bytes"]
        try:
            window.documents = [self._read(batch) for batch in batches]
        except HotspaError as error:
            window.error, window.documents = error, [[] for _ in batches]
        of_batches = [facts_of(documents, window.num_items) for documents in window.documents]
        arrived = exchange.facts([window.error is not None, len(batches), *chain.from_iterable(of_batches)])
        if any(int(part[0]) or int(part[1]) != len(batches) for part in arrived):
            return
        rest = [part[2:] for part in arrived]
        for _ in batches:
            ends = [2 + 2 * int(part[1]) for part in rest]
            window.facts.append([part[:end] for part, end in zip(rest, ends, strict=True)])
            rest = [part[end:] for part, end in zip(rest, ends, strict=True)]
        of_step = Documents()
        for facts, documents in zip(window.facts, window.documents, strict=True):
            of_step.add(facts, documents, exchange.rank)
        self._plan(of_step, range(len(of_step)), window.step, exchange)
        window.of_step, window.sent_bytes = of_step, exchange.sent["rows_bytes"] - sent_before


# -- where all ranks meet ---------------------------------------------------------------------------------------------


class Meeting:
    """Where all ranks meet before a joint action: if theirs differ, all raise, and none waits for another.

    Attributes:
        sizes: Each rank's last `size`.
        of_model: Names the model in messages, after the action.
    """

    def __init__(
        self,
        agreement: Agreement,
        place: Callable[[], str],  # names the present step, for messages
        # whether this rank's caller has cleared gradients that others may still count on
        was_cleared: Callable[[], bool],
        # drops the calls that were not flushed: on all ranks, before they raise, or if one has cleared its gradients
        drop: Callable[[], None],
        announcements: Announcements,  # given up if the ranks' numbers differ
    ) -> None:
        self._agreement, self._place, self._was_cleared, self._drop = agreement, place, was_cleared, drop
        self._announcements, self.sizes, self.of_model = announcements, list[int](), ""

    def __call__(self, what: object, error: HotspaError | None = None, flag: bool = False, size: int = 0) -> list[bool]:
        """Returns when all ranks are about to do the same. Collective. Raises `HotspaError`: on every rank: the first
        rank's error, or that they are about to do different things.

        Args:
            what: What this rank is about to do; ranks compare its text.
            error: This rank's error.
            flag: For all ranks.
            size: How many numbers this rank is about to send; for `sizes`.

        Returns:
            The flag of each rank.
        """
        is_cleared = self._was_cleared()
        if self._agreement.group is None:  # one rank
            self.sizes = [size]
            if error is not None or is_cleared:
                self._drop()
            if error is not None:
                raise error
            return [flag]
        text = f"{what}{self.of_model}"
        values = [zlib.crc32(text.encode()), error is not None, is_cleared, self._announcements.number, flag, size]
        codes, failed, cleared, announced, flags, sizes = self._agreement.gather([*map(float, values)]).T.tolist()
        self.sizes = [*map(int, sizes)]
        if any(failed):  # checked first: the other ranks may be about to do more
            self._drop()
            self._agreement.check({}, error, self._place())
        if len(set(codes)) > 1:
            self._drop()
            raise self._different(text)
        if len(set(announced)) > 1:
            self._drop()
            self._announcements.give_up()
            raise PlanMismatchError(
                f"ranks have announced {', '.join(str(int(n)) for n in announced)} steps",
                where=self._place(),
                why="all ranks exchange announced batches together",
                fix="call announce on all ranks, or on none",
            )
        if any(cleared):
            self._drop()
        return [*map(bool, flags)]

    def _different(self, what: str) -> PlanMismatchError:
        texts = self._agreement.texts(what)
        by_text = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
        return PlanMismatchError(
            "ranks are about to do different things: "
            + "; ".join(f"{rank_names(ranks)}: {text}" for text, ranks in by_text.items()),
            where=self._place(),
            why="each call of a switched model is collective, and ranks train parts of one order of the same rows",
            fix="give all ranks the same rows, samplers and seeds, and make the same calls on them; `for batch in model.batches(loader)` gives batches without rows to ranks "
            "whose loaders have ended",
        )
