"""Why the tokens of a model's sequences cannot be divided: over the ranks of a tensor-parallel group (`+sp`), in chunks
(`+ck`), over ranks (cp), or on a ring of these. Read from modules and plans; the answers are parts of error messages.
"""

from collections.abc import Sequence

from torch import nn

from hf_hotspa.model.tensor_plan import TensorPlan
from hf_hotspa.parallel.attention import calls_attention, names_in_forward, num_attends
from hf_hotspa.parallel.isolation import LayerKind
from hf_hotspa.parallel.tensor_parallel import sequence_parallel_refusal

CHUNKS, RANKS = "computed in chunks (+ck)", "divided over ranks (cp)"


def sp_unsupported_reason(
    plan: TensorPlan, kinds: tuple[LayerKind, ...], embedding: str, before: list[str], fused: set[str]
) -> str | None:
    """Why tensor parallelism of the model cannot be sequence parallel, or None."""
    if any(kind.alone for kind in kinds):
        return "some of its layers look at whole sequences of a pack, so it cannot be sequence parallel"
    for name, module in plan.modules.items():
        early = name != embedding and any(f"{name}.".startswith(prefix) for prefix in before)
        if early and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            return f"{name} adds to the embeddings of whole rows, so the model cannot be sequence parallel"
    return sequence_parallel_refusal(plan.modules, plan.styles, {*plan.cuts, *plan.partial}, plan.layer_prefixes, fused)


def cut_unsupported_reason(
    family: str, base: nn.Module, kinds: tuple[LayerKind, ...], layers: tuple[str, ...], how: str
) -> str | None:
    """Why sequences of the model cannot be cut along their tokens, or None.

    Args:
        how: What is to be done with the parts, for the message.
    """
    alone = [index for index, kind in enumerate(kinds) if kind.alone]
    if alone:
        layer = [layer for name in layers for layer in base.get_submodule(name).children()][alone[0]]
        return (
            f"{type(layer).__name__} {alone[0]} of {family} is given whole sequences (for a convolution, a state, linear "
            f"attention or a mask of its own), so they cannot be {how}"
        )
    if len(layers) > 1:
        return f"the layers of {family} run in cycles, so sequences cannot be {how}"
    return None


def chunks_unsupported_reason(family: str, layers: Sequence[nn.Module], counted: int | None) -> str | None:
    """Why a sequence of the model cannot go through it in chunks, one after the other, or None."""
    if counted is not None:
        return f"the embedding of {family} counts the tokens before a token, so sequences cannot be {CHUNKS}"
    twice = next((m for layer in layers for m in layer.modules() if calls_attention(m) and num_attends(m) > 1), None)
    if twice is not None:
        return f"{type(twice).__name__} of {family} attends twice to the same tokens, so they cannot be {CHUNKS}"
    return None


def ring_unsupported_reason(family: str, layers: Sequence[nn.Module], drops: bool) -> str | None:
    """Why attention of the layers cannot be computed block by block on a ring, or None."""
    for module in (module for layer in layers for module in layer.modules() if calls_attention(module)):
        names = names_in_forward(module)
        cap = getattr(module, "attn_logit_softcapping", None)
        # some forwards read it from the config at each call
        owner = module if hasattr(module, "sliding_window") or "sliding_window" not in names else module.config
        window = getattr(owner, "sliding_window", None)
        widths = getattr(module, "qk_head_dim", None), getattr(module, "v_head_dim", None)
        for is_there, what in (
            (window is not None, f"a sliding window of {window} tokens"),
            (cap is not None and "softcap" in names, f"a cap of {cap} on its scores"),
            ("s_aux" in names, "sinks"),
            (drops, "dropout of its probabilities"),
            (None not in widths and widths[0] != widths[1], "values of another width than its keys"),
        ):
            if is_there:
                return (
                    f"the attention of {family} has {what}, and blocks on a ring are full attention with plain scores"
                )
    return None
