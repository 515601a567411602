"""Packs in chunks of tokens (`+ck`, `+kg`, `+kh`). Its hooks; see `hf_hotspa.seam`."""

from typing import Any

from hf_hotspa.features.token_chunks.terms import TERMS
from hf_hotspa.seam import Runner

terms = TERMS


class Chunked(Runner):
    """Runs packs in chunks under strategies with `+ck`."""

    def packs(self, stage: Any, strategy: Any, pair_cost: float) -> Any:
        if not strategy.ck:
            return None
        from hf_hotspa.features.token_chunks.token_chunks import ChunkRunner

        return ChunkRunner(stage, strategy, pair_cost)


def runner(options: Any) -> Chunked:
    return Chunked()
