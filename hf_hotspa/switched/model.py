"""`SwitchedModel`: what a Trainer, or your own training loop, calls in place of its model.

Used like `DistributedDataParallel`: every rank calls it with its own batch, and gradients are means over ranks. Inside,
all ranks exchange their rows, plan them together over the engine's strategies, and get back their rows' results. What a
call costs, and why: docs/switched-model.md and docs/inside-switched.md; an example: examples/bare_loop.py.

`forward`, `flush`, the first read of logits, and methods that say so are collective: all ranks make the same calls, or
all raise.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import itemgetter
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput, MoeCausalLMOutputWithPast

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights, whole_parameters
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import HotspaError, UnsupportedError
from hf_hotspa.model.model_kind import Readout, has_absolute_positions
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.report import StepReport
from hf_hotspa.rows.read_row import RowRules
from hf_hotspa.strategy import Bucket
from hf_hotspa.switched import model_object, passes
from hf_hotspa.switched.calls import (
    ANCHOR,
    Asked,
    Batch,
    Call,
    Compared,
    LazyLogits,
    Leaf,
    Meeting,
    OfLoss,
    Reading,
    Request,
    Runner,
    Step,
    Steps,
    Window,
    labels_of_columns,
    too_many_logits,
    unreadable,
)
from hf_hotspa.switched.passes import Mode, Passes, Results, Upstream, Wanted
from hf_hotspa.switched.scores import FIELDS, WITH_ARG_MAX

LOGIT_BYTES, CUT = 4 << 30, ("num_truncated", "num_split", "num_dropped", "num_empty")


class CalledModel(DistributedDataParallel):
    """What a trained and a frozen model have in common: calls of all ranks. A DDP by type only (its constructor is never
    called): accelerate's `unwrap_model` returns the model."""

    trains = looks = find_unused_parameters = static_graph = require_backward_grad_sync = False
    _changes: model_object.ObjectChanges | None = None  # of a trained model

    def __init__(self, model: nn.Module, steps: Steps, meet: Meeting, store: MasterStore | None, guards: bool) -> None:
        """`store`: weights to use instead of the engine's. `guards`: see `SwitchedModel`."""
        nn.Module.__init__(self)
        engine = self.engine = steps.engine
        self.module, self.longest = model, max(bucket.longest for bucket in engine.buckets)
        # both are read in each step: avoids a search in submodules
        self.__dict__.update(module=model, _bare=bare_model(model)[0])
        head = model_object.fused_head(self._bare, engine.description.compute_dtype)
        self._adapters, self._readout = model_object.AdapterLayers(model, engine), engine.description.readout
        self._steps, self._passes, self._meet = steps, steps.passes, meet
        adapters = self._adapters
        prepare = (lambda request: adapters.set_replicas(request.adapters)) if adapters.exist else None
        self._runner = Runner(steps, meet, prepare, store)
        self._runner.temperature = float(head.get("temperature", 1.0))
        asked = ("log_probs", *head.get("outputs", ()))
        self._head_fields = [name for name in FIELDS if name in asked]
        self._columns = steps.columns if store is None else ()
        self._documents: Callable[[Batch], list[passes.Document]] = partial(
            passes.read_batch,
            vocab_size=engine.description.shape.vocab_size,
            longest=self.longest,
            rank=engine.rank,
            rules=RowRules(absolute_positions=has_absolute_positions(self._bare.config), columns=self._columns),
        )
        self._guards, self._route = guards, model_object.Route(model, self)
        self._route.set(not guards)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's own, with the current weights. Collective."""
        self.refresh()
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def refresh(self) -> None:
        """Writes the current weights into the model if they are not there. Collective."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def join(self, *_: object, **__: object) -> Any:
        """DDP's method for ranks with unequal numbers of batches; use `batches` instead. Raises `UnsupportedError`:
        always."""
        raise UnsupportedError(
            "join() of a switched model",
            why="a rank owns a share of the weights, and must make every optimizer step",
            fix="for batch in model.batches(loader): ranks whose loaders have ended get batches without rows",
        )

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Does nothing: only `flush` exchanges gradients."""
        return nullcontext()

    @property
    def step(self) -> int:
        """Steps before this one in the run; a resumed run sets it. Dropout depends on it."""
        return self._steps.number

    @step.setter
    def step(self, number: int) -> None:
        self._steps.number = number

    @property
    def is_routed(self) -> bool:
        """Whether calls of the model object come here."""
        return self._route.is_on

    @contextmanager
    def routed(self, on: bool = True) -> Iterator[None]:
        """Inside, calls of the model object come here, or (`on` False) it computes by itself. May be nested."""
        was = self._route.set(on)
        try:
            yield
        finally:
            self._route.set(was)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **asked: Unpack[Asked],
    ) -> Any:
        """Returns what transformers' forward returns, or TRL's with `fused_lm_head`, for this rank's batch: int64 [B, L],
        with no rows or more. Collective.

        Args:
            attention_mask: 1 for tokens and 0 for padding.
            position_ids: From 0 in each document.
            **asked: `labels` and more, see `Asked`; others raise an error unless they have no effect in training.

        Raises:
            HotspaError: on every rank: one cannot read its batch, or calls differ. Nothing was computed; calls that
                were not flushed are dropped.
        """
        batch: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        if self._readout is not None:
            return self._read_tokens(self._readout, batch | asked)
        given = asked.keys() - Asked.__annotations__.keys()
        others, of_side = self._others(given, asked) if given else ({}, {})
        error = unreadable(input_ids, others, self._columns, self.engine.rank) if others or input_ids is None else None
        for name in ("labels", "shift_labels", "seq_idx", *passes.FLAT_COLUMNS, *self._columns):
            batch[name] = asked.get(name)
        kept, labels = asked.get("logits_to_keep", 0), batch["labels"]
        if labels is not None and input_ids is not None and labels.shape[-1] != input_ids.shape[-1]:
            batch["labels"] = labels_of_columns(labels, input_ids.shape[-1], kept)
        against, items = asked.get("against"), asked.get("num_items_in_batch")
        fused, fields = asked.get("fused_lm_head", False) or against is not None, self._head_fields
        wants_loss = not fused and (batch["labels"] is not None or batch["shift_labels"] is not None)
        function = vars(self._bare).get("_loss_function") if wants_loss and not self._runner.is_of_own else None
        request = Request(
            batch,
            num_items=None if items is None else float(items),
            columns=() if not fused else fields if against is None else FIELDS[:2],
            fields=0 if not fused else FIELDS.index(fields[-1]) + 1 if against is None else 2,
            wants_loss=wants_loss,
            aux=self._passes.auxiliary is not None and self._wants_aux(asked),
            kept=kept,
            expected=asked.get("expected_seeds"),
            trains=self.trains and torch.is_grad_enabled(),
            training=self.training,
            given_items=items,
            function=None if function is ForCausalLMLoss else function,
            against=against,
            side=of_side,
        )
        if against is not None:
            error = error or request.error(self.engine.rank)
        call = self._take(request, error)
        self._runner.run(call, request)
        outputs = Outputs(self._runner, self._passes, call, request)
        if fused:
            return outputs.of_trl()
        out = outputs.of_transformers()
        return out if asked.get("return_dict") is not False else out.to_tuple()

    def _others(self, given: Container[str], asked: Asked) -> tuple[dict[str, object], dict[str, object]]:
        """The arguments without a parameter of their name: unknown ones, and what `SideInputs` are made of."""
        names = self._passes.side.names if self._passes.side is not None else frozenset[str]()
        others: dict[str, object] = {name: value for name, value in asked.items() if name in given}
        return {n: v for n, v in others.items() if n not in names}, {n: v for n, v in others.items() if n in names}

    def _read_tokens(self, readout: Readout, given: dict[str, Any]) -> Any:
        """What the model's own forward makes of the numbers of this rank's tokens."""
        is_given = given["input_ids"] is not None
        error = readout.error(self._bare, given) if is_given else unreadable(None, {}, (), self.engine.rank)
        request = Request.of_tokens(given, self.trains and torch.is_grad_enabled(), self.training)
        call = self._take(request, error)
        self._runner.read(call, request)
        numbers = Outputs(self._runner, self._passes, call, request).numbers(call.results)
        return readout.outputs(self._bare, numbers, given)

    def _wants_aux(self, asked: Asked) -> bool:
        given = asked.get("output_router_logits") if asked.get("against") is None else False
        of_config = getattr(self._bare.config.get_text_config(), "output_router_logits", False)
        return bool(of_config if given is None else given)

    def _take(self, request: Request, error: HotspaError | None) -> Call:
        """Takes part in a call of all ranks."""
        documents, error = self._read(request, error)
        mine = passes.facts_of(documents, request.num_items)
        self._meet(request, error, size=len(mine))
        if request.changes:
            self._apply_changes()
        facts = self._passes.exchange.facts(mine, self._meet.sizes)
        call = Call(request.batch, documents, facts, passes.Documents(), self._steps, request.training)
        return call if self._passes.side is None else self._with_side(call, request)

    def _with_side(self, call: Call, request: Request) -> Call:
        """A call with what enters beside its tokens. Collective."""
        side, of = self._passes.side, call.of_step
        if side is None or not any(map(of.side.__getitem__, call.everything)):
            return call
        given = (
            self._bare, {**request.batch, **request.side, "against": request.against}, call.documents, request.trains,
        )  # fmt: skip
        if self._changes is not None:
            self.engine.beside.load(self._steps.version, request.trains)
        try:
            with model_object.structure_only():
                made = self.engine.agreement.run(self._steps.place, lambda: side.make(self._passes, *given))
        except HotspaError:
            self._steps.drop()
            raise
        of.beside |= zip(call.mine, made, strict=True)
        return call

    def _read(
        self, request: Request, error: HotspaError | None, is_known: bool = False
    ) -> tuple[list[passes.Document], HotspaError | None]:
        """Notes in the request what has changed in the model object, and returns this rank's documents: none after an
        error, and if they are known (`is_known`)."""
        changes, begins = self._changes, request.trains and not self._steps.now.calls
        if changes is not None and (begins or (self.looks and not request.trains)):
            request.changes, wrong = changes.inspect_modules(trains=request.trains)
            error = error or wrong
        if self._adapters.exist:
            request.adapters, words, wrong = self._adapters.inspect(bool(self._steps.now.calls))
            request.changes, error = request.changes + words, error or wrong
        is_frozen = begins and changes is not None and changes.all_frozen
        if error is None and request.trains and (request.adapters != self._adapters.trained or is_frozen):
            error = model_object.nothing_to_train(request.adapters, self._adapters.trained, self.engine.rank)
        if error is None and not is_known:
            try:
                documents, side = self._documents(request.batch), self._passes.side
                return documents if side is None else side.counted({**request.batch, **request.side}, documents), None
            except HotspaError as unreadable_rows:
                error = unreadable_rows
        return [], error

    def _apply_changes(self) -> None:
        self._passes.let_go()
        self._adapters.apply()
        if self._changes is not None:
            self._changes.apply()


class SwitchedModel(CalledModel):
    """See above.

    Args:
        model: A transformers model, or a `PeftModel` around one. Keeps its initial weights until `write_back`. Until
            `close`, calls of it come here, except generation, which gets the current weights.
        buckets: As for `HotSPaEngine`.
        options: As for `HotSPaEngine`; no loss other than a `TokenLoss`: the caller computes the loss.
        weights: Folder of the weights, for a model without them.
        logit_bytes: The most host memory for a batch's logits, or their gradients, on a rank.
        guards: Whether a Trainer owns the model object: calls of it come here only inside `routed`, and reading its old
            weights is an error.

    Attributes:
        longest: Tokens of the longest sequence that any bucket takes.
        report: Of the last flushed step; None before.
        passes: The plan and the report of each of its training passes.
        missed: Announced steps for which other batches came.
        cut: How many of this rank's rows in this step their reader has cut, for the report.
        assumptions: Which gradients are assumed before they come; a resumed run needs its `state_dict` for the same
            bits.
        trains: Whether calls with autograd enabled are training; else they are scored, without gradients.
        looks: Whether scored calls apply changes of the model object (`take_changes`).
    """

    trains = True
    _changes: model_object.ObjectChanges
    # called with an optimizer that is about to step and has other parameters, too
    on_other_parameters: Callable[[Optimizer], None] | None = None

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        options: EngineOptions | None = None,
        *,
        weights: Path | None = None,
        device: torch.device | None = None,
        logit_bytes: int = LOGIT_BYTES,
        guards: bool = False,
    ) -> None:
        options = replace(options or EngineOptions(), record_auxiliary=True)
        model_object.refuse_losses(options)
        model_object.refuse_other_forward(bare_model(model)[0])
        with model_object.as_built(bare_model(model)[0]):
            engine = HotSPaEngine(model, buckets, options, weights=weights, device=device)
        steps = Steps(engine, logit_bytes)
        super().__init__(model, steps, Meeting(steps), None, guards)
        self._changes = model_object.ObjectChanges(model, engine)
        self._changes.show(engine.initial.digest)
        self.report: StepReport | None = None
        self.passes: Sequence[passes.Trained] = ()
        self._written = self.missed = 0
        self.cut = dict.fromkeys(CUT, 0)
        self.assumptions, self._announced = steps.assumptions, list[Window]()
        self._hook = model_object.before_steps(self)
        if not engine.initial.were_equal:  # as DistributedDataParallel does
            self._changes.digest = None
            self.write_back()
            self._changes.show()

    # -- what a Trainer uses as its model -----------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's 1-D fp32 share of every trained parameter, by Hugging Face name: for an optimizer."""
        named = self.engine.named_parameters()
        return ((f"{prefix}.{name}", p) for name, p in named) if prefix else named

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights into the model and the shares of all ranks; an optimizer keeps its state. On all ranks."""
        model_object.release(self.module)
        keys = self.module.load_state_dict(state_dict, strict, assign)
        self.engine.master.fill(whole_parameters(self.module))
        self.weights_are(current=True)
        return keys

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, and the calls that were not flushed. On all ranks."""
        if self._steps.now.calls:
            self._steps.drop()
        if set_to_none:
            self.engine.master.bind_gradients(())
        else:
            self.engine.master.zero_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Flushes, clips by the global norm, and returns the norm before clipping. Raises `UnsupportedError`: another
        norm than the 2-norm."""
        if norm_type != 2.0:
            raise UnsupportedError(f"clipping by the {norm_type}-norm", fix="use the 2-norm")
        self.flush()
        engine = self.engine  # if stages update, they have clipped already, or not at all
        norm = engine.clip_grad_norm_(float(max_norm)) if engine.updates is None else engine.grad_norm
        return torch.tensor(norm, dtype=torch.float64)

    @property
    def is_current(self) -> bool:
        """Whether the model has the current weights."""
        return self._written == self._steps.version

    def refresh(self) -> None:
        """Writes the current weights into the model if they are not there. Collective."""
        if not self.is_current:
            self.write_back()

    def show(self) -> None:
        """Like `refresh`; the next step uses weights that the caller then changes. Collective."""
        self.refresh()
        model_object.release(self.module)
        self._changes.show()

    def write_back(self) -> None:
        """Gives the model the current weights, if it holds any. Collective."""
        self._meet("write the weights back")
        if has_weights(self.module):
            model_object.release(self.module)
            self.engine.write_back(self.module)
            self._route.is_empty = False
            self._route.set(self._route.is_on)
        self._written = self._steps.version

    def take_changes(self, anew: bool = False, inside: bool = False) -> bool:
        """Applies changes of the model object (`ObjectChanges`), as each step does first. Collective. `anew`: returns
        whether a new switched model has to be made, instead of an error for unsupported changes. `inside`: whether
        accumulated batches follow in this step; any change is then an error. Raises `HotspaError`: on every rank: a
        change is not supported, or ranks have changed different things."""
        words, error = self._changes.inspect_modules(inside)
        _, more, adapters_error = self._adapters.inspect(inside)
        words, error = words + more, error or adapters_error or (self._changes.inspect_hooks() if anew else None)
        if any(self._meet(f"continue{words}", None if anew else error, error is not None)):
            return True
        if words:
            self._apply_changes()
        return False

    def weights_are(self, current: bool) -> None:
        """Notes new weights in the engine; `current`: the model has them, too. On all ranks."""
        self._steps.drop()
        self._steps.version += 1
        self._changes.digest = None
        if current:
            self._written = self._steps.version
            self._changes.show()
        elif self._guards:
            model_object.guard(self.module)

    def close(self) -> None:
        """Ends the engine; the model keeps the weights of the last `write_back`. Collective."""
        self._hook.remove()
        self._steps.drop()
        self._route.close()
        model_object.release(self.module)
        self.engine.close()

    # -- batches ------------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields this rank's batches, then batches without rows until all ranks' loaders have ended. Collective."""
        iterator = iter(loader)
        empty: dict[str, Any] = dict.fromkeys(
            (*passes.ROW_COLUMNS[:2], "labels"), torch.zeros((0, 1), dtype=torch.int64)
        )
        while True:
            batch = next(iterator, None)
            if not any(self._meet("take a batch", flag=batch is not None)):
                return
            if batch is not None:
                rows = {name: value for name, value in batch.items() if name not in passes.FLAT_COLUMNS}
                empty = {name: value[:0] if isinstance(value, Tensor) else value for name, value in rows.items()}
            yield dict(batch if batch is not None else empty)

    def announce(self, batches: Sequence[Mapping[str, Any]], num_items: float | Tensor | None = None) -> None:
        """Announces all batches of the next optimizer step: they run as one pass when the first of them is called. Not
        collective; may be called several steps ahead. `batches`: what `forward` will get, in order; as many on all
        ranks. `num_items`: the `num_items_in_batch` to come with them."""
        names: tuple[str, ...] = (*passes.ROW_COLUMNS, *passes.FLAT_COLUMNS, *self._columns)
        if self._readout is not None:  # its labels and losses stay in its own forward
            names, num_items = passes.ROW_COLUMNS[:3], None
        if self._passes.side is not None and any(
            batch.get(name) is not None for name in self._passes.side.names for batch in batches
        ):
            return  # each call makes what enters beside its tokens, with the weights of its step
        rows = [{name: batch.get(name) for name in names} for batch in batches]
        self._announced.append(Window(rows, None if num_items is None else float(num_items)))

    def same_batches(self, number: int, error: HotspaError | None = None, flag: bool = False, rows: str = "") -> bool:
        """Compares all ranks' numbers of batches for the coming step, and what they say of its rows; returns whether
        any has set the flag. Collective. Raises `HotspaError`: on every rank: `error` of one rank, or these differ."""
        return any(self._meet(f"train {number} batches{rows}", error, flag))

    # -- how it runs --------------------------------------------------------------------------------------------------

    def in_training(self, begins: bool) -> None:
        """Begins or ends a Trainer's training. Not collective; after the end the model object computes by itself."""
        self.trains, self.looks = begins, not begins
        self._route.set(begins and not self._route.of_chain)
        if not begins and self.is_current:
            model_object.release(self.module)

    def runs_by(
        self,
        choose: Callable[[int, Sequence[int]], passes.Chosen] | None = None,
        facts: Callable[[], Mapping[str, str]] | None = None,
        evaluated: tuple[Bucket, ...] | None = None,
    ) -> None:
        """Sets what decides beside the buckets; None keeps the present value. On all ranks, the same.

        Args:
            choose: Maps a step and the lengths of its sequences to their buckets, out of the engine's, and the speeds
                by which packs are divided over replicas.
            facts: Returns what must be equal on all ranks in training, by name.
            evaluated: The buckets in eval mode without gradients.
        """
        self._passes.choose = choose or self._passes.choose
        self._passes.facts = facts or self._passes.facts
        self._passes.evaluated = evaluated or self._passes.evaluated

    # -- calls with gradients -----------------------------------------------------------------------------------------

    def _take(self, request: Request, error: HotspaError | None) -> Call:
        """As of any model; with gradients, begins a step, or continues an announced one."""
        if not request.trains:
            return super()._take(request, error)
        step, index = self._steps.now, 0
        begins, window = not step.calls, step.window or next(iter(self._announced), None)
        is_new = window is not None and step.window is None
        if window is not None and not is_new:
            index = len(window.batches) - len(step.waiting)
        comes_next = window is not None and window.is_next(index, request)
        documents, error = self._read(request, error, comes_next)
        mine = passes.facts_of(documents, request.num_items)
        try:
            flags = self._meet(request, error, comes_next, len(mine))
        finally:
            if is_new:
                self._announced.pop(0)
        self._begin(request, begins)
        if window is not None and all(flags) and (is_new or step is self._steps.now):  # else it was dropped
            return self._next_of(window, request)
        self.missed += is_new
        sizes: list[int] | None = self._meet.sizes
        if any(flags):  # another rank got another batch than it had announced
            documents = self.engine.agreement.run(
                self._steps.place, lambda: self._documents(request.batch) if comes_next else documents
            )
            mine, sizes = passes.facts_of(documents, request.num_items), None
        step = self._steps.now
        step.window, step.waiting = None, []
        facts = self._passes.exchange.facts(mine, sizes)
        call = Call(request.batch, documents, facts, step.documents, self._steps, request.training)
        step.calls.append(call if self._passes.side is None else self._with_side(call, request))
        return call

    def _begin(self, request: Request, begins: bool) -> None:
        """Begins a step with its first call."""
        if request.changes:
            self._apply_changes()
        if begins:  # the weights are old until the step has ended and the object is shown again
            self._changes.digest = None
            if self._guards and self._written == self._steps.version:  # else it is guarded
                model_object.guard(self.module)
        if not self._steps.now.calls:
            self.engine.drop_gradients()
            self._steps.now.gradient_version = self.engine.master.gradient_version  # later changes are noticed

    def _next_of(self, window: Window, request: Request) -> Call:
        """The next call of an announced step; the first one enrols all of them."""
        if window is not self._steps.now.window:
            self._steps.enrol(window, self._documents, request.training)
        step, ids = self._steps.now, request.batch["input_ids"]
        call = step.waiting.pop(0)
        if not step.waiting:
            step.window = None
        assert ids is not None
        call.device = ids.device
        return call

    def step_begins(self) -> None:
        """Flushes, before an optimizer changes the weights. Collective."""
        if self._passes.taping.tape is not None:  # a stage that updates by itself
            return
        self.flush()
        self._passes.let_go()
        self._steps.version += 1
        if self._changes.digest is not None:  # callbacks have seen it in this step
            self._changes.hide(self._guards)

    def flush(self) -> None:
        """Completes the gradients of all calls since the last step. Collective; does nothing if there are no new calls.
        Raises `HotspaError`: on every rank; the calls are dropped."""
        steps, step, engine = self._steps, self._steps.now, self.engine
        if not step.calls or not self._gradients_came(step.calls):
            return
        if self._adapters.exist:
            self._adapters.set_replicas(self._adapters.trained)
        exchange = self._passes.exchange
        counts = exchange.sent | self.cut  # fields of the report
        scale, upstream, of_all = self.assumptions.compare(map(float, counts.values()))
        if scale is None or scale.factor != 1.0:
            self._scale_gradients(None if scale is None else scale.factor)
        trains_more = bool(upstream.columns or upstream.of_logits or upstream.auxiliary is not None)
        if trains_more:
            self._train_rest(step.calls, upstream)
        if self._passes.side is not None:
            with model_object.structure_only():
                self._passes.side.flush(step.documents)
        if self._changes.frozen or engine.beside.exist:
            engine.complete(self._changes.frozen)
        self._passes.let_go()
        for training in (True, False):
            looks = self.assumptions.looks
            looks.before[training, True] = looks.now.pop((training, True), Reading.NONE)
        if trains_more or scale is None:  # more was sent after the comparison
            counts = exchange.sent | self.cut
            of_all = engine.agreement.gather([*map(float, counts.values())])
        exchange.sent = dict.fromkeys(exchange.sent, 0)
        if step.passes:
            counted: dict[str, Any] = dict(zip(counts, of_all.sum(0).long().tolist(), strict=True))
            self.passes, report = step.passes, reduce(passes.merged, map(itemgetter(1), step.passes))
            self.report = replace(report, grad_norm=engine.grad_norm, **counted)
        steps.number += 1
        steps.now = Step()

    def _scale_gradients(self, factor: float | None) -> None:
        """Multiplies the gradients of what was trained at once; None drops them."""
        step, side = self._steps.now, self._passes.side
        if factor is None:
            self.engine.drop_gradients()
            step.has_gradients = False
        else:
            self.engine.scale_gradients(factor)
        if side is not None:
            side.scale(step.documents, factor or 0.0)

    def _gradients_came(self, calls: Sequence[Call]) -> bool:
        """Whether there are gradients to complete; else the step ends without any. Collective."""
        error, came = None, False
        for call in calls:
            came |= call.arrived.any
            if not call.arrived.reads_padding:
                continue
            error = UnsupportedError(
                "gradients by logits at padding",
                where=f"rank {self.engine.rank}, {self._steps.place}",
                why="rows are packed without their padding, which has no logits here",
                fix="leave the places where attention_mask is 0 out of the loss",
            )
        came = any(self._meet("flush", error, came))
        if not self._steps.now.calls:  # they were dropped, here or on another rank
            return False
        if not came and self.engine.updates is None:  # no parameter has a gradient, as under DDP
            self._steps.drop()
            self.report = None
            self._steps.number += 1
            return False
        return True

    def _train_rest(self, calls: Sequence[Call], upstream: Upstream) -> None:
        active = self.assumptions.active(upstream)
        if self.engine.updates is not None and active:
            raise UnsupportedError(
                "gradients by logits or log-probabilities, where stages update after every pack",
                where=self._steps.place,
                fix="use the loss of the model, or hotspa_pipeline_mode=synchronous",
            )
        of_modes = dict[Mode, list[int]]()
        for call in calls:
            mode = Mode(self._steps.number, call.training, *call.head)
            of_modes.setdefault(mode, []).extend(active.intersection(call.everything))
        for mode, some in of_modes.items():
            if some:
                self._passes.train(self._steps.now, sorted(some), mode, Wanted(), upstream)

    # -- a second model -----------------------------------------------------------------------------------------------

    def frozen(self, model: nn.Module) -> "FrozenModel":
        """Makes a frozen second model of the same build (a reference) on this one's replicas. Collective.

        Its weights are divided over the ranks like the model's own, and loaded for its forwards.

        Raises:
            ModelError: on every rank: the build differs; make a separate `SwitchedModel` for it.
        """
        with model_object.as_built(bare_model(model)[0]):
            store = self.engine.frozen_weights(model)
        return FrozenModel(model, self._steps, self._meet.of_model(", of a frozen model"), store, self._guards)


class FrozenModel(CalledModel):
    """See `SwitchedModel.frozen`; runs on that model's replicas."""

    def __init__(self, model: nn.Module, steps: Steps, meet: Meeting, store: MasterStore, guards: bool) -> None:
        super().__init__(model, steps, meet, store, guards)
        self._store = store
        self.eval()

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields nothing: it is not trained."""
        return iter(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: there are no gradients."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads other weights. On all ranks, the same."""
        keys = self.module.load_state_dict(state_dict, strict, assign)
        self._passes.let_go()
        self._store.fill(whole_parameters(self.module))
        return keys

    def write_back(self) -> None:
        """Does nothing: the model has its weights."""

    def flush(self) -> None:
        """Does nothing: there are no gradients."""

    def close(self) -> None:
        """Calls of the model object stay there from now on. The engine stays."""
        self._route.close()


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
            if runner.prepare is not None:
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
            if runner.prepare is not None:
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
