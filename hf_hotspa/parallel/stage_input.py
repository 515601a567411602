"""How a base model becomes a later pipeline stage: layers and norms that pass through, and input taken as it is.

A later stage gets the hidden state of the stage before as `inputs_embeds`. What a family does to embeddings in its
base model (a multiplier) must not happen to it again: `take_hidden_state` turns off what is known, and
`stage_unsupported_reason` runs the base model with nothing but pass-throughs to see that what goes in comes out, so that a family
that does something unknown there is refused instead of trained wrong. A model on the meta device gets the same answer as
the same model with data: only buffers take part in that run, and they follow from the config.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hf_hotspa.parallel.attention import ATTENTION, PackedSequences

_MULTIPLIERS = ("embedding_multiplier", "embedding_scale")
_SWITCHES = ("mup_enabled",)
_SHARED_STATE = ("num_kv_shared_layers",)


class PassThrough(nn.Module):
    """Stands where a layer or norm of another stage was: returns the hidden state it is given."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class _Counting(PassThrough):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.num_calls += 1
        return hidden


def take_hidden_state(base: Any, embeddings: tuple[str, ...]) -> None:
    """Makes a base model take `inputs_embeds` as the hidden state between layers.

    Args:
        base: The base model; changed.
        embeddings: Names of its modules before the layers.
    """
    dropouts = [name for name, child in base.named_children() if isinstance(child, nn.Dropout)]  # of the embeddings
    for name in dropouts:
        setattr(base, name, PassThrough())
    for name in embeddings:
        setattr(base, name, None if isinstance(getattr(base, name), nn.Embedding) else PassThrough())
    for name in _MULTIPLIERS:
        if isinstance(getattr(base, name, None), int | float):
            setattr(base, name, 1.0)
    config = copy.deepcopy(base.config)  # others read the same object, or parts of it
    for name in _SWITCHES:
        if hasattr(config, name):
            setattr(config, name, False)
    base.config = config


def stage_unsupported_reason(
    base: Any, layers: tuple[str, ...], embeddings: tuple[str, ...], norms: tuple[str, ...]
) -> str | None:
    """Why a stage cannot be the model's own class with the other stages' layers passed through, or None.

    Args:
        base: The base model; not changed, and its weights are not touched.
        layers: Names of its lists of layers.
        embeddings: Names of its modules before the layers.
        norms: Names of its modules after them.
    """
    text = base.config.get_text_config()
    family = text.model_type
    planned = list(text.base_model_pp_plan or ())
    if not planned:
        return None  # said elsewhere: the family has no plan
    if len(layers) > 1:
        return f"the layers of {family} are {len(layers)} stacks that run in cycles, which stages cannot share"
    if unknown := [name for name in (*embeddings, *norms) if name not in planned]:
        return f"the modules {unknown} of {family} are in no stage of the family's pipeline plan"
    behind = planned[planned.index(layers[0]) :] if layers[0] in planned else []
    if late := [name for name in behind if isinstance(getattr(base, name, None), nn.Dropout)]:
        return f"the dropout {late[0]} of {family} comes after its layers, and is taken for that of the embeddings"
    for name in _SHARED_STATE:
        if getattr(text, name, 0):
            return f"{family} has {name}={getattr(text, name)}: layers would share states across stages"
    counters = [_Counting() for _ in norms]
    try:
        hidden, out = _run_as_later_stage(base, layers[0], embeddings, dict(zip(norms, counters, strict=True)))
    except Exception as error:  # whatever the family's code raises, it cannot run as a later stage
        return f"{family} cannot run as a later pipeline stage: {type(error).__name__}: {error}"
    if out is not hidden and not (out.shape == hidden.shape and torch.equal(out, hidden)):
        return f"{family} changes the input of every pipeline stage as if it were an embedding"
    if any(counter.num_calls != 1 for counter in counters):
        return f"{family} uses {norms[0]} in another place than after its layers"
    return None


def _run_as_later_stage(
    base: Any, layers: str, embeddings: tuple[str, ...], norms: dict[str, _Counting]
) -> tuple[Tensor, Tensor]:
    """What goes into a base model of nothing but pass-throughs, and what comes out."""
    probe = copy.copy(base)
    probe._modules = dict(base._modules)
    take_hidden_state(probe, embeddings)
    probe.config._attn_implementation = ATTENTION
    for name, counter in norms.items():
        setattr(probe, name, counter)
    setattr(probe, layers, nn.ModuleList(PassThrough() for _ in getattr(base, layers)))
    _fill_buffers(probe)
    buffer = next((b for b in probe.buffers() if b.is_floating_point()), None)
    device = buffer.device if buffer is not None else torch.device("cpu")
    with torch.no_grad(), device:
        hidden = torch.ones(1, 2, base.config.get_text_config().hidden_size, dtype=base.dtype).cumsum(1)
        out = probe(
            inputs_embeds=hidden,
            position_ids=torch.arange(2)[None],
            attention_mask=None,
            use_cache=False,
            hotspa_pack=PackedSequences((2,), torch.tensor([0, 2], dtype=torch.int32)),
        ).last_hidden_state
    return hidden, out


def _fill_buffers(probe: Any) -> None:
    """Gives a base model that is all but empty data on the CPU where it has none, as its class initializes it."""
    with torch.no_grad(), torch.device("cpu"):  # the caller may be on meta, too
        for name, buffer in probe._buffers.items():
            if buffer is not None and buffer.is_meta:
                probe._buffers = {**probe._buffers, name: torch.zeros_like(buffer, device="cpu")}
        for name, child in probe._modules.items():
            if child is not None and any(tensor.is_meta for tensor in child.buffers()):
                filled = copy.deepcopy(child).to_empty(device="cpu")
                for tensor in filled.buffers():
                    tensor.zero_()
                for module in filled.modules():
                    probe._init_weights(module)
                probe._modules[name] = filled
