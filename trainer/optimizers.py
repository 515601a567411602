"""The optimizer of a run: which may run on shares of the weights, how one moves onto them, and its learning rates.

Each rank holds a flat share of every weight. An update from complete matrices, rows or norms of a tensor would depend
on the cut, hence on the number of ranks; such an optimizer raises an error. Blocks of elements are never cut, so
optimizers that scale or quantize by block run if a feature knows their library (`engine.optimizer_states`).
"""

import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames

from hf_hotspa.checkpoint.tensors import CPU_ADAM, Share, optimizer_to_json
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.master import MasterShare, bare_optimizer
from hf_hotspa.engine.optimizer_states import special, states_of
from hf_hotspa.errors import HotspaConfigError, UnsupportedError
from hf_hotspa.model.model_kind import other_half
from hf_hotspa.model.replica import to_storage
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.trainer.cpu_adam import cpu_adam_class, load_cpu_adam
from hf_hotspa.trainer.deepspeed_config import DeepSpeedSchedule
from hf_hotspa.trainer.described import text_of
from hf_hotspa.trainer.step_hooks import attached, check_attached
from hf_hotspa.versions import version_of

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


def _library_of(kind: type) -> str | None:
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
    if isinstance(optimizer_class, type) and _library_of(optimizer_class) is not None:
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
    if _library_of(type(optimizer)) is not None:
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


def _integers(value: Any, depth: int = 4) -> set[int]:
    """The integers in nested containers: ids of parameters are among them."""
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

    def get(self, key: int, default: Any = None) -> Any:
        if key in self.watched:
            self.names.append(self.watched[key])
            return None
        return super().get(key, default)


def _copy(optimizer: Optimizer, parameters: list[list[nn.Parameter]], met: _Met) -> Optimizer:
    """An optimizer like this one without its state, whose groups have these parameters."""
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


def _names(engine: HotSPaEngine, model: nn.Module) -> dict[int, str]:
    specs = engine.description.vector.specs
    known = {name: spec.name for spec in specs for name in (spec.name, *spec.tied_names)}
    named = model.named_parameters(remove_duplicate=False)
    return {id(parameter): known[name] for name, parameter in named if name in known}


def take_over(optimizer: Any, engine: HotSPaEngine, model: nn.Module, saved: bool = False) -> bool:
    """Replaces the model's parameters by this rank's shares; False if all are shares already. Not collective.
    `optimizer`: may be in accelerate's wrapper; changed in place, the same on all ranks. `saved`: whether checkpoints
    will hold its state and options. Raises `UnsupportedError` if it cannot be honoured; the optimizer is unchanged."""
    bare, shares = bare_optimizer(optimizer), engine.master.parameters
    own, parameters = set(map(id, shares.values())), [p for group in bare.param_groups for p in group["params"]]
    if parameters and own.issuperset(map(id, parameters)):
        return False  # the case in every step
    names = _names(engine, model)
    idle = {id(p) for p in other_half(bare_model(model)[0]).values()}  # these have no gradient, so no step moves them
    given = [p for p in parameters if id(p) not in idle]
    kind = type(bare).__name__
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


def _refuse_thawed(names: list[str]) -> None:
    if names:
        raise UnsupportedError(
            f"the parameter {names[0]!r} was frozen when training started and is to be trained now",
            why="which parameters have gradients is laid out at the start",
            fix="unfreeze it before train(), with a learning rate of 0 until it is to be trained",
        )


def _cut(optimizer: Optimizer, state: Any, share: MasterShare) -> Any:
    """The state of a parameter, cut to this rank's share."""
    if _library_of(type(optimizer)) is not None:
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


def release(optimizer: Any, engine: HotSPaEngine, model: nn.Module) -> None:
    """Replaces the shares by the model's parameters; the state stays this rank's share, for `take_over`."""
    bare, parameters = bare_optimizer(optimizer), dict(model.named_parameters())
    states_of(type(bare)).disown(bare)
    back = {id(share): parameters[name] for name, share in engine.master.parameters.items() if name in parameters}
    for group in bare.param_groups:
        group["params"][:] = [back.get(id(p), p) for p in group["params"]]
    for share in [p for p in bare.state if id(p) in back]:
        bare.state[back[id(share)]] = bare.state.pop(share)


def _places(engine: HotSPaEngine) -> dict[str, Any]:
    """What this rank's share of each trained parameter is."""
    shares, dtype = engine.master.shares, engine.description.compute_dtype
    return {
        name: (tuple(spec.shape), dtype, spec.shard_dim, start, stop)
        for name in engine.master.trained
        for spec, start, stop, *_ in [shares[name]]
    }


logger = logging.getLogger(__name__)

_CPU_ADAM_TAKES = ("lr", "betas", "eps", "weight_decay")


class DeepSpeedLR(LRScheduler):
    """The learning rates of a DeepSpeed scheduler, which are the same for all groups."""

    def __init__(self, optimizer: Optimizer, schedule: DeepSpeedSchedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self.schedule.rate(self.last_epoch) for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The position; the rates themselves come from the config."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}


class MasterOptimizer:
    """A trainer's `optimizer` (and `lr_scheduler`) on this rank's shares of the weights."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.watched: weakref.ref[Optimizer] | None = None  # the optimizer that this engine took over last
        self._made: weakref.ref[Optimizer] | None = None  # from the arguments
        self._attached = list[Any]()  # and elementwise
        self._left: tuple[weakref.ref[Optimizer], dict[str, Any]] | None = None  # by a closed engine, and its shares

    def made(self, optimizer: Any) -> Any:
        """Remembers the optimizer that was made from the arguments: it ends with the engine."""
        self._made = weakref.ref(optimizer)
        return optimizer

    def let_go(self, restarts: bool) -> None:
        """Called before the engine is closed. The optimizer is kept, as with the stock Trainer, if a new engine is
        about to start or the user gave it; otherwise its memory is freed with the engine's. Not collective."""
        trainer, optimizer, watched = self._trainer, self._trainer.optimizer, self.watched
        self.watched = None
        if optimizer is None:
            return
        if restarts or self._made is None or self._made() is not bare_optimizer(optimizer):
            release(optimizer, trainer.engine, trainer._hotspa_model.module)
            if watched is not None and watched() is bare_optimizer(optimizer):
                self._left = watched, _places(trainer.engine)
        else:
            trainer.optimizer = trainer.lr_scheduler = None

    def take_over(self) -> None:
        """Puts the optimizer onto the master store. Collective; called before the first step."""

        def taken_over() -> Optimizer:
            optimizer: Optimizer | None = self._trainer.optimizer
            if optimizer is None:
                what, why = (
                    "create_optimizer was overridden and sets no optimizer",
                    "the Trainer ignores what it returns",
                )
                raise UnsupportedError(what, why=why, fix="set self.optimizer in it")
            self.put_on_master_store(optimizer)
            return optimizer

        facts = lambda made: optimizer_facts(made, self._trainer.lr_scheduler)  # noqa: E731
        self._trainer.engine.agreement.run("optimizer", taken_over, facts=facts)

    def put_on_master_store(self, optimizer: Optimizer) -> None:
        """Takes over an optimizer. Not collective; the same on all ranks."""
        args = self._trainer.args
        saved = args.save_strategy != SaveStrategy.NO and not args.save_only_model
        library = _library_of(type(bare_optimizer(optimizer)))
        if saved and library is not None and args.hotspa_stock_checkpoints:
            raise UnsupportedError(
                f"hotspa_stock_checkpoints with the optimizer {type(bare_optimizer(optimizer)).__name__} of {library}",
                why="the master store has some weights transposed, so that other elements share a scale than in optimizer.pt",
                fix="leave hotspa_stock_checkpoints out; checkpoints hold the weights in transformers' format anyway",
            )
        bare, engine = bare_optimizer(optimizer), self._trainer.engine
        if self._left is not None and self._left[0]() is bare and self._left[1] != _places(engine):
            raise UnsupportedError(
                f"the parameters of the model, or which are trained, have changed since the optimizer {type(bare).__name__} was used",
                why="its groups and its state are of the earlier parameters: new ones would not be trained",
                fix="make a new trainer for the changed model",
            )
        take_over(optimizer, engine, self._trainer.model, saved)
        self.watched = weakref.ref(bare_optimizer(optimizer))
        self._trainer.callback_handler.before_step = self.check_attached
        # groups that are added during training have parameters of the model
        self._trainer.switched.on_other_parameters = self._take_over_added

    def check_attached(self) -> None:
        """Checks what is attached to the optimizer: step hooks, a replaced `step`. Before each step. Raises
        `UnsupportedError` if it would act on shares in another way than on complete weights."""
        optimizer = self._trainer.optimizer
        for when, function in attached(optimizer):
            if not any(function == known for known in self._attached):
                check_attached(optimizer, when, function)
                self._attached.append(function)

    def _take_over_added(self, optimizer: Optimizer) -> None:
        if self.watched is not None and self.watched() is bare_optimizer(optimizer):
            take_over(optimizer, self._trainer.engine, self._trainer.model)

    def settings(self) -> dict[str, str]:
        """The optimizer's settings, which may change at any time."""
        return group_facts(self._trainer.optimizer) | {"max_grad_norm": text_of(self._trainer.args.max_grad_norm)}

    def on_host(self, kind: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """With the master store in host memory, uses DeepSpeed's CPU Adam for torch's AdamW, if all ranks have it."""
        args, engine = self._trainer.args, self._trainer.engine
        if args.hotspa_offload != "master" or kind is not torch.optim.AdamW:
            return kind, options
        reason = None
        if any(p.dtype != torch.float32 for _, p in engine.named_parameters()):
            reason = "it steps on fp32 weights only"
        for first in (True, False):  # one process of a machine compiles, and the others use the result
            if reason is None and (args.local_process_index == 0) == first:
                reason = load_cpu_adam()
            missing = engine.any_rank(reason is not None)
            if missing:
                break
        if not missing:
            return cpu_adam_class(), {key: options[key] for key in _CPU_ADAM_TAKES if key in options}
        if args.process_index == 0:
            logger.warning(
                "hotspa_offload=master: the optimizer is torch's AdamW, which takes longer than DeepSpeed's CPU Adam: %s",
                reason or "another rank does not have it",
            )
        return kind, options


# -- what ranks agree on ----------------------------------------------------------------------------------------------


def optimizer_facts(optimizer: Optimizer, scheduler: Any) -> dict[str, str]:
    """Kind and settings of optimizer and scheduler."""
    state = {} if scheduler is None else scheduler.state_dict() | {"functions": vars(scheduler).get("lr_lambdas")}
    bare = bare_optimizer(optimizer)
    kind, plain = type(bare), {k: v for k, v in vars(bare).items() if isinstance(v, bool | int | float | str)}
    library = _library_of(kind)
    return {
        "the optimizer": text_of(kind) if library is None else f"{kind.__name__} of {library} {version_of(library)}",
        "attributes of the optimizer": text_of(plain),
        "the scheduler": type(scheduler).__name__,
        **group_facts(optimizer),
        **{f"{key} of the scheduler": text_of(value) for key, value in state.items()},
    }


def group_facts(optimizer: Optimizer) -> dict[str, str]:
    """Rates, decays and all other settings of the parameter groups."""
    return {
        f"{key} of parameter group {number}": text_of(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
