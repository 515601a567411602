"""Reads a Hugging Face `config.json` into a `ModelShape`, without transformers.

Includes presets: LLaMA-2 in the sizes of HotSPa's published experiments, with positions for their 32768 tokens. What a
config does not contain about its family (plans, other field names, defaults) comes from `families.json`. That file is
generated from transformers' config classes and from the engine's analysis of each family's default model: which blocks
tp does not divide, and why pp or `+sp` is unsupported.

Layer parameters are computed from attention and MLP matrices, two norms and all experts, without biases and extra
norms: within 1 % for models from a billion parameters on. For families where this misses more (linear attention, layers
of several kinds) the result is scaled by the error for the default config.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hf_hotspa.errors import HotspaConfigError, ModelError
from hf_hotspa.model_shape import ModelShape, pair_layers
from hf_hotspa.nearest import meant
from hf_hotspa.whole_file import read_json, read_object

FAMILIES_FILE = Path(__file__).with_name("families.json")
FAMILIES_KIND = "hf_hotspa model families"
FAMILIES_VERSION = 1

_PRESETS = Path(__file__).parent / "models"
_OF_THE_PAPER = {"llama2-32b"}
_GATED = ("silu", "swish", "swiglu", "geglu", "reglu")
_SHARED = ("n_shared_experts", "shared_expert_intermediate_size")
_SWITCHES = ("is_moe", "enable_moe_block")
EXPERTS = "experts"
_TRANSPOSED = ("gpt_oss", "aria_text")  # families whose experts are matrices [in, out]
_MOST_LAYERS = 10_000
_MOST = 1 << 32
_WHAT = "the model config"
_HOW = "give a config.json of a causal language model, as Hugging Face writes it"


@dataclass(frozen=True)
class Linear:
    """A linear layer of a decoder layer, of `query` heads, `key` heads, experts or (None) an MLP. tp cuts its outputs
    (column-parallel) if `rows`, otherwise its inputs."""

    inputs: int
    outputs: int
    of_heads: str | None
    rows: bool
    count: int = 1  # such layers; the experts of a mixture (of which `of_heads` is `EXPERTS`)
    transposed: bool = False  # whether its weight is [in, out]

    @property
    def numel(self) -> int:
        return self.inputs * self.outputs

    @property
    def whole(self) -> int:
        """Size of the dim that tp does not cut."""
        return self.inputs if self.rows else self.outputs

    @property
    def cut(self) -> int:
        """Size of the dim that tp cuts."""
        return self.outputs if self.rows else self.inputs


@dataclass(frozen=True)
class ModelConfig:
    """A model as described by its config."""

    name: str
    shape: ModelShape
    tied: bool = False  # whether head and embedding are one weight
    # linear layers of a decoder layer that something may be added to, by name; without experts
    linears: Mapping[str, Linear] = field(default_factory=dict)
    experts: Mapping[str, Linear] = field(default_factory=dict)  # the same of experts


def preset_names() -> tuple[str, ...]:
    """Returns the models that need no file; a size that only the paper has (`llama2-32b`) is left out."""
    return tuple(sorted({path.stem for path in _PRESETS.glob("*.json")} - _OF_THE_PAPER))


def preset_source(text: str) -> str | None:
    """Returns the name on the hub of a preset, None if it has none or there is no such preset."""
    return _hub_names().get(text)


@cache
def _hub_names() -> dict[str, str]:
    texts = {path.stem: json.loads(path.read_text()) for path in _PRESETS.glob("*.json")}
    return {name: text["_name_or_path"] for name, text in texts.items() if "_name_or_path" in text}


def load_model(text: str | os.PathLike[str]) -> ModelConfig:
    """Loads a model by preset name, config file, folder with a `config.json`, or hub name. Raises `HotspaConfigError`:
    there is no such preset, file or model on the hub, or it holds no JSON object; `ModelError`: the config is not of a
    causal language model whose parameters can be counted."""
    path, name = _find(text)
    return model_from(read_object(path, _WHAT, _HOW), name, name if path.parent == _PRESETS else str(path))


def read_config(text: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the config's fields after the checks of `load_model`. Raises `HotspaConfigError`: see `load_model`;
    `ModelError`: see `load_model`."""
    load_model(text)
    return read_object(_find(text)[0], _WHAT, _HOW)


def _find(text: str | os.PathLike[str]) -> tuple[Path, str]:
    """Returns the file, and the model's name for tables."""
    name, names = str(text), preset_names()
    if name.lower() in {*names, *_OF_THE_PAPER}:
        return _PRESETS / f"{name.lower()}.json", name.lower()
    refuse_gguf(name)
    path = Path(text).expanduser()
    folder = path.is_dir()
    if folder:
        path /= "config.json"
    if path.is_file():
        return path, path.parent.resolve().name if path.name == "config.json" else path.stem
    why: str | None = None
    fix = f"use one of {', '.join(names)}, the path of a config.json or its folder, or a name on the hub"
    # a name on the hub has one slash at most
    is_path = name.startswith((".", "/", "~")) or name.endswith((".json", "/")) or name.count("/") > 1
    if not folder and not is_path:
        of_hub = {hub.lower(): preset for preset, hub in _hub_names().items()}
        if preset := of_hub.get(name.lower()):
            return _PRESETS / f"{preset}.json", name
        try:
            return hub_file(name), name
        except HotspaConfigError as error:
            why, fix = " ".join(filter(None, (error.what, error.where and f"({error.where})"))), error.fix or fix
            near = meant(name, [*names, *_hub_names().values(), *_cached()])
            if near or "/" not in name:  # more likely a misspelled preset
                fix = f"{near}use one of {', '.join(names)}, the path of a config.json or its folder, or: {fix}"
    raise HotspaConfigError(f"there is no model preset and no config file {name!r}", why=why, fix=fix)


def refuse_gguf(name: str) -> None:
    """Raises `HotspaConfigError` for a model that is named as a GGUF file or a repository of such files."""
    if "gguf" in re.split("[^a-z]+", name.lower()):
        fix = "name the original model, from which it was made, such as Qwen/Qwen3-8B"
        raise HotspaConfigError(f"{name!r} is a GGUF model, which cannot be trained", fix=fix)


def _cached() -> list[str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]


def model_from(data: Mapping[str, Any], name: str, where: str, facts: Mapping[str, Any] | None = None) -> ModelConfig:
    """Builds the model from the contents of a config; of a multimodal config, the text model. Raises `ModelError`: the
    family is unknown, a field is missing or impossible, or the layers cannot be counted. `facts`: the engine's analysis
    of the family; from `families.json` if None."""
    text = data.get("text_config")
    config = _Config({**data, **text} if isinstance(text, dict) else data, where)
    shape = _shape(config, config.table if facts is None else facts)
    defaults = config.table.get("defaults", {})
    tied = config.data.get("tie_word_embeddings", defaults.get("tie_word_embeddings", False))
    return ModelConfig(name, shape, bool(tied), _linears(config, shape), _experts(config, shape))


_LIKE_TEXT = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text models of multimodal families with the layers, and the plans, of a text family."""


class _Config:
    """Validated fields of a config, by their usual names."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where
        self.family = str(data.get("model_type"))
        families = read_json(FAMILIES_FILE, FAMILIES_KIND, FAMILIES_VERSION, "install the package again")["families"]
        like = _LIKE_TEXT.get(self.family, self.family)
        if like not in families:
            raise ModelError(
                f"the model_type {data.get('model_type')!r} is not a causal language model of transformers",
                where=where,
                fix=f"{meant(self.family, families)}{_HOW}; docs/families.md lists the families",
            )
        self.table: dict[str, Any] = families[like]

    def get(self, name: str) -> int | None:
        own = self.table.get("aliases", {}).get(name, name)
        value = self.data.get(own, self.data.get(name, self.table.get("defaults", {}).get(name)))
        if value is None:
            return None
        if type(value) is not int or not 0 < value < _MOST:
            raise ModelError(f"{own} is {value!r} instead of a positive integer", where=self.where, fix=_HOW)
        return value

    def need(self, name: str) -> int:
        value = self.get(name)
        if value is None:
            own = self.table.get("aliases", {}).get(name, name)
            raise ModelError(f"the config of {self.family} has no {own}", where=self.where, fix=_HOW)
        return value

    @property
    def both_ways(self) -> bool:
        """Whether tokens also see later ones."""
        is_encoder = self.table.get("encoder", False) and not self.data.get("is_decoder")
        return bool(is_encoder or self.data.get("use_bidirectional_attention"))

    @property
    def gated(self) -> bool:
        activation = str(self.data.get("hidden_act") or self.data.get("activation_function") or "")
        known = self.table.get("gated")
        return activation.startswith(_GATED) if known is None else bool(known)

    @property
    def pair_layers(self) -> float:
        types, every = self.data.get("layer_types"), self.get("full_attention_interval")
        if isinstance(types, list):
            return pair_layers(types)
        return 1.0 if every is None else self.need("num_hidden_layers") // every / self.need("num_hidden_layers")

    def mlp(self, hidden: int) -> tuple[int, int]:
        """Returns the MLP parameters of one layer, with all experts and the router; and the MLP width, 0 with
        experts."""
        data, matrices = self.data, 3 if self.gated else 2
        width = self.get("intermediate_size") or data.get("n_inner") or data.get("ffn_dim") or 4 * hidden
        if type(width) is not int or not 0 < width < _MOST:
            raise ModelError(f"the MLP width is {width!r} instead of a positive integer", where=self.where, fix=_HOW)
        experts, routed = self.experts(hidden)
        if not experts:
            return matrices * hidden * width, width
        each = self.get("moe_intermediate_size") or width
        shared = [self.get(name) if data.get(name) else 0 for name in _SHARED]
        shared_width = (shared[0] or 0) * each + (shared[1] or 0)
        return routed + matrices * hidden * shared_width + experts * hidden, 0

    def experts(self, hidden: int) -> tuple[int, int]:
        """Returns the number of routed experts of one layer, 0 for a dense model; and their parameters."""
        data, matrices = self.data, 3 if self.gated else 2
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((value for name in names if data.get(name) and (value := self.get(name))), 0)
        if experts <= 1 or any(data.get(switch) is False for switch in _SWITCHES):
            return 0, 0
        each = self.get("moe_intermediate_size") or self.get("intermediate_size") or 4 * hidden
        return experts, matrices * hidden * experts * each


def _shape(config: _Config, facts: Mapping[str, Any]) -> ModelShape:
    kv_heads = config.get("num_key_value_heads") or config.need("num_attention_heads")
    heads, hidden = config.need("num_attention_heads"), config.need("hidden_size")
    layers = config.need("num_hidden_layers")
    head_dim = config.get("head_dim") or hidden // heads
    if layers > _MOST_LAYERS or kv_heads > heads or heads % kv_heads or not head_dim:
        raise ModelError(
            f"{layers} layers of {heads} heads with {kv_heads} key/value heads and hidden size {hidden} are impossible",
            where=config.where,
            fix=_HOW,
        )
    _check_family(config, facts)
    mlp, _ = config.mlp(hidden)
    num_experts, of_experts = config.experts(hidden)
    counted = 2 * hidden * head_dim * (heads + kv_heads) + mlp + 2 * hidden
    return ModelShape(
        family=config.family,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=hidden,
        attention_size=heads * head_dim,
        vocab_size=config.need("vocab_size"),
        layer_parameters=round(counted * facts.get("layer_factor", 1)),
        max_position_embeddings=config.get("max_position_embeddings"),
        has_tp_plan=config.table["tp"],
        has_pp_plan=config.table["pp"],
        num_experts=num_experts,
        experts_per_token=(config.get("num_experts_per_tok") or 1) if num_experts else 0,
        expert_parameters=round(of_experts * facts.get("layer_factor", 1)),
        gated=config.gated,
        head_norms=config.table.get("head_norms", False),
        pair_layers=config.pair_layers,
        both_ways=config.both_ways,
        **{name: reason for name, reason in facts.items() if name.endswith("_unsupported_reason")},
        **facts.get("whole", {}),
    )


def _check_family(config: _Config, facts: Mapping[str, Any]) -> None:
    if config.get("kv_lora_rank"):
        raise ModelError(
            f"the parameters of {config.family} cannot be counted from its config: multi-head latent attention",
            where=config.where,
            fix="use a model with separate queries, keys and values",
        )
    if "unsupported" in facts:
        raise ModelError(
            f"{config.family} cannot be trained: {facts['unsupported']}",
            where=config.where,
            fix="use a model of another family",
        )


def _linears(config: _Config, shape: ModelShape) -> dict[str, Linear]:
    hidden, queries = shape.hidden_size, shape.attention_size
    keys = queries // shape.num_attention_heads * shape.num_key_value_heads
    _, width = config.mlp(hidden)
    return {
        "q_proj": Linear(hidden, queries, "query", True),
        "k_proj": Linear(hidden, keys, "key", True),
        "v_proj": Linear(hidden, keys, "key", True),
        "o_proj": Linear(queries, hidden, "query", False),
        **{name: Linear(hidden, width, None, True) for name in ("gate_proj", "up_proj")[not config.gated :] if width},
        **({"down_proj": Linear(width, hidden, None, False)} if width else {}),
    }


def _experts(config: _Config, shape: ModelShape) -> dict[str, Linear]:
    hidden, count = shape.hidden_size, shape.num_experts
    _, parameters = config.experts(hidden)
    if not parameters:
        return {}
    width, transposed = parameters // (count * hidden * (3 if config.gated else 2)), config.family in _TRANSPOSED
    mean = round(count * shape.expert_parameters / parameters)  # of layers, some of which may have none
    into = "gate_up_proj" if config.gated else "up_proj"
    return {
        into: Linear(hidden, width * (2 if config.gated else 1), EXPERTS, True, mean, transposed),
        "down_proj": Linear(width, hidden, EXPERTS, False, mean, transposed),
    }


# -- single small files of the hub, from the cache if present; fails at once if the hub cannot be reached --------------

CONFIG = "config.json"
_TIMEOUT_S = 10


def hub_file(name: str, filename: str = CONFIG) -> Path:
    """Returns the path of a file of a hub model, such as `Qwen/Qwen3-0.6B`; downloads it if it is not in the cache.
    Raises `HotspaConfigError`: the name is not a valid model name, the hub has no such model or requires a token for
    it, or the hub cannot be reached; `what` says which. `filename`: the file in the model's repository."""
    # imported here, because presets and local files do not need it
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        known = try_to_load_from_cache(name, filename)
        if isinstance(known, str):
            return Path(known)
        get_hf_file_metadata(hf_hub_url(name, filename), timeout=_TIMEOUT_S)  # a download would try for half a minute
        return Path(hf_hub_download(name, filename))
    except HFValidationError:
        raise HotspaConfigError(f"{name[:100]!r} cannot be the name of a model on the hub") from None
    except GatedRepoError:
        raise HotspaConfigError(
            f"access to {name!r} on the hub must be requested",
            fix=f"accept its terms on https://huggingface.co/{name}, then `hf auth login`",
        ) from None
    except RepositoryNotFoundError:
        raise HotspaConfigError(
            f"the hub has no model {name!r}, or it is private", fix="check the name; for a private one, `hf auth login`"
        ) from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        raise _unreachable(name, filename, "HF_HUB_OFFLINE is set", HF_HUB_CACHE) from None
    except EntryNotFoundError:
        raise HotspaConfigError(
            f"{name!r} has no {filename} on the hub", fix="give a model in transformers' format"
        ) from None
    except Exception as error:  # also errors of the client's transport library
        raise _unreachable(name, filename, f"{type(error).__name__}: {error}", HF_HUB_CACHE) from None


def _unreachable(name: str, filename: str, why: str, cache: str) -> HotspaConfigError:
    what = filename if filename == CONFIG else f"{filename} tokenizer.json"
    return HotspaConfigError(
        f"the hub cannot be asked for {name!r}: {why}",
        where=f"it is not in the cache {cache} either",
        fix=f"on a machine with network: `hf download {name} {what} --local-dir FOLDER`, then give FOLDER",
    )
