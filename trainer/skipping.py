"""Mini-batches that are skipped because their loss or gradient is not finite (`hotspa_skip_non_finite`).

Owns the count, the limit and what the log says of them. The error that leads here was raised by all ranks alike, so
they all skip.
"""

import logging

import torch
from torch import Tensor

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import HotspaError, NonFiniteError

logger = logging.getLogger(__name__)


class SkippedMiniBatches:
    """What was skipped in a run.

    Args:
        limit: How many may be skipped in a row.

    Attributes:
        total: How many were skipped altogether.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.total = 0
        self._in_a_row = 0
        self._since_log = 0
        self._loss_sum, self._num_losses = 0.0, 0

    def skip(self, engine: HotSPaEngine, error: NonFiniteError) -> Tensor:
        """Takes the gradients from the optimizer, whose next step then changes nothing.

        Returns:
            What the Trainer takes for the loss of the step, an fp32 scalar on the host: the mean of the finite ones
            since the last log, NaN without any.

        Raises:
            NonFiniteError: the limit is reached.
        """
        self._in_a_row += 1
        if self._in_a_row > self._limit:
            if not self._limit:
                raise error
            data = error.to_dict()
            data["why"] = f"{data['why']}; {self._limit} mini-batches were skipped just before it"
            raise HotspaError.from_dict(data) from error
        self.total += 1
        self._since_log += 1
        for _, parameter in engine.named_parameters():
            parameter.grad = None
        if engine.rank == 0:
            logger.warning("A mini-batch is skipped (%d of %d in a row): %s", self._in_a_row, self._limit, error)
        return torch.tensor(self._mean())

    def trained(self, loss: float) -> None:
        """A mini-batch was trained with this loss."""
        self._in_a_row = 0
        if self._limit:
            self._loss_sum += loss
            self._num_losses += 1

    def correct(self, logs: dict[str, float]) -> None:
        """Where something was skipped since the last log, logs the mean of the finite losses, and the count."""
        if self._since_log:
            logs["loss"] = self._mean()
        if self.total:
            logs["hotspa/skipped_mini_batches"] = float(self.total)
        self._since_log = 0
        self._loss_sum, self._num_losses = 0.0, 0

    def _mean(self) -> float:
        return self._loss_sum / self._num_losses if self._num_losses else float("nan")
