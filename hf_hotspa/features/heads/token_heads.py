"""Heads over the hidden states of single tokens: which modules they are, and the model's own forward around them.

The forward of such a model calls its base, then modules that map the hidden state of each token alone (a linear layer), and
computes the rest from their outputs: which token counts, a loss. On a replica's last stage only these modules run.
On the rank that has the rows the class's forward itself runs, unchanged, on a shallow copy of the model: its base returns a
`Mark` in the place of hidden states, and a head that is called with the mark returns the numbers that the replicas have made.
If the forward itself uses hidden states, these are what the replicas give, all of them or, of a `Pooling`, one for each row.
Anything else that the forward does with a mark raises an error by name, so nothing is left out in silence.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput, TransformersKwargs

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.features.heads.masks import InPlaceOf, refuse_other_masks
from hf_hotspa.features.heads.pooling import Pooling, shares
from hf_hotspa.parallel.attention import calls_attention
from hf_hotspa.parallel.head_loss import BaseOutput
from hf_hotspa.parallel.wrapped_model import bare_model, base_layer

_INPUTS = ("input_ids", "attention_mask", "position_ids")
_UNREAD = frozenset({"use_cache", "return_dict", "num_items_in_batch"})
"""Arguments of a base without effect on hidden states in training."""
_FIX = "let the forward call the base once, give its last_hidden_state to modules that map single tokens, and use their outputs"


@cache
def _read_by(kinds: frozenset[type[nn.Module]]) -> frozenset[str]:
    """The names of arguments that a base, or a module in it, reads; it passes others on to no effect."""
    forwards = (inspect.signature(kind.forward).parameters for kind in kinds)
    return frozenset(TransformersKwargs.__annotations__).union(*forwards)


class Head(NamedTuple):
    """Modules that run one after another on a token's hidden state, or functions (`_FUNCTIONS`), and how many numbers the last
    one returns; without modules the hidden state itself."""

    modules: tuple[str, ...]
    width: int
    pooling: str = ""  # the kind of a `Pooling` at the end


class _UsedError(UnsupportedError):
    """Marks are used by the forward itself."""

    used: dict[tuple[str, ...], int]  # their paths and widths


NumbersOf = Callable[[tuple[str, ...]], Tensor | None]
"""The numbers [B, L, width] that modules make of hidden states; None if these are passed on to another module."""


class Mark(Tensor):
    """Stands for hidden states [B, L, h] in the model's own forward, or for what modules make of them, of all tokens or of
    chosen ones."""

    path: tuple[str, ...]  # the modules that have been called, from the hidden states on
    # int64 [B, L], or of any shape: the tokens, counted over all rows; None if nothing may read it
    places: Tensor | None
    numbers_of: NumbersOf
    use = "the forward of the model uses hidden states by itself"  # what is wrong if anything reads it
    fix = _FIX

    @staticmethod
    def make(
        like: Tensor, path: tuple[str, ...], places: Tensor | None = None, numbers_of: NumbersOf = lambda path: None
    ) -> "Mark":
        """A mark of the shape, dtype and device of a tensor."""
        mark: Mark = torch.Tensor._make_subclass(Mark, like)
        mark.path, mark.places, mark.numbers_of = path, places, numbers_of
        return mark

    def then(self, name: str, width: int | None = None) -> Tensor:
        """What a module, or function, makes of the tokens: numbers if they are known, else a mark. `width`: how many numbers
        it makes of a token, if others than it gets."""
        path = (*self.path, name)
        assert self.places is not None
        if (numbers := self.numbers_of(path)) is None:
            with torch._C.DisableTorchFunctionSubclass():
                like = self.new_zeros(()).expand(*self.places.shape, width or self.shape[-1])
            return Mark.make(like, path, self.places, self.numbers_of)
        every = torch.arange(self.places.numel(), device=self.places.device)
        is_of_all = self.places.shape == numbers.shape[:2] and torch.equal(self.places.flatten(), every)
        return numbers if is_of_all or numbers.dim() == 2 else numbers.flatten(0, 1)[self.places]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: object = None
    ) -> object:
        name, named = getattr(func, "__name__", str(func)), cast(dict[str, object], kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if name in _FACTS or (name == "__get__" and func.__self__.__name__ in _FACTS):  # type: ignore[attr-defined]
                return func(*args, **named)
            if name == "to" and args[1:] and args[1] in (args[0].dtype, args[0].device):
                return args[0]
            chosen = _chosen(*args) if name == "__getitem__" and isinstance(args[0], Mark) else None
        if chosen is not None:
            return chosen
        marks = [each for each in tree_leaves((args, named)) if isinstance(each, Mark)]
        is_plain = len(args) == 1 and all(value in (False, "none") for value in named.values())
        if name in _FUNCTIONS and is_plain and marks[0].places is not None:
            return marks[0].then(f"{name}()")
        error = _UsedError(f"{marks[0].use} ({name})", fix=marks[0].fix)
        error.used = {each.path: each.shape[-1] for each in marks}
        raise error


_FACTS = frozenset({"shape", "dtype", "device", "size", "dim", "ndim", "requires_grad", "is_cuda", "layout", "__len__"})
_FUNCTIONS = {"tanh": torch.tanh, "relu": torch.relu, "gelu": nn.functional.gelu, "silu": nn.functional.silu}
"""Functions of single numbers that heads call by themselves."""


def _chosen(mark: Mark, index: object) -> Mark | None:
    """The mark of the tokens that an index chooses; None if it chooses something else."""
    if mark.places is None:
        return None
    of_dims = index if isinstance(index, tuple) else (index,)
    while of_dims[2:] and of_dims[-1] == slice(None):  # all numbers of a token
        of_dims = of_dims[:-1]
    try:
        places, like = mark.places[of_dims], mark[of_dims]
    except IndexError:  # of more dims than tokens have
        return None
    if like.shape != (*places.shape, mark.shape[-1]):
        return None
    return Mark.make(like, mark.path, places, mark.numbers_of)


def _unsupported(what: str, why: str = "a head here maps the hidden state of each token alone") -> UnsupportedError:
    return UnsupportedError(f"the forward of the model {what}", why=why, fix=_FIX)


class _Forward:
    """One call of the model's own forward, without its base and its heads."""

    def __init__(self, model: nn.Module, top: str, given: Mapping[str, Any], numbers_of: NumbersOf) -> None:
        self._model, self._top, self._given, self._numbers_of, self._calls = model, top, given, numbers_of, 0
        self._shell = shell = copy.copy(model)
        vars(shell).pop("forward", None)  # routed calls, or accelerate's
        shell._modules = {name: self._stub(name, child) for name, child in model._modules.items()}
        shell._modules[top] = InPlaceOf(model.get_submodule(top), partial(self._base, model.get_submodule(top)))

    def run(self) -> Any:
        """What the forward returns. Raises `UnsupportedError`: it does something else with hidden states."""
        given = {name: value for name, value in self._given.items() if value is not None}
        out = type(self._model).forward(self._shell, **given)
        if self._calls != 1:
            raise _unsupported(f"calls its base {self._calls} times")
        return out

    def _stub(self, name: str, child: nn.Module | None) -> nn.Module | None:
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            made = copy.copy(child)
            made._modules = {key: self._stub(f"{name}.{key}", inner) for key, inner in child._modules.items()}
            return made
        return child if child is None else InPlaceOf(child, partial(self._head, name, child))

    def _base(self, base: nn.Module, *args: object, **kwargs: object) -> ModelOutput:
        self._calls += 1
        signature = inspect.signature(type(base).forward)
        bound = signature.bind_partial(base, *args, **kwargs).arguments
        more = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        others = bound.pop(more, {})
        read = _read_by(frozenset(map(type, base.modules()))) if others else frozenset()
        for name, value in (bound | {name: others[name] for name in others.keys() & read}).items():
            if name in _INPUTS and value is not self._given.get(name):
                raise _unsupported(
                    f"gives its base other {name} than it gets", "rows are packed before the forward runs"
                )
            known = name in (*_INPUTS, *_UNREAD, "self") or value is None or value is False
            if not known and not (name == "token_type_ids" and not bool(cast(Tensor, value).any())):
                raise _unsupported(
                    f"gives its base {name}", "rows are read from input_ids, attention_mask, position_ids"
                )
        ids = self._given["input_ids"]
        hidden = self._numbers_of(())
        if hidden is None:
            some = torch.zeros((), dtype=base.dtype, device=ids.device)  # type: ignore[call-overload]
            size = base.config.get_text_config().hidden_size  # type: ignore[union-attr,operator]
            places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
            hidden = Mark.make(some.expand(*ids.shape, size), (), places, self._numbers_of)
        pooler = getattr(base, "pooler", None)
        if not isinstance(pooler, nn.Module) or not isinstance(hidden, Mark):
            return BaseOutput(last_hidden_state=hidden)
        pooled = self._head(f"{self._top}.pooler", pooler, hidden)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def _head(self, name: str, module: nn.Module, *args: object, **kwargs: object) -> object:
        if not any(isinstance(value, Mark) for value in (*args, *kwargs.values())):
            if any(True for _ in module.parameters()):
                raise _unsupported(
                    f"calls {name!r} with other values than hidden states", "its weights are in the replicas"
                )
            return module(*args, **kwargs)
        if isinstance(module, Pooling) and len(args) == 2 and args[1] is self._given.get("attention_mask"):
            args = args[:1]
        mark = cast(Mark, args[0])
        if isinstance(module, Pooling):
            return mark.then(name)
        known = self._numbers_of((*mark.path, name)) is not None
        width = _width(module, mark) if len(args) == 1 and not kwargs and not known else None
        if known or width is not None:
            return mark.then(name, width)
        if not module._modules:
            raise _unsupported(
                f"calls {name!r} with more than hidden states, or it does not return numbers of each token"
            )
        shell = copy.copy(module)  # one that chooses tokens
        shell._modules = {own: self._stub(f"{name}.{own}", child) for own, child in module._modules.items()}
        return type(module).forward(shell, *args, **kwargs)


@dataclass(frozen=True)
class TokenHeads:
    """See `model.model_kind.Readout`; made from the heads in the order of their calls."""

    top: str  # the outermost name of the base
    heads: tuple[Head, ...]

    @property
    def width(self) -> int:
        return sum(head.width for head in self.heads)

    def factors(self, length: int, positions: slice) -> Tensor | None:
        """See `Readout.factors`."""
        pooling = self.heads[0].pooling
        return shares(pooling, torch.arange(positions.start, positions.stop), length) if pooling else None

    def reader(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Maps hidden states [1, t, h] to [1, t, width]; each module of a chain runs once."""
        modules = {name: _module_of(model, name) for head in self.heads for name in head.modules}

        def read(hidden: Tensor) -> Tensor:
            known: dict[tuple[str, ...], Tensor] = {(): hidden}
            for head in self.heads:
                for end in range(len(head.modules)):
                    path = head.modules[: end + 1]
                    if path not in known:
                        known[path] = modules[path[-1]](known[path[:-1]])
            return torch.cat([known[head.modules] for head in self.heads], -1)

        return read

    def outputs(self, model: nn.Module, numbers: Tensor, given: Mapping[str, Any]) -> Any:
        """See `Readout.outputs`."""
        parts = numbers.split([head.width for head in self.heads], -1) if len(self.heads) > 1 else (numbers,)
        of_path = {head.modules: part for head, part in zip(self.heads, parts, strict=True)}
        return _Forward(model, self.top, given, of_path.get).run()

    def error(self, model: nn.Module, given: Mapping[str, Any]) -> UnsupportedError | None:
        """Runs the forward without numbers; returns an error for what it cannot do, or if it reads padding, which has no
        numbers here."""
        ids, mask = given["input_ids"], given.get("attention_mask")
        padding = torch.zeros(ids.shape, dtype=torch.bool) if mask is None else mask == 0
        pools, positions = bool(self.heads[0].pooling), given.get("position_ids")
        if pools and positions is not None and bool(((positions[:, 1:] == 0) & ~padding[:, 1:]).any()):
            return _unsupported("pools rows of several documents", "each document is run by itself")
        outs = list[Any]()
        try:
            for fill in (0.0, 1.0) if bool(padding.any()) and not pools else (0.0,):
                of_tokens = (padding * fill).to(ids.device, model.dtype)[..., None]
                numbers = (of_tokens[:, 0] if pools else of_tokens) * torch.arange(
                    1.0, self.width + 1, device=ids.device
                )
                with torch.no_grad(), torch.random.fork_rng():
                    outs.append(self.outputs(model, numbers.to(model.dtype), given))
        except UnsupportedError as error:
            return error
        except Exception as failure:
            return UnsupportedError(
                f"the forward of {type(model).__name__} fails: {type(failure).__name__}: {failure}",
                fix="call the plain model with the same batch",
            )
        if len(outs) > 1 and _differ(outs[0], outs[1], padding):
            return UnsupportedError(
                f"the forward of {type(model).__name__} reads the output at a place where attention_mask is 0",
                why="rows are packed without their padding, which has no output here",
                fix="let config.pad_token_id be the id of the padding, and labels of tokens be -100 there",
            )
        return None

    def check(self, model: nn.Module) -> None:
        """See `Readout.check`."""
        bare = bare_model(model)[0]
        ids = torch.arange(3, 11)[None].clamp(max=bare.get_input_embeddings().weight.shape[0] - 1)
        ids = ids.to(bare.device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad(), _in_eval_mode(bare):
            top = bare.get_submodule(self.top)
            hidden = top(**given, use_cache=False).last_hidden_state
            read = self.reader(bare)
            numbers, own = read(hidden), type(bare).forward(bare, **given)
            factors = self.factors(ids.shape[1], slice(0, ids.shape[1]))
            for other, part in ((hidden.flip(1), numbers.flip(1)), (hidden[:, 2:5], numbers[:, 2:5])):
                if not _close(read(other), part):
                    names = sorted({name for head in self.heads for name in head.modules})
                    raise _unsupported(f"has the heads {names}, of which one mixes tokens")
            if factors is not None:
                numbers = (factors.to(numbers)[:, None] * numbers).sum(1)
            if not all(map(_close, _tensors(self.outputs(bare, numbers, given)), _tensors(own))):
                raise _unsupported("returns something else than follows from its heads")


def _module_of(model: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    if name.endswith("()"):
        return _FUNCTIONS[name.removesuffix("()")]
    module = model.get_submodule(name)
    return nn.Identity() if isinstance(module, Pooling) else module


def _tensors(out: object) -> Iterator[Tensor]:
    values = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else (out,)
    return (value for value in values if isinstance(value, Tensor))


def _close(one: Tensor, other: Tensor) -> bool:
    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 5e-2
    most = float(other.abs().max()) if other.numel() else 0.0
    return one.shape == other.shape and bool(((one - other).abs() <= tolerance * max(most, 1e-3)).all())


def _differ(one: object, other: object, padding: Tensor) -> bool:
    """Whether outputs differ; outputs of single tokens at padding are not compared."""
    for mine, others in zip(_tensors(one), _tensors(other), strict=True):
        same = torch.isclose(mine, others, rtol=0.0, atol=0.0, equal_nan=True)
        if mine.shape[: padding.dim()] == padding.shape:
            same = same[~padding.to(same.device)]
        if not bool(same.all()):
            return True
    return False


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# -- which models -------------------------------------------------------------------------------------------------------


def read_heads(model: nn.Module) -> TokenHeads | None:
    """The heads of a model that has no language-model head; None for other models.

    Raises:
        UnsupportedError: its forward does something else, or has parameters outside of base and heads.
    """
    bare = bare_model(model)[0]
    if not isinstance(bare, PreTrainedModel) or bare.config.is_encoder_decoder:
        return None
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if any(kind.__name__ in causal for kind in type(bare).__mro__) or _has_output_embedding(bare):
        return None
    top = _top_of_base(bare)
    if top is None:
        return None
    base = bare.get_submodule(top)
    attentions = list(filter(calls_attention, base.modules()))
    if attentions and not any(getattr(module, "is_causal", True) for module in attentions):
        refuse_other_masks(cast(PreTrainedModel, base))
    heads = _heads_of(bare, top)
    known = tuple(f"{name}." for name in (top, *(name for head in heads for name in head.modules)))
    outside = [name for name, _ in bare.named_parameters() if not name.startswith(known)]
    if outside:
        raise _unsupported(f"has the parameters {outside[:3]} outside of its base and of modules over hidden states")
    return TokenHeads(top, heads)


def _heads_of(bare: PreTrainedModel, top: str) -> tuple[Head, ...]:
    """Runs the forward on 4 tokens without its base: once more for each use of hidden states by itself."""
    as_they_are = dict[tuple[str, ...], int]()  # with their widths
    heads = dict[tuple[str, ...], Head]()

    def numbers_of(path: tuple[str, ...]) -> Tensor | None:
        pooling = _pooling_of(bare, path)
        if not pooling and path not in as_they_are:
            return None
        width = bare.config.get_text_config().hidden_size if pooling else as_they_are[path]
        heads[path] = Head(path, width, pooling)
        return torch.zeros(1, *([] if pooling else [4]), width, dtype=bare.dtype)

    ids = torch.arange(4)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    while True:
        heads.clear()
        try:
            with torch.no_grad(), torch.random.fork_rng():
                out = _Forward(bare, top, given, numbers_of).run()
            used = {each.path: each.shape[-1] for each in _tensors(out) if isinstance(each, Mark)}
        except _UsedError as error:
            used = error.used
        except UnsupportedError:
            raise
        except Exception as failure:
            raise _unsupported(f"fails on 4 tokens: {type(failure).__name__}: {failure}") from failure
        if not used:
            break
        as_they_are |= used
    if not heads:
        raise _unsupported("gives hidden states to no module")
    if len(heads) > 1 and any(head.pooling for head in heads.values()):
        raise _unsupported("has a Pooling beside other heads", "its outputs are of rows, and others of tokens")
    return tuple(heads.values())


def _pooling_of(model: nn.Module, path: tuple[str, ...]) -> str:
    """The kind of the `Pooling` at the end of a path; empty for none."""
    module = model.get_submodule(path[-1]) if path and not path[-1].endswith("()") else None
    return module.kind if isinstance(module, Pooling) else ""


def _has_output_embedding(model: PreTrainedModel) -> bool:
    with suppress(NotImplementedError, AttributeError):
        return model.get_output_embeddings() is not None
    return False


def _top_of_base(model: PreTrainedModel) -> str | None:
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    if not isinstance(base_layer(embedding), nn.Embedding):  # of images, for example
        return None
    for name, child in model.named_children():
        if isinstance(child, PreTrainedModel) and any(module is embedding for module in child.modules()):
            return name
    return None


def _width(module: nn.Module, like: Tensor) -> int | None:
    """The numbers that a module makes of each token's [..., h]; None if it makes something else. Runs on meta."""
    hidden = torch.empty(1, 3, like.shape[-1], dtype=like.dtype, device="meta")
    state = dict((*module.named_parameters(), *module.named_buffers()))
    empty = {key: torch.empty_like(value, device="meta") for key, value in state.items()}
    try:
        out = functional_call(module, empty, (hidden,))
    except Exception:  # whatever it raises for this call
        return None
    return out.shape[-1] if isinstance(out, Tensor) and out.dim() == 3 and out.shape[:2] == hidden.shape[:2] else None
