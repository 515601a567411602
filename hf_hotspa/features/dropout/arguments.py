"""The settings that follow from transformers' own flag for noise on embeddings."""

from dataclasses import dataclass
from typing import Any

from hf_hotspa.features.dropout.mode import Noise


@dataclass
class NoiseArguments:
    """Defines no flag: `neftune_noise_alpha` is one of transformers."""

    def feature_settings(self) -> Noise | None:
        run: Any = self
        return None if run.neftune_noise_alpha is None else Noise(run.neftune_noise_alpha)
