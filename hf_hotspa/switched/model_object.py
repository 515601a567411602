"""What callers attach to a model object, which replicas do not have, and calls of the object itself.

* TRL's `add_fused_lm_head` and PEFT's input hooks are off while an engine is built; their settings are read;
* a forward of the object goes to the switched model, whose weights are current. Generation runs on the object.
"""

import functools
import inspect
import json
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_hotspa.checkpoint.tensors import copy_buffers
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.loading import has_weights, whole_parameters
from hf_hotspa.errors import HotspaError, UnsupportedError
from hf_hotspa.exchanges import set_class
from hf_hotspa.model.model_check import Facts, changed_facts, check_hooks, deciding_values, module_facts, weights_digest
from hf_hotspa.model.model_kind import of_text, text_base
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.parallel.loss import SequenceLoss
from hf_hotspa.parallel.wrapped_model import bare_model, called_model


class Called(Protocol):
    """What calls of a model object go to."""

    def forward(self, *args: Any, **kwargs: Any) -> object: ...
    def refresh(self) -> None: ...


class Stepped(Protocol):
    """What is told before an optimizer steps; `on_other_parameters`, of parameters that are not its own, too."""

    on_other_parameters: Callable[[Optimizer], None] | None

    def step_begins(self) -> None: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def only_requires_grad(hook: Callable[..., object]) -> bool:
    """Whether a forward hook only makes the output require a gradient, which changes no number: scripts, transformers,
    PEFT and TRL attach it to the embedding for gradient checkpointing."""
    code = getattr(hook, "__code__", None)
    if code is None or code.co_freevars or not set(code.co_names) <= {"requires_grad_", "requires_grad"}:
        return False
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return False
    before = torch.arange(6.0).view(1, 2, 3)
    output = before.clone()
    try:
        given = hook(None, (), output)
    except Exception:  # it may need its module or inputs
        return False
    return (given is None or given is output) and output.requires_grad and torch.equal(output, before)


def fused_head(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Reads the arguments of TRL's `add_fused_lm_head` from the closure of the forward. `dtype`: what the engine
    computes in. Raises `UnsupportedError`: an argument is not supported."""
    forward = vars(model).get("forward")
    function = getattr(forward, "__func__", None)
    head = dict(inspect.getclosurevars(function).nonlocals) if function is not None else {}
    if head.get("cast_lm_head_to_fp32") and dtype.itemsize < 4:
        raise UnsupportedError(
            "cast_lm_head_to_fp32 in 16-bit training",
            why="the head computes in the dtype of the weights, and its logits are widened afterwards",
            fix="leave it out",
        )
    return head


def refuse_other_forward(model: nn.Module) -> None:
    """Rejects a forward on the object that is neither TRL's, accelerate's nor ours. Raises `UnsupportedError`: it would
    be lost."""
    forward = vars(called_model(model)).get("forward")
    function = getattr(forward, "__func__", forward)
    library = getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
    if forward is not None and library not in ("trl", "accelerate", "hf_hotspa"):
        raise UnsupportedError(
            "the forward of the model was replaced on the object",
            why="the model is rebuilt for every strategy and the replacement would be lost",
            fix="subclass the model instead",
        )


@contextmanager
def as_built(model: nn.Module) -> Iterator[None]:
    """Removes, inside, input hooks and the object's custom forward or loss function."""
    called = vars(called_model(model))
    own = {name: called.pop(name) for name in ("forward", "_loss_function") if name in called}
    hung = [m._forward_hooks for m in model.modules() if any(map(only_requires_grad, m._forward_hooks.values()))]
    before = [dict(hooks) for hooks in hung]
    for hooks in hung:
        for key, hook in list(hooks.items()):
            if only_requires_grad(hook):
                del hooks[key]
    try:
        yield
    finally:
        called.update(own)
        for hooks, every in zip(hung, before, strict=True):
            hooks.clear()
            hooks.update(every)


class Route:
    """Whether calls of a model object go to its switched model: trainers also call `self.model`, whose weights are old.

    Otherwise it computes by itself, without a trace of this class. Generation always does, with the current weights.

    Attributes:
        is_on: Whether calls go to the switched model.
        is_empty: Whether the object has no weights; its own calls then raise an error.
        of_chain: Whether the model is inside a chain of modules. Calls of the switched model then run the chain.
    """

    def __init__(self, model: nn.Module, switched: Called) -> None:
        self._model, self._switched = weakref.ref(called_model(bare_model(model)[0])), weakref.ref(switched)
        self.is_on, self.is_empty, self._is_closed = False, not has_weights(model), False
        self.of_chain, self._in_chain = isinstance(model, nn.Sequential), False
        self._chain = weakref.ref(model)
        if self.of_chain:
            switched.forward = functools.partial(self._run_chain, model)  # type: ignore[method-assign]
        self._own: Callable[..., object] | None = None  # TRL's forward on the object
        self._routed: Callable[..., object] | None = None
        self._made: tuple[object, Callable[..., object]] | None = (
            None  # a forward of the object, and what routes its calls
        )

    def set(self, on: bool) -> bool:
        """Routes calls or leaves them to the object; returns how it was."""
        was, model = self.is_on, self._model()
        if model is None or self._is_closed:
            return was
        own, self.is_on = vars(model), on
        if not on and not self.is_empty:
            if self._routed is not None and own.get("forward") is self._routed:  # else somebody has wrapped it
                del own["forward"]
                own.update({} if self._own is None else {"forward": self._own})
            self._routed = None
        elif self._routed is None:
            self._own = own.get("forward")
            if self._made is None or self._made[0] is not self._own:
                self._made = self._own, self._over(self._own)
            self._routed = own["forward"] = types.MethodType(self._made[1], model)
        if self.of_chain and (chain := self._chain()) is not None:
            vars(chain).pop("forward", None)
            vars(chain).update({"forward": types.MethodType(self._routed_forward_of_chain, chain)} if on else {})
        return was

    def _run_chain(self, chain: nn.Module, *args: object, **kwargs: object) -> object:
        was = self.set(True)
        try:
            return chain(*args, **kwargs)
        finally:
            self.set(was)

    def _routed_forward_of_chain(self, chain: nn.Module, *args: object, **kwargs: object) -> object:
        was, self._in_chain = self._in_chain, True
        try:
            out = type(chain).forward(chain, *args, **kwargs)
        finally:
            self._in_chain = was
        return self._for_the_caller(out)

    def _for_the_caller(self, out: object) -> object:
        if not self.of_chain or self._in_chain:
            return out
        return getattr(bare_model(self._chain())[0], "of_chain", lambda made: made)(out)  # type: ignore[arg-type]

    def close(self) -> None:
        self.is_empty = False
        self.set(False)
        self._is_closed = True

    def _over(self, own: Callable[..., object] | None) -> Callable[..., object]:
        forward: Callable[..., object] = getattr(type(self._model()), "forward")  # noqa: B009
        if own is not None:
            forward = getattr(own, "__func__", lambda _, *args, **kwargs: own(*args, **kwargs))

        @functools.wraps(forward)  # `generate` looks at the signature
        def routed(model: nn.Module, *args: Any, **kwargs: Any) -> object:
            is_own = model is self._model()  # a copy is another model
            to = self._switched() if self.is_on and is_own else None
            if to is not None and not kwargs.get("use_cache") and kwargs.get("past_key_values") is None:
                return self._for_the_caller(type(to).forward(to, *args, **kwargs))
            if self.is_empty and is_own:
                raise HotspaError(
                    "trainer.model has no weights (its parameters are on the meta device)",
                    why="each rank has read its share of the weights alone",
                    fix="call trainer.materialize() on every rank first",
                )
            if to is not None:
                to.refresh()
            return forward(model, *args, **kwargs)

        return routed


class AdapterLayers:
    """How the LoRA layers of a model object act; the LoRA layers of the replicas do the same.

    A callback may change factors (`set_scale`, `scale_layer`, the dict `scaling`): calls use them from the next step. Calls
    without gradients may switch adapters off, or to another one (a reference).

    Attributes:
        exist: Whether there are any.
        trained: The names of those that act in training; None without any.
    """

    def __init__(self, model: nn.Module, engine: HotSPaEngine) -> None:
        added, bare = engine.description.added, bare_model(model)[0]
        scaled = added.scalings if added else {}
        self._layers: dict[str, Any] = {path: bare.get_submodule(path) for path in scaled}
        self._places = [(path, name) for path, factors in scaled.items() for name in factors]
        self.exist = bool(self._layers)
        self.trained = (added.name,) if added is not None and self.exist else None
        every = [named for part in engine.part_models for named in part.named_modules()] if added else []
        self._replicas: list[tuple[str, Any]] = [
            (path, layer) for path, layer in every if path in self._layers and hasattr(layer, "scaling")
        ]  # other stages have none
        inside = added.inside if added else {}
        rows = {f"{path}{end}" for path in inside.keys() - self._layers.keys() for end in ("", ".token_adapter")}
        self._rows: list[Any] = [layer for path, layer in every if path in rows and hasattr(layer, "_disable_adapters")]
        self._copies = sorted(path for path, place in inside.items() if place.startswith("modules_to_save."))
        self._scalings = self._now()

    def _now(self) -> dict[tuple[str, str], float]:
        return {(path, name): float(self._layers[path].scaling.get(name, 0.0)) for path, name in self._places}

    def inspect(self, in_step: bool = False) -> tuple[tuple[str, ...], str, HotspaError | None]:
        """Returns the adapters whose parts the layers add (none if they are switched off, or merged into the base weights),
        the factors that have changed, as text (equal on all ranks with equal changes), and an error for what replicas
        cannot do. Not collective. `in_step`: whether a step has begun."""
        active = dict[tuple[str, ...], str]()  # by what acts, the first such layer
        for path, layer in self._layers.items():
            is_off = layer.disable_adapters or layer.merged
            active.setdefault(() if is_off else tuple(layer.active_adapters), path)
        now, words, error = self._now(), "", None
        if now != self._scalings:
            changed = [
                f"{path}.{name}={now[path, name]}"
                for path, name in sorted(now)
                if now[path, name] != self._scalings[path, name]
            ]
            words = f", with the LoRA scalings {_some(changed)} ({zlib.crc32(repr(changed).encode()):08x})"
        if len(active) > 1:
            kinds = [f"{list(names)} on {path}" for names, path in active.items()]
            error = UnsupportedError(
                f"single LoRA layers are switched: {_some(kinds)}",
                why="replicas switch all LoRA layers together",
                fix="change single layers with set_scale, scale_layer or requires_grad",
            )
        elif () in active and self._copies:
            error = UnsupportedError(
                f"the adapter is switched off, or merged, and trains copies of {_some(self._copies)}",
                why="replicas have the trained copies, not the layers that they replace",
                fix="give the reference as a separate model (ref_model), or leave modules_to_save out",
            )
        elif words and in_step:
            error = UnsupportedError(
                f"the adapter was changed within a step{words}",
                why="the batches of a step are trained together",
                fix="change it between steps, such as in on_step_begin or on_step_end",
            )
        return next(iter(active), ()), words, error

    def apply(self) -> None:
        """Uses the present factors from now on. Not collective; on all ranks, the same."""
        self._scalings = self._now()

    def set_replicas(self, active: tuple[str, ...] | None) -> None:
        """Makes the replicas act like this model's layers, with these adapters."""
        for path, layer in self._replicas:
            layer._disable_adapters = not active
            layer._active_adapter = list(active or layer.active_adapters)
            for name in layer.scaling:
                layer.scaling[name] = self._scalings[path, name]
        for layer in self._rows:
            layer._disable_adapters = not active


def nothing_to_train(active: tuple[str, ...] | None, trained: tuple[str, ...] | None, rank: int) -> HotspaError:
    """The error for a forward with gradients that reaches no trained parameter: adapters are off or switched to others, or
    all is frozen."""
    if active != trained:
        return UnsupportedError(
            f"a forward with gradients through the adapter {active[0]!r}, and {trained[0]!r} is trained"
            if active and trained
            else "a forward with gradients while adapters are switched off, or merged",
            where=f"rank {rank}",
            fix="call it under torch.no_grad(), as a reference",
        )
    return UnsupportedError(
        "requires_grad is False for all parameters", fix="keep one that is trained, or end the training"
    )


def before_steps(switched: Stepped) -> RemovableHandle:
    """Calls `step_begins` of the switched model before steps of any optimizer with its parameters."""
    target = weakref.ref(switched)
    own = {id(parameter) for _, parameter in switched.named_parameters()}

    def before(optimizer: Optimizer, *_: object) -> None:
        to, stepped_ids = target(), set[int]()
        for group in optimizer.param_groups:
            stepped_ids.update(map(id, group["params"]))
        if to is None or own.isdisjoint(stepped_ids):
            return
        to.step_begins()
        if to.on_other_parameters is not None and not own.issuperset(stepped_ids):
            to.on_other_parameters(optimizer)

    return register_optimizer_step_pre_hook(before)


def refuse_losses(options: EngineOptions) -> None:
    """Rejects engine options that have no effect if the caller computes the loss. Raises `UnsupportedError`: naming the
    option."""
    losses = {"loss": isinstance(options.loss, SequenceLoss), "label_smoothing": options.label_smoothing}
    for name, value in losses.items():
        if value:
            raise UnsupportedError(
                f"the engine option {name} in a switched model",
                why="the caller computes the loss",
                fix=f"leave {name} out; compute the loss from what forward returns",
            )


# -- changes of the model object --------------------------------------------------------------------------------------

# Changes between two steps apply from the next step, or raise an error by name. Replicas are built once;
# `ObjectChanges` inspects the object when a step begins:
#
# * buffers, such as the selection bias of experts, are copied into the replicas;
# * a newly frozen parameter gets no gradient, as with torch; one that was frozen when the replicas were built has no
#   place for a gradient, and unfreezing it is an error;
# * weights that were changed while current (`SwitchedModel.show`) are used;
# * factors of LoRA layers are copied into the replicas (`AdapterLayers`);
# * another config value, parameter, module, or module attribute is an error: the replicas were built from the old one.
#   Between two runs of a Trainer they are built again.


_SHOWN = 3
_as_text = functools.partial(json.dumps, sort_keys=True, default=str)


class ObjectChanges:
    """The differences between a model object and the engine's copy.

    Attributes:
        frozen: The trained parameters that the caller has frozen since, by the engine's names.
        all_frozen: Whether the last inspection saw no parameter that is trained.
    """

    def __init__(self, model: nn.Module, engine: HotSPaEngine) -> None:
        self._model, self._engine, self._bare = model, engine, bare_model(model)[0]
        specs = engine.description.vector.specs
        self._known = {name: spec for spec in specs for name in (spec.name, *spec.tied_names)}
        self._layout, self._parameters = self._named()
        self._is_of_text = of_text(self._bare) if text_base(self._bare) is not None else None
        self._config = _as_text(deciding_values(self._bare.config))
        self._facts = module_facts(self._bare, self._is_of_text)
        self._buffers = {name: buffer.clone() for name, buffer in self._bare.named_buffers()}
        self.frozen, self.all_frozen = frozenset[str](), False
        self.digest: str | None = None  # of the object's weights while they are current; None while they are old
        self._changed = dict[str, Tensor](), self.frozen, False

    def _named(self) -> tuple[dict[str, tuple[Any, ...]], dict[str, tuple[nn.Parameter, bool]]]:
        """Shape, dtype and class of each parameter, and each of the engine's with whether it was trained at the start."""
        layout, parameters = dict[str, tuple[Any, ...]](), dict[str, tuple[nn.Parameter, bool]]()
        for name, p in self._model.named_parameters(remove_duplicate=False):
            layout[name] = tuple(p.shape), p.dtype, getattr(type(p), "_true_class", type(p))
            if (spec := self._known.get(name)) is not None:
                parameters[spec.name] = p, spec.trainable
        return layout, parameters

    def show(self, digest: str | None = None) -> None:
        """Notes that the object has the current weights, of this digest if known. Not collective."""
        if self.digest is None and has_weights(self._model):  # else they may have been changed since
            self.digest = digest or weights_digest(self._model)

    def hide(self, guards: bool) -> None:
        """Notes that the weights that the object was shown with become old. Not collective."""
        if self.digest is not None:
            self.digest = None
            if guards:
                guard(self._model)

    def inspect_modules(self, inside: bool = False, trains: bool = True) -> tuple[str, HotspaError | None]:
        """Returns the changes since the last step, as text (equal on all ranks with equal changes), and an error for
        unsupported ones: all if more batches of the step follow (`inside`). `trains`: whether gradients follow;
        `requires_grad` is not read otherwise, as switching adapters changes it. Not collective."""
        layout, parameters = self._named()
        if layout != self._layout:
            return "", self._other_layout(layout)
        buffers, frozen, thawed = dict[str, Tensor](), set[str](), list[str]()
        for name, buffer in self._bare.named_buffers():
            known = self._buffers.get(name)
            if known is None or known.shape != buffer.shape or not torch.equal(known, buffer):
                buffers[name] = buffer
        self._parameters, num_trained = parameters, 0
        for name, (parameter, at_start) in parameters.items():
            num_trained += parameter.requires_grad
            if parameter.requires_grad != at_start:
                (frozen.add if at_start else thawed.append)(name)
        if not trains:
            frozen, thawed = set(self.frozen), []
        self.all_frozen = bool(frozen) and not num_trained
        weights = self.digest is not None and weights_digest(self._model) != self.digest
        self._changed = buffers, frozenset(frozen), weights
        words = f", with other buffers {_some(sorted(buffers))}" if buffers else ""
        if self._changed[1] != self.frozen:
            words += f", with requires_grad=False of {_some(sorted(frozen))}" if frozen else ", with nothing frozen"
        if weights:
            words += ", with other weights"
        config, facts = _as_text(deciding_values(self._bare.config)), module_facts(self._bare, self._is_of_text)
        if thawed or (words and inside) or config != self._config or facts != self._facts:
            return words, self._refused(words if inside else "", thawed, config, facts)
        return words, None

    def _other_layout(self, layout: Mapping[str, tuple[Any, ...]]) -> UnsupportedError:
        names = sorted(n for n in layout.keys() | self._layout.keys() if layout.get(n) != self._layout.get(n))
        return UnsupportedError(
            f"the parameters {_some(names)} were changed (name, shape, dtype or class) after the training had started",
            why="the replicas were built from the earlier ones",
            fix="change them before train()",
        )

    def _refused(self, inside: str, thawed: list[str], config: str, facts: Facts) -> UnsupportedError | None:
        """The error for changes that cannot be applied; `inside`: those within a step."""
        if inside:
            return UnsupportedError(
                f"a callback has changed the model in on_substep_end: the step would continue{inside}",
                why="accumulated batches are trained together, at the end of the step",
                fix="change it in on_step_end",
            )
        if thawed:
            return UnsupportedError(
                f"requires_grad of {_some(thawed)} was set to True after the training had started",
                why="which parameters have gradients is laid out at the start, where these were frozen",
                fix="unfreeze them before train(), in a parameter group with a learning rate of 0 until they are to be trained",
            )
        if config != self._config:
            before, after = json.loads(self._config), json.loads(config)
            names = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
            return UnsupportedError(
                f"the config values {_some(names)} were changed after the training had started",
                why="the replicas were built from the earlier config",
                fix="set them before train()",
            )
        if changes := changed_facts(facts, self._facts, self._bare):
            return UnsupportedError(
                f"{changes[0]} when the training had started ({len(changes)} differ)",
                why="the replicas were built from the earlier model",
                fix="put it into the config before train()",
            )
        return None

    def inspect_hooks(self) -> HotspaError | None:
        """Returns an error for hooks, and replaced forwards, which replicas do not have. Not collective."""
        try:
            refuse_other_forward(self._bare)
            with structure_only(), as_built(self._bare):
                check_hooks(self._model)
        except HotspaError as error:
            return error
        return None

    def apply(self) -> None:
        """Applies what `inspect_modules` saw. Not collective; on all ranks, the same."""
        buffers, frozen, weights = self._changed
        if buffers:
            with torch.no_grad():
                copy_buffers(buffers, self._engine.part_models)
            self._buffers |= {name: buffer.clone() for name, buffer in buffers.items()}
        self.frozen = frozen
        if weights:
            self._engine.master.fill(whole_parameters(self._model))
            self.digest = None
            self.show()
        self._changed = {}, frozen, False


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


# -- weights that are old ---------------------------------------------------------------------------------------------

# The trained weights are in the master store; the user's model has the weights of the last write-back. The guard
# promises:
#
# * Between the first mini-batch after the weights were current and the next time they are, reading or changing the
#   values of a trained parameter, or its gradient, raises a `HotspaError` that says what to do. Name, shape, dtype,
#   device, `requires_grad` and number of elements can always be read.
# * Parameters stay the same objects: references to them (optimizers, tied weights, the user's) stay valid.


_FACTS = {  # attributes that do not depend on the values
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_meta", "is_leaf", "is_cuda", "is_cpu", "is_xpu",
    "is_mps", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "names", "size", "dim", "numel", "nelement",
    "element_size", "stride", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "__len__",
    "requires_grad_", "is_same_size", "type", "retains_grad", "grad_fn", "output_nr",
}  # fmt: skip

_GRADIENTS = {"grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "_backward_hooks"}

_allowed = threading.local()


def _guard_error(name: str) -> HotspaError:
    if name in _GRADIENTS:
        return HotspaError(
            f"a parameter of trainer.model has no gradient here ({name})",
            why="gradients are spread over the ranks, in the master store, and parameters of the model never get any",
            fix="call trainer.engine.full_gradients() on every rank, or read grad_norm in the log",
        )
    return HotspaError(
        f"the weights in trainer.model are not the weights of this training step ({name})",
        why="the trained weights are spread over the ranks; the model is updated for callbacks, compute_metrics and "
        "evaluate, and after training",
        fix="read them there, or call trainer.materialize() on every rank first",
    )


@cache
def _guarded(kind: type[nn.Parameter]) -> type[nn.Parameter]:

    class Guarded(kind):  # type: ignore[valid-type,misc]
        _true_class = kind

        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            name = str(getattr(func, "__name__", func))
            if name in ("__get__", "__set__", "__delete__"):  # of an attribute
                name = func.__self__.__name__  # type: ignore[attr-defined]
            if name not in _FACTS and not getattr(_allowed, "depth", 0):
                raise _guard_error(name)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        def __repr__(self, **_: object) -> str:
            return f"Parameter of shape {tuple(self.shape)}, whose values are in the master store"

        def __reduce_ex__(self, protocol: object) -> NoReturn:
            raise _guard_error("copying")

        def __deepcopy__(self, memo: object) -> NoReturn:
            raise _guard_error("copying")

    Guarded.__name__ = kind.__name__
    Guarded.__qualname__ = kind.__qualname__
    return Guarded


def guard(model: nn.Module) -> None:
    """Makes the values of the trained parameters unreadable."""
    for parameter in model.parameters():
        if parameter.requires_grad and not hasattr(type(parameter), "_true_class"):
            set_class(parameter, _guarded(type(parameter)), "parameter")  # type: ignore[arg-type]


def release(model: nn.Module) -> None:
    """Undoes `guard`: the values are current, or are about to be."""
    for parameter in model.parameters():
        kind = getattr(type(parameter), "_true_class", None)
        if kind is not None:
            set_class(parameter, kind, "parameter")


@contextmanager
def structure_only() -> Iterator[None]:
    """Lets this thread handle guarded parameters, but not their values (`state_dict` for names, shapes and dtypes)."""
    _allowed.depth = getattr(_allowed, "depth", 0) + 1
    try:
        yield
    finally:
        _allowed.depth -= 1
