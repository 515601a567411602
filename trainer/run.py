"""`Run`: what a trainer over a switched model has beside the attributes of the class behind, made in its constructor.

`Backing` says who trains the model. It is chosen in the constructor; if the start of the engine finds a reason why the
model cannot be switched, the class behind still takes over. Every override of ours then calls the class behind.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers.trainer_utils import SaveStrategy

from hf_hotspa.callbacks.progress import PhaseProgressCallback, SettingsCallback, is_watched
from hf_hotspa.callbacks.step_reports import ReportCallback, SwitchOverheadCallback, TraceCallback
from hf_hotspa.checkpoint.format.manifest import rank_columns
from hf_hotspa.checkpoint.rng import random_state, set_random_state
from hf_hotspa.checkpoint.tensors import saved_tensors
from hf_hotspa.costs.terms import Scoring
from hf_hotspa.engine.loading import has_weights
from hf_hotspa.errors import HotspaError, ModelError, UnsupportedError, printable
from hf_hotspa.exchanges import take_back
from hf_hotspa.model.model_kind import refuse_quantized
from hf_hotspa.parallel.loss import TokenLoss
from hf_hotspa.parallel.wrapped_model import bare_model, is_wrapped
from hf_hotspa.rows.table import SequenceTable
from hf_hotspa.seam import hooks
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.trainer import preemption, resuming
from hf_hotspa.trainer.arguments import given_buckets
from hf_hotspa.trainer.batches import Rows
from hf_hotspa.trainer.checkpoints import CheckpointPushes, Checkpoints
from hf_hotspa.trainer.events import SAVE, STARTS, STEP_EVENTS, WRITERS, CallbackEvents, Flags, is_overridden, is_users
from hf_hotspa.trainer.given_arguments import check_values, recomputes, refuse_fields_of_others, refuse_longer_rows
from hf_hotspa.trainer.master_optimizer import MasterOptimizer
from hf_hotspa.trainer.model_source import ModelSource
from hf_hotspa.trainer.optimizers import check_elementwise
from hf_hotspa.trainer.preemption import Preemption, SkippedMiniBatches
from hf_hotspa.trainer.protocol import HasRun
from hf_hotspa.trainer.resuming import Progress, Resumption
from hf_hotspa.trainer.run_plan import RunPlan, engine_options, find_calibration, prepare_auto
from hf_hotspa.trainer.same_run import DATA_SETS, SameRun
from hf_hotspa.trainer.start import Ranks, Watchers, own_loss

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CANNOT_SWITCH = (ModelError, UnsupportedError)  # errors after which the class behind trains the model instead


class Backing:
    """Who trains the model of a trainer: a `SwitchedModel`, or, for a `reason`, the class behind alone (`is_stock`)."""

    def __init__(self, trainer: HasRun, ranks: Ranks, loss: TokenLoss | None) -> None:
        self._trainer, self._ranks, self._loss = trainer, ranks, loss
        self.is_stock = False
        self.reason: HotspaError | None = None
        self.has_begun = False  # whether training has begun: its start has checked everything

    def opened(self, source: ModelSource, model: object, given: Mapping[str, Any], prepares: bool) -> Any:
        """The model that a trainer passes to the class behind. Collective. Raises `HotspaError` on every rank if it
        cannot be opened, or trained as the flags ask."""
        args = self._trainer.args
        try:
            if args.stock_reason is not None:
                raise args.stock_reason
            if (chosen := given.get("optimizer_cls_and_kwargs")) is not None:
                check_elementwise(*chosen)
            if isinstance(model, nn.Module):
                # before the stock Trainer, whose message has another fix; TRL's trainers add an adapter later
                refuse_quantized(bare_model(model)[0], is_wrapped(model) or given.get("peft_config") is not None)
            if isinstance(model, str) and not prepares and args.hotspa_model_path is None:
                return model  # the class behind loads it
            made = source.opened(model, given.get("model_init") is not None, self._ranks.agreement())
            if given.get("compute_metrics") is not None:
                _refuse_router_logits(made)
            return made
        except _CANNOT_SWITCH as reason:
            if args.hotspa_model_path is not None or not (model is None or isinstance(model, nn.Module)):
                raise
            self.leave(reason)
            return model

    def checked(self, check: Callable[[], object]) -> None:
        """Leaves the model to the class behind if `check` finds that it cannot be switched."""
        try:
            check()
        except _CANNOT_SWITCH as reason:
            self.leave(reason)

    def leave(self, reason: HotspaError) -> None:
        """From now on the class behind trains. Raises `HotspaError`: `reason`, if the user asks for something that only
        a switched model can do."""
        trainer = self._trainer
        if self._loss is not None:
            raise reason
        trainer.args.leave_to_stock(reason)
        self.is_stock, self.reason = True, reason
        if trainer.args.process_index == 0:
            logger.warning("%s\nNothing is switched: %s trains as without hf_hotspa.", reason, type(trainer).__name__)
        if isinstance(handler := vars(trainer).get("callback_handler"), CallbackEvents):  # the constructor has ended
            handler.leave_to_stock()
            vars(trainer)["neftune_noise_alpha"] = trainer.args.neftune_noise_alpha
            trainer.place_model_on_device = not trainer.is_model_parallel
            if trainer.place_model_on_device:
                trainer._move_model_to_device(trainer.model, trainer.args.device)

    def run(self, switched: Callable[[], T], behind: Callable[[], T]) -> T:
        """Returns `switched()`, or `behind()` if its start finds that the class behind has to train. Collective. Raises
        `HotspaError`: as `leave`; or training has begun."""
        trainer = self._trainer
        if self.is_stock:
            return behind()
        if self.has_begun:  # such as an evaluation in the loop
            with self._ranks.telling(trainer, "training or evaluation"):
                return switched()
        made, generators = (trainer.optimizer, trainer.lr_scheduler), random_state()
        try:
            with self._ranks.telling(trainer, "start"):
                return switched()
        except _CANNOT_SWITCH as failure:
            if self.has_begun:
                raise
            trainer.close_engine()
            self.leave(reason := failure)
        trainer.optimizer, trainer.lr_scheduler = made
        set_random_state(generators, "start of training")
        try:
            return behind()
        except Exception as failure:  # it cannot train it either, such as rows without a collator for them
            if trainer.state.global_step:
                raise
            raise reason from failure


class Run:
    """See the module. `given`: the arguments of the constructor, by name."""

    prepares = True  # opens a model folder, and prepares rows of text; else the class behind does

    def __init__(self, trainer: HasRun, given: Mapping[str, Any]) -> None:
        args = trainer.args
        self.trainer, self.now = trainer, Progress()
        self.watchers, self.ranks = Watchers(), Ranks(args)
        self.same = SameRun(trainer, self.ranks.agreement)
        self.loss = self._checked(given)
        self.ranks.make_output_dir()
        self.backing = Backing(trainer, self.ranks, self.loss)
        self.model: SwitchedModel | None = None
        self.source, self.base = ModelSource(args), resuming.BaseDigest()
        self.pushes, self.optimizer = CheckpointPushes(trainer), MasterOptimizer(trainer)
        self.checkpoints = Checkpoints(args, self.ranks.agreement, self.pushes)
        self.flags = Flags(trainer, self.ranks.agreement)
        self.rows = Rows(trainer, given.get("loss_columns") or (), self.prepares)
        self.skipped, self.preemption = SkippedMiniBatches(args.hotspa_skip_non_finite), Preemption(args)

    def _checked(self, given: Mapping[str, Any]) -> TokenLoss | None:
        """Checks what the trainer was given before anything is built; returns its token loss, if any. Collective.
        Raises `HotspaError` on every rank if a value is wrong, asks another library's trainer for something, or differs
        between ranks (`same_run`)."""
        args, kind = self.trainer.args, type(self.trainer)

        def checked() -> TokenLoss | None:
            check_values(args)
            refuse_fields_of_others(args, kind, [given.get(name) for name in DATA_SETS])
            self.check(given)
            function, columns = given.get("token_loss"), given.get("loss_columns") or ()
            return own_loss(function, columns, args, given.get("compute_loss_func"), kind)

        where, facts = "arguments of the Trainer", lambda _: self.same.given_facts(given)
        return self.ranks.agreement().run(where, checked, facts=facts)

    def check(self, given: Mapping[str, Any]) -> None:
        """Rejects what a trainer of a library cannot be given. Not collective."""

    def add_callbacks(self) -> None:
        trainer, args = self.trainer, self.trainer.args
        if args.hotspa_deepspeed is not None and args.process_index == 0:
            print(printable(str(args.hotspa_deepspeed)), flush=True)
        preemption.take_sigterm_from(trainer.callback_handler.callbacks)
        handler = trainer.callback_handler = CallbackEvents(trainer.callback_handler, self.show, self.take)
        handler.switched = self.model
        handler.add_own(SettingsCallback())
        handler.add_own(SwitchOverheadCallback(print_table=args.hotspa_phase_table))
        if args.hotspa_report:
            handler.add_own(ReportCallback(steps=args.hotspa_trace_steps), instead=TraceCallback)
        if is_watched() and not args.disable_tqdm:
            handler.add_own(PhaseProgressCallback())

    # -- the switched model -------------------------------------------------------------------------------------------

    def apart(self) -> AbstractContextManager[None]:
        """Inside, `trainer.model` computes by itself: code may run on one rank alone."""
        return nullcontext() if self.model is None else self.model.routed(False)

    def start(self, loader: object = None) -> SwitchedModel:
        """The switched model; made now if missing, or if the model is another one, or built differently. Outside of
        training, takes over what has changed in the model. Collective. `loader`: the training data loader, if any.
        Raises `HotspaError` on every rank."""
        if self.backing.reason is not None:
            raise self.backing.reason
        switched = self.model
        if switched is not None:
            between = not switched.trains and not switched.is_routed
            if switched.module is not self.trainer.model or (between and switched.take_changes(anew=True)):
                self.close(restarts=True)
        if self.model is None:
            self.model, self.watchers = self._made(loader)
            if isinstance(handler := self.trainer.callback_handler, CallbackEvents):
                handler.switched = self.model
        return self.model

    def _made(self, loader: object) -> tuple[SwitchedModel, Watchers]:
        trainer, agreement, rows, own = self.trainer, self.ranks.agreement(), self.rows, self.loss
        args, model, given, watchers = trainer.args, trainer.model, trainer.eval_dataset, Watchers()
        args.model_recomputes = recomputes(bare_model(model)[0])
        rows.take_model()
        if rows.has_own_labels:  # its loss follows from outputs, which a scoring pass makes
            args.scoring = Scoring(1)
        weights = self.source.weights_folder(model)
        if own is not None:
            read = trainer.train_dataset if trainer.train_dataset is not None else given
            own.example = agreement.run("loss_columns", lambda: rows.example(read))
        if args.hotspa_auto:
            evaluated = [*(given.values() if isinstance(given, dict) else [given]), rows.evaluated]
            tables, size = rows.tables(trainer.train_dataset, evaluated, loader, agreement), args.hotspa_rows_a_step
            plan = prepare_auto(model, args, agreement, lambda: tables, size, sampled=rows.sampled, fields=rows.fields)
        else:
            known = find_calibration(model, args, agreement)
            plan = RunPlan(given_buckets(args, model), args, known)
        watchers.plan = plan
        options = engine_options(args, own, plan.stage_costs, plan.time)
        switched = SwitchedModel(model, plan.buckets, options, weights=weights, device=args.device, guards=True)
        engine = switched.engine
        engine.stop, engine.failures.predicted_bytes = self.preemption, plan.predicted_bytes
        plan.begin(engine.description)
        made = (state.run(engine, args, plan) for state in hooks("state") if state.run is not None)
        watchers.parts = tuple(part for part in made if part is not None)
        watchers.idle = plan.is_idle and not watchers.parts
        choose, evaluated_by = None if watchers.idle else watchers.choose, watchers.evaluated(args)
        switched.runs_by(choose, self.optimizer.settings, evaluated_by)
        rows.take_longest(switched.longest)
        switched.in_training(False)
        return switched, watchers

    def close(self, restarts: bool = False) -> None:
        """Frees the engine's memory and process groups. Collective. `restarts`: whether another one follows."""
        switched, trainer = self.model, self.trainer
        if switched is None:
            return
        switched.refresh()
        self.source.warn_of_unsaved_weights()
        self.optimizer.let_go(switched.engine, switched.module, restarts)
        switched.close()
        self.model, trainer.model_wrapped = None, trainer.model
        if isinstance(trainer.callback_handler, CallbackEvents):
            trainer.callback_handler.switched = None

    def show(self, occasion: str) -> None:
        """Updates `trainer.model` if code on any rank may read it now. Collective."""
        switched, handler = self.model, self.trainer.callback_handler
        if switched is None or not has_weights(self.trainer.model):
            return
        if occasion in STARTS:
            looks = switched.engine.agreement.run("callbacks", handler.may_look)
            looks = switched.engine.agreement.gather(looks).amax(0)
            handler.looked_at = frozenset(e for e, looks_at in zip(STEP_EVENTS, looks, strict=True) if looks_at)
        if occasion in handler.looked_at or switched.engine.any_rank(handler.is_looked_at(occasion, self.trainer)):
            switched.show()

    def take(self, event: str) -> None:
        """Applies what callbacks have changed in the model in an event of a step. Collective."""
        self.trainer.switched.take_changes(inside=event == "on_substep_end")

    # -- training -----------------------------------------------------------------------------------------------------

    @contextmanager
    def training(self, asked: object) -> Iterator[str | None]:
        """Around the training of the class behind. Yields the path of the checkpoint to resume from. `asked`: as
        `resume_from_checkpoint` of `train()`."""
        trainer, args, now, checkpoints = self.trainer, self.trainer.args, self.now, self.checkpoints
        self.flags.begin()
        asked = args.resume_from_checkpoint if asked is None else asked
        if isinstance(asked, str) and asked.lower() in ("true", "false"):  # from a command line
            asked = asked.lower() == "true"
        # before collective calls that depend on arguments, which may have changed since the Trainer was made
        agreement, facts = self.ranks.agreement(), partial(self.same.training_facts, asked, self.reference)
        agreement.run("start of training", lambda: check_values(args), facts=lambda _: facts())
        folder = Path(trainer._get_output_dir(None))
        try:
            if args.save_strategy != SaveStrategy.NO or asked is True:
                checkpoints.into(folder).lock()
            resumed = resuming.find_checkpoint(asked, folder, args, agreement, trainer.model) if asked else None
            now.resumption, now.is_ours = resumed, True
            if not args.hotspa_allow_data_order_change:
                resuming.keep_rows_a_step(resumed, args, trainer.train_dataset)
            checkpoints.begin()
            yield str(resumed.path) if resumed else None
            checkpoints.check_written()
        finally:
            now.resumption, now.is_ours = None, False
            checkpoints.close()

    @property
    def reference(self) -> Any:
        return None

    def check_rows(self, switched: SwitchedModel, loader: object) -> SequenceTable | None:
        """Checks for rows that no bucket takes, and another order than a checkpoint's, as far as lengths are known.
        Collective. Returns the scan of the training data, or None."""
        trainer, rows, args, now = self.trainer, self.rows, self.trainer.args, self.now
        given, kind = trainer.eval_dataset, type(trainer)
        evaluates = args.eval_strategy != "no" or args.eval_on_start
        evaluated = list(given.values()) if isinstance(given, dict) else [given]
        if not evaluates or is_users(kind.get_eval_dataloader):
            evaluated = []

        def checked() -> SequenceTable | None:
            table = rows.table(trainer.train_dataset, switched.longest) if rows.collates_for(loader) else None
            tables = [rows.table(dataset, switched.longest) for dataset in evaluated if dataset is not None]
            refuse_longer_rows(args, kind, [table, *tables])
            now.order = resuming.data_order(args, args.hotspa_rows_a_step, table, switched.longest)
            if now.resumption is not None and not args.hotspa_allow_data_order_change:
                resuming.check_data_order(now.resumption, now.order, loader, args)
            return table

        return switched.engine.agreement.run("data set", checked)

    def skip(self, failure: HotspaError) -> Tensor:
        """Skips the current mini-batch; its loss for the log. Raises `HotspaError` if too many were skipped."""
        mean = self.skipped.skip(self.trainer.switched, failure)
        self.now.skips = True
        return mean

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """`trainer.log` as the loop calls it once: on all ranks, while an override may call `super()` on one alone."""
        take_back(self.trainer, "log")
        self.skipped.correct(logs, self.ranks.agreement())
        self.trainer.log(logs, start_time)
        self.flags.agree_in_loop()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def load(self, resumption: Resumption) -> None:
        trainer, args = self.trainer, self.trainer.args
        resuming.load_scheduler(resumption, trainer.lr_scheduler)
        trainer.load_hotspa_state(resumption.state.get("hotspa", {}))
        parts = self.watchers.parts
        if parts and resumption.manifest.world_size == args.world_size:
            name = rank_columns(args.process_index, args.world_size)
            tensors = saved_tensors(resumption.path, resumption.manifest, name)
            for part in parts:
                part.load_rank_tensors(tensors)

    def rank_tensors(self) -> dict[str, Tensor]:
        """The tensors that only this rank needs to resume, of features."""
        return {name: tensor for part in self.watchers.parts for name, tensor in part.rank_tensors().items()}

    @property
    def saves_at_once(self) -> bool:
        """Whether code in front of `_save_checkpoint` may expect the folder when it returns."""
        return is_overridden(self.trainer, "_save_checkpoint")

    def write_more(self, folder: Path) -> None:
        """Lets overrides write into a committed checkpoint, in the order of the stock Trainer."""
        trainer = self.trainer
        self.show(SAVE)
        self.now.written = folder
        try:
            if any(is_overridden(trainer, name) for name in WRITERS[:2]):  # the first calls the second
                trainer.save_model(str(folder), _internal_call=True)
            for name in () if trainer.args.save_only_model else WRITERS[2:]:
                if is_overridden(trainer, name):
                    getattr(trainer, name)(str(folder))
        finally:
            self.now.written = None

    def writes(self, output_dir: str | None) -> bool:
        """Whether a folder is the checkpoint that overrides may add files to now."""
        written = self.now.written
        if written is None or output_dir is None:
            return False
        return os.path.abspath(written) == os.path.abspath(output_dir)

    def is_written(self, name: str, output_dir: str) -> None:
        """Nothing in a checkpoint, which holds it already. Raises `UnsupportedError` outside of one."""
        if not self.writes(output_dir):
            raise UnsupportedError(
                f"{type(self.trainer).__name__} calls {name}({str(output_dir)!r}) itself",
                why="each rank holds a share of the optimizer's state, and writes it when a checkpoint is due",
                fix="leave that to super()._save_checkpoint(model, trial), which a call of Trainer._save_checkpoint by class passes over",
            )


def _refuse_router_logits(model: nn.Module) -> None:
    """Rejects a config that asks for router logits, which the stock Trainer passes to `compute_metrics`."""
    if getattr(bare_model(model)[0].config.get_text_config(), "output_router_logits", False):
        raise UnsupportedError(
            "compute_metrics with output_router_logits=True in the model's config",
            why="the stock Trainer gives it the logits of routers, too, which stay here on the ranks that compute them",
            fix="leave compute_metrics out, or set output_router_logits=False, which leaves the balance loss out",
        )
