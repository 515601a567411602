"""Losses of the user's own against the plain model in fp64: under every kind of strategy, in chunks, for evaluation."""

import re

import pytest
import torch
from torch.nn import functional

from hf_hotspa.errors import UnsupportedError
from hf_hotspa.parallel.loss import SequenceLoss, TokenLoss
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

# (buckets, tokens of a chunk): all axes at once, sequence-parallel and recomputed, too; chunks that cut sequences, and none
WORLDS = [("dp4:16@32,tp2pp2:32,tp4+sp+rc:60@64", 7)]
MORE_WORLDS = [
    ("dp4:16@32,dp2tp2:32,tp2pp2:60@64", 7), ("dp2tp2+rc:16@32,tp4+sp:60@64", None), ("tp4+sp:60@64", 5),
    ("dp2tp2+sp+rc:16@32,tp4:60@64", 9), ("pp4:60@64", 11), ("tp4:60@64", None),
]  # fmt: skip


def rows_with_columns():
    rows = random_rows(14, 163, longest=60, seed=5)
    generator = torch.Generator().manual_seed(1)
    for index, row in enumerate(rows):
        row["weights"] = torch.rand(len(row["input_ids"]), generator=generator, dtype=torch.float64).tolist()
        row["domain"] = index % 3
    return rows


def weighted_focal(tokens):
    """Focal loss with the weights of tokens and of domains, and something that knows where a token stands."""
    log_p = tokens.log_probs
    assert log_p.shape == tokens.labels.shape == tokens.rows.shape == tokens.positions.shape
    by_domain = torch.tensor([1.0, 0.5, 2.0], dtype=log_p.dtype)[tokens.columns["domain"]]
    place = 1 + 0.1 * torch.cos(tokens.positions.to(log_p.dtype))
    place = place + (0.01 * (tokens.labels % 7).to(log_p.dtype) + 0.02 * (tokens.rows % 5).to(log_p.dtype))
    return -(by_domain * place * tokens.columns["weights"] * (1 - log_p.exp()) ** 2 * log_p).sum()


def weighted_focal_of_row(logits, row, index):
    labels = torch.tensor(row["labels"])
    log_p = functional.log_softmax(logits[:-1], -1).gather(-1, labels[1:].clamp(min=0)[:, None])[:, 0]
    positions = torch.arange(1, len(labels), dtype=torch.float64)
    place = 1 + 0.1 * torch.cos(positions) + 0.01 * (labels[1:] % 7).double() + 0.02 * (index % 5)
    weights = torch.tensor(row["weights"], dtype=torch.float64)[1:] * [1.0, 0.5, 2.0][row["domain"]]
    return -(weights * place * (1 - log_p.exp()) ** 2 * log_p)[labels[1:] != -100].sum()


def whole_sequences(sequence, num_items):
    """Cross entropy of each sequence, weighted by its own mean entropy over all positions: no sum over tokens."""
    log_p = functional.log_softmax(sequence.logits, -1)
    mask = sequence.attention_mask.to(log_p.dtype)
    entropy = (-(log_p.exp() * log_p).sum(-1) * mask).sum(-1) / mask.sum(-1)
    ce = functional.cross_entropy(
        sequence.logits[:, :-1].transpose(1, 2), sequence.labels[:, 1:], reduction="none", ignore_index=-100
    )
    scale = sequence.columns["domain"] + 1
    return (scale * entropy * ce.sum(-1)).sum() / num_items


def whole_sequences_of_row(logits, row, index):
    log_p = functional.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    labels = torch.tensor(row["labels"])
    ce = functional.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100)
    return (row["domain"] + 1) * entropy * ce


def reference(model, rows, of_row):
    count = sum(label != -100 for row in rows for label in row["labels"][1:])
    model.zero_grad()
    total = 0.0
    for index, row in enumerate(rows):
        logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
        loss = of_row(logits, row, index) / count
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False)}


def own_loss_world(rank, world_size, worlds):
    model = tiny_model("llama_gqa_bias", torch.float64)  # 163 rows of the vocabulary: uneven over tp2 and tp4
    rows = rows_with_columns()
    found = {}
    losses = [
        (TokenLoss(weighted_focal, ("weights", "domain"), example=rows[4]), weighted_focal_of_row),
        (SequenceLoss(whole_sequences, ("domain",), example=rows[4]), whole_sequences_of_row),
    ]
    for loss, of_row in losses:
        with exact_in_double(torch.float64):
            expected, gradients = reference(model, rows, of_row)
        for buckets, chunk in worlds:
            engine = make_engine(model, buckets, loss=loss, loss_chunk_tokens=chunk)
            batch = make_mini_batch(engine, rows, columns=loss.columns)
            with exact_in_double(torch.float64):
                report = engine.forward_backward(batch)
                got = engine.full_gradients()
                with engine.evaluation() as evaluation:
                    evaluated = evaluation.run(batch)
            errors = [abs(report.loss - expected) / expected, *(relative_error(got[n], gradients[n]) for n in got)]
            errors.append(abs(evaluated.loss_sum / evaluated.num_labels - expected) / expected)
            found[loss.name, buckets] = max(errors)
            engine.close()
    return found


@pytest.mark.parametrize("worlds", [WORLDS, pytest.param(MORE_WORLDS, marks=pytest.mark.slow)], ids=["some", "more"])
def test_own_losses_are_exact_under_every_strategy(worlds):
    for found in run_ranks(4, own_loss_world, worlds, timeout=200):
        assert len(found) == 2 * len(worlds)
        assert max(found.values()) <= 1e-11, found


def refusal(loss=None, model=None):
    try:
        make_engine(model or tiny_model("llama_gqa_bias"), "dp1:60@64", loss=loss).close()
    except UnsupportedError as error:
        return str(error)
    return ""


def mean_of_tokens(tokens):
    return -tokens.log_probs.mean()


def neighbours(tokens):
    return (tokens.log_probs[1:] - tokens.log_probs[:-1]).abs().sum() - tokens.log_probs.sum()


def of_each_row(tokens):
    return -torch.stack([tokens.log_probs[tokens.rows == row].mean() for row in tokens.rows.unique()]).sum()


def detached(tokens):
    return -tokens.log_probs.detach().sum()


def noisy(tokens):
    return -(torch.rand_like(tokens.log_probs) * tokens.log_probs).sum()


def dft(tokens):
    return -(tokens.log_probs.detach().exp() * tokens.log_probs).sum()


def test_what_is_no_sum_over_tokens_is_refused_by_name():
    for function, text in (
        (
            mean_of_tokens,
            "mean_of_tokens.*not the sum of its values on slices.*whole sequences can be a compute_loss_func",
        ),
        (neighbours, "not the sum of its values on slices"),
        (of_each_row, "not the sum of its values on slices"),
        (detached, "has no gradient"),
        (noisy, "not the same when it is called again"),
        (lambda tokens: -tokens.log_probs, "a tensor of shape"),
        (lambda tokens: -(tokens.log_probs * tokens.columns["weight"]).sum(), "KeyError: 'weight'.*loss_columns"),
    ):
        found = refusal(TokenLoss(function))
        assert re.search(text, found), (text, found)
    assert refusal(TokenLoss(dft)) == ""


def cross_entropy_of(logits, labels, **options):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, **options)


def test_what_is_no_sum_over_sequences_is_refused_by_name():
    for function, text in (
        (lambda s, n: cross_entropy_of(s.logits, s.labels), "not divided by num_items_in_batch"),
        (
            lambda s, n: cross_entropy_of(s.logits, s.labels, reduction="sum") * len(s.logits) / n,
            "value on two sequences",
        ),
        (lambda s, n: functional.cross_entropy(s.logits.flatten(0, 1), s.labels.flatten()) / n, "first token"),
    ):
        found = refusal(SequenceLoss(function))
        assert re.search(text, found), (text, found)
