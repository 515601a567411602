"""Random mixes of strategies, options, lengths and families, against the plain model in fp64, one row at a time in one process.

A seed draws a family, adapters or frozen layers, one to three strategies with any options, bucket edges, rows, engine options and
what is done: which rows each mini-batch has (and so which strategies follow each other), whether gradients are added up, whether
the weights move in between, and whether logits are evaluated. A mix that is refused by name counts as refused; anything else must
be exact. The draws know nothing of families, but that every fourth mix is of one with experts, which most of its strategies
divide over ranks (ep). `python -m tests.strategy_fuzz 0-39` runs the seeds 0 to 39.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import HotspaError
from tests.family_sweep import gradient_errors
from tests.fuzzing import Fuzzer, outcomes, simpler_pools, with_defaults
from tests.lora import tiny_lora
from tests.oracle import exact_in_double, reference_step, relative_error
from tests.tiny_families import planned_families, tiny_model_of
from tests.worlds import make_engine, make_mini_batch

EXACT = 1e-10
"""Relative error of loss, logits and gradients in fp64, with room for products of long sums in another order."""
REASONS = (
    "given whole sequences", "look at whole sequences", "look at whole rows", "has no pipeline plan", "shards that work alone",
    "works on whole rows", "has a sliding window", "experts are adapted", "+z2 and +z3 go in order",
)  # fmt: skip
"""Why a mix may be refused: a model, or a method, that a strategy does not fit."""
_COMMON = ("llama", "qwen3", "gemma2", "phi3", "olmo2", "mistral", "mixtral", "qwen3_moe", "gpt_oss", "cohere2")
_MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "ernie4_5_moe")
_UNWINDOWED = ("llama", "qwen3", "olmo2", "qwen3_moe")
"""Some that a ring takes."""
_ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 3},
    {"r": 2, "bias": "all", "use_rslora": True},
    {"r": 4, "bias": "lora_only", "rank_pattern": {"q_proj": 5}},
    {"r": 2, "layers_to_transform": [3], "target_modules": ["o_proj", "v_proj"]},
)
STEP = 0.05
"""The rate of the steps between mini-batches."""


@dataclass(frozen=True)
class Mix:
    """What one seed draws.

    Attributes:
        buckets: In the user's grammar.
        parts: Of each mini-batch which rows it has: `all`, or the `short` or `long` half.
        adds: Whether the gradients of the mini-batches add up.
        moves: Whether the weights make a step after each mini-batch.
        evaluates: Whether loss and logits of the last mini-batch are also evaluated.
        adapters: Changes of the `LoraConfig`; without any there are no adapters.
        frozen: How many of every five parameters are frozen.
        options: Of the engine.
    """

    world_size: int = 2
    family: str = "llama"
    buckets: str = "dp2:64@64"
    lengths: tuple[int, ...] = (5, 9)
    parts: tuple[str, ...] = ("all",)
    adds: bool = False
    moves: bool = False
    evaluates: bool = False
    adapters: dict[str, Any] = field(default_factory=dict)
    frozen: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def simpler(self) -> Iterator["Mix"]:
        """One bucket, strategy option, mini-batch, engine option or half of the rows less, or a default in a field's place."""
        yield from (replace(self, buckets=pool) for pool in simpler_pools(self.buckets))
        yield from with_defaults(self)
        if len(self.lengths) > 1:
            half = len(self.lengths) // 2
            yield from (replace(self, lengths=rows) for rows in (self.lengths[:half], self.lengths[half:]))
        if len(self.parts) > 1:
            yield from (replace(self, parts=self.parts[:at] + self.parts[at + 1 :]) for at in range(len(self.parts)))
        for name in self.options:
            yield replace(self, options={key: value for key, value in self.options.items() if key != name})


def drawn_strategy(rng: random.Random, world_size: int, divides: bool) -> str:
    """A strategy of a world with any options; where experts may be divided, most divide them."""
    axes = ["dp", "cp", "tp", "pp"]
    degrees = dict.fromkeys(axes, 1)
    for prime in {1: [], 2: [2], 3: [3], 4: [2, 2]}[world_size]:
        degrees[rng.choice(axes)] *= prime
    name = "".join(f"{axis}{degrees[axis]}" for axis in axes if degrees[axis] > 1) or "dp1"
    sizes = [ep for ep in (2, 4) if world_size // degrees["pp"] % ep == 0]
    if divides := divides and bool(sizes) and rng.random() < 0.8:
        name += f"ep{rng.choice(sizes)}"
    if degrees["tp"] > 1 and rng.random() < 0.4:
        name += "+sp"
    if rng.random() < 0.3:
        name += rng.choice(("+rc", "+rc2"))
    if divides:
        return name
    chunks, sharded = rng.random() < 0.35, world_size > 1 and rng.random() < 0.25
    if chunks:
        name += f"+ck{rng.randint(1, 20)}"
    if chunks and degrees["pp"] == degrees["cp"] == 1 and not sharded:
        name += rng.choice(("", "+kg1", "+kg2")) + rng.choice(("", "+kh"))
    if sharded:
        name += rng.choice(("+z2", "+z3"))
    if degrees["pp"] == 2 and not sharded and rng.random() < 0.5:
        name += "+v2"
    return name


def _drawn_options(rng: random.Random, names: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["overlap_load"] = options["overlap_return"] = rng.random() < 0.8
    if rng.random() < 0.3:
        options["second_source"] = True
    if rng.random() < 0.3:
        ways = ("allgather", "ring") if any("cp3" in n for n in names) else ("ulysses", "allgather", "ring")
        options["context_parallel"] = rng.choice(ways)  # three ranks divide no eight heads
    if rng.random() < 0.3:
        options["loss_chunk_tokens"] = rng.randint(1, 9)
    if rng.random() < 0.2:
        options["offload_master"] = True
    if rng.random() < 0.3:
        options["planner"] = rng.choice(("algorithm1", "round_robin", "first_owner"))
    if rng.random() < 0.3:
        options["staging_bytes"] = rng.choice((1 << 10, 1 << 14))
        if any("+ck" in n and "+z" in n for n in names):
            # every chunk moves all units: in rounds of half a KiB that is minutes
            options["staging_bytes"] = 1 << 16
    return options


def draw(seed: int) -> Mix:
    rng = random.Random(seed)
    world_size = rng.choice((2, 3, 4, 4, 4))
    divides = rng.random() < 0.25
    adapted = rng.random() < 0.25
    family = rng.choice(_COMMON) if adapted or rng.random() < 0.7 else rng.choice(sorted(planned_families()))
    family = rng.choice(_MIXTURES) if divides else family
    edges = sorted(rng.sample(range(4, 60), rng.randint(1, 3)))
    names: list[str] = []
    while len(names) < len(edges):
        name = drawn_strategy(rng, world_size, divides)
        names += [] if name in names else [name]
    lengths = [
        rng.randint(1, edges[-1]) if rng.random() < 0.5 else rng.randint(1, max(2, edges[0]))
        for _ in range(rng.randint(2, 14))
    ]
    mix = Mix(
        world_size=world_size,
        family=family,
        buckets=",".join(f"{n}:{edge}@{edge + rng.randint(0, edge)}" for n, edge in zip(names, edges, strict=True)),
        lengths=tuple(lengths),
        parts=tuple(rng.choice(("all", "all", "short", "long")) for _ in range(rng.randint(1, 3))),
        adds=rng.random() < 0.25,
        moves=rng.random() < 0.5,
        evaluates=rng.random() < 0.4,
        adapters=rng.choice(_ADAPTERS) if adapted else {},
        frozen=0 if adapted else rng.choice((0, 0, 0, 1, 3)),
        options=_drawn_options(rng, names),
        seed=seed,
    )
    if seed % 2 == 0 and family in _UNWINDOWED and any("cp" in name for name in names):
        mix.options.setdefault("context_parallel", "ring")
    if seed % 5 == 4:
        mix.options["label_smoothing"] = 0.1
    return mix


def _rows(mix: Mix, vocab_size: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(mix.seed)
    rows = []
    for index, length in enumerate(mix.lengths):
        ids = torch.randint(0, vocab_size, (length,), generator=generator)
        labels = ids.clone()
        if index % 3 == 1:
            labels[: length // 2] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    rows.append({"input_ids": [1, 2, 3], "labels": [1, 2, 3]})  # something always has a label
    return rows


def _part(rows: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    by_length = sorted(rows[:-1], key=lambda row: len(row["input_ids"]))
    half = (len(by_length) + 1) // 2
    return [*{"all": by_length, "short": by_length[:half], "long": by_length[half:]}[part], rows[-1]]


def _model(mix: Mix) -> Any:
    if mix.adapters:
        return tiny_lora(mix.family, torch.float64, **mix.adapters)
    model = tiny_model_of(mix.family)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 5 >= mix.frozen)
    return model


class _Plain:
    """What the plain model makes of the mini-batches; on rank 0 alone, as ranks share few cores."""

    def __init__(self, model: Any, mix: Mix) -> None:
        self.model, self.mix = copy.deepcopy(model), mix
        self.gradients: dict[str, Tensor] = {}

    def step(self, rows: list[dict[str, Any]]) -> float:
        """The loss of a mini-batch; `gradients` are those of what is trained."""
        loss, found = reference_step(self.model, rows, self.mix.options.get("label_smoothing", 0.0))
        trained = {n for n, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        before = self.gradients if self.mix.adds else {}
        self.gradients = {n: found[n] + before.get(n, 0.0) for n in trained}
        return loss

    def move(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self.gradients:
                    parameter -= STEP * self.gradients[name]

    def logits(self, row: dict[str, Any]) -> Tensor:
        with torch.no_grad(), exact_in_double(torch.float64):
            found: Tensor = self.model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
        return found


def run_mix(rank: int, world_size: int, mix: Mix, folder: str = "") -> str:
    """`refused: ...`, `exact` or `WRONG: ...`; only rank 0 compares."""
    try:
        model = _model(mix)
        text = model.config.get_text_config()
        all_rows = _rows(mix, getattr(text, "unpadded_vocab_size", None) or text.vocab_size)
        plain = _Plain(model, mix) if rank == 0 else None
        engine = make_engine(model, mix.buckets, **mix.options)
        batches = [make_mini_batch(engine, _part(all_rows, part)) for part in mix.parts]
    except HotspaError as error:
        return f"refused: {str(error).splitlines()[0]}"
    groups = engine.parameter_groups()
    optimizer = torch.optim.SGD(groups, lr=STEP) if any(group["params"] for group in groups) else None
    wrong: list[str] = []
    for number, (part, batch) in enumerate(zip(mix.parts, batches, strict=True)):
        with exact_in_double(torch.float64):
            report = engine.forward_backward(batch, add=mix.adds and number > 0)
        got = engine.full_gradients()
        if plain is not None:
            loss = plain.step(_part(all_rows, part))
            wrong += _differences(f"mini-batch {number}", abs(report.loss - loss) / abs(loss), got, plain.gradients)
        if mix.moves:
            if optimizer is not None:
                optimizer.step()
            if plain is not None:
                plain.move()
    if mix.evaluates:
        wrong += _evaluated(engine, batches[-1], _part(all_rows, mix.parts[-1]), plain)
    engine.close()
    return f"WRONG: {'; '.join(wrong)}" if wrong else "exact"


def _differences(where: str, off: float, got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    if got.keys() != expected.keys():
        return [f"{where}: gradients of {sorted(got.keys() ^ expected.keys())[:4]}"]
    errors = gradient_errors(got, expected)
    name = max(errors, key=lambda key: errors[key])
    bad = not (errors[name] <= EXACT and off <= EXACT)
    return [f"{where}: loss {off:.1e}, {name} {errors[name]:.1e}"] if bad else []


def _evaluated(engine: HotSPaEngine, batch: Any, rows: list[dict[str, Any]], plain: _Plain | None) -> list[str]:
    with exact_in_double(torch.float64), engine.evaluation() as evaluation:
        found = evaluation.run(batch, with_logits=True)
    if plain is None:
        return []
    errors = {row: relative_error(logits, plain.logits(rows[row])) for (row, _), logits in found.logits.items()}
    if errors.keys() != set(range(len(rows))):
        return [f"logits of rows {sorted(errors)}"]
    bad = {row: error for row, error in errors.items() if not error <= EXACT}
    loss = plain.step(rows)
    off = abs(found.loss_sum / found.num_labels - loss) / abs(loss)
    return [f"evaluation: loss {off:.1e}, logits {bad}"] if bad or not off <= EXACT else []


FUZZER = Fuzzer(draw, lambda mixes, seconds: outcomes(run_mix, mixes, timeout=seconds), REASONS)

if __name__ == "__main__":
    FUZZER.main()
