"""Named terms: what the cost models add up.

Bytes of a rank (`memory.MemoryModel`) are a sum of `MemoryTerm`s, seconds of a layer (`time.TimeModel`) a sum of
`TimeTerm`s. The core's own terms stand beside each model; the `Terms` of a feature are in its folder
(`hf_hotspa.seam`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hf_hotspa.costs.sizes import ADAM, MasterSizes, ModelSizes, OptimizerState
from hf_hotspa.seam import hooks
from hf_hotspa.typed import NotNegative


class Packs(NamedTuple):
    """The packs (or chunks) of a bucket, on one rank of a stage."""

    number: int | None  # of a replica, through the pipeline; None if there are enough to fill it
    in_flight: int  # the most whose activations are kept
    held_tokens: int  # the most in flight
    pack_tokens: int  # of the largest pack
    longest: int  # tokens of the longest sequence


class Rate(NamedTuple):
    """Bytes: for each token in flight, for each token of one pack, and independent of packs."""

    token: float = 0.0
    pack_token: float = 0.0
    fixed: float = 0.0

    def __call__(self, packs: Packs) -> float:
        return self.token * packs.held_tokens + self.pack_token * packs.pack_tokens + self.fixed

    def plus(self, other: "Rate") -> "Rate":
        return Rate(self.token + other.token, self.pack_token + other.pack_token, self.fixed + other.fixed)


Bytes = Rate | Callable[[Packs], float]

LOSS = "loss"  # the moment of the loss of one pack
RECOMPUTATION = "recomputation"  # the moment when a layer runs again


@dataclass(frozen=True)
class MemoryTerm:
    """Bytes on the fullest rank of a stage."""

    name: str
    part: str  # the part of a `MemoryBreakdown` that they belong to
    # called with a `memory.MemoryStage`; None if a stage has none of them. `Rate`s are added up once a stage. Only
    # activations and logits may depend on tokens; other parts depend on the number of packs at most.
    of: Callable[[Any], Bytes | None]
    # what activations exist for, if not all the time. None of the moments is at the time of the loss: of each, only
    # what exceeds the bytes of `LOSS` counts. Needs a `Rate`, except for `LOSS`.
    moment: str = ""


@dataclass(frozen=True)
class Cost:
    """`t = a * sum(l_i^2) + b * sum(l_i) + c` seconds for a pack of sequences of lengths l_i, forward and backward.

    Packed sequences do not attend to each other, so attention costs the sum of the squares.
    """

    a: float = 0.0  # seconds per pair of tokens
    b: float = 0.0  # seconds per token
    c: float = 0.0  # seconds per pack

    def seconds(self, squares: float, tokens: float) -> float:
        """Seconds of a pack, from its sum of squared lengths and its tokens."""
        return self.a * squares + self.b * tokens + self.c

    def of(self, lengths: Iterable[int]) -> float:
        """Seconds of a pack, from its sequence lengths."""
        pack = list(lengths)
        return self.seconds(sum(length * length for length in pack), sum(pack))

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.a + other.a, self.b + other.b, self.c + other.c)

    def __mul__(self, factor: float) -> "Cost":
        return Cost(self.a * factor, self.b * factor, self.c * factor)


@dataclass(frozen=True)
class Hop:
    """Cost of sending a hidden state or its gradient to the next stage: fixed seconds, and seconds per token."""

    latency_s: NotNegative = 0.0
    token_s: NotNegative = 0.0

    def seconds(self, tokens: float) -> float:
        return self.latency_s + self.token_s * tokens


@dataclass(frozen=True)
class Exchanges:
    """Cost of the exchanges of cp ranks in a layer: heads for tokens, and gradients to where they are summed
    (`all_to_all`); keys and values (`gather`). A token counts as the bytes of its hidden state that a rank sends."""

    all_to_all: Hop
    gather: Hop


@dataclass(frozen=True)
class TimeTerm:
    """Cost of one layer on a rank, forward and backward; `of` is called with a `time.TimeModel` and a strategy."""

    name: str
    of: Callable[[Any, Any], Cost]


@dataclass(frozen=True)
class PackedForms:
    """Forms in which frozen weights may be held (`sizes.Packed`)."""

    names: tuple[str, ...]  # the values of `--quantization`; messages suggest the first one
    # called with a name, and the linear layers of a decoder layer and of its experts, by name
    of: Callable[[str, Mapping[str, Any], Mapping[str, Any]], Any]
    help: str  # what they are, for `--quantization`
    load: str  # the `quantization_config` with which `from_pretrained` makes one, for messages
    # called with a model, a name and the numbers that its weights repeat: converts its linear layers, to be measured
    convert: Callable[[Any, str, Any], None]
    # called with a name and whether scales are quantized, too: the `quantization_config` of `from_pretrained`
    config: Callable[[str, bool], Any]
    # called with a model that was loaded so, and the same: packs what the library leaves plain
    complete: Callable[[Any, str, bool], None] = lambda model, name, double: None
    plain: Callable[[Any], None] = lambda model: None  # called with such a model: unpacks that again


@dataclass(frozen=True)
class Terms:
    """What a feature adds to the cost models: the hook `terms`."""

    memory: tuple[MemoryTerm, ...] = ()
    time: tuple[TimeTerm, ...] = ()
    # the master store of a `memory.MemoryStage`, if the feature divides it otherwise
    master: Callable[[Any], MasterSizes | None] | None = None
    optimizer_states: Mapping[str, OptimizerState] = field(default_factory=dict)  # optimizers by `--optim` name
    # reads weights that are trained on a frozen model (`sizes.Added`) from the text of a flag and the linear layers
    # of a decoder layer, by name
    added: Callable[[str, Mapping[str, Any]], Any] | None = None
    packed: PackedForms | None = None


OPTIMIZER_STATES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), ADAM),
    **dict.fromkeys(("sgd", "adagrad", "rmsprop"), OptimizerState(4)),
}
"""State by `--optim` name; SGD counts with momentum."""


def reduced_states() -> dict[str, OptimizerState]:
    """Returns what features add to `OPTIMIZER_STATES`."""
    return {name: state for terms in hooks("terms") for name, state in terms.optimizer_states.items()}


def optimizer_states() -> dict[str, OptimizerState]:
    return OPTIMIZER_STATES | reduced_states()


def added_weights(text: str, linears: Mapping[str, Any]) -> Any:
    """Reads what is added to the linear layers of a decoder layer and trained; raises `HotspaConfigError` for other text."""
    return next(terms.added(text, linears) for terms in hooks("terms") if terms.added is not None)


def packed_forms() -> tuple[PackedForms, ...]:
    return tuple(terms.packed for terms in hooks("terms") if terms.packed is not None)


def form_names() -> tuple[str, ...]:
    return tuple(name for forms in packed_forms() for name in forms.names)


def forms_help() -> str:
    return "; ".join(f"{' and '.join(forms.names)}: {forms.help}" for forms in packed_forms())


def form_of(name: str) -> PackedForms:
    return next(forms for forms in packed_forms() if name in forms.names)


def packed_weights(name: str, model: Any) -> Any:
    """Returns the linear layers of a decoder layer of a `model_config.ModelConfig` in a form."""
    return form_of(name).of(name, model.linears, model.experts)


TRAINING_UNITS = 3  # cost of a training pass, in forward passes of all layers


@dataclass(frozen=True)
class Scoring:
    """Forward passes of a step besides training: without gradients, possibly of a second model."""

    forwards: float = 0  # of all tokens
    reference: bool = False  # whether a second model's weights are kept, divided over the ranks like the master store
    teacher: ModelSizes | None = None  # a frozen model of any size whose layers run under each strategy, too

    @property
    def units(self) -> float:
        """Cost of a step, in forward passes of all layers; recomputation adds one."""
        return TRAINING_UNITS + self.forwards

    def taught(self, student: ModelSizes, teacher: ModelSizes) -> "Scoring":
        """With a teacher, whose forward pass costs by the parameters of its layers that compute a token."""
        own, other = (
            shape.num_layers * (shape.attention_parameters + shape.active_mlp_parameters)
            for shape in (student.shape, teacher.shape)
        )
        return replace(self, forwards=self.forwards + other / own, teacher=teacher)


TASKS = {
    "sft": Scoring(),
    "dpo": Scoring(2, reference=True),
    "dpo-precomputed": Scoring(1),
    "grpo": Scoring(),
    "grpo-kl": Scoring(2, reference=True),
    "rloo": Scoring(3, reference=True),
    "classify": Scoring(1),
    "reward": Scoring(1),
    "embed": Scoring(1),
    "distill": Scoring(),
}
"""Scoring by training task: `sft` uses the model's own loss; `dpo` pairs, with a live reference or precomputed; `grpo`
and `rloo` completions, with TRL's defaults or a KL term; `classify`, `reward` and `embed` no vocabulary; `distill`
a teacher (`Scoring.taught`)."""
WITHOUT_LOGITS = ("classify", "reward", "embed")
