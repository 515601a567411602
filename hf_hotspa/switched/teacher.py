"""A teacher: a frozen model of any size with the vocabulary of the trained one, whose distributions the trained model's are
compared with, token by token.

It has a store of weights and replicas, under the strategies of the trained model. A pass that compares (`Mode.against`)
first runs the teacher's layers for the same packs. They leave the input of the teacher's head, [tokens, hidden size] in
host memory, and the shard of its head, on the ranks that will have the student's logits of these tokens. Beside each chunk
of the student's logits the teacher's are then computed from these: both lie in the same shard of the vocabulary, and a rank
never has more of them than of one chunk of a pack. A divergence needs three small exchanges of numbers of each token.

Shapes: T tokens of a chunk, V local vocabulary rows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_hotspa.data.collator import MicroBatch, MiniBatch
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import whole_parameters
from hf_hotspa.errors import HotspaConfigError, ModelError, UnsupportedError
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.parallel.collectives import Context
from hf_hotspa.parallel.loss import IGNORE
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.strategy import Bucket, Strategy
from hf_hotspa.switched.model_object import as_built
from hf_hotspa.switched.scores import over_shards
from hf_hotspa.switched.tape import pieces

SLICE_BYTES = 16 << 20  # of a chunk's logits whose probabilities exist at a time


# -- divergences ------------------------------------------------------------------------------------------------------


class _Divergence(torch.autograd.Function):
    """The generalised Jensen-Shannon divergence of each token's distributions p of the student and q of the teacher, and
    the entropy H of p (Agarwal et al., 2024, On-Policy Distillation of Language Models, equation 1):

        beta 0: KL(q || p);  beta 1: KL(p || q);  else beta KL(q || m) + (1 - beta) KL(p || m), m = (1 - beta) p + beta q.

    Their gradients by the student's z: p - q; p (log p - log q - KL); (1 - beta) p (log p - log m - KL(p || m)); and
    -p (log p + H). Probabilities are computed again in the backward.
    """

    @staticmethod
    def forward(
        ctx: Context, logits: Tensor, others: Tensor, valid: Tensor, group: dist.ProcessGroup | None, beta: float,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = torch.promote_types(logits.dtype, torch.float32)
        tokens, width = logits.shape
        lowest = torch.finfo(wide).min
        peaks = torch.full((2, tokens), lowest, dtype=wide, device=logits.device)
        if width:
            for row, z in zip(peaks, (logits, others), strict=True):
                row.copy_(z.amax(-1)).div_(temperature).clamp_(min=lowest)
        over_shards(peaks, group, dist.ReduceOp.MAX)
        totals = torch.zeros_like(peaks)
        for part in _slices(tokens, width, wide):
            for total, peak, z in zip(totals, peaks, (logits, others), strict=True):
                total[part] = (z[part].to(wide) / temperature).sub_(peak[part, None]).exp_().sum(-1)
        log_totals = peaks + over_shards(totals, group).log_()
        sums = peaks.new_zeros(3, tokens)
        for part in _slices(tokens, width, wide):
            log_p, log_q = _log_probabilities((logits, others), log_totals, part, temperature)
            sums[0, part], sums[1, part] = _divergences(log_p, log_q, beta)
            sums[2, part] = -(log_p.exp() * log_p).sum(-1)
        divergence, of_student, entropy = over_shards(sums, group)
        ctx.save_for_backward(logits, others, valid, log_totals, of_student, entropy)
        ctx.beta, ctx.temperature = beta, temperature
        return torch.where(valid, divergence, 0.0), torch.where(valid, entropy, 0.0)

    @staticmethod
    def backward(ctx: Context, of_divergence: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, others, valid, log_totals, of_student, entropy = ctx.saved_tensors
        wide, gradient = log_totals.dtype, torch.empty_like(logits)
        of_divergence, of_entropy = (
            torch.where(valid, x / ctx.temperature, 0.0)[:, None] for x in (of_divergence, of_entropy)
        )
        for part in _slices(len(logits), logits.shape[1], wide):
            log_p, log_q = _log_probabilities((logits, others), log_totals, part, ctx.temperature)
            of_z = _gradient(log_p, log_q, of_student[part, None], ctx.beta) * of_divergence[part]
            of_z -= log_p.exp() * (log_p + entropy[part, None]) * of_entropy[part]
            gradient[part] = of_z
        return gradient, None, None, None, None, None


def _slices(tokens: int, width: int, dtype: torch.dtype) -> Iterator[slice]:
    step = max(1, SLICE_BYTES // max(width * dtype.itemsize, 1))
    return (slice(begin, begin + step) for begin in range(0, tokens if width else 0, step))


def _log_probabilities(
    tables: tuple[Tensor, Tensor], log_totals: Tensor, part: slice, temperature: float
) -> Iterator[Tensor]:
    """[t, V] of both; finite for a masked row of the vocabulary, where p log p would be NaN."""
    for z, log_total in zip(tables, log_totals, strict=True):
        log_p = z[part].to(log_total.dtype) / temperature
        yield log_p.sub_(log_total[part, None]).clamp_(min=torch.finfo(log_p.dtype).min)


def _log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))


def _divergences(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """This shard's part of each token's divergence, and of the term of it that its gradient needs."""
    if beta in (0.0, 1.0):
        one, other = (log_q, log_p) if beta == 0.0 else (log_p, log_q)
        divergence = (one.exp() * (one - other)).sum(-1)
        return divergence, divergence
    log_m = _log_mixture(log_p, log_q, beta)
    of_student, of_teacher = ((x.exp() * (x - log_m)).sum(-1) for x in (log_p, log_q))
    return beta * of_teacher + (1 - beta) * of_student, of_student


def _gradient(log_p: Tensor, log_q: Tensor, of_student: Tensor, beta: float) -> Tensor:
    """[t, V]: by the student's logits."""
    if beta == 0.0:
        return log_p.exp() - log_q.exp()
    log_m = log_q if beta == 1.0 else _log_mixture(log_p, log_q, beta)
    return log_p.exp() * (log_p - log_m - of_student) * (1.0 if beta == 1.0 else 1 - beta)


def divergences(
    logits: Tensor,  # [T, V], this rank's rows of the vocabulary, in any floating dtype
    others: Tensor,  # [T, V], the teacher's, of the same rows
    valid: Tensor,  # bool [T], the tokens that count
    group: dist.ProcessGroup | None = None,  # the tensor-parallel group; None if the vocabulary is whole
    *,
    beta: float,
    temperature: float = 1.0,  # of both distributions
) -> tuple[Tensor, Tensor]:
    """The generalised Jensen-Shannon divergence, and the student's entropy, of each token: [T] each, fp32 or wider, equal
    on all ranks of the group, 0 where `valid` is False. Gradients reach `logits` alone."""
    return _Divergence.apply(logits, others, valid, group, beta, temperature)  # type: ignore[no-any-return]


# -- the teacher ------------------------------------------------------------------------------------------------------


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class _Layers(Attachment):
    """On a replica of the teacher: keeps the input of the head, and its weights, in the place of head and loss."""

    def __init__(self, replica: Replica, hidden: dict[int, Tensor], lengths: Callable[[int], int]) -> None:
        self._replica, self._hidden, self._lengths = replica, hidden, lengths
        self._output: Tensor | None = None
        self._head: list[Tensor] = []
        if replica.is_last:
            replica.head.instead = self._take

    def _take(self, hidden: Tensor, inputs: dict[str, Any]) -> Tensor:
        tail = self._replica.head.tail
        assert tail is not None
        self._output = hidden
        tail(hidden[:, :1], inputs)  # a strategy that loads units one at a time loads the head's for it
        if not self._head:
            self._head = [parameter.detach().clone() for parameter in tail.parameters]
        return torch.zeros((), dtype=torch.float64, device=hidden.device)

    def loss(
        self, whole: MicroBatch, scale: float, tokens: Callable[[Tensor], Tensor], is_counted: bool, prefix: object
    ) -> None:
        """See `Attachment`."""
        if self._output is None:
            return
        of_pack, self._output = tokens(self._output[0]), None
        for document, positions, place in pieces(whole):
            if document not in self._hidden:
                self._hidden[document] = torch.zeros(
                    self._lengths(document), of_pack.shape[1], dtype=of_pack.dtype, device="cpu"
                )
            self._hidden[document][positions] = of_pack[place].to("cpu")

    def put_head(self) -> None:
        """Gives the head its weights, while the replica has none."""
        tail = self._replica.head.tail
        for parameter, kept in zip(tail.parameters if tail is not None else (), self._head, strict=False):
            parameter.data = kept

    def forget(self) -> None:
        if self._head:
            self._head = []
            self._replica.release()

    def logits(self, micro_batch: MicroBatch, tokens: slice) -> Tensor:
        """[T, V] of some tokens of a pack of the student."""
        tail = self._replica.head.tail
        assert tail is not None
        some = next(iter(self._hidden.values()))
        hidden = some.new_zeros(tokens.stop - tokens.start, some.shape[1])
        for document, positions, place in pieces(micro_batch):
            first, stop = max(place.start, tokens.start), min(place.stop, tokens.stop)
            if first < stop:
                shift = positions.start - place.start
                part = self._hidden[document][first + shift : stop + shift]
                hidden[first - tokens.start : stop - tokens.start] = part
        with torch.no_grad():
            return tail(hidden[None].to(micro_batch.labels.device), {"use_cache": False})


class Teacher:
    """A frozen model to compare a trained one with. Keeps `model` unchanged; its weights are divided over the ranks
    like the student's, in the dtype that the model has. `model`: a transformers causal language model with weights and
    the student's vocabulary, of any size. `student`: the engine of the trained model. Raises `HotspaError`: on every
    rank: the model cannot run under a strategy of the student, or has another vocabulary; stages of the student update
    by themselves."""

    def __init__(self, model: nn.Module, student: HotSPaEngine) -> None:
        if student.updates is not None:
            raise UnsupportedError(
                "a teacher, where stages update after every pack",
                why="its layers run for a complete phase before the student's",
                fix="use hotspa_pipeline_mode=synchronous",
            )
        self.module = model
        self._hidden, self._layers = dict[int, Tensor](), dict[Strategy, _Layers]()
        self._documents: Sequence[int] = ()
        options = replace(
            student.options, loss=None, label_smoothing=0.0, stage_costs=None, pair_costs={}, record_auxiliary=False
        )
        pool = {strategy: strategy for strategy in student.phases}  # with the student's order of shards
        buckets = list[Bucket]()
        for bucket in student.buckets:
            own = pool[bucket.strategy]
            buckets.append(replace(bucket, strategy=own.ordered(own.shard_order or tuple(range(own.tp)))))
        with _frozen(model), as_built(bare_model(model)[0]):
            self.engine = HotSPaEngine(model, buckets, options, device=student.device)
        self._check_vocabulary(student)
        self.engine.attach(self._attach)

    def _check_vocabulary(self, student: HotSPaEngine) -> None:
        for strategy, runner in student.phases.items():
            own, other = (r.replica.head.objective.logit_widths for r in (self.engine.phases[strategy], runner))
            if own != other:
                self.engine.close()
                raise ModelError(
                    f"the teacher has {sum(own)} logits of a token and the student {sum(other)}",
                    where=f"strategy {strategy}, {own} and {other} on the ranks of tp",
                    why="their distributions are compared over one vocabulary",
                    fix="use a teacher with the student's tokenizer and vocabulary size",
                )

    def _attach(self, replica: Replica) -> _Layers:
        layers = _Layers(replica, self._hidden, lambda document: self._documents[document])
        if replica.is_last:
            self._layers[replica.mesh.strategy] = layers
        return layers

    def against(self, beta: float, temperature: float = 1.0) -> "Against":
        """What a call of the trained model is compared with: `model(..., labels=labels, against=...)`. Raises
        `HotspaConfigError`: `beta` is not between 0 and 1, or `temperature` not above 0."""
        if not 0.0 <= beta <= 1.0 or not temperature > 0.0:
            raise HotspaConfigError(
                f"a divergence with beta={beta} and temperature={temperature}",
                fix="use a beta from 0 (forward) to 1 (reverse), and a temperature above 0",
            )
        return Against(self, float(beta), float(temperature))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads other weights. On all ranks, the same."""
        keys = self.module.load_state_dict(state_dict, strict, assign)
        self.engine.master.fill(whole_parameters(self.module))
        return keys

    def run(self, mini_batch: MiniBatch, lengths: Sequence[int]) -> None:
        """Runs the layers for a mini-batch of the student, with documents of these lengths. Collective."""
        self.forget()
        self._documents = lengths
        with self.engine.evaluation() as evaluation, torch.no_grad():
            evaluation.run(mini_batch)
        self.engine.free_weights()  # the student's pass needs the memory
        for layers in self._layers.values():
            layers.put_head()

    def forget(self) -> None:
        """Drops what the last `run` has left. Not collective."""
        self._hidden.clear()
        for layers in self._layers.values():
            layers.forget()

    def logits(self, strategy: Strategy, micro_batch: MicroBatch, tokens: slice) -> Tensor:
        """[T, V] of some tokens of a pack of the student, in this rank's shard of the vocabulary."""
        return self._layers[strategy].logits(micro_batch, tokens)

    def close(self) -> None:
        """Ends the engine. Collective."""
        self.forget()
        self.engine.close()


class Against(NamedTuple):
    """A comparison with a teacher. `beta`: 0 for the forward, 1 for the reverse divergence, between them generalised
    Jensen-Shannon. `temperature`: of both distributions."""

    teacher: Teacher
    beta: float
    temperature: float

    def __str__(self) -> str:
        return f"a teacher, beta {self.beta}, temperature {self.temperature}"

    def begin(self, mini_batch: MiniBatch, lengths: Sequence[int]) -> None:
        self.teacher.run(mini_batch, lengths)

    def scores(
        self,
        logits: Tensor,
        strategy: Strategy,
        micro_batch: MicroBatch,
        tokens: slice,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        others = self.teacher.logits(strategy, micro_batch, tokens)
        valid = micro_batch.labels[0][tokens] != IGNORE
        return divergences(logits, others, valid, group, beta=self.beta, temperature=self.temperature)

    def end(self) -> None:
        self.teacher.forget()
