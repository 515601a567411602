"""What a checkpoint or a model folder holds, put where a run has it: master store, optimizer, schedule, generators.

What a checkpoint of the stock Trainer holds, and what of it is refused, is the business of `hf_hotspa.checkpoint.stock`.
Everything here happens on all ranks or on none.
"""

import logging
import weakref
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from transformers import PreTrainedModel

from hf_hotspa.checkpoint.format.disk import read_object
from hf_hotspa.checkpoint.format.manifest import (
    ADAPTER_WEIGHTS,
    BUFFERS,
    STATE,
    Manifest,
    rank_state,
    read_manifest,
    verify_files,
)
from hf_hotspa.checkpoint.rng import set_random_state
from hf_hotspa.checkpoint.stock import StockCheckpoint, is_stock, restore_adapter
from hf_hotspa.checkpoint.tensors import (
    check_model,
    copy_buffers,
    restore,
    saved_tensors,
    saved_vector,
)
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import load_weights
from hf_hotspa.errors import DamagedCheckpointError, HotspaError, ResumeError
from hf_hotspa.model.weight_files import WeightFiles
from hf_hotspa.parallel.adapters import frozen_digest
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.trainer.checkpoint_search import Resumption
from hf_hotspa.trainer.model_source import ModelSource
from hf_hotspa.trainer.stale_weights import structure_only

logger = logging.getLogger(__name__)


class BaseDigest:
    """The digest of the frozen weights beside an adapter, computed once for every engine. Main process."""

    def __init__(self) -> None:
        self._known: tuple[tuple[weakref.ref[HotSPaEngine], int], str] | None = None

    def of(self, engine: HotSPaEngine, model: PreTrainedModel) -> str:
        """That of a model whose adapter the engine trains."""
        now = weakref.ref(engine), engine.master.frozen_version
        if self._known is None or self._known[0] != now:
            self._known = now, frozen_digest(model)
        return self._known[1]


class Restorer:
    """Puts what was saved into a run. Collective.

    Args:
        source: Where its weights are: they go stale.
    """

    def __init__(self, engine: HotSPaEngine, model: PreTrainedModel, source: ModelSource, base: BaseDigest) -> None:
        self._engine, self._model, self._source, self._base = engine, model, source, base

    def weights(self, path: Path, agreement: Agreement, world_size: int) -> None:
        """The weights of a checkpoint, of whichever kind.

        Raises:
            HotspaError: on every rank: it is damaged, or of another model.
        """

        def verified() -> Manifest | None:
            if is_stock(path):
                return None
            manifest = read_manifest(path)
            verify_files(path, manifest, agreement.rank, world_size)
            return manifest

        manifest = agreement.run("load_best_model_at_end", verified)
        if manifest is not None and manifest.has_masters:
            self.checkpoint(path, manifest)
        else:
            self._model_files(path, agreement)

    def checkpoint(
        self, path: Path, manifest: Manifest, state: dict[str, Any] | None = None, optimizer: Optimizer | None = None
    ) -> None:
        """The master store and, given the state, the optimizer.

        Raises:
            HotspaError: on every rank: the checkpoint is damaged, or of another model.
        """
        self._engine.agreement.run(
            "resume",
            lambda: self._read(path, manifest, state, optimizer),
            otherwise=lambda failure: _damaged(failure, path),
        )
        self._source.goes_stale(self._model)

    def _read(self, path: Path, manifest: Manifest, state: dict[str, Any] | None, optimizer: Optimizer | None) -> None:
        """What this rank reads."""
        engine = self._engine
        adapted = engine.description.adapters is not None
        check_model(manifest, saved_vector(engine.description.vector, adapted), str(path))
        if state is None:
            restore(path, manifest, engine.master, None, None)
        else:
            if adapted and engine.agreement.rank == 0:  # the main process's is the one that counts
                self._check_base(state.get("base model"), str(path))
            restore(path, manifest, engine.master, optimizer, state["optimizer"])
        parts = (part.model for phase in engine.phases.values() for part in phase.parts)
        copy_buffers(saved_tensors(path, manifest, BUFFERS), [self._model, *parts])

    def _check_base(self, saved: Any, where: str) -> None:
        """Refuses an adapter's checkpoint beside another base model: it holds a digest of that only."""
        if saved != self._base.of(self._engine, self._model):
            raise ResumeError(
                "the frozen weights of the model are not those that the checkpoint's adapter was trained beside",
                where=where,
                why="a checkpoint of an adapter holds the trained weights, and of the base model a digest",
                fix="load the same base model in the same dtype, and make the adapter with the same config and seed",
            )

    def _model_files(self, folder: Path, agreement: Agreement) -> None:
        """The master store, and the buffers, from a Hugging Face model or adapter folder."""
        engine = self._engine
        if engine.description.adapters is not None:
            master = engine.master
            engine.agreement.run("resume", lambda: restore_adapter(WeightFiles(folder, ADAPTER_WEIGHTS), master))
        else:
            with structure_only():
                load_weights(folder, self._model, engine.master, agreement)
            engine.master.frozen_version += 1
            copy_buffers(
                dict(self._model.named_buffers()), [part.model for p in engine.phases.values() for part in p.parts]
            )
        self._source.goes_stale(self._model)

    def stock(self, stock: StockCheckpoint, optimizer: Optimizer, scheduler: Any, agreement: Agreement) -> None:
        """Weights, optimizer and scheduler of a checkpoint of the stock Trainer.

        Raises:
            ResumeError: on every rank: the run cannot go on exactly from it.
        """
        self._model_files(stock.path, agreement)

        def restored() -> None:
            stock.restore_optimizer(optimizer, self._engine.master)
            stock.check_scheduler(scheduler)
            scheduler.load_state_dict(dict(stock.scheduler))

        self._engine.agreement.run("resume", restored)


def _damaged(failure: Exception, path: Path) -> HotspaError:
    """For what a state.json of somebody else's making leads to; any other failure is raised as it is."""
    if not isinstance(failure, KeyError | TypeError | ValueError | RuntimeError):
        raise failure
    return DamagedCheckpointError(f"{type(failure).__name__}: {failure}", where=str(path))


def load_scheduler(resumption: Resumption, scheduler: Any) -> None:
    """The learning rates go on.

    Raises:
        ResumeError: the checkpoint has those of another kind of scheduler.
        DamagedCheckpointError: it has none.
    """
    try:
        saved = resumption.state["scheduler"]
        name, state = saved["class"], saved["state"]
        if name != type(scheduler).__name__:
            raise ResumeError(
                f"the checkpoint holds the state of a {name}, and the run has a {type(scheduler).__name__}",
                where=str(resumption.path),
                fix="go on with the same lr_scheduler_type",
            )
        scheduler.load_state_dict(state)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(
            f"{STATE!r} holds no scheduler state: {type(error).__name__}: {error}", where=str(resumption.path)
        ) from error


def load_random_state(resumption: Resumption | StockCheckpoint, rank: int, agreement: Agreement) -> None:
    """The generators of this rank, or, with another number of ranks, of rank `r mod saved ranks`.

    Raises:
        HotspaError: on every rank for a checkpoint of the stock Trainer: they cannot be read.
    """
    if isinstance(resumption, StockCheckpoint):
        if not agreement.run("resume", lambda: resumption.set_random_state(rank)) and rank == 0:
            logger.warning("%s holds no random states: what draws random numbers goes on with others", resumption.path)
        return
    world = resumption.manifest.world_size
    name = resumption.manifest.located(rank_state(rank % world, world))
    set_random_state(read_object(resumption.path, name), str(resumption.path / name))
