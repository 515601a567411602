"""transformers' arguments for FSDP: what `fsdp=` and `fsdp_config=` ask for becomes sharding of the strategies.

`full_shard` (`reshard_after_forward`) is `+z3`, `shard_grad_op` is `+z2`, each for the strategies that do not say so
themselves. What says how FSDP wraps, prefetches and stores has nothing to say here; what would be another result, or
cannot be had, is refused by name. FSDP itself does not run.
"""

from typing import Any

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.trainer.deepspeed_config import read_config

STAGES = {
    "full_shard": 3, "true": 3, "1": 3, "shard_grad_op": 2, "false": 2, "2": 2, "no_shard": 0, "3": 0,
}  # fmt: skip
"""What is sharded -> the stage of ZeRO that it is; `reshard_after_forward` is true or false, or one of the names."""

UNUSED = frozenset(
    (
        "version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap", "min_num_params",
        "forward_prefetch", "backward_prefetch", "backward_prefetch_policy", "limit_all_gathers", "use_orig_params",
        "sync_module_states", "cpu_ram_efficient_loading", "state_dict_type", "xla_fsdp_settings",
    )
)  # fmt: skip
"""Fields that say how FSDP does what the engine does in its own way: units are embedding, layers and head, and the next one
is loaded while one computes."""

_OFF = {
    "activation_checkpointing": "use activation_checkpointing=True of the arguments, or strategies such as dp4+rc+z3",
    "xla": "there is no XLA here; leave it out",
    "xla_fsdp_v2": "there is no XLA here; leave it out",
    "xla_fsdp_grad_ckpt": "there is no XLA here; leave it out",
}
_HYBRID = "the master store is spread over all ranks; use full_shard, or strategies with tp inside a node"


def read_fsdp(fsdp: Any, config: Any) -> tuple[int, bool]:
    """What FSDP's arguments come to.

    Args:
        fsdp: As `TrainingArguments.fsdp`: true, or options in one text or in a list.
        config: As `TrainingArguments.fsdp_config`: a dictionary, or the path of a JSON file.

    Returns:
        The stage of ZeRO (3, 2, or 0 for none), and whether the master store is to be in host memory.

    Raises:
        HotspaConfigError: the file cannot be read, or holds no JSON object.
        UnsupportedError: naming every field that cannot be honoured, and what to use instead.
    """
    if fsdp in (None, False, "", [], "false", "False"):
        return 0, False
    stage, offloads, problems = 3, False, []
    words = [] if fsdp is True else fsdp.replace(",", " ").split() if isinstance(fsdp, str) else list(fsdp)
    for word in (str(getattr(option, "value", option)).lower() for option in words):
        if word == "offload":
            offloads = True
        elif word in STAGES:
            stage = STAGES[word]
        elif word != "auto_wrap":
            problems.append(f"fsdp={word!r}: {_HYBRID if word.startswith('hybrid') else 'no such option is known'}")
    for name, value in read_config(config or {}, "fsdp_config").items():
        field, text = name.removeprefix("fsdp_"), str(getattr(value, "value", value)).lower()
        if field in ("reshard_after_forward", "sharding_strategy"):
            if text not in STAGES:
                why = _HYBRID if text.startswith("hybrid") else f"use one of {', '.join(STAGES)}"
                problems.append(f"fsdp_config.{name}={value!r}: {why}")
            stage = STAGES.get(text, stage)
        elif field in ("cpu_offload", "offload_params"):
            offloads = offloads or text == "true"
        elif field in _OFF:
            if text not in ("false", "none"):
                problems.append(f"fsdp_config.{name}={value!r}: {_OFF[field]}")
        elif field not in UNUSED:
            problems.append(f"fsdp_config.{name}={value!r}: no such field is known")
    if problems:
        raise UnsupportedError(
            f"{len(problems)} of the settings of FSDP cannot be honoured: " + "; ".join(problems),
            fix="change them, or leave them out",
        )
    return stage, offloads


def take_fsdp(args: Any) -> None:
    """Sets what training arguments ask for by `fsdp`, which the stock arguments would start.

    Args:
        args: `HotSPaTrainingArguments` before those of transformers are set up; get `fsdp_stage`.
    """
    args.fsdp_stage, offloads = read_fsdp(vars(args)["fsdp"], vars(args)["fsdp_config"])
    args.fsdp = None
    if offloads:
        args.hotspa_offload = "master"
