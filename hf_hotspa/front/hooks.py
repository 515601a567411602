"""What `hf-hotspa run` changes in a program, as its modules are imported: nothing is imported before the program does.

* `transformers.TrainingArguments`: what would start DeepSpeed or FSDP is taken over by `HotSPaTrainingArguments`.
* `transformers.Trainer`: an object of any subclass is made as `switched(subclass)`.
* `PreTrainedModel.from_pretrained`: the model object stays in host memory.
* front ends and kernels: `hf_hotspa.front.programs`.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_hotspa.front.flags import given_flags, note_trainer, say

Hook = Callable[[ModuleType], None]


# -- before the model is loaded ---------------------------------------------------------------------------------------

_LAUNCHED = {  # variables that make accelerate lay out or compile the model
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
    "ACCELERATE_DYNAMO_BACKEND": "torch.compile",
}
_taken: dict[str, str] = {}  # those that were set


def take_environment() -> None:
    """Takes variables of FSDP, DeepSpeed and torch.compile out of the environment, which the launcher or the program has
    set: models would be loaded empty, or wrapped. `_arguments` maps what they ask for."""
    for name, what in _LAUNCHED.items():
        value = os.environ.pop(name, "")
        if value.lower() in ("", "0", "false", "no"):
            continue
        _taken[name] = value
        done = {"FSDP": "sharded by +z of the strategies", "DeepSpeed": "its config is mapped"}.get(what, "left out")
        say(f"{what} of the environment ({name}): {done}")
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp16":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if _has_bf16() else "no"
        say(f"fp16 of the environment: {os.environ['ACCELERATE_MIXED_PRECISION']} instead, as losses are not scaled")


def _has_bf16() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def _asked_by_environment(args: Any) -> None:
    """Gives the arguments what accelerate's variables asked for, unless they ask for it themselves."""
    if _taken.pop("ACCELERATE_USE_FSDP", "") and not args.fsdp:
        resharded = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
        stage = os.environ.get("FSDP_SHARDING_STRATEGY", resharded).lower()
        offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true"
        args.fsdp, args.fsdp_config = True, {"reshard_after_forward": stage, "offload_params": offload}
    if _taken.pop("ACCELERATE_USE_DEEPSPEED", "") and not args.deepspeed:
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
        args.deepspeed = file or {"zero_optimization": {"stage": int(stage)}, "train_micro_batch_size_per_gpu": "auto"}


def _models(module: ModuleType) -> None:
    base: Any = module.PreTrainedModel
    load = base.from_pretrained.__func__

    @wraps(load)
    def from_pretrained(cls: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        take_environment()
        path = given_flags().get("hotspa_model_path")
        if path is not None and name is not None and Path(str(name)).expanduser() == Path(path).expanduser():
            return _opened(path, kwargs)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and (given := kwargs.get("device_map")) not in (None, "cpu", "meta"):
            kwargs["device_map"] = {"": "cpu"} if kwargs.get("quantization_config") is not None else None
            say(f"device_map={given!r} is left out: each process keeps its copy of the model in host memory, and its "
                "share on the device (--model-path FOLDER reads the share alone)")  # fmt: skip
        return load(cls, name, *args, **kwargs)

    base.from_pretrained = classmethod(from_pretrained)


def _opened(path: str, kwargs: Mapping[str, Any]) -> Any:
    """The model of a folder without weights: each process reads its share when training starts."""
    from hf_hotspa.engine.loading import open_model

    say(f"{path}: each process reads its share of the weights")
    model = open_model(Path(path).expanduser(), kwargs.get("config"))
    return (model, {}) if kwargs.get("output_loading_info") else model


# -- arguments --------------------------------------------------------------------------------------------------------


def _arguments(module: ModuleType) -> None:
    """Patches `__post_init__` of the class itself, which some programs call by class."""
    take_environment()
    stock: Any = module.TrainingArguments
    post_init = stock.__post_init__

    @wraps(post_init)
    def __post_init__(self: Any) -> None:
        from hf_hotspa.trainer import arguments

        if isinstance(self, arguments.HotSPaTrainingArguments):
            post_init(self)
            return
        take_environment()
        _asked_by_environment(self)
        _replace(self)
        with arguments.launch_taken(self):
            post_init(self)

    stock.__post_init__ = __post_init__


_WITHOUT_EFFECT = {  # argument -> what is said
    "use_liger_kernel": "the loss is computed shard by shard anyway, and no logits of a whole row exist",
    "torch_compile": "layers move between layouts",
}


def _replace(args: Any) -> None:
    """Replaces arguments that front ends set by default, with one line each."""
    for name, why in _WITHOUT_EFFECT.items():
        if getattr(args, name, False):
            say(f"{name}={getattr(args, name)!r} is ignored: {why}")
            setattr(args, name, False)
    if getattr(args, "fp16", False):
        args.fp16, args.bf16 = False, args.bf16 or _has_bf16()
        say(f"fp16=True: {'bf16' if args.bf16 else 'fp32'} instead, as losses are not scaled")
    if getattr(args, "activation_offloading", False):
        args.activation_offloading, args.gradient_checkpointing = False, True
        say("activation_offloading=True: layers are recomputed instead (+rc)")
    elif hasattr(args, "activation_offloading"):
        args.activation_offloading = False  # None means no, too


# -- trainers ---------------------------------------------------------------------------------------------------------


def _trainers(module: ModuleType) -> None:
    stock: Any = module.Trainer
    init = stock.__init__

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_hotspa.errors import UnsupportedError
        from hf_hotspa.trainer.trainer import SwitchedMixin, switched

        note_trainer()
        if issubclass(cls, SwitchedMixin):
            return object.__new__(cls)
        try:
            made = switched(cls)
            made.hotspa_check_class()
        except UnsupportedError as reason:
            say(f"{_name(cls)} trains as without hf-hotspa: {reason}")
            return object.__new__(cls)
        say(f"{_name(cls)} trains over a switched model, by overrides in front of {_name(_behind(made))}")
        return object.__new__(made)

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        """Programs may call `Trainer.__init__` by class, which passes over ours."""
        from hf_hotspa.trainer.trainer import SwitchedMixin

        if isinstance(self, SwitchedMixin) and "args" not in vars(self):
            SwitchedMixin.__init__(self, *args, **kwargs)
        else:
            init(self, *args, **kwargs)

    stock.__new__, stock.__init__ = staticmethod(__new__), __init__


def _name(cls: type) -> str:
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"


def _behind(made: type) -> type:
    """The library's trainer that our overrides stand in front of."""
    order = made.__mro__
    at = max(i for i, cls in enumerate(order) if cls.__module__.startswith("hf_hotspa"))
    return order[at + 1]


# -- modules ----------------------------------------------------------------------------------------------------------


def _hooks() -> dict[str, Hook]:
    from hf_hotspa.front.programs import HOOKS

    return {
        "transformers.modeling_utils": _models,
        "transformers.training_args": _arguments,
        "transformers.trainer": _trainers,
        **HOOKS,
    }


class _Hooked(Loader):
    """A loader that calls a hook after the module has run."""

    def __init__(self, loader: Any, hook: Hook) -> None:
        self._loader, self._hook = loader, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._hook(module)

    def __getattr__(self, name: str) -> Any:  # get_source, get_filename, ...
        return getattr(self._loader, name)


class _Finder(MetaPathFinder):
    """Adds the hooks to the specs that the other finders find."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hook = self._hooks.get(fullname)
        for finder in sys.meta_path if hook is not None else ():
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None and hook is not None:
                    spec.loader = _Hooked(spec.loader, hook)
                return spec
        return None


def install() -> None:
    """Waits for the modules to be imported."""
    sys.meta_path.insert(0, _Finder(_hooks()))
