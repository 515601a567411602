"""The golden table of the cost models: bytes and seconds by model, strategy and options.

    python -m tests.cost_table      # writes tests/data/cost_table.json

A row has one number for each part: the sum over stages, buckets and numbers of packs, each with another weight, so that
no change of one number cancels out. `test_cost_golden.py` compares.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.cost_model import CostModel
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.model_config import ModelConfig, load_model, model_from
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.costs.switch_time import Streams, estimate
from hf_hotspa.costs.terms import Cost, Exchanges, Hop, Scoring, optimizer_states
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.features.four_bit.terms import four_bits
from hf_hotspa.features.lora.terms import Adapter
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.layout.vector import GradientDtypes
from hf_hotspa.model.specs import describe_model, dtype_name
from hf_hotspa.seam import FEATURES
from hf_hotspa.strategy import Bucket, Strategy
from tests.families import MIXTURE, tiny_model
from tests.qlora import WIDE, tiny_qlora

DATA = Path(__file__).parent / "data"
TABLE = DATA / "cost_table.json"
GIB = 1 << 30

_NAMED = (
    "dp8,dp4tp2,tp8,dp2pp4,dp2tp2pp2,pp8,dp2cp4,cp2tp2pp2,cp8,dp8ep8,dp4pp2ep4,dp2tp4ep4,dp2cp2tp2ep4,dp2tp4+sp,"
    "tp4pp2+sp+rc,dp8+rc,dp4pp2+rc2,tp8+rc3,dp8+ck512,dp2pp4+ck512,dp8+ck512+kg2,dp8+ck512+kh,dp2cp4+ck512,"
    "dp4tp2+rc+ck512+kg1,dp8+z2,dp8+z3,dp2tp2pp2+z3,dp4cp2+z3,dp4pp2+rc+z2,dp2pp4+v2,dp2tp2pp2+sp+v2,"
    "dp2pp4+ck512+v2,dp2tp2pp2+rc+v2,dp8+ck512+kg1+z3,dp4pp2+ck256+z3,tp2cp2pp2+sp+rc2"
)
STRATEGIES = tuple(map(Strategy.parse, _NAMED.split(",")))


def _config(model_type: str, **fields: Any) -> ModelConfig:
    return model_from({"model_type": model_type, **fields}, model_type, "made up")


@cache
def models() -> dict[str, ModelSizes]:
    """Model sizes by name; the tiny ones have parameter vectors."""
    gqa = load_model(DATA / "llama2_70b.json")
    mixture = _config(
        "mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000,
        max_position_embeddings=32768, hidden_act="silu", tie_word_embeddings=False,
    )  # fmt: skip
    gemma = _config(
        "gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, vocab_size=262208, hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip
    small = _config(
        "gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=1024, activation_function="gelu_new"
    )
    hybrid = replace(load_model("llama2-7b").shape, whole_attention=0.5, whole_mlp=0.25, head_norms=True)
    found = {
        "7b": ModelSizes(load_model("llama2-7b").shape),
        "70b": ModelSizes(gqa.shape),
        "mixture": ModelSizes(mixture.shape),
        "gemma": ModelSizes(gemma.shape, tied=gemma.tied),
        "gpt2": ModelSizes(small.shape, "float32", tied=small.tied),
        "hybrid": ModelSizes(hybrid),
    }
    tiny = {
        "tiny": tiny_model("llama_gqa_bias", num_hidden_layers=8),
        "tiny tied": tiny_model("qwen3_qk_norm_tied", num_hidden_layers=8),
        "tiny mixture": tiny_model(MIXTURE, num_hidden_layers=8),
        "tiny in 4 bits": tiny_qlora("llama_gqa_bias", torch.bfloat16, model={**WIDE, "num_hidden_layers": 8}),
    }
    for name, model in tiny.items():
        dtype = torch.bfloat16 if name == "tiny in 4 bits" else torch.float32
        described = describe_model(model, dtype)
        found[name] = ModelSizes(described.shape, dtype_name(dtype), vector=described.vector)
    slow = found["tiny"].vector
    assert slow is not None
    found["tiny with slow ranks"] = replace(found["tiny"], vector=replace(slow, step_times=(100, 150, *[100] * 6)))
    return found


def _with_adapter(name: str, lora: str, kind: str | None = None) -> ModelSizes:
    linears = load_model("llama2-7b").linears if name == "7b" else load_model(DATA / "llama2_70b.json").linears
    packed = four_bits(kind, linears, {}) if kind else None
    return replace(models()[name], added=Adapter.read(lora, linears), packed=packed)


def memory_cases() -> Iterator[tuple[str, ModelSizes, MemoryOptions]]:
    """Name, sizes and options of each case of the memory model."""
    for name, sizes in models().items():
        yield name, sizes, MemoryOptions(compute_dtype=sizes.compute_dtype)
    of_7b, of_70b = models()["7b"], models()["70b"]
    yield "7b fp32", replace(of_7b, compute_dtype="float32"), MemoryOptions(compute_dtype="float32")
    yield "7b bf16 gradients", replace(of_7b, gradients=GradientDtypes("bf16")), MemoryOptions()
    yield "7b r=16", _with_adapter("7b", "16"), MemoryOptions()
    yield "7b r=8 on two", _with_adapter("7b", "r=8,targets=q_proj+v_proj"), MemoryOptions(compute_dtype="float32")
    yield "7b nf4", _with_adapter("7b", "16", "nf4"), MemoryOptions()
    yield "70b nf4", _with_adapter("70b", "64", "nf4"), MemoryOptions(offload_master=True)
    if "pipedream" in FEATURES:
        from hf_hotspa.features.pipedream.mode import PipeDream

        for model, pipedream in (("7b", PipeDream()), ("tiny", PipeDream(True)), ("7b nf4", PipeDream())):
            sizes = _with_adapter("7b", "16", "nf4") if "nf4" in model else models()[model]
            yield f"{model} pipedream", sizes, MemoryOptions(features=(pipedream,))
    for optim in ("adamw_8bit", "adamw_torch_4bit", "sgd", "ademamix_8bit"):
        for model in ("gemma", "tiny tied") if optim == "adamw_8bit" else ("70b",):
            yield f"{model} {optim}", models()[model], MemoryOptions(optimizer_states()[optim])
    for name, options in {
        "dpo": {"scoring": Scoring(2, reference=True)},
        "offload": {"offload_master": True, "scoring": Scoring(1, reference=True)},
        "second source": {"weight_copies": 2},
        "small buffers": {"switch_bytes": 1000},
        "measured": {"activation_bytes": {1: 3e5, 2: 1.6e5}, "end_bytes": {1: 7e4, 2: 3.7e4, 4: 9e3}},
        "1f1b": {"schedule": "1f1b"},
        "gpipe": {"schedule": "gpipe", "logit_copies": 3.0},
        "ulysses": {"context_parallel": "ulysses"},
        "allgather": {"context_parallel": "allgather"},
        "ring": {"context_parallel": "ring"},
    }.items():
        yield f"70b {name}", of_70b, MemoryOptions(**options)  # type: ignore[arg-type]
    yield "mixture dpo", models()["mixture"], MemoryOptions(scoring=Scoring(2, reference=True), schedule="own")
    yield "tiny 1f1b", models()["tiny"], MemoryOptions(schedule="1f1b", activation_bytes={2: 999.5})


def _applies(strategy: Strategy, sizes: ModelSizes, options: MemoryOptions) -> bool:
    if options.features and (
        strategy.pp == 1 or strategy != Strategy(strategy.dp, strategy.tp, strategy.pp, strategy.sp, strategy.rc)
    ):
        return False
    if strategy.cp > 1 and options.context_parallel == "ulysses" and strategy.cp * strategy.tp > 8:
        return False
    supported = replace(sizes.shape, ck_unsupported_reason=None, z_unsupported_reason=None, rc_unsupported_reason=None)
    return strategy.unsupported_reason(supported) is None


def _weighted(numbers: Sequence[float]) -> float:
    return math.fsum(number * weight for weight, number in enumerate(numbers, 1))


def memory_row(strategy: Strategy, model: MemoryModel) -> list[float]:
    """Parts of the bytes; packs and tokens in flight; the arena; the longest packs within limits."""
    arena = model.arena_bytes(strategy)
    buckets = [Bucket(strategy, 0, 2048), Bucket(strategy, 3000, 4096 if strategy.pp == 1 else 700)]
    stages = [
        stage
        for bucket in buckets
        for num_packs in (None, 3)
        for given in (0, 2 * arena)
        for stage in model.stages(bucket, num_packs, given)
    ]
    parts = [_weighted([stage.parts()[name] for stage in stages]) for name in stages[0].parts()]
    tokens = [_weighted([x for s in stages for x in (s.stage, s.in_flight, s.held_tokens, s.pack_tokens)])]
    full = model.breakdown(strategy, 5000, arena_bytes=arena).total
    assert full == max(stage.total for stage in model.stages(Bucket(strategy, 0, 5000), None, arena))
    packs = [
        model.largest_pack(strategy, limit, longest=longest, num_packs=num_packs, arena_bytes=given)
        for limit in (full * 1.0371, 24.3 * GIB, 79.1 * GIB)
        for longest, num_packs in ((0, None), (4000, 2), (None, None))
        for given in (0, arena)
    ]
    return [*parts, *tokens, float(arena), _weighted(packs)]


EXCHANGES = {(cp, tp): Exchanges(Hop(1e-5 * cp, 1e-8), Hop(2e-5, 3e-8 * tp)) for cp in (2, 4) for tp in (1, 2)}


def time_cases() -> Iterator[tuple[str, TimeModel]]:
    """Name and model of each case of the time model, with the streams of fully sharded strategies."""
    for name, sizes in models().items():
        yield name, _of_hardware(sizes)
    for name, given in (("7b r=16", ("7b", "16", None)), ("70b nf4", ("70b", "64", "nf4"))):
        yield name, _of_hardware(_with_adapter(*given))
    of_7b, of_70b, mixture = (_of_hardware(models()[name]) for name in ("7b", "70b", "mixture"))
    for schedule in ("own", "1f1b", "gpipe"):
        yield f"7b {schedule}", replace(of_7b, schedule=schedule)
    for way in ("ulysses", "allgather", "ring"):
        yield f"70b {way}", replace(of_70b, context_parallel=way)
    yield "70b measured exchanges", replace(of_70b, context_exchanges=EXCHANGES, devices_per_node=4)
    yield "7b scoring", replace(of_7b, forwards=2, fixed_s=0.25)
    factors = {
        "phase_factors": {(1, 1, 1): 1.1, (2, 1, 1): 0.9, (1, 1, 2): 1.3, (2, 1, 2): 1.4},
        "pipeline_factor": 1.05,
    }
    yield "7b factors", replace(of_7b, **factors, forward_share=0.5)  # type: ignore[arg-type]
    yield "7b two slots", replace(of_7b, slots=2.5)
    yield "mixture five slots", replace(mixture, slots=5.0, forwards=1)
    yield "7b cuts", replace(of_7b, cut_by=3e-4)
    step_times = tuple(tuple(100 + 7 * stage for stage in range(depth)) for depth in (1, 2, 4))
    yield "7b slow stages", replace(of_7b, cut=replace(of_7b.cut, step_times=step_times))
    uneven = StageCosts(tuple(90 + 3 * (layer % 5) for layer in range(32)), 400, 20)
    yield "7b uneven layers", replace(of_7b, cut=uneven)
    bare = TimeModel("given", uneven, {tp: Cost(1e-10, 2e-6 / tp, 1e-3) for tp in (1, 2, 4)}, schedule="own")
    yield "given costs", bare


def _of_hardware(sizes: ModelSizes) -> TimeModel:
    hardware = replace(load_hardware("a100-80g"), devices_per_node=4)
    options = MemoryOptions(compute_dtype=sizes.compute_dtype)
    return CostModel.of_hardware(hardware, sizes, options, 8).time


def _packs(strategy: Strategy, number: int, most: int) -> list[list[list[int]]]:
    """Mixed packs for each replica, of up to `most` tokens."""
    state = 12345
    replicas: list[list[list[int]]] = []
    for replica in range(strategy.dp):
        packs = []
        for _ in range(number + (0 if strategy.keeps_step or strategy.z else replica % 2)):
            state = (state * 1103515245 + 12345) % (1 << 31)
            first = 1 + state % most
            packs.append([first, *([(most - first) // 2 + 1] if state % 3 else [])])
        replicas.append(packs)
    return replicas


def time_row(strategy: Strategy, model: TimeModel) -> list[float]:
    """Costs of stages and of sends; seconds of phases with devices of their own and with shared cores."""
    costs = [*model.stage_costs(strategy), *model.rank_costs(strategy), model.different_costs(strategy)[1]]
    hop = model.hop(strategy)
    row = [_weighted([getattr(cost, name) for cost in costs]) for name in ("a", "b", "c")]
    row += [hop.latency_s + 1e3 * hop.token_s, model.pair_cost(strategy.tp)]
    for number, most, limit in ((4, 1500, None), (3, 700, 2500)):
        packs = _packs(strategy, number, most)
        seconds = [model.phase_seconds(strategy, packs, limit), model.phase_seconds(strategy, packs, limit, enough=0.1)]
        if not strategy.v > 1:
            seconds.append(replace(model, slots=min(model.slots, 3.0)).phase_seconds(strategy, packs, limit))
        row += [_weighted(seconds)]
    return row


def rows() -> dict[str, dict[str, list[float]]]:
    """All numbers, by case and strategy."""
    table: dict[str, dict[str, list[float]]] = {}
    for name, sizes, options in memory_cases():
        model = MemoryModel(sizes, 8, options)
        table[f"bytes of {name}"] = {
            str(strategy): memory_row(strategy, model) for strategy in STRATEGIES if _applies(strategy, sizes, options)
        }
    for name, time in time_cases():
        shape = time.shape or models()["7b"].shape
        usable = [
            strategy
            for strategy in STRATEGIES
            if strategy.tp in time.layers
            and _applies(strategy, ModelSizes(shape), MemoryOptions(context_parallel=time.context_parallel))
            and (time.streams is not None or not strategy.z)
            and not (time.schedule in ("1f1b", "gpipe") and strategy.ck and strategy.pp > 1)
            and not (time.schedule == "gpipe" and strategy.v > 1)
        ]
        table[f"seconds of {name}"] = {str(strategy): time_row(strategy, time) for strategy in usable}
    table["seconds of switches"] = switches()
    return table


def switches() -> dict[str, list[float]]:
    """Seconds of switches and of streamed units, by model."""
    cluster = Cluster(8, 4, 3e11, 2.5e10, None, 25e-6)
    found = {}
    cases = {**models(), "7b nf4": _with_adapter("7b", "16", "nf4"), "7b r=16": _with_adapter("7b", "16")}
    for name, sizes in cases.items():
        streams = Streams(sizes, cluster)
        seconds = estimate(STRATEGIES, sizes, cluster, fixed_s=0.01).values()
        sharded = [x for s in STRATEGIES if s.z for x in (streams.pack_s(s, 2, 1), streams.once_s(s))]
        numbers = [sizes.num_parameters, sizes.num_trained, sizes.weight_bytes, sizes.layer_bytes]
        found[name] = [_weighted(list(seconds)), _weighted(sharded), *map(float, numbers)]
    return found


def rounded(table: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, list[float | int]]]:
    """The table as it is written: 14 digits, whole numbers without a point."""
    return {
        case: {name: [_short(number) for number in row] for name, row in of_case.items()}
        for case, of_case in table.items()
    }


def _short(number: float) -> float | int:
    short = float(f"{number:.14g}")
    return int(short) if short.is_integer() else short


def main() -> None:
    lines = []
    for case, of_case in rounded(rows()).items():
        of_rows = ",\n".join(
            f"{json.dumps(name)}:{json.dumps(row, separators=(',', ':'))}" for name, row in of_case.items()
        )
        lines.append(f"{json.dumps(case)}:{{\n{of_rows}}}")
    TABLE.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
