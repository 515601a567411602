"""The optimizer of a run: which may run on shares of the weights, how one moves onto them, and its learning rates.

Each rank holds a flat share of every weight. An update from complete matrices, rows or norms of a tensor would depend
on the cut, hence on the number of ranks; such an optimizer raises an error. Blocks of elements are never cut, so
optimizers that scale or quantize by block run if a feature knows their library (`engine.optimizer_states`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.training_args import OptimizerNames

from hf_hotspa.checkpoint.tensors import CPU_ADAM, Share, optimizer_to_json
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.master import MasterShare, bare_optimizer
from hf_hotspa.engine.optimizer_states import special, states_of
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.model.model_kind import other_half
from hf_hotspa.model.replica import to_storage
from hf_hotspa.parallel.wrapped_model import bare_model

ELEMENTWISE_OPTIMIZERS = (  # the values of `--optim` that are elementwise and need no further package or device
    OptimizerNames.ADAMW_TORCH,
    OptimizerNames.ADAMW_TORCH_FUSED,
    OptimizerNames.SGD,
    OptimizerNames.ADAGRAD,
    OptimizerNames.RMSPROP,
)

_WHY = "every rank updates a flat share of each weight, and only elementwise optimizers are exact on that"
_OTHER = "use an elementwise optimizer such as torch.optim.AdamW"
_REASONS = {
    "whole matrices or the norm of whole tensors": (
        "adafactor", "lomo", "adalomo", "galore", "apollo", "stable_adamw", "grokadamw",
    ),
    "separate weights in evaluation": ("schedule_free",),
}  # fmt: skip


def library_of(kind: type) -> str | None:
    library: str | None = states_of(kind).library_of(kind)
    return library


def check_optimizer_name(optim: OptimizerNames) -> None:
    """Checks a value of `--optim`. Raises `UnsupportedError` if it is not elementwise, or needs an untested package;
    `HotspaConfigError` if its package is not installed."""
    if optim in ELEMENTWISE_OPTIMIZERS:
        return
    for module in special():
        library = module.library_of_optim(optim.value)
        if library is not None:
            module.check_installed(library, optim.value)
            return
    needs = next((need for need, parts in _REASONS.items() if any(part in optim.value for part in parts)), None)
    names = ", ".join([*(o.value for o in ELEMENTWISE_OPTIMIZERS), *(module.SUGGESTED for module in special())])
    raise UnsupportedError(
        f"the optimizer {optim.value!r} cannot be honoured",
        why=f"it needs {needs}; {_WHY}" if needs else "it needs another package or device, and nobody has tested it",
        fix=f"use one of {names}, or pass optimizer_cls_and_kwargs with an elementwise class",
    )


def check_elementwise(optimizer_class: Any, kwargs: dict[str, Any]) -> None:
    """Tries a user's optimizer class on small tensors, complete and as flat shares. Raises `UnsupportedError` if shares
    end up different from complete tensors, or it does not accept 1-D parameters; `HotspaConfigError` if it makes
    numbers that are not finite."""
    if isinstance(optimizer_class, type) and library_of(optimizer_class) is not None:
        return  # its objects are checked before the first step
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    try:
        made = optimizer_class([{"params": [nn.Parameter(torch.ones(shape)) for shape in _SHAPES]}], **kwargs)
    except Exception as error:
        raise _does_not_run(name, error) from error
    _try_out(name, made, _Met({}), {})


def check_optimizer(
    optimizer: Optimizer, elsewhere: Mapping[int, str] | None = None, shapes: Mapping[int, Sequence[int]] | None = None
) -> None:
    """As `check_elementwise`, for an optimizer object. Copies of it are tried; it and its parameters stay unchanged.
    `elsewhere`: ids -> names of parameters that it must not refer to. `shapes`: ids of its parameters that are shares
    -> the shapes of the complete parameters. Raises `HotspaConfigError`: as above; `UnsupportedError`: as above; or it
    refers to one of those parameters outside of its groups."""
    name, met = type(optimizer).__name__, _Met(elsewhere or {})
    if name == CPU_ADAM:
        return  # ours; a copy would share the C++ object
    if library_of(type(optimizer)) is not None:
        states_of(type(optimizer)).check(optimizer)
        return
    _try_out(name, optimizer, met, shapes or {})
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    names = met.names + [met.watched[number] for number in _integers([vars(optimizer), options]) & met.watched.keys()]
    if names:
        raise UnsupportedError(
            f"the optimizer {name} refers to {names[0]!r} outside of its parameter groups",
            why="it would continue to use the parameter of the model, which is not the one that is trained",
            fix="keep parameters in param_groups only, or use an optimizer such as torch.optim.AdamW",
        )


def _integers(value: object, depth: int = 4) -> set[int]:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return set[int]().union(*(_integers(inner, depth - 1) for inner in value))
    return {value} if isinstance(value, int) else set()


class _Met(dict[int, Any]):
    """The memo of a deep copy, which records whether it met the watched objects."""

    def __init__(self, watched: Mapping[int, str]) -> None:
        super().__init__()
        self.watched, self.names = watched, list[str]()

    def get(self, key: int, default: object = None) -> Any:
        if key in self.watched:
            self.names.append(self.watched[key])
            return None
        return super().get(key, default)


def _copy(optimizer: Optimizer, parameters: list[list[nn.Parameter]], met: _Met) -> Optimizer:
    met.clear()
    copied = object.__new__(type(optimizer))
    met[id(optimizer)] = copied
    groups = []
    for group, given in zip(optimizer.param_groups, parameters, strict=True):
        options = {key: deepcopy(value) for key, value in group.items() if key != "params"}
        groups.append({"params": list(given), **options})
        met[id(group)] = groups[-1]
        met[id(group["params"])] = groups[-1]["params"]
        met.update((id(p), None) for p in group["params"])
    met[id(optimizer.param_groups)] = groups
    met[id(optimizer.state)] = defaultdict[Any, Any](dict)
    for key, value in vars(optimizer).items():
        if key == "step":
            continue  # schedulers wrap it, bound to the original
        if key.endswith("_hooks"):
            copied.__dict__[key] = type(value)()
            continue
        try:
            copied.__dict__[key] = deepcopy(value, met)
        except Exception:  # locks, files and similar objects are shared
            copied.__dict__[key] = value
    return copied


_Shapes = list[list[tuple[int, ...]]]  # by group
_SHAPES = (5,), (3, 4), (4, 3), (2, 3, 4)
_SIZES = 12, 12_345  # the sizes of vectors that are tried: some optimizers keep low-bit states for large ones only
_MOST_ELEMENTS, _FEW = 1 << 18, 4  # most elements of a tensor that is tried; the width of further ones of its shape
_SLOPES, _MOST_STEPS, _LEAST_RATE = (1.0, -3.0, 0.5, 1e-3), 300, 1e-3


def _try_out(name: str, optimizer: Optimizer, met: _Met, shapes_of: Mapping[int, Sequence[int]]) -> None:
    """Compares a few steps on complete tensors, of the shapes of the optimizer's parameters, with steps of two ranks
    that have flat shares of them; and on vectors. Relative to the distance moved, in fp64 if supported, so that tiny
    steps count."""
    groups = [group["params"] for group in optimizer.param_groups]
    given = [[tuple(shapes_of.get(id(p), p.shape)) for p in group] for group in groups]
    devices = [p.device for group in groups for p in group]
    device = devices[0] if devices else torch.device("cpu")

    def make(parameters: list[list[nn.Parameter]]) -> Optimizer:
        for group, tried in zip(groups, parameters, strict=True):
            for like, parameter in zip(group, tried, strict=False):
                vars(parameter).update(vars(like))  # marks that a step may read
                parameter.requires_grad_(like.requires_grad)
        return _copy(optimizer, parameters, met)

    of_model = [_reduced(given, last) for last in (True, False)]
    vectors: list[_Shapes] = [[[(size,)] if group else [] for group in groups] for size in _SIZES]
    for shapes in [*vectors, *(of_model if of_model[0] != of_model[1] else of_model[:1])]:
        _try_shapes(name, make, device, shapes)


def _reduced(shapes: _Shapes, last: bool) -> _Shapes:
    """The shapes, but small: of a large tensor the last width stays, or the first; further tensors of a shape are tiny."""
    known = set[tuple[int, ...]]()

    def small(shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape in known:
            return tuple(min(width, _FEW) for width in shape)
        known.add(shape)
        widths = list(shape)
        for at in range(len(shape)) if last else reversed(range(len(shape))):
            widths[at] = max(min(widths[at], widths[at] * _MOST_ELEMENTS // max(math.prod(widths), 1)), 1)
        return tuple(widths)

    return [[small(shape) for shape in group] for group in shapes]


def _does_not_run(name: str, error: Exception) -> UnsupportedError:
    what = f"the optimizer {name} does not run on 1-D parameters: {type(error).__name__}: {error}"
    return UnsupportedError(what, why=_WHY, fix=_OTHER)


_Make = Callable[[list[list[nn.Parameter]]], Optimizer]


def _try_shapes(name: str, make: _Make, device: torch.device, shapes: _Shapes) -> None:
    try:
        try:
            starts, ends = _trials(make, device, torch.float64, shapes)
        except Exception:  # kernels that only accept fp32
            starts, ends = _trials(make, device, torch.float32, shapes)
    except Exception as error:
        raise _does_not_run(name, error) from error
    whole, first, rest = ends
    if not all(bool(end.isfinite().all()) for end in whole):
        groups = make([[nn.Parameter(torch.ones(shape)) for shape in group] for group in shapes]).param_groups
        odd = {k: v for group in groups for k, v in group.items() if isinstance(v, float) and not math.isfinite(v)}
        named = ", ".join(f"{key}={value}" for key, value in odd.items())
        raise HotspaConfigError(
            f"the optimizer {name} makes weights that are not finite of finite gradients{f' ({named})' if named else ''}",
            fix="give its options finite values",
        )
    for shape, start, end, *shares in zip(chain(*shapes), starts, whole, first, rest, strict=True):
        rounding = 1e-4 * (end - start).abs().max() + 8 * torch.finfo(start.dtype).eps * start.abs().max()
        for share, part in zip(shares, _cuts(start.numel()), strict=True):
            # kernels may round the tails of vectors differently
            if not bool(((share - end[part]).abs() <= rounding).all()):
                raise UnsupportedError(
                    f"the optimizer {name} is not elementwise: it updates a parameter of shape {list(shape)} in another way "
                    "than flat shares of it",
                    why=_WHY,
                    fix=_OTHER,
                )


def _cuts(size: int) -> tuple[slice, slice]:
    """The shares of two ranks, of very different sizes: a step may look at sizes."""
    first = -(-size // 12)
    return slice(0, first), slice(first if size > 1 else 0, size)


def _trials(
    make: _Make, device: torch.device, dtype: torch.dtype, shapes: _Shapes
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Starts of all parameters, flat, and their ends: of complete tensors, and of the shares of each of two ranks.

    Takes as many steps as needed until a few have moved every group: some optimizers warm up by themselves. A learning
    rate near 0, from the beginning of a schedule, is replaced by a larger one.
    """
    starts, slopes, ends, number = list[Tensor](), list[Tensor](), [], None
    for at, shape in enumerate(chain(*shapes)):
        size, signs = math.prod(shape), torch.tensor([1.0, 1.0, -1.0], device=device, dtype=dtype)
        starts.append(torch.linspace(-1.0, 2.0, size, device=device, dtype=dtype))
        slope = torch.linspace(0.1, 5.0, size, device=device, dtype=dtype).square() * (1 + at % 3)
        slopes.append(slope * signs.repeat(size // 3 + 1)[:size])
    for share in (None, 0, 1):
        parts = [slice(None) if share is None else _cuts(start.numel())[share] for start in starts]
        flat = [nn.Parameter(start[part].clone()) for start, part in zip(starts, parts, strict=True)]
        if share is None:
            flat = [nn.Parameter(p.detach().view(shape)) for p, shape in zip(flat, chain(*shapes), strict=True)]
        rest = iter(flat)
        optimizer = make([[next(rest) for _ in group] for group in shapes])
        trained = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, int | float | Tensor) and 0 <= rate < _LEAST_RATE:
                group["lr"] = torch.full_like(rate, _LEAST_RATE) if isinstance(rate, Tensor) else _LEAST_RATE
        moved = made = 0
        while moved < len(_SLOPES) and made < _MOST_STEPS if number is None else made < number:
            before = [[p.detach().clone() for p in group] for group in trained]
            for parameter, slope, part in zip(flat, slopes, parts, strict=True):
                of_step = _SLOPES[made % len(_SLOPES)] * slope[part]
                parameter.grad = of_step.view(parameter.shape).clone() if parameter.requires_grad else None
            optimizer.step()
            made += 1
            moved += all(
                not group or any(not torch.equal(p.detach(), old) for p, old in zip(group, olds, strict=True))
                for group, olds in zip(trained, before, strict=True)
            )
        number = made
        ends.append([p.detach().flatten() for p in flat])
    return starts, ends


_FIX = "build it on model.parameters() of the model that the trainer was given, or leave it to --optim"


def take_over(optimizer: object, engine: HotSPaEngine, model: nn.Module, saved: bool = False) -> bool:
    """Replaces the model's parameters by this rank's shares; False if all are shares already. Not collective.
    `optimizer`: may be in accelerate's wrapper; changed in place, the same on all ranks. `saved`: whether checkpoints
    will hold its state and options. Raises `UnsupportedError` if it cannot be honoured; the optimizer is unchanged."""
    bare, shares = bare_optimizer(optimizer), engine.master.parameters
    own, parameters = set(map(id, shares.values())), [p for group in bare.param_groups for p in group["params"]]
    if parameters and own.issuperset(map(id, parameters)):
        return False  # the case in every step
    known = {name: spec.name for spec in engine.description.vector.specs for name in (spec.name, *spec.tied_names)}
    named = model.named_parameters(remove_duplicate=False)
    names = {id(parameter): known[name] for name, parameter in named if name in known}
    # these are frozen, so no step moves them
    idle = {id(p) for p in other_half(bare_model(model)[0]).values()} - names.keys()
    given = [p for p in parameters if id(p) not in idle]
    moved = _moved(type(bare).__name__, given, own, names, shares)
    of_kind, shares = states_of(type(bare)), engine.master.shares
    overrides = of_kind.overrides_of(bare)
    for p in given:
        if id(p) in moved:  # marks that a step may read, such as a factor of the rate
            vars(moved[id(p)]).update(vars(p))
    cut = {id(p): _cut(bare, value, shares[names[id(p)]]) for p, value in bare.state.items() if id(p) in moved}
    for group in bare.param_groups:
        group["params"][:] = [moved.get(id(p), p) for p in group["params"] if id(p) not in idle]
    for parameter in [p for p in bare.state if id(p) in moved]:
        del bare.state[parameter]
        bare.state[moved[id(parameter)]] = cut[id(parameter)]
    by_id = {id(share): shares[name].spec.shape for name, share in engine.master.parameters.items()}
    try:
        check_optimizer(bare, {id(p): name for name, p in model.named_parameters()}, by_id)
        of_kind.adopt(bare, engine.master, {id(moved[of]): given for of, given in overrides.items() if of in moved})
        if saved:
            optimizer_to_json(bare, Share())
    except UnsupportedError:
        release(bare, engine, model)
        raise
    return True


def _moved(
    kind: str, given: list[nn.Parameter], own: set[int], names: dict[int, str], shares: Mapping[str, nn.Parameter]
) -> dict[int, nn.Parameter]:
    """The share of each parameter of the model that an optimizer (`kind`) was given. Raises `UnsupportedError`: others are
    among them, none is trained, or one is there twice."""
    foreign = [tuple(p.shape) for p in given if id(p) not in own and id(p) not in names]
    if foreign:
        raise UnsupportedError(
            f"{len(foreign)} of the {len(given)} parameters of the optimizer {kind} are not the model's, the first of "
            f"shape {foreign[0]}",
            why="they would not be trained",
            fix=_FIX,
        )
    moved = {id(p): shares[names[id(p)]] for p in given if id(p) in names}
    _refuse_thawed(
        [names[id(p)] for p in given if id(p) in moved and p.requires_grad and not moved[id(p)].requires_grad]
    )
    after = [moved.get(id(p), p) for p in given]
    if not any(share.requires_grad for share in after):
        what = f"the optimizer {kind} has none of the parameters that are trained"
        raise UnsupportedError(what, why="nothing would be trained", fix=_FIX)
    if len({id(share) for share in after}) < len(after):
        raise UnsupportedError(f"the optimizer {kind} has a parameter twice", fix=_FIX)
    return moved


def _refuse_thawed(names: list[str]) -> None:
    if names:
        raise UnsupportedError(
            f"the parameter {names[0]!r} was frozen when training started and is to be trained now",
            why="which parameters have gradients is laid out at the start",
            fix="unfreeze it before train(), with a learning rate of 0 until it is to be trained",
        )


def _cut(optimizer: Optimizer, state: Any, share: MasterShare) -> Any:
    """The state of a parameter, cut to this rank's share."""
    if library_of(type(optimizer)) is not None:
        return dict(states_of(type(optimizer)).cut_state(optimizer, state, share))
    cut, (spec, start, stop, *_) = {}, share
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != (stop - start,):
            if tuple(value.shape) != tuple(spec.shape):
                raise UnsupportedError(
                    f"the state {key!r} that the optimizer {type(optimizer).__name__} has of {spec.name!r} is of shape "
                    f"{tuple(value.shape)}",
                    why="only states with one value for each weight can be spread over ranks",
                    fix=_OTHER,
                )
            value = to_storage(value, spec.shard_dim)[start:stop].clone()
        cut[key] = value
    return cut


def release(optimizer: object, engine: HotSPaEngine, model: nn.Module) -> None:
    """Replaces the shares by the model's parameters; the state stays this rank's share, for `take_over`."""
    bare, parameters = bare_optimizer(optimizer), dict(model.named_parameters())
    states_of(type(bare)).disown(bare)
    back = {id(share): parameters[name] for name, share in engine.master.parameters.items() if name in parameters}
    for group in bare.param_groups:
        group["params"][:] = [back.get(id(p), p) for p in group["params"]]
    for share in [p for p in bare.state if id(p) in back]:
        bare.state[back[id(share)]] = bare.state.pop(share)
