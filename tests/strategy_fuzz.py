"""Random mixes of strategies, options, lengths and families, against the plain model in fp64.

`python -m tests.strategy_fuzz 0 40` runs the seeds 0 to 39, each in a world of two to four gloo ranks: a family, one to
three strategies with any options, bucket edges, rows and engine options are drawn; two mini-batches are trained. A mix that is
refused by name counts as refused; anything else must be exact. The draws know nothing of families, but that every fourth mix
is of one with experts, which most of its strategies divide over ranks (ep).
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_hotspa.errors import HotspaError
from tests.family_sweep import gradient_errors
from tests.harness import WorldError, run_ranks
from tests.oracle import exact_in_double, reference_step
from tests.tiny_families import planned_families, tiny_model_of
from tests.worlds import make_engine, make_mini_batch

EXACT = 1e-10
"""Relative error of loss and gradients in fp64, with room for products of long sums in another order."""
_COMMON = ("llama", "qwen3", "gemma2", "phi3", "olmo2", "mistral", "mixtral", "qwen3_moe", "gpt_oss", "cohere2")
_MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "ernie4_5_moe", "olmoe", "granitemoe")


@dataclass(frozen=True)
class Mix:
    """What one seed draws."""

    seed: int
    world_size: int
    family: str
    buckets: str
    lengths: tuple[int, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        said = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.seed}: {self.family} on {self.world_size}, {self.buckets}, lengths {list(self.lengths)} {said}"


def _strategy(rng: random.Random, world_size: int, divides: bool) -> str:
    axes = ["dp", "cp", "tp", "pp"]
    degrees = dict.fromkeys(axes, 1)
    for prime in {2: [2], 3: [3], 4: [2, 2]}[world_size]:
        degrees[rng.choice(axes)] *= prime
    name = "".join(f"{axis}{degrees[axis]}" for axis in axes)
    sizes = [ep for ep in (2, 4) if world_size // degrees["pp"] % ep == 0]
    if divides := divides and bool(sizes) and rng.random() < 0.8:
        name += f"ep{rng.choice(sizes)}"
    if degrees["tp"] > 1 and rng.random() < 0.4:
        name += "+sp"
    if rng.random() < 0.3:
        name += rng.choice(("+rc", "+rc2"))
    if divides:
        return name
    chunks, sharded = rng.random() < 0.35, rng.random() < 0.25
    if chunks:
        name += f"+ck{rng.randint(1, 20)}"
    if chunks and degrees["pp"] == 1 and not sharded:
        name += rng.choice(("", "+kg1", "+kg2")) + rng.choice(("", "+kh"))
    if sharded:
        name += rng.choice(("+z2", "+z3"))
    if degrees["pp"] == 2 and not sharded and _peeked(rng) < 0.5:
        name += "+v2"
    return name


def _peeked(rng: random.Random) -> float:
    """The number that comes next, and will come again: what older seeds draw stays what it was."""
    other = random.Random()
    other.setstate(rng.getstate())
    return other.random()


def draw(seed: int) -> Mix:
    """The mix of a seed."""
    rng = random.Random(seed)
    world_size = rng.choice((2, 3, 4, 4, 4))
    divides = rng.random() < 0.25
    family = rng.choice(_COMMON) if rng.random() < 0.6 else rng.choice(sorted(planned_families()))
    family = rng.choice(_MIXTURES) if divides else family
    edges = sorted(rng.sample(range(4, 60), rng.randint(1, 3)))
    names: list[str] = []
    while len(names) < len(edges):
        name = _strategy(rng, world_size, divides)
        names += [] if name in names else [name]
    buckets = ",".join(f"{n}:{edge}@{edge + rng.randint(0, edge)}" for n, edge in zip(names, edges, strict=True))
    lengths = [
        rng.randint(1, edges[-1]) if rng.random() < 0.5 else rng.randint(1, max(2, edges[0]))
        for _ in range(rng.randint(1, 14))
    ]
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["overlap_load"] = options["overlap_return"] = rng.random() < 0.8
    if rng.random() < 0.3:
        options["second_source"] = True
    if rng.random() < 0.3:
        options["context_parallel"] = rng.choice(("ulysses", "allgather", "ring"))
    if rng.random() < 0.3:
        options["loss_chunk_tokens"] = rng.randint(1, 9)
    if rng.random() < 0.2:
        options["offload_master"] = True
    if rng.random() < 0.3:
        options["planner"] = rng.choice(("algorithm1", "round_robin", "first_owner"))
    if rng.random() < 0.3:
        options["staging_bytes"] = rng.choice((1 << 10, 1 << 14))
        if any("pp1" not in n and "+ck" in n and "+z" in n for n in names):
            # every chunk moves all units: in rounds of half a KiB that is minutes
            options["staging_bytes"] = 1 << 16
    return Mix(seed, world_size, family, buckets, tuple(lengths), options)


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


def run_mix(rank: int, world_size: int, mix: Mix) -> str:
    """`refused: ...`, `exact` or `WRONG: ...`; on rank 0, the others return an empty text."""
    try:
        model = tiny_model_of(mix.family)
        text = model.config.get_text_config()
        vocab_size = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
        rows = _rows(mix, vocab_size)
        engine = make_engine(model, mix.buckets, **mix.options)
        mini_batch = make_mini_batch(engine, rows)
    except HotspaError as error:
        return f"refused: {str(error).splitlines()[0]}"
    loss, gradients = reference_step(model, rows)
    model.zero_grad(set_to_none=True)
    worst: list[str] = []
    for step in range(2):
        with exact_in_double(torch.float64):
            try:
                report = engine.forward_backward(mini_batch)
            except HotspaError as error:
                return f"refused late: {str(error).splitlines()[0]}"
        got = engine.full_gradients()
        errors = gradient_errors(got, gradients)
        name = max(errors, key=lambda key: errors[key])
        off = abs(report.loss - loss) / abs(loss)
        if errors[name] > EXACT or off > EXACT:
            worst.append(f"step {step}: loss {off:.1e}, {name} {errors[name]:.1e}")
    engine.close()
    return f"WRONG: {'; '.join(worst)}" if worst else "exact"


def outcome_of(seed: int, timeout: float = 120.0) -> tuple[Mix, str]:
    """The mix of a seed, and what became of it on the worst rank."""
    mix = draw(seed)
    try:
        outcomes = run_ranks(mix.world_size, run_mix, mix, timeout=timeout)
    except WorldError as error:
        return mix, f"FAILED: {str(error)[-1800:]}"
    wrong = [text for text in outcomes if text != "exact"]
    return mix, wrong[0] if wrong else "exact"


def main(arguments: Sequence[str]) -> int:
    first, last = int(arguments[0]), int(arguments[1])
    counts: dict[str, int] = {}
    for seed in range(first, last):
        mix, outcome = outcome_of(seed)
        kind = outcome.split(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
        print(f"{outcome if kind != 'exact' else 'exact'} | {mix}", flush=True)
    print(counts)
    return int(any(kind not in ("exact", "refused") for kind in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
