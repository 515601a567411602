"""Textbook formulas of 3D parallelism for a model and a cluster, beside our own models: `hf-hotspa formulas`.

One row for each (p, t, d) with p t d devices: every division that the formulas cover, whether we can train it or not.
Micro-batches are b sequences of s tokens, layers recompute everything but their inputs (`+rc`), all in 16 bits. The
formulas explain and are coarse: they know neither kernels nor kinds of layers. `plan` uses our models.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_hotspa.costs import formulas
from hf_hotspa.costs.formulas import STAGES, model_state_bytes
from hf_hotspa.errors import HotspaConfigError, HotspaError
from hf_hotspa.reporting.terminal import text_table
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Strategy, strategies_of

KIND, SCHEMA_VERSION = "hf_hotspa formulas", 1
MISPRINTS = (
    "intensity of tp: one source prints n/(2+p); t is meant",
    "states: the same prints 1.73B parameters and 27.4 GB a device for 175B over p t = 128; 27.4 GB are 20 x 1.37B",
    "T_dp: it writes N_p for the message, which has bytes: 2 N_p in 16 bits here",
)
_GIB, _MIB = 1 << 30, 1 << 20
_MOST = 1 << 20
_FULL = 4  # a pipeline of equal packs is simulated for so many times its stages; each further pack adds the same


@dataclass(frozen=True)
class Row:
    """One division. Elements, bytes and seconds are for the fullest device, or for all devices if "of a batch"."""

    pp: int
    tp: int  # ranks that share a layer
    dp: int
    micro_batches: int  # m = B / (b d), of a replica
    bubble: float  # (p - 1) / m
    inter_elements: float  # C_inter, of a micro-batch between two stages, there and back
    intra_elements: float  # C_intra, of a micro-batch, sent by a device for the all-reduces of its stage
    tp_seconds: float  # T_tp, of a batch
    dp_seconds: float  # T_dp
    pp_seconds: float  # T_pp
    parameters: float  # of a device, N / (p t)
    state_bytes: float  # 20 bytes for each parameter: gradients accumulate in fp32
    zero_bytes: tuple[float, ...]  # 16 bytes for each, divided by ZeRO stage 0, 1, 2 and 3 over dp
    activation_bytes: float  # M_transformer of as many micro-batches as there are stages (at most m), and M_emb of one
    intensity: float  # operations a byte of a product of h x h under t, relative to t = 1
    our_seconds: float | None = None  # of a batch, by our time model; None if we cannot train it
    our_bytes: float | None = None  # of the fullest device, by our memory model
    unsupported_reason: str | None = None  # why we cannot train it


@dataclass(frozen=True)
class FormulaTable:
    """The rows and their inputs."""

    setup: Setup
    batch: int  # sequences of an optimizer step, B
    micro: int  # sequences of a micro-batch, b
    tokens: int  # tokens of a sequence, s
    rows: tuple[Row, ...]
    # what features add (`of_formulas` of their settings): each has `to_dict`, of parts of the JSON, and a text
    more: tuple[Any, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "setup": self.setup.to_dict(),
            "batch": self.batch,
            "micro_batch": self.micro,
            "sequence_tokens": self.tokens,
            "misprints": list(MISPRINTS),
            "rows": [asdict(row) for row in self.rows],
            **{name: part for each in self.more for name, part in each.to_dict().items()},
        }


def divisions(world_size: int, batch: int, micro: int, layers: int, heads: int) -> list[tuple[int, int, int]]:
    """Returns every `(p, t, d)` with p t d devices: p at most the layers, t divides the heads, b d the batch."""
    return [
        (s.pp, s.tp, s.dp)
        for s in strategies_of(world_size)
        if s.pp <= layers and heads % s.tp == 0 and batch % (micro * s.dp) == 0
    ]


def make_table(setup: Setup, batch: int, micro: int, tokens: int) -> FormulaTable:
    """Makes the rows for a model on a cluster. `setup`: with hardware. Raises `HotspaConfigError`: a number is
    impossible, or nothing divides the devices and the batch."""
    for what, number in (("--batch", batch), ("--micro-batch", micro), ("--sequence", tokens)):
        if not 1 <= number <= _MOST:
            raise HotspaConfigError(f"{what} is {number}", fix=f"use a number from 1 to {_MOST}")
    shape, world = setup.model.shape, setup.world_size
    positions = shape.max_position_embeddings
    if positions is not None and tokens > positions:
        what = f"sequences of {tokens} tokens, and {setup.model.name} has {positions} positions"
        raise HotspaConfigError(what, fix=f"use --sequence {positions} or less")
    degrees = divisions(world, batch, micro, shape.num_layers, shape.num_attention_heads)
    if not degrees:
        raise HotspaConfigError(
            f"no (p, t, d) divides {world} devices, {shape.num_attention_heads} heads and batches of {batch} sequences",
            fix="use a batch that the micro-batch and the number of devices divide",
        )
    asked = setup, batch, micro, tokens
    return FormulaTable(*asked, tuple(_row(*asked, *each) for each in degrees))


def _row(setup: Setup, batch: int, micro: int, tokens: int, pp: int, tp: int, dp: int) -> Row:
    shape, hardware = setup.model.shape, setup.hardware
    assert hardware is not None
    hidden, in_flight_tokens = shape.hidden_size, micro * tokens
    m, layers = batch // (micro * dp), shape.num_layers / pp
    message = formulas.ELEMENT_BYTES * in_flight_tokens * hidden
    share = (hardware.nics_per_node or setup.devices_per_node) / setup.devices_per_node
    inter = hardware.inter_bandwidth * min(1.0, share)

    def link(span: int) -> float:
        return hardware.intra_bandwidth if span <= setup.devices_per_node else inter

    parameters = formulas.parameters_per_device(setup.sizes.num_parameters, tp, pp)
    elements = (
        float(formulas.inter_elements(in_flight_tokens, hidden)) if pp > 1 else 0.0,
        formulas.intra_elements(in_flight_tokens, hidden, tp, 1) * layers,
    )
    seconds = (
        formulas.tensor_seconds(message, link(tp), tp, layers, m),
        formulas.data_seconds(formulas.ELEMENT_BYTES * parameters, link(tp * dp), dp),
        formulas.stage_seconds(message, link(tp * dp * pp), link(tp), tp, pp, m),
    )
    states = formulas.state_bytes_per_device(setup.sizes.num_parameters, tp, pp)
    zero = tuple(model_state_bytes(parameters, dp, stage) for stage in STAGES)
    activations = formulas.recomputed_bytes(in_flight_tokens, hidden, shape.num_layers, pp) * min(pp, m)
    activations += formulas.logit_bytes(in_flight_tokens, shape.vocab_size, tp)
    intensity = formulas.Matmul.of(hidden, tp).intensity / formulas.Matmul.of(hidden).intensity
    ours, size, why = _ours(setup, Strategy(dp, tp, pp, rc=1), micro, tokens, m)
    bubble = formulas.bubble_fraction(pp, m)
    return Row(
        pp, tp, dp, m, bubble, *elements, *seconds, parameters, states, zero, activations, intensity, ours, size, why
    )


def _ours(
    setup: Setup, strategy: Strategy, micro: int, tokens: int, m: int
) -> tuple[float | None, float | None, str | None]:
    """Seconds of a batch and bytes of the fullest device by our models; or why we cannot train it."""
    try:
        unsupported_reason = strategy.unsupported_reason(setup.model.shape)
        if unsupported_reason:
            return None, None, unsupported_reason
        pack = (tokens,) * micro
        fullest_bytes = setup.memory.breakdown(strategy, micro * tokens, longest=tokens, num_packs=m).total

        def seconds(packs: int) -> float:
            return setup.cost.time.phase_seconds(strategy, [[pack] * packs] * strategy.dp)

        full = _FULL * strategy.pp
        if m <= full:
            return seconds(m), fullest_bytes, None
        late, later = seconds(full - strategy.pp), seconds(full)
        return later + (m - full) * (later - late) / strategy.pp, fullest_bytes, None
    except HotspaError as error:
        return None, None, error.what


_HEAD = (
    "p t d", "m", "bubble", "C_inter Mi", "C_intra Mi", "T_tp s", "T_dp s", "T_pp s", "params B", "states GiB",
    "ZeRO-1", "-2", "-3", "activations", "intensity", "| ours s", "ours GiB",
)  # fmt: skip


def formulas_text(result: FormulaTable) -> str:
    setup = result.setup
    assert setup.hardware is not None
    rows: list[Sequence[str]] = [_HEAD]
    for row in result.rows:
        ours = [f"| {row.our_seconds:,.3g}" if row.our_seconds is not None else "| -"]
        ours.append(f"{row.our_bytes / _GIB:,.1f}" if row.our_bytes is not None else "-")
        elements = row.inter_elements, row.intra_elements
        rows.append(
            [
                *(f"{row.pp} {row.tp} {row.dp}", f"{row.micro_batches:,}", f"{row.bubble:.3f}"),
                *(f"{number / _MIB:,.1f}" for number in elements),
                *(f"{seconds:,.3g}" for seconds in (row.tp_seconds, row.dp_seconds, row.pp_seconds)),
                f"{row.parameters / 1e9:,.2f}",
                f"{row.state_bytes / _GIB:,.1f}",
                *(f"{size / _GIB:,.1f}" for size in row.zero_bytes[1:]),
                f"{row.activation_bytes / _GIB:,.1f}",
                f"{row.intensity:.2f}",
                *ours,
            ]
        )
    reasons = sorted({row.unsupported_reason for row in result.rows if row.unsupported_reason})
    return "\n".join(
        [
            f"{setup.model.name}: {setup.sizes.num_parameters / 1e9:,.2f}B parameters on {setup.nodes} x "
            f"{setup.devices_per_node} devices of {setup.hardware.name}",
            f"B = {result.batch} sequences of s = {result.tokens} tokens, micro-batches of b = {result.micro}; layers recompute, "
            f"{setup.dtype}",
            "",
            text_table("", rows),
            "",
            "bubble: (p-1)/m of the ideal time. C_inter, C_intra: millions (2^20) of elements of a micro-batch. T: of a batch.",
            "states: 20 bytes a parameter; ZeRO: 16 bytes, divided over d. activations and states in GiB of a device.",
            "intensity: operations a byte of a product under t, over those without: 3/(2+t).",
            "ours: the models that `hf-hotspa plan` uses, for the same micro-batches with +rc; the master store is always "
            "divided over all devices.",
            *map(str, result.more),
            *(f"- : {text}" for text in reasons),
            *(f"misprint in a source: {text}" for text in MISPRINTS),
        ]
    )
