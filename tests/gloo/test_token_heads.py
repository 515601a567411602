"""Models with heads of single tokens over a `SwitchedModel`, against the plain model one row at a time in one process."""

import copy
from functools import partial

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
)
from transformers.models.llama import LlamaForSequenceClassification

from hf_hotspa import HotSPaTrainer, HotSPaTrainingArguments
from hf_hotspa.errors import HotspaError
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from tests.families import MIXTURE, tiny_config, tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double
from tests.switched import worst
from tests.token_heads import (
    ENCODERS,
    OWN,
    PAD,
    adapted,
    batch_of,
    headed,
    masked_lm,
    reference,
    rows,
    t5gemma_encoder,
)

pytestmark = pytest.mark.gloo

SINGLE, MULTI, REAL = "single_label_classification", "multi_label_classification", "regression"
# family, kind of labels, how many, strategies
TWO = (
    ("llama_gqa_bias", SINGLE, 3, ("dp2:16,tp2+sp:64",)),
    ("qwen3_qk_norm_tied", "tokens", 5, ("pp2+v2:64",)),
    ("llama_gqa_bias", "own", 3, ("tp2+sp+rc:64",)),
    ("llama_gqa_bias", "embed", 3, ("tp2+sp:64",)),
    ("llama_gqa_bias", "embed mean", 3, ("cp2+ck9:64",)),
    ("llama_gqa_bias", "embed last", 3, ("tp2+sp+ck7:64",)),
    ("modernbert", SINGLE, 3, ("dp2+z3:16,cp2:64",)),
    ("embeddinggemma", MULTI, 3, ("dp2:16,tp2+sp:64",)),
    ("roberta", "tokens", 5, ("dp2:16,cp2+rc:64",)),
    ("t5gemma", SINGLE, 3, ("dp2:16,cp2+rc:64",)),
    # with an adapter, whose copy of the head is trained; where it is in fp32, the base is in 4 bits
    ("llama_gqa_bias", SINGLE, 3, ("pp2+z2:64",), torch.float64),
    ("llama_gqa_bias", REAL, 1, ("dp2+z3:16,tp2:64",), torch.float32),
)
FOUR = (("embeddinggemma", REAL, 1, ("dp4:16,cp2tp2+sp:64",)),)
EVERY = ("dp2:64", "tp2:64", "pp2:64", "cp2:64", "tp2+sp:64", "tp2+ck9:64", "dp2+z3:64", "dp2+rc:64", "pp2+v2:64", "cp2+ck9+rc:64",
         "pp2+z2:16,tp2+sp+ck7:64")  # fmt: skip
WIDE_2 = tuple(
    (family, kind, labels, EVERY)
    for family, kind, labels in (
        ("llama_gqa_bias", REAL, 1),
        ("qwen3_qk_norm_tied", SINGLE, 5),
        ("gemma2_soft_caps", MULTI, 3),
        ("mistral", "tokens", 3),
        (MIXTURE, REAL, 5),
        ("llama_gqa_bias", "own", 3),
        ("llama_gqa_bias", "embed", 3),
        ("llama_gqa_bias", "embed mean", 3),
        ("llama_gqa_bias", "embed last", 3),
    )
)
ENCODED = ("dp2:64", "cp2:64", "dp2+z2+rc2:64", "dp2+z3:64", "cp2+rc:64", "cp2+z3+rc2:64", "dp2:9,cp2+z2:64",
           "dp2+z3:16,cp2:64")  # fmt: skip
PLANNED = (*ENCODED, "tp2:64", "pp2:64", "tp2+sp:64", "pp2+v2:64", "tp2+z3+rc:64", "pp2+z2:16,tp2+sp:64")
WIDE_ENCODERS = tuple(
    (family, kind, labels, PLANNED if family in ("embeddinggemma", "modernbert") else ENCODED)
    for family, kinds in (
        ("modernbert", ((REAL, 1), (MULTI, 3), ("tokens", 5))),
        ("embeddinggemma", ((REAL, 1), (SINGLE, 3), (SINGLE, 5))),
        ("bert", ((REAL, 1), (MULTI, 3), ("tokens", 5))),
        ("roberta", ((SINGLE, 3),)),
    )
    for kind, labels in kinds
)
WIDE_4 = tuple(
    (family, kind, labels, ("dp4:64", "dp2tp2+z3:64", "cp2tp2+sp:64", "dp4:16,tp2pp2+ck9:64", "dp2pp2+v2+rc:64"))
    for family, kind, labels in (("llama_gqa_bias", SINGLE, 3), ("qwen3_qk_norm_tied", "tokens", 5), (MIXTURE, REAL, 1))
)
ADAPTED = (
    ("llama_gqa_bias", SINGLE, 3, ("dp2:16,tp2+sp:64",), torch.float64),
    ("qwen3_qk_norm_tied", "tokens", 5, ("tp2+z3:64", "cp2+ck9:64"), torch.float64),
    ("llama_gqa_bias", REAL, 1, ("pp2:64",), torch.float32),
)


def errors(rank, world, cases):
    found = {}
    for family, kind, labels, pools, *dtypes in cases:
        of_rows = REAL if kind in OWN else kind
        dtype = dtypes[0] if dtypes else torch.float64
        batches = [
            batch_of(rows(6, of_rows, labels, seed), left=seed % 2 == 1 and family not in (*ENCODERS, "t5gemma"))
            for seed in range(world)
        ]
        if dtype == torch.float32:
            batches = [{n: v.float() if v.is_floating_point() else v for n, v in batch.items()} for batch in batches]
        make = partial(adapted, dtype=dtype, four_bit=dtype == torch.float32) if dtypes else headed
        plain = make(family, kind, labels).train()
        losses, outputs, gradients = reference(plain, batches)
        for pool in pools:
            model = make(family, kind, labels)
            switched = SwitchedModel(model, parse_buckets(pool)).train()
            with exact_in_double(dtype):
                out = switched(**batches[rank])
                out["loss"].backward()
                switched.flush()
                of_all = switched.engine.full_gradients()
                sent = switched._passes.exchange.sent
                sent["numbers_bytes"] = 0
                with torch.no_grad():
                    predicted = switched.eval()(**batches[rank])["logits"]
            places = batches[rank]["attention_mask"] == 1 if predicted.dim() == 3 else slice(None)
            found[f"{family} {kind} {labels} {pool} {dtype}"] = (
                float((out["loss"].detach() - losses[rank]).abs()),
                float((predicted - outputs[rank])[places].abs().max()),
                worst(of_all, gradients),
                sent["numbers_bytes"],
            )
            switched.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, TWO), (4, FOUR)]
    + [pytest.param(2, (case,), marks=pytest.mark.slow) for case in (*ADAPTED, *WIDE_2, *WIDE_ENCODERS)]
    + [pytest.param(4, (case,), marks=pytest.mark.slow) for case in WIDE_4],
)
def test_losses_predictions_and_gradients_are_those_of_the_plain_model(world_size, cases):
    for of_rank in run_ranks(world_size, errors, cases, timeout=400):
        assert len(of_rank) == sum(len(case[3]) for case in cases)
        for name, (*numbers, sent) in of_rank.items():
            if " embed mean " in name or " embed last " in name:  # of pooled rows of another rank, perhaps in two parts
                assert sent <= 2 * 6 * 32 * 8
            limit = 1e-5 if "float32" in name else 1e-11
            assert max(numbers) < limit, (name, numbers)


# -- dropout before a head --------------------------------------------------------------------------------------------


def dropped(rank, world):
    """Logits in training of a batch, and their gradients, under each list of strategies; and without draws."""
    own = batch_of(rows(6, "tokens", 5, rank), left=rank == 1)
    batch = {name: value for name, value in own.items() if name != "labels"}
    found = []
    for pool in ("dp2:64", "tp2+sp:64", "cp2+ck9:64", "pp2:64"):
        model = headed("qwen3_qk_norm_tied", "tokens", 5, classifier_dropout=0.3)
        switched = SwitchedModel(model, parse_buckets(pool)).train()
        with exact_in_double(torch.float64):
            logits = switched(**batch)["logits"] * batch["attention_mask"][..., None]
            weights = torch.linspace(-1.0, 1.0, logits.numel(), dtype=torch.float64).view(logits.shape)
            (logits * weights).sum().backward()
            switched.flush()
            gradients = switched.engine.full_gradients()
            with torch.no_grad():
                without = switched.eval()(**batch)["logits"]
        assert float((without - switched.train()(**batch)["logits"]).abs().max()) > 1e-3  # others are drawn
        # the logits are linear in the head
        of_head = sum(float((gradients[n] * p).sum()) for n, p in model.named_parameters() if n.startswith("score"))
        found.append((logits.detach(), float((logits * weights).sum()), of_head, gradients))
        switched.close()
    return found


def test_dropout_before_a_head_draws_the_same_under_each_strategy():
    by_rank = run_ranks(2, dropped, timeout=200)
    for of_rank in by_rank:
        first = of_rank[0]
        for logits, _, _, gradients in of_rank[1:]:
            assert float((logits - first[0]).abs().max()) < 1e-11
            assert worst(gradients, first[3]) < 1e-11
    for number in range(len(by_rank[0])):  # the pass that gives gradients has the draws of the one that gave the logits
        value = sum(of_rank[number][1] for of_rank in by_rank) / 2
        assert by_rank[0][number][2] == pytest.approx(value, rel=1e-9)


# -- the Trainer ------------------------------------------------------------------------------------------------------


def resumed(rank, world, folder):
    """A run with a checkpoint, the same resumed from it, and the saved model."""
    found = []
    for resume in (None, f"{folder}/checkpoint-2"):
        model = headed("qwen3_qk_norm_tied", "tokens", 5, torch.float32)
        args = HotSPaTrainingArguments(
            folder, per_device_train_batch_size=3, max_steps=4, save_steps=2, logging_steps=1, use_cpu=True, report_to="none",
            disable_tqdm=True, hotspa_strategies="dp2:16@64,tp2:64@128", hotspa_report=False, seed=3,
        )  # fmt: skip
        trainer = HotSPaTrainer(model, args, train_dataset=rows(20, "tokens", 5), data_collator=batch_of)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.engine is not None
        trainer.save_model()
        trainer.close_engine()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    loaded = AutoModelForTokenClassification.from_pretrained(folder)
    in_checkpoint = AutoModelForTokenClassification.from_pretrained(f"{folder}/checkpoint-4")
    return *found, *({name: p.detach() for name, p in m.named_parameters()} for m in (loaded, in_checkpoint))


def test_it_resumes_to_the_same_bits_and_loads_with_its_own_class(tmp_path):
    for first, *others in run_ranks(2, resumed, str(tmp_path), timeout=300):
        assert "score.bias" in first
        for other in others:
            assert first.keys() == other.keys()
            assert all(torch.equal(first[name], other[name]) for name in first)


def test_rows_of_a_stock_collator_and_auto(tmp_path):
    words = {f"w{i}": i for i in range(150)} | {"[PAD]": PAD}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)), pad_token="[PAD]")
    args = HotSPaTrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, eval_strategy="steps", eval_steps=1, use_cpu=True,
        report_to="none", disable_tqdm=True, hotspa_report=False, save_strategy="no",
    )  # fmt: skip
    table = Dataset.from_list(rows(12, SINGLE, 3)).rename_column("labels", "label")
    logs = []
    for cls in (Trainer, HotSPaTrainer):
        model = headed("llama_gqa_bias", SINGLE, 3)
        trainer = cls(model, copy.copy(args), train_dataset=table, eval_dataset=table, processing_class=tokenizer)
        with exact_in_double(torch.float64):
            trainer.train()
        logs.append([log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log])
    assert trainer.engine is not None
    assert len(logs[0]) == 2
    assert logs[1] == pytest.approx(logs[0], rel=1e-6)


def test_a_head_that_answers_questions():
    config = copy.deepcopy(tiny_model("qwen3_qk_norm_tied", torch.float64).config)
    config.pad_token_id = PAD
    torch.manual_seed(1)
    plain = AutoModelForQuestionAnswering.from_config(config, attn_implementation="sdpa").double().train()
    ids = torch.randint(4, 150, (3, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch |= {"start_positions": torch.tensor([1, 4, 2]), "end_positions": torch.tensor([3, 6, 5])}
    switched = SwitchedModel(copy.deepcopy(plain), parse_buckets("dp1:64")).train()
    with exact_in_double(torch.float64):
        plain(**batch)["loss"].backward()
        switched(**batch)["loss"].backward()
        switched.flush()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    found = switched.engine.full_gradients()
    # the softmax over places takes the bias out: its gradient is rounding
    assert float((found.pop("qa_outputs.bias") - gradients.pop("qa_outputs.bias")).abs().max()) < 1e-15
    assert worst(found, gradients) < 1e-11
    batch["attention_mask"][1, 8:] = 0  # its loss is over all places of the batch
    with pytest.raises(HotspaError, match="reads the output at a place where attention_mask is 0"):
        switched(**batch)
    switched.close()


# -- what is refused --------------------------------------------------------------------------------------------------


class _Scaled(LlamaForSequenceClassification):
    """Changes hidden states before its head."""

    def forward(self, input_ids=None, attention_mask=None, **more):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        return {"logits": self.score(2 * hidden)[:, -1]}


class _Other(LlamaForSequenceClassification):
    """Gives its base other tokens than it gets."""

    def forward(self, input_ids=None, attention_mask=None, **more):
        hidden = self.model(input_ids.flip(1), attention_mask=attention_mask).last_hidden_state
        return {"logits": self.score(hidden)[:, -1]}


class _Free(LlamaForSequenceClassification):
    """Has a weight outside of its head."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(()))


class _Mixed(LlamaForSequenceClassification):
    """Its head mixes tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.score = nn.Sequential(_Cumulated(), nn.Linear(config.hidden_size, 1))


class _Cumulated(nn.Module):
    def forward(self, hidden):
        return hidden.cumsum(1)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (_Scaled, "calls 'score' with other values than hidden states"),
        (_Other, "gives its base other input_ids"),
        (_Free, r"has the parameters \['scale'\] outside"),
        (_Mixed, "one mixes tokens"),
    ],
)
def test_another_forward_is_refused(cls, message):
    model = cls(tiny_config("llama_gqa_bias", pad_token_id=PAD, num_labels=1))
    with pytest.raises(HotspaError, match=message):
        SwitchedModel(model, parse_buckets("dp1:64"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # its head has weights, and reads a mean of hidden states
        (
            partial(headed, "modernbert", SINGLE, 3, classifier_pooling="mean"),
            "calls 'head' with other values than hidden",
        ),
        (partial(masked_lm, "bert"), "BertForMaskedLM is not a causal language model"),
        # its masks are not the windows that its attention passes on
        (partial(t5gemma_encoder, "sliding_attention"), "mask that hides other tokens than its windows"),
    ],
)
def test_an_encoder_that_cannot_be_switched_is_refused(make, message):
    with pytest.raises(HotspaError, match=message):
        SwitchedModel(make(), parse_buckets("dp1:64"))


def test_kinds_of_tokens_other_than_0_are_refused():
    switched = SwitchedModel(headed("bert", SINGLE, 3, torch.float32), parse_buckets("dp1:64")).eval()
    batch = batch_of(rows(3, SINGLE, 3))
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    with torch.no_grad():
        switched(**batch)
        batch["token_type_ids"][0, 2] = 1
        with pytest.raises(HotspaError, match="gives its base token_type_ids"):
            switched(**batch)
    switched.close()


def test_flags_of_rows_of_text_are_refused(tmp_path):
    model = headed("llama_gqa_bias", SINGLE, 3)
    for flag in ({"hotspa_overlong": "truncate"}, {"hotspa_mini_batch_size": 6}, {"hotspa_empty_rows": "skip"}):
        args = HotSPaTrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", hotspa_strategies="dp1:64", **flag
        )
        with pytest.raises(HotspaError, match=next(iter(flag))):
            HotSPaTrainer(model, args, train_dataset=rows(4, SINGLE, 3), data_collator=batch_of).train()


# -- a base alone -----------------------------------------------------------------------------------------------------


class _MeanLoss:
    """`compute_loss` of a subclass of a trainer over a base alone."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"].float()
        hidden = model(**{name: value for name, value in inputs.items() if name != "labels"}).last_hidden_state
        mean = (hidden * inputs["attention_mask"][..., None]).sum(1) / inputs["attention_mask"].sum(1, keepdim=True)
        loss = ((mean[:, 0] - labels) ** 2).mean()
        return (loss, {"mean": mean}) if return_outputs else loss


def trained_alone(rank, world, family, strategies, folder):
    from transformers import AutoModel, TrainingArguments

    flags = {"hotspa_strategies": strategies, "hotspa_report": False} if strategies else {}
    args = (HotSPaTrainingArguments if strategies else TrainingArguments)(
        folder, per_device_train_batch_size=6 // world, max_steps=3, logging_steps=1, use_cpu=True, report_to="none",
        disable_tqdm=True, weight_decay=0.1, save_strategy="no", remove_unused_columns=False, label_names=["labels"], **flags,
    )  # fmt: skip
    cls = type("Own", (_MeanLoss, HotSPaTrainer if strategies else Trainer), {})
    trainer = cls(
        headed(family, REAL, 1, torch.float32).base_model, args, train_dataset=rows(18, REAL, 1), data_collator=batch_of
    )
    trainer.train()
    evaluated = trainer.evaluate(rows(6, REAL, 1, seed=2))["eval_loss"]
    trainer.save_model(f"{folder}/final")
    torch.distributed.barrier()
    saved = AutoModel.from_pretrained(f"{folder}/final").state_dict()
    assert not strategies or trainer.engine is not None
    return [*(log["loss"] for log in trainer.state.log_history if "loss" in log), evaluated], saved


@pytest.mark.parametrize(
    "family", ["qwen3_qk_norm_tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("modernbert", "bert"))]
)
def test_a_base_alone_trains_and_is_saved_as_by_the_stock_trainer(family, tmp_path):
    (losses, saved), _ = run_ranks(2, trained_alone, family, "", str(tmp_path / "stock"), timeout=200)
    (ours, own), _ = run_ranks(2, trained_alone, family, "dp2:16,cp2:64", str(tmp_path / "ours"), timeout=200)
    assert len(losses) == 4
    assert ours == pytest.approx(losses, rel=1e-5)
    assert own.keys() == saved.keys()
    assert all(torch.allclose(own[name], value, rtol=0, atol=2e-5) for name, value in saved.items())
