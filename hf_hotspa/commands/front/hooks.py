"""What `hf-hotspa run` changes in a program, as its modules are imported: nothing is imported before the program does.

* `transformers.TrainingArguments`: what would start DeepSpeed or FSDP is taken over by `HotSPaTrainingArguments`.
* `transformers.Trainer`: an object of any subclass is made as `switched(subclass)`.
* `PreTrainedModel.from_pretrained`: the model object stays in host memory.
* front ends and kernels: `hf_hotspa.commands.front.programs`.
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

from hf_hotspa.commands.front import launch, programs
from hf_hotspa.run_flags import given_flags, note_trainer, say

Hook = Callable[[ModuleType], None]


# -- models -----------------------------------------------------------------------------------------------------------


def _models(module: ModuleType) -> None:
    base: Any = module.PreTrainedModel
    load = base.from_pretrained.__func__

    @wraps(load)
    def from_pretrained(cls: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        launch.take()
        path = given_flags().get("hotspa_model_path")
        if path is not None and name is not None and Path(str(name)).expanduser() == Path(path).expanduser():
            return _opened(path, kwargs)
        given = kwargs.get("device_map")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and given not in (None, "cpu", "meta"):
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
    launch.take()
    stock: Any = module.TrainingArguments
    post_init = stock.__post_init__

    @wraps(post_init)
    def __post_init__(self: Any) -> None:
        from hf_hotspa.trainer import arguments

        if isinstance(self, arguments.HotSPaTrainingArguments):
            post_init(self)
            return
        launch.take()
        launch.give_to(self)
        launch.replace(vars(self))
        with arguments.launch_taken(self):
            post_init(self)

    stock.__post_init__ = __post_init__


# -- trainers ---------------------------------------------------------------------------------------------------------


def _trainers(module: ModuleType) -> None:
    stock: Any = module.Trainer
    init = stock.__init__

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_hotspa.errors import UnsupportedError
        from hf_hotspa.trainer.replaced import library_of
        from hf_hotspa.trainer.trainer import SwitchedMixin, switched

        note_trainer()
        if issubclass(cls, SwitchedMixin):
            return object.__new__(cls)
        try:
            made: Any = switched(cls)
            made.hotspa_check_class()
        except UnsupportedError as reason:
            say(f"{_name(cls)} trains as without hf-hotspa: {reason}")
            return object.__new__(cls)
        for given in (*args, *kwargs.values()):
            programs.restore_forwards(given)
        say(f"{_name(cls)} trains over a switched model, by overrides in front of {_name(library_of(cls))}")
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


# -- modules ----------------------------------------------------------------------------------------------------------


_HOOKS: dict[str, Hook] = {
    "transformers.modeling_utils": _models,
    "transformers.training_args": _arguments,
    "transformers.trainer": _trainers,
    **programs.HOOKS,
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


class HookFinder(MetaPathFinder):
    """Adds the hooks to the specs that the other finders find."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hook = self._hooks.pop(fullname, None)  # another finder of this kind may ask us while we ask it
        for finder in sys.meta_path if hook is not None else ():
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None and hook is not None:
                    spec.loader = _Hooked(spec.loader, hook)
                return spec
        return None


def install() -> None:
    """Waits for the modules to be imported."""
    sys.meta_path.insert(0, HookFinder(_HOOKS))
