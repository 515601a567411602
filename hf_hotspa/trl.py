"""TRL's trainers over a `SwitchedModel`: change one import of a script.

    from hf_hotspa.trl import SFTConfig, SFTTrainer  # or DPO, KTO, GRPO, RLOO, Reward

    args = SFTConfig(output_dir="out", packing=True, hotspa_strategies="dp4:1024@4096,tp4:8192")
    trainer = SFTTrainer(model="Qwen/Qwen3-0.6B", args=args, train_dataset=dataset)
    trainer.train()

The classes are TRL's behind `SwitchedMixin`, made at first use: data preparation, collators, masks, losses and metrics
are TRL's. A config is TRL's, with TRL's defaults and the `hotspa_*` flags. `switched(MyTrainer)` of `hf_hotspa.trainer`
makes such a class from a subclass of a TRL trainer.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_hotspa.checkpoint.format.manifest import rank_columns
from hf_hotspa.checkpoint.rng import random_state, set_random_state
from hf_hotspa.checkpoint.tensors import saved_tensors
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.terms import Scoring
from hf_hotspa.data.collator import ERROR
from hf_hotspa.errors import HotspaConfigError, ModelError, ResumeError, UnsupportedError
from hf_hotspa.model.model_check import weights_digest
from hf_hotspa.model.specs import describe_model, dtype_name
from hf_hotspa.parallel.loss import IGNORE
from hf_hotspa.parallel.wrapped_model import bare_model, is_wrapped
from hf_hotspa.rows.read_row import refuse_images
from hf_hotspa.switched.calls import Compared, EveryToken
from hf_hotspa.switched.model import FrozenModel, SwitchedModel
from hf_hotspa.switched.model_object import guard, release, structure_only
from hf_hotspa.switched.teacher import Teacher
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments, arguments_of, completed, named
from hf_hotspa.trainer.events import CallbackEvents
from hf_hotspa.trainer.generating import ExpectedLengths
from hf_hotspa.trainer.protocol import HasRun
from hf_hotspa.trainer.resuming import Resumption
from hf_hotspa.trainer.run import Run
from hf_hotspa.trainer.trainer import SwitchedMixin, switched
from hf_hotspa.typed import reading_state
from hf_hotspa.versions import version_of

if TYPE_CHECKING:
    from trl.trainer.distillation_config import DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

OF_PADDING = ("ORPO", "CPO")  # two of their metrics are means over padding, too (`OverLogits`)
TRAINERS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward", "Distillation")  # TRL's supported trainers
OF_OLDER = ("SFT", "DPO")  # those that were tried with TRL 1.9 to 1.15
ONLINE = ("GRPO", "RLOO", "GMPO")  # trainers that generate their training data (`OverOnline`)
_OF_BATCH = "generated."  # prefix of the names of a generation batch's tensors in a checkpoint
EXPERIMENTAL = {  # trainers of `trl.experimental`, and their modules there
    "ORPO": "orpo", "CPO": "cpo", "TPO": "tpo", "GKD": "gkd", "ServerDistillation": "server_distillation",
    "GOLD": "gold", "SDFT": "sdft", "SDPO": "sdpo", "IWOPD": "iw_opd", "OnlineDPO": "online_dpo",
    "AsyncDistillation": "async_distillation", "AsyncGRPO": "async_grpo", "GMPO": "gmpo", "A2PO": "a2po",
}  # fmt: skip
UNSUPPORTED = {  # of these: why, and what to do
    "GOLD": ("its loss compares two vocabularies, by the text of their tokens", "use GKD, or TRL's own class"),
    "SDFT": ("its teacher follows the trained weights", "use TRL's own class"),
    "SDPO": ("its teacher follows the trained weights", "use TRL's own class"),
    "IWOPD": ("it was not tried", "use Distillation, or TRL's own class"),
    "A2PO": ("it was not tried", "use GRPO, or TRL's own class"),
    "OnlineDPO": ("it was not tried", "use GRPO, or TRL's own class"),
    "AsyncDistillation": ("a thread generates while the weights change", "use Distillation, or TRL's own class"),
    "AsyncGRPO": ("a thread generates while the weights change", "use GRPO, or TRL's own class"),
}
__all__ = [
    "DPOConfig", "DPOTrainer", "DistillationConfig", "DistillationTrainer", "GRPOConfig", "GRPOTrainer", "KTOConfig", "KTOTrainer",
    "RLOOConfig", "RLOOTrainer", "RewardConfig", "RewardTrainer", "SFTConfig",
    "SFTTrainer",
]  # fmt: skip

logger = logging.getLogger(__name__)
_Base: Any = object


class _Syncs(TrainerCallback):
    """Replaces TRL's `SyncRefModelCallback`, which reads the model object's weights: notes that a sync is due."""

    is_due = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.is_due |= state.global_step % args.ref_model_sync_steps == 0


class _ByName(_Base):
    """Passes arguments by name: in some of TRL's classes the second one is not `args`."""

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        super().__init__(model=model, args=args, **kwargs)


class RunOverTRL(Run):
    """The `Run` of one of TRL's trainers, with a reference model on the same replicas."""

    prepares = False  # TRL loads a name or folder, with `model_init_kwargs`
    sync: _Syncs | None = None
    given_reference: Any = None
    digest = ""  # of the reference before callbacks
    # the trained model, and its reference
    pair: tuple[SwitchedModel | None, FrozenModel | SwitchedModel | Teacher | None] = None, None

    def check(self, given: Mapping[str, Any]) -> None:
        _check_supported(of_trl(type(self.trainer))[0], given.get("model"), self.trainer.args, given)

    def add_callbacks(self) -> None:
        if not isinstance(self.trainer.callback_handler, CallbackEvents):  # else precomputing in the constructor has
            super().add_callbacks()

    @property
    def reference(self) -> Any:
        return self.given_reference

    def frozen(self) -> Any:
        """The reference model: the given one, or, where calls of `trainer.model` are switched, a second set of weights
        on the replicas of the trained model. Collective the first time."""
        given, trained = self.given_reference, self.model
        if given is None or trained is None or not trained.is_routed:
            return given
        of, frozen = self.pair
        if of is not trained:
            frozen = self._frozen(given, trained)
            self.pair = trained, frozen
        return frozen

    def _frozen(self, reference: nn.Module, trained: SwitchedModel) -> FrozenModel | SwitchedModel | Teacher:
        reference = self.trainer.accelerator.unwrap_model(reference, keep_fp32_wrapper=False).to("cpu")
        try:
            return trained.frozen(reference)
        except ModelError:  # such as another size
            options, buckets = trained.engine.options, trained.engine.buckets
            other = SwitchedModel(reference, buckets, options, device=self.trainer.args.device, guards=True)
            other.trains = False
            return other.eval()

    def close(self, restarts: bool = False) -> None:
        if self.pair[1] is not None:
            self.pair[1].close()
        self.pair = None, None
        super().close(restarts)

    def show(self, occasion: str) -> None:
        super().show(occasion)
        if occasion in self.trainer.callback_handler.looked_at and self.given_reference is not None:
            self.digest = weights_digest(self.given_reference)

    def take(self, event: str) -> None:
        """Applies changes of the reference, too, such as by a `SyncRefModelCallback` of the user's."""
        super().take(event)
        given, (_, frozen) = self.given_reference, self.pair
        if given is None or frozen is None:
            return
        if self.trainer.switched.engine.any_rank(weights_digest(given) != self.digest):
            frozen.load_state_dict(given.state_dict())

    @torch.no_grad()
    def synchronize(self) -> None:
        """Collective."""
        trainer, reference, frozen = self.trainer, self.given_reference, self.frozen()
        trainer.switched.refresh()
        alpha = vars(trainer.args)["ref_model_mixup_alpha"]
        import_module("trl.trainer.callbacks").SyncRefModelCallback.sync_target_model(trainer.model, reference, alpha)
        frozen.load_state_dict(reference.state_dict())

    def start(self, loader: Any = None) -> SwitchedModel:
        if self.model is None:
            trainer = self.trainer
            bare = bare_model(trainer.model)[0]
            # TRL sets the coefficient in the config, and never reads the model's
            if hasattr(bare, "router_aux_loss_coef"):
                bare.router_aux_loss_coef = bare.config.get_text_config().router_aux_loss_coef
            if trainer.args.hotspa_auto and trainer.train_dataset is not None:
                loader = self.loader(loader)
            made = super().start(loader)
            made.assumptions.expects = expected_gradients(trainer)
            return made
        return super().start(loader)

    def loader(self, loader: Any) -> Any:
        return self.trainer.get_train_dataloader() if loader is None else loader


class OverTRL(SwitchedMixin, _ByName):
    """In front of one of TRL's trainers: `SwitchedMixin` with a reference model on the same replicas. Raises
    `UnsupportedError`: the trainer or an option is not supported."""

    _hotspa: RunOverTRL
    _hotspa_kind = RunOverTRL

    def __init__(self, *given: Any, **kwargs: Any) -> None:
        self.hotspa_check_class()
        kind, base = of_trl(type(self))
        kwargs = named(given, kwargs, super(_ByName, self).__init__, first=())
        model, args = kwargs.pop("model", None), kwargs.pop("args", None)
        args = _arguments(kind, base, model, args)
        args.scoring = _scoring(kind, model, args, kwargs)
        super().__init__(model, args, **kwargs)
        if not self._hotspa.backing.is_stock and vars(self.args).get("sync_ref_model"):
            handler = self.callback_handler
            handler.pop_callback(import_module("trl.trainer.callbacks").SyncRefModelCallback)
            self._hotspa.sync = _Syncs()
            handler.add_callback(self._hotspa.sync)

    @classmethod
    def hotspa_check_class(cls) -> None:
        kind, base = of_trl(cls)
        if kind in UNSUPPORTED or kind not in (*TRAINERS, *EXPERIMENTAL):
            why, fix = UNSUPPORTED.get(
                kind, ("it was not tried", f"use one of {', '.join(TRAINERS)}, or TRL's own class")
            )
            raise UnsupportedError(f"TRL's {base.__name__} over a switched model", why=why, fix=fix)
        if kind not in (OF_OLDER if is_older() else (*TRAINERS, *EXPERIMENTAL)) or older_than(1, 9):
            raise UnsupportedError(
                f"{base.__name__} of TRL {version_of('trl')} over a switched model",
                why=f"{', '.join(OF_OLDER)} were tried from TRL 1.9, the others from 1.16",
                fix="pip install 'trl>=1.16,<1.17'",
            )

    @property
    def ref_model(self) -> Any:
        """TRL's reference model: the given one, or where calls of `self.model` are switched `RunOverTRL.frozen`."""
        return self._hotspa.frozen()

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        self._hotspa.given_reference, self._hotspa.pair = model, (None, None)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL, in its constructor, but over the switched model."""
        run, computed = self._hotspa, partial(super()._precompute_ref_logps, *args, **kwargs)

        def switched() -> Any:
            run.add_callbacks()
            with run.start().train(self.model.training).routed():
                return computed()

        return run.backing.run(switched, computed)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        sync = self._hotspa.sync
        if sync is not None and sync.is_due:
            self._hotspa.synchronize()
            sync.is_due = False
        super()._maybe_log_save_evaluate(*args, **kwargs)


class OverLogits(OverTRL):
    """`OverTRL` for trainers whose metrics `logits/chosen` and `logits/rejected` are means over padding, too, which has no
    logits here: they are left out, with a warning."""

    def __init__(self, *given: object, **kwargs: object) -> None:
        super().__init__(*given, **kwargs)
        if not self._hotspa.backing.is_stock and self.args.process_index == 0:
            logger.warning(
                "%s logs no logits/chosen and logits/rejected: TRL takes their means over padding, too, which is not computed here",
                type(self).__name__,
            )

    def store_metrics(self, metrics: dict[str, Any], *args: object, **kwargs: object) -> None:
        """As TRL, without these two."""
        if not self._hotspa.backing.is_stock:
            metrics = {name: value for name, value in metrics.items() if "logits/" not in name}
        super().store_metrics(metrics, *args, **kwargs)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Keeps the random generators unchanged by what is done inside."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state, "the start of the engine")


class _Generates(HasRun, Protocol):
    """What is read and set of a trainer of TRL that generates its training data."""

    num_iterations: int
    entropy_coef: float
    _step: int
    _last_world_entropy: float
    _buffered_inputs: list[dict[str, Any]]


class RunOnline(RunOverTRL):
    """The `Run` of a trainer that generates its training data."""

    trainer: _Generates
    seeds: Tensor | None = None  # the known gradients of the batch whose loss is computed

    @property
    def saves_at_once(self) -> bool:
        """TRL writes its entropy controller into the folder after the save."""
        return super().saves_at_once or getattr(self.trainer, "use_adaptive_entropy", False)

    def start(self, loader: Any = None) -> SwitchedModel:
        """Keeps the random generators unchanged, as TRL shuffles and samples with them."""
        if self.model is not None:
            return super().start(loader)
        with same_random_numbers():
            return super().start(loader)

    def loader(self, loader: Any) -> Any:
        return ExpectedLengths(self.trainer, super().loader(loader))

    @property
    def steps_of_batch(self) -> int:
        """Training batches of a generation batch."""
        return int(vars(self.trainer.args)["steps_per_generation"] * self.trainer.num_iterations)

    @property
    def is_inside_batch(self) -> bool:
        """Whether rows of a generation batch are left to train."""
        return bool(self.trainer._step % self.steps_of_batch)

    def rank_tensors(self) -> dict[str, Tensor]:
        """With the generation batch, unless it is used up."""
        batch = self.trainer._buffered_inputs if self.is_inside_batch else ()
        return super().rank_tensors() | {
            f"{_OF_BATCH}{index}.{name}": value
            for index, part in enumerate(batch)
            for name, value in part.items()
            if isinstance(value, Tensor)
        }

    def load(self, resumption: Resumption) -> None:
        """Resumes also inside a generation batch, on the same number of ranks (else `ResumeError`)."""
        super().load(resumption)
        trainer = self.trainer
        place = resumption.state.get("hotspa", {}).get("generation")
        if place is None:  # another trainer's checkpoint: TRL generates anew
            return
        with reading_state("a generation batch", "completions are generated anew"):
            trainer._step, ranks = int(place["step"]), int(place["ranks"])
            if "entropy_coef" in place:
                trainer.entropy_coef, trainer._last_world_entropy = place["entropy_coef"], place["entropy"]
        if not self.is_inside_batch:
            return
        world_size = trainer.args.world_size
        if ranks != world_size:
            raise ResumeError(
                f"the checkpoint was written by {ranks} ranks, and this run has {world_size}",
                where=str(resumption.path),
                why="it was written inside a generation batch, and each rank has its own part of the batch",
                fix=f"resume on {ranks} ranks, or from a checkpoint at the end of a generation batch",
            )
        name = rank_columns(trainer.args.process_index, ranks)
        saved = saved_tensors(resumption.path, resumption.manifest, name)
        trainer._buffered_inputs = [dict[str, Any]() for _ in range(vars(trainer.args)["steps_per_generation"])]
        for key, value in saved.items():
            if key.startswith(_OF_BATCH):
                index, column = key.removeprefix(_OF_BATCH).split(".", 1)
                trainer._buffered_inputs[int(index)][column] = value.to(trainer.args.device)


class OverOnline(OverTRL):
    """`OverTRL` for trainers that generate their training data (GRPO, RLOO).

    Generates with the current weights, by transformers on the model object or by vLLM from a stream of the master
    store. Runs one scoring pass for a whole generation batch, or none if the gradients by log-probabilities are known.
    Resumes inside a generation batch. Generation, rewards, advantages, losses and metrics are TRL's.
    """

    _hotspa: RunOnline
    _hotspa_kind = RunOnline

    def __init__(self, *given: Any, **kwargs: Any) -> None:
        super().__init__(*given, **kwargs)
        if not self._hotspa.backing.is_stock and self.use_vllm:
            self.vllm_generation._iter_named_params = lambda: streamed(self)

    # -- generation ---------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        """As TRL, with the current weights in the model object, which holds them before training; TRL streams them for
        vLLM. Collective."""
        if self._hotspa.backing.is_stock or self._hotspa.model is None:
            return super()._generate(prompts)
        looks = not self.use_vllm or getattr(self, "rollout_func", None) is not None
        with _weights(self, looks):
            return super()._generate(prompts)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """As TRL, but scores (old log-probabilities, a reference) in one pass: rows are packed, and each strategy's
        weights are loaded once."""
        run = self._hotspa
        if not run.backing.is_stock and not torch.is_grad_enabled():
            batch_size = None
        if run.seeds is not None and batch_size is None:
            model = partial(model, expected_seeds=run.seeds)
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
        )

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """As TRL; passes on gradients that are known, so that the rows are trained at once."""
        run = self._hotspa
        if not run.backing.is_stock and torch.is_grad_enabled() and self.switched.engine.updates is None:
            run.seeds = first_seeds(self, inputs)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            run.seeds = None

    def hotspa_state(self) -> dict[str, Any]:
        """Adds the place in a generation batch."""
        place = {"step": self._step, "ranks": self.args.world_size}
        if getattr(self, "use_adaptive_entropy", False):
            place |= {"entropy_coef": self.entropy_coef, "entropy": self._last_world_entropy}
        return super().hotspa_state() | {"generation": place}


@contextmanager
def _weights(trainer: OverTRL, whole: bool) -> Iterator[None]:
    """Inside, calls run on the model object itself, as ranks generate different numbers of tokens."""
    switched = trainer.switched
    # vLLM gets the base weights with the adapter merged in
    are_read = whole or switched.engine.description.added is not None
    if are_read:
        switched.refresh()
    # the step may have begun and scored with these weights
    was_guarded = any(hasattr(type(p), "_true_class") for p in trainer.model.parameters())
    if are_read:
        release(trainer.model)
    try:
        with switched.routed(False):
            yield
    finally:
        if was_guarded:
            guard(trainer.model)


def of_trl(cls: type) -> tuple[str, type]:
    """Returns the kind of a trainer, such as SFT, and its TRL class."""
    base = next(c for c in cls.__mro__ if c.__module__.partition(".")[0] == "trl")
    return base.__name__.removesuffix("Trainer"), base


def _arguments(
    kind: str, base: type, model: nn.Module | str, args: TrainingArguments | None
) -> HotSPaTrainingArguments:
    """The arguments as TRL would make them, with our flags."""
    if args is None:
        name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        return cast(HotSPaTrainingArguments, config_of(f"{kind}Config")(f"{name.split('/')[-1]}-{kind}"))
    config = getattr(sys.modules[base.__module__], f"{kind}Config")
    if isinstance(args, config) or not isinstance(args, TrainingArguments):
        own: Any = completed(args)
        if is_older() and getattr(own, "loss_type", None) == "chunked_nll":  # it replaces the model's forward
            own.loss_type = "nll"  # the same number
        return cast(HotSPaTrainingArguments, own)
    if kind != "SFT":
        raise HotspaConfigError(
            f"args is a {type(args).__name__}",
            fix=f"give the {kind}Config of hf_hotspa.trl, which has the fields of {kind}",
        )
    known = {f.name for f in dataclasses.fields(config_of("SFTConfig"))}
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init and f.name in known}
    return cast(HotSPaTrainingArguments, config_of("SFTConfig")(**given))


def older_than(*release: int) -> bool:
    """Whether the installed TRL is older than a release."""
    return tuple(int(part) for part in (version_of("trl") or "0").split(".")[:2] if part.isdigit()) < release


def is_older() -> bool:
    """Whether TRL's losses read logits, and call no fused head."""
    return older_than(1, 16)


_OF_ROWS = "TRL prepares and batches the rows"
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, str, str]] = {
    "activation_offloading": (False, "replicas run, which its hooks do not see", "use gradient_checkpointing"),
    "use_transformers_continuous_batching": (
        False,
        "it casts the model object, and its paged attention was not tried",
        "leave it out, or use vLLM",
    ),
    "cast_lm_head_to_fp32": (
        False,
        "it replaces the forward of the model object's head, and replicas use the class's forward",
        "leave it out: logits are summed in fp32 here, for every dtype of the weights",
    ),
    "hotspa_overlong": (ERROR, _OF_ROWS, "use max_length"),
    "hotspa_empty_rows": (ERROR, _OF_ROWS, "filter the data set"),
    "hotspa_mini_batch_size": (None, _OF_ROWS, "use per_device_train_batch_size and gradient_accumulation_steps"),
}
"""Name -> the value that has no effect, why other values are unsupported, and what to do."""


def _check_supported(
    kind: str, model: nn.Module | str | None, args: HotSPaTrainingArguments, given: Mapping[str, Any]
) -> None:
    """Raises `UnsupportedError` for options that cannot be honoured."""
    for name, (nothing, why, fix) in _UNSUPPORTED_FIELDS.items():
        if (value := getattr(args, name, nothing)) not in (nothing, None):  # front ends give None for no
            raise UnsupportedError(f"{type(args).__name__} has {name}={value!r}", why=why, fix=fix)
    if kind not in ("SFT", "DPO", "KTO"):
        refuse_images(given.get("train_dataset"), f"TRL's {kind}Trainer", "SFTTrainer, DPOTrainer or KTOTrainer")
    predicts = given.get("compute_metrics") is not None or getattr(args, "generate_during_eval", False)
    if kind in OF_PADDING and predicts:
        raise UnsupportedError(
            f"compute_metrics, or generate_during_eval, with TRL's {kind}Trainer",
            why="its predictions are means of logits over padding, too, which is not computed here; the other was not tried",
            fix="leave them out",
        )
    if given.get("token_loss") is not None:
        raise UnsupportedError(
            "a token_loss in front of TRL's trainer",
            why="TRL computes the loss",
            fix="use HotSPaTrainer, or override compute_loss in a subclass of TRL's trainer",
        )


def _scoring(
    kind: str, model: nn.Module | str | None, args: HotSPaTrainingArguments, given: Mapping[str, Any]
) -> Scoring:
    """Returns what a step runs beside its training pass."""
    values = vars(args)
    if kind == "SFT":  # one pass for logits, one for metrics
        return Scoring(2 if values["label_smoothing_factor"] or given.get("compute_loss_func") is not None else 0)
    if kind in ("Reward", "ORPO", "CPO", "TPO", "ServerDistillation"):  # losses that read outputs of rows, or logits
        return Scoring(1)
    if kind in FRONTS:
        return Scoring(1, reference=True)
    adapted = is_wrapped(model) or given.get("peft_config") is not None
    if kind in ONLINE:
        has_routers = hasattr(getattr(model, "config", None), "output_router_logits")
        return _scoring_online(kind, values, adapted, has_routers and values["router_aux_loss_coef"] != 0.0)
    is_live = not values["precompute_ref_log_probs"]
    scored = 2 if kind == "KTO" and values["loss_type"] == "kto" else 1  # KTO also scores the completions of its KL
    return Scoring(scored * (1 + is_live), is_live and (given.get("ref_model") is not None or not adapted))


def _scoring_online(kind: str, values: Mapping[str, Any], adapted: bool, balanced: bool) -> Scoring:
    """A generation batch is scored once and trained `num_iterations` times."""
    has_reference = values["beta"] != 0.0
    of_batch = has_reference + (kind == "RLOO" or not generates_every_step(values))
    of_batch += kind == "GRPO" and generates_every_step(values) and is_corrected(values)
    of_step = balanced or not seeds_are_known(values)
    return Scoring(of_step + ceil(of_batch / values["num_iterations"]), has_reference and not adapted)


def is_corrected(values: Mapping[str, Any]) -> bool:
    return bool(values["use_vllm"] and values["vllm_importance_sampling_correction"])


def seeds_are_known(values: Mapping[str, Any]) -> bool:
    """Whether the gradients of GRPO's loss by log-probabilities are known before these are: the current weights
    generated the batch, and the loss has only the ratio to the old log-probabilities. Accumulated batches are scored
    one by one and trained together, which moves fewer weights."""
    if "loss_type" not in values:  # RLOO, whose ratio is taken over the whole completion
        return False
    hangs_on_more = values["beta"] or values["entropy_coef"] or values["use_adaptive_entropy"]
    is_whole = values["loss_type"] != "vespo" and values["top_entropy_quantile"] == 1.0
    is_new = generates_every_step(values) and values["gradient_accumulation_steps"] == 1 and not is_corrected(values)
    return bool(is_whole and is_new and not hangs_on_more)


def generates_every_step(values: Mapping[str, Any]) -> bool:
    """Whether the trained weights have always generated the batch, so that TRL scores no old log-probabilities."""
    every = (values["steps_per_generation"] or 1) * values["num_iterations"]
    return bool(values["gradient_accumulation_steps"] % every == 0)


# -- generated batches ------------------------------------------------------------------------------------------------


def expected_gradients(trainer: HasRun) -> EveryToken | None:
    """What is known of the gradients by log-probabilities beforehand: SFT's losses are a sum over all of them."""
    values = vars(trainer.args)
    is_sum = values.get("loss_type") in ("nll", "dft") and values["average_tokens_across_devices"]
    of_logits = vars(trainer).get("compute_loss_func") is not None or values["label_smoothing_factor"]
    if of_trl(type(trainer))[0] != "SFT" or not is_sum or of_logits:
        return None
    # a model that is not told how many labels a step has: the mean of each micro-batch
    of_rank = not vars(trainer).get("model_accepts_loss_kwargs", True)
    return EveryToken(times_probability=values["loss_type"] == "dft", of_rank=of_rank)


def first_seeds(trainer: OverOnline, inputs: Mapping[str, Any]) -> Tensor | None:
    """Returns the gradients of GRPO's loss by log-probabilities if the trained weights generated (every ratio is 1).
    `inputs`: B rows with completions of up to C tokens after prompts of up to P.

    Returns:
        [B, P + C - 1], up to a factor common to all ranks: -advantage over the divisor of the row's loss. None if they
        depend on the log-probabilities. The model compares them with the actual gradients.
    """
    if not seeds_are_known(vars(trainer.args)) or inputs.get("old_per_token_logps") is not None:
        return None
    mask, advantages = inputs["completion_mask"], inputs["advantages"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    of_row = advantages[:, None] if advantages.dim() == 1 else advantages
    if trainer.loss_type in ("grpo", "sapo") or of_trl(type(trainer))[0] == "GMPO":
        of_row = of_row / mask.sum(-1, keepdim=True).clamp(min=1)
    elif trainer.loss_type == "bnpo":
        of_row = of_row / mask.sum().clamp(min=1)
    return torch.nn.functional.pad(-of_row * mask, (inputs["prompt_ids"].shape[1] - 1, 0))


# -- the weights for vLLM ---------------------------------------------------------------------------------------------


def streamed(trainer: OverOnline) -> Iterator[tuple[str, Tensor]]:
    """Yields the current weights by name, in the model object's dtypes, as TRL's `_iter_named_params`. Collective.

    They come from the master store a layer at a time. A vLLM server gets them from rank 0, so that other ranks only
    send their shares; colocated vLLM gets them on every rank. An adapter is merged into each base weight.
    """
    model, engine = trainer.model, trainer.switched.engine
    if engine.description.added is not None:
        yield from _merged(trainer, model)
        return
    with structure_only():  # names and dtypes
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    to = 0 if trainer.vllm_mode == "server" else None
    weights = engine.stream(lambda spec: dtypes.get(spec.name, getattr(torch, spec.master_dtype)), to)
    try:
        for spec, whole in weights:
            name = next(name for name in (spec.name, *spec.tied_names) if name in dtypes)
            yield name, whole
    finally:
        for _ in weights:  # if vLLM failed, the other ranks are still sending
            pass


def _merged(trainer: OverOnline, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As TRL for a PEFT model, one layer at a time. Copies the base weights, as merging and unmerging would round
    them."""
    fix = trainer.vllm_generation._fix_param_name_to_vllm
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    for name, parameter in model.named_parameters():
        if model.prefix in name or "original_module" in name:
            continue
        owner, _, _ = name.partition(".base_layer.")
        layer = layers.get(owner)
        value = parameter.data
        if layer is not None:
            kept = [(of_base, of_base.data.clone()) for of_base in layer.base_layer.parameters()]
            layer.merge()
            value = parameter.data.clone()
            for of_base, before in kept:
                of_base.data.copy_(before)
            layer.merged_adapters.clear()
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        yield fix(name, extra_prefixes=["modules_to_save.default."]), value


# -- teachers ---------------------------------------------------------------------------------------------------------

# A teacher (`switched.teacher`) has the student's strategies, whatever its size. The divergence of each token comes from
# there; its gradient is known beforehand, up to a factor, so that a batch is trained at once.


class RunTaught(RunOverTRL):
    """The `Run` of a trainer with a teacher. Its reference is the teacher, which is ready when training begins."""

    def start(self, loader: object = None) -> SwitchedModel:
        trainer = self.trainer
        if self.model is None and self.given_reference is not None:
            _check_teacher(self.given_reference)
            bf16 = torch.bfloat16 if trainer.args.bf16 else None
            own, other = (_sizes(model, bf16) for model in (trainer.model, self.given_reference))
            trainer.args.scoring = Scoring().taught(own, other)
        made = super().start(loader)
        if self.given_reference is not None and self.pair[0] is not made:
            with same_random_numbers():
                self.pair = made, self._frozen(self.given_reference, made)
        return made

    def _frozen(self, reference: nn.Module, trained: SwitchedModel) -> Teacher:
        reference = self.trainer.accelerator.unwrap_model(reference, keep_fp32_wrapper=False)
        if not vars(self.trainer.args).get("seq_kd"):  # then it generates itself
            reference.to("cpu")
        return Teacher(reference, trained.engine)

    def compared(
        self, model: nn.Module, batch: dict[str, Tensor], items: float | Tensor, beta: float, temperature: float = 1.0
    ) -> Compared:
        """The comparison of a batch with labels, for a loss that is the sum of divergences over `items`."""
        against = cast(Teacher, self.pair[1]).against(beta, temperature)
        given: dict[str, Any] = {**batch, "against": against}
        if torch.is_grad_enabled():
            given["expected_seeds"] = (batch["labels"][:, 1:] != IGNORE).double() / float(items)
        return cast(Compared, model(**given))


def _check_teacher(model: nn.Module) -> None:
    if is_wrapped(model):
        raise UnsupportedError(
            "a teacher with an adapter",
            why="its layers run as the model's own class does",
            fix="give teacher.merge_and_unload()",
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedError("a quantized teacher", why="it was not tried", fix="load it in bf16")


def _sizes(model: nn.Module, compute_dtype: torch.dtype | None) -> ModelSizes:
    description = describe_model(model, compute_dtype)
    return ModelSizes(description.shape, dtype_name(description.compute_dtype), vector=description.vector)


class RunDistillation(RunTaught, RunOnline):
    """The `Run` of TRL's DistillationTrainer."""

    @property
    def steps_of_batch(self) -> int:
        return int(self.trainer.args.gradient_accumulation_steps)


class _Taught(_Base):
    """Passes a trainer's teacher on to its `RunTaught`."""

    _hotspa: RunTaught

    @property
    def teacher_model(self) -> Any:
        """TRL's teacher, as it was given."""
        return self._hotspa.given_reference

    @teacher_model.setter
    def teacher_model(self, model: nn.Module | None) -> None:
        self._hotspa.given_reference, self._hotspa.pair = model, (None, None)


def _directly(
    wrapper: nn.Module, original: nn.Module, method: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """In the place of TRL's `_ForwardRedirection`, which calls a method inside a wrapper's forward: with the wrapper, whose
    calls are of all ranks, in the place of the model inside."""
    return method(*(wrapper if each is original else each for each in args), **kwargs)


class OverDistillation(_Taught, OverOnline):
    """`OverOnline` for TRL's DistillationTrainer."""

    _hotspa: RunDistillation
    _hotspa_kind = RunDistillation

    def __init__(self, *given: object, **kwargs: object) -> None:
        super().__init__(*given, **kwargs)
        if not self._hotspa.backing.is_stock:
            self._forward_redirection = _directly

    def _compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: float | Tensor | None = None
    ) -> object:
        """As TRL: the loss, the sum of the student's entropies, and the number of tokens that count."""
        run = self._hotspa
        if run.backing.is_stock:
            return super(OverOnline, self)._compute_loss(model, inputs, num_items_in_batch)
        completion, counted = inputs["completion_ids"], inputs["completion_mask"] != 0
        if "tool_mask" in inputs:
            counted = counted & (inputs["tool_mask"] != 0)
        prompt, length = inputs["prompt_ids"], completion.shape[1]
        labels = torch.cat([torch.full_like(prompt, IGNORE), torch.where(counted, completion, IGNORE)], 1)
        batch = {
            "input_ids": torch.cat([prompt, completion], 1),
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            "labels": labels,
        }
        number = counted.sum()
        items = number.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        out = run.compared(model, batch, items, self.beta, self.temperature)
        loss = out.divergence[:, -length:].sum() / items
        return loss, out.entropy[:, -length:].sum().detach(), number


class OverGKD(_Taught, OverTRL):
    """`OverTRL` for TRL's GKDTrainer: rows of the data set, or of a generation by the student or the teacher."""

    _hotspa: RunTaught
    _hotspa_kind = RunTaught

    def training_step(self, *args: object, **kwargs: object) -> Tensor:
        """As TRL. Each rank draws whether it generates, so that all have the weights if one may."""
        run = self._hotspa
        if not run.backing.is_stock and self.lmbda > 0.0 and run.model is not None:
            run.model.refresh()
        step: Tensor = super().training_step(*args, **kwargs)
        return step

    def generate_on_policy_outputs(self, *args: object, **kwargs: object) -> object:
        """As TRL, which has a static method."""
        if self._hotspa.backing.is_stock:
            return super().generate_on_policy_outputs(*args, **kwargs)
        with _weights(self, whole=True):
            return super().generate_on_policy_outputs(*args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False,
        num_items_in_batch: float | Tensor | None = None,
    ) -> object:  # fmt: skip
        """As TRL, without a table of logits, unless the outputs are asked for and read."""
        run = self._hotspa
        if run.backing.is_stock:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
        number = (batch["labels"][:, 1:] != IGNORE).sum()
        items = number.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = run.compared(model, batch, items, self.beta).divergence.sum() / items
        if not return_outputs:
            return loss
        del batch["labels"]
        return loss, model(**batch)


FRONTS: dict[str, type] = {
    "Distillation": OverDistillation,
    # a server has the teacher, and gives the log-probabilities of a few tokens; the loss reads the student's logits
    "ServerDistillation": OverDistillation,
    "GKD": OverGKD,
}


# -- classes ----------------------------------------------------------------------------------------------------------


def _of_library(name: str) -> Any:
    kind = name.removesuffix("Trainer").removesuffix("Config")
    home = f"trl.experimental.{EXPERIMENTAL[kind]}" if kind in EXPERIMENTAL else "trl"
    return getattr(import_module(home), name)


def config_of(name: str) -> Any:
    """Returns a config of TRL, such as SFTConfig, with our flags and TRL's defaults."""
    return arguments_of(_of_library(name), __name__)


def in_front_of(base: type) -> type:
    """Returns the class to put in front of a TRL trainer or its subclass."""
    kind = of_trl(base)[0]
    if kind in FRONTS:
        return FRONTS[kind]
    return OverOnline if kind in ONLINE else OverLogits if kind in OF_PADDING else OverTRL


@cache
def trainer_of(name: str) -> Any:
    """Returns a trainer of TRL, such as SFTTrainer, over a switched model."""
    made = switched(_of_library(name))
    return type(name, (made,), {"__module__": made.__module__, "__doc__": made.__doc__})


def __getattr__(name: str) -> Any:
    kinds = (*TRAINERS, *EXPERIMENTAL)
    for ending, make in (("Trainer", trainer_of), ("Config", config_of)):
        if name.endswith(ending) and name.removesuffix(ending) in kinds:
            return make(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
