"""The switched model: gradients are those of the plain model under DDP, whatever the loss is made of and however ranks differ."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hf_hotspa.errors import ModelError, UnsupportedError
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.calls import EveryToken
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.switched.scores import FIELDS, token_scores
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.lora import tiny_lora
from tests.oracle import exact_in_double, relative_error
from tests.switched import (
    batch_of,
    logits_of,
    loss_of_model,
    reference,
    rows_of,
    run_parts,
    scores,
    switched,
    worst,
)
from tests.tiny_families import tiny_model_of
from tests.worlds import from_rank_0

pytestmark = pytest.mark.gloo

Program = Callable[[object, int], Iterator[Tensor]]
"""Of a model and a rank, the losses whose backwards follow one another in a step."""

MIXES = {
    2: [
        "dp2:14@64,tp2:40@96,pp2:64@128",
        "cp2:14@64,tp2+sp:40@96,dp2+rc:64@96",
        "dp2+z3:24@64,pp2+v2:64@96",
        "dp2+ck9:24@64,tp2+rc+ck7+kh:64@96",
    ],
    4: [
        "dp4:14@64,dp2tp2:24@64,cp2dp2:40@96,tp2pp2:64@128",
        "dp4+z2:14@64,cp2tp2:40@96,pp4:64@96",
        "dp2tp2+sp+rc:14@64,cp4:40@96,dp2pp2+v2:64@96",
        "dp4+z3:14@64,cp2pp2+ck9:40@96,tp4+ck13:64@96",
    ],
}


def _rows(model, rank, num_rows=5, seed=0):
    return batch_of(rows_of(rank, model, num_rows, seed=seed))


def loss(model, rank):
    yield loss_of_model(model, _rows(model, rank))


def factors_by_rank(model, rank):
    yield (1.0 + rank) * loss_of_model(model, _rows(model, rank))


def rows_by_rank(model, rank):
    """The last rank has none at all."""
    num_rows = 0 if rank == dist.get_world_size() - 1 else 3 + rank
    out = loss_of_model(model, _rows(model, rank, num_rows)) if num_rows or isinstance(model, SwitchedModel) else None
    yield torch.zeros((), dtype=torch.float64) if out is None or not num_rows else out


def pairs(model, rank):
    """A coupling of rows, as of DPO, and of all rows of the batch, as a normaliser does."""
    log_probs, entropy = scores(model, _rows(model, rank, 6))
    of_row = log_probs.sum(1)
    margin = of_row[0::2] - of_row[1::2]
    yield -functional.logsigmoid(0.1 * margin).mean() + (of_row.square().mean() + 0.3 * entropy.sum()) / 100


def mean_of_log_probs(model, rank):
    """A mean over the labels of each rank."""
    batch = _rows(model, rank)
    yield -scores(model, batch)[0].sum() / (batch["labels"][:, 1:] != -100).sum()


def sum_of_log_probs(model, rank):
    yield -scores(model, _rows(model, rank))[0].sum() / 117


def expected_sum(model, rank):
    if isinstance(model, SwitchedModel):
        model.assumptions.expects = EveryToken()
    return sum_of_log_probs(model, rank)


def sum_of_probabilities(model, rank):
    batch = _rows(model, rank)
    yield scores(model, batch)[0][batch["labels"][:, 1:] != -100].exp().sum() / 117


def logits(model, rank):
    batch = _rows(model, rank)
    unlabelled = {name: batch[name] for name in ("input_ids", "attention_mask")}
    yield (logits_of(model, unlabelled) * batch["attention_mask"][..., None]).square().mean()


def everything(model, rank):
    """The loss, log-probabilities of another batch and logits of the first, in one backward."""
    world, batch = dist.get_world_size(), _rows(model, rank)
    own, of_logits = logits_of(model, batch, with_loss=True)
    log_probs, _ = scores(model, _rows(model, (rank + 1) % world, seed=7))
    yield own + 0.01 * log_probs.sum() + (of_logits * batch["attention_mask"][..., None])[:, 0].square().mean()


def accumulation(model, rank):
    for seed in range(3):
        yield loss_of_model(model, _rows(model, rank, 3, seed), num_items_in_batch=50 + rank) / 3


def left_padding(model, rank):
    yield loss_of_model(model, batch_of(rows_of(rank, model), left=True))


def documents_in_a_row(model, rank):
    """Padding-free: one row of several documents, the first token of each has a label and is predicted from the one before."""
    rows = rows_of(rank, model, 4)
    ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
    labels = torch.tensor([[label for row in rows for label in row["labels"]]])
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    if isinstance(model, SwitchedModel):
        yield model(ids, position_ids=positions, labels=labels).loss
    else:  # row by row, so that no document sees another
        alone = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0] for row in rows]
        yield functional.cross_entropy(torch.cat(alone)[:-1], labels[0, 1:], ignore_index=-100)


def shifted_labels(model, rank):
    batch = _rows(model, rank)
    labels = batch.pop("labels")
    batch["shift_labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    given = {} if isinstance(model, SwitchedModel) else {"use_cache": False, "labels": labels}
    yield model(**batch, **given).loss


PROGRAMS: list[tuple[Program, dict[str, int]]] = [  # with the passes that each takes
    (loss, {"training": 1}),
    (factors_by_rank, {"training": 2}),
    (rows_by_rank, {"training": 1}),
    (pairs, {"scoring": 1, "training": 1}),
    (mean_of_log_probs, {"scoring": 1, "training": 1}),
    (sum_of_log_probs, {"scoring": 1, "training": 1}),
    (expected_sum, {"training": 1}),
    (sum_of_probabilities, {"training": 2}),  # others are expected
    (expected_sum, {"scoring": 1, "training": 1}),  # nothing is any more
    (logits, {"scoring": 1, "training": 1}),
    (
        everything,
        {"scoring": 2, "training": 1},
    ),  # logits come with the loss now, as they were looked at in the step before
    (accumulation, {"scoring": 3, "training": 1}),  # ... and in vain here
    (accumulation, {"training": 3}),
    (left_padding, {"training": 1}),
    (documents_in_a_row, {"training": 1}),
    (shifted_labels, {"training": 1}),
]
FEW = (0, 3, 6, 9)


def _expected(plain, program, world_size):
    """From rank 0: the gradients of the mean over ranks."""
    return from_rank_0(
        lambda: reference(
            plain,
            [(lambda model, r: sum(program(model, r)), rank) for rank in range(world_size)],  # type: ignore[arg-type]
        )
    )


def _run(model, program, rank):
    with exact_in_double(torch.float64):
        for value in program(model, rank):
            if value.requires_grad:
                value.backward()
        model.flush()
    return model.engine.full_gradients()


def mixes(rank, world_size, programs_of):
    """For each mix what its programs, by their numbers, came to."""
    plain = tiny_model("llama_gqa_bias", torch.float64)
    expected_of = cache(lambda program: _expected(plain, program, world_size))
    return [mix(rank, buckets, [PROGRAMS[i][0] for i in numbers], expected_of) for buckets, numbers in programs_of]


def mix(rank, buckets, programs, expected_of):
    model = switched(tiny_model("llama_gqa_bias", torch.float64), buckets)
    found = []
    for program in programs:
        before = dict(model._passes.counts)
        error = worst(_run(model, program, rank), expected_of(program))
        norm = torch.stack([g.norm() for g in model.engine.full_gradients().values()]).norm()
        passes = {kind: count - before[kind] for kind, count in model._passes.counts.items()}
        found.append((program.__name__, error, abs(model.engine.grad_norm - float(norm)) / float(norm), passes))
    model.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "few"),
    [(2, FEW[1::2]), *(pytest.param(ranks, FEW, marks=pytest.mark.slow) for ranks in (2, 4))],
)
def test_any_loss_under_any_mix(world_size, few):
    """Every program in the first mix of two ranks; few in the others. What passes a program needs hangs on no mix."""
    every = range(len(PROGRAMS))
    todo = [(b, every if (world_size, i) == (2, 0) else few) for i, b in enumerate(MIXES[world_size])]
    for (buckets, numbers), results in zip(todo, run_ranks(world_size, mixes, todo)[0], strict=True):
        for (name, error, norm, passes), (_, expected) in zip(results, (PROGRAMS[i] for i in numbers), strict=True):
            assert max(error, norm) <= 1e-11, (buckets, name)
            if buckets == todo[0][0]:
                assert {k: v for k, v in passes.items() if v} == expected, name


def under_ddp(rank, world_size):
    """DDP itself on the same ranks, its own batches; three steps of AdamW with clipping."""
    plain = DistributedDataParallel(tiny_model("llama_gqa_bias", torch.float64))
    model = switched(tiny_model("llama_gqa_bias", torch.float64), "dp2:24@64,tp2:64@96")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    losses, norms = [], []
    for step in range(3):
        batch = _rows(plain.module, rank, 4 + rank, seed=step)
        with exact_in_double(torch.float64):
            for is_loss in (True, False):
                for one in (plain, model):
                    value = loss_of_model(one, batch) if is_loss else scores(one, batch)[0].sum(1).square().mean() / 99
                    losses.append(float(value))
                    value.backward()
                norms += [
                    float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)),
                    float(model.clip_grad_norm_(0.5)),
                ]
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    model.write_back()
    for numbers in (losses, norms):
        assert numbers[0::2] == pytest.approx(numbers[1::2], rel=1e-11)
    pairs = zip(plain.module.parameters(), model.module.parameters(), strict=True)
    assert max(relative_error(b, a) for a, b in pairs) <= 1e-10
    model.close()


def announced(rank, world_size):
    """Accumulation is one pass where batches are announced."""
    plain = tiny_model("llama_gqa_bias", torch.float64)
    model = switched(tiny_model("llama_gqa_bias", torch.float64), "dp2:14@64,tp2:64@96")
    for program in (accumulation, _pairs_apart):
        expected = _expected(plain, program, world_size)
        apart = _run(model, program, rank)
        before = dict(model._passes.counts)
        num_items = 50 + rank if program is accumulation else None
        model.announce([_rows(plain, rank, 3 + (program is _pairs_apart), seed) for seed in range(3)], num_items)
        merged = _run(model, program, rank)
        passes = {kind: count - before[kind] for kind, count in model._passes.counts.items()}
        assert max(worst(apart, expected), worst(merged, expected)) <= 1e-11
        assert passes == {"scoring": int(program is _pairs_apart), "training": 1}
    model.close()


def _pairs_apart(model, rank):
    for seed in range(3):
        of_row = scores(model, _rows(model, rank, 4, seed))[0].sum(1)
        yield -functional.logsigmoid(0.1 * (of_row[0::2] - of_row[1::2])).mean() / 3


def dropout(rank, world_size, each_way):
    """By strategy and way the loss and the gradients, with attention dropout; and gradients without it.

    `each_way`: in one pass under each strategy, too, and not under the first one alone.
    """
    found = []
    for buckets in ("dp2:64@96", "tp2:64@96", "dp2+rc:24@64,cp2:64@96", "pp2+ck9:64@96"):
        for in_two_passes in (False, True) if each_way or not found else (True,):
            model = switched(tiny_model("llama_gqa_bias", torch.float64, attention_dropout=0.3), buckets, seed=7)
            batch = _rows(model.module, rank)
            count = (batch["labels"][:, 1:] != -100).sum()
            with exact_in_double(torch.float64):
                if in_two_passes:
                    value = -scores(model, batch)[0].sum() / count
                else:
                    value = model(**batch).loss
                value.backward()
                model.flush()
            found.append((float(value), model.engine.full_gradients()))
            model.close()
    plain = tiny_model("llama_gqa_bias", torch.float64)
    without = _expected(plain, loss, world_size)
    first = found[0]
    return (
        [(abs(value - first[0]) / abs(first[0]), worst(gradients, first[1])) for value, gradients in found],
        worst(first[1], without),
    )


@pytest.mark.parametrize("each_way", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_training_pass_drops_what_the_scoring_pass_dropped(each_way):
    for errors, without in run_ranks(2, dropout, each_way):
        assert max(max(pair) for pair in errors) <= 1e-11
        assert without > 1e-2


def preferences(model, rank, refer):
    batch = _rows(model, rank, 6)
    with torch.no_grad():
        of_reference = refer(model, batch)
    margin = scores(model, batch)[0].sum(1) - of_reference
    return -functional.logsigmoid(0.1 * (margin[0::2] - margin[1::2])).mean()


def _without(model, batch):
    peft = model.module if isinstance(model, SwitchedModel) else model
    with peft.disable_adapter():
        return scores(model, batch)[0].sum(1)


def references(rank, world_size, buckets, lora):
    """DPO whose reference is the model without its adapter, and one whose reference is a second model."""
    found = []
    plain, model = (
        tiny_lora("llama_gqa_bias", torch.float64, **lora),
        switched(tiny_lora("llama_gqa_bias", torch.float64, **lora), buckets),
    )

    def program(model, r):
        yield preferences(model, r, _without)

    expected = _expected(plain, program, world_size)
    for _ in range(2):
        found.append(worst(_run(model, program, rank), expected))
    message = ""
    try:
        with model.module.disable_adapter():
            model(**_rows(plain, rank))
    except UnsupportedError as wrong:
        message = str(wrong)
    model.close()

    plain, other = tiny_model("llama_gqa_bias", torch.float64), tiny_model("llama_gqa_bias", torch.float64, seed=5)
    model = switched(tiny_model("llama_gqa_bias", torch.float64), buckets)
    frozen = model.frozen(tiny_model("llama_gqa_bias", torch.float64, seed=5))
    frozen._head_fields = ("log_probs", "entropy")

    def program(model, r):
        yield preferences(model, r, lambda m, b: scores(frozen if isinstance(m, SwitchedModel) else other, b)[0].sum(1))

    expected = _expected(plain, program, world_size)
    for _ in range(2):
        found.append(worst(_run(model, program, rank), expected))
    with torch.no_grad(), exact_in_double(torch.float64):
        batch = _rows(plain, rank)
        found.append(abs(float(frozen(**batch).loss - loss_of_model(other, batch))))
    refused = ""
    try:
        model.frozen(tiny_model("llama_gqa_bias", torch.float64, rms_norm_eps=1e-3))
    except ModelError as wrong:
        refused = str(wrong)
    return found, message, refused, list(frozen.parameters())


BESIDE = {"use_dora": True, "trainable_token_indices": [3, 40], "target_modules": ["o_proj", "lm_head"]}


@pytest.mark.parametrize(
    ("buckets", "lora"),
    [
        ("dp2:14@64,tp2:64@96", {}),
        pytest.param("pp2:14@64,dp2+z3:64@96", {}, marks=pytest.mark.slow),
        pytest.param("tp2:14@64,pp2:64@96", BESIDE, marks=pytest.mark.slow),
    ],
)
def test_references_are_the_model_without_its_adapter_or_a_second_model(buckets, lora):
    for found, error, refused, parameters in run_ranks(2, references, buckets, lora):
        assert max(found) <= 1e-11
        assert "adapters are switched off" in error
        assert "not built like the first" in refused
        assert not parameters


def copies_off(rank, world_size):
    """The adapter switched off beside a trained copy of the head, whose original replicas do not have."""
    model = switched(tiny_lora("llama_gqa_bias", torch.float64, modules_to_save=["lm_head"]), "dp2:64@96")
    with pytest.raises(UnsupportedError, match=r"trains copies of 'lm_head'.*give the reference as a separate model"):
        preferences(model, rank, _without)
    model.close()


def test_steps_are_those_of_ddp_also_announced_and_copies_are_not_switched_off():
    run_parts(2, under_ddp, announced, copies_off)


COEFFICIENT = 0.7


def _mixture():
    model = tiny_model_of("mixtral")
    model.config.output_router_logits = True
    model.router_aux_loss_coef = model.config.router_aux_loss_coef = COEFFICIENT
    return model


def balance(rank, world_size, buckets):
    """The loss with the balance loss of each rank's own batch, as transformers computes it."""
    plain, found = _mixture(), []

    def with_balance(model, r):
        yield loss_of_model(model, _rows(model, r)) * (1 + r)

    def balance_alone(model, r):
        given = {} if isinstance(model, SwitchedModel) else {"use_cache": False}
        yield model(**_rows(model, r), **given).aux_loss

    def without(model, r):
        yield loss_of_model(model, _rows(model, r), output_router_logits=False)

    for one in buckets:
        model = switched(_mixture(), one)
        for program in (with_balance, balance_alone, without):
            expected = _expected(plain, program, world_size)
            found.append((one, program.__name__, worst(_run(model, program, rank), expected)))
        with torch.no_grad(), exact_in_double(torch.float64):
            batch = _rows(plain, rank)
            ours, theirs = model.eval()(**batch), plain(**batch, use_cache=False)
            found.append((one, "aux_loss", abs(float(ours.aux_loss - theirs.aux_loss))))
            found.append((one, "loss", abs(float(ours.loss - theirs.loss))))
        model.close()
    return found


@pytest.mark.slow
def test_mixtures_with_the_balance_loss_of_each_rank():
    for buckets in (["dp2:14@64,tp2:64@96", "dp2ep2:24@64,pp2:64@96"], ["cp2:24@64,dp2+z3:64@96"]):
        for one, name, error in run_ranks(2, balance, buckets)[0]:
            assert error <= 1e-6, (one, name)


def test_numbers_of_tokens_are_those_of_their_definition():
    torch.manual_seed(0)
    logits = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -100, 0, 10, int(logits[4].argmax()), 5, -100])
    found = token_scores(logits, labels, 0, None, 11, temperature=0.7)
    z = logits / 0.7
    log_p = z.log_softmax(-1)
    p, mask = log_p.exp(), labels != -100
    expected = {
        "log_probs": log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0],
        "entropy": -(p * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logits": z.mean(-1),
        "is_top1": (z.argmax(-1) == labels).double(),
    }
    for name, number in zip(FIELDS, found, strict=True):
        assert torch.allclose(number, expected[name] * mask, rtol=0, atol=1e-12), name
    weight = torch.randn(2, 7, dtype=torch.float64)
    (ours,) = torch.autograd.grad((weight[0] * found[0] + weight[1] * found[1]).sum(), logits, retain_graph=True)
    own = ((weight[0] * expected["log_probs"] + weight[1] * expected["entropy"]) * mask).sum()
    (theirs,) = torch.autograd.grad(own, logits)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_one_process_needs_no_group():
    plain = tiny_model("llama_gqa_bias", torch.float64)
    model = SwitchedModel(tiny_model("llama_gqa_bias", torch.float64), parse_buckets("dp1:64@96")).train()
    batch = _rows(plain, 0)
    with exact_in_double(torch.float64):
        value = model(**batch).loss
        (2 * value).backward()
        model.flush()
    expected = reference(plain, [(lambda m, b: 2 * loss_of_model(m, b), batch)])
    assert worst(model.engine.full_gradients(), expected) <= 1e-11
    model.close()


def unusual_heads(rank, world_size, family):
    """Families whose head reads more of the base model than its hidden state: the training pass begins behind the layers."""
    plain, model = tiny_model_of(family), switched(tiny_model_of(family), "dp2:64@400")
    found = []
    for program in (loss, pairs):
        found.append(worst(_run(model, program, rank), _expected(plain, program, world_size)))
    refused = ""
    try:
        model(**batch_of(rows_of(rank, plain), left=True))
    except UnsupportedError as error:
        refused = str(error)
    return found, refused


@pytest.mark.parametrize("family", [pytest.param("opt", marks=pytest.mark.slow), "gpt2"])
def test_families_without_a_plan(family):
    for found, refused in run_ranks(2, unusual_heads, family):
        assert max(found) <= 1e-11
        assert ("absolute positions" in refused) == (family == "gpt2")
