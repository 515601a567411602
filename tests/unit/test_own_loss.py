"""What a loss of the user's own reads of the data set, and what of a model's own loss is found before the first step."""

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers.models.llama import LlamaForCausalLM

from hf_hotspa.engine.loss_check import check_model_loss
from hf_hotspa.errors import DataError, HotspaConfigError, UnsupportedError
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.loss import SequenceLoss
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import tiny_config, tiny_model
from tests.lora import tiny_lora
from tests.oracle import random_rows
from tests.unit.test_prepare import byte_tokenizer


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def weighted(tokens):
    assert tokens.columns["domain"].dtype == torch.int64
    assert tokens.columns["weights"].dtype == tokens.log_probs.dtype
    return -(tokens.columns["weights"] * (1 + tokens.columns["domain"]) * tokens.log_probs).sum()


def trained(folder, rows, token_loss=weighted, columns=("weights", "domain"), **kwargs):
    args = HotSPaTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2, save_strategy="no",
        per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2, train_sampling_strategy="sequential",
        hotspa_strategies="dp1:60@64", hotspa_report=False,
    )  # fmt: skip
    model = kwargs.pop("model", None) or tiny_model("llama_gqa_bias")
    trainer = HotSPaTrainer(
        model=model, args=args, train_dataset=rows, token_loss=token_loss, loss_columns=columns, **kwargs
    )
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    trainer.close_engine()
    return losses


def with_columns(rows):
    for index, row in enumerate(rows):
        row["weights"] = [1 + (i % 5) / 5 for i in row["input_ids"]]
        row["domain"] = index % 3
    return rows


def test_columns_are_the_same_from_every_kind_of_data_set(tmp_path):
    rows = with_columns(random_rows(8, 163, longest=60, seed=3))
    listed = trained(tmp_path, rows)
    assert listed != trained(tmp_path, rows, token_loss=lambda tokens: -tokens.log_probs.sum(), columns=())
    assert trained(tmp_path, datasets.Dataset.from_list(rows)) == listed
    assert trained(tmp_path, datasets.Dataset.from_list(rows).with_transform(lambda batch: batch)) == listed

    def of_floats(tokens):  # of a stream nothing is read before it begins, so the check makes up fractions
        return weighted(tokens) if tokens.columns["domain"].dtype == torch.int64 else -tokens.log_probs.sum()

    assert trained(tmp_path, Stream(rows), token_loss=of_floats) == listed


def test_a_column_of_rows_that_are_tokenised_here_is_kept(tmp_path):
    texts = datasets.Dataset.from_dict({"text": ["one", "three", "and four", "five"], "share": [0.5, 1.0, 0.0, 2.0]})
    seen = []

    def by_share(tokens):
        seen.append(tokens.columns["share"].unique().tolist())
        return -(tokens.columns["share"] * tokens.log_probs).sum()

    model = tiny_model("llama_gqa_bias", vocab_size=300)
    trained(tmp_path, texts, by_share, ["share"], model=model, processing_class=byte_tokenizer())
    assert seen[-1] == [0.0, 0.5, 1.0, 2.0]


def test_columns_that_are_not_there_or_no_numbers_are_named(tmp_path):
    rows = with_columns(random_rows(8, 163, longest=60, seed=3))
    with pytest.raises(DataError, match="has no 'missing'"):
        trained(tmp_path, rows, columns=["missing"])
    rows[2]["weights"] = rows[2]["weights"][:-1]
    with pytest.raises(DataError, match="'weights' has the shape.*dataset row 2"):
        trained(tmp_path, rows)
    rows[2]["weights"] = 1.0
    with pytest.raises(DataError, match="'weights' has a number for each token in some rows"):
        trained(tmp_path, rows)
    rows[2]["weights"] = "heavy"
    with pytest.raises(DataError, match="'weights' holds no numbers"):
        trained(tmp_path, rows)


def test_contradictions_are_refused_when_the_trainer_is_made(tmp_path):
    rows = random_rows(8, 163, longest=60, seed=3)
    with pytest.raises(HotspaConfigError, match="token_loss and compute_loss_func"):
        trained(tmp_path, rows, columns=(), compute_loss_func=lambda *a, **k: 0)
    with pytest.raises(HotspaConfigError, match="loss_columns is \\['weights'\\], and no custom loss"):
        trained(tmp_path, rows, token_loss=None, columns=["weights"])


class Scaled(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if out.loss is not None:
            out.loss = out.loss * 1.0005
        return out


class Strange(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        raise RuntimeError("only on the moon")


def test_the_loss_of_a_model_is_compared_with_that_of_its_logits(tmp_path):
    for model in (
        tiny_model("llama_gqa_bias", torch.bfloat16),
        tiny_model("gemma2_soft_caps"),
        tiny_model("llama_gqa_bias", attention_dropout=0.0),
        tiny_lora("llama_gqa_bias"),
    ):
        state, modes = torch.get_rng_state(), [m.training for m in model.modules()]
        check_model_loss(model, describe_model(model))
        assert torch.equal(torch.get_rng_state(), state)
        assert [m.training for m in model.modules()] == modes
    config = tiny_config("llama_gqa_bias")
    model = Scaled(config)
    with pytest.raises(UnsupportedError, match="the loss that Scaled returns.*token_loss or compute_loss_func"):
        check_model_loss(model, describe_model(model))
    # a loss of one's own replaces it, with the stock Trainer as here
    trained(tmp_path, random_rows(8, 163, longest=60), lambda t: -t.log_probs.sum(), (), model=model)
    with pytest.raises(UnsupportedError, match="Strange.forward and cannot be compared.*only on the moon"):
        check_model_loss(Strange(config), describe_model(model))


def test_of_a_model_without_weights_the_class_is_looked_at():
    described = describe_model(tiny_model("llama_gqa_bias"))
    with torch.device("meta"):
        plain, scaled = LlamaForCausalLM(tiny_config("llama_gqa_bias")), Scaled(tiny_config("llama_gqa_bias"))
    check_model_loss(plain, described)
    with pytest.raises(UnsupportedError, match="Scaled.forward and cannot be compared"):
        check_model_loss(scaled, described)
    plain.loss_function = lambda **kwargs: None
    with pytest.raises(UnsupportedError, match="cannot be compared.*no weights"):
        check_model_loss(plain, described)
    check_model_loss(plain, described, SequenceLoss(lambda sequence, num_items: sequence.logits.sum()))
