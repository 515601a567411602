"""What the parts of `HotSPaTrainer` know of each other.

Each part overrides methods of `Trainer` in a file of its own. Here are the attributes that several of them read, and the
methods that one of them has and others call.
"""

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.rows.features import RowRules
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.events import CallbackEvents
from hf_hotspa.trainer.host_agreement import HostAgreement


class TrainerBase(Trainer):
    """A `transformers.Trainer` that may have an engine."""

    args: HotSPaTrainingArguments
    callback_handler: CallbackEvents
    model: PreTrainedModel
    optimizer: Optimizer | None
    engine: HotSPaEngine | None
    _ranks: HostAgreement

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

    def _agreement(self) -> Agreement:
        """Over the host, also before the engine exists."""
        return self._ranks()
