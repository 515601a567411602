"""Where the weights of `HotSPaTrainer` come from and go to when no process can hold them: a model given as a folder.

Owns what `trainer.model` is then: the model on the meta device, which has no weights, so that none in it can be stale.
The weights are read by slices into the master store when the engine starts, live there, and leave it through
`save_model` (one segment in memory at a time), checkpoints, or `materialize`, which turns `trainer.model` into a model
like any other. With a model that has its weights, this only keeps them up to date.
"""

import logging
import os
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, Trainer

from hf_hotspa.checkpoint.format.disk import Disk
from hf_hotspa.checkpoint.format.manifest import MODEL_WEIGHTS, TRAINING_ARGUMENTS
from hf_hotspa.checkpoint.model_files import ModelWeights
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights, open_model
from hf_hotspa.errors import HotspaConfigError, ModelError
from hf_hotspa.model.model_check import weights_digest
from hf_hotspa.model.model_kind import refuse_other_models
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.failures import model_not_saved
from hf_hotspa.trainer.stale_weights import guard, release, structure_only

logger = logging.getLogger(__name__)


class ModelSourceMixin(Trainer):
    """Opens `trainer.model`, keeps it up to date, and saves it where it has no weights."""

    args: HotSPaTrainingArguments
    engine: HotSPaEngine | None
    model: PreTrainedModel
    _model_is_current, _model_digest = True, ""
    _model_folder: Path | None = None
    """Where the weights of a `trainer.model` without weights are: what it was opened from, or saved to last."""
    _only_in_engine = False
    """Whether the engine has trained weights that are neither in `trainer.model` nor in that folder."""

    if TYPE_CHECKING:

        def _agreement(self) -> Agreement: ...

        def _start_engine(self, training: bool = True) -> HotSPaEngine: ...

        def _write_configs(self, target: Path) -> None: ...

    # -- in -----------------------------------------------------------------------------------------------------------

    def _opened(self, model: Any, has_model_init: bool) -> Any:
        """What the Trainer takes for its model: that of a folder, without weights, or what was given. Collective."""
        if self.args.hotspa_model_path is None and not isinstance(model, str | Path | PreTrainedConfig):
            if model is not None:
                refuse_other_models(model)
            return model

        def opened() -> PreTrainedModel:
            folder, config = self._named(model, has_model_init)
            loaded, self._model_folder = open_model(folder, config), folder
            refuse_other_models(loaded)
            return loaded

        return self._agreement().run("opening the model", opened)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model of `model_init`.

        Raises:
            HotspaError: it is none that can be trained.
        """
        model: nn.Module = super().call_model_init(trial)
        refuse_other_models(model)
        return model

    def _named(self, model: Any, has_model_init: bool) -> tuple[Path, PreTrainedConfig | None]:
        """The folder with the weights, and the config to use instead of its own."""
        path = self.args.hotspa_model_path
        config = model if isinstance(model, PreTrainedConfig) else None
        if path is None and config is not None:
            raise HotspaConfigError(
                f"the model is a {type(config).__name__}",
                fix="set hotspa_model_path to the folder with its weights, or pass AutoModelForCausalLM.from_config(config)",
            )
        if path is not None and (has_model_init or not (model is None or config is not None)):
            given = "model_init" if has_model_init else repr(model) if isinstance(model, str) else type(model).__name__
            raise HotspaConfigError(
                f"hotspa_model_path is {path!r}, and another model is given: {given}",
                fix="give the one or the other; beside hotspa_model_path, a config may be given",
            )
        return Path(str(model if path is None else path)).expanduser(), config

    def _weights_folder(self) -> Path | None:
        """The folder that a new engine reads the weights from; None where `trainer.model` holds them."""
        if has_weights(self.model):
            return None
        if self._only_in_engine:
            raise ModelError(
                "the trained weights are gone: they were in the engine that was closed",
                why=f"going on from {str(self._model_folder)!r} would undo the training without a word",
                fix="call save_model() or materialize() before close_engine(); checkpoints can be resumed by a new trainer",
            )
        return self._model_folder

    # -- trainer.model ------------------------------------------------------------------------------------------------

    def _update_model(self) -> None:
        """Puts the trained weights into `self.model`, if it holds weights. Collective, unless they are there already."""
        if self.engine is not None and not self._model_is_current:
            release(self.model)
            if not has_weights(self.model):
                self._only_in_engine = True
            else:
                try:
                    self.engine.write_back(self.model)
                except BaseException:
                    guard(self.model)
                    raise
            self._model_agrees()

    def _model_goes_stale(self) -> None:
        """The master store is about to get other weights than `self.model` has: nobody may look at those."""
        if self._model_is_current:
            guard(self.model)
        self._model_is_current = False

    def _model_agrees(self, digest: str | None = None) -> None:
        """Remembers `trainer.model` as it is now: that of the engine. Its digest is computed where it is not known."""
        self._model_is_current, self._model_digest = True, digest or weights_digest(self.model)

    def materialize(self) -> PreTrainedModel:
        """Gives `trainer.model` the weights of this moment of the training, which it else has at certain events only; one
        that was given as a folder gets memory for them, on the CPU of every rank. Collective.

        Returns:
            `trainer.model`; that of a folder is from now on a model like any other.

        Raises:
            HotspaError: on every rank: the engine cannot be started.
        """
        if has_weights(self.model):
            self._update_model()
        else:
            engine = self._start_engine(training=False)
            release(self.model)
            for module in self.model.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    empty = torch.empty_like(parameter, device="cpu")
                    setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
            self.model.tie_weights()
            engine.write_back(self.model)
            self._only_in_engine = False
            self._model_agrees()
        return self.model

    def _warn_of_unsaved_weights(self) -> None:
        if self._only_in_engine and self.is_world_process_zero():
            logger.warning("the engine is closed, and the weights that it trained were not saved by save_model()")

    # -- out ----------------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes the model; one without weights from the master store, one segment in memory at a time. Collective."""
        if has_weights(self.model):
            super()._save(output_dir, state_dict)
            return
        engine = self._start_engine(training=False)
        target = Path(output_dir if output_dir is not None else self.args.output_dir)
        weights = engine.weights()

        def write() -> None:
            try:
                if self.args.should_save:
                    self._write_model(target, weights)
            except Exception as failure:  # of the disk, or of a tokenizer
                raise model_not_saved(target, failure) from failure
            finally:
                deque(weights, maxlen=0)  # also what is left after a failure: the other ranks are waiting for it

        engine.agreement.run("save_model", write)
        self._model_folder, self._only_in_engine = target.absolute(), False

    def _write_model(self, target: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        """New weights are written beside the old ones, and take their place when they are complete."""
        engine = self.engine
        assert engine is not None
        target.mkdir(parents=True, exist_ok=True)
        disk, beside = Disk(), target / f".model.{uuid.uuid4().hex[:12]}"
        disk.make_directory(beside)
        try:
            with structure_only():
                files = ModelWeights(self.model, engine.description.vector, adapted=False)
            files.write(disk, beside, weights)
            new = sorted(path.name for path in beside.iterdir())
            for name in new:
                os.replace(beside / name, target / name)
            for path in target.iterdir():
                if MODEL_WEIGHTS.fullmatch(path.name) and path.name not in new:
                    path.unlink()  # of an earlier model: it could be loaded instead
        finally:
            disk.remove(beside)
        self._write_configs(target)
        (target / TRAINING_ARGUMENTS).write_text(self.args.to_json_string() + "\n")
        disk.sync_directory(target)
