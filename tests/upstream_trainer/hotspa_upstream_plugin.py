"""The pytest plugin of `python -m tests.upstream_trainer`: puts our Trainer in place of the stock one, notes what became of each
test, and with HOTSPA_UPSTREAM_SWAP swaps the toy regression models for a tiny language model. With HOTSPA_UPSTREAM_TRL it puts
our five trainers and configs in place of TRL's.

It lies in a folder of its own, which is all of this repository that those tests can import: their package has the name
`tests`, too.
"""

import functools
import json
import os
import sys
from typing import Any

import pytest

OURS, SWAP = os.environ["HOTSPA_UPSTREAM"] == "ours", os.environ.get("HOTSPA_UPSTREAM_SWAP") == "1"
TRL = os.environ.get("HOTSPA_UPSTREAM_TRL") == "1"
TOYS = ("RegressionModel", "RegressionDictModel", "RegressionPreTrainedModel", "RegressionRandomPreTrainedModel")
_begun = 0
_notes: dict[str, dict[str, Any]] = {}


def pytest_configure(config: pytest.Config) -> None:
    if TRL:
        _train_on_cpu()
    if not OURS:
        return
    import hf_hotspa.trl as ours
    from hf_hotspa.engine.engine import HotSPaEngine
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    # one process can do one thing: no calibration in front of every test; the shortest of those models has 128 positions
    default = HotSPaTrainingArguments.__dataclass_fields__["hotspa_strategies"]
    default.default = "dp1:1024@4096" if TRL else "dp1:128@2048"
    original = HotSPaTrainingArguments.complete

    def explicit(self: Any) -> None:
        if self.hotspa_strategies == "auto":
            self.hotspa_strategies = default.default
        self.hotspa_report = False
        self.hotspa_stock_checkpoints = True  # the files that they look for
        original(self)

    HotSPaTrainingArguments.complete = explicit  # type: ignore[method-assign]
    step = HotSPaEngine.forward_backward  # not of the trainer, where it would pass for an override of the user's

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _begun
        _begun += 1
        return step(self, *args, **kwargs)

    HotSPaEngine.forward_backward = counted  # type: ignore[method-assign]
    maker: Any = ours.OverTRL if TRL else HotSPaTrainer
    made = maker.__init__

    @functools.wraps(made)
    def begins(self: Any, *args: Any, **kwargs: Any) -> None:
        global _begun
        _begun = 0  # the first step is the one of this trainer: a test may have trained with another
        made(self, *args, **kwargs)

    maker.__init__ = begins
    if not TRL:
        # the package's own init can run twice: the module object that counts is the one of now
        sys.modules["transformers"].Trainer = HotSPaTrainer  # type: ignore[attr-defined]
        return
    import trl

    for name, cls in _ours_of_trl().items():
        setattr(trl, name, cls)


def _train_on_cpu() -> None:
    """Configs of TRL are in bf16, which a CPU has to be chosen for."""
    from transformers import TrainingArguments

    made = TrainingArguments.__post_init__

    @functools.wraps(made)
    def on_cpu(self: Any) -> None:
        self.use_cpu = True
        made(self)

    TrainingArguments.__post_init__ = on_cpu  # type: ignore[method-assign]


def pytest_collection_finish(session: pytest.Session) -> None:
    import transformers

    for module in {item.module for item in session.items if hasattr(item, "module")}:
        names, ours = vars(module), _ours_of_trl()
        other = any(names[name] is not ours[name] for name in ours.keys() & names.keys())
        if OURS and (other or names.get("Trainer") is transformers.trainer.Trainer):
            raise pytest.UsageError(f"{module.__name__} runs with the stock Trainer")
    if not SWAP:
        return
    from transformers import LlamaForCausalLM

    # what the tests look at: two numbers of the toy, here two weights of every model
    LlamaForCausalLM.a = property(lambda model: model.model.norm.weight[0])
    LlamaForCausalLM.b = property(lambda model: model.lm_head.weight[3, 0])
    swapped: dict[str, Any] = {"get_regression_trainer": _language_trainer, "RegressionDataset": TokenRows}
    swapped["AlmostAccuracy"] = TokenAccuracy
    swapped |= dict.fromkeys(TOYS, TinyModel)
    packages = {item.module.__name__.rpartition(".")[0] for item in session.items if hasattr(item, "module")}
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[0] in packages:
            for toy in swapped.keys() & vars(module).keys():
                setattr(module, toy, swapped[toy])


def _ours_of_trl() -> dict[str, Any]:
    import hf_hotspa.trl as ours

    return {name: getattr(ours, name) for name in ours.__all__} if TRL else {}


class TokenRows:
    """In place of upstream's `RegressionDataset`: `length` rows of 12 tokens."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int = 42, label_names: Any = None) -> None:
        import torch

        drawn = torch.randint(3, 100, (length, 12), generator=torch.Generator().manual_seed(seed)).tolist()
        self.rows = [{"input_ids": ids, "labels": ids} for ids in drawn]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class TokenAccuracy:
    """In place of upstream's `AlmostAccuracy`: the share of tokens that are predicted."""

    def __call__(self, eval_pred: Any) -> dict[str, float]:
        predictions, labels = eval_pred
        return {"accuracy": float((predictions[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


class TinyModel:
    """In place of upstream's regression models: makes a tiny Llama, whatever it is called with."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=100, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            pad_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    @staticmethod
    def from_pretrained(folder: str) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(folder)


def _language_trainer(
    a: float = 0, b: float = 0, double_output: bool = False, train_len: int = 64, eval_len: int = 64,
    pretrained: bool = True, output_dir: str | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """In place of upstream's `get_regression_trainer`: rows of tokens and a tiny Llama."""
    import transformers
    from transformers import TrainingArguments

    for name in ("label_names", "optimizers", "keep_report_to"):  # of the toy's parameters and columns
        kwargs.pop(name, None)
    own = {
        name: kwargs.pop(name, None) for name in ("compute_metrics", "data_collator", "preprocess_logits_for_metrics")
    }
    model_init = kwargs.pop("model_init", None)
    args = TrainingArguments(output_dir, **kwargs)
    return transformers.Trainer(
        None if model_init else TinyModel(), args, train_dataset=TokenRows(length=train_len),
        eval_dataset=TokenRows(length=eval_len), model_init=TinyModel if model_init else None, **own,
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
