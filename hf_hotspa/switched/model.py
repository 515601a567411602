"""`SwitchedModel`: what a Trainer, or your own training loop, calls in place of its model.

    model = SwitchedModel(plain_model, parse_buckets("dp4:1024@4096,tp4:8192"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in loader:                          # each rank has its own
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)                # flushes
        optimizer.step()                          # flushes, too, if nothing has yet
        optimizer.zero_grad()

Used like `DistributedDataParallel`: every rank calls it with its own batch, and gradients are means over ranks. Inside,
all ranks exchange their rows, plan them together over the engine's strategies, and get back their rows' results. The
cost of a call, in forwards:

* the loss (`labels`, gradients enabled): 3. Forward and backward of all phases at once, with the factor of the loss in
  the last step's backward. `flush` compares all ranks' factors; it scales the gradients, or repeats the pass if they
  differ.
* log-probabilities (TRL's `fused_lm_head=True`) or logits (if read): 4. The caller gets leaves; `flush` trains
  everything since the last step with the objective sum(gradient * number), whose gradient equals the caller's (chain
  rule). If the last step's gradients were multiples of known numbers (a plain sum or mean of log-probabilities) or are
  given (`expected_seeds`), such calls are trained at once, too.
* no gradients: 1, or 0 if no result is read.

`forward`, `flush`, the first read of logits, and methods that say so are collective: all ranks make the same calls, or
all raise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput, MoeCausalLMOutputWithPast

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights, whole_parameters
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import HotspaError, PlanMismatchError, UnsupportedError
from hf_hotspa.model.model_kind import has_absolute_positions
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel.loss import FIELDS, TokenLoss
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.report import StepReport
from hf_hotspa.rows.read_row import RowRules
from hf_hotspa.strategy import Bucket
from hf_hotspa.switched import model_object, passes
from hf_hotspa.switched.calls import (
    ANCHOR,
    Announcements,
    Assumed,
    Call,
    CallGradients,
    LazyLogits,
    Leaf,
    Meeting,
    Request,
    Window,
    too_many_logits,
    unreadable,
)

LOGIT_BYTES, CUT = 4 << 30, ("num_truncated", "num_split", "num_dropped", "num_empty")


class SwitchedModel(DistributedDataParallel):
    """See above. A DDP by type only (its constructor is never called): accelerate's `unwrap_model` returns the model.

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
        step: Steps before this one in the run; a resumed run sets it. Dropout depends on it.
        missed: Announced steps for which other batches came.
        cut: How many of this rank's rows in this step their reader has cut, for the report.
        assumptions: Predicts gradients from earlier steps; a resumed run needs its `state_dict` for the same bits.
        trains: Whether calls with autograd enabled are training; else they are scored, without gradients.
        looks: Whether scored calls apply changes of the model object (`take_changes`).
    """

    trains, looks = True, False
    on_other_parameters: Any = None  # called with an optimizer that is about to step and has other parameters, too

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
        nn.Module.__init__(self)
        options = replace(options or EngineOptions(), record_auxiliary=True)
        model_object.refuse_losses(options)
        model_object.refuse_other_forward(bare_model(model)[0])
        with model_object.as_built(bare_model(model)[0]):
            self.engine = HotSPaEngine(model, buckets, options, weights=weights, device=device)
        self._own = options.loss if isinstance(options.loss, TokenLoss) else None
        columns = self._own.columns if self._own is not None else ()
        self._passes, self._logit_bytes, self._guards = (
            passes.Passes(self.engine, columns, self._drop),
            logit_bytes,
            guards,
        )
        self._take_object(model, columns)
        self._changes = model_object.ObjectChanges(model, self.engine)
        self._changes.show(self.engine.initial.digest)
        self._store: MasterStore | None = None
        self.report: StepReport | None = None
        self.passes: Sequence[tuple[MiniBatchPlan, StepReport]] = ()
        self.step = self._version = self._written = self.missed = 0
        self.cut = dict.fromkeys(CUT, 0)
        self.assumptions = CallGradients(self._passes, self._own is not None, self._place, self._expects_logits)
        beside = passes.Exchange(self.engine.side_agreement(), self.engine.world_size)
        announced = self._announcements = Announcements(beside, self._read, self._passes.planned, columns)
        self._meet = Meeting(self.engine.agreement, self._place, self._was_cleared, self._drop, announced)
        self._begin_step()
        self._hook = model_object.before_steps(self)
        if not self.engine.initial.were_equal:  # as DistributedDataParallel does
            self._changes.digest = None
            self.write_back()
            self._changes.show()

    def _take_object(self, model: nn.Module, columns: tuple[str, ...] = ()) -> None:
        self.module, self.longest = model, max(bucket.longest for bucket in self.engine.buckets)
        # both are read in each step: avoids a search in submodules
        self.__dict__.update(module=model, _bare=bare_model(model)[0])
        head = model_object.fused_head(self._bare, self.engine.description.compute_dtype)
        self._adapters = model_object.AdapterLayers(model, self.engine)
        self._columns = columns
        self._read: Callable[[Mapping[str, Tensor | None]], list[passes.Document]] = partial(
            passes.read_batch,
            vocab_size=self.engine.description.shape.vocab_size,
            longest=self.longest,
            rank=self.engine.rank,
            rules=RowRules(absolute_positions=has_absolute_positions(self._bare.config), columns=columns),
        )
        asked = ("log_probs", *head.get("outputs", ()))
        self._head_fields = [name for name in FIELDS if name in asked]
        self._temperature = float(head.get("temperature", 1.0))
        # by mode: whether logits were read after a loss, in the last step or call and in this one
        self._expects_logits, self._used_logits = dict[tuple[bool, bool], bool](), dict[tuple[bool, bool], bool]()
        self._route = model_object.Route(self._bare, self)
        self._route.set(not self._guards)

    # -- what a Trainer uses as its model -----------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's 1-D fp32 share of every trained parameter, by Hugging Face name: for an optimizer."""
        named = self.engine.named_parameters()
        return ((f"{prefix}.{name}", p) for name, p in named) if prefix else named

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def join(self, *_: Any, **__: Any) -> Any:
        """DDP's method for ranks with unequal numbers of batches; use `batches` instead.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "join() of a switched model",
            why="a rank owns a share of the weights, and must make every optimizer step",
            fix="for batch in model.batches(loader): ranks whose loaders have ended get batches without rows",
        )

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Does nothing: only `flush` exchanges gradients."""
        return nullcontext()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's own, with the current weights. Collective."""
        self.refresh()
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights into the model and the shares of all ranks; an optimizer keeps its state. On all ranks."""
        model_object.release(self.module)
        keys = self.module.load_state_dict(state_dict, strict, assign)
        self.engine.master.fill(whole_parameters(self.module))
        self.weights_are(current=True)
        return keys

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, and the calls that were not flushed. On all ranks."""
        if self._calls:
            self._drop()
        if set_to_none:
            self.engine.master.bind_gradients(())
        else:
            self.engine.master.zero_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Flushes, clips by the global norm, and returns the norm before clipping.

        Raises:
            UnsupportedError: another norm than the 2-norm.
        """
        if norm_type != 2.0:
            raise UnsupportedError(f"clipping by the {norm_type}-norm", fix="use the 2-norm")
        self.flush()
        engine = self.engine  # if stages update, they have clipped already, or not at all
        norm = engine.clip_grad_norm_(float(max_norm)) if engine.updates is None else engine.grad_norm
        return torch.tensor(norm, dtype=torch.float64)

    @property
    def is_current(self) -> bool:
        """Whether the model has the current weights."""
        return self._written == self._version

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
        self._written = self._version

    def take_changes(self, anew: bool = False, inside: bool = False) -> bool:
        """Applies changes of the model object (`ObjectChanges`), as each step does first. Collective.

        Args:
            anew: Returns whether a new switched model has to be made, instead of an error for unsupported changes.
            inside: Whether accumulated batches follow in this step; any change is then an error.

        Raises:
            HotspaError: on every rank: a change is not supported, or ranks have changed different things.
        """
        words, error = self._changes.inspect_modules(inside)
        _, more, adapters_error = self._adapters.inspect(inside)
        words, error = words + more, error or adapters_error or (self._changes.inspect_hooks() if anew else None)
        if any(self._meet(f"continue{words}", None if anew else error, error is not None)):
            return True
        if words:
            self._apply_changes()
        return False

    def _apply_changes(self) -> None:
        self._passes.let_go()
        self._adapters.apply()
        if self._store is None:
            self._changes.apply()

    def weights_are(self, current: bool) -> None:
        """Notes new weights in the engine; `current`: the model has them, too. On all ranks."""
        self._drop()
        self._version += 1
        self._changes.digest = None
        if current:
            self._written = self._version
            self._changes.show()
        elif self._guards:
            model_object.guard(self.module)

    def close(self) -> None:
        """Ends the engine; the model keeps the weights of the last `write_back`. Collective."""
        self._hook.remove()
        self._drop()
        self._announcements.close()
        self._route.close()
        model_object.release(self.module)
        self.engine.close()

    # -- batches ------------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields this rank's batches, then batches without rows until all ranks' loaders have ended. Collective."""
        iterator, empty = (
            iter(loader),
            {name: torch.zeros((0, 1), dtype=torch.int64) for name in passes.ROW_COLUMNS[:2]},
        )
        empty["labels"] = empty["input_ids"]
        while True:
            batch = next(iterator, None)
            if not any(self._meet("take a batch", flag=batch is not None)):
                return
            if batch is not None:
                empty = {
                    k: v[:0] if isinstance(v, Tensor) else v for k, v in batch.items() if k not in passes.FLAT_COLUMNS
                }
            yield dict(batch if batch is not None else empty)

    def announce(self, batches: Sequence[Mapping[str, Any]], num_items: float | Tensor | None = None) -> None:
        """Announces all batches of the next optimizer step. They are exchanged and planned beside the running step, and
        run as one pass when the first of them is called. Collective; may be called several steps ahead.

        Args:
            batches: What `forward` will get, in order; as many on all ranks.
            num_items: The `num_items_in_batch` to come with them.
        """
        step = self.step + len(self._announcements.windows) + bool(self._calls)
        self._announcements.add(batches, None if num_items is None else float(num_items), step)

    # -- how it runs --------------------------------------------------------------------------------------------------

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

    def in_training(self, begins: bool) -> None:
        """Begins or ends a Trainer's training. Not collective; after the end the model object computes by itself."""
        self.trains, self.looks = begins, not begins
        self._route.set(begins)
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
                by which packs are divided over replicas. Also called in a thread.
            facts: Returns what must be equal on all ranks in training, by name.
            evaluated: The buckets in eval mode without gradients.
        """
        self._passes.choose = choose or self._passes.choose
        self._passes.facts = facts or self._passes.facts
        self._passes.evaluated = evaluated or self._passes.evaluated

    def same_batches(self, number: int, error: HotspaError | None = None, flag: bool = False, rows: str = "") -> bool:
        """Compares all ranks' numbers of batches for the coming step, and what they say of its rows; returns whether any
        has set the flag. Collective.

        Raises:
            HotspaError: on every rank: `error` of one rank, or these differ.
        """
        return any(self._meet(f"train {number} batches{rows}", error, flag))

    # -- ranks together -----------------------------------------------------------------------------------------------

    def _place(self) -> str:
        return f"step {self.step + 1}"

    def _begin_step(self) -> None:
        self._documents, self._calls, self._waiting = passes.Documents(), list[Call](), list[Call]()
        self._window: Window | None = None  # with calls still to come
        self._has_gradients, self._gradient_version = False, -1
        self._passes.trained, self._passes.report = [], None

    def _drop(self) -> None:
        self._passes.let_go()
        if self._calls:
            self.engine.drop_gradients()
            self.engine.master.bind_gradients(())  # an optimizer skips parameters without a gradient
        self._begin_step()

    def _was_cleared(self) -> bool:
        if not self._calls or self.engine.updates is not None:
            return False
        return self.engine.master.are_cleared(self._gradient_version)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
        fused_lm_head: bool = False,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        expected_seeds: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Returns what transformers' forward returns, or TRL's with `fused_lm_head`, for this rank's batch. Collective.

        Args:
            input_ids: int64 [B, L]; may have no rows.
            attention_mask: int64 [B, L], 1 for tokens and 0 for padding.
            position_ids: int64 [B, L], from 0 in each document.
            labels: int64 [B, L], not shifted; -100 for none.
            shift_labels: Instead of labels, already shifted.
            num_items_in_batch: The divisor of the sum of cross entropies; this batch's labels when None.
            logits_to_keep: The number of last logit columns, or an index of columns; 0: all.
            expected_seeds: The expected gradients by the log-probabilities, or a multiple of them, [B, L - 1] ([B, L]
                with shift_labels): the batch is trained at once. If others come, it is trained again.

        Raises:
            HotspaError: on every rank: one cannot read its batch, or calls differ. Nothing was computed; calls that
                were not flushed are dropped.
        """
        error = unreadable(input_ids, others, self._columns, self.engine.rank) if others or input_ids is None else None
        named = {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
        batch: dict[str, Tensor | None] = {"input_ids": input_ids, **named, "shift_labels": shift_labels}
        for name in ("seq_idx", *passes.FLAT_COLUMNS, *self._columns):
            batch[name] = others.get(name)
        wants_loss = not fused_lm_head and (labels is not None or shift_labels is not None)
        function = vars(self._bare).get("_loss_function") if wants_loss and self._own is None else None
        request = Request(
            batch,
            num_items=None if num_items_in_batch is None else float(num_items_in_batch),
            fields=FIELDS.index(self._head_fields[-1]) + 1 if fused_lm_head else 0,
            wants_loss=wants_loss,
            aux=self._passes.auxiliary is not None and self._wants_aux(output_router_logits),
            kept=logits_to_keep,
            expected=expected_seeds,
            trains=torch.is_grad_enabled() and self._store is None and self.trains,
            training=self.training,
            adapters=True,
            given_items=num_items_in_batch,
            function=None if function is ForCausalLMLoss else function,
        )
        call = self._take(request, error)
        self._run(call, request)
        if fused_lm_head:
            return self._fused_output(call, request)
        out = self._output(call, request)
        return out if return_dict is not False else out.to_tuple()

    def _wants_aux(self, asked: bool | None) -> bool:
        of_config = getattr(self._bare.config.get_text_config(), "output_router_logits", False)
        return bool(of_config if asked is None else asked)

    def _take(self, request: Request, error: HotspaError | None) -> Call:
        begins = request.trains and not self._calls
        if begins or (self.looks and not request.trains):
            request.changes, change_error = self._changes.inspect_modules()
            error = error or change_error
        if self._adapters.exist:
            request.adapters, words, adapters_error = self._adapters.inspect(bool(self._calls))
            request.changes, error = request.changes + words, error or adapters_error
        if error is None and request.trains and (not request.adapters or (begins and self._changes.all_frozen)):
            error = model_object.nothing_to_train(request.adapters, self.engine.rank)
        coming, window = list[Window](), None
        if error is None and request.trains:
            coming = self._announcements.windows
            window = self._window or (coming[0] if coming else None)
        index = len(window.batches) - len(self._waiting) if window is not None and self._waiting else 0
        comes_next = window is not None and window.is_next(index, request)
        documents = list[passes.Document]()
        if error is None and not comes_next:
            try:
                documents = self._read(request.batch)
            except HotspaError as wrong:
                error = wrong
        is_new = window is not None and window is not self._window
        mine = passes.facts_of(documents, request.num_items)
        try:
            flags = self._meet(request, error, comes_next, len(mine))
        finally:
            if is_new and coming:
                coming.pop(0)
        if request.changes:
            self._apply_changes()
        if begins:  # the weights are old until the step has ended and the object is shown again
            self._changes.digest = None
            if self._guards and self._written == self._version:  # else it is guarded
                model_object.guard(self.module)
        if request.trains and not self._calls:
            self.engine.drop_gradients()
            self._gradient_version = self.engine.master.gradient_version  # later changes are noticed
        if window is not None and all(flags):
            return self._next_of(window, request)
        self.missed += is_new
        sizes: list[int] | None = self._meet.sizes
        if any(flags):  # another rank got another batch than it had announced
            read = self.engine.agreement.run
            documents = read(self._place(), lambda: self._read(request.batch) if comes_next else documents)
            mine, sizes = passes.facts_of(documents, request.num_items), None
        if request.trains:
            self._window, self._waiting = None, []
        facts = self._passes.exchange.facts(mine, sizes)
        of_step = self._documents if request.trains else passes.Documents()
        call = Call(request.batch, documents, facts, of_step, self.engine.rank, self._version, self.training)
        if request.trains:
            self._calls.append(call)
        return call

    def _next_of(self, window: Window, request: Request) -> Call:
        """Returns the next call of an announced step; the first one notes all of them."""
        if window is not self._window:
            window.ready.result()
            if window.of_step is None:
                self._drop()
                self.engine.agreement.check({}, window.error, self._place())
                raise PlanMismatchError(
                    "ranks have announced different numbers of batches",
                    where=self._place(),
                    fix="announce as many batches on all ranks; a batch may have no rows",
                )
            of_step, mode = self._documents, (self.engine.rank, self._version, self.training)
            is_first = not len(of_step)
            self._window, self._waiting = window, []
            for batch, documents, facts in zip(window.batches, window.documents, window.facts, strict=True):
                self._waiting.append(Call(batch, documents, facts, of_step, *mode))
            if is_first:  # otherwise its documents have new numbers, and their tokens travel again
                of_step.rows, of_step.holders = window.of_step.rows, window.of_step.holders
                of_step.planned = window.of_step.planned
            self._passes.exchange.sent["rows_bytes"] += window.sent_bytes
            self._calls += self._waiting
        call = self._waiting.pop(0)
        if not self._waiting:
            self._window = None
        ids = request.batch["input_ids"]
        assert ids is not None
        call.device = ids.device
        return call

    # -- what is computed for a call ----------------------------------------------------------------------------------

    def _run(self, call: Call, request: Request) -> None:
        """Computes the caller's results in the cheapest way, the same on all ranks."""
        if self._adapters.exist:
            self._adapters.set_replicas(request.adapters)
        mode = self.training, request.trains
        if not request.trains:
            self._expects_logits[mode] = self._used_logits.pop(mode, False)
        if request.batch.get("shift_labels") is None and request.batch.get("labels") is None:
            return
        if request.wants_loss and self._own is not None:
            self._run_own(call, request)
            return
        needs_logits = request.wants_loss and (self._expects_logits.get(mode, False) or request.function is not None)
        if request.trains and call.fields < 0 and not request.aux and not needs_logits:
            known = self.assumptions.linear
            if request.wants_loss:
                known = Assumed(by_loss=self.assumptions.expected)
            elif request.expected is not None:
                known = Assumed(given=request.expected)
            if known.by_loss or known.by_token or known.given is not None:
                self._train_at_once([call, *self._waiting], request, known)
        is_loss = request.wants_loss and isinstance(call.assumed, float)
        if not is_loss and (call.fields < max(request.fields, 1) or call.with_aux < request.aux):
            self._score(call, request, with_logits=needs_logits)

    def _run_own(self, call: Call, request: Request) -> None:
        """Computes the engine's token loss over all ranks. Each rank gets an equal part."""
        world = self.engine.world_size
        if request.aux and not call.with_aux:
            self._score(call, request)
        items = max(sum(call.labels), 1) if request.num_items is None else request.num_items
        if not request.trains:
            numbers = self._score_documents(call, call.everything, request, 0, False, own=True)
            call.own = numbers.own / items / world
        elif call.assumed is None:
            together = [call] if request.num_items is None else [call, *self._waiting]
            everything = [number for one in together for number in one.everything]
            seeds = passes.Seeds(own=(1.0 / items, self.assumptions.expected / world))
            numbers = self._train(everything, seeds, (self.training, 1.0))
            for one in together:
                one.assumed, one.own = self.assumptions.expected, numbers.own / len(together) / world

    def _score(self, call: Call, request: Request, with_logits: bool = False) -> None:
        together = [call] if with_logits or not request.trains else [call, *self._waiting]
        if with_logits:
            self._meet("score with logits", too_many_logits(call, self._passes, self._logit_bytes))
        fields = max(request.fields, 1)
        for one in together:
            one.temperature = self._temperature if request.fields else 1.0
        everything = [n for one in together for n in one.everything]
        numbers = self._score_documents(call, everything, request, fields, with_logits)
        for one in together:
            one.numbers, one.fields, one.with_aux, one.with_logits = numbers, fields, request.aux, with_logits

    def _score_documents(
        self, call: Call, numbers: Sequence[int], request: Request, fields: int, with_logits: bool, own: bool = False
    ) -> passes.Numbers:
        return self._passes.score(
            call.of_step, numbers, step=self.step, training=self.training, temperature=call.temperature, fields=fields,
            with_logits=with_logits, with_aux=request.aux and fields > 0, store=self._store, of_step=request.trains, own=own,
        )  # fmt: skip

    def _train_at_once(self, calls: Sequence[Call], request: Request, known: Assumed) -> None:
        """Trains some calls before the caller's backward has brought the gradients. Documents whose given seeds are all
        0 have a forward only."""
        calls = calls if known.given is None else calls[:1]
        everything = list[int]()
        for call in calls:
            call.temperature = self._temperature if request.fields else 1.0
            everything += call.everything
        seeds, numbers = self.assumptions.assume(calls, known), passes.Numbers()
        active = set(everything) if known.given is None else self.assumptions.active(seeds)
        if idle := sorted(set(everything) - active):
            scored = replace(request, trains=False)  # keeps no graphs of them
            numbers = self._score_documents(calls[0], idle, scored, request.fields, False)
        if active:
            mode = self.training, calls[0].temperature
            trained = self._train(sorted(active), seeds, mode, request.fields, sums=request.wants_loss)
            numbers = replace(trained, tokens=numbers.tokens | trained.tokens)
        for call in calls:
            call.numbers, call.fields = numbers, request.fields
            if known.by_probability and isinstance(call.assumed, Tensor):
                call.assumed = call.assumed * call.probabilities()

    def _train(
        self, numbers: Sequence[int], seeds: passes.Seeds, mode: tuple[bool, float], fields: int = 0, sums: bool = False
    ) -> passes.Numbers:
        trained = self._passes.train(
            self._documents, numbers, seeds, step=self.step, add=self._has_gradients,
            training=mode[0], temperature=mode[1], fields=fields, sums=sums,
        )  # fmt: skip
        self._has_gradients = True
        self._gradient_version = self.engine.master.gradient_version  # later changes are noticed
        return trained

    # -- what the caller gets -----------------------------------------------------------------------------------------

    def _output(self, call: Call, request: Request) -> ModelOutput:
        loss, aux, wide = None, None, self._passes.wide
        logits: Tensor = LazyLogits(lambda: self._logits(call, request))
        if request.wants_loss:
            if request.function is not None:
                logits = self._logits(call, request)
                targets = {"labels": request.batch.get("labels")}
                if (shifted := request.batch.get("shift_labels")) is not None:
                    targets["shift_labels"] = shifted
                items, size = request.given_items, logits.shape[-1]
                loss = request.function(logits=logits, vocab_size=size, num_items_in_batch=items, **targets)
            elif self._own is None and not isinstance(call.assumed, float):
                log_probs = call.column(0, wide)
                if request.trains:
                    (log_probs,) = Leaf.apply(ANCHOR, call.add_seeds, log_probs)
                loss = -log_probs.sum() / call.denominators[self.engine.rank]
            else:
                loss = torch.tensor(call.own, dtype=torch.float64)
                if self._own is None:
                    total = -sum(map(call.numbers.sums.__getitem__, call.mine))
                    loss = torch.tensor(total, dtype=torch.float64) / call.denominators[self.engine.rank]
                loss = loss.to(call.device, wide)
                if request.trains:
                    (loss,) = Leaf.apply(ANCHOR, call.add_factor, loss)
            if request.aux:
                loss, aux = self._with_aux(loss, call, request)
        if self._passes.auxiliary is not None:
            return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux, logits=logits)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _with_aux(self, loss: Tensor, call: Call, request: Request) -> tuple[Tensor, Tensor]:
        """Adds transformers' `load_balancing_loss_func` of this rank's batch; also returns it alone."""
        auxiliary = self._passes.auxiliary
        assert auxiliary is not None
        aux = call.auxiliary(auxiliary)[0].to(call.device, self._passes.wide)
        if request.trains:
            (aux,) = Leaf.apply(ANCHOR, call.add_aux_factor, aux)
        return loss + auxiliary.coefficient * aux, aux

    def _fused_output(self, call: Call, request: Request) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        wide = self._passes.wide
        columns = {name: call.column(FIELDS.index(name), wide) for name in self._head_fields}
        if request.trains:
            with_gradient = [name for name in ("log_probs", "entropy") if name in columns]
            of_caller = Leaf.apply(ANCHOR, call.add_seeds, *(columns[name] for name in with_gradient))
            columns |= dict(zip(with_gradient, of_caller, strict=True))
        if "is_top1" in columns:
            columns["is_top1"] = columns["is_top1"] > 0.5
        mask = call.mask[:, : call.shape[1] - call.shift].to(call.device)
        of = mask.sum().clamp(min=1) if request.num_items is None else request.num_items
        loss, aux = -columns["log_probs"].sum() / of, None
        if request.aux:
            loss, aux = self._with_aux(loss, call, request)
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux, **columns)

    def _logits(self, call: Call, request: Request) -> Tensor:
        """Returns [B, L, V], or the requested columns; a leaf if gradients are enabled. Collective."""
        is_gone = call.version != self._version or (request.trains and call not in self._calls)
        error = too_many_logits(call, self._passes, self._logit_bytes)
        if is_gone:
            error = UnsupportedError(
                "logits were read after the step",
                where=f"rank {self.engine.rank}, {self._place()}",
                why="their weights have been replaced",
                fix="use the logits before flush and optimizer.step()",
            )
        self._meet("read logits", error)
        self._used_logits[self.training, request.trains] = True
        numbers = call.numbers
        if not call.with_logits:
            self._adapters.set_replicas(request.adapters)
            numbers = self._score_documents(call, call.everything, request, 0, True)
        call.with_logits = False  # now the caller's
        parts = [numbers.logits.pop(number) for number in call.mine]
        logits = call.lay_out(parts, self.engine.description.compute_dtype, (self._passes.num_logits,))
        if request.trains:
            (logits,) = Leaf.apply(ANCHOR, call.add_logit_seeds, logits)
        if isinstance(request.kept, Tensor):
            return logits[:, request.kept]
        return logits[:, -request.kept :] if request.kept else logits

    # -- gradients ----------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Flushes, before an optimizer changes the weights. Collective."""
        if self._passes.taping.tape is not None:  # a stage that updates by itself
            return
        self.flush()
        self._passes.let_go()
        self._version += 1
        if self._changes.digest is not None:  # callbacks have seen it in this step
            self._changes.hide(self._guards)

    def flush(self) -> None:
        """Completes the gradients of all calls since the last step. Collective; does nothing if there are no new calls.

        Raises:
            HotspaError: on every rank; the calls are dropped.
        """
        calls, went_back = self._calls, False
        error: HotspaError | None = None
        for call in calls:
            went_back |= call.went_back
            if call.reads_padding:
                error = UnsupportedError(
                    "gradients by logits at padding",
                    where=f"rank {self.engine.rank}, {self._place()}",
                    why="rows are packed without their padding, which has no logits here",
                    fix="leave the places where attention_mask is 0 out of the loss",
                )
        if calls:
            went_back = any(self._meet("flush", error, went_back))
        if not self._calls:  # also if they were dropped, here or on another rank
            return
        if not went_back and self.engine.updates is None:  # no parameter has a gradient, as under DDP
            self._drop()
            self.report, self.step = None, self.step + 1
            return
        if self._adapters.exist:
            self._adapters.set_replicas(True)
        exchange = self._passes.exchange
        counts = exchange.sent | self.cut  # fields of the report
        scale, seeds, of_all = self.assumptions.compare(calls, self._documents, map(float, counts.values()))
        if scale is None:
            self.engine.drop_gradients()
            self._has_gradients = False
        if scale is not None and scale != 1.0:
            self.engine.scale_gradients(scale)
        trains_more = bool(seeds.columns or seeds.of_logits or seeds.auxiliary is not None)
        if trains_more:
            self._train_seeds(calls, seeds)
        if self._changes.frozen:
            self.engine.leave_out(self._changes.frozen)
        self._passes.let_go()
        for training in (True, False):
            self._expects_logits[training, True] = self._used_logits.pop((training, True), False)
        if trains_more or scale is None:  # more was sent after the comparison
            counts = exchange.sent | self.cut
            of_all = self.engine.agreement.gather([*map(float, counts.values())])
        exchange.sent = dict.fromkeys(exchange.sent, 0)
        if (report := self._passes.report) is not None:
            counted: dict[str, Any] = dict(zip(counts, of_all.sum(0).long().tolist(), strict=True))
            self.passes = self._passes.trained
            self.report = replace(report, grad_norm=self.engine.grad_norm, **counted)
        self.step += 1
        self._begin_step()

    def _train_seeds(self, calls: Sequence[Call], seeds: passes.Seeds) -> None:
        active = self.assumptions.active(seeds)
        if self.engine.updates is not None and active:
            raise UnsupportedError(
                "gradients by logits or log-probabilities, where stages update after every pack",
                where=self._place(),
                fix="use the loss of the model, or hotspa_pipeline_mode=synchronous",
            )
        of_modes = dict[tuple[bool, float], list[int]]()
        for call in calls:
            of_modes.setdefault((call.training, call.temperature), []).extend(active.intersection(call.everything))
        for mode, numbers in of_modes.items():
            if numbers:
                self._train(sorted(numbers), seeds, mode)

    # -- a second model -----------------------------------------------------------------------------------------------

    def frozen(self, model: nn.Module) -> "SwitchedModel":
        """Makes a frozen second model of the same build (a reference) on this one's replicas. Collective.

        Its weights are divided over the ranks like the model's own, and loaded for its forwards.

        Raises:
            ModelError: on every rank: the build differs; make a separate `SwitchedModel` for it.
        """
        return FrozenModel(self, model)


class FrozenModel(SwitchedModel):
    """See `SwitchedModel.frozen`; runs on the owner's replicas."""

    step: Any = property(lambda self: self._owner.step)

    def __init__(self, owner: SwitchedModel, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.engine, self._passes, self._logit_bytes = owner.engine, owner._passes, owner._logit_bytes
        with model_object.as_built(bare_model(model)[0]):
            self._store = owner.engine.frozen_weights(model)
        self._own, self._guards = None, owner._guards
        self._take_object(model)
        object.__setattr__(self, "_owner", owner)  # not a submodule
        self._meet, self._drop = copy(owner._meet), owner._drop  # type: ignore[method-assign]
        self._meet.of_model = ", of a frozen model"
        self._version = self._written = self.missed = 0
        self._calls, self._waiting, self._window = [], [], None
        self.eval()

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields nothing: it is not trained."""
        return iter(())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: there are no gradients."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads other weights. On all ranks, the same."""
        keys = self.module.load_state_dict(state_dict, strict, assign)
        assert self._store is not None
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
