"""What cannot be switched is left to the stock Trainer where no flag asks for more: the same run, resumed and evaluated."""

import random

import pytest
import torch
from torch.nn.utils import parametrizations
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.errors import HotspaError, ModelError, UnsupportedError

_CONFIG = LlamaConfig(
    vocab_size=163, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0,
)  # fmt: skip
_ENCODER = DebertaV2Config(
    vocab_size=163, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_labels=3,
)  # fmt: skip
REASONS = "does not use the attention interface|gradient hook|adafactor|up_proj.weight' has a parametrization"


def _trainer(trainer_class, arguments_class, folder, case, **changes):
    set_seed(0)
    generator = random.Random(0)
    rows = [{"input_ids": [generator.randrange(1, 163) for _ in range(12)]} for _ in range(24)]
    for index, row in enumerate(rows):
        row["labels"] = index % 3 if case == "classes" else list(row["input_ids"])
    model = DebertaV2ForSequenceClassification(_ENCODER) if case == "classes" else LlamaForCausalLM(_CONFIG)
    if case == "hook":
        model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)
    if case == "parametrized":
        parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    if case == "optimizer":
        changes |= {"optim": "adafactor", "neftune_noise_alpha": 5.0, "auto_find_batch_size": True}
    args = arguments_class(
        str(folder), per_device_train_batch_size=4, max_steps=4, use_cpu=True, report_to="none", disable_tqdm=True,
        save_steps=2, eval_strategy="steps", eval_steps=2, logging_steps=1, **changes,
    )  # fmt: skip
    return trainer_class(model, args, train_dataset=rows, eval_dataset=rows, data_collator=default_data_collator)


def _seen(trainer):
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.train(resume_from_checkpoint=True)
    predicted = trainer.predict(trainer.eval_dataset).predictions
    kept = ("loss", "eval_loss", "grad_norm", "step")
    logs = [{key: log[key] for key in kept if key in log} for log in trainer.state.log_history]
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return evaluated, logs, torch.as_tensor(predicted), weights


def test_metrics_beside_the_logits_of_routers_are_left_to_the_stock_trainer(tmp_path):
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    args = HotSPaTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    switched = HotSPaTrainer(MixtralForCausalLM(config), args)
    assert switched._hotspa.backing.reason is None
    trainer = HotSPaTrainer(MixtralForCausalLM(config), args, compute_metrics=lambda found: {})
    assert "output_router_logits" in str(trainer._hotspa.backing.reason)


@pytest.mark.parametrize("case", ["classes", "hook", "optimizer", "parametrized"])
def test_the_run_is_that_of_the_stock_trainer(case, tmp_path, caplog):
    stock = _seen(_trainer(Trainer, TrainingArguments, tmp_path / "stock", case))
    trainer = _trainer(HotSPaTrainer, HotSPaTrainingArguments, tmp_path / "ours", case)
    ours = _seen(trainer)
    assert ours[:2] == stock[:2]
    assert all(map(torch.equal, ours[2:], stock[2:]))
    assert trainer.engine is None
    warnings = [record.message for record in caplog.records if "Nothing is switched" in record.message]
    assert len(warnings) == 1
    with pytest.raises(HotspaError, match=REASONS):
        trainer.switched  # noqa: B018


@pytest.mark.parametrize("case", ["classes", "hook", "optimizer", "parametrized"])
def test_a_flag_refuses_it(case, tmp_path):
    with pytest.raises((ModelError, UnsupportedError), match=REASONS):
        _trainer(HotSPaTrainer, HotSPaTrainingArguments, tmp_path, case, hotspa_strategies="dp1:64").train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_what_the_stock_trainer_cannot_train_either_is_refused(tmp_path):
    trainer = _trainer(HotSPaTrainer, HotSPaTrainingArguments, tmp_path, "hook")
    trainer.data_collator = None  # rows of several lengths need the one of hf_hotspa
    trainer.train_dataset = [{"input_ids": [3, 4, 5][: 1 + index % 3]} for index in range(8)]
    with pytest.raises(UnsupportedError, match="gradient hook"):
        trainer.train()
