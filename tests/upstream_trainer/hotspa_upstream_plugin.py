"""The pytest plugin of `python -m tests.upstream_trainer`: puts our Trainer in place of the stock one, notes what became of each
test, and with HOTSPA_UPSTREAM_SWAP swaps the toy regression models for a tiny language model.

It lies in a folder of its own, which is all of this repository that those tests can import: their package has the name
`tests`, too.
"""

import json
import os
from typing import Any

import pytest

OURS, SWAP = os.environ["HOTSPA_UPSTREAM"] == "ours", os.environ.get("HOTSPA_UPSTREAM_SWAP") == "1"
_begun = 0
_notes: dict[str, dict[str, Any]] = {}


def pytest_configure(config: pytest.Config) -> None:
    if not OURS:
        return
    import transformers

    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    # one process can do one thing: no calibration in front of every test
    original = HotSPaTrainingArguments.__post_init__

    def explicit(self: Any) -> None:
        if self.hotspa_strategies == "auto":
            self.hotspa_strategies = "dp1:4096@4096"
        self.hotspa_report = False
        original(self)

    HotSPaTrainingArguments.__post_init__ = explicit  # type: ignore[method-assign]
    step = HotSPaTrainer.training_step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _begun
        _begun += 1
        return step(self, *args, **kwargs)

    HotSPaTrainer.training_step = counted  # type: ignore[method-assign]
    transformers.Trainer = HotSPaTrainer


def pytest_collection_finish(session: pytest.Session) -> None:
    if SWAP:
        for module in {item.module for item in session.items if hasattr(item, "module")}:
            if hasattr(module, "get_regression_trainer"):
                module.get_regression_trainer = _language_trainer


def _language_trainer(
    a: float = 0, b: float = 0, double_output: bool = False, train_len: int = 64, eval_len: int = 64,
    pretrained: bool = True, output_dir: str | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """In place of upstream's `get_regression_trainer`: rows of tokens and a tiny Llama."""
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    def rows(count: int) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(42)
        drawn = torch.randint(3, 100, (count, 12), generator=generator).tolist()
        return [{"input_ids": ids, "labels": ids} for ids in drawn]

    def make() -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=100, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            pad_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    for name in ("label_names", "optimizers"):  # of the toy's parameters and columns
        kwargs.pop(name, None)
    own = {
        name: kwargs.pop(name, None) for name in ("compute_metrics", "data_collator", "preprocess_logits_for_metrics")
    }
    model_init = kwargs.pop("model_init", None)
    args = TrainingArguments(output_dir, **kwargs)
    return transformers.Trainer(
        None if model_init else make(), args, train_dataset=rows(train_len), eval_dataset=rows(eval_len),
        model_init=make if model_init else None, **own,
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _begun
    _begun = 0


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    outcome = yield
    report = outcome.get_result()
    if report.when != "call" and not (report.when == "setup" and not report.passed):
        return
    note: dict[str, Any] = {"outcome": report.outcome}
    if call.excinfo is not None and report.failed:
        error: Any = call.excinfo.value
        note["error"] = f"{type(error).__name__}: {error}"[:600]
        note["code"] = getattr(error, "code", None) if _is_ours(error) else None
        note["steps"] = _begun
    _notes[item.nodeid] = note


def _is_ours(error: BaseException) -> bool:
    return any(cls.__module__ == "hf_hotspa.errors" for cls in type(error).__mro__)


def pytest_sessionfinish(session: pytest.Session) -> None:
    with open(os.environ["HOTSPA_UPSTREAM_NOTES"], "w") as file:
        json.dump(_notes, file)
