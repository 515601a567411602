"""NEFTune's noise on embeddings, the same whatever the layout.

Owns the definition of the noise for packed rows (Jain et al., 2023, "NEFTune: Noisy Embeddings Improve Instruction
Finetuning"): each *sequence* of L tokens and hidden size H gets uniform noise of magnitude `alpha / sqrt(L * H)`, as
transformers adds it to an unpadded batch of that one sequence. The numbers are drawn from (seed, mini-batch, dataset
row, first token), so every tensor-parallel rank draws the same ones, and so does any other strategy or pack.
"""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from hf_hotspa.data.collator import MicroBatch


class EmbeddingNoise:
    """A forward hook for the embedding module; does nothing in eval mode.

    Args:
        alpha: `neftune_noise_alpha`.

    Attributes:
        step: The number of the mini-batch, to be set before its first forward.
        micro_batch: The pack that is embedded next, to be set before each forward.
    """

    def __init__(self, alpha: float, seed: int) -> None:
        self._alpha, self._seed = alpha, seed
        self.step = 0
        self.micro_batch: MicroBatch | None = None

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        """[1, T, H] with the noise of each sequence of the pack added; None, the output as it is, in eval mode."""
        if not module.training:
            return None
        assert self.micro_batch is not None
        return out + self.draw(self.micro_batch, out)

    def draw(self, micro_batch: MicroBatch, like: Tensor) -> Tensor:
        """The noise of a pack, [1, T, H] in the dtype and on the device of `like`; drawn in fp32."""
        noise = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        generator = torch.Generator(device=like.device)
        cuts = micro_batch.cuts or [(0, length) for length in micro_batch.lengths]
        keys = micro_batch.keys or ((-1, 0),) * len(micro_batch.lengths)  # padding alone
        begin = 0
        for length, key, (before, whole) in zip(micro_batch.lengths, keys, cuts, strict=True):
            generator.manual_seed(self._seed_of(key))
            magnitude = self._alpha / math.sqrt(whole * like.shape[-1])
            place = noise[:, begin : begin + length]
            if length == whole:
                place.uniform_(-magnitude, magnitude, generator=generator)
            else:  # the numbers of a part are those that the whole sequence has there
                drawn = noise.new_empty((1, whole, like.shape[-1]))
                drawn.uniform_(-magnitude, magnitude, generator=generator)
                place.copy_(drawn[:, before : before + length])
            begin += length
        return noise.to(like.dtype)

    def _seed_of(self, key: tuple[int, int]) -> int:
        text = f"{self._seed} {self.step} {key[0]} {key[1]}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
