"""How `HotSPaTrainer` goes on from a checkpoint, and loads the best one.

`ResumeMixin` replaces the methods of `transformers.Trainer` that read pickles. It promises: what is resumed from was
verified; the same layout goes on bit for bit, another one from the same bits; nothing that would change the order of
the data goes unnoticed; a finished run stays as it is. Checkpoints of the stock Trainer are gone on from, too.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from hf_hotspa.checkpoint.format.manifest import rank_columns
from hf_hotspa.checkpoint.stock import StockCheckpoint
from hf_hotspa.checkpoint.tensors import saved_tensors
from hf_hotspa.trainer.base import TrainerBase
from hf_hotspa.trainer.checkpoint_search import Resumption, check_data_order, data_order
from hf_hotspa.trainer.model_source import ModelSource
from hf_hotspa.trainer.restoring import BaseDigest, Restorer, load_random_state, load_scheduler
from hf_hotspa.trainer.slow_devices import DeviceWatch
from hf_hotspa.trainer.streaming import StreamProgress

logger = logging.getLogger(__name__)


class ResumeMixin(TrainerBase):
    """The reading side of the checkpoints of `HotSPaTrainer`."""

    _source: ModelSource
    _base: BaseDigest
    _resumption: Resumption | StockCheckpoint | None = None
    _data_order: dict[str, Any] | None = None
    _devices: DeviceWatch | None
    _stream_progress: StreamProgress | None
    _steps_a_pass = sys.maxsize
    """The most optimizer steps of a pass over the data set."""

    def _init_training_state(self, max_steps: int, num_update_steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        """The pass to go on in, and the mini-batches that were trained in it. Of a stream, whose length nobody may know,
        as the checkpoint says. Collective where a stream is resumed."""
        self._steps_a_pass = num_update_steps_per_epoch
        begin: tuple[int, int] = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        if self._stream_progress is None or self._resumption is None:
            return begin
        progress, resumption = self._stream_progress, self._resumption
        state = resumption.state if isinstance(resumption, Resumption) else {}
        return self._agreement().run(
            "resume",
            lambda: progress.go_on(
                state.get("hotspa", {}).get("stream"),
                skip=not self.args.ignore_data_skip,
                compare=not self.args.hotspa_allow_data_order_change,
            ),
        )

    def _run_epoch(self, **kwargs: Any) -> None:
        if self._resumption is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # a finished run: stock Trainer makes one step more
            return
        # an older transformers sets the epoch of what skip_first_batches makes, which does not hand it on
        if hasattr(kwargs["train_dataloader"], "set_epoch"):
            kwargs["train_dataloader"].set_epoch(kwargs["epoch"])
        super()._run_epoch(**kwargs)

    def _check_data_order(self, loader: Any) -> None:
        """Called with every new train data loader; raises on every rank when a resumed run would see other data."""
        self._data_order = data_order(self.args, loader, max(bucket.longest for bucket in self._running.buckets))
        if self._resumption is not None and not self.args.hotspa_allow_data_order_change:
            check_data_order(self._resumption, self._data_order, loader, self.args)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the weights go into the master store, together with the optimizer's state."""

    def _restorer(self) -> Restorer:
        return Restorer(self._running, self.model, self._source, self._base)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Weights, optimizer, scheduler, and what the strategies' choice has learned."""
        if checkpoint is None:
            return
        resumption = self._resumption
        assert resumption is not None
        assert self.optimizer is not None
        before = [dict(group) for group in self.optimizer.param_groups]
        if isinstance(resumption, StockCheckpoint):
            self._restorer().stock(resumption, self.optimizer, self.lr_scheduler, self._agreement())
        else:
            self._restorer().checkpoint(resumption.path, resumption.manifest, resumption.state, self.optimizer)
            self._running.agreement.run("resume", lambda: self._load_states(resumption))
        for old, group in zip(before, self.optimizer.param_groups, strict=True):
            other = {k for k in old if k not in ("params", "lr") and old[k] != group[k]}
            if other and self.is_world_process_zero():
                text = ", ".join(f"{key} {group[key]} (not {old[key]})" for key in sorted(other))
                logger.warning("the checkpoint's optimizer settings go on, as in the stock Trainer: %s", text)

    def _load_states(self, resumption: Resumption) -> None:
        load_scheduler(resumption, self.lr_scheduler)
        self.load_hotspa_state(resumption.state.get("hotspa", {}))
        if self._devices is not None and resumption.manifest.world_size == self.args.world_size:
            name = rank_columns(self.args.process_index, self.args.world_size)
            self._devices.load_rank_tensors(saved_tensors(resumption.path, resumption.manifest, name))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The generators of this rank; see `load_random_state`."""
        if checkpoint is not None:
            assert self._resumption is not None
            load_random_state(self._resumption, self.args.process_index, self._agreement())

    def _load_best_model(self) -> None:
        """The weights of the best checkpoint, into the master store and the model. Collective."""
        best = self.state.best_model_checkpoint
        assert best is not None
        logger.info("loading the best model from %s (score: %s)", best, self.state.best_metric)
        self._restorer().weights(Path(best), self._agreement(), self.args.world_size)
        self._update_model()
