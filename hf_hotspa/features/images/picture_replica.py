"""Pictures on one replica: where their features, positions and blocks enter."""

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.errors import ModelError
from hf_hotspa.features.images.pictures import BOTH_WAYS_IN_WINDOWS, ONE_WAY, Picture, Wire
from hf_hotspa.model.pass_through import PassThrough
from hf_hotspa.model.replica import Attachment, Replica
from hf_hotspa.parallel.attention import AttentionCall, PackedSequences, attend
from hf_hotspa.switched.tape import Taping, pieces

Out: TypeAlias = Tensor | tuple[Tensor, ...]
"""What a decoder layer returns."""


@dataclass
class _Here:
    """The image tokens of this rank's part of a pack."""

    index: Tensor  # int64, their places in the hidden state
    parts: list[tuple[Picture, Tensor]]  # pictures, and which of their tokens
    kept: Tensor | None = None  # which of all these have their hidden state on this rank (`+sp`)

    def features(self, table: int, like: Tensor) -> Tensor:
        """[tokens, h]"""
        of_pictures = []
        for picture, tokens in self.parts:
            assert picture.features is not None
            of_pictures.append(picture.features[table].to(like.device)[tokens.to(like.device)])
        whole = torch.cat(of_pictures)
        return (whole if self.kept is None else whole[self.kept.to(like.device)]).to(like.dtype)


class PictureReplica(Attachment):
    """See above. Behind the embedding the first table of features replaces rows; behind layer i table i + 1 is added to them. A
    layer that runs again (`+rc`) finds the features with its pack."""

    def __init__(self, replica: Replica, wire: Wire, base: str, trained: bool) -> None:
        self._replica, self._taping, self._trained = replica, Taping(), trained
        self._here: _Here | None = None
        self._packed: MicroBatch | None = None
        coord = replica.mesh.coord
        self._counts = replica.is_first and not coord.tp and not coord.cp  # once for each replica
        # by row: one that is cut begins twice. Of the forwards since `bind`, and of packs whose graphs a scoring pass has kept
        self._patches = dict[int, int]()
        self._kept = dict[tuple[object, ...], dict[int, int]]()
        if replica.is_first:
            replica.model.get_input_embeddings().register_forward_hook(self._replace)
        for index, layer in enumerate(replica.layers[: wire.tables - 1]):
            if not isinstance(layer, PassThrough):
                layer.register_forward_hook(partial(self._add, index + 1), with_kwargs=True)
        if wire.has_positions:
            replica.model.get_submodule(base).register_forward_pre_hook(self._give_positions, with_kwargs=True)
        if replica.context is not None:
            self._let_attend, replica.context.let_attend = replica.context.let_attend, self.let_attend

    def tape(self, taping: Taping) -> None:
        self._taping = taping

    def _picture(self, document: int) -> Picture | None:
        tape = self._taping.tape
        picture = tape.beside.get(document) if tape is not None else None
        assert picture is None or isinstance(picture, Picture)
        return picture

    def begin(self, pack: PackedSequences, micro_batch: MicroBatch, whole: MicroBatch) -> None:
        index, parts = list[Tensor](), list[tuple[Picture, Tensor]]()
        self._packed, self._here, pack.beside = micro_batch, None, None
        if self._counts:
            self._count(whole)
        for document, positions, place in pieces(micro_batch):
            picture = self._picture(document)
            if picture is None:
                continue
            inside = (picture.places >= positions.start) & (picture.places < positions.stop)
            if picture.features is not None and bool(inside.any()):
                index.append(picture.places[inside] - positions.start + place.start)
                parts.append((picture, inside))
        if index:
            here, group = _Here(torch.cat(index), parts), self._replica.tokens.group
            if group is not None:
                share = micro_batch.num_tokens // dist.get_world_size(group)
                first = dist.get_rank(group) * share
                here.kept = (here.index >= first) & (here.index < first + share)
                here.index = here.index[here.kept] - first
            here.index = here.index.to(self._replica.device)
            self._here = pack.beside = here if len(here.index) else None
        if pack.divided is None:
            self._attend_in_blocks(pack, micro_batch)

    def _count(self, whole: MicroBatch) -> None:
        begun = [document for document, positions, _ in pieces(whole) if not positions.start]
        patches = {document: picture.patches for document in begun if (picture := self._picture(document)) is not None}
        if self._replica.head.keeps_graphs:
            self._kept[whole.keys, whole.lengths] = patches
        else:
            self._patches |= patches

    def bind(self) -> None:
        kept = self._replica.head.kept
        self._patches, self._kept = {}, {pack: patches for pack, patches in self._kept.items() if pack in kept}

    def measures(self) -> dict[str, float]:
        """With the packs that began behind kept layers."""
        kept = self._replica.head.kept
        for pack, patches in self._kept.items():
            if pack not in kept:
                self._patches |= patches
        self._kept.clear()
        return {"image_patches": float(sum(self._patches.values()))}

    def let_attend(self, pack: PackedSequences, whole: MicroBatch, place: int) -> None:
        """See `ContextParallel.let_attend`."""
        if self._let_attend is not None:
            self._let_attend(pack, whole, place)
        self._attend_in_blocks(pack, whole)

    def _attend_in_blocks(self, pack: PackedSequences, micro_batch: MicroBatch) -> None:
        blocks, ways = dict[int, Tensor](), ONE_WAY
        for index, (document, _) in enumerate(micro_batch.keys):
            picture = self._picture(document)
            if picture is not None and picture.ways != ONE_WAY:
                ways = picture.ways  # of the family
                of_row = torch.full((pack.lengths[index],), -1)
                of_row[picture.places] = picture.blocks()
                blocks[index] = of_row.to(self._replica.device)
        if blocks:
            pack.divided = partial(attend_in_blocks, blocks, ways == BOTH_WAYS_IN_WINDOWS)

    # -- hooks of modules ---------------------------------------------------------------------------------------------

    def _replace(self, module: nn.Module, inputs: object, out: Tensor) -> Tensor:
        here = self._here
        if here is not None:
            return out.index_copy(1, here.index, here.features(0, out)[None])
        if self._trained and torch.is_grad_enabled() and not out.requires_grad:
            return out.detach().requires_grad_()  # every backward goes through all layers, with images or without
        return out

    def _add(self, table: int, module: nn.Module, inputs: object, named: dict[str, Any], out: Out) -> Out:
        here = named["hotspa_pack"].beside
        if not isinstance(here, _Here):
            return out
        hidden = out[0] if isinstance(out, tuple) else out
        hidden = hidden.index_add(1, here.index, here.features(table, hidden)[None])
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    def _give_positions(
        self, module: nn.Module, inputs: object, named: dict[str, Any]
    ) -> tuple[object, dict[str, Any]]:
        """3-D positions [3, 1, t]."""
        micro_batch = self._packed
        assert micro_batch is not None
        positions = named["position_ids"].expand(3, 1, -1)
        for document, own, place in pieces(micro_batch):
            picture = self._picture(document)
            if picture is not None and picture.positions is not None:
                if not positions.is_contiguous():
                    positions = positions.clone()
                positions[:, 0, place] = picture.positions[:, own].to(positions.device)
        return inputs, named | {"position_ids": positions}


def attend_in_blocks(
    blocks: dict[int, Tensor],
    in_windows: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    pack: PackedSequences,
) -> Tensor:
    """[1, T, H, D] of whole sequences; in those with `blocks` [length], tokens of one block attend in both directions, -1 for
    causal tokens. `in_windows`: in layers with a window only."""
    if pack.prefix is not None or not call.is_plain:
        raise ModelError(
            f"{type(module).__name__} attends in both directions by other than plain scores of whole sequences, which is not supported"
        )
    outs, is_causal = [], in_windows and call.sliding_window is None
    rows = query.split(pack.lengths, 2), key.split(pack.lengths, 2), value.split(pack.lengths, 2)
    for index, (q, k, v) in enumerate(zip(*rows, strict=True)):
        if index not in blocks or is_causal:
            ends = torch.tensor([0, q.shape[2]], dtype=torch.int32, device=q.device)
            outs.append(attend(module, q, k, v, call, PackedSequences((q.shape[2],), ends)))
            continue
        allowed = mask_of_blocks(blocks[index], call.sliding_window)
        grouped = q.shape[1] != k.shape[1]
        out = functional.scaled_dot_product_attention(q, k, v, allowed, scale=call.scaling, enable_gqa=grouped)
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, 1)


def mask_of_blocks(blocks: Tensor, window: int | None) -> Tensor:
    """bool [L, L]: whether a query (row) attends to a key, for block numbers [L], -1 outside of blocks. A window looks back
    only."""
    at = torch.arange(len(blocks), device=blocks.device)
    distance = at[:, None] - at[None]
    allowed = (distance >= 0) | ((blocks[:, None] == blocks[None]) & (blocks[:, None] >= 0))
    return allowed if window is None else allowed & (distance < window)
