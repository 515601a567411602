"""`PhaseProgressCallback`: where a long step is, phase by phase, on the main process."""

import sys
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_hotspa.report import PhaseEvent


class PhaseProgressCallback(TrainerCallback):
    """Shows one line for the mini-batch under way: the phase that runs, its packs and tokens, and how many are done.

    A bar in a terminal or a notebook, nothing in a pipe. It appears only in steps that take longer than `delay_s`.

    Args:
        delay_s: Seconds that a step may take before the line appears.
        disable: True for never, False for always; None: quiet in a pipe.
    """

    def __init__(self, delay_s: float = 2.0, disable: bool | None = None) -> None:
        self.delay_s, self.disable = delay_s, disable
        self._bar: Any = None

    def _is_quiet(self) -> bool:
        if self.disable is not None:
            return self.disable
        return not (sys.stderr.isatty() or "ipykernel" in sys.modules)

    def on_phase_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, phase: PhaseEvent, **kwargs: Any
    ) -> None:
        """Names the phase."""
        if not state.is_world_process_zero or self._is_quiet():
            return
        if phase.index == 0:
            self._close()  # of a mini-batch that was abandoned
            self._bar = tqdm(
                total=phase.num_phases, unit="phase", leave=False, delay=self.delay_s, position=1, dynamic_ncols=True
            )
        if self._bar is not None:
            self._bar.set_description_str(
                f"step {phase.step}: {phase.strategy}, {phase.num_packs} packs, {phase.num_tokens} tokens"
            )

    def on_phase_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, phase: PhaseEvent, **kwargs: Any
    ) -> None:
        """Counts the phase."""
        if self._bar is not None:
            self._bar.update(1)
            if phase.index + 1 == phase.num_phases:
                self._close()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the line away."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
