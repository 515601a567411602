"""Front ends, and kernels that patch classes of models: their settings that would lay out or patch the model at loading.

Written against axolotl 0.19 and ms-swift 4.6. Each setting is replaced where the program reads it, with one line.
"""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_hotspa.commands.front import launch
from hf_hotspa.run_flags import say

# -- axolotl ----------------------------------------------------------------------------------------------------------

# Keys of its config by what becomes of them: plugins and keys that patch layers or the loss, kernels that it switches on by
# itself, and degrees.
_KEYS = Path(__file__).with_name("axolotl.json")


def _axolotl(module: ModuleType) -> None:
    """`prepare_plugins` is the first to see the complete config, and is called before it is validated."""
    prepare = module.prepare_plugins

    @wraps(prepare)
    def prepare_plugins(cfg: Any) -> None:
        adapt_axolotl(cfg)
        prepare(cfg)

    module.prepare_plugins = prepare_plugins  # type: ignore[attr-defined]


def adapt_axolotl(cfg: Any) -> None:
    """Changes a config of axolotl (a dictionary) in place."""
    keys = json.loads(_KEYS.read_text())
    plugins, dropped = tuple(keys["plugins"]), tuple(keys["dropped"])
    if patching := [name for name in cfg.get("plugins") or () if name.endswith(plugins)]:
        cfg["plugins"] = [name for name in cfg["plugins"] if name not in patching]
        say(f"left out, as no logits of a whole row exist and layers keep their own code: {', '.join(patching)}")
    for name in [name for name in cfg if name.startswith(dropped)]:
        cfg.pop(name)
    if kernels := [name for name in keys["off"] if cfg.get(name)]:
        say(f"left out, as layers keep their own code: {', '.join(kernels)}")
    cfg.update(dict.fromkeys(keys["off"], False))
    offloads = str(cfg.get("gradient_checkpointing")).startswith("offload")
    if cfg.pop("activation_offloading", None) or offloads:
        say("activation_offloading: layers are recomputed instead (+rc)")
        cfg["gradient_checkpointing"] = True
    for name in keys["degrees"]:
        if (degree := cfg.pop(name, None)) not in (None, 1):
            say(f"{name}: {degree} is left out: the strategies give the degrees")
    cfg["experimental_skip_move_to_device"] = True  # it stays in host memory
    _take_sharding(cfg)
    if cfg.pop("torch_compile", None):
        say("torch_compile is ignored: layers move between layouts")
    cfg.pop("torch_compile_backend", None)


def _take_sharding(cfg: Any) -> None:
    """Takes the sections of FSDP and DeepSpeed, before they set variables that make ranks load empty weights."""
    fsdp, config, version = cfg.pop("fsdp", None), cfg.pop("fsdp_config", None), cfg.pop("fsdp_version", None)
    if fsdp or config:
        if (config := dict(config or {})).pop("activation_checkpointing", None):
            cfg["gradient_checkpointing"] = True
        say("the section of FSDP: sharded by +z of the strategies")
        launch.ask("fsdp", True if fsdp in (None, True) or version == 2 else list(fsdp))
        launch.ask("fsdp_config", config)
    if deepspeed := cfg.pop("deepspeed", None):
        say(f"deepspeed: {deepspeed if isinstance(deepspeed, str) else 'its section'} is mapped onto arguments")
        launch.ask("deepspeed", deepspeed if isinstance(deepspeed, str) else dict(deepspeed))


# -- ms-swift ---------------------------------------------------------------------------------------------------------


def _swift(module: ModuleType) -> None:
    """`SftArguments` derives from `TrainingArguments`, and makes other ones from its fields."""
    kind: Any = module.SftArguments
    post_init = kind.__post_init__

    @wraps(post_init)
    def __post_init__(self: Any) -> None:
        launch.replace(vars(self))
        if (degree := getattr(self, "sequence_parallel_size", 1)) > 1:
            self.sequence_parallel_size = 1
            say(f"sequence_parallel_size={degree} is left out: the strategies give the degrees (cp)")
        post_init(self)
        launch.take()

    kind.__post_init__ = __post_init__


def restore_forwards(model: Any) -> None:
    """Takes back the forwards that ms-swift sets on layers to move their input to the weight's device: replicas are on
    one device, and are made from classes. `model`: an argument of a trainer; not changed unless it has modules."""
    for module in model.modules() if hasattr(model, "modules") else ():
        own = vars(module)
        if "forward_origin" in own and getattr(own.get("forward"), "__name__", "") == "keep_device_forward":
            del module.forward, module.forward_origin


# -- kernels ----------------------------------------------------------------------------------------------------------


def _no_patches(*beginnings: str) -> Callable[[ModuleType], None]:
    """A hook that makes functions which patch models or their classes do nothing."""

    def hook(module: ModuleType) -> None:
        def nothing(name: str) -> Callable[..., Any]:
            def unpatched(model: Any = None, *_: Any, **__: Any) -> Any:
                patched = f"{module.__name__.partition('.')[0]}.{name}"
                say(f"{patched} does nothing: no logits of a whole row exist, and layers keep their code")
                return model

            return unpatched

        names = [name for name in vars(module) if name.startswith(beginnings) and callable(getattr(module, name))]
        made = {getattr(module, name): nothing(name) for name in names}
        for name in names:
            setattr(module, name, made[getattr(module, name)])
        for table in [value for value in vars(module).values() if isinstance(value, dict)]:
            for key, value in table.items():
                if callable(value) and value in made:
                    table[key] = made[value]

    return hook


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "axolotl.cli.config": _axolotl,
    "swift.arguments.sft_args": _swift,
    "liger_kernel.transformers.monkey_patch": _no_patches("apply_liger_kernel", "_apply_liger_kernel"),
    "cut_cross_entropy.transformers.patch": _no_patches("cce_patch"),
}
"""Module -> what is changed after it has run."""
