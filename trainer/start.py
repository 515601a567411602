"""How a trainer gets its switched model, and how its ranks communicate before it exists.

`Ranks` agrees over the host, starting in the constructor. `start` chooses the strategies (or takes the given ones),
makes the `SwitchedModel`, and its watchers: predictions, the features' parts of the run, the memory limit.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hf_hotspa.checkpoint.format.folder import write_error
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel import backends
from hf_hotspa.parallel.agreement import Agreement, Mailbox, lost_peer, typed_failures
from hf_hotspa.parallel.loss import TokenLoss
from hf_hotspa.parallel.mesh import nodes_of
from hf_hotspa.report import StepReport
from hf_hotspa.seam import RunPart
from hf_hotspa.strategy import Bucket
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments, evaluation_buckets
from hf_hotspa.trainer.events import is_users
from hf_hotspa.trainer.known_shortages import note
from hf_hotspa.trainer.protocol import HasRun
from hf_hotspa.trainer.run_plan import RunPlan

T = TypeVar("T")


class Ranks:
    """All ranks of a run, communicating over the host."""

    def __init__(self, args: HotSPaTrainingArguments) -> None:
        self._args = args
        self._channel: tuple[dist.ProcessGroup, Mailbox] | None = None

    def agreement(self) -> Agreement:
        """The agreement of all ranks, also before the engine exists; of one process before others exist. Collective the
        first time."""
        rank, world_size = self._args.process_index, self._args.world_size
        if world_size == 1 or not dist.is_initialized():
            return Agreement(None, 0)
        if self._channel is None:
            timeout = timedelta(seconds=float(self._args.ddp_timeout))
            with typed_failures(rank, "start"):
                backends.bound_default_group(timeout)
                self._channel = backends.world_for_host_tensors(timeout), Mailbox(rank, world_size)
            nodes_of(Agreement(self._channel[0], rank))  # so that errors can name the nodes
        group, mailbox = self._channel
        return Agreement(group, rank, mailbox)

    def make_output_dir(self) -> None:
        """Makes `output_dir`, which the stock Trainer does on one rank alone. Collective."""
        folder = self._args.output_dir
        # as the stock Trainer does, so that all ranks know the outcome
        made = lambda: os.makedirs(folder, exist_ok=True) if self._args.should_save else None  # noqa: E731
        failed = lambda failure: write_error("output_dir cannot be made", Path(folder), failure)  # noqa: E731
        self.agreement().run("output_dir", made, otherwise=failed)

    @contextmanager
    def telling(self, trainer: HasRun, what: str) -> Iterator[None]:
        """Passes an error on to the other ranks, and a lack of memory to the next launch; raises the error of the peer
        that was first to raise one. May be nested: an error is passed on once. `what`: the current activity, for
        messages."""
        try:
            yield
        except Exception as error:
            engine, place, rank = trainer.engine, what, self._args.process_index
            if engine is not None:
                note(self._args.output_dir, engine.failures)
                place = f"{what} after step {trainer.state.global_step}"
                explained = engine.explain(error, place)
            elif self._channel is not None:
                explained = self._channel[1].tell(error, place)
            else:
                explained = lost_peer(error, rank, place) or error
            if explained is error:
                raise
            raise explained from error


def leave_default_group() -> None:
    """At exit: gloo processes that leave with a live group sometimes abort after a correct run."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class Watchers:
    """What decides and measures beside a switched model."""

    plan: RunPlan = field(default_factory=RunPlan)  # chooses strategies, and predicts seconds
    parts: tuple[RunPart, ...] = ()  # the features' parts of the run
    idle: bool = True  # nothing chooses, predicts or watches

    def choose(self, step: int, lengths: Sequence[int]) -> Any:
        """The buckets of a mini-batch, and the device speeds that divide its packs. Also called in a thread."""
        speeds = (part.speeds(step) for part in self.parts)
        return self.plan.choose(step, lengths), next((known for known in speeds if known is not None), None)

    def begin(self, num_steps: int) -> None:
        for part in self.parts:
            part.start()
        self.plan.start(num_steps)

    def evaluated(self, args: HotSPaTrainingArguments) -> tuple[Bucket, ...]:
        return evaluation_buckets(args.hotspa_eval_strategy, self.plan.pool)

    def state(self) -> dict[str, Any]:
        choices = self.plan.choices
        state: dict[str, Any] = {"auto": choices.state_dict()} if choices is not None else {}
        of_parts = {part.name: part.state_dict() for part in self.parts}
        return state | {name: of_part for name, of_part in of_parts.items() if of_part is not None}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. Raises `HotspaConfigError` if it is damaged."""
        for part in self.parts:
            if part.name in state:
                part.load_state_dict(state[part.name])
        if self.plan.choices is not None and "auto" in state:
            self.plan.choices.load_state_dict(state["auto"])

    def trained(self, step: int, passes: Sequence[tuple[MiniBatchPlan, StepReport]], report: StepReport) -> StepReport:
        """Takes the reports of a mini-batch and its training passes; returns the first, completed. Collective."""
        if not self.plan.is_idle:
            each = [self.plan.trained(step, plan, of_pass) for plan, of_pass in passes]
            singles = [of_pass.single_s for of_pass in each]
            known = [seconds for seconds in singles if seconds is not None]
            single = sum(known) if len(known) == len(singles) else None
            report = replace(report, phases=tuple(chain(*(of_pass.phases for of_pass in each))), single_s=single)
            report = self.plan.ended(step, report)
        for part in self.parts:
            report = part.trained(*passes[-1], report)
        return report


@contextmanager
def metrics_apart(trainer: HasRun, apart: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, the user's metrics functions run `apart`: perhaps on one rank alone."""
    names = ("compute_metrics", "preprocess_logits_for_metrics")
    given = {name: function for name in names if (function := vars(trainer).get(name)) is not None}

    def each(function: Callable[..., T]) -> Callable[..., T]:
        @wraps(function)
        def called(*args: object, **kwargs: object) -> T:
            with apart():
                return function(*args, **kwargs)

        return called

    vars(trainer).update({name: each(function) for name, function in given.items()})
    try:
        yield
    finally:
        vars(trainer).update(given)


def own_loss(
    function: Any, columns: Sequence[str], args: HotSPaTrainingArguments, compute_loss_func: Any, cls: type
) -> TokenLoss | None:
    """The token loss of a trainer for the engine; None if the Trainer computes the loss. Raises `HotspaConfigError` if
    several losses are given, or columns that no loss reads."""
    given = {
        "token_loss": function is not None,
        "compute_loss_func": compute_loss_func is not None,
        "a compute_loss override": is_users(getattr(cls, "compute_loss", None)),
        f"label_smoothing_factor is {args.label_smoothing_factor}": bool(args.label_smoothing_factor),
    }
    names = [name for name, there in given.items() if there]
    if function is None:
        if columns and not names:
            raise HotspaConfigError(
                f"loss_columns is {list(columns)}, and no custom loss reads them",
                fix="give a token_loss, or a compute_loss override, which has them in its inputs, or leave loss_columns out",
            )
        return None
    if len(names) > 1:
        raise HotspaConfigError(f"several losses are given: {' and '.join(names)}", fix="give one of them")
    return TokenLoss(function, tuple(columns))
