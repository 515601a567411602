"""LoRA adapters of PEFT: what a `PeftModel` holds, which adapters train exactly, and how a replica gets them.

A LoRA layer computes `W x + s B A x` (Hu et al., 2021) with a frozen base weight W; A [r, in] and B [out, r] are trained.
Where tensor parallelism cuts W, the adapter follows it:

* column-parallel (rows of W cut): every shard holds all of A, with a gradient that is a part of the sum, and the rows of B
  that match its rows of W;
* row-parallel (columns of W cut): every shard holds the columns of A that match its columns of W, and all of B, with a
  gradient that is a part of the sum. The sum over shards is linear, so one all-reduce of `W_t x_t + s B A_t x_t` serves base
  and adapter.

On an embedding A is [r, V] and B [h, r], cut as on a layer whose inputs are tokens. The vectors of DoRA and biases of B belong
to the outputs (`variants`). Trained copies (`modules_to_save`) are parameters like those that they replace, and single rows of
the embedding (`trainable_token_indices`) are on every shard, which uses the rows of its tokens.

For fused experts (`target_parameters`), [E, out, in] or [E, in, out], PEFT adapts the weights themselves: W + s B A for each
expert, with A [E r, in] and B [out, r E] of all experts, which follow the cut of W in the same way.

PEFT's own code injects replicas, so the forward is PEFT's. Other features of PEFT raise an error that names them. peft is
imported only when a model uses it.
"""

import copy
import hashlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.exchanges import set_class
from hf_hotspa.features.lora.expert_deltas import ExpertDelta, mend_wrappers
from hf_hotspa.model.model_kind import INPUTS, NEITHER, OUTPUTS, of_text
from hf_hotspa.model.packed_layer import packed_layers
from hf_hotspa.model.tensor_plan import is_fused
from hf_hotspa.parallel.wrapped_model import bare_model, base_layer, is_wrapped, place_inside

if TYPE_CHECKING:
    from peft import LoraConfig

_PARAMETRIZATIONS = ".parametrizations."  # torch keeps packed weights of experts in such a submodule
_SHARED = {
    "lora_A": INPUTS,
    "lora_B": OUTPUTS,
    "lora_embedding_A": INPUTS,
    "lora_embedding_B": OUTPUTS,
    "lora_magnitude_vector": OUTPUTS,
    "token_adapter.trainable_tokens_delta": NEITHER,
}
_WHY = "training of this kind is not known to be exact when the layers are cut and moved"

_REFUSED: dict[str, tuple[str, str]] = {
    "layer_replication": (
        "replicated layers share their weights, and every layer is laid out on its own",
        "leave layer_replication out",
    ),
    "target_modules_to_tie": (
        "PEFT gives the adapters of a tied embedding and head the same memory, and their optimizer states change it in turn",
        "leave ensure_weight_tying out, or the embedding and the head out of target_modules",
    ),
}
"""Fields of a `LoraConfig` that are not supported: why, and the fix."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model as plain data. One is trained, and acts in training; others are frozen, and act in forwards
    for which the user's model is switched to them (a reference).

    Args:
        name: The trained one's name in PEFT (`default`).
        configs: The `LoraConfig`s with which replicas are injected, by adapter, as they were added; they initialize nothing.
        scalings: The factors s of every LoRA layer by adapter, by the layer's name in the transformers model.
        inside: Where each wrapper of PEFT has the layer that it runs, by the wrapper's name.
        parameters: The adapted parameter of each layer that adapts fused experts, by the layer's name. Layers of one module
            are nested: `….experts` and `….experts.base_layer`.
        classes: The class of each LoRA layer around a packed layer, by the layer's name. PEFT chooses it by the class of the
            weight, which a replica has in another form.
    """

    name: str
    configs: Mapping[str, "LoraConfig"]
    scalings: Mapping[str, Mapping[str, float]]
    parameters: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, type[nn.Module]] = field(default_factory=dict)

    def digest(self) -> str:
        """Equal on ranks whose adapters compute the same from the same weights."""
        scalings = [(layer, sorted(factors.items())) for layer, factors in sorted(self.scalings.items())]
        facts = self.name, scalings, sorted(self.inside.items())
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    @property
    def rank(self) -> int:
        return int(self.configs[self.name].r)

    @property
    def ep_unsupported_reason(self) -> str | None:
        if not self.parameters:
            return None
        return "experts are adapted (target_parameters): each row of lora_B has values of all experts, so ep must be 1"

    def beside(self, name: str) -> tuple[str, str | None]:
        """For `….q_proj.lora_A.default.weight`: `….q_proj.weight` and `INPUTS`; for `lora_B` likewise `OUTPUTS`. For
        `….q_proj.base_layer.weight`: `….q_proj.weight` and None. Any other name unchanged, and None."""
        for factor, shared in _SHARED.items():
            for adapter in self.configs:
                layer, added, leaf = name.rpartition(f".{factor}.{adapter}")
                if added and leaf in ("", ".weight", ".bias") and layer in self.inside:
                    return f"{self._without_wrapper(layer)}.{self.parameters.get(layer, 'weight')}", shared
        module, _, leaf = name.rpartition(".")
        return f"{self._without_wrapper(module)}.{leaf}" if module else name, None

    def _without_wrapper(self, module: str) -> str:
        owner, *inside = module.partition(_PARAMETRIZATIONS)
        for place in sorted(set(self.inside.values()), key=len, reverse=True):
            layer = owner.removesuffix(f".{place}")
            if layer != owner and self.inside.get(layer) == place:
                return self._without_wrapper("".join((layer, *inside)))
        return module

    def put(self, model: nn.Module) -> None:
        """Puts the LoRA layers, on the meta device, into a model freshly built by its class from its config."""
        from peft import inject_adapter_in_model

        if not self.inside:  # adapters are only on what no replica has
            return
        for name, given in self.configs.items():
            vars(model).pop("peft_config", None)  # of the one before, of which PEFT would warn
            config = copy.deepcopy(given)  # injection writes the target modules that it matched into it
            config.use_dora = False  # PEFT would read the weights' norms
            inject_adapter_in_model(config, model, name, low_cpu_mem_usage=True)
        for layer, place in self.inside.items():
            module: Any = model.get_submodule(layer)
            if place.startswith("modules_to_save."):  # no forward uses the replaced layer
                module.original_module = nn.Identity()
            elif place.startswith("token_adapter."):  # nor the rows as they were
                module.token_adapter.trainable_tokens_original.clear()
            else:
                self._put_variants(layer, module)

    def _put_variants(self, layer: str, module: Any) -> None:
        from hf_hotspa.features.lora.variants import put_dora

        if layer in self.classes:
            set_class(module, self.classes[layer], "packed")
        for name in self.scalings.get(layer, ()):
            if self.configs[name].use_dora and layer not in self.parameters:
                put_dora(module, name)
        if len(self.configs) > 1 and layer in self.scalings:  # the last one acts
            module.set_adapter([self.name])
        base = base_layer(module)
        if layer in self.parameters and hasattr(base, "hotspa_added"):  # packed, with products of single experts
            base.hotspa_added[self.parameters[layer]] = ExpertDelta(module)


def read_adapters(model: nn.Module) -> Adapters | None:
    """The adapter of the user's model; None for a model without one. Raises `UnsupportedError`: it has adapters that
    cannot be trained exactly; named, with what to do."""
    if "peft" not in sys.modules:
        return None
    if not is_wrapped(model):
        _refuse_bare_tuners(model)
        return None
    from peft import LoraConfig, PeftModel, PeftType

    configs = dict(model.peft_config)
    if not isinstance(model, PeftModel):
        raise UnsupportedError(
            f"the {type(model).__name__} has the adapters {sorted(configs)}",
            why="adapters of several kinds may be mixed in it",
            fix="make it with get_peft_model, and without mixed=True",
        )
    for name, config in configs.items():
        # configs of other kinds derive from it, such as AdaLoRA's
        if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise UnsupportedError(
                f"the adapter {name!r} is of the kind {kind} ({type(config).__name__})",
                why=_WHY,
                fix="use a LoraConfig",
            )
    if not any(hasattr(module, "lora_A") for module in model.modules()):  # after merge_and_unload()
        return None
    for config in configs.values():
        _refuse_options(config)
        _refuse_resized(model, config)
    trained = _trained(model)
    _refuse_idle(model, trained)
    bare = bare_model(model)[0]
    of_replicas = _of_replicas(bare)
    wrappers = {path: module for path, module in of_replicas.items() if is_of_parameter(module)}
    parameters = {path: module.parameter_name for path, module in wrappers.items()}
    if any(is_parametrized(base_layer(module)) for module in wrappers.values()):
        mend_wrappers(wrappers.values())
    inside = {path: place for path, module in of_replicas.items() if (place := place_inside(module)) is not None}
    if len(configs) > 1:
        _refuse_other_neighbours(bare, configs)
    tops = {path.rpartition(".")[2] for path, place in inside.items() if place.startswith("modules_to_save.")}
    replicated = {name: _for_replicas(config, tops) for name, config in configs.items()}
    packed = packed_layers(bare)
    scalings = _scalings(bare, of_replicas, packed)
    classes = {path: packed[own].adapter_class() for path in scalings if (own := f"{path}.{inside[path]}") in packed}
    return Adapters(trained, replicated, scalings, parameters, inside, classes)


def _refuse_options(config: "LoraConfig") -> None:
    for option, (why, fix) in _REFUSED.items():
        if value := getattr(config, option, None):
            raise UnsupportedError(f"the LoRA config has {option}={value!r}", why=why, fix=fix)


def _of_replicas(bare: nn.Module) -> dict[str, nn.Module]:
    """The modules that replicas have; adapters on the other half of a multimodal model run in the object itself."""
    if not isinstance(bare, PreTrainedModel):
        return dict(bare.named_modules())
    is_of_text = of_text(bare)
    return {path: module for path, module in bare.named_modules() if is_of_text(path)}


def _for_replicas(given: "LoraConfig", copied: Collection[str]) -> "LoraConfig":
    """A copy as PEFT's own class: a front end's may have more fields, which change what PEFT makes. `copied`: the last parts of
    the names of modules of replicas that have trained copies."""
    from peft import LoraConfig

    more = {field.name for field in fields(given)} - {field.name for field in fields(LoraConfig)}
    config = object.__new__(LoraConfig)
    config.__dict__.update({key: copy.deepcopy(value) for key, value in vars(given).items() if key not in more})
    if config.modules_to_save is not None:
        config.modules_to_save = [name for name in config.modules_to_save if name.rpartition(".")[2] in copied] or None
    config.init_lora_weights = False  # the values come from the model; inits such as PiSSA read the base weights
    config.inference_mode = False
    return config


def _trained(model: nn.Module) -> str:
    """The name of the adapter that acts, if it is the only one that does, and no other one would be trained."""
    active = list(model.active_adapters)
    trainable = {
        name
        for module in model.modules()
        for name, factor in (*getattr(module, "lora_A", {}).items(), *getattr(module, "lora_B", {}).items())
        if any(parameter.requires_grad for parameter in factor.parameters())
    }
    if len(active) != 1:
        raise UnsupportedError(
            f"the adapters {active} act together" if active else "no adapter acts",
            why="one adapter acts, and is trained; others are frozen",
            fix="call model.set_adapter(name); merge others into the base (merge_and_unload), or combine them first "
            "(add_weighted_adapter)",
        )
    if others := sorted(trainable.difference(active)):
        raise UnsupportedError(
            f"the adapter {others[0]!r} requires gradients, and {active[0]!r} acts",
            why="it takes no part in the forward, and would get none",
            fix=f"call model.set_adapter({others[0]!r}) to train it, or model.set_requires_grad({others[0]!r}, False)",
        )
    return str(active[0])


def _refuse_other_neighbours(bare: nn.Module, configs: Mapping[str, "LoraConfig"]) -> None:
    """Raises an error if several adapters do more than to add to linear layers, or wrap different parameters."""
    wrapped = {tuple(sorted(config.target_parameters or ())) for config in configs.values()}
    kinds = {
        f"modules_to_save={config.modules_to_save!r}": bool(config.modules_to_save) for config in configs.values()
    } | {
        "trainable_token_indices": any(config.trainable_token_indices for config in configs.values()),
        "layers on an embedding": any(len(getattr(module, "lora_embedding_A", ())) for module in bare.modules()),
        "different target_parameters": len(wrapped) > 1,
    }
    for kind, holds in kinds.items():
        if holds:
            raise UnsupportedError(
                f"the adapters {sorted(configs)} have {kind}",
                why="several adapters of a model are exact only if they add to linear layers, or to the same parameters",
                fix="leave it out, remove others with model.delete_adapter(...), or give a reference as ref_model",
            )


def _refuse_bare_tuners(model: nn.Module) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    tuner = next((name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)), None)
    if tuner is not None:
        raise UnsupportedError(
            f"the module {tuner!r} is an adapter inside a {type(model).__name__}",
            why="adapters are read from a PeftModel, which holds their config",
            fix="train without one, or a model of transformers with a head and an adapter, and put it into the chain later"
            if isinstance(model, nn.Sequential)
            else "use peft.get_peft_model(model, config) instead of model.add_adapter or inject_adapter_in_model",
        )


def _refuse_idle(model: nn.Module, name: str) -> None:
    """Raises an error if the adapter does not take part in the forward, or is not trained."""
    merged = any(getattr(module, "merged_adapters", None) for module in model.modules())
    disabled = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
    # not by `inference_mode`, which `set_adapter` leaves as it was when it makes an adapter trainable
    frozen, act = not any(p.requires_grad for p in model.parameters()), f"call model.set_adapter({name!r})"
    for state, holds, fix in (
        ("merged into the base weights", merged, "call model.unmerge_adapter()"),
        ("disabled", disabled, act),
        ("loaded for inference", frozen, f"load it with PeftModel.from_pretrained(..., is_trainable=True), or {act}"),
    ):
        if holds:
            raise UnsupportedError(
                f"the adapter {name!r} is {state}", why="none of its weights would be trained", fix=fix
            )


def _refuse_resized(model: nn.Module, config: "LoraConfig") -> None:
    """Raises an error if PEFT saves the embeddings with the adapter, as the saved base has another number of them, and
    they are not trained copies, which checkpoints hold."""
    base, size = config.base_model_name_or_path, getattr(model.config, "vocab_size", None)
    if not base or size is None:
        return
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    if all((place_inside(end) or "").startswith("modules_to_save.") for end in ends):
        return
    try:
        known = type(model.config).from_pretrained(base, local_files_only=True).vocab_size
    except (OSError, ValueError):  # it was made from a config, or has moved: PEFT does not save them
        return
    if known != size:
        raise UnsupportedError(
            f"the model has {size} embeddings, and its base {base!r} has {known}",
            why="PEFT saves resized embeddings with the adapter, and checkpoints hold the adapter's own weights",
            fix="save the resized model (save_pretrained), load it from its folder, and make the adapter on that; or train "
            "both ends (modules_to_save)",
        )


def _scalings(
    bare: nn.Module, of_replicas: Mapping[str, Any], packed: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """The factors of each LoRA layer by adapter; raises an error unless all wrappers are known, on known layers."""
    from peft.tuners.lora import Embedding, Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    scalings = dict[str, dict[str, float]]()
    for path, module in of_replicas.items():
        if isinstance(module, AuxiliaryTrainingWrapper):
            _refuse_other_copies(bare, path, module, packed)
        if not isinstance(module, BaseTunerLayer) or path.endswith(".token_adapter"):
            continue
        base = base_layer(module)
        known = Linear if type(base) is nn.Linear else Embedding if isinstance(base, nn.Embedding) else None
        if (layer := packed.get(f"{path}.{place_inside(module)}")) is not None:
            known = layer.adapter_class()
        if is_of_parameter(module):
            _refuse_other_parameters(path, module, base)
        elif type(module) is not known:
            raise UnsupportedError(
                f"the adapter on {path!r} is a {type(module).__name__} around a {type(base).__name__}",
                why=_WHY,
                fix="target plain linear layers and embeddings",
            )
        in_layers = any(part.isdigit() for part in path.split("."))
        _refuse_variants(path, module, is_head=isinstance(base, nn.Linear) and not in_layers)
        scalings[path] = {adapter: float(factor) for adapter, factor in module.scaling.items()}
    return scalings


def _refuse_variants(path: str, module: Any, is_head: bool) -> None:
    """Raises an error for a variant of LoRA other than DoRA, and for dropout on the head."""
    other = [type(v).__name__ for v in module.lora_variant.values() if not type(v).__name__.startswith("Dora")]
    if other:
        raise UnsupportedError(
            f"the adapter on {path!r} is the variant {', '.join(other)}",
            why=_WHY,
            fix="use LoRA, rsLoRA (use_rslora=True) or DoRA (use_dora=True)",
        )
    rate = max((getattr(dropout, "p", 0.0) for dropout in module.lora_dropout.values()), default=0.0)
    if is_head and rate > 0:
        raise UnsupportedError(
            f"the adapter on the head {path!r} has lora_dropout={rate}",
            why="the head runs on parts of a pack, and on some of them twice, which would draw other masks",
            fix="set lora_dropout=0, or leave the head out of target_modules",
        )


def _refuse_other_copies(bare: nn.Module, path: str, module: Any, packed: Mapping[str, object]) -> None:
    """Raises an error unless a wrapper trains a copy of a linear layer, an embedding or a norm, or rows of an embedding."""
    place = place_inside(module) or ""
    if place.startswith("token_adapter."):
        is_plain = isinstance(layer := module.token_adapter.base_layer, nn.Embedding | nn.Linear)
        if not is_plain or place_inside(bare.get_submodule(path.rpartition(".")[0])) is not None:
            raise UnsupportedError(
                f"trainable_token_indices has {path!r}, a {type(layer).__name__}",
                why="PEFT trains rows of plain embeddings and heads, without an adapter or a trained copy of them",
                fix="leave it out of target_modules and modules_to_save",
            )
        return
    base, parent = base_layer(module), bare.get_submodule(path.rpartition(".")[0])
    is_plain = isinstance(base, nn.Linear | nn.Embedding) or "norm" in type(base).__name__.lower()
    why = None
    if not place.startswith("modules_to_save."):
        why = "the wrapper is of another kind, or its copy is not active"
    elif f"{path}.{place}" in packed or any(not p.is_floating_point() for p in base.parameters()):
        why = "its weight is quantized, and has no gradient"
    elif not is_plain or any(True for _ in base.children()):
        why = "the blocks of a layer are cut together, which copies of them are not"
    elif hasattr(parent, "experts"):
        why = "a copy of a router would count as a second one"
    if why is not None:
        raise UnsupportedError(
            f"modules_to_save has {path!r}, a {type(base).__name__}",
            why=why,
            fix="name the head, embeddings, norms or plain linear layers, or target the layers inside with target_modules",
        )


def is_of_parameter(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper around a module of which it adapts one parameter (`target_parameters`)."""
    from peft.tuners.lora.layer import ParamWrapper

    return type(module) is ParamWrapper


def _refuse_other_parameters(path: str, module: nn.Module, base: nn.Module) -> None:
    """Raises an error unless the adapted parameter is a weight of fused experts or of the family's own module (a router)."""
    parameter = getattr(base, module.parameter_name)
    if isinstance(base, nn.Linear) or parameter.dim() != (3 if is_fused(base) else 2):
        raise UnsupportedError(
            f"target_parameters has {module.parameter_name!r} of {path!r}, a {type(base).__name__}: {list(parameter.shape)}",
            why="it can adapt only weights of fused experts ([experts, ...]), and matrices of modules other than linear layers",
            fix="target linear layers with target_modules, and leave biases out of target_parameters",
        )
