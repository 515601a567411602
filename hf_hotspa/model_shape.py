"""Counts and sizes of a model, for the torch-free layers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The numbers that decide on legal strategies and the cost of a token."""

    family: str  # the transformers `model_type`
    num_layers: int  # decoder layers
    num_attention_heads: int  # query heads
    num_key_value_heads: int  # equal to the query heads without grouped-query attention
    hidden_size: int  # width of the residual stream
    attention_size: int  # query heads times head dimension
    vocab_size: int  # rows of the embedding
    layer_parameters: int  # parameters of one decoder layer (the mean, if layers differ)
    max_position_embeddings: int | None = None  # the longest sequence of the position encoding; None when unbounded
    has_tp_plan: bool = True  # whether transformers has a tensor-parallel plan for the family
    has_pp_plan: bool = True  # whether transformers has a pipeline plan for the family
    # why tp > 1 cannot be exact despite a plan, or None; likewise for `Strategy`'s other names
    tp_unsupported_reason: str | None = None
    pp_unsupported_reason: str | None = None
    sp_unsupported_reason: str | None = None
    ck_unsupported_reason: str | None = None
    cp_unsupported_reason: str | None = None
    ring_unsupported_reason: str | None = None  # why its attention cannot run on a ring of cp ranks, or None
    rc_unsupported_reason: str | None = None
    z_unsupported_reason: str | None = None
    num_experts: int = 0  # experts of a layer; 0 for a dense model
    experts_per_token: int = 0  # experts that compute a token
    expert_parameters: int = 0  # parameters of all experts of one layer (the mean, if layers differ)
    ep_unsupported_reason: str | None = None
    # the share of attention, or its replacement, that tp does not divide: every rank has all of it
    whole_attention: float = 0.0
    whole_mlp: float = 0.0  # the same for MLPs, experts and routers
    gated: bool = True  # whether MLPs or experts have a gate beside the two matrices
    head_norms: bool = False  # whether queries and keys are normed
    # the share of layers whose attention compares pairs of tokens; the others keep a state of constant size
    pair_layers: float = 1.0
    both_ways: bool = False  # whether tokens also see later ones (encoders)
    both_ways_in_blocks: bool = False  # whether tokens beside each other may do so (images of some families)
    outputs: int = 0  # numbers of a token that the head makes, on every rank of tp; 0 for the vocabulary's logits

    def __post_init__(self) -> None:
        if self.both_ways and self.ck_unsupported_reason is None:
            why = f"the tokens of {self.family} also see later ones, so sequences cannot be computed in chunks (+ck)"
            object.__setattr__(self, "ck_unsupported_reason", why)

    def head_rows(self, tp: int) -> int:
        """Rows of the head's weight on a rank of tp."""
        return self.outputs or -(-self.vocab_size // tp)

    @property
    def attention_parameters(self) -> int:
        """Parameters of the query, key, value and output projections of one layer."""
        kv_size = self.attention_size * self.num_key_value_heads // self.num_attention_heads
        return 2 * self.hidden_size * (self.attention_size + kv_size)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the MLP or the experts of one layer, two norms included."""
        return max(self.layer_parameters - self.attention_parameters, 0)

    @property
    def idle_parameters(self) -> int:
        """Parameters of one layer that do not compute a token: the experts that the router does not choose."""
        if not self.num_experts:
            return 0
        chosen = min(max(self.experts_per_token, 1), self.num_experts)
        return self.expert_parameters * (self.num_experts - chosen) // self.num_experts

    @property
    def active_parameters(self) -> int:
        """Parameters of one layer that compute a token."""
        return self.layer_parameters - self.idle_parameters

    @property
    def active_mlp_parameters(self) -> int:
        """Parameters of one layer's MLP or experts that compute a token."""
        return max(self.mlp_parameters - self.idle_parameters, 0)

    @property
    def whole_parameters(self) -> int:
        """Parameters that compute a token and that tensor parallelism does not divide, without norms."""
        return round(self.whole_attention * self.attention_parameters + self.whole_mlp * self.active_mlp_parameters)

    @property
    def quadratic_cost(self) -> float:
        """Cost of an attention pair, twice a causal one if tokens see both sides, relative to the linear cost of a token.

        One layer and a sequence of l tokens need, forward, `2 P l` FLOP in matrix products (P parameters that compute a
        token) and `2 l^2 a` in causal attention (a = attention width): the cost is proportional to `l + (a / P) l^2`,
        the latter in the layers that compare pairs.
        """
        return (1 + self.both_ways) * self.pair_layers * self.attention_size / max(self.active_parameters, 1)


def pair_layers(layer_types: Sequence[object]) -> float:
    """Returns `ModelShape.pair_layers` from the types of all layers in a config; 1 if it names none."""
    return sum(kind != "linear_attention" for kind in layer_types) / len(layer_types) if layer_types else 1.0
