"""DeepSpeed's JSON configs: every field becomes an argument, has nothing to say here, or is refused by its name.

What DeepSpeed calls ZeRO stage 1 is always on: fp32 weights, optimizer state and the sums of the gradients over phases
and ranks are spread over all ranks. Stages 2 and 3 are `+z2` and `+z3` of the strategies. Nothing here imports DeepSpeed,
torch or transformers.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.trainer.deepspeed_fields import ARGUMENTS, AUTO, KNOWN, NO_SWITCH, OFF, ONLY, UNUSED
from hf_hotspa.trainer.deepspeed_schedule import LINEAR, LOG, TYPES, DeepSpeedSchedule

_STAGES = {
    0: "masters and optimizer state are spread over all ranks all the same",
    1: "masters and optimizer state are spread over all ranks",
    2: "strategies that say nothing of it are run with +z2: gradients leave layer by layer; auto weighs that anyway",
    3: "strategies that say nothing of it are run with +z3: weights come layer by layer, too; auto weighs that anyway",
}
_SETTLED = frozenset(section + name for section, names in UNUSED.items() for name in names)
_MAX_SHOWN = 60


@dataclass(frozen=True)
class DeepSpeedMapping:
    """What a config comes to.

    Args:
        arguments: The training arguments that it sets.
        rows: `(field and value, what became of it)`.
        unused: Fields that say how DeepSpeed does what the engine does in its own way.
        scheduler: Type and params of its scheduler, some perhaps `auto`; None where the arguments' one counts.
        stage: 2 or 3 where it asks for that stage of ZeRO, else 0.
    """

    arguments: dict[str, Any]
    rows: tuple[tuple[str, str], ...]
    unused: tuple[str, ...] = ()
    scheduler: dict[str, Any] | None = None
    stage: int = 0

    def schedule(self, learning_rate: float, num_steps: int, warmup_steps: int) -> DeepSpeedSchedule:
        """The learning rates. What the config leaves open is as the training arguments say."""
        assert self.scheduler is not None
        kind = self.scheduler["type"]
        known = TYPES[kind]
        of_arguments = {
            "warmup_num_steps": max(1, warmup_steps),
            "total_num_steps": num_steps,
            "warmup_max_lr": learning_rate,
            "warmup_min_lr": 0.0,
        }
        given = {name: self.scheduler.get(name, default) for name, default in known.items()}
        params: dict[str, Any] = {
            n: of_arguments.get(n, known[n]) if value in (None, AUTO) else value for n, value in given.items()
        }
        return DeepSpeedSchedule(kind, params, params.get("warmup_max_lr", learning_rate))

    def __str__(self) -> str:
        width = max((len(left) for left, _ in self.rows), default=0)
        lines = [f"  {left:<{width}}  {right}" for left, right in self.rows]
        if self.unused:
            lines.append(f"  not used here (the engine decides how it moves and stores): {', '.join(self.unused)}")
        return "\n".join(["the DeepSpeed config:", *lines])


def read_config(given: Mapping[str, Any] | str | Path, name: str = "the DeepSpeed config") -> dict[str, Any]:
    """A config as a dict.

    Args:
        given: A dict, JSON text, or the path of a JSON file.

    Raises:
        HotspaConfigError: there is no such file, or it holds no JSON object.
    """
    if isinstance(given, Mapping):
        return dict(given)
    text, where = str(given), name
    try:
        if not text.lstrip().startswith("{"):
            where, text = text, Path(text).read_text()
        config = json.loads(text, object_pairs_hook=_without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise HotspaConfigError(
            f"{name} cannot be read: {error}", where=where, fix="give the path of a JSON file, or a dict"
        ) from error
    if not isinstance(config, dict):
        raise HotspaConfigError(f"{name} is no JSON object: {text[:_MAX_SHOWN]!r}", where=where)
    return config


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section = dict(pairs)
    if len(section) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return section


def map_config(
    config: Mapping[str, Any], arguments: Mapping[str, Any], defaults: Mapping[str, Any]
) -> DeepSpeedMapping:
    """Maps a config, field by field.

    Args:
        arguments: The training arguments as they were given.
        defaults: Their defaults: an argument that has another value was set, and must not contradict the config.

    Raises:
        UnsupportedError: naming every field that cannot be honoured, and what to use instead.
    """
    return _Mapper(config, arguments, defaults).result()


class _Mapper:
    def __init__(self, config: Mapping[str, Any], arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._config, self._given, self._defaults = config, arguments, defaults
        self._set: dict[str, Any] = {}
        self._rows: list[tuple[str, str]] = []
        self._unused: list[str] = []
        self._problems: list[str] = []
        self._scheduler: dict[str, Any] | None = None
        self._zero_stage = 0

    def result(self) -> DeepSpeedMapping:
        for section, content in self._config.items():
            if section in OFF:
                self._feature(section, content)
                continue
            for field, value in _leaves({section: content}):
                self._field(field, value)
        self._read_optimizer()
        self._read_scheduler()
        if self._problems:
            raise UnsupportedError(
                f"{len(self._problems)} of the fields of the DeepSpeed config cannot be honoured: "
                + "; ".join(self._problems),
                fix="change these fields, or leave them out",
            )
        return DeepSpeedMapping(self._set, tuple(self._rows), tuple(self._unused), self._scheduler, self._zero_stage)

    def _field(self, field: str, value: Any) -> None:
        if field.partition(".")[0] == "scheduler" or field in ("optimizer.type", "optimizer.params.betas"):
            return  # read together
        if field == "zero_optimization.stage":
            self._stage(value)
        elif field == "zero_optimization.offload_optimizer.device":
            self._offload(field, value)
        elif field in ARGUMENTS:
            self._argument(field, value, *ARGUMENTS[field])
        elif field in ONLY:
            fine, instead = ONLY[field]
            if _is_one_of(value, fine):
                self._unused.append(field)
            else:
                self._refuse(field, value, instead)
        elif field in _SETTLED:
            self._unused.append(field)
        elif value == {} and any(known.startswith(f"{field}.") for known in KNOWN):
            pass  # an empty section
        else:
            near = difflib.get_close_matches(field, KNOWN, 1, 0.75)
            self._refuse(field, value, f"no such field is known{f' (is it {near[0]}?)' if near else ''}")

    def _refuse(self, field: str, value: Any, why: str) -> None:
        shown = json.dumps(value, default=repr)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
        self._problems.append(f"{field}={shown}: {why}")

    def _feature(self, section: str, content: Any) -> None:
        """A feature that must be off: by `enabled`, or, where that does not exist, by an empty section."""
        enabled = content
        if isinstance(content, Mapping):
            enabled = content.get("enabled", bool(content) and section in NO_SWITCH)
        if enabled not in (False, AUTO, None):
            self._refuse(section if section in NO_SWITCH else f"{section}.enabled", enabled, OFF[section])

    def _stage(self, value: Any) -> None:
        if not _is_one_of(value, (0, 1, 2, 3)):
            self._refuse("zero_optimization.stage", value, "ZeRO has the stages 0, 1, 2 and 3")
            return
        self._zero_stage = value if value >= 2 else 0
        self._rows.append((f"zero_optimization.stage={value}", _STAGES[value]))

    def _offload(self, field: str, value: Any) -> None:
        if value in ("none", None):
            self._unused.append(field)
        elif value == "cpu":
            self._argument(field, "master", "hotspa_offload", str, shown=value)
        else:
            self._refuse(field, value, "the master store is in memory, on the devices or on the host: use cpu or none")

    def _argument(self, field: str, value: Any, name: str, kind: type, shown: Any = None) -> None:
        """Sets an argument, if nothing else was said for it."""
        if value == AUTO:
            self._rows.append((f"{field}=auto", f"{name}, as the training arguments say"))
            return
        if not _is_a(value, kind):
            self._refuse(
                field, value, f"{name} must be {'true or false' if kind is bool else f'of type {kind.__name__}'}"
            )
            return
        value = kind(value)
        given = self._set.get(name, self._given[name])
        if given != value and (name in self._set or given != self._defaults[name]):
            self._refuse(field, value, f"{name} is {given}; make them equal, or write auto")
            return
        self._set[name] = value
        self._rows.append((f"{field}={json.dumps(value if shown is None else shown)}", f"{name}={value}"))

    def _read_optimizer(self) -> None:
        section = self._config.get("optimizer")
        if not isinstance(section, Mapping) or not section:
            return
        kind, optim = section.get("type"), getattr(self._given["optim"], "value", self._given["optim"])
        if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
            self._refuse("optimizer.type", kind, "leave the optimizer out, and set optim to an elementwise one")
        elif optim in ("adamw_torch", "adamw_torch_fused"):
            self._rows.append((f"optimizer.type={kind}", f"optim={optim}"))
        else:
            self._refuse("optimizer.type", kind, f"optim is {optim}; leave one of them out")
        params = section.get("params")
        betas = params.get("betas", AUTO) if isinstance(params, Mapping) else AUTO
        if betas == AUTO:
            return
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            self._refuse("optimizer.params.betas", betas, "give two numbers")
            return
        for index, beta in enumerate(betas):
            self._argument(f"optimizer.params.betas[{index}]", beta, f"adam_beta{index + 1}", float)

    def _read_scheduler(self) -> None:
        section = self._config.get("scheduler")
        if section in (None, {}):
            return
        kind = section.get("type") if isinstance(section, Mapping) else None
        if not isinstance(section, Mapping) or not isinstance(kind, str) or kind not in TYPES:
            others = f"leave it out and use lr_scheduler_type, or use one of {', '.join(TYPES)}"
            self._refuse("scheduler.type", kind, others)
            return
        params = section.get("params") or {}
        if not isinstance(params, Mapping):
            self._refuse("scheduler.params", params, "give an object")
            return
        if self._given["lr_scheduler_type"] != self._defaults["lr_scheduler_type"]:
            self._refuse(
                "scheduler.type",
                kind,
                f"lr_scheduler_type is {self._given['lr_scheduler_type']}; leave one of them out",
            )
        self._scheduler = {"type": kind, **params}
        for name in [name for name in section if name not in ("type", "params")]:
            self._refuse(f"scheduler.{name}", section[name], "no such field is known")
        for name, value in params.items():
            field = f"scheduler.params.{name}"
            if name not in TYPES[kind]:
                self._refuse(field, value, f"{kind} takes {', '.join(TYPES[kind])}")
            elif name == "warmup_type":
                if value not in (LOG, LINEAR):
                    self._refuse(field, value, f"use {LOG} or {LINEAR}")
            elif name == "warmup_max_lr":
                self._argument(field, value, "learning_rate", float)
            elif not (_is_rate(name, value) or (value == AUTO and name.endswith(("_steps", "_lr")))):
                self._refuse(field, value, f"give a number{' of steps' if name.endswith('_steps') else ''}")
        shown = ", ".join(f"{name}={params.get(name, default)}" for name, default in TYPES[kind].items())
        self._rows.append((f"scheduler.type={kind}", f"the learning rates of {kind}({shown})"))


def _is_a(value: Any, kind: type) -> bool:
    if kind in (bool, str):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return kind is float or float(value).is_integer()


def _is_rate(name: str, value: Any) -> bool:
    return _is_a(value, int) and value > 0 if name.endswith("_steps") else _is_a(value, float) and value >= 0


def _is_one_of(value: Any, fine: tuple[Any, ...]) -> bool:
    """Like `in`, but neither true nor false is a number."""
    return any(value is one or (value == one and isinstance(value, bool) == isinstance(one, bool)) for one in fine)


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def with_batch_size(mapping: DeepSpeedMapping, arguments: Mapping[str, Any], world_size: int) -> DeepSpeedMapping:
    """Holds DeepSpeed's three batch sizes against one another, when the number of processes is known.

    Args:
        arguments: The training arguments, those of the config among them.

    Returns:
        The mapping, in whose table the sequences of a step are named.

    Raises:
        UnsupportedError: `train_batch_size` is not the product of the others and the processes.
    """
    said = mapping.arguments
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, steps = (arguments[name] for name in names)
    total = said.get("hotspa_mini_batch_size")
    if total is None:
        return mapping
    factors = [arguments[name] for name in names if name in said]
    product = world_size * math.prod(factors)
    exact = len(factors) == len(names)
    if (exact and product != total) or total % product:
        raise UnsupportedError(
            f"the DeepSpeed config has train_batch_size={total}, and {world_size} processes with "
            f"train_micro_batch_size_per_gpu={micro} and gradient_accumulation_steps={steps} make {world_size * micro * steps}",
            fix="write auto for one of them, or leave train_batch_size out",
        )
    row = f"{total} sequences a step, over all processes and as many packs as their lengths make"
    return replace(mapping, rows=(*mapping.rows, ("", row)))
