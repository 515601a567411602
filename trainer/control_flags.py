"""What callbacks ask for through `TrainerControl`, agreed on by all ranks.

Saving, evaluating and logging are done by all ranks together, and so is the end of training. A callback may see something
on one rank alone (the time that is left, a file, a memory limit): what it asks for there is done on all ranks, where the
stock Trainer's ranks would wait for each other.
"""

from typing import Any

from hf_hotspa.trainer.base import TrainerBase
from hf_hotspa.trainer.views import is_users

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_ACTIONS = FLAGS[2:]


class ControlFlagsMixin(TrainerBase):
    """Agrees on the flags of `self.control` wherever the loop of the Trainer is about to read them.

    Costs one small collective a step (more where it logs, saves or evaluates), and none where no rank has code of the
    user's that could set a flag.
    """

    _flags_may_differ: bool | None = None
    _in_loop = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in `CheckpointingMixin`."""
        self._flags_may_differ = None
        return super().train(*args, **kwargs)

    def _agree_on_flags(self) -> None:
        """A flag that is set on any rank is set on all. Collective."""
        if self.args.world_size == 1:
            return
        if self._flags_may_differ is None:
            kinds = [type(self), *map(type, self.callback_handler.every)]
            self._flags_may_differ = bool(self._agreement().gather([float(any(map(is_users, kinds)))]).any())
        if not self._flags_may_differ:
            return
        asked = self._agreement().gather([float(getattr(self.control, name)) for name in FLAGS]).amax(dim=0)
        for name, value in zip(FLAGS, asked.tolist(), strict=True):
            setattr(self.control, name, bool(value))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._agree_on_flags()
        acts, self._in_loop = any(getattr(self.control, name) for name in _ACTIONS), True
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        finally:
            self._in_loop = False
        if acts:  # on_log, on_evaluate and on_save may have asked for something, too
            self._agree_on_flags()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in transformers."""
        super().log(logs, start_time)
        if self._in_loop:  # else it may be a call on one rank alone
            self._agree_on_flags()

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        self._agree_on_flags()
        return metrics
