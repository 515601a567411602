"""TRL's trainers that generate what they train, GRPO and RLOO, over a `SwitchedModel`.

Owns what they need beside `OverTRL`: the current weights where completions are generated, by transformers on the model object or by
vLLM from a stream of the master store; a step's gradients that are known before it is scored; and the place in a generation batch.
Generation, rewards, advantages, losses and metrics are TRL's.
"""

import copy
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_hotspa.checkpoint.format.manifest import rank_columns
from hf_hotspa.checkpoint.rng import random_state, set_random_state
from hf_hotspa.checkpoint.tensors import saved_tensors
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.switched.model_object import Apart, lora_layers
from hf_hotspa.switched.stale_weights import guard, release
from hf_hotspa.trainer.start import unless_stock
from hf_hotspa.trl import OverTRL
from hf_hotspa.typed import reading_state

_OF_BATCH = "generated."
"""Begins the names of the tensors of a generation batch in a checkpoint."""


class OverOnline(OverTRL):
    """In front of a trainer of TRL that generates: as `OverTRL`."""

    _hotspa_weights_of_vllm = False

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

    # -- generation ---------------------------------------------------------------------------------------------------

    def _generate(self, prompts: Any) -> Any:
        """As TRL, with the current weights in the model object; for vLLM they are streamed when TRL asks. Collective."""
        if self._hotspa_refusal is not None:
            return super()._generate(prompts)
        with self._hotspa_weights(whole=not self.use_vllm or getattr(self, "rollout_func", None) is not None):
            return super()._generate(prompts)

    @contextmanager
    def _hotspa_weights(self, whole: bool) -> Iterator[None]:
        """Inside, calls of the model object are its own, as ranks generate different numbers of tokens."""
        if whole:
            self.switched.refresh()
        # the step may have begun: what it has scored are these weights
        was_guarded = any(hasattr(type(p), "_true_class") for p in self.model.parameters())
        if whole:
            release(self.model)
        Apart.depth += 1
        try:
            yield
        finally:
            Apart.depth -= 1
            if whole and was_guarded:
                guard(self.model)


unless_stock(OverOnline)
