"""The generated table of model families, for code that must not import transformers.

`python -m tests.family_table` writes `hf_hotspa/cost/families.json` from the config classes of the installed
transformers: which causal language models have a tensor-parallel and a pipeline plan, and how their configs name
things. No model is built.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hotspa.cost.model_config import FAMILIES_FILE, FAMILIES_KIND, FAMILIES_VERSION, FIELDS

_DEFAULTS = ("num_key_value_heads", "head_dim", "tie_word_embeddings")


def _family(config: Any) -> dict[str, object]:
    plan = config.base_model_tp_plan or {}
    found: dict[str, object] = {"tp": bool(plan), "pp": bool(config.base_model_pp_plan)}
    if leaves := {name.rpartition(".")[2] for name in plan if ".mlp" in name}:
        found["gated"] = bool(leaves & {"gate_proj", "gate_up_proj"})
    names = dict(config.attribute_map)
    if aliases := {name: names[name] for name in FIELDS if name in names}:
        found["aliases"] = aliases
    defaults = {name: getattr(config, name, None) for name in _DEFAULTS}
    if given := {name: value for name, value in defaults.items() if type(value) in (int, bool) and value}:
        found["defaults"] = given
    return found


def family_table() -> dict[str, object]:
    """The contents of the file."""
    families = {name: _family(CONFIG_MAPPING[name]) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    return {
        "kind": FAMILIES_KIND,
        "schema_version": FAMILIES_VERSION,
        "transformers": __version__,
        "families": families,
    }


def render(table: Mapping[str, Any]) -> str:
    """The text of the file: a line for each family."""
    head = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in table.items() if key != "families")
    rows = ",\n".join(f'"{name}": {json.dumps(family)}' for name, family in table["families"].items())
    return f'{{\n{head},\n"families": {{\n{rows}\n}}\n}}\n'


if __name__ == "__main__":
    Path(FAMILIES_FILE).write_text(render(family_table()))
