"""What changes the loss or how it is computed: label smoothing, noise on embeddings, recomputation.

Compared with the plain model in fp64, under data, tensor and pipeline parallelism in one mini-batch.
"""

import math

import pytest
import torch
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from hf_hotspa.data.collator import MicroBatch
from hf_hotspa.features.dropout.dropout import EmbeddingNoise
from hf_hotspa.features.dropout.mode import Noise
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, relative_error
from tests.worlds import make_engine, make_mini_batch, worst_error

pytestmark = pytest.mark.gloo

THREE = "dp4:16@32,dp2tp2:32,tp2pp2:60@64"
SMOOTHING, ALPHA, SEED, STEP = 0.2, 5.0, 11, 3


def smoothed(logits, labels):
    """`LabelSmoother` without its sum in fp32: (1 - e) * -log p[label] + e * mean over the vocabulary of -log p."""
    log_p = functional.log_softmax(logits, -1)
    valid = labels != -100
    nll = -log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return ((1 - SMOOTHING) * nll - SMOOTHING * log_p.mean(-1))[valid].sum()


def reference(model, rows, per_row, noise=None):
    """Loss and gradients of `sum over rows of per_row(logits, labels) / N`; `noise(row, embeddings)` is added."""
    count = sum(label != -100 for row in rows for label in row["labels"][1:])
    model.zero_grad()
    total = 0.0
    for index, row in enumerate(rows):
        embeddings = model.get_input_embeddings()(torch.tensor([row["input_ids"]]))
        if noise is not None:
            embeddings = embeddings + noise(index, embeddings)
        logits = model(inputs_embeds=embeddings, use_cache=False).logits[0]
        loss = per_row(logits[:-1], torch.tensor(row["labels"][1:], dtype=torch.int64)) / count
        loss.backward()
        total += loss.item()
    return total, {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False)}


def cross_entropy(logits, labels):
    return functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def smoothing_world(rank, world_size):
    model = tiny_model("llama_gqa_bias", torch.float64)  # 163 rows: uneven over tp2
    rows = random_rows(14, model.config.vocab_size, longest=60, seed=5)
    with exact_in_double(torch.float64):
        loss, gradients = reference(model, rows, smoothed)
        [row] = [r for r in rows if len(r["labels"]) == max(len(r["labels"]) for r in rows)][:1]
        logits, labels = model(input_ids=torch.tensor([row["input_ids"]])).logits, torch.tensor([row["labels"]])
        stock = LabelSmoother(SMOOTHING)({"logits": logits}, labels, shift_labels=True, num_items_in_batch=1).item()
    assert math.isclose(smoothed(logits[0, :-1], labels[0, 1:]).item(), stock, rel_tol=1e-6)
    engine = make_engine(model, THREE, label_smoothing=SMOOTHING)
    return worst_error(engine, make_mini_batch(engine, rows), loss, gradients)[0]


def test_label_smoothing_is_exact_over_a_cut_vocabulary():
    for error in run_ranks(4, smoothing_world):
        assert error <= 1e-11


def noise_world(rank, world_size):
    model = tiny_model("llama_gqa_bias", torch.float64)
    rows = [row for row in random_rows(14, model.config.vocab_size, longest=60, seed=5) if row["input_ids"]]
    drawn = EmbeddingNoise(ALPHA, SEED)
    drawn.step = STEP
    largest = []

    def alone(index, embeddings):
        empty, length = torch.empty(0), embeddings.shape[1]
        pack = MicroBatch(empty, empty, empty, empty, (length,), 0, ((index, 0),))
        noise = drawn.draw(pack, embeddings)
        bound = ALPHA / math.sqrt(length * embeddings.shape[2])  # as neftune_post_forward_hook of transformers
        largest.append(float(noise.abs().max()) / bound)
        return noise

    with exact_in_double(torch.float64):
        loss, gradients = reference(model, rows, cross_entropy, alone)
    assert 0.9 < max(largest) <= 1.0
    engine = make_engine(model, THREE, features=(Noise(ALPHA),), seed=SEED)
    batch = make_mini_batch(engine, rows)
    with exact_in_double(torch.float64):
        report = engine.forward_backward(batch, step=STEP)
        got = engine.full_gradients()
        other_step = engine.forward_backward(batch, step=STEP + 1).loss
        again = engine.forward_backward(batch, step=STEP).loss
        with engine.evaluation() as evaluation:
            quiet = evaluation.run(batch)
    plain, _ = reference(model, rows, cross_entropy)
    errors = [abs(report.loss - loss) / loss, *(relative_error(got[n], gradients[n]) for n in got)]
    return max(errors), abs(other_step - loss), again == report.loss, quiet.loss_sum / quiet.num_labels - plain


def test_noise_belongs_to_the_sequence_and_not_to_the_layout():
    for error, other, repeated, evaluated in run_ranks(4, noise_world):
        assert error <= 1e-11
        assert other > 1e-6, "each mini-batch draws anew"
        assert repeated, "a mini-batch that is done again draws the same"
        assert abs(evaluated) < 1e-6, "evaluation has no noise"


def recompute_world(rank, world_size, family, buckets, overlap):
    model = tiny_model(family)
    rows = random_rows(12, model.config.vocab_size, longest=60, seed=5)
    found, attended = [], []
    for option in ("", "+rc", "+rc2"):
        recomputing = buckets.replace(":", f"{option}:")
        engine = make_engine(model, recomputing, overlap_load=overlap, overlap_return=overlap)
        counts = []
        for runner in engine.phases.values():
            for layer in runner.replica.layers:
                mlp = getattr(layer, "mlp", None)  # layers of other stages have none
                if mlp is not None:
                    # before the forward: a recomputation ends as soon as it has what the backward needs
                    mlp.register_forward_pre_hook(lambda *a, counts=counts: counts.append(1))
        report = engine.forward_backward(make_mini_batch(engine, rows))
        found.append((report.loss, engine.full_gradients()))
        attended.append(len(counts))
        engine.close()
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        assert all(torch.equal(gradients[n], found[0][1][n]) for n in gradients)
    return attended


@pytest.mark.parametrize(
    ("family", "buckets", "overlap"),
    [("llama_gqa_bias", "dp2:16@32,tp2:60@64", True), ("gemma2_soft_caps", "dp2:16@32,pp2:60@64", False)],
)
def test_recomputed_layers_give_the_same_bits(family, buckets, overlap):
    for none, every, second in run_ranks(2, recompute_world, family, buckets, overlap):
        assert none < second <= every == 2 * none
