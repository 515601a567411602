"""The seam between the core and its features: the list of features, and the hooks that a feature may define.

A feature is a folder, `hf_hotspa/features/<name>/`. Its `feature.py` defines any of eight names (`HOOKS`). The core asks for
them with `hooks` and does not know who answers; no other file imports a feature. `feature.py`, and what it imports at module
level, imports no torch: plans are also made where none is installed. Hooks import the folder's other files when called.

* `options`: a subclass of `Options`: the settings of the feature in a run, with its grammar and its rules.
* `flags`: a `Flags`: arguments of the Trainer and of commands, and the settings that follow from them.
* `describe(model, compute_dtype)`: what the feature knows of the user's model, a `Described`.
* `attach(replica, description, options)`: adds to a strategy's model, whose parameters exist and are not yet divided over the
  ranks of tp; returns its `Attachment`s (`model.replica`), in order.
* `runner(options)`: another way to run phases or their packs, a `Runner`; None if the engine's own way.
* `terms`: named terms of the bytes and seconds of plans (`costs.terms`).
* `measures`: the numbers that its attachments count in a phase, and how reports show them (`Measure`s).
* `state`: a `State`: what of it lasts from step to step and is saved in checkpoints, beside the weights.

A hook is called while a run is set up, in the order of `FEATURES`. What a step needs is bound then.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

FEATURES = (
    "isolation",
    "dropout",
    "experts",
    "slow_devices",
    "pipedream",
    "four_bit",
    "eight_bit",
    "lora",
    "token_chunks",
    "low_bit_optimizers",
    "heads",
    "images",
)
"""Names of folders. Attachments of a replica are made in this order."""

HOOKS = ("options", "flags", "describe", "attach", "runner", "terms", "measures", "state")

SYNCHRONOUS = "synchronous"
"""The `pipeline_mode` of records without a feature that says otherwise: all stages update together."""

S = TypeVar("S")


@cache
def hooks(name: str) -> tuple[Any, ...]:
    """The hooks of a name, in the order of `FEATURES`; features without it are left out."""
    assert name in HOOKS
    modules = [import_module(f"hf_hotspa.features.{feature}.feature") for feature in FEATURES]
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))


@dataclass(frozen=True)
class StrategyOption:
    """An option of a strategy that a feature adds to the grammar (`Options.grammar`): `+name`, or `+name4`.

    `Strategy` parses, shows and compares it; `strategy.option(name)` is its number, 1 without numbers, 0 if it is not set.
    """

    name: str  # letters
    help: str  # what it does, as a part of a sentence
    numbered: bool = False  # whether a number follows the name
    # called with a strategy that has the option and a `ModelShape`: why the model cannot run it, or None
    unsupported_reason: Callable[[Any, Any], str | None] = lambda strategy, shape: None


class Options:
    """The settings of a feature in a run: a frozen dataclass with rules, each of which raises a `HotspaError`.

    `EngineOptions`, `MemoryOptions` and `Setup` hold a run's settings as `features`; a feature finds its own by their type
    (`settings`).
    """

    grammar: ClassVar[tuple[StrategyOption, ...]] = ()

    def check_engine(self, options: Any) -> None:
        """Checks other `EngineOptions`."""

    def check_plan(self, buckets: Sequence[Any], tied: Sequence[str], schedule: str) -> None:
        """Checks strategies. `tied`: the weights that embedding and head share. `schedule`: the pipeline schedule."""

    def check_strategy(self, strategy: Any, shape: Any, schedule: str) -> None:
        """Checks one strategy, a `ModelShape` and the pipeline schedule; searches do not offer what it rejects."""

    def check_model(self, description: Any, buckets: Sequence[Any], options: Any) -> None:
        """Checks a `ModelDescription` and `EngineOptions`, on all ranks alike."""

    def row_tokens(self) -> int:
        """Tokens that it adds to each row, beside the lengths that a plan is given."""
        return 0

    def seconds_beside(self, setup: object) -> float:
        """Seconds of a mini-batch beside phases and switches, the same whatever runs these, for a `search.setup.Setup` with
        hardware."""
        return 0.0

    def plan_notes(self, setup: object) -> Sequence[str]:
        """What readers of a plan for a `search.setup.Setup` with hardware must know."""
        return ()

    def shown(self, strategy: Any = None) -> Mapping[str, str]:
        """What records and plans say of the settings, by the name of the fact; `strategy` is the run's if it has one."""
        return {}


@dataclass(frozen=True)
class Described:
    """What a feature knows of the user's model."""

    # reads the layers whose weights are kept in another form, by name (`model.packed_layer.PackedLayer`)
    packed: Callable[[], Mapping[str, Any]] = dict
    # reads the modules that it added beside the model's weights (`model.model_kind.AddedModules`); None for none
    added: Callable[[], Any] = lambda: None
    # reads how tokens are read of a model without a vocabulary's head (`model.model_kind.Readout`); None for another model
    readout: Callable[[], Any] = lambda: None
    # reads what enters passes beside tokens (`switched.passes.SideInputs`); None for nothing
    side_inputs: Callable[[], Any] = lambda: None
    # finds the model in a chain of modules, and its name prefix there (`parallel.wrapped_model.bare_model`); None for none
    in_chain: Callable[[], Any] = lambda: None
    # returns how many layers add an auxiliary loss (`parallel.head_loss`), or called with True, would if asked to; raises
    # `UnsupportedError`: it is not one of tokens and sequences
    auxiliary_layers: Callable[[bool], int] = lambda if_asked: 0


def settings(features: Iterable[object], kind: type[S]) -> S | None:
    """A run's settings of one kind; None if the run does not use the feature."""
    return next((each for each in features if isinstance(each, kind)), None)


def by_name(features: Iterable[object]) -> dict[str, object]:
    """Every feature's settings in a run, by the feature's name; None if the run does not use it."""
    used = {type(each).__module__.split(".")[-2]: each for each in features}
    return {name: used.get(name) for name in FEATURES}


class Runner:
    """Another way to run phases, or their packs. What is not overridden is done in the engine's way.

    Attributes:
        is_alone: Whether it runs the phases (`phase_runner`) of the run's one strategy, with separate switches, which nothing
            overlaps.
        by_stage: Whether each stage of that strategy has its part of the master store on its own ranks.
    """

    is_alone = by_stage = False

    def packs(self, stage: Any, strategy: Any, pair_cost: float) -> Any:
        """What runs packs on a stage (`parallel.pipeline.PackRunner`), or None. `stage`: one that has all layers, or
        this rank's last one of a pipeline (`parallel.pipeline.Stage`). `pair_cost`: cost of a pair of tokens relative
        to a token."""
        return None

    def weight_copies(self, strategy: Any, rank: int) -> int:
        """The most versions of trained weights that a rank holds."""
        return 1

    def updates(self, strategy: Any, groups: Any, master: Any) -> Any:
        """Makes the optimizer steps that replace the caller's (`HotSPaEngine.updates`), or None. Collective."""
        return None

    def phase_runner(self, *shared: Any, updates: Any) -> Any:
        """Makes a strategy's `engine.phase.PhaseRunner`, with its arguments and the result of `updates`."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowsBeside:
    """What a feature reads of a plan's data set beside the text."""

    dataset: "Dataset"  # the rest of the same rows
    tokens: "NDArray[np.int64]"  # [rows], that it adds to each row
    settings: Options | None  # of the plan


@dataclass(frozen=True)
class Flags:
    """The arguments of a feature."""

    # `module:Class` of a dataclass of the Trainer's flags, which `HotSPaTrainingArguments` inherits. Its method
    # `feature_settings()` returns an `Options` or None; `check_feature(buckets)`, if it has one, raises for flags that
    # do not go together (`buckets` is empty with `auto`).
    arguments: str = ""
    # adds arguments to the parser of a command, by its name
    commands: Mapping[str, Callable[[Any], None]] = field(default_factory=dict)
    of_command: Callable[[Any], Any] = lambda args: None  # settings from a command's arguments, or None
    # called with a command's arguments and its data set: a `RowsBeside`, or None
    of_rows: Callable[[Any, Any], RowsBeside | None] = lambda args, dataset: None


def argument_classes() -> tuple[type, ...]:
    """The dataclasses of the Trainer's flags of all features."""
    named = [flags.arguments.split(":") for flags in hooks("flags") if flags.arguments]
    return tuple(getattr(import_module(module), name) for module, name in named)


def add_command_flags(command: str, parser: "ArgumentParser") -> None:
    """Adds the features' arguments to a command's parser."""
    for flags in hooks("flags"):
        if command in flags.commands:
            flags.commands[command](parser)


def settings_of_command(args: "Namespace") -> tuple[Any, ...]:
    """The settings that follow from a command's arguments."""
    return tuple(made for flags in hooks("flags") if (made := flags.of_command(args)) is not None)


@dataclass(frozen=True)
class Measure:
    """A number that each rank counts in a phase (`Attachment.measures` returns it by name), and how reports show it."""

    counted: str  # its name on a rank; a column of `report.MEASURES`
    # of the field of `PhaseReport` and of records, a whole number; empty if only ranks' measures have it
    name: str = ""
    is_total: bool = True  # whether the field adds ranks up; otherwise it is the largest one
    metric: str = ""  # `hotspa/<metric>` in logs: its mean over steps, once a step had any; empty for none
    over: str = ""  # the name of a total: the metric is relative to the mean over ranks of this total instead
    title: str = ""  # of its column among the sums of strategies in the report page; empty for none


@dataclass(frozen=True)
class State:
    """What lasts from step to step and is saved in checkpoints, beside the weights."""

    # makes a part of a Trainer's run (`RunPart`) from the `HotSPaEngine`, the arguments and the
    # `trainer.run_plan.RunPlan`; None without one. Collective.
    run: Callable[[Any, Any, Any], "RunPart | None"] | None = None
    # dotted name of a module that knows how optimizers of certain libraries run on shares of the master store, and how
    # they are saved (`engine.optimizer_states`); imported when an optimizer is met. Empty for none.
    optimizers: str = ""


class RunPart:
    """A feature's part of a Trainer's run (`State.run`). The methods are called on all ranks, and may be collective.

    Attributes:
        name: Of its state in checkpoints.
    """

    name: str

    def start(self) -> None:
        """A pass through a data set or stream begins."""

    def speeds(self, step: int) -> Any:
        """The `packing.bucketing.Speeds` that divide the packs of mini-batch `step`, from 0; None for evenly. Not
        collective: also called in another thread."""

    def begin_step(self, step: int, pass_steps: int) -> None:
        """A mini-batch begins, after `step` others; a pass over the data has `pass_steps`."""

    def trained(self, plan: Any, of_pass: Any, report: Any) -> Any:
        """Takes the plan and the `StepReport` of a mini-batch's last pass; returns the mini-batch's report, completed."""
        return report

    def state_dict(self) -> Mapping[str, Any] | None:
        """What a resumed run needs, JSON-ready; None for nothing."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it. Raises `HotspaConfigError`: it is damaged."""

    def rank_tensors(self) -> Mapping[str, Any]:
        """This rank's tensors for a checkpoint of the same number of ranks, in host memory."""
        return {}

    def load_rank_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Restores them; others may be among them."""
