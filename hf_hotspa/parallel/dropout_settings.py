"""What of a model's dropout can be trained: the settings of its config, and what its modules hold.

Dropout that draws from torch's generator draws other masks under every layout, and is refused here by name; what is
served is in `parallel.dropout`.
"""

import copy
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.parallel.adapters import without_adapters
from hf_hotspa.parallel.attention import calls_attention
from hf_hotspa.parallel.isolation import LayerKind


def held_rates(module: nn.Module) -> dict[str, float]:
    """The probabilities that a module itself holds for dropout, as numbers or as `nn.Dropout`, by attribute."""
    numbers = {n: float(v) for n, v in vars(module).items() if "drop" in n and isinstance(v, int | float)}
    return numbers | {n: m.p for n, m in module.named_children() if isinstance(getattr(m, "p", None), float)}


def attention_dropouts(config: PreTrainedConfig) -> dict[str, float]:
    """The settings of a config that drop attention probabilities, as far as they are above 0."""
    settings = config.get_text_config().to_dict().items()
    return {key: value for key, value in settings if _drops_attention(key) and _is_positive(value)}


def without_attention_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a config whose model drops no attention probabilities."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for key in attention_dropouts(config):
        setattr(text, key, 0.0)
    return config


def _drops_attention(key: str) -> bool:
    return _is_dropout(key) and "att" in key


def _is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("pdrop")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def refuse_dropout(
    model: PreTrainedModel, layers: Sequence[nn.Module], kinds: Sequence[LayerKind], of_attention: bool = True
) -> None:
    """Refuses dropout and jitter of a config that would draw from torch's generator in a replica.

    Served are `nn.Dropout` between the layers, and dropout of attention probabilities in layers whose attention goes
    through the interface of transformers and runs packed.

    Args:
        model: The model, with or without adapters.
        of_attention: Whether the config's dropout of attention probabilities will be left in.

    Raises:
        UnsupportedError: naming the setting of the config.
    """
    text = model.config.get_text_config()
    modules = without_adapters(model).values()
    served = {module.p for module in modules if isinstance(module, nn.Dropout)}
    called = {
        rate
        for module in modules
        for name, rate in held_rates(module).items()
        if not isinstance(getattr(module, name), nn.Module) and not (calls_attention(module) and "att" in name)
    }
    own = _own_attention(layers, kinds) if of_attention else None
    for key, value in text.to_dict().items():
        of_another_head = key.startswith(("classifier", "summary"))
        if not (_is_dropout(key) or key.endswith("jitter_noise")) or of_another_head or not _is_positive(value):
            continue
        why = "its layers draw other random numbers under every layout, so hot-switched training would not be exact"
        fix = f"set config.{key} = 0.0"
        if _drops_attention(key):
            if own is None:
                continue
            why = f"{own} drops attention probabilities by itself, other ones under every layout"
            fix = f"set hotspa_attention_dropout=0, or config.{key} = 0.0"
        elif _is_dropout(key) and value in served and value not in called:
            continue
        raise UnsupportedError(f"{text.model_type} config has {key}={value}", why=why, fix=fix)


def _own_attention(layers: Sequence[nn.Module], kinds: Sequence[LayerKind]) -> str | None:
    """The class of a module that would drop attention probabilities by itself; None where there is none."""
    attends = False
    for layer, kind in zip(layers, kinds, strict=True):
        modules = dict(layer.named_modules())
        if attention := next((m for m in modules.values() if calls_attention(m)), None):
            attends = True
            if kind.alone:
                return type(attention).__name__
            continue
        for name, module in modules.items():  # state spaces and the like have none
            if any("att" in f"{name}.{attribute}" and rate > 0 for attribute, rate in held_rates(module).items()):
                return type(module).__name__
    return None if attends else type(layers[0]).__name__
