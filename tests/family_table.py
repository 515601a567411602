"""The generated table of model families, for code that must not import transformers.

`python -m tests.family_table` writes `hf_hotspa/costs/families.json` from the installed transformers: which causal language
models have a tensor-parallel and a pipeline plan, and how their configs name things, from the config classes; and what
the engine makes of a model of each planned family's default config, built without weights: why it is refused, or
cannot run `+sp`, `+ck` or pp, and which shares of its layers tp does not divide. Of the other families of the sweep, the
reasons only, from a model as the sweep has it (a decoder, where its default is an encoder). Some minutes; with names of families,
those only.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hotspa.costs.model_config import FAMILIES_FILE, FAMILIES_KIND, FAMILIES_VERSION, model_from
from hf_hotspa.errors import HotspaError, ModelError
from hf_hotspa.model.specs import ModelDescription, describe_model
from hf_hotspa.model.tensor_plan import has_tensor_plan
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
"""What `costs.model_config` reads of a config, in the names that most families use."""

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
)
"""What is read off a model."""
_SMALLEST = 5e-4
"""Shares below this (a router beside its experts) are left out."""
_NEAR = 5e-3
"""Counts of a layer's parameters that are nearer than this (biases, extra norms) are taken as they are."""


ONLY_TINY = (
    "cohere_compass_text",
    "dots1",
    "hunyuan_v1_moe",
    "lfm2_moe",
    "ministral",
    "nemotron",
    "qwen4_exp_text",
)
"""Families whose default config describes no model. Of a tiny one, biases and routers are too large a part to be counted."""


def _family(config: Any) -> dict[str, object]:
    plan = config.base_model_tp_plan or {}
    found: dict[str, object] = {"tp": has_tensor_plan(config), "pp": bool(config.base_model_pp_plan)}
    if leaves := {name.rpartition(".")[2] for name in plan if ".mlp" in name}:
        found["gated"] = bool(leaves & {"gate_proj", "gate_up_proj"})
    names = dict(config.attribute_map)
    if aliases := {name: names[name] for name in FIELDS if name in names}:
        found["aliases"] = aliases
    defaults = {name: getattr(config, name, None) for name in _DEFAULTS}
    if given := {name: value for name, value in defaults.items() if type(value) in (int, bool) and value}:
        found["defaults"] = given
    return found


def described(config: PreTrainedConfig) -> ModelDescription:
    """What the engine makes of a model without weights.

    Raises:
        HotspaError: it refuses the model.
    """
    config._experts_implementation = "eager"
    with torch.device("meta"):
        return describe_model(
            AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
        )


def default_config(family: str) -> PreTrainedConfig:
    """The config that transformers gives a family without being asked; that of the sweep where no model can be built of it."""
    return tiny_config_of(family) if family in ONLY_TINY else without_dropout(CONFIG_MAPPING[family]())


def counted_shape(config: PreTrainedConfig) -> ModelShape | None:
    """What the arithmetic of `hf-hotspa plan` makes of a config without this table; None where it cannot count."""
    data = json.loads(config.to_json_string(use_diff=False))
    try:
        return model_from(data, "default", "the default config", facts={}).shape
    except ModelError:
        return None


def whole_shares(exact: ModelDescription, counted: ModelShape) -> dict[str, float]:
    """The shares that tp does not divide, of attention and MLP as the arithmetic counts them (what stands in the place of
    attention may be larger): together they are what a rank holds whole."""
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
    return found


def family_table(facts: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The contents of the file.

    Args:
        facts: Those of each planned family.
    """
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return {
        "kind": FAMILIES_KIND,
        "schema_version": FAMILIES_VERSION,
        "transformers": __version__,
        "families": {name: {**_family(CONFIG_MAPPING[name]), **facts.get(name, {})} for name in names},
    }


def facts_of(table: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """The facts in a table."""
    families = table["families"].items()
    return {name: {key: family[key] for key in FACTS if key in family} for name, family in families}


def render(table: Mapping[str, Any]) -> str:
    """The text of the file: a line for each family."""
    head = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in table.items() if key != "families")
    rows = ",\n".join(f'"{name}": {json.dumps(family)}' for name, family in table["families"].items())
    return f'{{\n{head},\n"families": {{\n{rows}\n}}\n}}\n'


if __name__ == "__main__":
    known = json.loads(Path(FAMILIES_FILE).read_text())
    found = facts_of(known) if known["transformers"] == __version__ and sys.argv[1:] else {}
    for name in sys.argv[1:] or swept_families():
        found[name] = family_facts(name)
        print(f"{name:22} {found[name]}", flush=True)
    Path(FAMILIES_FILE).write_text(render(family_table(found)))
