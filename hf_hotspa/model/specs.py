"""From a Hugging Face model to plain data: the one place that reads plans, configs and module names.

`describe_model` makes a `ModelDescription`: the parameter vector, the model's shape, and the style of each module under
tensor parallelism. What cannot be exact raises an error by name, before anything is built.
"""

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.layout.vector import BESIDE, EMBEDDING, HEAD, ParameterSpec, ParameterVector, Part, build_vector
from hf_hotspa.model.model_kind import (
    INPUTS,
    OUTPUTS,
    AddedModules,
    LayerKind,
    Readout,
    attends_both_ways,
    attention_dropouts,
    layer_kinds,
    layer_types,
    of_text,
    readout_of,
    refuse_dropout,
    refuse_other_models,
    refuse_own_attention,
    text_base,
    unwrap,
    without_attention_dropout,
)
from hf_hotspa.model.packed_layer import PackedLayer, packed_layers
from hf_hotspa.model.pass_through import order_unsupported_reason, stage_unsupported_reason
from hf_hotspa.model.tensor_plan import (
    TensorPlan,
    config_value,
    experts_per_token,
    fused_experts,
    head_counts,
    stage_plan,
)
from hf_hotspa.model_shape import ModelShape, pair_layers
from hf_hotspa.parallel.attention import calls_attention, names_in_forward, num_attends, window_of
from hf_hotspa.parallel.rope import counting_from, refuse_hidden_rope
from hf_hotspa.parallel.tensor_parallel import sequence_parallel_refusal
from hf_hotspa.parallel.wrapped_model import inner_name, outer_name, plain_name, plain_parameters
from hf_hotspa.seam import hooks

_RANDOM_ROUTERS = {"phimoe"}
_MLP = re.compile(r"mlp|moe|expert|feed_?forward|ffn|fc[12]|dense_4h|gate_proj|up_proj|down_proj|router")


@dataclass(frozen=True)
class ModelDescription:
    """A model as the engine sees it."""

    model_class: type[PreTrainedModel]  # its own class, also of replicas
    config: PreTrainedConfig  # its config, with the packed attention set
    vector: ParameterVector
    shape: ModelShape
    base: str  # name of the base model inside it (``model``)
    # names, inside the base model, of the lists of decoder layers; one, except for stacks that run in cycles
    layers: tuple[str, ...]
    embeddings: tuple[str, ...]  # names, inside the base model, of the modules before the layers
    norms: tuple[str, ...]  # names, inside the base model, of the modules after the layers
    head: str  # name of the output embedding; empty with a `readout`
    styles: Mapping[str, str]  # tensor-parallel style by module name
    # query heads and key/value heads of attention modules with cut heads, by name
    attention_heads: Mapping[str, tuple[int, int]]
    layer_kinds: tuple[LayerKind, ...]  # how each decoder layer treats the sequences of a pack
    auxiliary_layers: int  # number of modules with an auxiliary loss (routers)
    whole: Mapping[str, str]  # why planned blocks are still held whole, by name
    experts: Mapping[str, int]  # number of fused experts, which ep divides, by module name
    paddings: Mapping[str, int | None]  # the modules' `padding_idx`; the config may have got its padding token later
    switched_off: frozenset[str]  # the dropout modules that were switched off, as TRL does (`disable_dropout`)
    compute_dtype: torch.dtype  # the dtype of activations
    counts_from: int | None = None  # the padding id from which its embedding counts positions; None if from 0
    prefix: str = ""  # of parameter names in the user's model, before the names in `model_class`
    added: AddedModules | None = None  # what was added beside its weights, such as an adapter
    # its layers whose frozen weights are held in another form, by name without the adapter
    packed: Mapping[str, PackedLayer] = field(default_factory=dict)
    readout: Readout | None = None  # how tokens are read, in the place of a vocabulary's head
    side_inputs: object = None  # what enters passes beside tokens (`switched.passes.SideInputs`), or None

    def digest(self) -> str:
        """Equal on ranks whose models and layouts agree."""
        added = self.added.digest() if self.added is not None else ""
        return f"{self.model_class.__name__} {self.vector.digest()} {sorted(self.styles.items())} {added} {self.paddings} {sorted(self.switched_off)} {self.packed} {self.readout} {self.side_inputs}"

    def local_name(self, name: str) -> str:
        """A parameter's name in `model_class`."""
        return inner_name(self.prefix, name)

    def plain_name(self, name: str) -> str:
        """A parameter's name in `model_class` without added modules."""
        name = self.local_name(name)
        return name if self.added is None else self.added.beside(name)[0]

    def weight_of(self, module: str) -> str:
        """Returns the vector's name of the weight of a module of `styles`; of a layer with added modules, its base's."""
        inside = self.added.inside.get(module) if self.added is not None else None
        return outer_name(self.prefix, f"{module}{f'.{inside}' if inside else ''}.weight")

    def local_heads(self, tp: int, shard: int) -> dict[str, tuple[int, int, int]]:
        """Returns a shard's first query head, query heads and key/value heads, by attention module with cut heads."""
        ranges = {}
        for name, (heads, kv_heads) in self.attention_heads.items():
            low, high = Part(heads, kv_heads, heads).cut(tp, shard)
            first, last = Part(kv_heads, kv_heads, kv_heads, replicate=True).cut(tp, shard)
            ranges[name] = low, high - low, last - first
        return ranges


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def vocabulary_of_logits(description: ModelDescription) -> int:
    """Returns the logits per token; some heads are wider than the vocabulary, and the family drops the rest."""
    if description.readout is not None:
        return description.readout.width
    text = description.config.get_text_config()
    return getattr(text, "unpadded_vocab_size", None) or description.shape.vocab_size


def refuse_inexact(config: PreTrainedConfig) -> None:
    """Rejects models that cannot train exactly in packs or across layouts. Raises `UnsupportedError`: naming the
    setting of the config."""
    name = config.get_text_config().model_type
    if name in _RANDOM_ROUTERS:
        raise UnsupportedError(
            f"the router of {name} draws random numbers in training",
            why="it would draw others under every layout, so hot-switched training would not be exact",
        )


def base_name(model: PreTrainedModel) -> str:
    """Returns the name of the base model (embeddings, layers, norm) in a causal language model. Raises `ModelError`:
    there is none."""
    if (inner := text_base(model)) is not None:
        return inner
    embedding = model.get_input_embeddings()
    for name in (model.base_model_prefix, *(name for name, _ in model.named_children())):
        child = getattr(model, name, None) if name else None
        if isinstance(child, nn.Module) and any(module is embedding for module in child.modules()):
            return name
    raise ModelError(
        f"{type(model).__name__} is not a causal language model with one list of decoder layers",
        fix="pass an AutoModelForCausalLM model",
    )


def _layer_lists(model: PreTrainedModel) -> tuple[str, ...]:
    """The names, inside the base model, of its lists of decoder layers: one, or several stacks that run in cycles."""
    base, count = model.get_submodule(base_name(model)), model.config.get_text_config().num_hidden_layers
    lists = {name: child for name, child in base.named_modules() if isinstance(child, nn.ModuleList)}
    whole = [name for name, child in lists.items() if "." not in name and len(child) == count]
    if len(whole) == 1:
        return (whole[0],)
    stacks = [
        name
        for name, child in lists.items()
        if len(child) and all(any(calls_attention(m) for m in layer.modules()) for layer in child)
    ]
    outer = tuple(name for name in stacks if not name.startswith(tuple(f"{other}." for other in stacks)))
    if whole or not outer or (len(outer) > 1 and any(name.count(".") != 1 for name in outer)):
        raise ModelError(
            f"{type(model).__name__} is not a causal language model with one list of decoder layers",
            fix="pass an AutoModelForCausalLM model",
        )
    return outer


@dataclass(frozen=True)
class _Structure:
    """A causal language model, without an adapter's wrapper: the names of its parts (`ModelDescription`), and what is read
    from them, each once."""

    model: PreTrainedModel
    prefix: str
    added: AddedModules | None
    compute_dtype: torch.dtype | None
    base: str
    layers: tuple[str, ...]
    embeddings: tuple[str, ...]
    norms: tuple[str, ...]
    input_embedding: str
    head: str
    readout: Readout | None

    @property
    def base_model(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.get_submodule(self.base))

    @property
    def text(self) -> PreTrainedConfig:
        return self.model.config.get_text_config()

    @cached_property
    def decoder_layers(self) -> dict[str, nn.Module]:
        return {
            f"{self.base}.{name}.{index}.": layer
            for name in self.layers
            for index, layer in self.base_model.get_submodule(name).named_children()
        }

    @cached_property
    def attentions(self) -> list[nn.Module]:
        """The modules in layers that use the attention interface."""
        return [m for layer in self.decoder_layers.values() for m in layer.modules() if calls_attention(m)]

    @cached_property
    def both_ways(self) -> bool:
        return attends_both_ways(self.model)

    @property
    def layer_prefixes(self) -> tuple[str, ...]:
        return tuple(f"{self.base}.{name}." for name in self.layers)

    @property
    def embedding_prefixes(self) -> list[str]:
        return [f"{self.base}.{name}." for name in self.embeddings]

    def beside(self, name: str) -> tuple[str, str | None]:
        return (name, None) if self.added is None else self.added.beside(name)

    @cached_property
    def packed(self) -> dict[str, PackedLayer]:
        is_of_text = of_text(self.model)
        packed = {
            self.beside(f"{name}.{layer.leaf}")[0].removesuffix(f".{layer.leaf}"): layer
            for name, layer in packed_layers(self.model, self.compute_dtype).items()
            if is_of_text(name)
        }
        ends = (name for name in packed if name in (self.input_embedding, self.head) or self.is_behind(name))
        end = next(ends, None)
        if end is not None:
            raise UnsupportedError(
                f"the weight of {end!r} is in {packed[end].form}",
                why="embeddings and heads are cut along the vocabulary, and may be tied",
                fix=f"leave it as it is, as transformers does: {packed[end].skip.format(name=end)}",
            )
        return packed

    def is_behind(self, name: str) -> bool:
        """Whether a module or parameter is behind the base."""
        return not name.startswith(f"{self.base.partition('.')[0]}.")

    @cached_property
    def plan(self) -> TensorPlan:
        return TensorPlan(self.model, self.layer_prefixes, self.input_embedding, self.head, self.packed)

    @cached_property
    def counts_from(self) -> int | None:
        return counting_from(self.base_model, self.text.model_type)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        return layer_kinds(self.base_model, list(self.decoder_layers.values()), self.model.config)

    @cached_property
    def fused(self) -> dict[str, int]:
        return fused_experts(self.plan.modules, self.layer_prefixes)

    @cached_property
    def vector(self) -> ParameterVector:
        return _parameter_vector(self)


def _structure(
    model: PreTrainedModel, prefix: str, added: AddedModules | None, compute_dtype: torch.dtype | None
) -> _Structure:
    lists = _layer_lists(model)
    base = base_name(model)
    # a norm may have no parameters (OLMo) and still belongs to one stage; dropout belongs to the embeddings
    staged = stage_plan(model.config.get_text_config())
    children = [
        name
        for name, child in model.get_submodule(base).named_children()
        if not isinstance(child, nn.Dropout) and (name in staged or any(True for _ in child.parameters()))
    ]
    tops = [name.partition(".")[0] for name in lists]
    at, readout = children.index(tops[0]), readout_of(model)
    what = "output embedding (language-model head)"
    head = "" if readout is not None else _module_name(model, model.get_output_embeddings(), what)
    return _Structure(
        model, prefix, added, compute_dtype, base,
        layers=lists,
        embeddings=tuple(children[:at]),
        norms=tuple(name for name in children[at + 1 :] if name not in tops),
        input_embedding=_module_name(model, model.get_input_embeddings(), "input embedding"),
        head=head,
        readout=readout,
    )  # fmt: skip


def _module_name(model: PreTrainedModel, module: nn.Module | None, what: str) -> str:
    for name, candidate in model.named_modules():
        if candidate is module and module is not None:
            return name
    raise ModelError(f"{type(model).__name__} has no {what}", fix="pass an AutoModelForCausalLM model")


def describe_model(
    model: nn.Module,  # a causal language model, perhaps a `PeftModel` with a LoRA adapter around it; on any device
    compute_dtype: torch.dtype | None = None,  # of the strategies' weights and activations; the model's own when None
    # whether attention probabilities are dropped as its config says, or not at all
    attention_dropout: bool = True,
) -> ModelDescription:
    """Reads everything the engine needs from a model. Does not change the model or copy tensors. Raises `ModelError`:
    its structure cannot be laid out. Raises `UnsupportedError`: its config asks for something that cannot be exact."""
    bare, prefix, added = unwrap(model)
    refuse_other_models(model)
    refuse_inexact(bare.config)
    refuse_own_attention(bare)
    structure = _structure(bare, prefix, added, compute_dtype)
    refuse_hidden_rope(bare.config, structure.base_model, [f"{name}." for name in structure.layers])
    _refuse_unpacked_encoder(structure)
    packed, plan, counts_from, kinds = structure.packed, structure.plan, structure.counts_from, structure.kinds
    auxiliary = auxiliary_layers(bare, if_asked=False)
    refuse_dropout(bare, list(structure.decoder_layers.values()), kinds, attention_dropout)
    side = next(filter(None, (hook(model, compute_dtype).side_inputs() for hook in hooks("describe"))), None)
    shape = replace(_shape(structure), both_ways_in_blocks=side is not None and side.in_blocks)
    drops = attention_dropout and bool(attention_dropouts(bare.config))
    config = copy.deepcopy(bare.config) if attention_dropout else without_attention_dropout(bare.config)
    if auxiliary:  # replicas add the loss themselves
        config.get_text_config().output_router_logits = False
    return ModelDescription(
        model_class=type(bare),
        config=config,
        vector=structure.vector,
        shape=_with_unsupported_reasons(shape, structure, drops),
        base=structure.base,
        layers=structure.layers,
        embeddings=structure.embeddings,
        norms=structure.norms,
        head=structure.head,
        styles=plan.styles,
        attention_heads=plan.heads,
        layer_kinds=kinds,
        auxiliary_layers=auxiliary,
        whole=plan.whole,
        experts=structure.fused,
        paddings={name: m.padding_idx for name, m in bare.named_modules() if "padding_idx" in vars(m)},
        switched_off=frozenset(name for name, m in bare.named_modules() if isinstance(m, nn.Dropout) and m.p == 0),
        compute_dtype=compute_dtype or bare.dtype,
        counts_from=counts_from,
        prefix=prefix,
        added=added,
        packed=packed,
        readout=structure.readout,
        side_inputs=side,
    )


def _refuse_unpacked_encoder(structure: _Structure) -> None:
    if structure.both_ways and any(kind.alone for kind in structure.kinds):
        raise UnsupportedError(
            f"the layers of {structure.text.model_type} are given masks, and their tokens see later ones",
            why="they are given one sequence of a pack at a time, with a causal mask",
            fix="train an encoder whose attention gets its window as an argument (ModernBERT, EmbeddingGemma, BERT)",
        )


def auxiliary_layers(model: PreTrainedModel, if_asked: bool) -> int:
    """How many layers of a model add an auxiliary loss to its own; with `if_asked`, would if its config asked for it. Raises
    `UnsupportedError`: the loss cannot be exact."""
    return sum(hook(model, None).auxiliary_layers(if_asked) for hook in hooks("describe"))


def _shape(structure: _Structure) -> ModelShape:
    model, text, plan, vector = structure.model, structure.text, structure.plan, structure.vector
    num_layers = len(vector.layer_costs)
    most, counted = config_value(text, "max_position_embeddings"), structure.counts_from
    heads, kv_heads = head_counts(model.config)
    whole_attention, whole_mlp = _whole_shares(model, plan)
    return ModelShape(
        family=text.model_type,
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=text.hidden_size,
        attention_size=heads * (config_value(text, "head_dim") or text.hidden_size // heads),
        vocab_size=plan.modules[structure.input_embedding].weight.shape[0],
        layer_parameters=sum(vector.layer_costs) // num_layers,
        max_position_embeddings=most if most is None or counted is None else most - counted - 1,
        has_tp_plan=plan.has_plan,
        has_pp_plan=bool(stage_plan(text)),
        num_experts=max(structure.fused.values(), default=0),
        experts_per_token=experts_per_token(text) if structure.fused else 0,
        expert_parameters=sum(s.packed.weights if s.packed else s.numel for s in vector.specs if s.experts)
        // num_layers,
        whole_attention=whole_attention,
        whole_mlp=whole_mlp,
        gated=any({"gate_proj", "gate_up_proj"} & set(spec.name.split(".")) for spec in vector.specs),
        head_norms=any("q_norm" in spec.name.split(".") for spec in vector.specs),
        outputs=structure.readout.width if structure.readout is not None else 0,
        pair_layers=pair_layers(layer_types(model.config)),
        both_ways=structure.both_ways,
    )


def _with_unsupported_reasons(shape: ModelShape, structure: _Structure, drops: bool) -> ModelShape:
    """Adds why strategies are not exact; `drops`: attention probabilities are dropped."""
    model, base, layers, added = structure.model, structure.base_model, structure.layers, structure.added
    in_order = order_unsupported_reason(model, structure.base, layers, structure.vector, structure.prefix)
    can_recompute = model.supports_gradient_checkpointing
    return replace(
        shape,
        pp_unsupported_reason=stage_unsupported_reason(base, layers, structure.embeddings, structure.norms),
        sp_unsupported_reason=_no_sequence_parallelism(structure),
        ck_unsupported_reason=_no_cuts(structure, CHUNKS) or _no_chunks(structure),
        cp_unsupported_reason=_no_cuts(structure, RANKS),
        ring_unsupported_reason=_no_ring(structure, drops),
        rc_unsupported_reason=None
        if can_recompute
        else f"{type(model).__name__} cannot compute the activations of its layers again (+rc)",
        z_unsupported_reason=in_order,
        ep_unsupported_reason=_no_division_of_experts(structure)
        or (added.ep_unsupported_reason if added is not None else None),
    )


def _parameter_vector(structure: _Structure) -> ParameterVector:
    model, packed, fused = structure.model, structure.packed, structure.fused
    layer_units = {prefix: unit for unit, prefix in enumerate(structure.decoder_layers)}
    specs: list[ParameterSpec] = []
    costs = [0] * len(layer_units)
    all_names, is_of_text = dict[nn.Parameter, list[str]](), of_text(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_of_text(name):
            all_names.setdefault(parameter, []).append(name)
    for parameter, names in all_names.items():
        # of a bias, the head's own name is first: the bias follows the head's shards
        name, *tied = sorted(names, key=lambda name: name != f"{structure.head}.bias")
        _check_tied(name, tied, structure)
        unit = next((unit for prefix, unit in layer_units.items() if name.startswith(prefix)), None)
        if unit is None:
            unit = EMBEDDING if name.startswith(tuple(structure.embedding_prefixes)) else HEAD
        spec = _spec(name, tuple(tied), parameter, unit, structure)
        name_in_plan, shared = structure.beside(name)
        module, _, leaf = name_in_plan.rpartition(".")
        numel = parameter.numel()
        if shared is None and module in packed and leaf == packed[module].leaf:
            specs += (stored := packed[module].specs(spec))
            numel = sum(own.packed.weights for own in stored if own.packed is not None)
        else:
            specs.append(replace(spec, experts=fused.get(module, 0) if shared is None else 0))
        if unit >= 0 and shared is None:
            costs[unit] += numel  # the cost of added modules is negligible
    specs += _beside(structure)
    behind = (p.numel() for name, p in plain_parameters(model) if structure.is_behind(name))
    head_cost = structure.plan.modules[structure.head].weight.numel() if structure.head else sum(behind)
    return build_vector(specs, costs, head_cost)


def _beside(structure: _Structure) -> list[ParameterSpec]:
    """The trained parameters of the other half of a multimodal model. Raises `ModelError`: one is tied to the language half."""
    names, is_of_text = dict[nn.Parameter, list[str]](), of_text(structure.model)
    for name, parameter in structure.model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    specs = []
    for parameter, (name, *tied) in names.items():
        in_text = [is_of_text(each) for each in (name, *tied)]
        if not parameter.requires_grad or all(in_text):
            continue
        if any(in_text):
            raise ModelError(f"parameters {[name, *tied]} are tied, and not all of them are in the language model")
        other_names, dtype = tuple(outer_name(structure.prefix, other) for other in tied), dtype_name(parameter.dtype)
        specs.append(
            ParameterSpec(
                outer_name(structure.prefix, name), tuple(parameter.shape), dtype, BESIDE, tied_names=other_names
            )
        )
    return specs


def _check_tied(name: str, tied: Sequence[str], structure: _Structure) -> None:
    head = structure.head
    ends = {f"{structure.input_embedding}.weight", f"{head}.weight"}
    # the head's bias may have other names in modules around the head (BERT)
    is_head_bias = name == f"{head}.bias" and all(
        f"{head}.".startswith(f"{other.removesuffix('.bias')}.") for other in tied
    )
    if tied and {structure.beside(each)[0] for each in (name, *tied)} != ends and not is_head_bias:
        raise ModelError(
            f"parameters {[name, *tied]} are tied; only input and output embeddings may be, and a bias of the head"
        )


def _whole_shares(model: nn.Module, plan: TensorPlan) -> tuple[float, float]:
    """The shares of attention and MLP matrices, by elements, that tensor parallelism does not cut."""
    counted = [0, 0], [0, 0]
    for name, parameter in plain_parameters(model):
        prefix = next((prefix for prefix in plan.layer_prefixes if name.startswith(prefix)), None)
        if prefix is not None and parameter.dim() > 1:
            block = name.removeprefix(prefix).partition(".")[2]
            kind = counted[1 if _MLP.search(block) else 0]
            numel = prod(plan.shapes.get(name, parameter.shape))
            kind[0] += numel * (name not in plan.cuts)
            kind[1] += numel
    attention, mlp = (whole / total if total else 0.0 for whole, total in counted)
    return attention, mlp


def _spec(name: str, tied: tuple[str, ...], parameter: nn.Parameter, unit: int, structure: _Structure) -> ParameterSpec:
    prefix, plan = structure.prefix, structure.plan
    name_in_plan, shared = structure.beside(name)
    name_in_plan = plain_name(name_in_plan)
    cut, is_partial = plan.cuts.get(name_in_plan), name_in_plan in plan.partial
    if shared is not None and cut is not None:
        of_inputs = cut.dim == plan.input_dim(name_in_plan)
        is_partial = shared != (INPUTS if of_inputs else OUTPUTS)
        cut = None if is_partial else replace(cut, dim=int(of_inputs))
    return ParameterSpec(
        name=outer_name(prefix, name),
        shape=tuple(parameter.shape),
        dtype=dtype_name(structure.compute_dtype or parameter.dtype),
        unit=unit,
        shard_dim=cut.dim if cut is not None else None,
        parts=cut.parts if cut is not None else (),
        partial_gradient=is_partial,
        trainable=parameter.requires_grad,
        tied_names=tuple(outer_name(prefix, other) for other in tied),
        in_head=bool(structure.head) and any(other.startswith(f"{structure.head}.") for other in tied),
        frozen_dtype=None if parameter.requires_grad else dtype_name(parameter.dtype),
    )


# -- why the tokens of sequences cannot be divided: over ranks of tp (+sp), in chunks, over ranks of cp, on a ring ---------

# Each returns the reason, or None.

CHUNKS, RANKS = "computed in chunks (+ck)", "divided over ranks (cp)"


def _no_sequence_parallelism(structure: _Structure) -> str | None:
    plan, before = structure.plan, structure.embedding_prefixes
    if any(kind.alone for kind in structure.kinds):
        return "some of its layers look at whole sequences of a pack, so it cannot be sequence parallel"
    for name, module in plan.modules.items():
        early = name != structure.input_embedding and any(f"{name}.".startswith(prefix) for prefix in before)
        if early and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            return f"{name} adds to the embeddings of whole rows, so the model cannot be sequence parallel"
    own = {*plan.cuts, *plan.partial}
    return sequence_parallel_refusal(plan.modules, plan.styles, own, plan.layer_prefixes, set(structure.fused))


def _no_cuts(structure: _Structure, how: str) -> str | None:
    family = structure.text.model_type
    alone = next((index for index, kind in enumerate(structure.kinds) if kind.alone), None)
    if alone is not None:
        layer = list(structure.decoder_layers.values())[alone]
        return (
            f"{type(layer).__name__} {alone} of {family} is given whole sequences (for a convolution, a state, linear "
            f"attention or a custom mask), so they cannot be {how}"
        )
    return f"the layers of {family} run in cycles, so sequences cannot be {how}" if len(structure.layers) > 1 else None


def _no_chunks(structure: _Structure) -> str | None:
    family = structure.text.model_type
    if structure.counts_from is not None:
        return f"the embedding of {family} counts the tokens before a token, so sequences cannot be {CHUNKS}"
    twice = next((module for module in structure.attentions if num_attends(module) > 1), None)
    if twice is not None:
        return f"{type(twice).__name__} of {family} attends twice to the same tokens, so they cannot be {CHUNKS}"
    return None


def _no_division_of_experts(structure: _Structure) -> str | None:
    family, modules, layers = structure.text.model_type, structure.plan.modules, structure.plan.layer_prefixes
    fused = structure.fused
    loose = next((n for n in modules if n.startswith(layers) and n.endswith(".experts") and n not in fused), None)
    if loose is not None:
        return (
            f"{loose} of {family} ({type(modules[loose]).__name__}) is not one fused module of experts, so ep must be 1"
        )
    if not fused:
        return None  # a dense model
    if len(set(fused.values())) > 1:
        return f"the layers of {family} have {sorted(set(fused.values()))} experts, not all the same number, so ep must be 1"
    for name, count in fused.items():
        module = modules[name]
        arguments = list(inspect.signature(type(module).forward).parameters)[1:]
        if len(arguments) != 3:
            return f"{name} of {family} takes {arguments}, not tokens, experts and routing weights, so ep must be 1"
        for leaf, parameter in plain_parameters(module):
            shape = structure.plan.shapes.get(f"{name}.{leaf}", parameter.shape)
            if "." in leaf or not shape or shape[0] != count:
                return f"{leaf} of {name} is not of single experts, so ep must be 1"
        if any(isinstance(child, nn.ModuleList | nn.Identity) for child in module.children()):
            return f"{name} of {family} has experts without weights, so ep must be 1"
    if any(kind.alone for kind in structure.kinds):
        return (
            f"layers of {family} are given one sequence of a pack at a time (for a convolution, a state, linear attention"
            " or a custom mask), and ranks that exchange tokens of experts must run the same packs together, so ep must be 1"
        )
    return f"the layers of {family} run in cycles, so ep must be 1" if len(layers) > 1 else None


def _no_ring(structure: _Structure, drops: bool) -> str | None:
    for module in structure.attentions:
        names = names_in_forward(module)
        cap = getattr(module, "attn_logit_softcapping", None)
        window = window_of(module)
        widths = getattr(module, "qk_head_dim", None), getattr(module, "v_head_dim", None)
        for is_there, what in (
            (window is not None, f"a sliding window of {window} tokens"),
            (cap is not None and "softcap" in names, f"a cap of {cap} on its scores"),
            ("s_aux" in names, "sinks"),
            (drops, "dropout of its probabilities"),
            (structure.both_ways, "keys on both sides of a token"),
            (None not in widths and widths[0] != widths[1], "values of another width than its keys"),
        ):
            if is_there:
                return f"the attention of {structure.text.model_type} has {what}, and blocks on a ring are full attention with plain scores"
    return None
