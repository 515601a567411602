"""Padded and packed rows in the engine: exact against the plain model on padded batches and on documents by themselves."""

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, reference_step
from tests.worlds import make_engine, worst_error

pytestmark = pytest.mark.gloo

LONGEST = 40
POOLS = ("dp4:8@16,dp2tp2:20@40,tp2pp2:40", "tp4+sp:12@40,pp4:40@40")


def packed(documents):
    """Rows of three documents, the columns that say so in turn; first tokens keep their labels."""
    rows = []
    for begin in range(0, len(documents), 3):
        group = documents[begin : begin + 3]
        row = {key: [value for document in group for value in document[key]] for key in ("input_ids", "labels")}
        lengths = [len(document["input_ids"]) for document in group]
        if begin % 2:
            row["seq_lengths"] = lengths
        else:
            row["position_ids"] = [at for length in lengths for at in range(length)]
        rows.append(row)
    return rows


def padded_step(model, rows, side):
    """Loss and gradients of the plain model on one padded batch with an attention mask, and the padded rows."""
    padded = []
    for row in rows:
        pad = LONGEST - len(row["input_ids"])
        columns = {"input_ids": (row["input_ids"], 5), "labels": ([-100, *row["labels"][1:]], -100)}
        columns["attention_mask"] = ([1] * len(row["input_ids"]), 0)
        padded.append(
            {k: v + [fill] * pad if side == "right" else [fill] * pad + v for k, (v, fill) in columns.items()}
        )
    batch = {key: torch.tensor([row[key] for row in padded]) for key in padded[0]}
    labels = batch.pop("labels")[:, 1:]
    model.zero_grad(set_to_none=True)
    with exact_in_double(model.dtype):
        logits = model(**batch, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
    return padded, loss.item(), {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False)}


def engine_world(rank, world_size, family, dtype):
    from hf_hotspa import PackedBucketCollator

    model = tiny_model(family, dtype)
    documents = random_rows(15, model.config.vocab_size, longest=LONGEST)
    cases = {"packed": (packed(documents), *reference_step(model, documents))}
    for side in ("right", "left"):
        cases[side] = padded_step(model, documents[:8], side)
    found = []
    for buckets in POOLS:
        engine = make_engine(model, buckets)
        collator = PackedBucketCollator(engine.buckets, rank=rank, vocab_size=model.config.vocab_size)
        for name, (rows, loss, gradients) in cases.items():
            [mini_batch] = DataLoader(rows, batch_size=len(rows), collate_fn=collator)
            error, report = worst_error(engine, mini_batch, loss, gradients)
            found.append((buckets, name, error, mini_batch.plan.num_sequences, report.num_rows))
        engine.close()
    return found


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama_gqa_bias", torch.float64), ("qwen3_qk_norm_tied", torch.float32)]
)
def test_padded_and_packed_rows_are_exact(family, dtype):
    for found in run_ranks(4, engine_world, family, dtype):
        for buckets, name, error, num_sequences, num_rows in found:
            assert error <= (1e-11 if dtype == torch.float64 else 1e-5), f"{buckets}, {name}: {error:.1e}"
            assert (num_sequences, num_rows) == ((15, 5) if name == "packed" else (8, 8))
