"""TRL's trainers with a teacher over a switched model against TRL's own under DDP on as many ranks, in fp64."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.gloo.test_trl_options import POOLS, Draw
from tests.trl_runs import EVALUATES, Case, calling, compare, hits, look, small, worlds

pytestmark = pytest.mark.gloo

MIX = (
    "dp2:16@64,tp2+sp:20@64,cp2+rc:24@64,pp2:28@64,dp2+z3:32@64,tp2+ck9:128@128",
    "dp4+rc:16@64,dp2tp2+sp:20@64,cp2dp2:24@64,tp2pp2:28@64,dp4+z3:32@64,dp2pp2+v2:128@128",
)
TWO = ("dp2:20@64,tp2:128@128", "dp4:20@64,cp2tp2:128@128")
SHORT = {"max_completion_length": 32, "per_device_eval_batch_size": 4, "disable_dropout": False}
GREEDY = {"top_k": 1, "max_completion_length": 6}
SERVER = {"teacher_model_server_url": "http://localhost:1"}
NEARLY_GREEDY = {"temperature": 1e-4, "max_new_tokens": 6}


def taught(family: str = "qwen3_qk_norm_tied", dtype: torch.dtype = torch.float64, **sizes: Any) -> Any:
    """Arguments with a teacher, of another size than the student."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 5} | sizes
    return lambda: {"teacher_model": small(family, dtype, seed=7, **sizes)}


CASES = {
    "reverse": Case("Distillation", TWO, "prompts", {**SHORT, **EVALUATES}, given=taught()),
    "with tools": Case(
        "Distillation", TWO, "questions", {**SHORT, "max_tool_calling_iterations": 3, "max_completion_length": 48},
        given=lambda: {**taught()(), "tools": [look], "processing_class": calling()}, wide=True,
    ),
    "that generates": Case("Distillation", TWO, "prompts", {**SHORT, **GREEDY, **EVALUATES}, generates=True, given=taught(), wide=True),
    "gkd": Case("GKD", TWO, "chats", {"lmbda": 0.0, "beta": 0.3, "gradient_accumulation_steps": 2, **EVALUATES}, given=taught(), wide=True),
    "gkd that generates": Case("GKD", TWO, "chats", {"lmbda": 0.5, "beta": 1.0, **NEARLY_GREEDY}, given=taught(), wide=True),
    "gkd whose teacher generates": Case("GKD", TWO, "chats", {"lmbda": 0.0, "seq_kd": True, **NEARLY_GREEDY}, given=taught(), wide=True),
    "gkd with metrics": Case("GKD", TWO, "chats", {"lmbda": 0.0, **EVALUATES}, given=lambda: {**taught()(), "compute_metrics": hits}, wide=True),
    "server, forward": Case(
        "ServerDistillation", TWO, "prompts", {**SHORT, **SERVER, "beta": 0.0, "loss_top_k": 5, **EVALUATES}, given=lambda: served(), wide=True
    ),
    "fp32": Case("Distillation", TWO, "prompts", SHORT, dtype=torch.float32, given=taught(dtype=torch.float32), wide=True),
}  # fmt: skip
CASES["reverse of six kinds"] = replace(CASES["reverse"], pools=MIX, wide=True)


class Server:
    """In the place of TRL's client: a teacher in this process."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.model = small("qwen3_qk_norm_tied", seed=7, hidden_size=96).eval()

    def get_sequence_logprobs(
        self, sequences: Any, prompt_lengths: Any, top_logprobs: int, temperature: float
    ) -> dict[str, Any]:
        names = ("logprobs", "logprob_token_ids", "actual_logprobs")
        answers: dict[str, list[Any]] = {name: [] for name in names}
        for ids, begin in zip(sequences, prompt_lengths, strict=True):
            with torch.no_grad():
                log_p = (self.model(torch.tensor([ids])).logits[0, begin - 1 : -1] / temperature).log_softmax(-1)
            top = log_p.topk(top_logprobs, -1)
            own = log_p.gather(-1, torch.tensor(ids[begin:])[:, None])
            for name, table in zip(names, (top.values, top.indices, own), strict=True):
                answers[name].append(table.tolist())
        return answers


def served() -> dict[str, Any]:
    """Puts `Server` in the place of TRL's client, in this rank's process; no further arguments."""
    client: Any = import_module("trl.generation.vllm_client")
    client.VLLMClient = Server
    return {}


@pytest.mark.parametrize(("world_size", "names"), worlds(CASES, together=True))
def test_it_is_trl_under_ddp(world_size, names, tmp_path):
    compare(__name__, tmp_path, names, world_size=world_size)


# -- drawn combinations ------------------------------------------------------------------------------------------------


def drawn(seed: int) -> Case:
    draw = Draw(5000 + seed)
    kind = ("Distillation", "Distillation", "GKD", "ServerDistillation")[seed % 4]
    fields: dict[str, Any] = {
        "beta": draw.choice([0.0, 0.2, 0.5, 1.0]), "gradient_accumulation_steps": draw.choice([1, 1, 2]),
        "max_grad_norm": draw.choice([0.0, 0.5]), "optim": draw.choice(["adamw_torch", "sgd"]),
        "gradient_checkpointing": draw.maybe(0.3), "disable_dropout": draw.maybe(0.3), "max_steps": 3,
        "pad_to_multiple_of": draw.choice([None, None, 8]), "shuffle_dataset": draw.maybe(0.5),
    }  # fmt: skip
    if draw.maybe(0.5):
        fields |= EVALUATES | {"eval_steps": 2, "per_device_eval_batch_size": 4}
    family = draw.choice(["llama_gqa_bias", "qwen3_qk_norm_tied", "gemma2_soft_caps", "olmo2"])
    lora, pools = draw.maybe(0.3), draw.choice(POOLS)
    given = taught(
        draw.choice(["llama_gqa_bias", "qwen3_qk_norm_tied", "gemma2_soft_caps", "phi3_fused", "mixtral"]),
        num_hidden_layers=4,
    )
    if kind == "GKD":
        fields |= {"lmbda": draw.choice([0.0, 0.5]), "seq_kd": draw.maybe(0.3), **NEARLY_GREEDY}
        return Case(kind, pools, "chats", fields, lora, family=family, given=given)
    fields |= {"temperature": draw.choice([1.0, 0.7]), "max_completion_length": 32}
    if kind == "ServerDistillation":
        fields |= {
            **SERVER,
            "loss_top_k": draw.choice([1, 4]) if fields["beta"] == 0.0 else 1,
            "loss_add_tail": draw.maybe(0.5),
        }
        return Case(kind, pools, "prompts", fields, lora, family=family, given=served)
    return Case(kind, pools, "prompts", fields, lora, family=family, given=given)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_what_is_drawn_is_equal(part, tmp_path):
    compare(__name__, tmp_path, range(10 * part, 10 * part + 10), "drawn")
