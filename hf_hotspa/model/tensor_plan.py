"""The family's tensor-parallel plan, read block by block: which parameters are cut, and which every rank holds whole.

A *block* is a module that directly owns planned modules or parameters: an attention, an MLP, the experts of a mixture.
A block is cut only if the plan covers every parameter in it; each is then sharded, replicated with the same gradient
everywhere, or replicated with a partial gradient (norms of queries and keys see only their rank's heads). All
tensor-parallel ranks hold and compute any other block whole, which is exact but saves nothing; the reason is kept.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.layout.vector import Part
from hf_hotspa.model.model_kind import is_linear_attention, projections
from hf_hotspa.model.packed_layer import PackedLayer
from hf_hotspa.parallel.attention import calls_attention
from hf_hotspa.parallel.tensor_parallel import (
    COLWISE,
    COLWISE_GATHER,
    EXPERTS,
    IDENTITY_EXPERT,
    LATENT,
    ROWWISE,
    ROWWISE_SPLIT,
    VOCABULARY_EMBEDDING,
    VOCABULARY_HEAD,
)
from hf_hotspa.parallel.wrapped_model import base_layer, plain_name, plain_parameters, unwrapped_modules

_OLDER_NAMES = {"colwise_rep": COLWISE_GATHER, "rowwise_rep": ROWWISE_SPLIT}
"""Older names of styles in `parallel.tensor_parallel`."""
PARTIAL_GRADIENT, LATENT_STYLE = "replicated_with_grad_allreduce", "mla_kv_a_proj"
EXPERTS_STYLE, IDENTITY_STYLE, LOCAL_STYLE = "moe_tp_experts", "moe_identity_expert", "local_params"
PACKED_COLWISE, PACKED_ROWWISE = "packed_colwise", "packed_rowwise"

_OF_LAYERS = {
    "qwen3_vl_text": {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise"),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise"),
    },
    "modernbert": {
        **dict.fromkeys(("attn.Wqkv", "mlp.Wi"), "colwise"),
        **dict.fromkeys(("attn.Wo", "mlp.Wo"), "rowwise"),
    },
    "gpt_oss": {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.sinks"), "colwise"),
        "self_attn.o_proj": "rowwise",
        "mlp.experts": "moe_tp_experts",
        # experts are transposed, each gate beside its up
        **dict.fromkeys(("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"), "rowwise"),
        "mlp.experts.down_proj": "colwise",
        "mlp.experts.down_proj_bias": "replicated_with_grad_allreduce",
    },
}
"""Layer plans of families without one in transformers."""
_OF_STAGES = {
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), ("embed_tokens", "layers", "norm")),
    "modernbert": ("embeddings", "layers", "final_norm"),
}
"""Pipeline plans of families without one in transformers: the names of a base model's modules, in order."""

_GATHERED = (COLWISE_GATHER, ROWWISE_SPLIT)
_KEY_VALUE = ("k_proj", "v_proj")
_BEFORE_LATENT = (
    "q_a_proj",
    "q_a_layernorm",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "q_a_norm",
    "kv_a_norm",
    "indexer",
)
_HEAD_NORM = re.compile(r"(q|k|v|query|key|value)_?(layer)?_?norm")


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism cuts a parameter: the tensor dim, and its parts."""

    dim: int
    parts: tuple[Part, ...]


class _WholeError(Exception):
    """This block cannot be cut; the message says why."""


@dataclass
class _Block:
    """A module's planned members, by leaf name, and its own style."""

    modules: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    own: str | None = None


@dataclass
class _BlockCut:
    styles: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)


def head_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """Query heads and key/value heads; 1 for a family without attention. Latent attention expands keys and values to as many heads
    as queries."""
    text = config.get_text_config()
    heads: int = config_value(text, "num_attention_heads") or 1
    if config_value(text, "kv_lora_rank"):
        return heads, heads
    return heads, config_value(text, "num_key_value_heads") or heads


def config_value(config: PreTrainedConfig, name: str) -> Any:
    """A setting of a config; the smallest if its layers differ (Gemma 4), None if missing."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # of transformers: there is no single value
        return min(getattr(layer, name) for layer in config.per_layer_config)


def has_tensor_plan(config: PreTrainedConfig) -> bool:
    """Whether a family has a plan, by its text config or the config's class."""
    return _plans_layers(config) or config.model_type in _OF_LAYERS


def stage_plan(config: PreTrainedConfig) -> tuple[str, ...]:
    """The modules that pipeline stages divide, in order, by a text config; empty without a plan."""
    return tuple(config.base_model_pp_plan or _OF_STAGES.get(config.model_type, ()))


def _plans_layers(config: PreTrainedConfig) -> bool:
    """Whether transformers' plan names modules of layers; since 5.24 some plans divide only the embedding."""
    return any(name != "embed_tokens" for name in config.base_model_tp_plan or {})


class TensorPlan:
    """A model's plan."""

    def __init__(
        self,
        model: PreTrainedModel,
        layer_prefixes: tuple[str, ...],
        embedding: str,
        head: str,  # empty for none
        packed: Mapping[str, PackedLayer],  # packed layers by name
    ) -> None:
        # a wrapped layer is treated like its base; what is added to it follows (`model.specs`)
        self.modules = unwrapped_modules(model)
        self.layer_prefixes, self._packed = layer_prefixes, packed
        # of the plain weights of packed layers, by name
        self.shapes = {plain_name(f"{name}.{layer.leaf}"): layer.shape for name, layer in packed.items()}
        text = model.config.get_text_config()
        self.has_plan = has_tensor_plan(text)
        own = _OF_LAYERS.get(text.model_type, {}) if not _plans_layers(text) else {}
        of_layers = {f"{_pattern(prefix)}*.{name}": style for prefix in layer_prefixes for name, style in own.items()}
        plan = (model.tp_plan or {}) | of_layers
        self._plan = {name: _OLDER_NAMES.get(style, style) for name, style in plan.items()}
        self._num_heads, self._num_kv_heads = head_counts(model.config)
        # the style (of `parallel.tensor_parallel`) of every module with a wrapped forward
        self.styles = {embedding: VOCABULARY_EMBEDDING} | ({head: VOCABULARY_HEAD} if head else {})
        self.cuts: dict[str, Cut] = {}  # how each parameter is cut, by name; others are held whole
        self.partial: set[str] = set()  # names of replicated parameters whose gradient on a rank is a part of the sum
        # query heads and key/value heads of every cut attention module; for linear attention, key heads twice
        self.heads: dict[str, tuple[int, int]] = {}
        self.whole: dict[str, str] = {}  # why a planned block is held whole, by name with `*` for layer numbers
        for name in self.styles:
            rows = self.modules[name].weight.shape[0]
            for leaf, parameter in self.modules[name].named_parameters():
                # a scale of each token's logit goes with its row
                if leaf in ("weight", "bias") or (name == head and parameter.shape[:1] == (rows,)):
                    self.cuts[f"{name}.{leaf}"] = Cut(0, (Part(rows, rows, rows),))
                else:
                    self.partial.add(f"{name}.{leaf}")  # a norm in the embedding sees the tokens of this rank's rows
        self._blocks = self._find_blocks()
        for name, block in self._blocks.items():
            try:
                cut = self._cut(name, block)
            except _WholeError as reason:
                self.whole[_pattern(name)] = str(reason)
                continue
            self.styles |= cut.styles
            self.cuts |= cut.cuts
            self.partial |= cut.partial
            self.heads |= cut.heads

    # -- blocks -------------------------------------------------------------------------------------------------------

    def input_dim(self, name: str) -> int:
        """The input dim of a matrix, or of the matrices of fused experts."""
        module, _, leaf = name.rpartition(".")
        experts = self.modules[module]
        if isinstance(experts, nn.Embedding):
            return 0
        return 1 if len(self._shape(module, leaf)) == 2 or experts.is_transposed else 2

    def _shape(self, module: str, leaf: str) -> tuple[int, ...]:
        """The shape of a parameter of a module, also of one that is packed."""
        known = self.shapes.get(f"{module}.{leaf}")
        return known or tuple(self.modules[module].get_parameter(leaf).shape)

    def _planned(self, name: str) -> str | None:
        return self._plan.get(_pattern(name))

    def _find_blocks(self) -> dict[str, _Block]:
        blocks: dict[str, _Block] = {}
        for name, module in self.modules.items():
            if not name.startswith(self.layer_prefixes):
                continue
            planned = self._planned(name)
            if planned in (EXPERTS_STYLE, LOCAL_STYLE):
                blocks.setdefault(name, _Block()).own = planned
            elif planned is not None:
                parent, _, leaf = name.rpartition(".")
                blocks.setdefault(parent, _Block()).modules[leaf] = planned
            if self.has_plan and is_linear_attention(module):
                blocks.setdefault(name, _Block())
            for leaf in chain(dict(module.named_parameters(recurse=False)), getattr(module, "parametrizations", ())):
                if style := self._planned(f"{name}.{leaf}"):
                    blocks.setdefault(name, _Block()).parameters[leaf] = style
        return blocks

    def _cut(self, name: str, block: _Block) -> _BlockCut:
        if block.own == EXPERTS_STYLE or set(block.parameters.values()) & {PACKED_COLWISE, PACKED_ROWWISE}:
            return self._cut_experts(name, block)
        cut = _BlockCut()
        if is_linear_attention(self.modules[name]):
            self._cut_linear_attention(cut, name)
            return cut
        local: dict[str, str] = {}
        for leaf, style in block.modules.items():
            if style in _GATHERED and self._stays_local(name, leaf):
                style = COLWISE if style == COLWISE_GATHER else ROWWISE
            if style in _GATHERED:
                # inputs and outputs are whole on every rank: any cut is valid
                self._cut_linear(cut, f"{name}.{leaf}", style, None)
            else:
                local[leaf] = style
        if local or block.parameters:
            attends = calls_attention(self.modules[name]) or "o_proj" in local
            (self._cut_attention if attends else self._cut_mlp)(cut, name, local, block)
        return cut

    def _linear(self, name: str) -> nn.Linear:
        module: Any = self.modules[name]
        plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if not plain and name not in self._packed:
            raise _WholeError(f"{name.rpartition('.')[2]} is a {type(module).__name__}, not a linear layer")
        linear: nn.Linear = module
        return linear

    def _cut_linear(self, cut: _BlockCut, name: str, style: str, parts: tuple[Part, ...] | None) -> None:
        module = self._linear(name)
        is_rowwise = style in (ROWWISE, ROWWISE_SPLIT)
        rows = module.in_features if is_rowwise else module.out_features
        parts = parts or (Part(rows, rows, rows),)
        cut.styles[name] = style
        cut.cuts[f"{name}.weight"] = Cut(int(is_rowwise), parts)
        if module.bias is not None and not is_rowwise:  # which is added once, after the sum
            cut.cuts[f"{name}.bias"] = Cut(0, parts)

    def _unplanned(self, name: str, block: _Block) -> list[tuple[str, nn.Parameter]]:
        inner = [f"{other}." for other in self._blocks if other.startswith(f"{name}.")]
        unplanned = []
        for leaf, parameter in plain_parameters(self.modules[name]):
            planned = leaf in block.parameters or leaf.rpartition(".")[0] in block.modules
            if not planned and not f"{name}.{leaf}".startswith(tuple(inner)):
                unplanned.append((leaf, parameter))
        return unplanned

    # -- fused projections that the plan gathers ----------------------------------------------------------------------

    def _stays_local(self, name: str, leaf: str) -> bool:
        """Whether a projection that the plan gathers (or splits) can work on its shard alone.

        transformers gathers fused projections (phi3, glm), which the family slices or halves. Cutting each part of the
        weight keeps activations of attention and MLP sharded, and the slices still fit.
        """
        pair = next((pair for pair in (("qkv_proj", "o_proj"), ("gate_up_proj", "down_proj")) if leaf in pair), None)
        if pair is None:
            return False
        first, second = (f"{name}.{one}" for one in pair)
        fused, owner = self.modules.get(first), self.modules[name]
        if (self._planned(first), self._planned(second)) != (COLWISE_GATHER, ROWWISE_SPLIT):
            return False
        if not isinstance(fused, nn.Linear):
            return False
        if pair[0] == "qkv_proj":
            heads = (self._num_heads + 2 * self._num_kv_heads) * getattr(owner, "head_dim", 0)
            return hasattr(owner, "config") and hasattr(owner, "num_key_value_heads") and fused.out_features == heads
        down = self.modules.get(second)
        return isinstance(down, nn.Linear) and fused.out_features == 2 * down.in_features

    # -- attention ----------------------------------------------------------------------------------------------------

    def _cut_attention(self, cut: _BlockCut, name: str, local: dict[str, str], block: _Block) -> None:
        attention = self.modules[name]
        latent = "kv_b_proj" in local
        heads, kv_heads = self._num_heads, self._num_kv_heads
        if latent:
            heads = kv_heads = getattr(attention, "num_heads", heads)
        else:
            self._check_heads(name, attention)
        cut.heads[name] = (heads, kv_heads)
        for leaf, style in local.items():
            self._cut_projection(cut, name, leaf, style)
        for leaf, style in block.parameters.items():
            parameter = attention.get_parameter(leaf)
            if style != "colwise" or parameter.shape[0] % heads:
                raise _WholeError(f"the plan's style {style!r} of the parameter {leaf} is not known")
            cut.cuts[f"{name}.{leaf}"] = Cut(0, (Part(parameter.shape[0], kv_heads, heads),))
        for leaf, parameter in self._unplanned(name, block):
            first = leaf.partition(".")[0]
            if latent and first in _BEFORE_LATENT:
                continue
            if not _HEAD_NORM.fullmatch(first):
                raise _WholeError(f"the plan says nothing of {leaf}")
            self._cut_norm(cut, name, leaf, parameter)
        if not {COLWISE, ROWWISE} <= set(cut.styles.values()):
            raise _WholeError("the plan names no projections on both sides of it")
        loose = [leaf for leaf, buffer in attention.named_buffers() if buffer.numel() > 1 and "rotary" not in leaf]
        if loose:
            raise _WholeError(f"its buffer {loose[0]} may belong to heads")

    def _cut_projection(self, cut: _BlockCut, attention: str, leaf: str, style: str) -> None:
        """Cuts a planned module of an attention by heads."""
        name = f"{attention}.{leaf}"
        if style == LATENT_STYLE:
            if not isinstance(getattr(self.modules[attention], "qk_rope_head_dim", None), int):
                raise _WholeError("it does not say how wide its rotary keys are")
            cut.styles[name] = LATENT
        elif style == PARTIAL_GRADIENT:
            for inner, parameter in self.modules[name].named_parameters():
                self._cut_norm(cut, attention, f"{leaf}.{inner}", parameter)
        elif style in (COLWISE, ROWWISE):
            module = self._linear(name)
            rows = module.in_features if style == ROWWISE else module.out_features
            self._cut_linear(cut, name, style, _head_parts(leaf, rows, *cut.heads[attention]))
        else:
            raise _WholeError(f"the plan's style {style!r} of {leaf} is not known")

    def _check_heads(self, name: str, attention: nn.Module) -> None:
        key = self.modules.get(f"{name}.k_proj")
        head_dim, kv_heads = getattr(attention, "head_dim", None), self._num_kv_heads
        if not isinstance(key, nn.Linear) or not isinstance(head_dim, int):
            return
        if key.out_features != kv_heads * head_dim:
            raise _WholeError(f"it has {key.out_features / head_dim:g} key/value heads where the config has {kv_heads}")

    def _cut_norm(self, cut: _BlockCut, name: str, path: str, parameter: nn.Parameter) -> None:
        """Cuts a norm of queries, keys or values between the cut projections: per head, or with weights for each."""
        attention, leaf = self.modules[name], path.partition(".")[0]
        heads, kv_heads = cut.heads[name]
        count = heads if leaf.startswith("q") else kv_heads
        if parameter.ndim == 2 and parameter.shape[0] == count:
            cut.cuts[f"{name}.{path}"] = Cut(
                0, (_kv_part(count, kv_heads) if count != heads else Part(count, kv_heads, heads),)
            )
            return
        linear = base_layer(getattr(attention, f"{leaf[0]}_proj", attention))  # may be missing
        width = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
        if isinstance(linear, nn.Linear) and width is None:
            width = linear.out_features // count
        if parameter.ndim != 1 or (count > 1 and width is not None and parameter.numel() > width):
            raise _WholeError(f"{leaf} is over all heads")
        cut.partial.add(f"{name}.{path}")

    def _cut_linear_attention(self, cut: _BlockCut, name: str) -> None:
        """Cuts a gated delta net by key heads: each has its values, convolution channels, gates and decays."""
        net: Any = self.modules[name]
        heads = net.num_k_heads
        cut.heads[name] = heads, heads
        into, out, norm = projections(net)
        qkv = tuple(Part(rows, heads, heads) for rows in (net.key_dim, net.key_dim, net.value_dim))
        for leaf in into:
            rows = self._linear(f"{name}.{leaf}").out_features
            self._cut_linear(
                cut, f"{name}.{leaf}", COLWISE, qkv if leaf == "in_proj_qkv" else (Part(rows, heads, heads),)
            )
        self._cut_linear(cut, f"{name}.{out}", ROWWISE, (Part(net.value_dim, heads, heads),))
        cut.cuts |= {f"{name}.conv1d.{leaf}": Cut(0, qkv) for leaf, _ in net.conv1d.named_parameters()}
        of_values = (Part(net.num_v_heads, heads, heads),)
        cut.cuts |= {f"{name}.{leaf}": Cut(0, of_values) for leaf, _ in net.named_parameters(recurse=False)}
        cut.partial |= {f"{name}.{norm}.{leaf}" for leaf, _ in net.get_submodule(norm).named_parameters()}

    # -- MLP and experts ----------------------------------------------------------------------------------------------

    def _cut_mlp(self, cut: _BlockCut, name: str, local: dict[str, str], block: _Block) -> None:
        if block.parameters:
            raise _WholeError(f"the plan's styles of the parameters {sorted(block.parameters)} are not known")
        if unknown := sorted(leaf for leaf, style in local.items() if style not in (COLWISE, ROWWISE)):
            raise _WholeError(f"the plan's style {local[unknown[0]]!r} of {unknown[0]} is not known")
        if getattr(self.modules[name], "activation_sparsity", 0):
            raise _WholeError("its activation looks at the whole width")
        widths = {self._linear(f"{name}.{leaf}").in_features for leaf, style in local.items() if style == ROWWISE}
        if len(widths) != 1 or COLWISE not in local.values():
            raise _WholeError("the plan names no pair of projections into and out of it")
        (width,) = widths
        for leaf, style in local.items():
            rows = self._linear(f"{name}.{leaf}").out_features
            fused = style == COLWISE and leaf in ("gate_up_proj", "Wi") and rows == 2 * width
            if style == COLWISE and rows != width and not fused:
                raise _WholeError(f"{leaf} is {rows} wide where {width} are expected")
            parts = (Part(width, width, width, by_step_time=True),) * (2 if fused else 1)
            self._cut_linear(cut, f"{name}.{leaf}", style, parts)
        for leaf, parameter in self._unplanned(name, block):
            if parameter.numel() != 1:
                raise _WholeError(f"the plan says nothing of {leaf}")
            cut.partial.add(f"{name}.{leaf}")  # of an activation function, which sees this rank's columns

    def _cut_experts(self, name: str, block: _Block) -> _BlockCut:
        experts: Any = self.modules[name]
        cut = _BlockCut()
        down = block.parameters.get("down_proj")
        if down not in ("rowwise", "colwise"):
            raise _WholeError("its weights are not fused over the experts")
        if unplanned := self._unplanned(name, block):
            raise _WholeError(f"the plan says nothing of {unplanned[0][0]}")
        if unknown := {leaf: s for leaf, s in block.modules.items() if s != IDENTITY_STYLE}:
            raise _WholeError(f"the plan's styles {unknown} are not known")
        width = self._shape(name, "down_proj")[-1 if down == "rowwise" else -2]
        for leaf, style in block.parameters.items():
            shape = self._shape(name, leaf)
            if style == PARTIAL_GRADIENT:  # a sum's bias: each rank adds its share
                cut.partial.add(f"{name}.{leaf}")
                continue
            dim = len(shape) - (1 if style in ("rowwise", PACKED_ROWWISE) else 2)
            rows, is_bias = shape[dim], leaf.endswith("_bias")
            # some plans call it column-wise; transformers stores all gates before all ups by default
            packed = style in (PACKED_COLWISE, PACKED_ROWWISE) or (leaf == "gate_up_proj" and rows == 2 * width)
            packed = packed and getattr(experts, "is_concatenated", True)
            if len(shape) != 3 - is_bias or rows % width or (packed and rows != 2 * width):
                raise _WholeError(f"{leaf} has the shape {shape}")
            part = Part(width, width, width) if packed else Part(rows, width, width)
            cut.cuts[f"{name}.{leaf}"] = Cut(dim, (part, part) if packed else (part,))
        cut.styles[name] = EXPERTS
        cut.styles |= {f"{name}.{leaf}": IDENTITY_EXPERT for leaf in block.modules}
        return cut


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _kv_part(rows: int, kv_heads: int) -> Part:
    return Part(rows, kv_heads, kv_heads, replicate=True)


def _head_parts(leaf: str, rows: int, heads: int, kv_heads: int) -> tuple[Part, ...]:
    if leaf == "qkv_proj":
        size = rows // (heads + 2 * kv_heads)
        key_value = _kv_part(kv_heads * size, kv_heads)
        return (Part(heads * size, kv_heads, heads), key_value, key_value)
    if leaf == "Wqkv":
        return (Part(rows // 3, kv_heads, heads),) * 3
    count = kv_heads if leaf in _KEY_VALUE else heads
    if rows % count:
        raise _WholeError(f"{leaf} has {rows} rows for {count} heads")
    return (_kv_part(rows, kv_heads) if leaf in _KEY_VALUE else Part(rows, kv_heads, heads),)


# -- facts of experts ------------------------------------------------------------------------------------------------


def is_fused(module: nn.Module) -> bool:
    """Whether a module is one of transformers' fused experts (`use_experts_implementation`)."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate", "num_experts"))


_signature = cache(inspect.signature)


def arguments_of(experts: nn.Module, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and routing weights, from a call of fused experts."""
    _, hidden, index, weights = _signature(type(experts).forward).bind(experts, *args, **kwargs).args
    return hidden, index, weights


def fused_experts(modules: Mapping[str, nn.Module], layers: tuple[str, ...]) -> dict[str, int]:
    """The modules of fused experts in the layers, by name, with their numbers of experts."""
    return {
        name: int(module.num_experts)  # type: ignore[arg-type]
        for name, module in modules.items()
        if name.startswith(layers) and is_fused(module)
    }


def experts_per_token(config: PreTrainedConfig) -> int:
    """Experts that compute a token; 1 if the config has none of the usual names for it."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    return next((n for name in names if isinstance(n := getattr(config, name, None), int)), 1)
