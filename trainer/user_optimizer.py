"""An optimizer on the parameters of the user's model, moved onto the master store in place.

Owns the way from the parameter objects in an optimizer's groups to this rank's shares of them. It promises:

* The optimizer object stays, hence what is bound to it: learning-rate schedulers, hooks, references of the user's.
* What it would do on one process it does on the shares: groups and options stay, a state that it already has is cut
  like the weights, and a parameter in no group is not updated.
* What it cannot do is found before the first step: parameters of something else, none that is trained, an update that
  is not elementwise, references to parameters outside of its groups.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hf_hotspa.checkpoint.tensors import Share, bare_optimizer, optimizer_to_json
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.master import MasterShare
from hf_hotspa.errors import UnsupportedError
from hf_hotspa.model.storage import to_storage
from hf_hotspa.trainer.optimizers import check_optimizer

_FIX = "build it on model.parameters() of the model that the trainer was given, or leave it to --optim"


def _names(engine: HotSPaEngine, model: nn.Module) -> dict[int, str]:
    """The id of every parameter of the model -> its name in the master store; tied ones have one name."""
    specs = engine.description.vector.specs
    known = {name: spec.name for spec in specs for name in (spec.name, *spec.tied_names)}
    named = model.named_parameters(remove_duplicate=False)
    return {id(parameter): known[name] for name, parameter in named if name in known}


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def take_over(optimizer: Any, engine: HotSPaEngine, model: nn.Module, saved: bool = False) -> bool:
    """Puts this rank's shares in the place of the model's parameters. Not collective; the same on all ranks.

    Args:
        optimizer: The optimizer, perhaps in accelerate's wrapper; changed in place.
        saved: Whether checkpoints will hold its state and options.

    Returns:
        Whether anything changed: False where all its parameters are shares already.

    Raises:
        UnsupportedError: it cannot be honoured; the optimizer is unchanged.
    """
    bare, shares = bare_optimizer(optimizer), engine.master.parameters
    own, names = {id(share) for share in shares.values()}, _names(engine, model)
    given = list(_parameters(bare))
    if all(id(parameter) in own for parameter in given) and given:
        return False
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
    thawed = [names[id(p)] for p in given if id(p) in moved and p.requires_grad and not moved[id(p)].requires_grad]
    if thawed:
        raise UnsupportedError(
            f"the parameter {thawed[0]!r} was frozen when training started and is to be trained now",
            why="which parameters have gradients is laid out at the start",
            fix="unfreeze it before train(), with a learning rate of 0 until it is to be trained",
        )
    after = [moved.get(id(p), p) for p in given]
    if not any(share.requires_grad for share in after):
        raise UnsupportedError(
            f"the optimizer {kind} has none of the parameters that are trained",
            why="nothing would be trained",
            fix=_FIX,
        )
    if len({id(share) for share in after}) < len(after):
        raise UnsupportedError(f"the optimizer {kind} has a parameter twice", fix=_FIX)
    shares = engine.master.shares
    state = {id(p): _cut(value, shares[names[id(p)]], kind) for p, value in bare.state.items() if id(p) in moved}
    for group in bare.param_groups:
        group["params"][:] = [moved.get(id(p), p) for p in group["params"]]
    for parameter in [p for p in bare.state if id(p) in moved]:
        del bare.state[parameter]
        bare.state[moved[id(parameter)]] = state[id(parameter)]
    try:
        check_optimizer(bare, {id(p): name for name, p in model.named_parameters()})
        if saved:
            optimizer_to_json(bare, Share())
    except UnsupportedError:
        release(bare, engine, model)
        raise
    return True


def _cut(state: Any, share: MasterShare, kind: str) -> Any:
    """The state of a parameter, cut to what this rank owns of it."""
    cut, (spec, start, stop, *_) = {}, share
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != (stop - start,):
            if tuple(value.shape) != tuple(spec.shape):
                raise UnsupportedError(
                    f"the state {key!r} that the optimizer {kind} has of {spec.name!r} is of shape {tuple(value.shape)}",
                    why="only what has one value for each weight can be spread over ranks",
                    fix="use an elementwise optimizer such as torch.optim.AdamW",
                )
            value = to_storage(value, spec.shard_dim)[start:stop].clone()
        cut[key] = value
    return cut


def release(optimizer: Any, engine: HotSPaEngine, model: nn.Module) -> None:
    """Puts the model's parameters in the place of the shares; the state stays this rank's share, for `take_over`."""
    bare, parameters = bare_optimizer(optimizer), dict(model.named_parameters())
    back = {id(share): parameters[name] for name, share in engine.master.parameters.items() if name in parameters}
    for group in bare.param_groups:
        group["params"][:] = [back.get(id(p), p) for p in group["params"]]
    for share in [p for p in bare.state if id(p) in back]:
        bare.state[back[id(share)]] = bare.state.pop(share)
