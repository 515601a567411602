"""The images of a data set's rows in plans: their number and sizes, read from the headers of files, without torch."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from hf_hotspa.costs.model_config import read_config
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.features.images.terms import ImageLoad, tower_of
from hf_hotspa.seam import RowsBeside

if TYPE_CHECKING:
    from datasets import Dataset

Sizes = tuple[tuple[int, int], ...]
"""Height and width of a row's images, in pixels."""
_FIX = "give --images N and --image-size PIXELS, the number of images of a row and their edge"


def images_of_rows(args: argparse.Namespace, dataset: "Dataset") -> RowsBeside | None:
    """What the columns `image` and `images` of a plan's data set add to its rows; None without them, and for commands that count
    text alone. Raises `HotspaConfigError`: a size is unknown; or see `tower_of`."""
    names = [name for name in ("image", "images") if name in dataset.column_names]
    if not names or not hasattr(args, "images"):
        return None
    text = dataset.remove_columns(names)
    if len(text) and any(isinstance(value, list) for value in text[0].values()):
        text = text.map(_without_images)
    if args.images is not None:
        return RowsBeside(text, np.zeros(len(text), np.int64), None)
    if "input_ids" in dataset.column_names:
        what = f"the rows have input_ids and {names}: nothing says whether image tokens are among them"
        raise HotspaConfigError(what, where=str(args.dataset), fix=f"remove one of them, or {_FIX}")
    rows = [sum(parts, ()) for parts in zip(*(_sizes_by_row(dataset, name) for name in names), strict=True)]
    counts = Counter(size for row in rows for size in row)
    if not counts:
        return RowsBeside(text, np.zeros(len(text), np.int64), None)
    config = read_config(args.model)
    towers = {size: tower_of(config, *size) for size in counts}
    tokens = np.array([sum(towers[size].tokens for size in row) for row in rows], np.int64)
    number, patches = counts.total(), sum(towers[size].patches * n for size, n in counts.items())
    pairs = sum(towers[size].patches * towers[size].attended * n for size, n in counts.items())
    mean = replace(
        towers[max(counts)], patches=round(patches / number), attended=round(pairs / patches), tokens=round(tokens.sum() / number)
    )  # fmt: skip
    return RowsBeside(text, tokens, ImageLoad(number / len(rows), 0, mean, args.mini_batch))


def _without_images(row: Mapping[str, object]) -> dict[str, object]:
    # the columns have the images among the parts of messages, too
    return {name: list(map(_of_text, value)) if isinstance(value, list) else value for name, value in row.items()}


def _of_text(message: object) -> object:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, list):
        return message
    parts = [part for part in content if not (isinstance(part, Mapping) and part.get("type") == "image")]
    return message | {"content": parts}


def _sizes_by_row(dataset: "Dataset", name: str) -> Iterator[Sizes]:
    row = 0
    for batch in dataset.select_columns(name).with_format("arrow").iter(batch_size=100):
        for value in batch.column(name).to_pylist():
            images = value if isinstance(value, list) else [value]
            try:
                yield tuple(_size(image) for image in images if image is not None)
            except Exception as error:  # of files, of a format, or without Pillow
                what = f"the size of an image is unknown: {type(error).__name__}: {error}"
                raise HotspaConfigError(what, where=f"dataset row {row}, column {name!r}", fix=_FIX) from None
            row += 1


def _size(image: object) -> tuple[int, int]:
    """Of a path, or of what `datasets` keeps: `bytes` or a `path`."""
    from PIL import Image

    path, content = (image.get("path"), image.get("bytes")) if isinstance(image, Mapping) else (image, None)
    if content is None and not isinstance(path, str):
        raise ValueError(f"a {type(image).__name__} is not an image")
    with Image.open(str(path) if content is None else BytesIO(content)) as opened:
        return opened.height, opened.width
