"""What the parts of `HotSPaTrainer` know of each other.

Each part overrides methods of `Trainer` in a file of its own. Here are the attributes that several of them read, and the
methods that one of them has and others call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.parallel import backends
from hf_hotspa.parallel.agreement import Agreement, Mailbox
from hf_hotspa.rows.features import RowRules
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.events import CallbackEvents
from hf_hotspa.trainer.out_of_memory import note


class TrainerBase(Trainer):
    """A `transformers.Trainer` that may have an engine."""

    args: HotSPaTrainingArguments
    callback_handler: CallbackEvents
    model: PreTrainedModel
    optimizer: Optimizer | None
    engine: HotSPaEngine | None
    _channel: tuple[dist.ProcessGroup, Mailbox] | None = None
    """What ranks agree over, before there is an engine and beside it."""

    if TYPE_CHECKING:  # methods of the parts

        def _check_trained(self) -> None: ...
        def _row_rules(self) -> RowRules: ...
        def _show_model(self, occasion: str) -> None: ...
        def _start_engine(self, training: bool = True) -> HotSPaEngine: ...
        def _update_model(self) -> None: ...
        def hotspa_state(self) -> dict[str, Any]: ...
        def load_hotspa_state(self, state: dict[str, Any]) -> None: ...

    @property
    def _running(self) -> HotSPaEngine:
        """The engine, where the loop of the Trainer has started it."""
        assert self.engine is not None
        return self.engine

    @contextmanager
    def _broadcasting_errors(self, what: str) -> Iterator[None]:
        """Leaves an error for the other ranks, and a lack of memory for the next launch; raises what a peer was first to
        raise. May be nested: an error is told once. Without an engine nothing is done.

        Args:
            what: What is being done, for messages.
        """
        try:
            yield
        except Exception as error:
            if self.engine is None:
                raise
            note(self.args.output_dir, self.engine.failures)
            explained = self.engine.explain(error, f"{what} after step {self.state.global_step}")
            if explained is error:
                raise
            raise explained from error

    def _agreement(self) -> Agreement:
        """Of all ranks over the host, also before the engine exists; of one process before there are others. Collective
        the first time."""
        rank, world_size = self.args.process_index, self.args.world_size
        if world_size == 1 or not dist.is_initialized():
            return Agreement(None, 0)
        if self._channel is None:
            timeout = timedelta(seconds=float(self.args.ddp_timeout))
            self._channel = backends.world_for_host_tensors(timeout), Mailbox(rank, world_size)
        group, mailbox = self._channel
        return Agreement(group, rank, mailbox)
