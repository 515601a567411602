"""Rows with images in plans: tokens, bytes and seconds of the towers, which encode images before a step's first phase.

Every rank encodes the images of the rows that it reads, with whole towers: strategies divide none of this. Sizes are read
from a config (`tower_of`). A tower's layers cost what decoder layers of the same sizes cost; their attention is not causal,
so it compares twice as many pairs.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_hotspa.costs import data_sheet
from hf_hotspa.costs.memory import MemoryStage, activation_bytes
from hf_hotspa.costs.model_config import read_config
from hf_hotspa.costs.sizes import ModelSizes, dtype_bytes
from hf_hotspa.costs.terms import MemoryTerm, Rate, Terms
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.model_shape import ModelShape
from hf_hotspa.seam import Options, settings

_GATED = ("pixtral", "qwen2_5_vl")  # towers whose MLPs have a gate
_PATCH_FRAMES = {"qwen2_vl": 2, "qwen2_5_vl": 2, "qwen3_vl": 2, "qwen3_vl_moe": 2}  # an image is a film of two frames
_MARKS = 2  # tokens around an image, at its begin and end
GRAPH_BYTES = 4 << 30
"""While graphs of towers take less in a step, they are kept until it ends; further calls run them again then."""
_LARGEST = 1 << 14  # pixels of an edge


@dataclass(frozen=True)
class Tower:
    """What encodes an image, with the projector behind it."""

    shape: ModelShape  # of its layers; its vocabulary does not count
    parameters: int  # of tower and projector
    patches: int  # of an image
    attended: int  # patches that a patch is compared with
    tokens: int  # that an image adds to its row
    features: int  # numbers of an image token: of the hidden size, once for each layer that features enter

    def graph_bytes(self, width: int, layers: int) -> float:
        """Bytes that layers keep for an image until its backward pass; `width`: bytes of an element."""
        return self.patches * layers * activation_bytes(self.shape, 1, element_bytes=width)


def tower_of(config: Mapping[str, Any], height: int, width: int | None = None) -> Tower:
    """Reads the tower of a multimodal config, for images of `height` x `width` pixels, by default squares. Raises
    `HotspaConfigError`: the config has no tower, lacks a field of it, or does not say how many tokens an image has."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise HotspaConfigError(
            f"--images: a model of type {config.get('model_type')!r} reads no images",
            fix="give a model whose config.json has a vision_config",
        )
    try:
        return _tower(config, vision, (height, height if width is None else width))
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"--images: the vision_config is not one of a tower: {type(error).__name__} {error}"
        raise HotspaConfigError(what, fix="give the config.json that transformers saves with the model") from None


def _tower(config: Mapping[str, Any], vision: Mapping[str, Any], size: tuple[int, int]) -> Tower:
    text = config.get("text_config") or config
    width, hidden = vision.get("embed_dim") or vision["hidden_size"], text["hidden_size"]
    layers = vision.get("depth") or vision["num_hidden_layers"]
    heads = vision.get("num_heads") or vision["num_attention_heads"]
    kind = str(vision.get("model_type") or config.get("model_type"))
    gated = any(kind.startswith(name) for name in _GATED)
    inner = vision.get("intermediate_size") or int(width * vision.get("mlp_ratio", 4))
    of_layer = 4 * width * width + (3 if gated else 2) * width * inner + 2 * width
    shape = ModelShape(kind, layers, heads, heads, width, width, 1, of_layer, gated=gated)
    patch = vision["patch_size"]
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    levels = len(vision.get("deepstack_visual_indexes") or ())
    patches, tokens, merge = _grid(config, vision, patch, size)
    merged = width * merge * merge
    projector = _projector(config, merged, width, hidden) * (1 + levels)
    entry = 3 * patch * patch * _PATCH_FRAMES.get(str(config.get("model_type")), 1) * width
    window = vision.get("window_size")
    attended = patches
    if window:
        full = len(vision.get("fullatt_block_indexes") or ()) / layers
        attended = round(full * attended + (1 - full) * min(attended, (window // patch) ** 2))
    learned = vision.get("num_position_embeddings") or (patches if _is_fixed(config) else 0)  # positions
    parameters = layers * of_layer + entry + learned * width + projector
    return Tower(shape, parameters, patches, attended, tokens, (1 + levels) * hidden)


def _is_fixed(config: Mapping[str, Any]) -> bool:
    """Whether every image is resized to the tower's size."""
    return "mm_tokens_per_image" in config or config.get("model_type") == "llava"


def _grid(
    config: Mapping[str, Any], vision: Mapping[str, Any], patch: int, size: tuple[int, int]
) -> tuple[int, int, int]:
    """Returns the patches of an image of that height and width, the tokens that an image adds to its row, and how many patches along an edge make one
    token."""
    edge = vision.get("image_size")
    if fixed := config.get("mm_tokens_per_image"):
        side = int(edge or 896) // patch
        return side * side, fixed + _MARKS, 1
    merge = vision.get("spatial_merge_size") or config.get("spatial_merge_size")
    if config.get("model_type") == "mistral3":
        merge, shrunk = merge or 2, max(1.0, max(size) / int(edge or max(size)))
        rows, columns = (max(1, -(-int(pixels / shrunk) // (patch * merge))) for pixels in size)
        return rows * columns * merge**2, rows * (columns + 1), merge  # a token ends each row of the image
    if str(config.get("model_type")).startswith(("qwen", "glm4v")):
        merge = merge or 2
        rows, columns = (max(1, round(pixels / (patch * merge))) for pixels in size)
        return rows * columns * merge**2, rows * columns + _MARKS, merge
    if config.get("model_type") == "llava":
        side = int(edge or 336) // patch
        return side * side, side * side, 1
    raise HotspaConfigError(
        f"--images: how many tokens an image has in {config.get('model_type')} follows from its processor, not from its config",
        why="the processor cuts images into tiles",
        fix="count rows with images: give --lengths a histogram of the lengths that the processor makes",
    )


def _projector(config: Mapping[str, Any], merged: int, width: int, hidden: int) -> int:
    """Parameters of what follows the tower: for Qwen two layers on merged patches, else one to the hidden size and mostly a
    second one."""
    kind = str(config.get("model_type"))
    if kind.startswith(("qwen", "glm4v")):
        return merged * merged + merged * hidden
    if kind == "mistral3":
        return merged * width + width * hidden + hidden * hidden
    return width * hidden + (0 if kind.startswith("gemma") else hidden * hidden)


@dataclass(frozen=True)
class ImageLoad(Options):
    """Images of the rows of a plan or an estimate."""

    images: float  # of a row, in the mean
    size: int  # pixels of an edge; 0 if the lengths have the tokens of a data set's images
    tower: Tower  # in the mean
    rows: int = 0  # of a mini-batch; 0: as many as there are ranks

    def row_tokens(self) -> int:
        return int(self.images) * self.tower.tokens if self.size else 0

    def of_rank(self, world_size: int) -> float:
        """Images that a rank encodes in a step, with the rows it reads."""
        return self.images * -(-max(self.rows, world_size) // world_size)

    def shown(self, strategy: object = None) -> Mapping[str, str]:
        number = f"{self.images} of {self.size} x {self.size} pixels a row" if self.size else f"{self.images:.3g} a row"
        each = "each" if self.size else "each, means of the data set"
        text = f"{number}: {self.tower.patches:,} patches and {self.tower.tokens:,} tokens {each}"
        return {"images": text}

    def plan_notes(self, setup: object) -> list[str]:
        (text,), seconds = self.shown().values(), self.seconds_beside(setup)
        return [
            f"Rows have images, {text}. {'--lengths count without them' if self.size else 'The lengths have them'}. Encoding them takes about {seconds:,.2f} s of each "
            "mini-batch, whatever trains it; the seconds of a step above have them."
        ]

    def seconds_beside(self, setup: object) -> float:
        """Seconds in which each rank encodes its images of a step, and, if they are trained, runs the towers backward.
        `setup`: one with hardware."""
        from hf_hotspa.search.setup import Setup

        assert isinstance(setup, Setup)
        assert setup.hardware is not None
        tower, number = self.tower, self.of_rank(setup.world_size)
        cost = data_sheet.layer_cost(tower.shape, 1, setup.hardware, setup.dtype)
        squares = 2 * number * tower.patches * tower.attended
        share = 1 / 3  # of forward and backward
        if _is_trained(setup.sizes):
            keeps = number * tower.graph_bytes(dtype_bytes(setup.dtype), tower.shape.num_layers) <= GRAPH_BYTES
            share = 1.0 if keeps else 4 / 3
        return share * tower.shape.num_layers * (cost.a * squares + cost.b * number * tower.patches + cost.c)


def _is_trained(sizes: ModelSizes) -> bool:
    """Whether the towers are: like the rest of a model to which no trained weights are added."""
    return sizes.added is None


def _load(stage: MemoryStage) -> ImageLoad | None:
    return settings(stage.options.features, ImageLoad)


def _weights(stage: MemoryStage) -> Rate | None:
    """In the model object, whole on every rank."""
    load = _load(stage)
    return Rate(fixed=load.tower.parameters * stage.width) if load else None


def _gradients(stage: MemoryStage) -> Rate | None:
    load = _load(stage)
    return Rate(fixed=load.tower.parameters * stage.width) if load and _is_trained(stage.model.sizes) else None


def _shares(stage: MemoryStage) -> Rate | None:
    load = _load(stage)
    if load is None or not _is_trained(stage.model.sizes) or stage.options.offload_master:
        return None
    state = stage.options.optimizer.full
    return Rate(fixed=load.tower.parameters / stage.model.world_size * (4 + 4 + state))


def _graphs(stage: MemoryStage) -> Rate | None:
    """From the towers' pass until the gradients of all features are there: of trained ones up to `GRAPH_BYTES`, and the images
    of a row, if a call has one; of frozen towers one layer at a time."""
    load = _load(stage)
    if load is None:
        return None
    tower, images = load.tower, load.of_rank(stage.model.world_size)
    if not _is_trained(stage.model.sizes):
        return Rate(fixed=images * tower.graph_bytes(stage.width, 1))
    of_image = tower.graph_bytes(stage.width, tower.shape.num_layers)
    return Rate(fixed=min(images * of_image, GRAPH_BYTES + load.images * of_image))


def _features(stage: MemoryStage) -> Rate | None:
    """Of the images that a rank has read, with their gradients and a copy as leaves; and of the tokens in flight, all of which
    may be of images, where they enter."""
    load = _load(stage)
    if load is None:
        return None
    of_token = load.tower.features * stage.width
    kept = (
        load.of_rank(stage.model.world_size)
        * load.tower.tokens
        * of_token
        * (3 if _is_trained(stage.model.sizes) else 1)
    )
    return Rate(token=of_token if stage.index == 0 else 0.0, fixed=kept)


TERMS = Terms(
    memory=(
        MemoryTerm("weights of the towers", "weights", _weights),
        MemoryTerm("gradients of the towers", "gradients", _gradients),
        MemoryTerm("shares of the towers", "optimizer", _shares),
        MemoryTerm("graphs of the towers", "activations", _graphs),
        MemoryTerm("features of images", "activations", _features),
    )
)


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--images` and `--image-size`."""
    help_of_images = "rows have so many images each; the lengths count without their tokens"
    parser.add_argument("--images", type=int, metavar="N", help=help_of_images)
    help_of_size = "of an image's edge, with --images (default: %(default)s)"
    parser.add_argument("--image-size", type=int, metavar="PIXELS", default=1024, help=help_of_size)


def image_load(args: argparse.Namespace) -> ImageLoad | None:
    """The images of a command's rows; None without any. Raises `HotspaConfigError`: an
    impossible number, or see `tower_of`."""
    if (images := getattr(args, "images", None)) is None:
        return None
    for flag, number in (("--images", images), ("--image-size", args.image_size)):
        if not 1 <= number <= _LARGEST:
            raise HotspaConfigError(f"{flag} {number} is impossible", fix=f"give 1 to {_LARGEST}")
    tower = tower_of(read_config(args.model), args.image_size)
    return ImageLoad(images, args.image_size, tower, getattr(args, "mini_batch", 0))
