"""How a trainer gets its switched model, and how its ranks communicate before it exists.

`Ranks` agrees over the host, starting in the constructor. `start` chooses the strategies (or takes the given ones),
makes the `SwitchedModel`, and its watchers: predictions, the features' parts of the run, the memory limit.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_hotspa.checkpoint.format.folder import write_error
from hf_hotspa.checkpoint.rng import random_state, set_random_state
from hf_hotspa.engine.faults import note
from hf_hotspa.errors import HotspaConfigError, HotspaError, ModelError, UnsupportedError
from hf_hotspa.model.model_check import refuse_router_logits
from hf_hotspa.model.model_kind import refuse_quantized
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel import backends
from hf_hotspa.parallel.agreement import Agreement, Mailbox, lost_peer, typed_failures
from hf_hotspa.parallel.loss import TokenLoss
from hf_hotspa.parallel.mesh import nodes_of
from hf_hotspa.parallel.wrapped_model import bare_model, is_wrapped
from hf_hotspa.report import StepReport
from hf_hotspa.seam import RunPart, hooks
from hf_hotspa.strategy import Bucket
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments, evaluation_buckets, given_buckets
from hf_hotspa.trainer.events import CallbackEvents, is_users
from hf_hotspa.trainer.given_arguments import check_values, refuse_fields_of_others
from hf_hotspa.trainer.optimizers import check_elementwise
from hf_hotspa.trainer.run_plan import RunPlan, engine_options, find_calibration, prepare_auto
from hf_hotspa.trainer.same_run import DATA_SETS

logger = logging.getLogger(__name__)


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
    def telling(self, trainer: Any, what: str) -> Iterator[None]:
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

    def choose(self, step: int, lengths: Sequence[int]) -> Any:
        """The buckets of a mini-batch, and the device speeds that divide its packs. Also called in a thread."""
        speeds = (part.speeds(step) for part in self.parts)
        return self.plan.choose(step, lengths), next((known for known in speeds if known is not None), None)

    def begin(self, num_steps: int) -> None:
        """Begins a run of `num_steps` mini-batches."""
        for part in self.parts:
            part.start()
        self.plan.start(num_steps)

    def evaluated(self, args: HotSPaTrainingArguments) -> tuple[Bucket, ...]:
        """The buckets of evaluation (`evaluation_buckets`)."""
        return evaluation_buckets(args.hotspa_eval_strategy, self.plan.pool)

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs, JSON-ready."""
        of_plan = self.plan.state_dict()
        state: dict[str, Any] = {"auto": of_plan} if of_plan is not None else {}
        of_parts = {part.name: part.state_dict() for part in self.parts}
        return state | {name: of_part for name, of_part in of_parts.items() if of_part is not None}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. Raises `HotspaConfigError` if it is damaged."""
        for part in self.parts:
            if part.name in state:
                part.load_state_dict(state[part.name])
        if "auto" in state:
            self.plan.load_state_dict(state["auto"])

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


def start(trainer: Any, loader: Any) -> tuple[SwitchedModel, Watchers]:
    """Makes the switched model of a trainer. Collective. `loader`: the training data loader, if any. Raises
    `HotspaError` on every rank."""
    args, model, agreement = trainer.args, trainer.model, trainer._hotspa_ranks.agreement()
    lengths, own, watchers = trainer._hotspa_rows, trainer._hotspa_loss, Watchers()
    weights = trainer._hotspa_source.weights_folder(model)
    if own is not None:
        read = trainer.train_dataset if trainer.train_dataset is not None else trainer.eval_dataset
        own.example = agreement.run("loss_columns", lambda: lengths.example(read))
    if args.hotspa_auto:
        given = trainer.eval_dataset
        evaluated = [*(given.values() if isinstance(given, dict) else [given]), lengths.evaluated]
        tables, size = lengths.tables(trainer.train_dataset, evaluated, loader, agreement), args.hotspa_rows_a_step
        plan: RunPlan = prepare_auto(model, args, agreement, lambda: tables, size, sampled=lengths.sampled)
    else:
        known = find_calibration(model, args, agreement)
        plan = RunPlan(given_buckets(args, model), args, known)
    watchers.plan = plan
    options = engine_options(args, own, plan.stage_costs, plan.time)
    switched = SwitchedModel(model, plan.buckets, options, weights=weights, device=args.device, guards=True)
    engine = switched.engine
    engine.stop, engine.failures.predicted_bytes = trainer._hotspa_preemption, plan.predicted_bytes
    plan.begin(engine.description)
    made = (state.run(engine, args, plan) for state in hooks("state") if state.run is not None)
    watchers.parts = tuple(part for part in made if part is not None)
    idle = plan.is_idle and not watchers.parts  # nothing chooses, predicts or watches
    choose, evaluated_by = None if idle else watchers.choose, watchers.evaluated(args)
    switched.runs_by(choose, trainer._hotspa_optimizer.settings, evaluated_by)
    lengths.take_longest(switched.longest)
    switched.in_training(False)
    return switched, watchers


@contextmanager
def metrics_apart(trainer: Any) -> Iterator[None]:
    """Inside, the user's metrics functions run where `trainer.model` computes by itself: perhaps on one rank alone."""
    names = ("compute_metrics", "preprocess_logits_for_metrics")
    given = {name: function for name in names if (function := vars(trainer).get(name)) is not None}

    def apart(function: Any) -> Any:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with trainer._hotspa_apart():
                return function(*args, **kwargs)

        return called

    vars(trainer).update({name: apart(function) for name, function in given.items()})
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


def check_given(trainer: Any, given: Mapping[str, Any], agreement: Agreement) -> TokenLoss | None:
    """Checks what a trainer was given before anything is built; returns its token loss, if any. Collective. `given`:
    the arguments of the constructor, by name. Raises `HotspaError` on every rank if a value is wrong, asks another
    library's trainer for something, or differs between ranks (`same_run`)."""
    args = trainer.args

    def checked() -> TokenLoss | None:
        check_values(args)
        refuse_fields_of_others(args, type(trainer), [given.get(name) for name in DATA_SETS])
        trainer._hotspa_check(given)
        function, columns = given.get("token_loss"), given.get("loss_columns") or ()
        return own_loss(function, columns, args, given.get("compute_loss_func"), type(trainer))

    where = "arguments of the Trainer"
    return agreement.run(where, checked, facts=lambda _: trainer._hotspa_run.given_facts(given))


# -- what the class behind trains without the mixin -------------------------------------------------------------------

STOCK_TRAINS = (ModelError, UnsupportedError)  # errors after which the stock Trainer trains the model instead


def opened(trainer: Any, model: Any, given: Mapping[str, Any], agreement: Agreement) -> Any:
    """The model that a trainer passes to the class behind, which may have to train it alone. Collective. Raises
    `HotspaError` on every rank if it cannot be opened, or trained as the flags ask."""
    args = trainer.args
    try:
        if args.stock_reason is not None:
            raise args.stock_reason
        if (chosen := given.get("optimizer_cls_and_kwargs")) is not None:
            check_elementwise(*chosen)
        if isinstance(model, nn.Module):
            # before the stock Trainer, whose message has another fix; TRL's trainers add an adapter later
            refuse_quantized(bare_model(model)[0], is_wrapped(model) or given.get("peft_config") is not None)
        if isinstance(model, str) and not trainer._hotspa_prepares and args.hotspa_model_path is None:
            return model  # the class behind loads it
        made = trainer._hotspa_source.opened(model, given.get("model_init") is not None, agreement)
        if given.get("compute_metrics") is not None:
            refuse_router_logits(made)
        return made
    except STOCK_TRAINS as reason:
        if args.hotspa_model_path is not None or not (model is None or isinstance(model, nn.Module)):
            raise
        leave_to_stock(trainer, reason)
        return model


def leave_to_stock(trainer: Any, reason: HotspaError) -> None:
    """Makes a trainer use the methods of the class behind from now on. Raises `HotspaError`: `reason`, if the user asks
    for something that only a switched model can do."""
    if trainer._hotspa_loss is not None:
        raise reason
    trainer.args.leave_to_stock(reason)
    trainer._hotspa_refusal = reason
    if trainer.args.process_index == 0:
        logger.warning("%s\nNothing is switched: %s trains as without hf_hotspa.", reason, type(trainer).__name__)
    if isinstance(handler := vars(trainer).get("callback_handler"), CallbackEvents):  # the constructor has ended
        handler.leave_to_stock()
        trainer.neftune_noise_alpha = trainer.args.neftune_noise_alpha
        trainer.place_model_on_device = not trainer.is_model_parallel
        if trainer.place_model_on_device:
            trainer._move_model_to_device(trainer.model, trainer.args.device)


def or_stock(trainer: Any, run: Callable[[], Any], again: Callable[[], Any]) -> Any:
    """Returns `run()`, or `again()` if the start finds that the class behind has to train the model. Collective. Raises
    `HotspaError`: as `leave_to_stock`; or training has begun."""
    if trainer._hotspa_began:  # such as an evaluation in the loop: the start has checked everything
        with trainer._hotspa_ranks.telling(trainer, "training or evaluation"):
            return run()
    made, generators = (trainer.optimizer, trainer.lr_scheduler), random_state()
    try:
        with trainer._hotspa_ranks.telling(trainer, "start"):
            return run()
    except STOCK_TRAINS as failure:
        if trainer._hotspa_began:
            raise
        trainer.close_engine()
        leave_to_stock(trainer, reason := failure)
    trainer.optimizer, trainer.lr_scheduler = made
    set_random_state(generators, "start of training")
    try:
        return again()
    except Exception as failure:  # it cannot train it either, such as rows without a collator for them
        if trainer.state.global_step:
            raise
        raise reason from failure
