"""Calibrations that were never measured: known constants, so that choices can be predicted."""

from pathlib import Path

from transformers import PreTrainedModel

from hf_hotspa.costs.calibration import Calibration, CalibrationKey, Link, ModelFacts
from hf_hotspa.costs.fit import Sample
from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.model.specs import describe_model, dtype_name

_PACKS = ((8,), (64,), (256,), (32, 32, 32), (512,))


def made_calibration(
    model: PreTrainedModel, world_size: int, costs: dict[int, Cost], *, hop: Hop | None = None, link: Link | None = None
) -> Calibration:
    """A calibration whose time model has these costs of a layer, by tp, and free ends."""
    description = describe_model(model, None)
    shape = description.shape
    samples = tuple(
        Sample(tp, layers, lengths, layers * cost.of(lengths), with_ends=True)
        for tp, cost in costs.items()
        for layers in (1, 3)
        for lengths in _PACKS
    )
    key = CalibrationKey(
        "made up",
        "cpu",
        world_size,
        1 << 34,
        world_size,
        world_size,
        1,
        "gloo",
        dtype_name(description.compute_dtype),
        "0",
    )
    return Calibration(
        key,
        ModelFacts(
            shape.family, shape.hidden_size, shape.layer_parameters, shape.vocab_size, shape.num_attention_heads
        ),
        samples,
        float(world_size),
        link or Link(1e-5, 1e10),
        hop or Hop(1e-5, 1e-9),
    )


def save_calibration(
    folder: Path | str, model: PreTrainedModel, world_size: int, costs: dict[int, Cost], **options: object
) -> str:
    """The same as a file; returns its path."""
    path = Path(folder) / "calibration.json"
    made_calibration(model, world_size, costs, **options).save(path)  # type: ignore[arg-type]
    return str(path)
