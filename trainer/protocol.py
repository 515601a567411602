"""What the parts of a trainer read and set of it: `HasRun`, and of its callback handler `Events`."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import PushInProgress

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

Collate = Callable[[list[object]], object]


class Events(Protocol):
    """A `CallbackEvents`."""

    looked_at: frozenset[str]
    callbacks: list[TrainerCallback]
    before_step: Callable[[], None]

    @property
    def every(self) -> list[TrainerCallback]: ...

    def dispatch(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: object
    ) -> None: ...

    def may_look(self) -> list[float]: ...

    def is_looked_at(self, occasion: str, trainer: "HasRun") -> bool: ...

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> object: ...


class HasRun(Protocol):
    """A trainer over a switched model."""

    args: HotSPaTrainingArguments
    model: PreTrainedModel
    optimizer: Optimizer | None
    lr_scheduler: Any  # an `LRScheduler`; None before training, and of transformers without annotation
    state: TrainerState
    control: TrainerControl
    callback_handler: Events
    accelerator: Accelerator
    data_collator: Collate | None
    train_dataset: object
    eval_dataset: object
    processing_class: object
    hub_model_id: str | None
    push_in_progress: PushInProgress | None
    model_wrapped: nn.Module
    place_model_on_device: bool
    is_model_parallel: bool
    _signature_columns: Iterable[str]

    @property
    def switched(self) -> SwitchedModel: ...

    @property
    def engine(self) -> HotSPaEngine | None: ...

    def hotspa_state(self) -> dict[str, object]: ...

    def load_hotspa_state(self, state: dict[str, object]) -> None: ...

    def close_engine(self) -> None: ...

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...

    def is_world_process_zero(self) -> bool: ...

    def get_train_dataloader(self) -> Iterable[object]: ...

    def _set_signature_columns_if_needed(self) -> None: ...

    def get_eval_dataloader(self) -> Iterable[object]: ...

    def _get_output_dir(self, trial: object) -> str: ...

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None: ...

    def _finish_current_push(self) -> None: ...

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None: ...
