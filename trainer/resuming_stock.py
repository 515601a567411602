"""How `HotSPaTrainer` goes on from a checkpoint of the stock Trainer, and reads weights from a model folder in general.

What the checkpoint holds, and what is refused, is the business of `hf_hotspa.checkpoint.stock`; here its parts are put
where the run has them, on all ranks or on none.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from hf_hotspa.checkpoint.format.manifest import ADAPTER_WEIGHTS
from hf_hotspa.checkpoint.stock import StockCheckpoint, restore_adapter
from hf_hotspa.checkpoint.tensors import copy_buffers
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import load_weights
from hf_hotspa.model.weight_files import WeightFiles
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.model_source import ModelSource
from hf_hotspa.trainer.stale_weights import structure_only

logger = logging.getLogger(__name__)


class StockResumeMixin(Trainer):
    """The parts of a stock checkpoint, into the run."""

    args: HotSPaTrainingArguments
    engine: HotSPaEngine | None
    _source: ModelSource

    if TYPE_CHECKING:

        def _agreement(self) -> Agreement: ...

    def _check_stock_order(self, stock: StockCheckpoint, loader: Any) -> None:
        """Raises `ResumeError` when the checkpoint's steps were made of other mini-batches."""
        planner = getattr(loader, "planner", None)
        if planner is None:  # a stream: nobody knows its length
            return
        rows, args = len(planner.table), self.args
        stock.check_order(rows, len(loader), self.get_total_train_batch_size(args), args.dataloader_drop_last)

    def _read_model_files(self, folder: Path) -> None:
        """Fills the master store, and the buffers, from a Hugging Face model or adapter folder. Raises on all ranks."""
        engine = self.engine
        assert engine is not None
        if engine.description.adapters is not None:
            master = engine.master
            engine.agreement.run("resume", lambda: restore_adapter(WeightFiles(folder, ADAPTER_WEIGHTS), master))
        else:
            with structure_only():
                load_weights(folder, self.model, engine.master, self._agreement())
            engine.master.frozen_version += 1
            copy_buffers(dict(self.model.named_buffers()), [p.replica.model for p in engine.phases.values()])
        self._source.goes_stale(self.model)

    def _restore_stock(self, stock: StockCheckpoint) -> None:
        """Weights, optimizer and scheduler. Raises on all ranks."""
        engine, optimizer = self.engine, self.optimizer
        assert engine is not None
        assert optimizer is not None
        self._read_model_files(stock.path)

        def restore() -> None:
            stock.restore_optimizer(optimizer, engine.master)
            stock.check_scheduler(self.lr_scheduler)
            self.lr_scheduler.load_state_dict(dict(stock.scheduler))

        engine.agreement.run("resume", restore)

    def _set_stock_random_state(self, stock: StockCheckpoint) -> None:
        """The generators of this rank. Raises on all ranks."""
        restored = self._agreement().run("resume", lambda: stock.set_random_state(self.args.process_index))
        if not restored and self.is_world_process_zero():
            logger.warning("%s holds no random states: what draws random numbers goes on with others", stock.path)
