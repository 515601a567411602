"""Rows with images: features of the towers of a multimodal model enter packs at image tokens.

Its hooks; see `hf_hotspa.seam`.
"""

from typing import TYPE_CHECKING

from hf_hotspa.features.images.terms import TERMS, add_image_flags, image_load
from hf_hotspa.seam import Described, Flags, Measure, RowsBeside

if TYPE_CHECKING:
    from argparse import Namespace

    import torch
    from datasets import Dataset
    from torch import nn

    from hf_hotspa.features.images.picture_replica import PictureReplica
    from hf_hotspa.features.images.towers import Towers
    from hf_hotspa.model.options import EngineOptions
    from hf_hotspa.model.replica import Replica
    from hf_hotspa.model.specs import ModelDescription


terms = TERMS

# of the images of the rows that a phase trained, whichever rank has encoded them; with the padding of a batch
measures = (Measure("image_patches", "image_patches", metric="image_patches", title="image patches"),)


def _of_rows(args: "Namespace", dataset: "Dataset") -> RowsBeside | None:
    """Images in columns of a plan's data set."""
    from hf_hotspa.features.images.rows import images_of_rows

    return images_of_rows(args, dataset)


flags = Flags(commands=dict.fromkeys(("plan", "estimate"), add_image_flags), of_command=image_load, of_rows=_of_rows)


def describe(model: "nn.Module", compute_dtype: "torch.dtype | None") -> Described:
    """The towers of the model."""

    def side_inputs() -> "Towers | None":
        from hf_hotspa.features.images.towers import read_towers

        return read_towers(model, compute_dtype)

    return Described(side_inputs=side_inputs)


def attach(
    replica: "Replica", description: "ModelDescription", options: "EngineOptions"
) -> "tuple[PictureReplica, ...]":
    """Features enter behind the embedding and the first layers."""
    from hf_hotspa.features.images.picture_replica import PictureReplica
    from hf_hotspa.features.images.towers import Towers

    towers = description.side_inputs
    return (
        (PictureReplica(replica, towers.wire, description.base, towers.trained),) if isinstance(towers, Towers) else ()
    )
