"""The model of one strategy on this rank: the family's own class, reduced to this rank's layers and shards.

Built once, on the meta device. `bind` makes parameters views into the flat buffers of the strategy's layout, `release`
drops them; using a released replica raises an error. Layers of other stages become pass-throughs at the same index
(families look up `config.layer_types` by index); later stages get the hidden state as `inputs_embeds`: no family needs
a custom forward.
"""

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_hotspa.costs.sizes import loss_chunk_tokens
from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.layout.placement import Slot, rank_slots
from hf_hotspa.layout.shares import shard_rows, shard_widths, stored_rows
from hf_hotspa.layout.vector import GradientDtypes
from hf_hotspa.model.model_kind import keep_text
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.packed_layer import products
from hf_hotspa.model.pass_through import PassThrough, take_hidden_state
from hf_hotspa.model.specs import ModelDescription, vocabulary_of_logits
from hf_hotspa.parallel.attention import ATTENTION, ChunkPrefix, PackedSequences
from hf_hotspa.parallel.context import ContextParallel, Division, all_tokens, divided_pack
from hf_hotspa.parallel.head_loss import (
    AuxiliaryLoss,
    LogitLoss,
    LossOfLogits,
    Objective,
    Tail,
    carry_loss,
    chunked_loss,
    chunks_of_sequences,
    chunks_of_tokens,
)
from hf_hotspa.parallel.loss import SequenceLoss
from hf_hotspa.parallel.mesh import StrategyMesh
from hf_hotspa.parallel.rope import RopeByRow, with_counted_positions
from hf_hotspa.parallel.tensor_parallel import (
    apply_sequence_parallel,
    apply_tensor_parallel,
    gather_tokens,
    same_tokens,
    set_local_heads,
)
from hf_hotspa.parallel.wrapped_model import unwrapped_modules
from hf_hotspa.seam import hooks

logger = logging.getLogger(__name__)


def build_skeleton(description: ModelDescription) -> Any:
    """Builds the complete model with meta parameters and real buffers. Returns an instance of `description.model_class`
    with the packed attention, without a wrapper."""
    with init_empty_weights(include_buffers=False):
        with no_init_weights():  # drawing numbers without data would take most of the time
            model = description.model_class._from_config(
                copy.deepcopy(description.config), attn_implementation=ATTENTION, dtype=description.compute_dtype
            )
        keep_text(model)
        model.tie_weights()
        for name, layer in description.packed.items():
            layer.put(model, name)
        if description.added is not None:
            description.added.put(model)
    for name, module in model.named_modules():
        if name in description.paddings:
            module.padding_idx = description.paddings[name]
        if name in description.switched_off:
            module.p = 0.0
    return model


# -- storage ----------------------------------------------------------------------------------------------------------

# The order of a parameter in the parameter vector: 1-D, its sharded dim outermost. Only these functions know it.


def to_storage(tensor: Tensor, shard_dim: int | None) -> Tensor:
    """Returns a parameter in vector order; a view if possible."""
    return (tensor if shard_dim is None else tensor.movedim(shard_dim, 0)).reshape(-1)


def from_storage(flat: Tensor | None, shape: Sequence[int], shard_dim: int | None, offset: int | None = None) -> Tensor:
    """Returns a view of stored elements with the Hugging Face shape: the inverse of `to_storage`. `flat`: 1-D,
    contiguous. `shape`: of the complete parameter or of a shard. `shard_dim`: the outermost dim in storage; None for
    the natural order. `offset`: where the elements begin; None: `flat` is all of them."""
    assert flat is not None
    if offset is not None:
        flat = flat[offset : offset + prod(shape)]
    if shard_dim is None:
        return flat.view(shape)
    stored = [shape[shard_dim], *shape[:shard_dim], *shape[shard_dim + 1 :]]
    return flat.view(stored).movedim(0, shard_dim)


# -- attachments ------------------------------------------------------------------------------------------------------


class Attachment:
    """An addition to a replica: by a feature (hook `attach`), or outside the model (`HotSPaEngine.attach`). It has any of
    these methods, called in this order:

    * `recompute(layer, *inputs)`: runs a layer, keeps only its inputs, and runs it again in the backward pass (`+rc`), in
      the place of torch's `checkpoint`; not for one that is attached later;
    * `divided(replica)`: the layers are divided over the ranks of tp; not for one that is attached later;
    * `tape(taping)`: from now on `Taping.tape` replaces the loss while it is not None;
    * `begin_step(step)`: a mini-batch begins, after `step` others in the run;
    * `bind()`: a phase begins, with its weights;
    * `begin(pack, micro_batch, whole)`: a forward begins. `whole` is the pack, or its chunk; `micro_batch` this rank's
      tokens, its row under cp, with padding under sequence parallelism; `pack` is the input of attention;
    * `loss(whole, scale, tokens, is_counted, prefix)`: the layers have run; returns a further loss of the pack (fp64 scalar,
      times `scale`) on this stage, or None. `tokens` maps [t, n] of this rank's tokens to [T, n] of the pack; `prefix` is
      what precedes the first sequence. Without `is_counted` another rank's value counts, and this one is 0 with the same
      gradients. An attribute `value` has the sum since `bind`;
    * `end()`: the forward is over; its backward may come later;
    * `measures()`: the phase is over; returns numbers since `bind`, by the names of `report.MEASURES`.
    """


_CALLS = ("recompute", "divided", "tape", "begin_step", "bind", "begin", "loss", "end", "measures")


# -- gradients of parameters ------------------------------------------------------------------------------------------

# Gradients that accumulate in a wider dtype than their parameter has: bf16 weights, fp32 sums.
#
# A torch with `Tensor.grad_dtype` supports such a `.grad`. In an older torch a hook moves the gradient of each backward
# into the buffer. The sums are the same bit for bit, except for a weight that one backward uses several times (tied
# embeddings): its uses are first summed in its own dtype. The hook needs memory for one more gradient of one parameter.


KNOWS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
_BUFFER = "_hotspa_gradient"


def widen(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Lets a parameter's gradients accumulate in the dtype of the buffers for `bind_gradient`. Call it before other
    hooks of the parameter are registered."""
    if KNOWS_GRAD_DTYPE:
        parameter.grad_dtype = dtype
    elif dtype != parameter.dtype:
        setattr(parameter, _BUFFER, None)
        parameter.register_post_accumulate_grad_hook(_move)


def bind_gradient(parameter: nn.Parameter, buffer: Tensor | None) -> None:
    """Lets backward passes add to a buffer of the parameter's shape; None: to nothing."""
    if hasattr(parameter, _BUFFER):
        parameter.grad = None
        setattr(parameter, _BUFFER, buffer)
    else:
        parameter.grad = buffer


def _move(parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    buffer = getattr(parameter, _BUFFER)
    if buffer is not None and gradient is not None:
        buffer.add_(gradient)


def recompute_layers(model: PreTrainedModel, recompute: Callable[..., Any], every: int) -> None:
    """Makes every `every`-th layer keep only its input, and recompute the rest in the backward pass, with any
    release of transformers. Raises `ModelError`: the family does not support it.

    The models' own `gradient_checkpointing_enable` also puts hooks on embeddings, which later stages do not have, and only
    newer releases can skip layers."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} cannot recompute its layers",
            fix="leave activation_checkpointing and +rc off, or lower the tokens per pack",
        )
    model._set_gradient_checkpointing(True, recompute)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0
        own = getattr(layer, "hotspa_recompute", None)  # a layer that must have its pack again
        layer._gradient_checkpointing_func = recompute if own is None else partial(own, recompute=recompute)


# -- what is divided --------------------------------------------------------------------------------------------------


class TensorShards(NamedTuple):
    """How tp divides modules, by name: the style (of `parallel.tensor_parallel`), and the size of every shard."""

    styles: dict[str, str]
    widths: dict[str, tuple[int, ...]]


def _tensor_shards(description: ModelDescription, mesh: StrategyMesh) -> TensorShards:
    if mesh.tensor is None:
        return TensorShards({}, {})
    whole = description.experts if mesh.experts is not None else ()
    styles = {name: style for name, style in description.styles.items() if name not in whole}
    specs = {name: spec for spec in description.vector.specs for name in (spec.name, *spec.tied_names)}
    widths = {}
    for module in styles:
        spec = specs.get(description.weight_of(module))
        if spec is not None and spec.shard_dim is not None:
            widths[module] = shard_widths(description.vector, mesh.strategy, spec, mesh.rank)
    return TensorShards(styles, widths)


class TokenShares:
    """Which tokens of a pack are here: all, a share of them between blocks (`+sp`), or this rank's row (cp)."""

    def __init__(self, mesh: StrategyMesh, context: ContextParallel | None, description: ModelDescription) -> None:
        self.context, self.counts_from = context, description.counts_from
        self._hidden_size = description.shape.hidden_size
        self.group = mesh.tensor.group if mesh.tensor is not None and mesh.strategy.sp else None
        self._num_shares = mesh.strategy.tp if mesh.strategy.sp else 1

    def row(self, whole: MicroBatch, prefix: ChunkPrefix | None) -> tuple[MicroBatch, PackedSequences, Division | None]:
        """A pack's tokens here, padded to equal shares; the same as attention sees them; and the division by cp."""
        if self.context is not None:
            division = self.context.divide(whole.lengths)
            return *divided_pack(self.context, division, whole, prefix), division
        row = whole if self._num_shares == 1 else self._padded(whole)
        return row, PackedSequences(row.lengths, row.cu_seqlens, prefix, carried=prefix), None

    def _padded(self, whole: MicroBatch) -> MicroBatch:
        shares = self._num_shares
        return whole.padded_to(-(-whole.num_tokens // shares) * shares, 0)

    def counted_positions(self, whole: MicroBatch) -> Tensor:
        """[1, T] int64 of the tokens here, for a family that does not count positions from 0."""
        assert self.counts_from is not None
        counted = with_counted_positions(whole, self.counts_from)
        return (self._padded(counted) if self.context is None else self.context.row_of(counted)).position_ids

    def hidden_shape(self, whole: MicroBatch) -> tuple[int, int, int]:
        """The shape of the hidden state between blocks, with padding."""
        row = whole.num_tokens if self.context is None else self.context.row_tokens(whole.lengths)
        return 1, -(-row // self._num_shares), self._hidden_size

    def collected(self, whole: MicroBatch, division: Division | None) -> Callable[[Tensor], Tensor]:
        """What maps [t, ...] of the tokens here to [T, ...] of the pack."""
        if division is None:
            return partial(same_tokens, group=self.group, num_tokens=whole.num_tokens)
        row = partial(same_tokens, group=self.group, num_tokens=division.shares.rows[division.context.index])
        return lambda x: all_tokens(row(x), division)


# -- the head and the loss --------------------------------------------------------------------------------------------


class KeptForward(NamedTuple):
    """The output of a last stage's layers for a pack, with its graph."""

    # [1, T, hidden size], the input of the head: of all tokens under sequence parallelism; or the numbers that were read
    hidden: Tensor
    inputs: dict[str, Any]  # the model's arguments
    micro_batch: MicroBatch  # this rank's tokens of the pack


class LossHead:
    """What follows the layers on a last stage: head and loss, on one chunk of tokens after the other.

    Attributes:
        objective: The loss of logits.
        widths: Rows of the vocabulary in each tensor-parallel shard; also on other stages.
        tail: The head as a function of the hidden state; None on other stages.
        instead: If set, gets the hidden state [1, t, hidden size] of the tokens here and the model's arguments, in place
            of head and loss; returns an fp64 scalar.
    """

    instead: Callable[[Tensor, dict[str, Any]], Tensor] | None = None

    def __init__(
        self,
        model: Any,
        description: ModelDescription,
        options: EngineOptions,
        mesh: StrategyMesh,
        widths: tuple[int, ...],
        sharers: dist.ProcessGroup | None,  # the ranks that have other tokens of the hidden state (`+sp`)
        is_last: bool,
    ) -> None:
        self.widths, self._sharers, self._own = widths, sharers, options.loss
        self._model, self._base = model, model.get_submodule(description.base)
        readout = description.readout
        # what reads tokens, in the place of a vocabulary's head
        self._read = readout.reader(model) if readout is not None and is_last else None
        self.tail = Tail(model, description.base, description.head) if is_last and readout is None else None
        self.objective: Objective = LogitLoss(
            mesh.tensor if readout is None else None,
            options.loss,
            options.label_smoothing,
            vocabulary_of_logits(description),
            widths,
        )
        whole = isinstance(options.loss, SequenceLoss)  # of the vocabulary
        self._chunk_tokens = options.loss_chunk_tokens or loss_chunk_tokens(sum(widths) if whole else max(widths))
        if (mesh.strategy.ck or mesh.strategy.cp > 1) and whole:
            raise UnsupportedError(
                f"the loss {options.loss} under {mesh.strategy}",
                why="it is called with the logits of whole sequences, and cp and +ck compute these in parts",
                fix="leave cp and +ck out, or give a TokenLoss",
            )
        # if a list, the logits of each micro-batch are added, [T, local vocabulary rows]
        self.logits: list[Tensor] | None = None
        # whether forwards keep their graphs, in `kept`: the next forward of the same pack with a loss starts behind the
        # layers
        self.keeps_graphs = False
        self.kept: dict[tuple[object, ...], KeptForward] = {}

    def loss(
        self, inputs: dict[str, Any], micro_batch: MicroBatch, whole: MicroBatch, scale: float, num_tokens: int
    ) -> Tensor:
        """The scaled loss, from the model's arguments; keeps the logits of the first `num_tokens` tokens if requested."""
        if self.instead is not None:
            return self.instead(self._base(**inputs).last_hidden_state, inputs)
        loss_of = self.objective.of(micro_batch, whole, scale)
        in_chunks = self.logits is None and num_tokens > self._chunk_tokens
        if not (in_chunks or self.keeps_graphs or self._sharers is not None or self._read is not None):
            # squeezed, not indexed: the gradient of an index is another buffer as large as the logits
            logits = self._model(**inputs).logits.squeeze(0)
            if self.logits is not None:
                self.logits.append(logits[:num_tokens])
            return loss_of(logits, slice(0, micro_batch.num_tokens))
        hidden = self._base(**inputs).last_hidden_state
        if self._read is not None:
            hidden = self._read(hidden)
        elif self._sharers is not None:
            hidden = gather_tokens(hidden, self._sharers)
        kept = KeptForward(hidden, inputs, micro_batch)
        if not self.keeps_graphs:
            return self._loss_behind(kept, loss_of, num_tokens)
        self.kept[whole.keys, whole.lengths] = kept
        with torch.no_grad():
            return self._loss_behind(kept._replace(hidden=kept.hidden.detach()), loss_of, num_tokens)

    def _loss_behind(self, kept: KeptForward, loss_of: LossOfLogits, num_tokens: int) -> Tensor:
        (hidden, inputs, micro_batch), tail, most = kept, self.tail, self._chunk_tokens
        if self._read is not None:  # of all tokens, or of this rank's share
            size = hidden.shape[1]
            first = 0 if self._sharers is None else dist.get_rank(self._sharers) * size
            return loss_of(hidden.squeeze(0), slice(first, first + size))
        assert tail is not None
        if self.logits is not None or num_tokens <= most:
            logits = tail(hidden, inputs)
            if self.logits is not None:
                self.logits.append(logits[:num_tokens])
            return loss_of(logits, slice(0, micro_batch.num_tokens))
        if isinstance(self._own, SequenceLoss):
            chunks = chunks_of_sequences(micro_batch.lengths, most)
        else:
            chunks = chunks_of_tokens(micro_batch.num_tokens, most)
        return chunked_loss(lambda part, tokens: loss_of(tail(part, inputs), tokens), hidden, tail.parameters, chunks)

    def resumed(self, whole: MicroBatch, scale: float) -> Tensor | None:
        """The loss of a pack from an earlier forward's graph (`keeps_graphs`); None if it has none."""
        kept = self.kept.pop((whole.keys, whole.lengths), None)
        if kept is None:
            return None
        return self._loss_behind(kept, self.objective.of(kept.micro_batch, whole, scale), kept.hidden.shape[1])


# -- replicas ---------------------------------------------------------------------------------------------------------


def _stage_model(description: ModelDescription, layers_here: Collection[int], is_first: bool, is_last: bool) -> Any:
    """The model with pass-throughs in the place of other stages' modules."""
    model = build_skeleton(description)
    model.train()
    base = model.get_submodule(description.base)
    places = [(layers, i) for n in description.layers for layers in [base.get_submodule(n)] for i in range(len(layers))]
    for unit, (layers, index) in enumerate(places):
        if unit not in layers_here:
            layers[index] = PassThrough(layers[index])
    if not is_first:
        take_hidden_state(base, description.embeddings)
    if not is_last:
        for name in description.norms:
            setattr(base, name, PassThrough())
        top = description.base.partition(".")[0]
        for name in filter(None, {description.head, *(name for name, _ in model.named_children() if name != top)}):
            model.set_submodule(name, PassThrough())
    return model


class Replica:
    """This rank's part of the model under one strategy.

    Attributes:
        begin_pass, end_pass: Called around each forward and each backward; `end_pass` before waiting for another stage.
    """

    def __init__(
        self,
        description: ModelDescription,
        mesh: StrategyMesh,
        device: torch.device,
        # the model's buffers by name in its own class (such as rotary tables), copied to the device
        buffers: Mapping[str, Tensor],
        options: EngineOptions | None = None,  # for the loss, and for attachments
        part: int = 0,  # which of this rank's stages it is (`+v2`), from 0; each is a separate replica
    ) -> None:
        options, strategy = options or EngineOptions(), mesh.strategy
        self.mesh, self.device, self.compute_dtype = mesh, device, description.compute_dtype
        self.losses: list[Tensor] = []  # on the last stage, the scaled loss of each micro-batch since the last `bind`
        self.reached = set[Tensor]()  # the parameters with a gradient in this mini-batch
        stage = part * strategy.pp + mesh.coord.pp
        self.is_first, self.is_last = stage == 0, stage == strategy.num_stages - 1
        shared = description.shape, options.context_parallel, options.pair_costs, device
        context = ContextParallel(mesh, *shared) if mesh.context is not None else None
        self.tokens = TokenShares(mesh, context, description)
        mine = description.vector.stage_costs.stages(strategy.num_stages)[stage]
        kinds = [description.layer_kinds[index] for index in mine]
        self._num_attentions = sum(kind.num_attentions for kind in kinds if not kind.alone)
        self.model = _stage_model(description, mine, self.is_first, self.is_last)
        self._base = self.model.get_submodule(description.base)
        rope = RopeByRow(self._base)
        # decoder layers, including other stages' pass-throughs
        self.layers = [layer for name in description.layers for layer in self._base.get_submodule(name)]
        slots = rank_slots(description.vector, strategy, mesh.rank, stage)
        # with their slots, in vector order
        self.parameters = self._own_parameters(description, slots, options.gradients)
        # called at the end of every forward that has a loss or leaves the stage
        self.check_weights: Callable[[], None] | None = None
        self.begin_pass: Callable[[], None] | None = None
        self.end_pass: Callable[[], None] | None = None
        self.attachments: list[object] = []  # what is attached, in order
        self.calls: dict[str, list[Callable[..., Any]]] = {name: [] for name in _CALLS}  # their methods, by name
        for name, buffer in dict(self.model.named_buffers()).items():
            module, _, leaf = name.rpartition(".")
            source = buffers.get(name, buffer)
            setattr(self.model.get_submodule(module), leaf, source.detach().to(device, copy=True))
        self._use_packed(description)
        self.attach(rope if rope.is_needed else None)
        self.shards = _tensor_shards(description, mesh)
        for hook in hooks("attach"):
            self.attach(*hook(self, description, options))
        if strategy.rc:
            recompute = next(iter(self.calls["recompute"]), partial(checkpoint, use_reentrant=False))
            recompute_layers(self.model, recompute, every=strategy.rc)
        if mesh.tensor is not None:
            self._shard(description)
        widths = self._widths(description)
        self.head = LossHead(self.model, description, options, mesh, widths, self.tokens.group, self.is_last)
        for divided in self.calls["divided"]:
            divided(self)
        self.attach(context)
        self.release()

    def attach(self, *attachments: object) -> None:
        """Adds `Attachment`s; None for nothing."""
        for attachment in attachments:
            if attachment is not None:
                self.attachments.append(attachment)
            for name, calls in self.calls.items():
                if hasattr(attachment, name):
                    calls.append(getattr(attachment, name))

    @property
    def context(self) -> ContextParallel | None:
        """How the ranks of cp divide packs."""
        return self.tokens.context

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for _, slot in self.parameters)

    # -- construction -------------------------------------------------------------------------------------------------

    def _own_parameters(
        self, description: ModelDescription, slots: Sequence[Slot], gradients: GradientDtypes
    ) -> list[tuple[nn.Parameter, Slot]]:
        """Replaces each meta parameter by a real, empty one; tied names on this stage share it."""
        modules = dict(self.model.named_modules())
        owned = []
        for slot in slots:
            spec = slot.spec
            dtype = getattr(torch, spec.dtype)
            parameter = nn.Parameter(torch.empty(0, dtype=dtype, device=self.device), requires_grad=spec.trainable)
            if spec.trainable:
                widen(parameter, getattr(torch, gradients.accumulated(spec.dtype)))
                parameter.register_post_accumulate_grad_hook(self.reached.add)
            for name in (spec.name, *spec.tied_names):
                module, _, leaf = description.local_name(name).rpartition(".")
                if leaf in getattr(modules.get(module), "_parameters", {}):
                    modules[module]._parameters[leaf] = parameter
            owned.append((parameter, slot))
        left = [name for name, p in self.model.named_parameters() if p.is_meta]
        if left:
            raise ModelError(
                f"the model's class creates the parameters {left[:3]}, which the model passed in does not have",
                fix="pass a model as its class builds it from its config",
            )
        return owned

    def _widths(self, description: ModelDescription) -> tuple[int, ...]:
        """The rows of the vocabulary in each shard."""
        if description.readout is not None:
            return (description.readout.width,)
        return self.shards.widths[description.head] if self.mesh.tensor is not None else (description.shape.vocab_size,)

    def _shard(self, description: ModelDescription) -> None:
        """Divides the layers over the ranks of tp."""
        strategy, tensor = self.mesh.strategy, self.mesh.tensor
        assert tensor is not None
        modules = dict(self.model.named_modules())
        rows = self._widths(description)
        for name, (_, heads, kv_heads) in description.local_heads(strategy.tp, tensor.shard).items():
            if name in modules:
                own = getattr(modules[name], "hotspa_set_heads", None)
                set_heads = own or partial(set_local_heads, modules[name])
                set_heads(heads, kv_heads)
        num_logits = vocabulary_of_logits(description)
        if description.readout is None and num_logits < sum(rows):
            self.model.config = copy.copy(self.model.config)
            left = num_logits - sum(rows[: tensor.shard])
            self.model.config.unpadded_vocab_size = min(max(left, 0), rows[tensor.shard])
        # other stages' pass-throughs must not be wrapped
        present = {name: m for name, m in modules.items() if not isinstance(m, PassThrough)}
        if strategy.sp:
            apply_sequence_parallel(present, *self.shards, tensor)
        else:
            self.calls["end"].append(apply_tensor_parallel(present, *self.shards, tensor))

    def _use_packed(self, description: ModelDescription) -> None:
        """Replaces products by ones with this rank's shards of packed weights."""
        specs = {description.plain_name(slot.spec.name): slot.spec for slot in self.slots}
        whole, tensor = list[str](), self.mesh.tensor
        for name, product in products(unwrapped_modules(self.model), description.packed).items():
            spec = specs[f"{name}.{description.packed[name].leaf}"]
            has_whole_experts = spec.experts and self.mesh.experts is not None
            if spec.shard_dim is not None and tensor is not None and not has_whole_experts:
                place = description.vector, self.mesh.strategy, spec, self.mesh.rank
                is_whole = stored_rows(*place) is None
                product.cut(spec.shard_dim, shard_rows(*place), is_whole, tensor.group)
                whole += [name] if is_whole else []
        if whole and self.mesh.rank == 0:
            logger.warning(
                "under %s each rank holds %d weights in %s whole (%s, ...): their shards do not end with blocks",
                self.mesh.strategy, len(whole), description.packed[whole[0]].form, whole[0],
            )  # fmt: skip

    # -- storage ------------------------------------------------------------------------------------------------------

    def bind(self, weights: Sequence[Tensor | None] | None, gradients: Sequence[Tensor | None] | None) -> None:
        """Begins a phase: makes the parameters views into flat buffers. `weights`: by segment, 1-D, of the segment's
        dtype, or None if not on this rank. None: they are already bound. `gradients`: by segment, 1-D, of the
        accumulation dtype (`GradientDtypes`), or None if not trained. None: only forwards will run."""
        for parameter, slot in self.parameters:
            place = slot.shape, slot.dim, slot.offset
            if weights is not None:
                parameter.data = from_storage(weights[slot.segment], *place)
            if gradients is None or not slot.spec.trainable:
                bind_gradient(parameter, None)
            else:
                bind_gradient(parameter, from_storage(gradients[slot.segment], *place))
        self.losses = []
        for bind in self.calls["bind"]:
            bind()

    def use_weights(self, weights: Sequence[Tensor | None]) -> None:
        """Replaces the values of the trained weights until the next call; nothing else changes.

        A backward must have the same weights as its forward: autograd reads them again.
        """
        for parameter, slot in self.parameters:
            if slot.spec.trainable:
                parameter.data = from_storage(weights[slot.segment], slot.shape, slot.dim, slot.offset)

    def release(self) -> None:
        """Drops all buffers. A forward before the next `bind` fails on empty parameters."""
        self.head.kept.clear()
        for parameter, _ in self.parameters:
            parameter.data = parameter.data.new_empty(0)
            bind_gradient(parameter, None)

    # -- one pipeline stage -------------------------------------------------------------------------------------------

    def forward(
        self,
        micro_batch: MicroBatch,  # one pack, T tokens. With cp, this rank computes its row, and T below is the row's.
        hidden: Tensor | None,  # [1, T, hidden size] from the previous stage; None on the first stage
        scale: float,  # 1 / (label tokens of the mini-batch)
        prefix: ChunkPrefix | None = None,  # what precedes the first sequence, if that is a part of a sequence
        with_loss: bool = True,  # whether a last stage computes the loss
    ) -> Tensor:
        """Runs this rank's stage on one micro-batch. Returns [1, T, hidden size] of the last layer here, or the scaled
        sum of cross entropies (fp64 scalar)."""
        # without gradients it may be another call of the same rows, e.g. with other labels
        may_resume = with_loss and self.head.kept and torch.is_grad_enabled()
        if may_resume and (resumed := self._resumed(micro_batch, scale)) is not None:
            return resumed
        whole, has_loss = micro_batch, with_loss and self.is_last
        micro_batch, pack, division = self.tokens.row(whole, prefix)
        for begin in self.calls["begin"]:
            begin(pack, micro_batch, whole)
        counts = self.tokens.counts_from is not None
        positions = self.tokens.counted_positions(whole) if counts else micro_batch.position_ids
        inputs = dict[str, Any](position_ids=positions, attention_mask=None, use_cache=False, hotspa_pack=pack)
        inputs |= {"input_ids": micro_batch.input_ids} if self.is_first else {"inputs_embeds": hidden}
        if has_loss:
            num_tokens = whole.num_tokens if division is None else division.num_tokens
            out = self.head.loss(inputs, micro_batch, whole, scale, num_tokens)
        else:
            out = self._base(**inputs).last_hidden_state
        tokens = self.tokens.collected(whole, division) if self.calls["loss"] else None
        # each rank of cp computes the further losses of the complete pack, which count once
        is_counted = division is None or self.mesh.coord.cp == 0
        for further_loss in self.calls["loss"]:
            loss = further_loss(whole, scale, tokens, is_counted, prefix)
            if loss is not None:
                out = out + loss if has_loss else carry_loss(out, loss)
        if has_loss:
            self.losses.append(out.detach())
        for end in self.calls["end"]:
            end()
        if with_loss and self.check_weights is not None:
            self.check_weights()
        # layers that run in cycles attend several times
        if pack.num_calls < self._num_attentions or pack.num_calls % max(self._num_attentions, 1):
            raise ModelError(
                f"{type(self.model).__name__} attended {pack.num_calls} times instead of {self._num_attentions}",
                why="layers that do not use the packed attention would mix the sequences of a pack",
            )
        return out

    def _resumed(self, whole: MicroBatch, scale: float) -> Tensor | None:
        out = self.head.resumed(whole, scale)
        if out is not None:
            self.losses.append(out.detach())
            if self.check_weights is not None:
                self.check_weights()
        return out

    def begin_step(self, step: int) -> None:
        """Begins a mini-batch, after `step` others in the run, before any gradient."""
        self.reached.clear()
        for begin_step in self.calls["begin_step"]:
            begin_step(step)

    @property
    def auxiliary(self) -> AuxiliaryLoss | None:
        """The loss of an attachment, if any."""
        return next((each for each in self.attachments if isinstance(each, AuxiliaryLoss)), None)

    def tokens_kept(self, num_tokens: int) -> int:
        return num_tokens if self.context is None else self.context.tokens_kept(num_tokens)

    def hidden_shape(self, micro_batch: MicroBatch) -> tuple[int, int, int]:
        """The shape of the hidden state between stages."""
        return self.tokens.hidden_shape(micro_batch)
