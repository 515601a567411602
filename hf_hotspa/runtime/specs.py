"""From a Hugging Face model to plain data: the one place that reads plans, configs and module names.

`describe_model` turns a causal language model into a `ModelDescription`: the parameter vector, the model's shape,
and which style each module has under tensor parallelism. Nothing else in the package looks at a family.
What cannot be exact is refused here, by name, before anything is built.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.layout.vector import EMBEDDING, HEAD, ParameterSpec, ParameterVector, Part, build_vector
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.runtime import sequence_parallel
from hf_hotspa.runtime.adapters import LORA_A, LORA_B, Adapters, base_layer, unwrap
from hf_hotspa.runtime.tensor_parallel import (
    COLWISE,
    COLWISE_GATHER,
    ROWWISE,
    ROWWISE_SPLIT,
    VOCABULARY_EMBEDDING,
    VOCABULARY_HEAD,
)

_PLAN_STYLES = {
    "colwise": COLWISE,
    "colwise_rep": COLWISE_GATHER,
    "colwise_gather_output": COLWISE_GATHER,
    "rowwise": ROWWISE,
    "rowwise_rep": ROWWISE_SPLIT,
    "rowwise_split_input": ROWWISE_SPLIT,
}
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_PACKABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
_POSITION_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class ModelDescription:
    """A model as the engine sees it.

    Args:
        model_class: Its own class; replicas are instances of it.
        config: Its config, with the packed attention set.
        vector: Its parameter vector.
        shape: Counts and sizes.
        base: Name of the base model inside it (``model``).
        layers: Name of the layer list inside the base model.
        embeddings: Names, inside the base model, of the modules before the layers.
        norms: Names, inside the base model, of the modules after them.
        head: Name of the output embedding.
        styles: Tensor-parallel style by module name.
        attention_layers: Names of the attention modules whose heads are cut.
        compute_dtype: The dtype of activations.
        prefix: What the names of parameters begin with in the model that was given, before those in `model_class`.
        adapters: Its LoRA adapter; None without one.
    """

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    vector: ParameterVector
    shape: ModelShape
    base: str
    layers: str
    embeddings: tuple[str, ...]
    norms: tuple[str, ...]
    head: str
    styles: Mapping[str, str]
    attention_layers: tuple[str, ...]
    compute_dtype: torch.dtype
    prefix: str = ""
    adapters: Adapters | None = None

    def digest(self) -> str:
        """Equal on ranks whose models and layouts agree."""
        adapters = self.adapters.digest() if self.adapters is not None else ""
        return f"{self.model_class.__name__} {self.vector.digest()} {sorted(self.styles.items())} {adapters}"

    def local_name(self, name: str) -> str:
        """A parameter's name in `model_class`."""
        return name.removeprefix(self.prefix)

    def weight_of(self, module: str) -> str:
        """The name in the parameter vector of the weight of a module of `styles`; of a LoRA layer, that of its base."""
        inside = ".base_layer" if self.adapters is not None and module in self.adapters.scalings else ""
        return f"{self.prefix}{module}{inside}.weight"


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def refuse_inexact(config: PreTrainedConfig) -> None:
    """Refuses what cannot train exactly in packs or across layouts.

    Raises:
        UnsupportedError: naming the setting of the config.
    """
    text = config.get_text_config()
    name = text.model_type
    for key, value in text.to_dict().items():
        of_another_head = key.startswith(("classifier", "summary"))
        if (
            ("dropout" in key or key.endswith("pdrop"))
            and not of_another_head
            and isinstance(value, int | float)
            and value > 0
        ):
            raise UnsupportedError(
                f"{name} config has {key}={value}",
                why="dropout draws other random numbers under every layout, so hot-switched training would not be exact",
                fix=f"set config.{key} = 0.0",
            )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {str(r.get("rope_type")) for r in (rope, *(v for v in rope.values() if isinstance(v, dict)))}
    if bad := kinds & _POSITION_DEPENDENT_ROPE:
        raise UnsupportedError(
            f"{name} config has rope_type={sorted(bad)}",
            why="it is computed from the longest position of the whole row, so sequences of a pack would change each other",
            fix="use a rope type that does not depend on the length (default, linear, yarn, llama3)",
        )
    if other := set(getattr(text, "layer_types", None) or ()) - _PACKABLE_LAYERS:
        raise UnsupportedError(
            f"{name} has layers of the types {sorted(other)}",
            why="their state is not known to be isolated between the sequences of a pack",
        )
    if getattr(text, "output_router_logits", False):
        raise UnsupportedError(
            f"{name} config has output_router_logits=True",
            why="the router loss is added per micro-batch, so it would depend on how the mini-batch is packed",
            fix="set config.output_router_logits = False",
        )


def _base_parts(model: PreTrainedModel) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The layer list of the base model, what comes before it and what comes after it."""
    base = model.base_model
    lists = [
        name
        for name, child in base.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == model.config.get_text_config().num_hidden_layers
    ]
    if base is model or len(lists) != 1:
        raise ModelError(
            f"{type(model).__name__} is not a causal language model with one list of decoder layers",
            fix="pass an AutoModelForCausalLM model",
        )
    # a norm may have no parameters (OLMo) and is part of one stage all the same
    staged = model.config.get_text_config().base_model_pp_plan or {}
    children = [
        name for name, child in base.named_children() if name in staged or any(True for _ in child.parameters())
    ]
    at = children.index(lists[0])
    return lists[0], tuple(children[:at]), tuple(children[at + 1 :])


def _heads(config: PreTrainedConfig) -> tuple[int, int]:
    text = config.get_text_config()
    heads = text.num_attention_heads
    return heads, getattr(text, "num_key_value_heads", None) or heads


class _Styles:
    """Reads the tensor-parallel plan: a style for every module, the parts of every weight that is cut."""

    def __init__(self, model: PreTrainedModel, layer_prefix: str, embedding: str, head: str) -> None:
        # a LoRA layer is what its base is
        self.modules = {name: base_layer(module) for name, module in model.named_modules()}
        self.plan = dict(model.tp_plan or {})
        self.has_plan = bool(model.config.get_text_config().base_model_tp_plan)
        self.heads, self.kv_heads = _heads(model.config)
        self.layer_prefix, self.embedding, self.head = layer_prefix, embedding, head
        self.styles: dict[str, str] = {}
        self.parts: dict[str, tuple[Part, ...]] = {}
        self.partial: set[str] = set()
        self.attention_layers: list[str] = []
        self.obstacle: str | None = None
        for name in (embedding, head):
            rows = self.modules[name].weight.shape[0]
            self.parts[name] = (Part(rows, rows, rows),)
        self.styles = {embedding: VOCABULARY_EMBEDDING, head: VOCABULARY_HEAD}
        for name, module in self.modules.items():
            if name not in self.styles and name.startswith(layer_prefix):
                self._read(name, module)

    def _planned(self, name: str) -> str | None:
        return self.plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))

    def _read(self, name: str, module: nn.Module) -> None:
        for leaf, _ in module.named_parameters(recurse=False):
            if self._planned(f"{name}.{leaf}"):
                self.obstacle = f"the plan cuts the parameter {name}.{leaf} in a way that is not supported under tp > 1"
        planned = self._planned(name)
        if planned is None:
            return
        if planned == _PARTIAL_GRADIENT:
            self.partial.add(name)
        elif planned in _PLAN_STYLES and isinstance(module, nn.Linear):
            style = self._local_style(name, _PLAN_STYLES[planned])
            rows = module.in_features if style in (ROWWISE, ROWWISE_SPLIT) else module.out_features
            self.styles[name] = style
            self.parts[name] = self._cut(name, style, rows)
        else:
            self.obstacle = f"the plan's style {planned!r} of {name} is not supported under tp > 1"

    def _stays_local(self, name: str) -> bool:
        """Whether a projection that the plan gathers (or splits) can work on its shard alone.

        transformers gathers fused projections (phi3, glm), because the family slices or halves their output; cutting
        each part of the weight keeps attention and MLP activations sharded, and the slices still fit.
        """
        parent, _, leaf = name.rpartition(".")
        if leaf in ("qkv_proj", "o_proj"):
            return self._fused_attention(parent)
        return leaf in ("gate_up_proj", "down_proj") and self._fused_mlp(parent)

    def _gathered_pair(self, first: str, second: str) -> bool:
        styles = [_PLAN_STYLES.get(self._planned(name) or "") for name in (first, second)]
        return styles == [COLWISE_GATHER, ROWWISE_SPLIT]

    def _fused_attention(self, parent: str) -> bool:
        attention, qkv = self.modules[parent], self.modules.get(f"{parent}.qkv_proj")
        head_dim = getattr(attention, "head_dim", 0)
        return (
            isinstance(qkv, nn.Linear)
            and hasattr(attention, "config")
            and hasattr(attention, "num_key_value_heads")
            and qkv.out_features == (self.heads + 2 * self.kv_heads) * head_dim
            and self._gathered_pair(f"{parent}.qkv_proj", f"{parent}.o_proj")
        )

    def _fused_mlp(self, parent: str) -> bool:
        gate_up, down = self.modules.get(f"{parent}.gate_up_proj"), self.modules.get(f"{parent}.down_proj")
        return (
            isinstance(gate_up, nn.Linear)
            and isinstance(down, nn.Linear)
            and gate_up.out_features == 2 * down.in_features
            and self._gathered_pair(f"{parent}.gate_up_proj", f"{parent}.down_proj")
        )

    def _local_style(self, name: str, style: str) -> str:
        if style in (COLWISE_GATHER, ROWWISE_SPLIT) and self._stays_local(name):
            return COLWISE if style == COLWISE_GATHER else ROWWISE
        return style

    def _cut(self, name: str, style: str, rows: int) -> tuple[Part, ...]:
        parent, _, leaf = name.rpartition(".")
        plain = (Part(rows, rows, rows),)
        if style in (COLWISE_GATHER, ROWWISE_SPLIT):
            return plain  # every shard's consumer sees the whole width, so any cut will do
        queries = {"heads": self.heads, "kv_heads": self.kv_heads}
        if leaf in ("q_proj", "o_proj") or (leaf == "dense" and f"{parent}.q_proj" in self.modules):
            if leaf == "q_proj":
                self.attention_layers.append(parent)
            return self._head_parts(name, rows, **queries)
        if leaf in ("k_proj", "v_proj"):
            if rows % self.kv_heads:
                self.obstacle = f"{name} has {rows} rows for {self.kv_heads} key/value heads"
                return plain
            return (Part(rows, self.kv_heads, self.kv_heads, replicate=True),)
        if leaf == "qkv_proj":
            self.attention_layers.append(parent)
            size = rows // (self.heads + 2 * self.kv_heads)
            key_value = Part(self.kv_heads * size, self.kv_heads, self.kv_heads, replicate=True)
            return (Part(self.heads * size, self.kv_heads, self.heads), key_value, key_value)
        if leaf == "gate_up_proj":
            return (Part(rows // 2, rows // 2, rows // 2),) * 2
        if "attn" in parent or "attention" in parent:
            # an attention projection whose heads we do not know how to count
            self.obstacle = f"the attention projection {name} is not supported under tp > 1"
        return plain

    def _head_parts(self, name: str, rows: int, heads: int, kv_heads: int) -> tuple[Part, ...]:
        if rows % heads:
            self.obstacle = f"{name} has {rows} rows for {heads} heads"
            return (Part(rows, rows, rows),)
        return (Part(rows, kv_heads, heads),)


def _module_name(model: PreTrainedModel, module: nn.Module | None, what: str) -> str:
    for name, candidate in model.named_modules():
        if candidate is module and module is not None:
            return name
    raise ModelError(f"{type(model).__name__} has no {what}", fix="pass an AutoModelForCausalLM model")


def describe_model(model: nn.Module, compute_dtype: torch.dtype | None = None) -> ModelDescription:
    """Reads everything the engine needs from a model. The model is not changed and no tensor is copied.

    Args:
        model: A causal language model, on any device; or a `PeftModel` with a LoRA adapter around one.
        compute_dtype: The dtype of the strategies' weights and activations; the model's own when None.

    Raises:
        ModelError: its structure cannot be laid out.
        UnsupportedError: its config asks for something that cannot be exact.
    """
    bare, prefix, adapters = unwrap(model)
    if not isinstance(bare, PreTrainedModel):
        raise ModelError(
            f"the model is a {type(bare).__name__}, not a transformers PreTrainedModel",
            fix="pass what AutoModelForCausalLM.from_config or from_pretrained returns",
        )
    refuse_inexact(bare.config)
    layers, before, after = _base_parts(bare)
    base, text = bare.base_model_prefix, bare.config.get_text_config()
    embedding = _module_name(bare, bare.get_input_embeddings(), "input embedding")
    head = _module_name(bare, bare.get_output_embeddings(), "output embedding (language-model head)")
    layer_prefix = f"{base}.{layers}."
    styles = _Styles(bare, layer_prefix, embedding, head)

    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in bare.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    specs, costs = [], [0] * text.num_hidden_layers
    for key, (name, *tied) in names.items():
        parameter = tensors[key]
        if tied and {name, *tied} != {f"{embedding}.weight", f"{head}.weight"}:
            raise ModelError(f"parameters {[name, *tied]} are tied; only input and output embeddings may be")
        unit = _unit(name, layer_prefix, [f"{base}.{child}." for child in before])
        spec = _spec(name, tuple(tied), parameter, unit, styles, compute_dtype, head, adapters)
        if unit >= 0 and (adapters is None or adapters.layer_of(name.rpartition(".")[0])[1] is None):
            costs[unit] += parameter.numel()  # an adapter costs next to nothing
        specs.append(replace(spec, name=prefix + name, tied_names=tuple(prefix + other for other in tied)))
    vector = build_vector(specs, costs, head_cost=bare.get_parameter(f"{head}.weight").numel())
    shape = ModelShape(
        family=text.model_type,
        num_layers=text.num_hidden_layers,
        num_attention_heads=styles.heads,
        num_key_value_heads=styles.kv_heads,
        hidden_size=text.hidden_size,
        attention_size=styles.heads * (getattr(text, "head_dim", None) or text.hidden_size // styles.heads),
        vocab_size=bare.get_parameter(f"{embedding}.weight").shape[0],
        layer_parameters=sum(costs) // len(costs),
        max_position_embeddings=getattr(text, "max_position_embeddings", None),
        has_tp_plan=styles.has_plan,
        has_pp_plan=bool(text.base_model_pp_plan),
        tp_obstacle=styles.obstacle,
        pp_obstacle=_pipeline_obstacle(bare, before, after),
        sp_obstacle=_sequence_obstacle(styles, [f"{base}.{child}." for child in before]),
    )
    return ModelDescription(
        model_class=type(bare),
        config=copy.deepcopy(bare.config),
        vector=vector,
        shape=shape,
        base=base,
        layers=layers,
        embeddings=before,
        norms=after,
        head=head,
        styles=styles.styles,
        attention_layers=tuple(styles.attention_layers),
        compute_dtype=compute_dtype or bare.dtype,
        prefix=prefix,
        adapters=adapters,
    )


def _unit(name: str, layer_prefix: str, before: list[str]) -> int:
    if name.startswith(layer_prefix):
        return int(name.removeprefix(layer_prefix).partition(".")[0])
    return EMBEDDING if any(name.startswith(prefix) for prefix in before) else HEAD


def _spec(
    name: str,
    tied: tuple[str, ...],
    parameter: nn.Parameter,
    unit: int,
    styles: _Styles,
    compute_dtype: torch.dtype | None,
    head: str,
    adapters: Adapters | None = None,
) -> ParameterSpec:
    module, _, leaf = name.rpartition(".")
    module, role = adapters.layer_of(module) if adapters is not None else (module, None)
    style, parts = styles.styles.get(module), styles.parts.get(module, ())
    rowwise = style in (ROWWISE, ROWWISE_SPLIT)
    shard_dim: int | None = None
    partial = module in styles.partial
    if role is not None and style is not None:
        # of A and B, the one that meets the cut dim of the base is cut alike; every shard adds its part to the other
        partial = role == (LORA_B if rowwise else LORA_A)
        shard_dim = None if partial else int(rowwise)
    elif rowwise:
        shard_dim = 1 if leaf == "weight" else None  # the bias is added once, after the sum
    elif style is not None and leaf in ("weight", "bias"):
        shard_dim = 0
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=dtype_name(compute_dtype or parameter.dtype),
        unit=unit,
        shard_dim=shard_dim,
        parts=parts if shard_dim is not None else (),
        partial_gradient=partial,
        trainable=parameter.requires_grad,
        tied_names=tied,
        in_head=f"{head}.weight" in tied,
    )


def _sequence_obstacle(styles: _Styles, before: list[str]) -> str | None:
    """Why the model cannot be sequence parallel, or None."""
    for name, module in styles.modules.items():
        early = name != styles.embedding and any(f"{name}.".startswith(prefix) for prefix in before)
        if early and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            return f"{name} adds to the embeddings of whole rows, so the model cannot be sequence parallel"
    return sequence_parallel.obstacle(styles.modules, styles.styles, styles.partial, styles.layer_prefix)


def _pipeline_obstacle(model: PreTrainedModel, before: tuple[str, ...], after: tuple[str, ...]) -> str | None:
    """Why a stage cannot be the model's own class with the other stages' layers passed through, or None."""
    text = model.config.get_text_config()
    planned = list(text.base_model_pp_plan or ())
    unknown = [name for name in (*before, *after) if name not in planned]
    if planned and unknown:
        return f"the modules {unknown} of {text.model_type} are in no stage of the family's pipeline plan"
    if getattr(text, "embedding_multiplier", 1.0) != 1.0 or getattr(text, "mup_enabled", False):
        return f"{text.model_type} scales the input of every pipeline stage like an embedding"
    return None
