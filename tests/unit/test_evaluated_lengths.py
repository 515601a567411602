"""Rows that are evaluated: their lengths are looked at before the first step, with `auto` and with strategies given."""

import pytest

from hf_hotspa.costs.terms import Cost
from hf_hotspa.errors import OverlongError
from hf_hotspa.trainer import run_plan
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.calibrations import made_calibration
from tests.families import tiny_model
from tests.oracle import random_rows

SHORT, LONG = random_rows(8, 160, longest=24, seed=1), random_rows(8, 160, longest=60, seed=2)
LONGEST = max(len(row["input_ids"]) for row in LONG)


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(
        run_plan,
        "calibrate",
        lambda config, **kwargs: made_calibration(tiny_model("llama_gqa_bias"), 1, {1: Cost(1e-9, 4e-6, 1e-5)}),
    )
    trainers = []

    def made(sets, **options):
        common = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "disable_tqdm": True}
        common |= {"max_steps": 2, "eval_steps": 1, "save_strategy": "no", "hotspa_report": False}
        args = HotSPaTrainingArguments(**{**common, **options})
        trainers.append(HotSPaTrainer(model=tiny_model("llama_gqa_bias"), args=args, **sets))
        return trainers[-1]

    yield made
    for trainer in trainers:
        trainer.close_engine()


@pytest.mark.parametrize("evaluated", [LONG, {"a": SHORT, "b": LONG}])
def test_auto_holds_the_longest_row_of_both_sets(make, evaluated):
    trainer = make({"train_dataset": SHORT, "eval_dataset": evaluated}, eval_strategy="steps")
    trainer.train()
    assert trainer.engine.buckets[-1].longest == LONGEST
    assert len([log for log in trainer.state.log_history if any("eval" in key for key in log)]) >= 2


def test_auto_evaluates_and_predicts_without_a_train_set(make):
    trainer = make({"eval_dataset": {"a": SHORT, "b": LONG}})
    assert {"eval_a_loss", "eval_b_loss"} <= trainer.evaluate().keys()
    assert trainer.engine.buckets[-1].longest == LONGEST
    alone = make({})
    found = alone.predict(LONG)
    assert found.predictions.shape[:2] == (8, LONGEST)
    trained = make({"train_dataset": SHORT})  # what it is asked for first counts, too
    assert trained.evaluate(LONG)["eval_loss"] > 0


def test_an_evaluation_row_that_does_not_fit_ends_the_run_before_the_first_step(make):
    sets = {"train_dataset": SHORT, "eval_dataset": LONG}
    for options in ({"hotspa_strategies": "dp1:32@64"}, {"hotspa_longest": 32}):
        trainer = make(sets, eval_strategy="steps", **options)
        with pytest.raises(OverlongError, match=str(LONGEST)):
            trainer.train()
        assert trainer.state.global_step == 0
        trainer.close_engine()
    make(sets, hotspa_strategies="dp1:32@64").train()  # without evaluations nothing has to fit
    cut = make(sets, eval_strategy="steps", hotspa_strategies="dp1:32@64", hotspa_overlong="truncate")
    cut.train()
    assert cut.state.global_step == 2
