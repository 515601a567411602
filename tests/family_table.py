"""The generated table of model families, for code that must not import transformers.

`python -m tests.family_table` writes `hf_hotspa/costs/families.json` from the installed transformers. From the config classes:
which causal language models have a tensor-parallel and a pipeline plan, and the names of their settings. From a model of each
planned family's default config, built without weights: why the engine does not support it, or `+sp`, `+ck` or pp with it, and
which shares of its layers tp does not divide. For the other families of the sweep only the reasons, from the model of the
sweep (a decoder, if the default is an encoder). Takes some minutes; with names of families as arguments only these are updated.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    __version__,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hotspa.costs.model_config import FAMILIES_FILE, FAMILIES_KIND, FAMILIES_VERSION, model_from
from hf_hotspa.errors import HotspaError, ModelError
from hf_hotspa.model.model_kind import attends_both_ways
from hf_hotspa.model.specs import ModelDescription, describe_model
from hf_hotspa.model.tensor_plan import has_tensor_plan, stage_plan
from hf_hotspa.model_shape import ModelShape
from tests.tiny_families import UNPLANNED, swept_families, tiny_config_of, without_dropout

_DEFAULTS = ("num_key_value_heads", "head_dim", "tie_word_embeddings")
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
)
"""The settings that `costs.model_config` reads from a config, by the names that most families use."""

FACTS = (
    "unsupported",
    "pp_unsupported_reason",
    "sp_unsupported_reason",
    "ck_unsupported_reason",
    "cp_unsupported_reason",
    "rc_unsupported_reason",
    "z_unsupported_reason",
    "ep_unsupported_reason",
    "whole",
    "layer_factor",
    "head_norms",
    "encoder",
)
"""The facts read from a model."""
_SMALLEST = 5e-4
"""Shares below this (a router beside its experts) are left out."""
_NEAR = 5e-3
"""Relative differences of a layer's parameter counts below this (biases, extra norms) are ignored."""


ONLY_TINY = (
    "cohere_compass_text",
    "dots1",
    "hunyuan_v1_moe",
    "lfm2_moe",
    "ministral",
    "nemotron",
    "qwen4_exp_text",
)
"""Families whose default config describes no model. In their tiny models, biases and routers are too large to be counted."""


ENCODERS = ("distilbert", "modernbert")
"""Families of encoders of which transformers has no causal language model."""


def _family(config: Any) -> dict[str, object]:
    plan = config.base_model_tp_plan or {}
    entry: dict[str, object] = {"tp": has_tensor_plan(config), "pp": bool(stage_plan(config))}
    if leaves := {name.rpartition(".")[2] for name in plan if ".mlp" in name}:
        entry["gated"] = bool(leaves & {"gate_proj", "gate_up_proj"})
    names = dict(config.attribute_map)
    if aliases := {name: names[name] for name in FIELDS if name in names}:
        entry["aliases"] = aliases
    defaults = {name: getattr(config, name, None) for name in _DEFAULTS}
    if given := {name: value for name, value in defaults.items() if type(value) in (int, bool) and value}:
        entry["defaults"] = given
    return entry


def described(config: PreTrainedConfig) -> ModelDescription:
    """The engine's description of a model without weights.

    Raises:
        HotspaError: it does not support the model.
    """
    config._experts_implementation = "eager"
    kind = AutoModelForTokenClassification if config.model_type in ENCODERS else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    return describe_model(model)


def is_encoder(family: str) -> bool:
    """Whether tokens of a family see both sides if its config does not say that it is a decoder."""
    if family in ENCODERS:
        return True
    if getattr(CONFIG_MAPPING[family], "is_decoder", None) is not False:
        return False
    try:
        with torch.device("meta"):
            model = AutoModelForTokenClassification.from_config(CONFIG_MAPPING[family]())
        return attends_both_ways(model)
    except (HotspaError, ValueError):  # it has no such class
        return False


def default_config(family: str) -> PreTrainedConfig:
    """transformers' default config of a family; the sweep's config if no model can be built from the default."""
    return tiny_config_of(family) if family in ONLY_TINY else without_dropout(CONFIG_MAPPING[family]())


def counted_shape(config: PreTrainedConfig) -> ModelShape | None:
    """The shape that `hf-hotspa plan` computes from a config without this table; None if it cannot."""
    data = json.loads(config.to_json_string(use_diff=False))
    try:
        return model_from(data, "default", "the default config", facts={}).shape
    except ModelError:
        return None


def whole_shares(exact: ModelDescription, counted: ModelShape) -> dict[str, float]:
    """The shares that tp does not divide, of attention and MLP as `hf-hotspa plan` counts them (a replacement of attention
    may be larger). Together they are the undivided parameters of a rank."""
    specs = [s for s in exact.vector.specs if s.unit >= 0 and s.shard_dim is None and len(s.shape) > 1]
    whole = sum(spec.numel for spec in specs) / exact.shape.num_layers
    attention = min(counted.attention_parameters, counted.layer_parameters)
    mlp = max(counted.layer_parameters - 2 * counted.hidden_size - attention, 1)
    of_attention = min(exact.shape.whole_attention, whole / attention)
    return {"whole_attention": of_attention, "whole_mlp": min(1.0, (whole - of_attention * attention) / mlp)}


def family_facts(family: str) -> dict[str, object]:
    """The facts of one family, from a model of its default config."""
    is_planned = family not in UNPLANNED
    config = default_config(family) if is_planned else tiny_config_of(family)
    try:
        exact = described(config)
    except HotspaError as error:
        return {"unsupported": getattr(error, "what", str(error))}
    shape, counted = exact.shape, counted_shape(config) if is_planned else None
    factor = 1.0
    if counted is not None and family not in ONLY_TINY:
        factor = shape.layer_parameters / counted.layer_parameters
        counted = replace(counted, layer_parameters=shape.layer_parameters)
    unsupported = {name: getattr(shape, name) for name in FACTS if name.endswith("_unsupported_reason")}
    found: dict[str, object] = {name: why for name, why in unsupported.items() if why}
    if counted is not None:
        least = 0.5 if family in ONLY_TINY else _SMALLEST
        shares = whole_shares(exact, counted).items()
        if whole := {name: round(share, 4) for name, share in shares if share >= least}:
            found["whole"] = whole
    if abs(factor - 1) > _NEAR:
        found["layer_factor"] = float(f"{factor:.4g}")
    if shape.head_norms:
        found["head_norms"] = True
    if is_encoder(family):
        found["encoder"] = True
    return found


def family_table(facts: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Returns the contents of the file, given the facts of each planned family."""
    names = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *ENCODERS})
    return {
        "kind": FAMILIES_KIND,
        "schema_version": FAMILIES_VERSION,
        "transformers": __version__,
        "families": {name: {**_family(CONFIG_MAPPING[name]), **facts.get(name, {})} for name in names},
    }


def facts_of(table: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    families = table["families"].items()
    return {name: {key: family[key] for key in FACTS if key in family} for name, family in families}


def render(table: Mapping[str, Any]) -> str:
    """Returns the text of the file: one line per family."""
    head = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in table.items() if key != "families")
    rows = ",\n".join(f'"{name}": {json.dumps(family)}' for name, family in table["families"].items())
    return f'{{\n{head},\n"families": {{\n{rows}\n}}\n}}\n'


if __name__ == "__main__":
    known = json.loads(Path(FAMILIES_FILE).read_text())
    found = facts_of(known) if known["transformers"] == __version__ and sys.argv[1:] else {}
    for name in sys.argv[1:] or (*swept_families(), *ENCODERS):
        found[name] = family_facts(name)
        print(f"{name:22} {found[name]}", flush=True)
    Path(FAMILIES_FILE).write_text(render(family_table(found)))
