"""What the callers of a switched model get: how it is computed (`Runner`), and how it is returned (`Outputs`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput, MoeCausalLMOutputWithPast

from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import HotspaError, UnsupportedError
from hf_hotspa.parallel.loss import FIELDS, WITH_ARG_MAX
from hf_hotspa.switched.calls import (
    ANCHOR,
    Call,
    Compared,
    EveryToken,
    LazyLogits,
    Leaf,
    Looks,
    Meeting,
    OfLoss,
    Reading,
    Request,
    Steps,
    too_many_logits,
)
from hf_hotspa.switched.passes import Mode, Passes, Results, Upstream, Wanted


class Runner:
    """Computes what the callers of one model get, in the cheapest way; the same on all ranks.

    Attributes:
        temperature: The divisor of logits of TRL's output.
        is_of_own: Whether the loss is the engine's token loss.
    """

    def __init__(
        self, steps: Steps, meet: Meeting, prepare: Callable[[Request], None], store: MasterStore | None
    ) -> None:
        """`prepare`: makes the replicas act as a request wants."""
        self.steps, self.meet, self._passes, self._assumptions = steps, meet, steps.passes, steps.assumptions
        self.prepare, self.store, self.temperature = prepare, store, 1.0
        self.is_of_own = steps.own is not None and store is None
        self.looks = steps.assumptions.looks if store is None else Looks()

    def run(self, call: Call, request: Request) -> None:
        """Computes what is known to be read."""
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


@dataclass(eq=False)
class Outputs:
    """What forward returns for a call; its tensors are leaves of the caller's graph."""

    _runner: Runner
    _passes: Passes
    _call: Call
    _request: Request

    def of_transformers(self) -> ModelOutput:
        """As transformers' forward returns."""
        request, call, loss, aux = self._request, self._call, None, None
        denominator = call.denominators[self._runner.steps.engine.rank]
        logits: Tensor = LazyLogits(self.logits, self.arg_max)
        if request.wants_loss:
            if request.function is not None:
                logits, targets = self.logits(), {"labels": request.batch.get("labels")}
                if (shifted := request.batch.get("shift_labels")) is not None:
                    targets["shift_labels"] = shifted
                items, vocab_size = request.given_items, logits.shape[-1]
                loss = request.function(logits=logits, vocab_size=vocab_size, num_items_in_batch=items, **targets)
            elif not self._runner.is_of_own and not isinstance(call.assumed, OfLoss):
                loss = -self._leaf(call.add_scores, call.column(0, self._passes.wide)).sum() / denominator
            else:
                value = torch.tensor(call.own, dtype=torch.float64)
                if not self._runner.is_of_own:
                    sums = call.results.sums if call.has.sums else call.sums_of_tokens()
                    total = -sum(map(sums.__getitem__, call.mine))
                    value = torch.tensor(total, dtype=torch.float64) / denominator
                loss = value.to(call.device, self._passes.wide)
                if request.trains:
                    (loss,) = Leaf.apply(ANCHOR, call.add_factor, loss)
            if request.aux:
                loss, aux = self._with_aux(loss)
        if self._passes.auxiliary is not None:
            return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux, logits=logits)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _leaf(self, take: Callable[..., None], value: Tensor) -> Tensor:
        """A leaf, if gradients will come."""
        return Leaf.apply(ANCHOR, take, value)[0] if self._request.trains else value

    def _with_aux(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Adds transformers' `load_balancing_loss_func` of this rank's batch; also returns it alone."""
        call, auxiliary = self._call, self._passes.auxiliary
        assert auxiliary is not None
        aux = self._leaf(call.add_auxiliary, call.auxiliary(auxiliary)[0].to(call.device, self._passes.wide))
        return loss + auxiliary.coefficient * aux, aux

    def of_trl(self) -> object:
        """As TRL's forward returns with `fused_lm_head`; a comparison returns `Compared`."""
        from trl.trainer.utils import FusedCausalLMOutput

        call, request = self._call, self._request
        columns = {name: call.column(FIELDS.index(name), self._passes.wide) for name in request.columns}
        if request.trains:
            with_gradient = [name for name in ("log_probs", "entropy") if name in columns]
            of_caller = Leaf.apply(ANCHOR, call.add_scores, *(columns[name] for name in with_gradient))
            columns |= dict(zip(with_gradient, of_caller, strict=True))
        if "is_top1" in columns:
            columns["is_top1"] = columns["is_top1"] > 0.5
        mask = call.mask[:, : call.shape[1] - call.shift].to(call.device)
        of = mask.sum().clamp(min=1) if request.num_items is None else request.num_items
        if request.against is not None:
            return Compared(columns["log_probs"], columns["entropy"], mask)
        loss, aux = -columns["log_probs"].sum() / of, None
        if request.aux:
            loss, aux = self._with_aux(loss)
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux, **columns)

    def logits(self) -> Tensor:
        """[B, L, V], or the requested columns, of the step's weights. Collective."""
        call, request, runner = self._call, self._request, self._runner
        self._note_reading(Reading.LOGITS, too_many_logits(call.shape, runner.steps))
        results = call.results
        if not call.has.logits:
            runner.prepare(request)
            results = runner.score([call], request, Wanted(logits=True))
        return self._kept(self.numbers(results))

    def numbers(self, results: Results) -> Tensor:
        """[B, L, V], of the last of `Wanted.logits`."""
        call = self._call
        call.has = call.has._replace(logits=False)  # now the caller's
        parts = [results.logits.pop(number) for number in call.mine]
        dtype = self._runner.steps.engine.description.compute_dtype
        return self._leaf(
            call.add_logits, call.lay_out_logits(parts, dtype, self._passes.num_logits, self._passes.pools)
        )

    def arg_max(self) -> Tensor:
        """int64 [B, L], or the requested columns: the token with the largest logit. Collective."""
        call, request, runner = self._call, self._request, self._runner
        self._note_reading(Reading.ARG_MAX, None)
        results = call.results
        if call.has.fields < WITH_ARG_MAX:
            runner.prepare(request)
            results = runner.score([call], request, Wanted(WITH_ARG_MAX))
        parts = [results.tokens[number][:, WITH_ARG_MAX - 1] for number in call.mine]
        return self._kept(call.lay_out(parts, torch.int64))

    def _kept(self, columns: Tensor) -> Tensor:
        """The requested columns of [B, L, ...]."""
        kept = self._request.kept
        if isinstance(kept, Tensor):
            return columns[:, kept]
        return columns[:, -kept:] if kept else columns

    def _note_reading(self, reading: Reading, error: HotspaError | None) -> None:
        """All ranks read something of this call's logits, which are of the step's weights."""
        call, request, runner, steps = self._call, self._request, self._runner, self._runner.steps
        is_old = runner.store is None and call.version != steps.version
        if is_old or (request.trains and call not in steps.now.calls):
            error = UnsupportedError(
                "logits were read after the step",
                where=f"rank {steps.engine.rank}, {steps.place}",
                why="their weights have been replaced",
                fix="use the logits before flush and optimizer.step()",
            )
        runner.meet("read logits" if reading is Reading.LOGITS else "read the largest logits", error)
        runner.looks.note((request.training, request.trains), reading)
