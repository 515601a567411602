"""Options of TRL's configs, drawn at random: a run is that of TRL under DDP, or is refused by name before its first step."""

import random
from typing import Any

import pytest

from tests.families import MIXTURE
from tests.trl_runs import DENSE, EVALUATES, Case, compare, hits

pytestmark = pytest.mark.gloo

POOLS = [
    ("dp2:16@64,tp2:128@128", "dp4:16@64,tp2pp2:128@128"),
    ("tp2+sp:16@64,pp2:128@128", "dp2tp2+sp:16@64,pp4:128@128"),
    ("cp2:16@64,dp2+z3:128@128", "cp2dp2:16@64,dp4+z3:128@128"),
    ("dp2+rc:16@64,cp2+ck9:40@64,tp2:128@128", "dp4+rc:16@64,cp4+ck9:40@64,tp4:128@128"),
]
OF_EXPERTS = ("dp2ep2:16@64,tp2:128@128", "dp4ep2:16@64,dp2tp2ep2:128@128")
MAY_REFUSE = ("adafactor",)
PAIRED = ["sigmoid", "hinge", "ipo", "robust", "discopop", "sft", "sigmoid_norm", "exo_pair"]
NOT_WEIGHTED = {"aot", "aot_unpaired", "hinge"}  # with a hinge the backward of TRL itself fails
UNPAIRED = ["nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down"]


class Draw(random.Random):
    def maybe(self, probability: float = 0.5) -> bool:
        return self.random() < probability


def common(draw: Draw) -> dict[str, Any]:
    fields = {
        "per_device_train_batch_size": draw.choice([2, 3, 4]),
        "gradient_accumulation_steps": draw.choice([1, 1, 2]),
        "gradient_checkpointing": draw.maybe(0.3),
        "max_grad_norm": draw.choice([0.0, 0.5, 5.0]),
        "optim": draw.choice(["adamw_torch", "sgd", "adafactor"] if draw.maybe(0.2) else ["adamw_torch", "sgd"]),
        "lr_scheduler_type": draw.choice(["cosine", "linear", "constant"]),
        "max_length": draw.choice([None, 12, 30]),
        "truncation_mode": draw.choice(["keep_start", "keep_end"]),
        "pad_to_multiple_of": draw.choice([None, None, 8]),
        "dataloader_drop_last": draw.maybe(0.3),
        "max_steps": 3,
    }
    if draw.maybe():
        fields |= EVALUATES | {"eval_steps": 2, "per_device_eval_batch_size": draw.choice([1, 3])}
    return fields


def sft(draw: Draw) -> tuple[str, dict[str, Any]]:
    data, fields = draw.choice(["text", "completions", "chats"]), common(draw)
    fields |= {
        "loss_type": draw.choice(["nll", "nll", "dft"]),
        "average_tokens_across_devices": draw.maybe(0.8),
        "shuffle_dataset": draw.maybe(0.3),
        "max_length": draw.choice([None, 60]) if data == "chats" else fields["max_length"],
        "completion_only_loss": draw.choice([None, False] if data != "completions" else [None, True, False]),
        "assistant_only_loss": data == "chats" and draw.maybe(),
    }
    how = draw.choice(["", "", "padding_free", "bfd", "bfd_split", "wrapped"])
    if how == "padding_free":
        fields |= {"padding_free": True, "max_length": None}
    elif how:
        fields |= {"packing": True, "packing_strategy": how, "max_length": draw.choice([24, 60]), "max_steps": 2}
        fields |= {"eval_packing": draw.choice([None, False]), "per_device_train_batch_size": draw.choice([1, 2])}
    elif draw.maybe(0.2):
        fields |= {"label_smoothing_factor": 0.1, "loss_type": "nll"}
    return data, fields


def preferences(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of DPO and KTO alike."""
    fields |= {"beta": draw.choice([0.05, 0.1, 0.7]), "disable_dropout": draw.maybe(0.8)}
    if draw.maybe(0.4):
        fields |= {"precompute_ref_log_probs": True, "precompute_ref_batch_size": draw.choice([None, 3])}
    elif draw.maybe(0.3):
        fields |= {"sync_ref_model": True, "ref_model_sync_steps": draw.choice([1, 2]), "ref_model_mixup_alpha": 0.4}
    return fields


def dpo(draw: Draw) -> tuple[str, dict[str, Any]]:
    fields, divergence = preferences(draw, common(draw)), draw.maybe(0.3)
    losses = draw.sample(PAIRED if divergence else PAIRED + UNPAIRED, draw.choice([1, 1, 2, 3]))
    fields |= {
        "loss_type": losses,
        "label_smoothing": 0.1 if {"exo_pair", "robust"} & set(losses) else draw.choice([0.0, 0.1]),
        "ld_alpha": draw.choice([None, None, 0.4]),
        "use_weighting": not NOT_WEIGHTED & set(losses) and draw.maybe(0.3),
    }
    if len(losses) > 1:
        fields["loss_weights"] = [draw.choice([0.2, 1.0, 1.5]) for _ in losses]
    if divergence:
        fields["f_divergence_type"] = draw.choice(["forward_kl", "js_divergence"])
    return "pairs", fields


def kto(draw: Draw) -> tuple[str, dict[str, Any]]:
    fields = preferences(draw, common(draw))
    del fields["truncation_mode"]
    fields |= {
        "loss_type": draw.choice(["kto", "apo_zero_unpaired"]),
        "desirable_weight": draw.choice([0.6, 1.0]),
        "undesirable_weight": draw.choice([1.0, 1.4]),
        "per_device_train_batch_size": 4,  # of fewer rows, a rank may have none of a kind, and TRL fails
        "per_device_eval_batch_size": 4,
    }
    return "judged", fields


def drawn(seed: int) -> Case:
    draw = Draw(seed)
    kind, make = [("SFT", sft), ("DPO", dpo), ("KTO", kto)][seed % 3]
    data, fields = make(draw)
    syncs = fields.get("sync_ref_model", False)
    family = draw.choice([DENSE, DENSE, DENSE, "qwen3_qk_norm_tied", "gemma2_soft_caps", MIXTURE])
    lora = not syncs and family != MIXTURE and draw.maybe(0.3)
    if family == MIXTURE:
        fields["router_aux_loss_coef"] = draw.choice([None, 0.0, 0.3])
    metrics = draw.maybe(0.2) and "eval_strategy" in fields and not (kind == "SFT" and fields.get("padding_free"))
    # a live reference that is not given would be loaded by the name of the model, which has none here
    reference = kind != "SFT" and not lora and (syncs or "precompute_ref_log_probs" not in fields or draw.maybe(0.3))
    pools = OF_EXPERTS if family == MIXTURE else draw.choice(POOLS)
    given = (lambda: {"compute_metrics": hits}) if metrics and not fields.get("packing") else dict
    return Case(kind, pools, data, fields, lora, reference, family, given, may_refuse=MAY_REFUSE)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_what_is_drawn_is_equal_or_refused(part, tmp_path):
    compare(__name__, tmp_path, range(10 * part, 10 * part + 10), "drawn")
