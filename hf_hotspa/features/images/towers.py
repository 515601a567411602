"""The towers of a multimodal model: its encoders of images and their projectors, run on the rank that has read a row.

The class's own inner forward runs on the model object, without its language model: the embedding returns NaN, and what the
language model would get is recorded. Rows of the recorded embeddings that are not NaN are features of images; positions, masks and
what enters behind later layers are recorded beside them. Nothing here is written for a family, and a family that does anything
else between its towers and its language model raises an error that names it.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_hotspa.errors import DataError, HotspaError, UnsupportedError
from hf_hotspa.features.images.picture_replica import mask_of_blocks
from hf_hotspa.features.images.pictures import (
    BOTH_WAYS,
    BOTH_WAYS_IN_WINDOWS,
    ONE_WAY,
    Encoded,
    Picture,
    Wire,
    backward,
)
from hf_hotspa.features.images.terms import GRAPH_BYTES
from hf_hotspa.model.model_kind import held_rates, other_half, text_base
from hf_hotspa.packing.bucketing import MiniBatchPlan
from hf_hotspa.parallel.attention import ATTENTION
from hf_hotspa.parallel.wrapped_model import bare_model
from hf_hotspa.switched.passes import Document, Documents, Exchange, Passes

_OF_TEXT = frozenset(
    [
        "self",
        "input_ids",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "inputs_embeds",
        "use_cache",
        "cache_position",
        "labels",
        "logits_to_keep",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "kwargs",
        "args",
        "mm_encoder_outputs",
        "image_hidden_states",
        "vision_feature_layer",
        "vision_feature_select_strategy",
    ]
)
"""Arguments of an inner forward that are not of images."""
_TYPES = frozenset(("token_type_ids", "mm_token_type_ids"))
_OTHERS = "video", "audio", "feature"
"""Parts of names of arguments of other kinds, which raise an error."""
_OF_LANGUAGE = frozenset(
    ("inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks", "deepstack_visual_embeds", "cache_position")
)
"""The tensors that a language model may get."""


@dataclass(frozen=True)
class Towers:
    """See above, and `switched.passes.SideInputs`: plain data, the same on all ranks."""

    around: str  # the module around towers and language model
    language: str  # the language model, inside it
    names: frozenset[str]
    wire: Wire
    trained: bool  # whether some of their parameters were, at the start
    in_blocks: bool  # see `SideInputs`: whether the family masks attention by types of tokens
    _known: dict[frozenset[str], int] = field(default_factory=dict, compare=False, repr=False)
    """How images attend (`Picture.ways`), by the names of what a batch has."""
    _kept: "WeakSet[Encoded]" = field(default_factory=WeakSet, compare=False, repr=False)

    def comes_with(self, fields: Collection[str]) -> bool:
        """See `SideInputs.comes_with`."""
        return any("pixel" in name or "image" in name for name in fields)

    # -- reading ------------------------------------------------------------------------------------------------------

    def counted(self, given: Mapping[str, Any], documents: list[Document]) -> list[Document]:
        """See `SideInputs.counted`."""
        if not _has_pixels(given):
            return documents
        rows = [document.row for document in documents]
        if len(set(rows)) < len(rows) or given.get("position_ids") is not None:
            raise UnsupportedError(
                "rows with images that were packed before, or have position_ids",
                why="images belong to rows, and positions behind an image depend on its size",
                fix="give one document a row, padded, without position_ids",
            )
        for name in _TYPES & self.names:
            types = given.get(name)
            if isinstance(types, Tensor) and not torch.equal(types == 1, given["input_ids"] == self.wire.image_id):
                raise UnsupportedError(
                    f"{name} that are not 1 exactly at the tokens of images", fix="give what the processor returns"
                )
        counted = [replace(one, side=int((one.ids == self.wire.image_id).sum())) for one in documents]
        if not any(document.side for document in counted):
            raise DataError(
                f"a batch with pixels and without the image token {self.wire.image_id}",
                fix="give rows and pixels of the same call of the processor, and cut no row",
            )
        return counted

    def make(
        self, passes: Passes, model: nn.Module, given: Mapping[str, Any], documents: Sequence[Document], trains: bool
    ) -> list[Picture | None]:
        """See `SideInputs.make`."""
        assert isinstance(model, PreTrainedModel)
        self._check(passes, model, given, trains)
        if not any(document.side for document in documents):
            return [None] * len(documents)
        trained = trains and self.trained
        of_images = {name: given[name] for name in self.names if given.get(name) is not None}
        key, saved = frozenset(of_images), SavedBytes()
        keeps = trained and sum(encoded.num_bytes for encoded in self._kept) < GRAPH_BYTES
        try:
            with torch.set_grad_enabled(keeps), saved if keeps else nullcontext():
                seen = self._run(passes, model, given, of_images, with_masks=key not in self._known)
        except HotspaError:
            raise
        except Exception as failure:  # whatever the family's code raises
            raise DataError(
                f"the images of a batch cannot be encoded: {type(failure).__name__}: {failure}",
                fix="give rows and pixels of the same call of the processor, and cut no row",
            ) from failure
        ways = self._known.get(key)
        if ways is None and (ways := seen.ways(model, documents)) is not None:
            self._known[key] = ways
        if ways:
            self._refuse_cuts(passes, model)
        pictures = seen.pictures(documents, ways or ONE_WAY, self.trained)
        _share_patches(_patches(model, given), pictures)
        if trained:
            again = partial(self._again, passes, model, dict(given), of_images, documents)
            encoded = Encoded(again, seen.live(documents) if keeps else None, saved.total)
            self._kept.add(encoded)
            for picture in filter(None, pictures):
                picture.encoded = encoded
        return pictures

    def _again(
        self,
        passes: Passes,
        model: PreTrainedModel,
        given: Mapping[str, Any],
        of_images: dict[str, Any],
        documents: Sequence[Document],
    ) -> list[Tensor]:
        return self._run(passes, model, given, of_images, with_masks=False).live(documents)

    def _check(self, passes: Passes, model: PreTrainedModel, given: Mapping[str, Any], trains: bool) -> None:
        name = type(model).__name__
        if given.get("against") is not None:
            raise UnsupportedError("rows with images that are compared with a teacher", fix="compare rows of text")
        if trains and passes.engine.updates is not None:
            raise UnsupportedError(
                "rows with images, where stages update after every pack", fix="use hotspa_pipeline_mode=synchronous"
            )
        half = other_half(model)
        if any(p.dtype.itemsize == 1 or "4bit" in type(p).__name__ for p in half.values()):
            raise UnsupportedError(f"the towers of {name} are quantized", fix="leave them as they are (skip_modules)")
        around = model.get_submodule(self.around)
        for path, module in around.named_modules():
            rate = 0.0 if f"{path}.".startswith(f"{self.language}.") else max(held_rates(module).values(), default=0.0)
            if trains and rate > 0.0:
                raise UnsupportedError(
                    f"{path} of {name} has a probability of {rate} for zeros",
                    why="each rank would draw other numbers than the stock Trainer",
                    fix="set it to 0",
                )

    def _refuse_cuts(self, passes: Passes, model: PreTrainedModel) -> None:
        """Raises an error for strategies that cut image blocks."""
        engine = passes.engine
        options = engine.options.run_options(engine.device.type)
        for strategy in (bucket.strategy for bucket in engine.buckets):
            if not options.keeps_sequences(strategy, engine.description.shape):
                raise UnsupportedError(
                    f"rows with images of {type(model).__name__} under {strategy}",
                    why="the tokens of an image attend to each other in both directions, and the strategy cuts sequences",
                    fix="do not compute sequences in chunks, and use context_parallel='ulysses' (hotspa_context_parallel)",
                )

    # -- running ------------------------------------------------------------------------------------------------------

    def _run(
        self,
        passes: Passes,
        model: PreTrainedModel,
        given: Mapping[str, Any],
        of_images: dict[str, Any],
        with_masks: bool,
    ) -> "Recorded":
        device, dtype = passes.engine.device, passes.engine.description.compute_dtype
        around = model.get_submodule(self.around)
        for module in (m for name, m in around.named_modules() if name.partition(".")[0] != self.language):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
        own = next(iter(other_half(model).values())).dtype
        batch = {"input_ids": given["input_ids"], "attention_mask": given.get("attention_mask")} | of_images
        batch = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in batch.items()}
        with (
            _recording(model, around, self.language, "sdpa" if with_masks else ATTENTION) as got,
            torch.autocast(device.type, dtype=dtype, enabled=own != dtype and dtype.itemsize == 2),
        ):
            around(**batch, use_cache=False)
        return Recorded(got, batch["input_ids"], self.wire)

    # -- in steps -----------------------------------------------------------------------------------------------------

    def fetch(self, documents: Documents, exchange: Exchange) -> None:
        """See `SideInputs.fetch`."""
        self.wire.fetch(documents, exchange, requires_grad=self.trained)

    def collect(self, documents: Documents, plan: MiniBatchPlan, exchange: Exchange) -> None:
        """See `SideInputs.collect`."""
        if self.trained:
            self.wire.collect(documents, plan, exchange)

    def scale(self, documents: Documents, factor: float) -> None:
        """See `SideInputs.scale`."""
        for picture in documents.beside.values():
            if picture is not None and picture.gradient is not None:
                picture.gradient = picture.gradient * factor

    def flush(self, documents: Documents) -> None:
        """See `SideInputs.flush`."""
        pictures = [documents.beside[number] for number in sorted(documents.beside)]
        backward([picture for picture in pictures if picture is not None])


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Inside, counts the bytes that autograd saves, each storage once.

    Attributes:
        total: These.
    """

    def __init__(self) -> None:
        self.total, self._counted = 0, set[int]()
        super().__init__(self._count, lambda tensor: tensor)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not tensor.is_leaf or not tensor.requires_grad:  # parameters exist anyway
            self.total += storage.nbytes() * (storage.data_ptr() not in self._counted)
            self._counted.add(storage.data_ptr())
        return tensor


def _has_pixels(given: Mapping[str, object]) -> bool:
    return any("pixel" in name and isinstance(value, Tensor) and value.numel() for name, value in given.items())


def _patches(model: PreTrainedModel, given: Mapping[str, Any]) -> int:
    """Of a batch's images, with their padding; pixels are tables of patches, or [..., channels, height, width]."""
    pixels = given.get("pixel_values")
    edge = getattr(getattr(model.config, "vision_config", None), "patch_size", None)
    height, width = edge if isinstance(edge, list | tuple) else (edge, edge)
    if not isinstance(pixels, Tensor) or not pixels.numel():
        return 0
    if pixels.dim() < 4:
        return pixels.numel() // pixels.shape[-1]
    return pixels.shape[:-3].numel() * (pixels.shape[-2] // height) * (pixels.shape[-1] // width) if height else 0


def _share_patches(patches: int, pictures: Sequence[Picture | None]) -> None:
    """Divides the patches of a batch among its rows, by their image tokens."""
    there = [picture for picture in pictures if picture is not None]
    ends = list(accumulate(len(picture.places) for picture in there))
    for picture, end in zip(there, ends, strict=True):
        begin = end - len(picture.places)
        picture.patches = patches * end // ends[-1] - patches * begin // ends[-1]


@contextmanager
def _recording(model: PreTrainedModel, around: nn.Module, language: str, attention: str) -> Iterator[dict[str, Any]]:
    """Inside, the embedding returns NaN and the language model what it gets, which is recorded. `attention`: whose masks are
    made; none of the packed one. What a forward leaves on the module is taken back."""
    embedding, inner, got = model.get_input_embeddings(), around.get_submodule(language), dict[str, Any]()
    text, left = model.config.get_text_config(), {n: v for n, v in vars(around).items() if not n.startswith("_")}
    own, dtype, width = text._attn_implementation, embedding.weight.dtype, text.hidden_size

    def embed(ids: Tensor) -> Tensor:
        return torch.full((*ids.shape, width), float("nan"), dtype=dtype, device=ids.device)

    def record(**named: object) -> BaseModelOutputWithPast:
        got.update(named)
        return _Nothing(last_hidden_state=got["inputs_embeds"])

    modules = {embedding: embed, inner: record}
    before = {module: vars(module).get("forward") for module in modules}
    try:
        text._attn_implementation = attention
        for module, forward in modules.items():
            vars(module)["forward"] = forward
        yield got
    finally:
        text._attn_implementation = own
        for module, forward in before.items():
            del vars(module)["forward"]
            vars(module).update({} if forward is None else {"forward": forward})
        vars(around).update(left)


class _Nothing(BaseModelOutputWithPast):
    """A language model's output, whatever the module around it reads of it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class Recorded:
    """What a language model would get for a batch [B, L]. Raises `UnsupportedError`: it gets something unknown."""

    def __init__(self, got: Mapping[str, Any], input_ids: Tensor, wire: Wire) -> None:
        self._ids, self._wire = input_ids, wire
        self._embeds, self._masks = got["inputs_embeds"], got.get("attention_mask")
        self._positions = got.get("position_ids")
        unknown = [name for name, value in got.items() if _has_tensors(value) and name not in _OF_LANGUAGE]
        deep = got.get("deepstack_visual_embeds") or []
        is_image = input_ids == wire.image_id
        replaced = ~self._embeds.detach().isnan().all(-1)
        if unknown or len(deep) != wire.tables - 1:
            raise _unsupported(
                f"gives its language model {unknown or 'features behind other layers than its config says'}"
            )
        if not torch.equal(replaced, is_image):
            raise _unsupported("puts features at other tokens than the image token")
        if deep and not torch.equal(got["visual_pos_masks"], is_image):
            raise _unsupported("adds features behind layers at other tokens than the image token")
        self._deep, self._rank = deep, (is_image.flatten().cumsum(0) - 1).view(is_image.shape)

    def pictures(self, documents: Sequence[Document], ways: int, trained: bool) -> list[Picture | None]:
        """A picture of each document with images. `trained`: whether gradients by features will come."""
        made = list[Picture | None]()
        for document in documents:
            if not document.side:
                made.append(None)
                continue
            at, dtype = self._columns(document), getattr(torch, self._wire.dtype)
            leaf = self._features(document, at).detach().to(dtype, copy=True).requires_grad_(trained)
            made.append(Picture(leaf, (at - document.begin).cpu(), self._positions_of(document), ways))
        return made

    def live(self, documents: Sequence[Document]) -> list[Tensor]:
        """[K, n, h] of each document with images, with their graph."""
        return [self._features(document, self._columns(document)) for document in documents if document.side]

    def _columns(self, document: Document) -> Tensor:
        """int64 [n]: of a document's image tokens in the batch."""
        return document.begin + (self._ids[document.place] == self._wire.image_id).nonzero()[:, 0]

    def _features(self, document: Document, at: Tensor) -> Tensor:
        tables = [self._embeds[document.row, at], *(table[self._rank[document.row, at]] for table in self._deep)]
        return torch.stack([table.to(tables[0].dtype) for table in tables])

    def _positions_of(self, document: Document) -> Tensor | None:
        """[3, L] of a document; None if they count its tokens."""
        positions, wire, (row, columns) = self._positions, self._wire, document.place
        counted = torch.arange(len(document.ids))
        if positions is not None and positions.dim() == 3 and wire.has_positions:
            return positions[-3:, row, columns].cpu()
        if positions is not None and (
            positions.dim() != 2 or not torch.equal(positions[row % len(positions), columns].cpu(), counted)
        ):
            raise _unsupported("gives its language model other positions than the places of tokens")
        return counted.expand(3, -1).contiguous() if wire.has_positions else None

    def ways(self, model: PreTrainedModel, documents: Sequence[Document]) -> int | None:
        """How consecutive image tokens attend to each other (`Picture.ways`), by the masks; None if no image has two tokens.
        Raises `UnsupportedError`: in another way than these."""
        masks = self._masks if isinstance(self._masks, Mapping) else {"full_attention": self._masks}
        pictures = zip(documents, self.pictures(documents, BOTH_WAYS, False), strict=True)
        several = [(document, picture) for document, picture in pictures if picture is not None and document.side > 1]
        if not several:
            return None
        window, kinds = getattr(model.config.get_text_config(), "sliding_window", None), set[tuple[bool, bool]]()
        for kind, mask in masks.items():
            slides = kind.startswith("sliding")
            kinds |= {(slides, way) for way in _ways_of(mask, window if slides else None, several)}
        if kinds == {(True, True), (False, False)}:
            return BOTH_WAYS_IN_WINDOWS
        ways = {both for _, both in kinds}
        if len(ways) > 1:
            raise _unsupported("masks some images in another way than others")
        return BOTH_WAYS if ways == {True} else ONE_WAY


def _ways_of(mask: object, window: int | None, several: Sequence[tuple[Document, Picture]]) -> set[bool]:
    """Whether consecutive image tokens attend in both directions, by a mask [B, 1, L, L] of layers with that window; no mask
    is causal."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return {False}
    ways, allowed = set[bool](), mask if mask.dtype == torch.bool else mask == 0
    for document, picture in several:
        row, columns = document.place
        blocks = torch.full((len(document.ids),), -1, device=allowed.device)
        causal = mask_of_blocks(blocks, window)
        blocks[picture.places] = picture.blocks().to(blocks)
        own = allowed[row, 0, columns, columns]
        if torch.equal(own, both := mask_of_blocks(blocks, window)) and not torch.equal(both, causal):
            ways.add(True)
        elif torch.equal(own, causal):
            ways.add(False)
        else:
            raise _unsupported("masks attention in another way than by causality, windows and images")
    return ways


def _has_tensors(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensors, value)))


def _unsupported(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"rows with images: the model {what}",
        why="features enter packs behind the embedding, at the image token",
        fix="train a family that docs/images.md names",
    )


def read_towers(model: nn.Module, dtype: torch.dtype | None) -> Towers | None:
    """The towers of a multimodal model; None if it has none for images, or is a text model."""
    bare = bare_model(model)[0]
    if not isinstance(bare, PreTrainedModel) or (base := text_base(bare)) is None:
        return None
    outer, _, inner = base.rpartition(".")
    around, config = bare.get_submodule(outer), bare.config
    image_id = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if image_id is None or not hasattr(around, "get_image_features"):
        return None
    given = inspect.signature(type(around).forward).parameters.keys() - _OF_TEXT
    names = frozenset(name for name in given if not any(other in name for other in _OTHERS))
    deep = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    wire = Wire(
        image_id,
        tables=1 + len(deep),
        hidden=config.get_text_config().hidden_size,
        has_positions=hasattr(around, "get_rope_index"),
        dtype=str(dtype or bare.dtype).removeprefix("torch."),
    )
    by_config = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    trained = any(p.requires_grad for p in other_half(bare).values())
    return Towers(outer, inner, names, wire, trained, in_blocks="token_type_ids" in names or by_config)
