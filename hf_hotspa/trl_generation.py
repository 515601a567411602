"""TRL's trainers that generate what they train, GRPO and RLOO, over a `SwitchedModel`.

Owns what they need beside `OverTRL`: the current weights where completions are generated, by transformers on the model object or by
vLLM from a stream of the master store; one scoring pass for a whole generation batch, and none where the gradients by log-probabilities
are known; and the place in a generation batch of a run that resumes. Generation, rewards, advantages, losses and metrics are TRL's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.checkpoint.format.manifest import rank_columns
from hf_hotspa.checkpoint.rng import random_state, set_random_state
from hf_hotspa.checkpoint.tensors import saved_tensors
from hf_hotspa.errors import ResumeError
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.switched.model_object import Apart
from hf_hotspa.switched.stale_weights import guard, release, structure_only
from hf_hotspa.trainer.resuming import Resumption
from hf_hotspa.trainer.start import unless_stock
from hf_hotspa.trl import OverTRL, seeds_are_known
from hf_hotspa.typed import reading_state

_OF_BATCH = "generated."
"""Begins the names of the tensors of a generation batch in a checkpoint."""


class OverOnline(OverTRL):
    """In front of a trainer of TRL that generates: as `OverTRL`."""

    _hotspa_seeds: Tensor | None = None

    def __init__(self, *given: Any, **kwargs: Any) -> None:
        super().__init__(*given, **kwargs)
        if self._hotspa_refusal is None and self.use_vllm:
            self.vllm_generation._iter_named_params = lambda: streamed(self)

    def _hotspa_start(self, loader: Any = None) -> SwitchedModel:
        """As of every trainer; the random generators are as before, as TRL shuffles and samples by them."""
        if self._hotspa_model is not None:
            return super()._hotspa_start(loader)
        state = random_state()
        try:
            return super()._hotspa_start(loader)
        finally:
            set_random_state(state, "the start of the engine")

    def _hotspa_loader(self, loader: Any) -> Any:
        """Batches as long as those that will be generated; see `ExpectedLengths`."""
        return ExpectedLengths(self, super()._hotspa_loader(loader))

    # -- generation ---------------------------------------------------------------------------------------------------

    def _generate(self, prompts: Any) -> Any:
        """As TRL, with the current weights in the model object; for vLLM they are streamed when TRL asks. Collective."""
        if self._hotspa_refusal is not None:
            return super()._generate(prompts)
        looks = not self.use_vllm or getattr(self, "rollout_func", None) is not None
        with self._hotspa_weights(looks):
            return super()._generate(prompts)

    @contextmanager
    def _hotspa_weights(self, whole: bool) -> Iterator[None]:
        """Inside, calls of the model object are its own, as ranks generate different numbers of tokens."""
        switched = self.switched
        adapted = (
            switched.engine.description.adapters is not None
        )  # vLLM gets the base weights with the adapter in them
        if whole or adapted:
            switched.refresh()
        # the step may have begun: what it has scored are these weights
        was_guarded = any(hasattr(type(p), "_true_class") for p in self.model.parameters())
        if whole or adapted:
            release(self.model)
        Apart.depth += 1
        try:
            yield
        finally:
            Apart.depth -= 1
            if was_guarded:
                guard(self.model)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As TRL; what is only scored (old log-probabilities, a reference) is so in one pass: rows are packed, and each strategy's
        weights are loaded once for all of them."""
        if self._hotspa_refusal is None and not torch.is_grad_enabled():
            batch_size = None
        if self._hotspa_seeds is not None and batch_size is None:
            model = partial(model, expected_seeds=self._hotspa_seeds)
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
        )

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """As TRL, over what is trained at once where its gradients are known."""
        if self._hotspa_refusal is None and torch.is_grad_enabled() and self.switched.engine.updates is None:
            self._hotspa_seeds = first_seeds(self, inputs)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._hotspa_seeds = None

    # -- resuming -----------------------------------------------------------------------------------------------------

    @property
    def _hotspa_goes_on(self) -> bool:
        """Whether the next batch is one of those that were generated last."""
        return bool(self._step % (self.args.steps_per_generation * self.num_iterations))

    def hotspa_state(self) -> dict[str, Any]:
        """As of every trainer, with the place in a generation batch."""
        place = {"step": self._step, "ranks": self.args.world_size}
        if getattr(self, "use_adaptive_entropy", False):
            place |= {"entropy_coef": self.entropy_coef, "entropy": self._last_world_entropy}
        return super().hotspa_state() | {"generation": place}

    def _hotspa_rank_tensors(self) -> dict[str, Tensor]:
        """The generation batch of this rank, where it is not used up."""
        if not self._hotspa_goes_on:
            return {}
        return {
            f"{_OF_BATCH}{index}.{name}": value
            for index, batch in enumerate(self._buffered_inputs)
            for name, value in batch.items()
            if isinstance(value, Tensor)
        }

    def _hotspa_load(self, resumption: Resumption) -> None:
        """As of every trainer; and goes on in the generation batch.

        Raises:
            ResumeError: the batch was generated by another number of ranks.
        """
        super()._hotspa_load(resumption)
        place = resumption.state.get("hotspa", {}).get("generation")
        if place is None:  # of a checkpoint of another trainer: TRL generates anew
            return
        with reading_state("a generation batch", "completions are generated anew"):
            self._step, ranks = int(place["step"]), int(place["ranks"])
            if "entropy_coef" in place:
                self.entropy_coef, self._last_world_entropy = place["entropy_coef"], place["entropy"]
        if not self._hotspa_goes_on:
            return
        if ranks != self.args.world_size:
            raise ResumeError(
                f"the checkpoint is one of {ranks} ranks, and this run has {self.args.world_size}",
                where=str(resumption.path),
                why="it was written while a generation batch was trained, and each rank has its own part of that",
                fix=f"resume on {ranks} ranks, or from a checkpoint that is at the end of a generation batch",
            )
        name = rank_columns(self.args.process_index, ranks)
        saved = saved_tensors(resumption.path, resumption.manifest, name)
        self._buffered_inputs = [dict[str, Any]() for _ in range(self.args.steps_per_generation)]
        for key, value in saved.items():
            if key.startswith(_OF_BATCH):
                index, column = key.removeprefix(_OF_BATCH).split(".", 1)
                self._buffered_inputs[int(index)][column] = value.to(self.args.device)


unless_stock(OverOnline)


def first_seeds(trainer: Any, inputs: Any) -> Tensor | None:
    """The gradients of GRPO's loss by log-probabilities where these are those that have generated, so that every ratio is 1.

    Args:
        inputs: Of B rows with completions of up to C tokens, behind prompts of up to P.

    Returns:
        [B, P + C - 1], up to a factor that all ranks have in common: -advantage over what the loss of the row is divided by.
        None where they hang on the log-probabilities. The model compares them with those that come.
    """
    if not seeds_are_known(vars(trainer.args)) or inputs.get("old_per_token_logps") is not None:
        return None
    mask, advantages = inputs["completion_mask"], inputs["advantages"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    of_row = advantages[:, None] if advantages.dim() == 1 else advantages
    if trainer.loss_type in ("grpo", "sapo"):
        of_row = of_row / mask.sum(-1, keepdim=True).clamp(min=1)
    elif trainer.loss_type == "bnpo":
        of_row = of_row / mask.sum().clamp(min=1)
    return torch.nn.functional.pad(-of_row * mask, (inputs["prompt_ids"].shape[1] - 1, 0))


class ExpectedLengths:
    """A loader of batches as long as those to come, for `auto`: prompts as they are, completions from an eighth of the longest one
    to all of it, until the lengths that were generated ask for another plan.

    Args:
        trainer: Whose prompts they are.
        loader: Its train data loader.
    """

    def __init__(self, trainer: Any, loader: Any) -> None:
        self._trainer, self._loader = trainer, loader

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        number, most = count(), self._trainer.max_completion_length
        for batch in self._loader:
            prompts = [row["prompt"] for row in batch if "prompt" in row]  # an environment may own them
            ids = self._trainer._tokenize_prompts(prompts)[0] if prompts else [[0] for _ in batch]
            lengths = [len(of_row) + max(most * (1 + next(number) % 8) // 8, 1) for of_row in ids]
            mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
            yield {"input_ids": torch.zeros(mask.shape, dtype=torch.int64), "attention_mask": mask.long()}


# -- the weights for vLLM ---------------------------------------------------------------------------------------------


def streamed(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """What TRL's `_iter_named_params` yields: the current weights by name, in the dtypes of the model object. Collective.

    They come from the master store a layer at a time. A vLLM server gets them from rank 0, so that other ranks only send their
    shares; colocated ones take them on every rank. Of a model with an adapter each base weight has it merged in.
    """
    model, engine = trainer.model, trainer.switched.engine
    if engine.description.adapters is not None:
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
        for _ in weights:  # where vLLM has failed, the other ranks are still sending
            pass


def _merged(trainer: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
    """As TRL for a PEFT model, one layer at a time: base weights stay the bits that they are, which merging and unmerging would
    round."""
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
