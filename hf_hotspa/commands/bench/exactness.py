"""Whether strategies are exact here: loss and gradients of a small model, against one process, one row at a time.

In fp64, in which a wrong sum, a row in another's attention or a lost message is far above rounding. Stock norms cast to
fp32, so agreement ends at about 1e-8. Runs before any speed is measured: fast and wrong is of no use.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_hotspa.commands.bench.workload import llama, make_rows
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.parallel.backends import host_group
from hf_hotspa.search.offers import context_strategies
from hf_hotspa.strategy import Strategy, legal_strategies, parse_buckets

LENGTHS = (3, 9, 40, 5, 17, 12, 33, 2, 24, 7)
"""Tokens of the rows."""
_LONGEST, _PACK, _VOCABULARY = max(LENGTHS), 64, 96
_SHORT = 16  # tokens up to which rows are short, if a pool has two strategies
MOST = 12  # pools


def pools(ranks: int) -> list[str]:
    """Returns the strategies that are checked, as `hotspa_strategies`: every one of plain degrees and of cp, full shards,
    and pools that switch inside the mini-batch; at most `MOST`."""
    shape = describe_model(_model()).shape
    plain = legal_strategies(ranks, shape)
    sharded = [s for s in (Strategy(ranks, z=3),) if ranks > 1 and s.unsupported_reason(shape) is None]
    alone = [*plain, *context_strategies(plain, shape), *sharded]
    wide = str(Strategy(ranks))
    mixed = [f"{wide}:{_SHORT}@{_PACK},{s}:{_LONGEST}@{_PACK}" for s in plain if str(s) != wide][-2:]
    return [*mixed, *(f"{s}:{_LONGEST}@{_PACK}" for s in alone)][:MOST]


def run(rank: int, world_size: int, cuda: bool) -> dict[str, Any]:
    """Checks all pools on this rank. Collective. Returns, by pool, the relative errors of the `loss` and of the
    `gradient` that differs most, of all ranks, and that gradient's `parameter`."""
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    rows = [row | {"labels": row["input_ids"]} for row in make_rows(LENGTHS, _VOCABULARY, seed=3)]
    loss, gradients = _reference(_model(), rows)
    agreement, errors = Agreement(host_group(), rank), dict[str, Any]()
    for pool in pools(world_size):
        engine = HotSPaEngine(_model(), parse_buckets(pool), EngineOptions(), device=device)
        shape = engine.description.shape
        collator = PackedBucketCollator(
            engine.buckets, rank=rank, vocab_size=shape.vocab_size, quadratic_cost=shape.quadratic_cost
        )
        own_loss = torch.tensor(engine.forward_backward(collator(rows)).loss, dtype=torch.float64)
        own = engine.full_gradients()
        engine.close()
        off = [_relative(own_loss, loss), *(_relative(own[name], gradients[name]) for name in gradients)]
        of_loss, *of_gradients = agreement.gather(off).amax(0).tolist()
        worst, parameter = max(zip(of_gradients, gradients, strict=True))
        errors[pool] = {"loss": of_loss, "gradient": worst, "parameter": parameter}
    return errors


def _model() -> Any:
    torch.manual_seed(0)
    config = llama(64, 4, _VOCABULARY, _LONGEST) | {"num_attention_heads": 8, "num_key_value_heads": 8}
    model_type = config.pop("model_type")
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).double()


def _reference(model: PreTrainedModel, rows: list[dict[str, list[int]]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain model in this process: the sum over all rows, each alone, over all labels."""
    labels, total = sum(len(row["labels"]) - 1 for row in rows), torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        loss = functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum") / labels
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters()}


def _relative(own: Tensor, expected: Tensor) -> float:
    """The largest float if `own` is not finite: NaN is smaller than no limit."""
    difference = torch.linalg.vector_norm(own.double().to(expected.device) - expected)
    error = difference / torch.linalg.vector_norm(expected).clamp_min(1e-12)
    return float(error.nan_to_num(nan=sys.float_info.max))
