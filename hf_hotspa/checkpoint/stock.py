"""Checkpoints of the stock `transformers.Trainer`: resuming from one, and writing the files that it resumes from.

Reading restores everything: weights, optimizer states by parameter, scheduler, step and epoch, random states. Anything
that cannot be mapped raises an error that names it. A checkpoint without the optimizer's state (`save_only_model`)
starts a new optimizer, as with the stock Trainer, and logs a warning.

This is the only module that reads pickles. It builds tensors and plain values only (`weights_only=True`) and rejects
files with anything else. Our own files contain no pickles, and `training_args.bin` is never read.

Files that only the stock Trainer reads are what it would have written at this step: the optimizer's state of complete
parameters, numbered by its own groups; the scheduler; the generators of each process; the arguments. We never read
them.
"""

import io
import itertools
import random
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_pt_utils import safe_globals

from hf_hotspa.checkpoint.format.disk import read_object
from hf_hotspa.checkpoint.format.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST, STATE_FOLDER, TRAINER_STATE
from hf_hotspa.checkpoint.model_files import adapter_name, adapter_names, folder_of, weights_of
from hf_hotspa.checkpoint.rng import set_generators
from hf_hotspa.checkpoint.tensors import CPU_ADAM, HERE_AND_NOW, load_optimizer, names_in_groups
from hf_hotspa.engine.master import MasterShare, MasterStore, bare_optimizer
from hf_hotspa.engine.optimizer_states import special, states_of
from hf_hotspa.errors import DamagedCheckpointError, ResumeError, UnsupportedError
from hf_hotspa.model.replica import to_storage
from hf_hotspa.model.weight_files import WeightFiles

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
_OF_OTHERS = {
    "DeepSpeed": ("latest", "zero_to_fp32.py", "global_step*"),
    "FSDP": ("pytorch_model_fsdp*", "optimizer_*", "*.distcp"),
    "model parallelism of SageMaker": ("optimizer.pt_*",),
}
_NEW_RUN = "start a new run with its weights: hotspa_model_path, or from_pretrained, and no resume_from_checkpoint"
_ADAM = {"exp_avg", "exp_avg_sq", "step"}


def is_stock(path: Path) -> bool:
    """Returns whether a directory is a checkpoint that we did not write."""
    ours = any((path / name).exists() for name in (MANIFEST, STATE_FOLDER)) or any(path.glob("master-rank-*"))
    return (path / TRAINER_STATE).is_file() and not ours


def adapter_folder(checkpoint: Path, name: str) -> Path:
    """Returns the folder of an adapter in a checkpoint: PEFT saves other names than `default` in a folder below."""
    below = checkpoint / name
    return below if (below / ADAPTER_WEIGHTS).is_file() else checkpoint


def _read_pickle(folder: Path, name: str) -> Any:
    """The tensors and plain values of a file from `torch.save`; tensors stay on disk until they are used. Raises
    `DamagedCheckpointError`: it cannot be read, or holds something else."""
    for module in special():
        module.register_types()
    try:
        with safe_globals():  # the types in the saved state of numpy's generator
            return torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever a file of unknown contents raises
        text = str(error).partition("\n")[0]
        raise DamagedCheckpointError(
            f"{name!r} cannot be read as tensors and plain values: {type(error).__name__}: {text}", where=str(folder)
        ) from error


@dataclass(frozen=True)
class StockCheckpoint:
    """An opened checkpoint of the stock Trainer, or of ours with the model only (`save_only_model`)."""

    path: Path
    trainer_state: dict[str, Any]
    # the optimizer's `state_dict`; its tensors stay in the file. Without one in the checkpoint, this and `scheduler`
    # are empty: both start anew, as with the stock Trainer.
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)  # what only our checkpoints hold: nothing

    @classmethod
    def open(cls, path: Path, adapter: str | None = None) -> "StockCheckpoint":
        """Reads everything except the tensors. `adapter`: the name of the run's adapter, if any. Raises `ResumeError`:
        a wrapper wrote it whose state cannot be mapped. Raises `DamagedCheckpointError`: a file is missing, damaged, or
        not what its name says. Raises `HotspaError`: its weights cannot be read; see `WeightFiles`."""
        for other, patterns in _OF_OTHERS.items():
            if any(True for pattern in patterns for _ in path.glob(pattern)):
                raise ResumeError(
                    f"the checkpoint was written with {other}",
                    where=str(path),
                    why="the state of its optimizer is divided differently, and cannot be mapped",
                    fix="start a new run with the weights that its own tools convert, and no resume_from_checkpoint",
                )
        trainer_state = read_object(path, TRAINER_STATE)
        if not isinstance(trainer_state.get("global_step"), int):
            raise DamagedCheckpointError(f"{TRAINER_STATE!r} has no global_step", where=str(path))
        saved = path if adapter is None else adapter_folder(path, adapter)
        only = ADAPTER_WEIGHTS if (saved / ADAPTER_CONFIG).is_file() else None
        WeightFiles(saved, only)  # raises if it is unreadable
        missing = [name for name in (OPTIMIZER, SCHEDULER) if not (path / name).is_file()]
        if missing:
            return cls(path, trainer_state, {}, {})
        optimizer, scheduler = _read_pickle(path, OPTIMIZER), _read_pickle(path, SCHEDULER)
        are_states = isinstance(optimizer, dict) and isinstance(scheduler, dict)
        if not are_states or not {"state", "param_groups"} <= set(optimizer):
            raise DamagedCheckpointError(f"{OPTIMIZER!r} or {SCHEDULER!r} holds no state", where=str(path))
        return cls(path, trainer_state, optimizer, scheduler)

    def restore_optimizer(self, optimizer: Optimizer, master: MasterStore) -> None:
        """Loads this rank's share of the saved states into its optimizer. `optimizer`: on the master store, with groups
        made as with the stock Trainer. Raises `ResumeError`: it is another optimizer, or has other parameters."""
        bare, saved_groups = bare_optimizer(optimizer), self.optimizer["param_groups"]
        groups = names_in_groups(bare, master)
        kind = self._kind(bare, saved_groups[0] if saved_groups else {})
        counts = [[len(group) for group in side] for side in (groups, [g["params"] for g in saved_groups])]
        if counts[0] != counts[1]:
            raise ResumeError(
                f"{OPTIMIZER!r} has parameter groups of {counts[1]} parameters, and the run has groups of {counts[0]}",
                where=str(self.path),
                why="the optimizer was made differently, or the model differs",
                fix="resume with the same model, and an optimizer made in the same way",
            )
        states = {}
        for names, group in zip(groups, saved_groups, strict=True):
            for name, index in zip(names, group["params"], strict=True):
                states[name] = self._of_share(bare, self.optimizer["state"].get(index, {}), master.shares[name])
        of_kind = states_of(type(bare))
        library = of_kind.library_of(type(bare))
        of_others = set() if library is None else of_kind.FIRST_STATE[library]
        wanted = _ADAM if kind in ("AdamW", "Adam") else of_others
        if wanted and not any(wanted <= set(state) for state in states.values()):
            raise ResumeError(f"{OPTIMIZER!r} holds no state of {kind}", where=str(self.path), fix=_NEW_RUN)
        plain = [{key: value for key, value in group.items() if key != "params"} for group in saved_groups]
        load_optimizer(bare, master, states, {"class": kind, "groups": plain, "scalars": {}}, str(self.path))

    def _of_share(self, optimizer: Optimizer, state: Mapping[str, Any], share: MasterShare) -> dict[str, Any]:
        of_kind = states_of(type(optimizer))
        if of_kind.library_of(type(optimizer)) is None:
            return {key: self._share(key, value, share) for key, value in state.items()}
        flat = dict[str, Any]()
        for part in (state, *state.values()):  # bitsandbytes hides states from FSDP
            if isinstance(part, Mapping):
                flat |= {key: value for key, value in part.items() if not isinstance(value, Mapping)}
        try:
            return dict(of_kind.cut_state(optimizer, flat, share))
        except UnsupportedError as error:
            raise ResumeError(error.what, where=str(self.path), why=error.why, fix=_NEW_RUN) from error

    def _kind(self, optimizer: Optimizer, group: Mapping[str, Any]) -> str:
        """The class that wrote the states, as far as its settings' names tell."""

        def settings(group: Mapping[str, Any]) -> set[str]:
            # older versions of torch distinguished Adam and AdamW by the class alone
            return {*group} - {"params", "initial_lr", "decoupled_weight_decay", *HERE_AND_NOW}

        own: str = states_of(type(optimizer)).kind_of(optimizer)
        if settings(group) == settings(optimizer.param_groups[0]):
            return own
        if own == CPU_ADAM and settings(group) == settings(torch.optim.AdamW([torch.zeros(1)]).param_groups[0]):
            return "AdamW"
        raise ResumeError(
            f"{OPTIMIZER!r} holds the state of another optimizer than {own}",
            where=str(self.path),
            why=f"its settings are {', '.join(sorted(settings(group)))}",
            fix="resume with the same optim",
        )

    def _share(self, key: str, value: object, share: MasterShare) -> Any:
        spec, start, stop, *_ = share
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.shape != spec.shape:
            raise ResumeError(
                f"{key} of {spec.name} is {list(value.shape)} in {OPTIMIZER!r}, and the parameter is {list(spec.shape)}",
                where=str(self.path),
                fix="resume with the same model and the same optim",
            )
        return to_storage(value, spec.shard_dim)[start:stop].clone()

    def check_scheduler(self, scheduler: LRScheduler) -> None:
        """Raises `ResumeError` if another kind of scheduler saved the state."""
        if scheduler.state_dict().keys() != self.scheduler.keys():
            raise ResumeError(
                f"{SCHEDULER!r} holds the state of another scheduler than {type(scheduler).__name__}",
                where=str(self.path),
                fix="resume with the same lr_scheduler_type",
            )

    def set_random_state(self, rank: int) -> bool:
        """Sets the generators of this process to the states of rank `r mod saved ranks`. False if none were saved.
        Raises `DamagedCheckpointError`: the file holds no such states."""
        several = len(list(self.path.glob("rng_state_*.pth")))
        name = f"rng_state_{rank % several}.pth" if several else "rng_state.pth"
        if not (self.path / name).is_file():
            return False
        saved = _read_pickle(self.path, name)
        try:
            cuda = saved.get("cuda")
            set_generators(
                saved["python"], saved["numpy"], saved["cpu"], cuda[0] if isinstance(cuda, list) and cuda else cuda
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise DamagedCheckpointError(
                f"{name!r} holds no random states: {type(error).__name__}: {error}", where=str(self.path)
            ) from error
        return True

    def check_order(
        self,
        rows: int | None,  # of an epoch of the run; None if unknown
        batches: int,  # of a process in an epoch of the run
        accumulation: int,  # batches of a step
        per_device: int,  # rows of a batch
        mini_batch: int,  # rows of a step, over all processes
        drop_last: bool,  # whether an incomplete last mini-batch is left out
    ) -> None:
        """Compares the trained mini-batches with the run's, as far as step and epoch tell. Raises `ResumeError`: they
        differ."""
        step, epoch = self.trainer_state["global_step"], self.trainer_state.get("epoch")
        saved = self.trainer_state.get("train_batch_size")
        if not isinstance(epoch, int | float) or not isinstance(saved, int) or saved < 1:
            return
        steps_in_epoch, epochs = max(-(-batches // accumulation), 1), set[float]()
        if saved == per_device:  # the run's own batches
            whole, steps = divmod(step, steps_in_epoch)
            epochs = {whole + min(steps * accumulation / batches, 1.0)} if batches else epochs
        if rows is not None:
            epochs |= _epochs(step, rows, steps_in_epoch, saved, mini_batch, drop_last)
        if not any(abs(value - epoch) < 1e-6 for value in epochs):
            raise ResumeError(
                f"the checkpoint is at epoch {epoch:.4f} after {step} steps with {saved} rows per device, which a run "
                f"with {mini_batch} rows in a step and {steps_in_epoch} steps in an epoch never reaches",
                where=str(self.path),
                why="sequences would be trained twice or not at all",
                fix="use the same data set, and as many rows in a step as in that run (rows per device x processes x "
                "gradient accumulation), or set hotspa_allow_data_order_change=True",
            )


def _epochs(step: int, rows: int, steps_in_epoch: int, per_device: int, mini_batch: int, drop_last: bool) -> set[float]:
    """The stock Trainer's epoch at a step, for every split of a mini-batch over processes and accumulation."""
    possible = set[float]()
    share, rest = divmod(mini_batch, per_device)
    if rest or not steps_in_epoch:
        return possible
    batches = rows // per_device if drop_last else -(-rows // per_device)
    for processes in (count for count in range(1, share + 1) if share % count == 0):
        accumulation = share // processes
        micro_steps = batches // processes if drop_last else -(-batches // processes)
        if not micro_steps or max(-(-micro_steps // accumulation), 1) != steps_in_epoch:
            continue
        epochs, steps = divmod(step, steps_in_epoch)
        possible.add(epochs + min(steps * accumulation / micro_steps, 1.0))
    return possible


@torch.no_grad()
def restore_adapter(files: WeightFiles, master: MasterStore) -> None:
    """Fills this rank's share of the trained weights from a PEFT file. Raises `ResumeError`: the file holds another
    adapter. Raises `DamagedCheckpointError`: it cannot be read."""
    trained = {
        saved: share
        for name, share in master.shares.items()
        for saved in adapter_names(name, share.spec.tied_names)
        if share.spec.trainable
    }
    frozen = {name for name in files.tensors.keys() - trained.keys() if _is_frozen(name, files, master)}
    _check_adapter(files, {name: share.spec.shape for name, share in trained.items()}, frozen)
    for saved, (spec, start, stop, *_) in trained.items():
        if stop > start:
            master.parameters[spec.name].copy_(files.read(saved, spec.shard_dim, start, stop))


@torch.no_grad()
def read_frozen(model: Any, checkpoint: Path, trained: str) -> dict[str, Tensor]:
    """Loads the adapters beside the trained one into the model, as the stock Trainer does; returns them by their names in
    the model. Raises `ResumeError`: a file holds another adapter. Raises `DamagedCheckpointError`: it cannot be read."""
    restored = dict[str, Tensor]()
    for name in model.peft_config:
        folder = checkpoint / folder_of(name)
        if name == trained or not (folder / ADAPTER_WEIGHTS).is_file():
            continue
        files, own = WeightFiles(folder, ADAPTER_WEIGHTS), weights_of(model, name)
        _check_adapter(files, {adapter_name(n): tuple(parameter.shape) for n, parameter in own.items()})
        for n, parameter in own.items():
            parameter.copy_(files.whole(adapter_name(n)))
        restored |= own
    return restored


def _check_adapter(files: WeightFiles, shapes: Mapping[str, tuple[int, ...]], frozen: Collection[str] = ()) -> None:
    """Raises `ResumeError` unless a file has the weights of an adapter, and beside these only frozen ones of the run."""
    differences = itertools.chain(
        (name for name in shapes if name not in files.tensors),
        (name for name in files.tensors if name not in shapes and name not in frozen),
        (name for name in shapes if files.tensors[name].shape != shapes[name]),
    )
    for name in differences:
        raise ResumeError(
            f"{name!r} of the adapter differs between the checkpoint and the model",
            where=str(files.folder),
            fix="make the adapter with the config that it was saved with",
        )


def _is_frozen(name: str, files: WeightFiles, master: MasterStore) -> bool:
    """Whether a tensor is a frozen weight of the run, or replaced by a trained copy: PEFT saves an embedding's with an
    adapter."""
    if re.search(r"\.(original_module|modules_to_save)\.", name):
        return True
    share = master.shares.get(name)
    if share is None or share.spec.trainable or files.tensors[name].shape != share.spec.shape:
        return False
    own = master.parameters[name]
    return share.stop <= share.start or torch.equal(
        files.read(name, share.spec.shard_dim, share.start, share.stop).to(own), own
    )


PICKLED_ARGUMENTS = "training_args.bin"


def pickled(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def random_file(rank: int, world_size: int) -> str:
    return "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"


def random_states(world_size: int) -> dict[str, Any]:
    """Returns the generators of this process, in the stock Trainer's form."""
    states: dict[str, Any] = {
        "python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state(),
    }  # fmt: skip
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state() if world_size == 1 else torch.cuda.get_rng_state_all()
    return states


def state_names(master: MasterStore, optimizer: Optimizer) -> list[str]:
    """Returns an optimizer's elementwise states, such as `exp_avg`: all stores have all parameters, so ranks agree."""
    state = bare_optimizer(optimizer).state
    return sorted({
        key
        for parameter in master.parameters.values()
        for key, value in state.get(parameter, {}).items()
        if _is_elementwise(value, parameter)
    })  # fmt: skip


def state_buffers(master: MasterStore, optimizer: Optimizer, key: str) -> list[Tensor | None]:
    """Returns one of the states, laid out as this rank's share of the weights; zeros if a parameter has none."""
    state, buffers = bare_optimizer(optimizer).state, master.empty_buffers()
    for name, parameter in master.parameters.items():
        share, value = master.shares[name], state.get(parameter, {}).get(key)
        buffer = buffers[share.segment]
        if buffer is not None and _is_elementwise(value, parameter):
            buffer[share.low : share.low + len(value)] = value
    return buffers


def _is_elementwise(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def optimizer_state(optimizer: Optimizer, master: MasterStore, states: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """Returns the optimizer's `state_dict` with complete parameters in host memory (`states[state][parameter]`)."""
    bare, state = bare_optimizer(optimizer), dict[int, dict[str, Any]]()
    described = bare.state_dict()
    for names, group in zip(names_in_groups(bare, master), described["param_groups"], strict=True):
        for name, index in zip(names, group["params"], strict=True):
            if own := described["state"].get(index):
                state[index] = {
                    key: states[key][name] if _is_elementwise(value, master.parameters[name]) else _kept(value)
                    for key, value in own.items()
                }
    return {"state": state, "param_groups": described["param_groups"]}


def _kept(value: object) -> object:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
