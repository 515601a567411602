"""Where the weights of a run come from and go to if no process can hold them: a model given as a folder.

`trainer.model` is then a model on the meta device, without weights. They are read by slices into the master store when
the engine starts, and leave it through `save_model` (one segment in memory at a time), checkpoints, or `materialize`,
which turns `trainer.model` into a normal model.
"""

import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.checkpoint.format.disk import Disk, check_name
from hf_hotspa.checkpoint.format.folder import may_pass, unsavable
from hf_hotspa.checkpoint.format.manifest import ADAPTER_CONFIG, MODEL_WEIGHTS, TRAINING_ARGUMENTS
from hf_hotspa.checkpoint.model_files import ModelWeights, folder_of, save_config
from hf_hotspa.checkpoint.stock import PICKLED_ARGUMENTS, pickled
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights, open_model
from hf_hotspa.errors import CheckpointError, HotspaConfigError, HotspaError, ModelError, UnsupportedError
from hf_hotspa.exchanges import set_once, take_back, without_effect
from hf_hotspa.model.model_kind import refuse_other_models
from hf_hotspa.model.packed_layer import packed_layers
from hf_hotspa.model.specs import dtype_name
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.wrapped_model import bare_model, is_wrapped, saved_model
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.switched.model_object import as_built, release, structure_only
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments

logger = logging.getLogger(__name__)


class ModelSource:
    """The location of the weights of a model without weights: a folder, or the engine alone."""

    def __init__(self, args: HotSPaTrainingArguments) -> None:
        self._args = args
        self.folder: Path | None = None  # the folder that the model was opened from, or saved to last
        self._only_in_engine = False  # whether trained weights are neither in the model nor in that folder
        self._is_saved = False

    # -- in -----------------------------------------------------------------------------------------------------------

    def opened(self, model: object, has_model_init: bool, agreement: Agreement) -> Any:
        """The model of the Trainer: opened from a folder, without weights, or the given one. Collective."""
        path = self._args.hotspa_model_path
        if path is None and not isinstance(model, str | Path | PreTrainedConfig):
            if model is not None:
                refuse_other_models(model)
            return model
        # of `open_qlora`, or `hf-hotspa run`
        if path is not None and isinstance(model, nn.Module) and not has_weights(model):
            refuse_other_models(model)
            self.folder = Path(path).expanduser()
            return model

        def opened() -> PreTrainedModel:
            folder, config = self._named(model, has_model_init)
            loaded, self.folder = open_model(folder, config), folder
            refuse_other_models(loaded)
            return loaded

        return agreement.run("opening the model", opened)

    def _named(self, model: object, has_model_init: bool) -> tuple[Path, PreTrainedConfig | None]:
        path = self._args.hotspa_model_path
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
                fix="give the one or the other; beside hotspa_model_path, a config may be given, or a model of open_qlora",
            )
        return Path(str(model if path is None else path)).expanduser(), config

    def weights_folder(self, model: nn.Module) -> Path | None:
        """The folder that a new engine reads the weights from; None if the model holds them. Raises `ModelError` if
        they were in an engine that was closed."""
        if has_weights(model):
            return None
        if self._only_in_engine:
            raise ModelError(
                "the trained weights are gone: they were in the engine that was closed",
                why=f"training from {str(self.folder)!r} would silently undo the previous training",
                fix="call save_model() or materialize() before close_engine(); checkpoints can be resumed by a new trainer",
            )
        return self.folder

    # -- the model of the trainer -------------------------------------------------------------------------------------

    def trained(self) -> None:
        """Notes that the weights change now, and will be in the engine alone."""
        self._only_in_engine, self._is_saved = True, False

    def materialize(self, model: PreTrainedModel, switched: SwitchedModel) -> None:
        """Allocates the weights of a model of a folder, on the CPU of every rank, and copies them. Collective. Raises
        `UnsupportedError` if it is below an adapter."""
        if is_wrapped(model):
            forms = {layer.form for layer in packed_layers(model).values()}
            raise UnsupportedError(
                f"the base in {', '.join(forms) or 'plain weights'} was read by slices, and no process can hold it",
                fix="save_model() writes the adapter; load it with PeftModel.from_pretrained on a base loaded elsewhere",
            )
        release(model)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                empty = torch.empty_like(parameter, device="cpu")
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        model.tie_weights()
        switched.write_back()
        self._only_in_engine = False

    def warn_of_unsaved_weights(self) -> None:
        if self._only_in_engine and not self._is_saved and self._args.process_index == 0:
            logger.warning("the engine is closed, and the weights that it trained were not saved by save_model()")

    # -- out ----------------------------------------------------------------------------------------------------------

    def save(self, model: PreTrainedModel, engine: HotSPaEngine, target: Path, tokenizer: object) -> None:
        """Writes a model without weights from the master store, one segment in memory at a time. Collective. Raises
        `CheckpointError` on every rank if it cannot be written."""
        adapted = is_wrapped(model)
        weights = engine.weights(frozen=not adapted)

        def write() -> None:
            try:
                if self._args.should_save:
                    self._write(model, engine, target, weights)
                    write_beside(side_files(model, tokenizer) | argument_files(self._args), target)
                    Disk().sync_directory(target)
            except Exception as failure:  # of the disk, or of a tokenizer
                raise model_not_saved(target, failure) from failure
            finally:
                deque(weights, maxlen=0)  # also after a failure: the other ranks wait for the rest

        engine.agreement.run("save_model", write)
        self._is_saved = True
        if not adapted:  # an adapter's folder has no base for a new engine
            self.folder, self._only_in_engine = target.absolute(), False

    def _write(
        self, model: PreTrainedModel, engine: HotSPaEngine, target: Path, weights: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Writes new weights beside the old ones, and replaces these when the new ones are complete."""
        target.mkdir(parents=True, exist_ok=True)
        disk, beside = Disk(), target / f".model.{uuid.uuid4().hex[:12]}"
        disk.make_directory(beside)
        try:
            with structure_only():
                adapted = is_wrapped(model)
                specs = [spec for spec in engine.description.vector.specs if spec.trainable or not adapted]
                files = ModelWeights(model, specs, adapted)
            files.write(disk, beside, weights)
            new = sorted(str(path.relative_to(beside)) for path in beside.rglob("*") if path.is_file())
            for name in new:
                (target / name).parent.mkdir(exist_ok=True)
                os.replace(beside / name, target / name)
            for path in () if adapted else target.iterdir():
                if MODEL_WEIGHTS.fullmatch(path.name) and path.name not in new:
                    path.unlink()  # of an earlier model: it could be loaded by mistake
        finally:
            disk.remove(beside)


def model_not_saved(target: Path, failure: Exception) -> CheckpointError:
    return CheckpointError(
        f"the model cannot be saved: {type(failure).__name__}: {failure}",
        where=str(target),
        fix="name another directory or make room, and call save_model() again: the weights are still there",
    )


SideFiles = dict[str, Callable[[Path], object]]
"""Files beside weights, by their names in messages: each writes itself into a folder."""


def side_files(model: PreTrainedModel, tokenizer: object) -> SideFiles:
    """Config, generation config and tokenizer (if any), as transformers writes them; for an adapter, its config; for a chain
    of modules, all that its own `save_pretrained` writes beside the weights."""
    files: SideFiles = {}
    if isinstance(model, nn.Sequential):
        files[type(model).__name__] = partial(_save_chain, model)
    elif is_wrapped(model):
        for name in model.peft_config:
            try:
                check_name(f"{folder_of(name)}{ADAPTER_CONFIG}", "a checkpoint")
            except HotspaError as failure:
                raise unsavable(f"the adapter {name!r}", Path("a checkpoint"), failure) from failure
        files[ADAPTER_CONFIG] = lambda folder: save_config(model, folder)
    else:
        model.config.architectures, model.config.dtype = [type(model).__name__], dtype_name(model.dtype)
        files["config.json"] = model.config.save_pretrained
        if model.can_generate():
            files["generation_config.json"] = model.generation_config.save_pretrained
    return files | tokenizer_files(tokenizer)


def _save_chain(chain: nn.Module, folder: Path) -> None:
    inside, asked = saved_model(chain)[0], list[Path]()
    save: Callable[..., None] = chain.save_pretrained  # type: ignore[assignment]
    set_once(inside, "save_pretrained", lambda path, **_: asked.append(Path(path)))
    try:
        save(str(folder), create_model_card=False)
    finally:
        take_back(inside, "save_pretrained")
    if asked != [folder]:
        raise UnsupportedError(
            f"a checkpoint of a {type(chain).__name__} whose model is not its first module",
            why=f"its weights would be in {[str(path) for path in asked]}",
            fix="set save_strategy='no', and call trainer.save_model() after train()",
        )
    write_each(side_files(inside, None), folder)


def tokenizer_files(tokenizer: Any) -> SideFiles:
    return {} if tokenizer is None else {f"{type(tokenizer).__name__} (processing_class)": tokenizer.save_pretrained}


def argument_files(args: HotSPaTrainingArguments) -> SideFiles:
    """The arguments as JSON, and pickled if the stock Trainer is to read them."""
    write = lambda folder: (folder / TRAINING_ARGUMENTS).write_text(args.to_json_string() + "\n")  # noqa: E731
    files: SideFiles = {TRAINING_ARGUMENTS: write}
    if args.hotspa_stock_checkpoints:
        files[PICKLED_ARGUMENTS] = lambda folder: (folder / PICKLED_ARGUMENTS).write_bytes(pickled(args))
    return files


def _unwritable(files: SideFiles, target: Path) -> Iterator[tuple[str, Exception]]:
    """Writes files into a folder. Yields those that no disk could hold, with the error; raises errors of the disk."""
    for name, write in files.items():
        try:
            write(target)
        except Exception as failure:
            if may_pass(failure, target):
                raise
            yield name, failure


def write_each(files: SideFiles, target: Path) -> None:
    """Writes files beside weights. Raises `UnsavableError` if one cannot be written on any disk."""
    for name, failure in _unwritable(files, target):
        raise unsavable(name, target, failure) from failure


def write_beside(files: SideFiles, target: Path) -> None:
    """Writes files beside existing weights. A warning names those that no disk could hold: the weights matter more."""
    for name, failure in _unwritable(files, target):
        logger.warning("the weights are saved in %s, but not %s: %s: %s", target, name, type(failure).__name__, failure)


def save_whole(model: PreTrainedModel, target: Path, state_dict: dict[str, Any] | None, beside: SideFiles) -> None:
    """Calls `save_pretrained`, without configs if they fail, and writes the files beside the weights. Raises
    `CheckpointError` if an error of the disk."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        with as_built(bare_model(model)[0]):
            try:
                model.save_pretrained(target, state_dict=state_dict)
            except Exception as failure:
                if may_pass(failure, target):
                    raise
                adapters, generation = getattr(model, "peft_config", {}), getattr(model, "generation_config", None)
                configs = [config for config in (*adapters.values(), model.config, generation) if config is not None]
                with without_effect(set(map(type, configs)), "save_pretrained"):
                    model.save_pretrained(target, state_dict=state_dict)
                write_beside(side_files(model, None), target)
        write_beside(beside, target)
    except HotspaError:
        raise
    except Exception as failure:  # of the disk, or of a tokenizer
        raise model_not_saved(target, failure) from failure
