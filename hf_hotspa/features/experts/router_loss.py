"""The balance loss of mixture-of-experts routers, defined so that it does not depend on the packing.

transformers adds `router_aux_loss_coef * load_balancing_loss_func(...)` to the loss of each micro-batch when
`output_router_logits` is set. That function is a product of two means over the tokens of the micro-batch and of all layers,
so it is not additive over micro-batches. Here the family's own function is applied to each sequence and layer alone:

    aux = coefficient * sum over sequences s of (n_s / N) * mean over router layers l of f(logits of l for s)

with n_s the label tokens of the sequence and N the label tokens of the mini-batch: a mean over sequences, weighted like the
cross entropy. It sums over packs, replicas, buckets and pipeline stages, each of which adds its own routers' part. For one
sequence and one layer it equals the loss of transformers. (DeepSeek-V3 trains with a balance loss of each sequence, Liu et al.
2024, section 2.1.2.)

With token chunks (`+ck`) each chunk leaves its router logits, and the function always sees the logits of all chunks: the last
one adds its value, and each gets the gradient to its logits at that point, so the sum is exactly the gradient of the whole
sequence (`ChunkRouters`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_hotspa.data.collator import MicroBatch, is_idle
from hf_hotspa.features.experts.routers import balance_function, router_outputs
from hf_hotspa.model.replica import Attachment
from hf_hotspa.parallel.attention import ChunkPrefix
from hf_hotspa.parallel.loss import IGNORE
from hf_hotspa.switched.passes import rows_of
from hf_hotspa.switched.tape import Tape, Taping

RoutersOfChunks = dict[int, tuple[list[Tensor], int]]
"""What a sequence's chunks leave, by chunk: each router's logits [tokens, E], without a graph, and the number of label
tokens."""


class ChunkRouters:
    """The routers of a chunk of a sequence in one forward: stores each router's `logits` [tokens, E], and the chunk's number of
    labels. `loss_of`: the loss as a function of a router's logits [T, E] and the sequence's number of labels."""

    def __init__(
        self,
        owner: object,
        prefix: ChunkPrefix,
        logits: list[Tensor],
        num_labels: int,
        loss_of: Callable[[Tensor, int], Tensor],
    ) -> None:
        self.is_last, self._index = not prefix.continues, len(prefix.chunks)
        self._sequence: RoutersOfChunks = prefix.left_by(owner)
        self._sequence[self._index] = [own.detach() for own in logits], num_labels
        self._in_graph, self._loss_of = logits, loss_of
        prefix.more_roots.append(self.roots)

    @property
    def num_labels(self) -> int:
        """Label tokens of the sequence, in the chunks that have run."""
        return sum(num_labels for _, num_labels in self._sequence.values())

    def whole(self, router: int, own: Tensor) -> Tensor:
        """The sequence's logits [T, E], with `own` for this chunk."""
        parts = {**{i: logits[router] for i, (logits, _) in self._sequence.items()}, self._index: own}
        return torch.cat([parts[i] for i in sorted(parts)])

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """This chunk's logits in the graph, with the loss's gradients to them, once all chunks have run. Empty for the last
        chunk, whose loss includes them."""
        if self.is_last or not self.num_labels:
            return []
        roots = []
        for router, logits in enumerate(self._in_graph):
            if logits.requires_grad:
                with torch.enable_grad():
                    own = logits.detach().requires_grad_()
                    (gradient,) = torch.autograd.grad(self._loss_of(self.whole(router, own), self.num_labels), own)
                roots.append((logits, gradient))
        return roots


class RouterLoss(Attachment):
    """The balance loss of the routers of this rank's layers. `num_layers`: the routers of the whole model. `writes`:
    whether this rank writes sums into tapes: one of the ranks with the same tokens does.

    Attributes:
        num_experts, top_k: E, how many experts a router has, and K, how many it chooses.
        num_sums: K * E + E: how often each expert was the first, second, ... choice of a document's tokens, and the
            sums of its probabilities, over the routers here.
        num_seeds: E: of the probabilities of a document's tokens.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int, writes: bool) -> None:
        recorder = router_outputs(model)
        self._function = balance_function(model)
        self.num_layers = num_layers
        self.coefficient = float(model.router_aux_loss_coef)  # the factor on the balance loss
        self.num_experts, self.top_k = int(model.num_experts), int(model.num_experts_per_tok)
        self.num_sums, self.num_seeds = self.num_experts * (self.top_k + 1), self.num_experts
        self._writes, self._taping = writes, Taping()
        routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
        self._logits: list[list[Tensor]] = [[] for _ in routers]
        for index, router in enumerate(routers):
            router.register_forward_hook(partial(self._record, index, recorder.index))
        self.bind()

    def bind(self) -> None:
        self.value = torch.zeros((), dtype=torch.float64)  # fp64 scalar, the sum since then

    def begin(self, *of_pack: object) -> None:
        """Begins a forward: drops what a recomputation may have recorded."""
        for logits in self._logits:
            logits.clear()

    def _record(self, index: int, output: int, module: nn.Module, args: object, out: Any) -> None:
        logits = out[output] if isinstance(out, tuple | list) else out
        self._logits[index].append(logits.reshape(-1, logits.shape[-1]))

    def tape(self, taping: Taping) -> None:
        """Lets a tape replace the loss while there is one."""
        self._taping = taping

    def _take(self) -> list[Tensor]:
        """The logits [t, E] of each router here in the last forward, which are let go; empty if this rank has no router."""
        recorded = [torch.cat(logits) for logits in self._logits]
        self.begin()
        return recorded

    def loss(
        self,
        pack: MicroBatch,
        scale: float,
        tokens: Callable[[Tensor], Tensor],
        is_counted: bool,
        prefix: ChunkPrefix | None,
    ) -> Tensor | None:
        """See `Attachment`. None if this rank has no router, and for a chunk that is not the last of its sequence."""
        if self._taping.tape is not None:
            return self._on_tape(self._taping.tape, pack, tokens, is_counted)
        if not self._logits:
            return None
        labels, lengths = pack.labels[0], list(pack.lengths)
        counts = [int((own != IGNORE).sum()) for own in labels.split(lengths)]
        of_routers = [tokens(logits).split(lengths) for logits in self._take()]
        loss_of = partial(self._loss_of, scale)
        if prefix is not None:
            chunk = ChunkRouters(self, prefix, [own[0] for own in of_routers], counts[0], loss_of)
            if not chunk.is_last:
                return None
            of_routers = [(chunk.whole(router, own), *others) for router, (own, *others) in enumerate(of_routers)]
            counts[0] = chunk.num_labels
        total = torch.zeros((), dtype=torch.float64, device=labels.device)
        for of_sequences in of_routers:
            for own, count in zip(of_sequences, counts, strict=True):
                if count:
                    total = total + loss_of(own, count)
        if not is_counted:
            total = total - total.detach()
        self.value = self.value.to(total.device) + total.detach()
        return total

    def _loss_of(self, scale: float, logits: Tensor, num_labels: int) -> Tensor:
        """A sequence's part of the loss, from the logits [T, E] of one router."""
        loss = self._function((logits,), self.num_experts, self.top_k)
        return loss.double() * (num_labels * scale * self.coefficient / self.num_layers)

    def of_sums(self, sums: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """transformers' `load_balancing_loss_func`, and its gradient by probability [E].

        E * sum over experts of (share of choices) * (mean probability); only the second has a gradient.
        """
        places, table = max(num_tokens * self.num_layers, 1), sums.view(self.top_k + 1, self.num_experts)
        of_each = table[:-1].sum(0) / places * self.num_experts
        return (of_each * table[-1] / places).sum(), of_each / places

    def _on_tape(
        self, tape: Tape, pack: MicroBatch, tokens: Callable[[Tensor], Tensor], is_counted: bool
    ) -> Tensor | None:
        """Writes router choices, and has the gradient of their seeds; its value is 0."""
        recorded = self._take()
        wanted = tape.auxiliary is not None or tape.auxiliary_upstream is not None
        if not recorded or not wanted or is_idle(pack):
            return None
        rows, _ = rows_of(pack)
        keep, total = rows >= 0, torch.zeros((), dtype=torch.float64, device=rows.device)
        for logits in recorded:
            p = tokens(logits).softmax(-1)[: len(rows)]
            if tape.auxiliary is not None and self._writes and is_counted:
                chosen = nn.functional.one_hot(p.topk(self.top_k, -1).indices, self.num_experts).flatten(1)
                both = torch.cat([chosen.double(), p.detach().double()], 1)
                tape.auxiliary.index_add_(0, rows[keep], both[keep])
            if tape.auxiliary_upstream is not None:
                seeds = tape.auxiliary_upstream[rows.clamp(min=0)] * keep[:, None]
                total = total + (seeds * p).sum(dtype=torch.float64)
        return total - total.detach() if tape.auxiliary_upstream is not None else None
