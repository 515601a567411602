"""Packs in chunks of tokens (`+ck`, `+kg`, `+kh`). Its hooks; see `hf_hotspa.seam`."""

from typing import TYPE_CHECKING

from hf_hotspa.features.token_chunks.terms import TERMS
from hf_hotspa.seam import Runner
from hf_hotspa.strategy import Strategy

if TYPE_CHECKING:
    from hf_hotspa.features.token_chunks.token_chunks import ChunkRunner
    from hf_hotspa.parallel.pipeline import Stage

terms = TERMS


class Chunked(Runner):
    """Runs packs in chunks under strategies with `+ck`."""

    def packs(self, stage: "Stage", strategy: Strategy, pair_cost: float) -> "ChunkRunner | None":
        if not strategy.ck:
            return None
        from hf_hotspa.features.token_chunks.token_chunks import ChunkRunner

        return ChunkRunner(stage, strategy, pair_cost)


def runner(options: object) -> Chunked:
    return Chunked()
