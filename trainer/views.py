"""When `trainer.model` is brought up to date in the course of training: before somebody of the user's may look at it.

Owns `ViewsMixin`. Bringing the weights back is collective and costs a pass over all of them, so it is done where ranks
are together, for the events that come now and then, and only if code of the user's is there to look: a callback that
defines the event, `compute_metrics`, an overridden method. Everywhere else looking is an error (`stale_weights`).
"""

from collections.abc import Iterator
from typing import Any

from hf_hotspa.engine.loading import has_weights
from hf_hotspa.trainer.base import TrainerBase
from hf_hotspa.trainer.model_source import ModelSource

LOG, EVALUATION, SAVE = "log", "evaluation", "save"

_LOOKERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    LOG: (("on_log",), ("log",)),
    EVALUATION: (
        ("on_evaluate", "on_predict", "on_prediction_step"),
        ("evaluate", "_evaluate", "evaluation_loop", "predict", "compute_metrics", "preprocess_logits_for_metrics"),
    ),
    SAVE: (("on_save",), ("_save_checkpoint",)),
}
"""Occasion -> the events of callbacks and the attributes of the trainer that belong to it; any other is an event itself."""


def is_users(function: Any) -> bool:
    """Whether a function or method was written by somebody else than transformers and this package."""
    if function is None:
        return False
    return (getattr(function, "__module__", None) or "").split(".")[0] not in ("transformers", "hf_hotspa")


class ViewsMixin(TrainerBase):
    """Brings `trainer.model` up to date for those who may look at it."""

    _source: ModelSource

    def _lookers(self, occasion: str) -> Iterator[Any]:
        events, attributes = _LOOKERS.get(occasion, ((occasion,), ()))
        yield from (getattr(self, name, None) for name in attributes)
        for callback in self.callback_handler.callbacks:
            yield from (getattr(callback, event, None) for event in events)

    def _show_model(self, occasion: str) -> None:
        """Brings `trainer.model` up to date if anybody on any rank may look at it now. Collective."""
        if self.engine is None or self._source.is_current or not has_weights(self.model):
            return
        if self.engine.any_rank(any(map(is_users, self._lookers(occasion)))):  # callbacks may be on one rank alone
            self._update_model()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._show_model(LOG)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._show_model(EVALUATION)  # an overridden evaluate() may look before it calls ours
        metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._show_model(SAVE)
