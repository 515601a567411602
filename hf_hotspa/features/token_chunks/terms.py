"""The memory of token chunks (`+ck`, `token_chunks`): keys and values that chunks keep for each other.

Each layer whose attention compares pairs of tokens keeps keys and values of the chunks before the last one in the
compute dtype, and sums of their gradients in at least fp32. The chunk in the graph has a second copy of these keys and values, joined to its own. Everything else
exists for one chunk. `+kg` adds the graphs of more chunks. `+kh` keeps stored keys and values in host memory, except of
the current and next layer.
"""

import math

from hf_hotspa.costs.memory import MemoryStage
from hf_hotspa.costs.terms import Bytes, MemoryTerm, Packs, Terms


def _kept_for_chunks(stage: MemoryStage) -> Bytes | None:
    strategy, shape, width = stage.strategy, stage.shape, stage.width
    if not strategy.ck:
        return None
    heads = max(1, -(-shape.num_key_value_heads // strategy.tp))
    pair = 2 * heads * shape.attention_size / shape.num_attention_heads / strategy.cp  # a key and its value
    all_layers = pair * math.ceil(stage.own.num_layers * shape.pair_layers)

    def kept(packs: Packs) -> float:
        before = max(0, packs.longest - strategy.ck)
        if strategy.kh:  # of the current layer: fetched, joined, and the gradients of both; of the next layer: fetched
            return 5 * pair * width * before
        chunks = -(-packs.longest // strategy.ck)
        # each graph has all keys and values that its chunk attends to
        joined = (chunks + 1) / 2 if strategy.pp > 1 else min(1 + strategy.kg, chunks)
        return all_layers * (width * (1 + joined) + max(4, width)) * before

    return kept


TERMS = Terms(memory=(MemoryTerm("keys and values of earlier chunks", "activations", _kept_for_chunks),))
