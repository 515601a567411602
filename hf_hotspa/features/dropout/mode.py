"""Noise on embeddings in a run, and which strategies it allows."""

from dataclasses import dataclass

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.seam import Options
from hf_hotspa.strategy import Strategy


@dataclass(frozen=True)
class Noise(Options):
    """NEFTune's noise on embeddings in training (`dropout.EmbeddingNoise`), of magnitude `alpha`."""

    alpha: float

    def check_strategy(self, strategy: Strategy, shape: ModelShape, schedule: str) -> None:
        if strategy.sp:
            raise UnsupportedError(
                f"noise on embeddings (neftune_noise_alpha) under {strategy}",
                why="each rank embeds the tokens of all and keeps its share; the noise is drawn for whole sequences",
                fix="leave +sp out, or neftune_noise_alpha",
            )
