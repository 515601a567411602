"""Evaluation and prediction: the numbers of the plain model and of the stock Trainer, on any ranks and strategies."""

import math

import numpy as np
import pytest
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.families import tiny_model
from tests.harness import run_ranks
from tests.moves import padded as _pad
from tests.oracle import random_rows

pytestmark = pytest.mark.gloo

# ---- the Trainer's methods, against the stock Trainer

ROWS, EVAL_ROWS = 24, 13
COMMON = {
    "max_steps": 4, "learning_rate": 1e-2, "seed": 7, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True,
    "report_to": "none", "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "save_strategy": "no",
    "include_for_metrics": ["loss", "inputs"],
}  # fmt: skip


def accuracy(seen):
    """A metric that also keeps what it was shown."""

    def compute(prediction):
        seen.append(prediction)
        labels = prediction.label_ids[:, 1:]
        hits = (prediction.predictions[:, :-1].argmax(-1) == labels) & (labels != -100)
        return {"accuracy": hits.sum() / (labels != -100).sum(), "confidence": float(prediction.losses.mean())}

    return compute


class _Predictions(TrainerCallback):
    count = 0

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        assert eval_dataloader is not None
        self.count += 1


_TIMES = ("runtime", "per_second", "preparation_time")


def use_trainer(make, eval_rows, seen):
    counter, trainer = _Predictions(), make()
    trainer.add_callback(counter)
    before = trainer.evaluate()
    first_seen = seen[-1]
    steps = counter.count
    if type(trainer) is Trainer:  # one that was evaluated trains without DDP: accelerate takes the model for prepared
        trainer = make()
    trainer.train()
    after = trainer.evaluate()
    parts = trainer.evaluate({"a": eval_rows[:5], "b": eval_rows[5:]}, metric_key_prefix="check")
    predicted = trainer.predict(eval_rows[:6])
    logs = [
        {k: v for k, v in log.items() if not any(part in k for part in _TIMES)} for log in trainer.state.log_history
    ]
    return {
        "before": before, "after": after, "parts": parts, "logs": logs, "steps": steps,
        "predictions": predicted.predictions, "label_ids": predicted.label_ids, "metrics": predicted.metrics,
        "seen": (first_seen.predictions, first_seen.label_ids, first_seen.inputs, first_seen.losses),
    }  # fmt: skip


def stock_world(rank, world_size, folder):
    seen = []
    rows, eval_rows = make_rows(tiny_model("llama_gqa_bias"))
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=8 // world_size, per_device_eval_batch_size=EVAL_ROWS, **COMMON
    )

    def make():
        return Trainer(
            model=tiny_model("llama_gqa_bias"), args=args, train_dataset=rows, eval_dataset=eval_rows,
            data_collator=_pad, compute_metrics=accuracy(seen),
        )  # fmt: skip

    return use_trainer(make, eval_rows, seen)


def make_rows(model):
    size = model.config.vocab_size
    return random_rows(ROWS, size, longest=60, seed=3), random_rows(EVAL_ROWS, size, longest=60, seed=4)


def hot_trainer(folder, strategies, compute_metrics=None, model=None, rows=None, **options):
    from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
    from hf_hotspa.trainer.trainer import HotSPaTrainer

    model = model or tiny_model("llama_gqa_bias")
    kwargs = {name: options.pop(name) for name in ("callbacks", "preprocess_logits_for_metrics") if name in options}
    train_rows, eval_rows = rows or make_rows(model)
    args = HotSPaTrainingArguments(
        output_dir=folder, hotspa_mini_batch_size=8, hotspa_strategies=strategies, **{**COMMON, **options}
    )
    return HotSPaTrainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        compute_metrics=compute_metrics,
        **kwargs,
    )


def hot_world(rank, world_size, folder, strategies, eval_batch, options):
    seen = []
    trainer = hot_trainer(folder, strategies, accuracy(seen), per_device_eval_batch_size=eval_batch, **options)
    found = use_trainer(lambda: trainer, make_rows(trainer.model)[1], seen)
    trainer.close_engine()
    return found


def same_metrics(found, expected, tolerance=2e-6):
    assert [k for k in found if k not in expected] == []
    assert [k for k in expected if k not in found and "preparation_time" not in k] == []
    for key, value in expected.items():
        if not any(part in key for part in _TIMES):
            assert math.isclose(found[key], value, rel_tol=tolerance), key


BESIDE = dict.fromkeys(("hotspa_overlap_load", "hotspa_overlap_return", "hotspa_second_source"), "on")


@pytest.mark.parametrize(
    ("world_size", "strategies", "options"),
    [pytest.param(1, "dp1:60@128", {}, marks=pytest.mark.slow), (2, "dp2:16@32,tp2:60@64", BESIDE)],
    ids=["1", "2"],
)
def test_the_methods_equal_the_stock_trainers(world_size, strategies, options, tmp_path):
    stocks = run_ranks(world_size, stock_world, str(tmp_path / "stock"))
    per_rank = run_ranks(world_size, hot_world, str(tmp_path / "hot"), strategies, EVAL_ROWS, options)
    for name, (found, stock) in enumerate(zip(per_rank, stocks, strict=True)):
        for part in ("before", "after", "metrics"):
            same_metrics(found[part], stock[part])
        same_metrics(found["parts"], stock["parts"])
        assert found["steps"] == stock["steps"] > 0, name
        kept = [{k: v for k, v in log.items() if not k.startswith("hotspa/")} for log in found["logs"]]
        assert [sorted(log) for log in kept] == [sorted(log) for log in stock["logs"]]
        for log, expected in zip(kept, stock["logs"], strict=True):
            for key, value in expected.items():
                if key not in ("total_flos", "grad_norm"):
                    assert math.isclose(log[key], value, rel_tol=1e-5), (name, key)
        same_arrays(found["predictions"], found["label_ids"], stock["predictions"], stock["label_ids"], 1e-4)
        same_arrays(*found["seen"][:2], *stock["seen"][:2], 1e-5)
        real = stock["seen"][2] != 0
        assert np.array_equal(found["seen"][2][real], stock["seen"][2][real])
        assert np.allclose(found["seen"][3], stock["seen"][3], rtol=1e-6)


def same_arrays(logits, labels, stock_logits, stock_labels, tolerance):
    assert labels.shape == stock_labels.shape
    assert logits.shape == stock_logits.shape
    assert np.array_equal(labels, stock_labels)
    # stock Trainer shows what the model says of padding, too; nobody may look at that
    real = labels != -100
    assert np.abs(logits[real] - stock_logits[real]).max() <= tolerance * np.abs(stock_logits[real]).max()


def loss_world(rank, world_size, folder, strategies):
    """Batches of 2 rows a rank, so several of them and a short last one; the stock Trainer's loss is a mean over batches."""
    trainer = hot_trainer(folder, strategies, per_device_eval_batch_size=2)
    rows = make_rows(trainer.model)[1]
    args = TrainingArguments(output_dir=folder, per_device_eval_batch_size=2, **{**COMMON, "eval_strategy": "no"})
    model = tiny_model("llama_gqa_bias")
    expected = Trainer(model=model, args=args, eval_dataset=rows, data_collator=_pad).evaluate()["eval_loss"]
    found = {}
    for choice in ("longest", "buckets", strategies.split(":")[0]):
        trainer.args.hotspa_eval_strategy = choice
        found[choice] = trainer.evaluate()["eval_loss"]
    trainer.close_engine()
    return expected, found


@pytest.mark.parametrize(
    ("world_size", "strategies"),
    [
        pytest.param(2, "dp2:16@32,tp2:60@64", marks=pytest.mark.slow),
        (2, "dp2:20@32,pp2:60@64"),
    ],
)
def test_the_loss_is_the_stock_trainers_under_every_strategy(world_size, strategies, tmp_path):
    for expected, found in run_ranks(world_size, loss_world, str(tmp_path), strategies):
        for choice, loss in found.items():
            assert math.isclose(loss, expected, rel_tol=1e-6), (strategies, choice)


# ---- what a user can set


def options_world(rank, world_size, folder):
    argmax = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    strategies = "dp2:16@32,tp2:60@64" if world_size == 2 else "dp1:60@64"
    shared = {"eval_strategy": "no", "eval_on_start": False, "include_for_metrics": []}
    found = {}

    def hits(prediction):
        labels = prediction.label_ids[:, 1:]
        return int(((prediction.predictions[:, :-1] == labels) & (labels != -100)).sum()), int((labels != -100).sum())

    trainer = hot_trainer(
        folder, strategies, lambda p: {"hits": hits(p)[0]}, per_device_eval_batch_size=2, **shared, **argmax,
        eval_accumulation_steps=2,
    )  # fmt: skip
    found["whole"] = trainer.evaluate()["eval_hits"]
    found["engine"] = trainer.engine is not None and trainer.state.global_step == 0
    total = [0]

    def batchwise(prediction, compute_result):
        total[0] += hits(prediction)[0]
        return {"hits": total[0]} if compute_result else {}

    trainer.args.batch_eval_metrics, trainer.compute_metrics = True, batchwise
    found["batchwise"] = trainer.evaluate()["eval_hits"]
    trainer.args.batch_eval_metrics, trainer.args.prediction_loss_only = False, True
    trainer.compute_metrics = lambda p: pytest.fail("predictions were collected")
    found["loss only"] = sorted(k for k in trainer.evaluate() if "per_second" not in k and "runtime" not in k)
    trainer.args.prediction_loss_only = False
    trainer.compute_metrics = None
    unlabelled = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 2
    found["no labels"] = math.isnan(trainer.predict(unlabelled).metrics["test_loss"])  # as of the stock Trainer
    trainer.close_engine()
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_options(world_size, tmp_path):
    results = run_ranks(world_size, options_world, str(tmp_path))
    for found in results:
        assert found["whole"] == found["batchwise"]
        assert found["engine"]
        assert found["loss only"] == ["epoch", "eval_loss"]
        assert found["no labels"]
    assert all(found == results[0] for found in results)


def test_the_data_set_of_a_loader_is_the_users(tmp_path):
    [found] = run_ranks(1, loader_world, str(tmp_path))
    assert found["own"] == [True] * 8
    assert found["kept"] == [False, False, False, True, True, False]
    assert found["shape"] == (5, 60, 163)
    assert found["losses"][0] == found["losses"][1]


def loader_world(rank, world_size, folder):
    trainer = hot_trainer(folder, "dp1:60@64", eval_on_start=False)
    rows = [{"input_ids": [7] * 60, "labels": [7] * 60}, *random_rows(4, 163, longest=60, seed=9)]
    trainer.compute_metrics = None
    first = trainer.eval_dataset
    trainer.eval_dataset = {"first": first, "second": rows}
    own, kept = [], []
    for persistent in (False, True):
        trainer.args.dataloader_persistent_workers, trainer.args.dataloader_num_workers = persistent, int(persistent)
        loaders = [trainer.get_eval_dataloader(name) for name in ("first", "first", "second", "second")]
        test = trainer.get_test_dataloader(rows)
        own += [loader.dataset is given for loader, given in zip(loaders[1:], (first, rows, rows), strict=True)]
        own.append(test.dataset is rows)
        kept += [loaders[0] is loaders[1], loaders[2] is loaders[3], test is loaders[2]]
    # the loss alone, then logits, whose rows the same workers are asked for, then the loss again
    losses = [trainer.evaluate(rows)["eval_loss"]]
    output = trainer.evaluation_loop(loaders[2], "Prediction", prediction_loss_only=False)
    losses.append(trainer.evaluate(rows)["eval_loss"])
    del loaders, test
    trainer.close_engine()
    return {"own": own, "kept": kept, "losses": losses, "shape": output.predictions.shape}


def failing_world(rank, world_size, folder):
    from hf_hotspa.errors import HotspaError

    messages = []
    trainer = hot_trainer(folder, "dp2:16@32,tp2:60@64", eval_on_start=False)
    wrong = [{"input_ids": [1, 2, 3]}] * 3 + [{"input_ids": [1, 2, 999]}]
    cases = {
        "range": lambda: trainer.evaluate(wrong),
        "overlong": lambda: trainer.evaluate([{"input_ids": [5] * 61}]),
        "mask": lambda: trainer.evaluate([{"input_ids": [5, 6, 7], "completion_mask": [0, 1]}] * 2),
        "strategy": lambda: trainer.evaluate(),
    }
    for name, action in cases.items():
        trainer.args.hotspa_eval_strategy = "pp2" if name == "strategy" else "longest"
        try:
            action()
            messages.append("")
        except HotspaError as error:
            messages.append(str(error))
    trainer.args.hotspa_eval_strategy = "longest"
    messages.append(trainer.evaluate()["eval_loss"])
    trainer.close_engine()
    return messages


def test_what_is_wrong_is_said_on_every_rank(tmp_path):
    first, second = run_ranks(2, failing_world, str(tmp_path))
    for found in (first, second):
        for text, part in zip(found, ("999", "61 tokens", "completion_mask", "dp2, tp2"), strict=False):
            assert part in text
    assert first[-1] == second[-1] > 0
