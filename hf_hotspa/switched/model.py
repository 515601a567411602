"""`SwitchedModel`: what a Trainer, or a loop of your own, calls in the place of its model.

    model = SwitchedModel(plain_model, parse_buckets("dp4:1024@4096,tp4:8192"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in loader:                          # each rank has its own
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)                # flushes
        optimizer.step()                          # flushes, too, where nothing has
        optimizer.zero_grad()

It is used as `DistributedDataParallel` is: every rank calls it with its own batch, and gradients are the means over ranks. Inside,
all ranks exchange their rows, plan them together over the engine's strategies, and get back what belongs to their own.
What a call costs depends on what is asked for:

* the loss (`labels`, gradients enabled): forward and backward of all phases at once, with the factor that the last step's
  backward applied to the loss. `flush` compares the factors of all ranks; it scales the gradients, or runs them again where
  ranks differ. 3 units of work (a forward is one), as any step.
* log-probabilities (TRL's `fused_lm_head=True`) or logits (when they are looked at): a forward. What the caller gets are
  leaves; `flush` runs one training pass over everything since the last step with the objective sum(gradient * number), whose
  gradient is that of the caller's loss by the chain rule. 4 units. Where the gradients were multiples of known numbers in the
  last step (a plain sum or mean of log-probabilities) or are given (`expected_seeds`), such calls are trained at once, too.
* no gradients: a forward, and none at all where nothing is looked at.

`forward`, `flush`, the first look at logits, and what says so are collective: all ranks make the same calls, or all raise.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput, MoeCausalLMOutputWithPast

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import HotspaError, PlanMismatchError, UnsupportedError
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.parallel.adapters import bare_model
from hf_hotspa.parallel.agreement import rank_names
from hf_hotspa.parallel.scores import FIELDS
from hf_hotspa.report import StepReport
from hf_hotspa.rows.features import IGNORED_LABEL
from hf_hotspa.strategy import Bucket
from hf_hotspa.switched.calls import Assumed, Call, LazyLogits, common, leaves
from hf_hotspa.switched.documents import FLAT_COLUMNS, ROW_COLUMNS, Document, Documents, Exchange, read_batch
from hf_hotspa.switched.model_object import as_built, before_steps, fused_head, lora_layers, route, unroute
from hf_hotspa.switched.passes import Numbers, Passes, Seeds

_UNREAD = frozenset({"use_cache", "return_dict", "cu_seq_lens_k", "max_length_q", "max_length_k", "past_key_values"})
"""Arguments of a forward that change nothing of what it computes in training."""
LOGIT_BYTES = 4 << 30
_CODE, _FAILED, _CLEARED, _SIZE, _FLAG, _ANNOUNCED = range(6)
"""The columns of what ranks say when they meet."""


@dataclass(eq=False)
class _Request:
    """What a caller wants of a batch.

    Args:
        batch: The tensors that say what its rows are.
        num_items: What the sum of cross entropies is divided by; None for this rank's labels.
        fields: How many of `FIELDS` are wanted; 0 where a loss alone is, or nothing.
        wants_loss: Whether the caller wants the cross entropy.
        routers: Whether it wants the balance loss of the routers.
        kept: The columns of the logits that are wanted.
        expected: [B, L - 1] or [B, L], the gradients by the log-probabilities that will come, or multiples; or None.
        trains: Whether gradients will come.
        adapters: Whether adapters are used.
    """

    batch: dict[str, Tensor | None]
    num_items: float | None
    fields: int
    wants_loss: bool
    routers: bool
    kept: Any
    expected: Tensor | None
    trains: bool
    adapters: bool

    @property
    def is_shifted(self) -> bool:
        return self.batch.get("shift_labels") is not None

    @property
    def has_labels(self) -> bool:
        return self.is_shifted or self.batch.get("labels") is not None

    @property
    def wants(self) -> str:
        """In words, for errors where ranks want different things."""
        what = ["a forward", "with gradients" if self.trains else "without gradients"]
        what += (
            ["for the loss"] if self.wants_loss else [f"for {self.fields} numbers of each token"] * bool(self.fields)
        )
        what += ["with the balance loss of routers"] * self.routers + ["of expected seeds"] * (
            self.expected is not None
        )
        return ", ".join([*what, *([] if self.adapters else ["adapters off"])])


@dataclass(eq=False)
class _Window:
    """Batches of one step that were announced, read and exchanged together.

    Args:
        batches: As they were announced.
        num_items: What their losses are divided by; None for each one's own labels.
        documents: This rank's, of each batch.
        facts: What each rank says of each batch (`_facts`).
        of_step: The documents of all ranks, as if these batches were the whole step; None after an error.
        prepared: Their plan, and this rank's part.
        error: What this rank found wrong.
    """

    batches: list[dict[str, Tensor | None]]
    num_items: float | None
    documents: list[list[Document]] = field(default_factory=list)
    facts: list[list[NDArray[np.int64]]] = field(default_factory=list)
    of_step: Documents | None = None
    prepared: Any = None
    error: HotspaError | None = None


class SwitchedModel(DistributedDataParallel):
    """See above. A DDP by type only (its constructor is never called), so that accelerate's `unwrap_model` gives the model.

    Args:
        model: The transformers model, or a `PeftModel` around one. Its weights are those of the start until `write_back`;
            calls of it come here, but for generation, which gets the current weights.
        buckets, options, weights, device: As for `HotSPaEngine`.
        logit_bytes: The most bytes of host memory that the logits of a batch, or their gradients, may take on a rank.

    Attributes:
        engine: The engine.
        report: Of the last step that was flushed; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        options: EngineOptions | None = None,
        *,
        weights: Path | None = None,
        device: torch.device | None = None,
        logit_bytes: int = LOGIT_BYTES,
    ) -> None:
        nn.Module.__init__(self)
        options = replace(options or EngineOptions(), record_routers=True)
        _refuse(options)
        with as_built(bare_model(model)[0]):
            self.engine = HotSPaEngine(model, buckets, options, weights=weights, device=device)
        self._passes, self._logit_bytes = Passes(self.engine), logit_bytes
        self._take_object(model)
        self._store: MasterStore | None = None
        self.report: StepReport | None = None
        self._step = self._version = self._written = 0
        self._expected, self._linear = float(self.engine.world_size), Assumed()
        self._announced: list[Future[_Window]] = []
        self._num_announced = 0
        self._thread = ThreadPoolExecutor(1, "hotspa-rows")  # starts when it is needed
        self._thread_exchange = Exchange(self.engine.side_agreement(), self.engine.world_size)
        self._begin_step()
        self._hook = before_steps(self)

    def _take_object(self, model: nn.Module) -> None:
        """Stands in the place of a model object."""
        self.module, self._bare = model, bare_model(model)[0]
        head = fused_head(self._bare)
        if head.get("cast_lm_head_to_fp32") and self.engine.description.compute_dtype.itemsize < 4:
            raise UnsupportedError(
                "cast_lm_head_to_fp32 in 16-bit training",
                why="the head computes in the dtype of the weights, and its logits are widened then",
                fix="leave it out",
            )
        self._head_fields: tuple[str, ...] = ("log_probs", *head.get("outputs", ("log_probs",)))
        self._temperature = float(head.get("temperature", 1.0))
        self._tolerance = 64 * torch.finfo(self._passes.wide).eps
        # by mode: whether logits were looked at after a loss, in the last step or call and in this one
        self._look, self._looked = dict[tuple[bool, bool], bool](), dict[tuple[bool, bool], bool]()
        route(self._bare, self)

    # -- what a Trainer takes for the model ---------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's 1-D fp32 share of every trained parameter, by Hugging Face name: what an optimizer gets."""
        return ((f"{prefix}.{name}" if prefix else name, p) for name, p in self.engine.named_parameters())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Nothing: gradients are exchanged by `flush` alone."""
        return nullcontext()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's own, with the current weights. Collective."""
        self.refresh()
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, and the calls that were not flushed. On all ranks."""
        self._drop()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Flushes, and clips by the global norm; returns it as it was before.

        Raises:
            UnsupportedError: another norm than the 2-norm.
        """
        if norm_type != 2.0:
            raise UnsupportedError(f"clipping by the {norm_type}-norm", fix="use the 2-norm")
        self.flush()
        return torch.tensor(self.engine.clip_grad_norm_(float(max_norm)))

    def refresh(self) -> None:
        """The current weights in the model, if they are not there. Collective."""
        if self._written != self._version:
            self.write_back()

    def write_back(self) -> None:
        """Gives the model the current weights. Collective."""
        self._meet("write the weights back")
        self.engine.write_back(self.module)
        self._written = self._version

    def close(self) -> None:
        """Ends the engine; the model is as it was, with the weights of the last `write_back`. Collective."""
        self._hook.remove()
        self._drop()
        self._thread.shutdown()
        unroute(self._bare)
        self.engine.close()

    # -- batches ------------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The batches of this rank's loader, and batches without rows when it has ended before those of other ranks.

        Collective: a rank that has nothing left takes part with no rows until all have ended.
        """
        iterator, empty = iter(loader), {name: torch.zeros((0, 1), dtype=torch.int64) for name in ROW_COLUMNS[:2]}
        empty["labels"] = empty["input_ids"]
        while True:
            batch = next(iterator, None)
            rows = self._meet("take a batch", size=batch is not None)
            if not bool(rows[:, _SIZE].any()):
                return
            if batch is not None:
                empty = {k: v[:0] if isinstance(v, Tensor) else v for k, v in batch.items() if k not in FLAT_COLUMNS}
            yield dict(batch if batch is not None else empty)

    def announce(self, batches: Sequence[Mapping[str, Any]], num_items: float | Tensor | None = None) -> None:
        """Says which batches come next: all of one optimizer step. They are exchanged and planned beside what runs now, and
        run as one pass when the first of them is called. Collective, and may be called for several steps ahead.

        Args:
            batches: What `forward` will get, in order; as many on all ranks.
            num_items: The `num_items_in_batch` that it will get with them.
        """
        of_rows = [{name: batch.get(name) for name in (*ROW_COLUMNS, *FLAT_COLUMNS)} for batch in batches]
        given = None if num_items is None else float(num_items)
        self._num_announced += 1
        self._announced.append(self._thread.submit(self._prepare, of_rows, given))

    def _prepare(self, batches: list[dict[str, Tensor | None]], num_items: float | None) -> _Window:
        window, exchange = _Window(batches, num_items), self._thread_exchange
        try:
            window.documents = [self._read(batch) for batch in batches]
        except HotspaError as error:
            window.error, window.documents = error, [[] for _ in batches]
        failed = [int(window.error is not None), len(batches)]
        arrived = exchange.facts([*failed, *(n for d in window.documents for n in _facts(d, num_items))])
        if any(int(part[0]) or int(part[1]) != len(batches) for part in arrived):
            return window  # the forward says why
        window.facts = [[] for _ in batches]
        for part in arrived:
            at = 2
            for of_batch in window.facts:
                end = at + 2 + 2 * int(part[at + 1])
                of_batch.append(part[at:end])
                at = end
        window.of_step = Documents()
        for facts, documents in zip(window.facts, window.documents, strict=True):
            window.of_step.add([_pairs(of_rank) for of_rank in facts], documents, self.engine.rank)
        window.prepared = self._passes.prepare(window.of_step, exchange)
        return window

    def _read(self, batch: Mapping[str, Tensor | None]) -> list[Document]:
        longest = max(bucket.longest for bucket in self.engine.buckets)
        return read_batch(batch, self.engine.description.shape.vocab_size, longest, self.engine.rank)

    # -- ranks together -----------------------------------------------------------------------------------------------

    def _meet(self, what: str, error: HotspaError | None = None, size: int = 0, flag: bool = False) -> Tensor:
        """All ranks are about to do the same; fp64 [world size, 6] of what they say. Where one cleared its gradients, all drop
        the calls since the last step.

        Raises:
            HotspaError: on every rank: the first error, or that ranks are about to do different things. Calls that were not
                flushed are dropped.
        """
        agreement, code = self.engine.agreement, float(zlib.crc32(what.encode()))
        values = [code, error is not None, self._was_cleared(), size, flag, self._num_announced]
        rows = agreement.gather([float(value) for value in values])
        if bool((rows[:, _CODE] != code).any()):
            texts = agreement.texts(what)
            by_text = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
            self._drop()
            raise PlanMismatchError(
                "ranks call the switched model for different things: "
                + "; ".join(f"{rank_names(ranks)}: {text}" for text, ranks in by_text.items()),
                where=f"step {self._step + 1}",
                why="each call is a part of what all ranks do together",
                fix="make the same calls on all ranks; `for batch in model.batches(loader)` gives ranks whose loaders have "
                "ended batches without rows",
            )
        if len(set(rows[:, _ANNOUNCED].tolist())) > 1:
            self._drop()
            raise PlanMismatchError(
                f"ranks have announced {[int(n) for n in rows[:, _ANNOUNCED]]} steps",
                where=f"step {self._step + 1}",
                fix="call announce on all ranks, or on none",
            )
        if bool(rows[:, _FAILED].any()):
            self._drop()
            agreement.check({}, error, f"step {self._step + 1}")
        if bool(rows[:, _CLEARED].any()):
            self._drop()
        return rows

    def _begin_step(self) -> None:
        self._documents, self._calls, self._waiting = Documents(), list[Call](), list[tuple[Call, dict[str, Any]]]()
        self._has_gradients, self._gradient_version = False, -1
        self._passes.begin_step()

    def _drop(self) -> None:
        """Forgets the calls since the last step, and their gradients. On all ranks."""
        self._passes.let_go()
        if self._calls:
            self.engine.drop_gradients()
        self._begin_step()

    def _note_gradients(self) -> None:
        """From here on, who clears or replaces the gradients is noticed."""
        self._gradient_version = sum(g._version for g in self.engine.master.gradients if g is not None)

    def _was_cleared(self) -> bool:
        """Whether somebody has cleared the gradients since the first call of the step (`optimizer.zero_grad()`)."""
        if not self._calls:
            return False
        if any(p.grad is None for _, p in self.engine.named_parameters()):
            return True
        gradients = [g for g in self.engine.master.gradients if g is not None]
        changed = sum(g._version for g in gradients) != self._gradient_version
        return changed and not any(bool(g.any()) for g in gradients)

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
        """What transformers' forward returns for this rank's batch; with `fused_lm_head`, what TRL's returns. Collective.

        Args:
            input_ids: int64 [B, L]; no rows at all are a normal case.
            attention_mask, position_ids, labels, shift_labels: As for the model; int64 [B, L].
            num_items_in_batch: What the sum of cross entropies is divided by; this batch's labels when None.
            logits_to_keep: The last so many columns of the logits, or those of an index; all for 0.
            expected_seeds: The gradients by the log-probabilities that the caller's backward will bring, or a multiple of them,
                [B, L - 1] ([B, L] with shift_labels): the batch is trained at once. If other ones come, it is trained again.

        Raises:
            HotspaError: on every rank: what one cannot read, or ranks that call differently. Nothing was computed, and
                calls that were not flushed are dropped.
        """
        wrong = [name for name, value in others.items() if not _is_unread(name, value)]
        error = None
        if input_ids is None or wrong:
            error = UnsupportedError(
                f"the forward of a switched model was called with {wrong}" if wrong else "a forward without input_ids",
                where=f"rank {self.engine.rank}",
                why="rows are read from input_ids, attention_mask, position_ids and labels, and packed again",
                fix="leave these arguments out" if wrong else "give input_ids",
            )
        named = {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
        batch = {"input_ids": input_ids, **named, "shift_labels": shift_labels}
        batch |= {name: others.get(name) for name in ("seq_idx", *FLAT_COLUMNS)}
        request = self._request(batch, num_items_in_batch, fused_lm_head, output_router_logits, logits_to_keep)
        request.expected = expected_seeds
        call = self._take(request, error)
        self._run(call, request)
        if fused_lm_head:
            return self._fused_output(call, request)
        out = self._output(call, request)
        return out if return_dict is not False else out.to_tuple()

    def _request(
        self, batch: dict[str, Tensor | None], num_items: Any, fused: bool, routers: bool | None, kept: Any
    ) -> _Request:
        has_labels = batch["labels"] is not None or batch["shift_labels"] is not None
        asked = (
            getattr(self._bare.config.get_text_config(), "output_router_logits", False) if routers is None else routers
        )
        fields = 0
        if fused:
            fields = 1 + max(index for index, name in enumerate(FIELDS) if name in self._head_fields)
        layers, trains = lora_layers(self._bare), torch.is_grad_enabled() and self._store is None
        adapters = not (layers and layers[0].disable_adapters)
        return _Request(
            batch,
            None if num_items is None else float(num_items),
            fields,
            has_labels and not fused,
            bool(asked) and self._passes.routers is not None,
            kept,
            None,
            trains,
            adapters,
        )

    def _take(self, request: _Request, error: HotspaError | None) -> Call:
        """The call of a batch, with the documents of all ranks."""
        documents, window, matches = list[Document](), None, False
        if error is None and request.trains and not request.adapters:
            error = UnsupportedError(
                "a forward with gradients while adapters are switched off",
                fix="call it under torch.no_grad(), as a reference",
            )
        if error is None and request.trains:
            if self._waiting:
                matches = _is_same(self._waiting[0][1], request)
            elif self._announced:
                window = self._announced[0].result()
                matches = _is_same({**window.batches[0], "num_items": window.num_items}, request)
                if matches and window.of_step is None:
                    error = window.error or _unlike_windows()
        if error is None and not matches:
            try:
                documents = self._read(request.batch)
            except HotspaError as found:
                error = found
        rows = self._meet(request.wants, error, len(documents), matches)
        if request.trains and bool(rows[:, _FLAG].all()):
            return self._next_of_window(window)
        if matches and window is not None:
            documents = window.documents[0]
        elif matches:
            documents = list(self._waiting[0][0].documents)
        if request.trains and (self._waiting or self._announced):  # other batches came than those that were announced
            self._waiting.clear()
            if window is not None:
                self._announced.pop(0)
        facts = self._passes.exchange.facts(_facts(documents, request.num_items))
        of_step = self._documents if request.trains else Documents()
        call = self._make_call(request.batch, documents, facts, of_step)
        if request.trains:
            self._note_call([call])
        return call

    def _next_of_window(self, window: _Window | None) -> Call:
        if window is not None:
            self._announced.pop(0)
            assert window.of_step is not None
            is_first, calls = not len(self._documents), list[Call]()
            for batch, documents, facts in zip(window.batches, window.documents, window.facts, strict=True):
                call = self._make_call(batch, documents, facts, self._documents)
                calls.append(call)
                self._waiting.append((call, {**batch, "num_items": window.num_items}))
            if is_first:
                self._documents.rows, self._documents.holders = window.of_step.rows, window.of_step.holders
                self._passes.adopt(self._documents, window.prepared)
            self._note_call(calls)
        return self._waiting.pop(0)[0]

    def _make_call(
        self,
        batch: Mapping[str, Tensor | None],
        documents: Sequence[Document],
        facts: Sequence[Any],
        of_step: Documents,
    ) -> Call:
        ids = batch["input_ids"]
        assert ids is not None
        ranges = of_step.add([_pairs(of_rank) for of_rank in facts], documents, self.engine.rank)
        return Call(
            (ids.shape[0], ids.shape[1]),
            ids.device,
            0 if batch.get("shift_labels") is not None else 1,
            documents,
            ranges,
            [float(of_rank[:1].view(np.float64)[0]) for of_rank in facts],
            [sum(of_step.labels[number] for number in numbers) for numbers in ranges],
            ranges[self.engine.rank],
            of_step,
            self._version,
        )

    def _note_call(self, calls: Sequence[Call]) -> None:
        if not self._calls:
            self.engine.drop_gradients()
            self._note_gradients()
        self._calls += calls

    # -- what is computed for a call ----------------------------------------------------------------------------------

    def _run(self, call: Call, request: _Request) -> None:
        """Computes what the caller will get, by the cheapest way; all ranks take the same."""
        self._passes.tape.temperature = self._temperature if request.fields else 1.0
        self._use_adapters(request.adapters)
        mode = self.training, request.trains
        if not request.trains:
            self._look[mode] = self._looked.pop(mode, False)
        if not request.has_labels:
            return
        look = request.wants_loss and self._look.get(mode, False)
        if request.trains and call.fields < 0 and not request.routers and not look:
            known = self._known_seeds(request)
            if known is not None:
                self._train_at_once([call, *(other for other, _ in self._waiting)], request, known)
        is_loss = request.wants_loss and isinstance(call.assumed, float)
        if not is_loss and (call.fields < max(request.fields, 1) or call.with_routers < request.routers):
            self._score(call, request, with_logits=look)

    def _score(self, call: Call, request: _Request, with_logits: bool = False) -> None:
        together = [call] if with_logits or not request.trains else [call, *(other for other, _ in self._waiting)]
        if with_logits:
            self._meet("score with logits", self._too_many_logits(call))
        fields = max(request.fields, 1) if request.has_labels else 0
        numbers = self._passes.score(
            call.of_step,
            [number for one in together for number in one.everything],
            step=self._step,
            training=self.training,
            fields=fields,
            with_logits=with_logits,
            with_routers=request.routers,
            store=self._store,
            of_step=request.trains,
        )
        for one in together:
            one.numbers, one.fields, one.with_routers, one.with_logits = numbers, fields, request.routers, with_logits

    def _known_seeds(self, request: _Request) -> Assumed | None:
        """What the gradients of the caller's loss will be, up to a factor, where that is known."""
        if request.wants_loss:
            return Assumed(by_loss=self._expected)
        if request.expected is not None:
            return Assumed(given=request.expected)
        return self._linear if self._linear.by_token else None

    def _train_at_once(self, calls: Sequence[Call], request: _Request, known: Assumed) -> None:
        """Forward and backward of some calls, before the caller's backward has said what the gradients are."""
        rank, world = self.engine.rank, self.engine.world_size
        calls = calls if known.given is None else calls[:1]
        seeds = Seeds(weights=torch.zeros(len(self._documents), dtype=torch.float64))
        if known.given is not None:
            assumed = torch.zeros(calls[0].shape, dtype=torch.float64)
            assumed[:, : calls[0].shape[1] - calls[0].shift] = known.given.detach().to("cpu", torch.float64)
            calls[0].assumed = assumed * calls[0].mask
            tokens = {n: part[:, None] / world for n, part in calls[0].of_document(calls[0].assumed)}
            seeds = Seeds(tokens=tokens, columns=1)
        for call in calls if known.given is None else ():
            assert seeds.weights is not None
            for owner, numbers in enumerate(call.ranges):
                if call.labels[owner]:
                    seeds.weights[numbers.start : numbers.stop] = known.of_rank(call, owner) / world
            of_token = known.of_rank(call, rank) if call.labels[rank] else 0.0
            call.assumed = known.by_loss or call.mask.double() * of_token
        everything = [number for call in calls for number in call.everything]
        found = self._train(everything, seeds, request.fields, sums=request.wants_loss)
        for call in calls:
            call.numbers, call.fields = found, request.fields

    def _train(self, numbers: Sequence[int], seeds: Seeds, fields: int = 0, sums: bool = False) -> Numbers:
        """A training pass whose gradients are added to those of the step."""
        try:
            found = self._passes.train(
                self._documents, numbers, seeds, step=self._step, add=self._has_gradients, fields=fields, sums=sums
            )
        except BaseException:
            self._drop()
            raise
        self._has_gradients = True
        self._note_gradients()
        return found

    def _use_adapters(self, on: bool) -> None:
        """Replicas use their LoRA layers, or leave them out, as the model does at this moment."""
        for runner in self.engine.phases.values():
            for part in runner.parts:
                for layer in lora_layers(part.model):
                    layer._disable_adapters = not on

    # -- what the caller gets -----------------------------------------------------------------------------------------

    def _output(self, call: Call, request: _Request) -> ModelOutput:
        loss, aux = None, None
        if request.wants_loss:
            loss = self._loss(call, request)
            if request.routers:
                aux = self._balance_loss(call, request)
                loss = loss + self._coefficient * aux
        logits = LazyLogits(lambda: self._logits(call, request))
        if self._passes.routers is not None:
            return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux, logits=logits)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    @property
    def _coefficient(self) -> float:
        routers = self._passes.routers
        return routers.coefficient if routers is not None else 0.0

    def _loss(self, call: Call, request: _Request) -> Tensor:
        """The cross entropy of this rank's batch; attached to the caller's graph where gradients are enabled."""
        denominator, wide = call.denominators[self.engine.rank], self._passes.wide
        if isinstance(call.assumed, float):
            total = -sum(call.numbers.sums[number] for number in call.mine)
            loss = (torch.tensor(total, dtype=torch.float64) / denominator).to(call.device, wide)

            def take(gradient: Tensor) -> None:
                call.factor += float(gradient)

            return leaves(take, loss)[0]
        log_probs = call.column(0, wide)
        if request.trains:
            (log_probs,) = leaves(call.add_seeds, log_probs)
        return -log_probs.sum() / denominator

    def _balance_loss(self, call: Call, request: _Request) -> Tensor:
        """transformers' `load_balancing_loss_func` of this rank's batch."""
        value, _ = self._balance(call)
        loss = value.to(call.device, self._passes.wide)
        if not request.trains:
            return loss

        def take(gradient: Tensor) -> None:
            call.of_routers += float(gradient)

        return leaves(take, loss)[0]

    def _balance(self, call: Call) -> tuple[Tensor, Tensor]:
        """The balance loss of a call on this rank, and its gradient by each probability of its tokens, [E].

        It is E * sum over experts of (share of choices) * (mean probability); only the second has a gradient.
        """
        routers, numbers = self._passes.routers, call.numbers
        assert routers is not None
        places = max(sum(len(document.ids) for document in call.documents) * routers.num_layers, 1)
        sums = torch.zeros(routers.top_k + 1, routers.num_experts, dtype=torch.float64)
        for number in call.mine:
            sums += numbers.routers[number].view_as(sums)
        chosen, probabilities = sums[:-1].sum(0) / places, sums[-1] / places
        of_each = chosen * routers.num_experts
        return (of_each * probabilities).sum(), of_each / places

    def _fused_output(self, call: Call, request: _Request) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        wide = self._passes.wide
        names = [name for name in FIELDS if name in self._head_fields]
        columns = {name: call.column(FIELDS.index(name), wide) for name in names}
        if request.trains:
            with_gradient = [name for name in ("log_probs", "entropy") if name in columns]
            of_caller = leaves(call.add_seeds, *(columns[name] for name in with_gradient))
            columns |= dict(zip(with_gradient, of_caller, strict=True))
        if "is_top1" in columns:
            columns["is_top1"] = columns["is_top1"] > 0.5
        mask = call.mask[:, : call.shape[1] - call.shift].to(call.device)
        of = mask.sum().clamp(min=1) if request.num_items is None else request.num_items
        loss, aux = -columns["log_probs"].sum() / of, None
        if request.routers:
            aux = self._balance_loss(call, request)
            loss = loss + self._coefficient * aux
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux, **columns)

    def _logits(self, call: Call, request: _Request) -> Tensor:
        """[B, L, V], or the columns that were asked for; a leaf where gradients are enabled. Collective."""
        self._meet("look at logits", self._gone(call, request) or self._too_many_logits(call))
        self._looked[self.training, request.trains] = True
        numbers = call.numbers
        if not call.with_logits:
            self._use_adapters(request.adapters)
            numbers = self._passes.score(
                call.of_step,
                list(call.everything),
                step=self._step,
                training=self.training,
                fields=0,
                with_logits=True,
                store=self._store,
                of_step=request.trains,
            )
        call.with_logits = False  # they are the caller's now
        parts = [numbers.logits.pop(number) for number in call.mine]
        logits = call.lay_out(parts, self.engine.description.compute_dtype, (self._passes.num_logits,))
        if request.trains:
            (logits,) = leaves(call.add_logit_seeds, logits)
        if isinstance(request.kept, Tensor):
            return logits[:, request.kept]
        return logits[:, -request.kept :] if request.kept else logits

    def _gone(self, call: Call, request: _Request) -> HotspaError | None:
        if call.version != self._version or (request.trains and call not in self._calls):
            return UnsupportedError(
                "logits were looked at after the step",
                where=f"rank {self.engine.rank}, step {self._step + 1}",
                why="the weights that they belong to are gone",
                fix="use the logits before flush and optimizer.step()",
            )
        return None

    def _too_many_logits(self, call: Call) -> HotspaError | None:
        size = call.shape[0] * call.shape[1] * self._passes.num_logits * self._passes.wide.itemsize
        if size <= self._logit_bytes:
            return None
        return UnsupportedError(
            f"the logits of {call.shape[0]} rows of {call.shape[1]} tokens take {size:,} bytes, and the limit is "
            f"{self._logit_bytes:,}",
            where=f"rank {self.engine.rank}",
            why="logits, and the gradients by them, are in host memory of the rank that has the rows",
            fix="use the loss or log-probabilities (fused_lm_head=True) in the place of logits, smaller batches, or a "
            "larger logit_bytes",
        )

    # -- gradients ----------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """An optimizer is about to change the weights: flushes. Collective."""
        self.flush()
        self._passes.let_go()
        self._version += 1

    def flush(self) -> None:
        """Makes the gradients those of all calls since the last step. Collective; nothing where nothing is new.

        Raises:
            HotspaError: on every rank; the calls are dropped.
        """
        if self._calls:
            self._meet("flush", size=len(self._calls))
        if not self._calls:  # or they were dropped, here or on another rank
            return
        calls = self._calls
        self._use_adapters(True)
        scale = self._compare(calls)
        if scale is None:
            self.engine.drop_gradients()
            self._has_gradients = False
        seeds = self._seeds(calls, again=scale is None)
        active = self._active(seeds)
        if scale is not None and scale != 1.0:
            self.engine.scale_gradients(scale)
        if active:
            self._train(active, seeds)
        self._passes.let_go()
        mode = self.training, True
        self._look[mode] = self._looked.pop(mode, False)
        self._report()
        self._step += 1
        self._begin_step()

    def _compare(self, calls: Sequence[Call]) -> float | None:
        """What the gradients of what was trained at once must be multiplied by; None where it must be trained again.

        It also learns what the gradients of the next step will be.
        """
        rank, tolerance, gather = self.engine.rank, self._tolerance, self.engine.agreement.gather
        at_once = torch.tensor([call.assumed is not None for call in calls])
        said = [
            call.constant(rank, tolerance) if call.assumed is None else call.ratio(rank, tolerance) for call in calls
        ]
        rows = gather(said)
        if not bool(at_once.any()):
            if not bool(rows.isinf().all()):
                self._linear = Assumed.learnt(rows, calls, tolerance)
            return 1.0
        scale = common(rows[:, at_once].flatten(), tolerance)
        if scale is None:
            self._linear = Assumed()
            factors = [call.factor for call in calls if isinstance(call.assumed, float)]
            self._expected = common(gather(factors or [self._expected]).flatten(), tolerance) or self._expected
        elif scale:
            if any(isinstance(call.assumed, float) for call in calls):
                self._expected *= scale
            else:
                self._linear = self._linear.scaled(scale)
        return scale

    def _seeds(self, calls: Sequence[Call], again: bool) -> Seeds:
        """What is still to be trained. Collective."""
        world, rank, seeds = self.engine.world_size, self.engine.rank, Seeds()
        tokens: dict[int, Tensor] = {}
        for call in calls:
            final = call.final_seeds(rank, again)
            if final is not None:
                tokens |= {n: part / world for n, part in call.of_document(final.permute(1, 2, 0))}
            if call.logit_seeds is not None:
                parts = call.of_document(call.logit_seeds)
                seeds.logits |= {n: part / world for n, part in parts if bool(part.any())}
                call.logit_seeds = None
        seeds.tokens = {n: part for n, part in tokens.items() if bool(part.any())}
        has_entropy = any(bool(part[:, 1].any()) for part in seeds.tokens.values())
        columns = self.engine.agreement.gather([float(bool(seeds.tokens) + has_entropy), float(len(seeds.logits))])
        seeds.columns = int(columns[:, 0].max())
        if bool(columns[:, 1].any()):
            numbers = self._passes.exchange.facts(sorted(seeds.logits))
            seeds.of_logits = frozenset(int(number) for part in numbers for number in part)
        if self._passes.routers is not None:
            seeds.routers = self._router_seeds(calls)
        return seeds

    def _router_seeds(self, calls: Sequence[Call]) -> Tensor | None:
        routers = self._passes.routers
        assert routers is not None
        mine = torch.zeros(len(calls), routers.num_experts, dtype=torch.float64)
        for index, call in enumerate(calls):
            if call.of_routers:
                mine[index] = self._balance(call)[1] * call.of_routers / self.engine.world_size
        of_all = self.engine.agreement.gather(mine.flatten().tolist()).view(-1, len(calls), routers.num_experts)
        if not bool(of_all.any()):
            return None
        table = torch.zeros(len(self._documents), routers.num_experts, dtype=torch.float64)
        for index, call in enumerate(calls):
            for rank, numbers in enumerate(call.ranges):
                table[numbers.start : numbers.stop] = of_all[rank, index]
        return table

    def _active(self, seeds: Seeds) -> list[int]:
        """The documents that have a seed; the others are not run. Collective."""
        mine = set(seeds.tokens) | set(seeds.logits)
        parts = self._passes.exchange.facts(sorted(mine)) if seeds.columns or seeds.of_logits else []
        active = {int(number) for part in parts for number in part}
        if seeds.routers is not None:
            active |= set(seeds.routers.any(1).nonzero().flatten().tolist())
        return sorted(active)

    def _report(self) -> None:
        exchange = self._passes.exchange
        sent = self.engine.agreement.gather([float(n) for n in exchange.sent_bytes.values()]).sum(0).tolist()
        counted = {f"{kind}_bytes": int(total) for kind, total in zip(exchange.sent_bytes, sent, strict=True)}
        exchange.sent_bytes = dict.fromkeys(exchange.sent_bytes, 0)
        if self._passes.report is not None:
            self.report = replace(self._passes.report, grad_norm=self.engine.grad_norm, **counted)

    # -- a second model -----------------------------------------------------------------------------------------------

    def frozen(self, model: nn.Module) -> "FrozenModel":
        """A second model of the same build that is never trained (a reference), on this one's replicas. Collective.

        Its weights are shared out over the ranks like the model's own, and loaded for its forwards.

        Raises:
            ModelError: on every rank: the model is built in another way; make a `SwitchedModel` of its own for it.
        """
        return FrozenModel(self, model)


class FrozenModel(SwitchedModel):
    """Weights of a second model that a `SwitchedModel` computes with: see `SwitchedModel.frozen`."""

    def __init__(self, owner: SwitchedModel, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.engine, self._passes, self._logit_bytes = owner.engine, owner._passes, owner._logit_bytes
        with as_built(bare_model(model)[0]):
            self._store = owner.engine.frozen_weights(model)
        self._take_object(model)
        object.__setattr__(self, "_owner", owner)  # not a submodule
        self._version = self._written = 0
        self._calls, self._waiting, self._announced = [], [], []
        self.eval()

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """None: nothing of it is trained."""
        return iter(())

    @property
    def _step(self) -> int:  # type: ignore[override]
        return self._owner._step

    def _meet(self, what: str, error: HotspaError | None = None, size: int = 0, flag: bool = False) -> Tensor:
        return self._owner._meet(f"{what}, of a frozen model", error, size, flag)

    def write_back(self) -> None:
        """Nothing: the model has its weights."""

    def flush(self) -> None:
        """Nothing: there are no gradients."""

    def close(self) -> None:
        """Calls of the model object are its own again. The engine stays."""
        unroute(self._bare)


def _refuse(options: EngineOptions) -> None:
    """What has no meaning where the caller computes the loss.

    Raises:
        UnsupportedError: naming it.
    """
    losses = {"loss": options.loss, "label_smoothing": options.label_smoothing, "pipedream": options.pipedream}
    for name, value in losses.items():
        if value:
            raise UnsupportedError(
                f"the engine option {name} in a switched model",
                why="the caller computes the loss, and one optimizer step follows the gradients of all stages",
                fix=f"leave {name} out"
                + ("; compute the loss from what forward returns" if name != "pipedream" else ""),
            )


def _unlike_windows() -> HotspaError:
    return PlanMismatchError(
        "ranks have announced steps of different numbers of batches, or one could not read its rows",
        fix="announce as many batches on all ranks; a batch may have no rows",
    )


def _is_unread(name: str, value: Any) -> bool:
    return value is None or value is False or name in _UNREAD or name in ("seq_idx", *FLAT_COLUMNS)


def _facts(documents: Sequence[Document], num_items: float | None) -> list[int]:
    """What a rank says of a batch: the bits of what its loss is divided by, its documents, and length and labels of each."""
    labels = [int(np.count_nonzero(document.targets != IGNORED_LABEL)) for document in documents]
    denominator = np.float64(sum(labels) if num_items is None else num_items)
    pairs = zip([len(document.ids) for document in documents], labels, strict=True)
    return [int(denominator.view(np.int64)), len(documents), *(number for pair in pairs for number in pair)]


def _pairs(facts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of `_facts` [documents, 2]: length, and labels."""
    return facts[2:].reshape(-1, 2)


def _is_same(announced: Mapping[str, Any], request: _Request) -> bool:
    """Whether a batch is the one that was announced."""
    if announced["num_items"] != request.num_items:
        return False
    for name in (*ROW_COLUMNS, *FLAT_COLUMNS):
        one, other = announced.get(name), request.batch.get(name)
        if (one is None) != (other is None):
            return False
        if (
            one is not None
            and other is not None
            and not (one.shape == other.shape and bool((one.to(other) == other).all()))
        ):
            return False
    return True
