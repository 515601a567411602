"""An error that a script has caught on all ranks is over: the next one is told as it is."""

import pytest
from transformers import TrainerCallback

from hf_hotspa.errors import HotspaError
from tests.gloo.test_preemption import evaluate_every
from tests.harness import run_ranks
from tests.training_runs import make_trainer, train

pytestmark = pytest.mark.gloo


class BreakLater(TrainerCallback):
    """From step 2 on, this rank cannot clip gradients."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.trainer.engine.clip_grad_norm_ = self.fail

    def fail(self, limit):
        raise ValueError("the second error")


def caught_then_failed(rank, world, folder, new_engine):
    def metrics(prediction):
        raise ValueError("the first error")

    broken = BreakLater()
    trainer = make_trainer(folder, world, save_strategy="no", ddp_timeout=30, callbacks=[broken] if rank == 1 else [])
    broken.trainer = trainer
    evaluate_every(trainer, 1000)
    trainer.compute_metrics = metrics
    for _ in range(2):
        with pytest.raises(ValueError, match="the first error"):
            trainer.evaluate()
    trainer.compute_metrics = None
    if new_engine:
        trainer.close_engine()
    train(trainer)


@pytest.mark.parametrize("new_engine", [False, True])
def test_an_error_that_was_caught_is_not_told_again(tmp_path, new_engine):
    other, failed = run_ranks(2, caught_then_failed, str(tmp_path), new_engine, expect_failure=True)
    assert "the second error" in str(failed.exception), failed.describe()
    assert isinstance(other.exception, HotspaError), other.describe()
    assert "the second error" in str(other.exception)
    assert "the first error" not in str(other.exception)
