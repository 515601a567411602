"""What a checkpoint of a run holds, taken at one moment: what this rank writes, and what rank 0 says of all files."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from hf_hotspa.checkpoint.format.disk import FileRecord, tensor_file
from hf_hotspa.checkpoint.format.folder import RunFolder
from hf_hotspa.checkpoint.format.manifest import BUFFERS, STATE_FOLDER, Manifest, rank_columns, rank_state, rank_tensors
from hf_hotspa.checkpoint.model_files import ModelWeights, saved_state
from hf_hotspa.checkpoint.rng import random_state
from hf_hotspa.checkpoint.stock import OPTIMIZER, SCHEDULER
from hf_hotspa.checkpoint.stock_writing import (
    PICKLED_ARGUMENTS,
    optimizer_state,
    pickled,
    random_file,
    random_states,
    state_buffers,
    state_names,
)
from hf_hotspa.checkpoint.tensors import (
    Share,
    named_tensors,
    saved_parameters,
    saved_segments,
    saved_vector,
    share_of,
    tensor_bytes,
    versions,
)
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.specs import dtype_name
from hf_hotspa.parallel.adapters import is_adapted
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.model_source import write_configs
from hf_hotspa.trainer.stale_weights import structure_only


class CheckpointContents:
    """Everything that training changes is taken when this is made; it is written later, perhaps by a thread. Collective.

    Args:
        optimizer: The optimizer; None where only the model is saved.
        rank_tensors: What only this rank needs to go on, by name, in host memory; perhaps nothing.
        texts: Gives the JSON files that one rank writes for all, by name; what it raises is raised where all ranks are
            together.
    """

    def __init__(
        self,
        folder: RunFolder,
        step: int,
        engine: HotSPaEngine,
        model: PreTrainedModel,
        args: HotSPaTrainingArguments,
        optimizer: Optimizer | None,
        scheduler: Any,
        tokenizer: Any,
        rank_tensors: dict[str, Tensor],
        texts: Callable[[Share], dict[str, str]],
    ) -> None:
        self._folder, self._step, self._engine, self._model, self._args = folder, step, engine, model, args
        self._optimizer, self._scheduler, self._tokenizer = optimizer, scheduler, tokenizer
        self._rank, self._world, self._rank_tensors = args.process_index, args.world_size, rank_tensors
        self._adapted = engine.description.adapters is not None
        self._vector = saved_vector(engine.description.vector, self._adapted)
        share = share_of(engine.master, optimizer, self._vector)
        self._share = share.copy() if args.hotspa_async_save else share
        with structure_only():
            self._files = ModelWeights(model, self._vector, self._adapted)
        held = args.hotspa_async_save
        self._held = self._files.hold(self._weights(), self._rank, self._world) if held else None
        self._random = json.dumps(random_state())
        self._stock = self._stock_files() if args.hotspa_stock_checkpoints else {}
        self._texts, self._failure = dict[str, str](), None
        try:
            self._texts = texts(self._share) if self._rank == 0 else {}
        except Exception as error:  # such as a callback's state that is no JSON
            self._failure = error

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is saved of the model, as `HotSPaEngine.weights`. Collective."""
        return self._engine.weights(frozen=not self._adapted)

    def write(self, temporary: Path) -> list[FileRecord]:
        """Writes this rank's files. Collective where weights are not held."""
        disk, rank, world = self._folder.disk, self._rank, self._world
        weights = iter(()) if self._held is not None else self._weights()
        try:
            if self._failure is not None:
                raise self._failure
            records = []
            if rank == 0:
                of_others = {name for name, _ in self._files.shards} | {random_file(r, world) for r in range(world)}
                records += self._write_model_files(temporary, of_others)
                records += [disk.write(temporary, name, [text.encode()]) for name, text in self._texts.items()]
            records += [disk.write(temporary, name, [pickled(value)]) for name, value in self._stock.items()]
            if self._optimizer is not None:
                records.append(disk.write(temporary, rank_tensors(rank, world), self._share.file()))
                records.append(disk.write(temporary, rank_state(rank, world), [self._random.encode()]))
                if self._rank_tensors:
                    own = named_tensors(self._rank_tensors)
                    records.append(disk.write(temporary, rank_columns(rank, world), tensor_file(own, tensor_bytes)))
            of_model = weights if self._held is None else self._held
            return records + self._files.write(disk, temporary, of_model, rank, world)
        finally:
            for _ in weights:  # also what is left after a failure: the other ranks are waiting for it
                pass

    def manifest(self, files: tuple[FileRecord, ...]) -> Manifest:
        """Says what all ranks wrote. Called on rank 0."""
        model, engine = self._model, self._engine
        dtypes = {name: dtype_name(p.dtype) for name, p in model.named_parameters(remove_duplicate=False)}
        exported = set[str]()  # an adapter ties nothing
        if not self._adapted:
            with structure_only():
                exported = set(saved_state(model))
        return Manifest(
            step=self._step,
            world_size=self._world,
            strategies=",".join(map(str, engine.buckets)),
            resumable=self._optimizer is not None,
            run=self._folder.run,
            versions=versions(),
            files=files,
            segments=saved_segments(self._vector, engine.master),
            parameters=saved_parameters(self._vector, self._share.states, dtypes, exported),
        )

    def _stock_files(self) -> dict[str, Any]:
        """File -> what this rank pickles into it for the stock Trainer, taken now. Collective."""
        engine, optimizer, rank, world = self._engine, self._optimizer, self._rank, self._world
        states = dict[str, dict[str, Tensor]]()
        files: dict[str, Any] = {PICKLED_ARGUMENTS: self._args} if rank == 0 else {}
        if optimizer is None:
            return files
        for key in state_names(engine.master, optimizer):
            states[key] = {}
            for name, whole in engine.weights(False, state_buffers(engine.master, optimizer, key)):
                if rank == 0 and name in engine.master.parameters:  # a tied name is none of its own
                    states[key][name] = whole.to("cpu", copy=True).contiguous()
        if rank == 0:
            files[OPTIMIZER] = optimizer_state(optimizer, engine.master, states)
            files[SCHEDULER] = deepcopy(self._scheduler.state_dict())
        return files | {random_file(rank, world): random_states(world)}

    def _write_model_files(self, temporary: Path, weights: set[str]) -> list[FileRecord]:
        """Config, generation config and tokenizer, as transformers writes them, and what a resumed run needs of the model's
        buffers. The other ranks may be writing files of weights meanwhile."""
        model, disk = self._model, self._folder.disk
        write_configs(model, temporary, self._tokenizer)
        records = disk.adopt(temporary, {STATE_FOLDER, *weights})
        if is_adapted(model) or self._args.save_only_model:  # an adapter's buffers are the base model's
            return records
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        with structure_only():
            tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
        if tensors:
            records.append(disk.write(temporary, BUFFERS, tensor_file(named_tensors(tensors), tensor_bytes)))
        return records
