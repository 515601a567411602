"""The stages of one rank under one strategy: one replica, or with `+v2` one for each stage, bound and let go together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_hotspa.model.replica import Replica


class Parts(tuple[Replica, ...]):
    """Replicas of one rank, in the order of the pipeline. They share buffers, and hold different parameters."""

    __slots__ = ()

    def bind(self, weights: Sequence[Tensor | None], gradients: Sequence[Tensor | None] | None) -> None:
        """See `Replica.bind`."""
        for part in self:
            part.bind(weights, gradients)

    def bind_gradients(self, gradients: Sequence[Tensor | None] | None) -> None:
        """See `Replica.bind_gradients`."""
        for part in self:
            part.bind_gradients(gradients)

    def release(self) -> None:
        """See `Replica.release`."""
        for part in self:
            part.release()

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode."""
        for part in self:
            part.model.train(mode)

    def begin_step(self, step: int) -> None:
        """See `Replica.begin_step`."""
        for part in self:
            part.begin_step(step)

    @property
    def reached(self) -> set[str]:
        """See `Replica`."""
        return set().union(*(part.reached for part in self))

    @property
    def balance_loss(self) -> Tensor:
        """fp64 scalar: the balance loss of the routers here, but of those whose stage has it in its loss."""
        losses = [part.balance_loss.cpu() for part in self if not part.is_last]
        return sum(losses, torch.zeros((), dtype=torch.float64))

    @property
    def num_dropped(self) -> int:
        """Tokens that a capacity of experts has dropped since the last `bind`."""
        return sum(part.capacity.num_dropped for part in self if part.capacity is not None)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to the other ranks of cp so far."""
        return sum(part.context.context.sent_bytes for part in self if part.context is not None)
