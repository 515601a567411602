"""A teacher: gradients of divergences from its distributions are the plain models' under DDP, in every layout, and no rank has a
table of tokens x vocabulary beyond a chunk of a pack."""

import pytest
import torch

from hf_hotspa.parallel.loss import IGNORE
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.switched.teacher import Teacher, divergences
from tests.families import tiny_model
from tests.gloo.test_fully_sharded_memory import Allocated
from tests.harness import run_ranks
from tests.oracle import exact_in_double
from tests.switched import batch_of, reference, rows_of, step, switched, worst
from tests.trl_runs import plain_divergences

pytestmark = pytest.mark.gloo

STUDENT, TEACHER = "llama_gqa_bias", "gemma2_soft_caps"
VOCABULARY = 203
MIXES = {
    2: ["dp2:14@64,tp2+sp:40@96,pp2+v2:96@128", "cp2:24@64,dp2+z3+rc:64@96", "dp2+ck9:24@64,tp2+rc+ck7:64@96"],
    4: [
        "dp4:14@64,dp2tp2+sp:24@64,cp2dp2:40@96,tp2pp2:64@128",
        "dp4+z2:14@64,cp2tp2+sp:40@96,pp4:64@96",
        "dp4+z3:14@64,cp2pp2+ck9:40@96,tp4+ck13:64@96",
    ],
}


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_are_torchs(beta, monkeypatch):
    monkeypatch.setattr("hf_hotspa.switched.teacher.SLICE_BYTES", 300)  # slices of one token
    torch.manual_seed(0)
    logits, others = (3 * torch.randn(5, 11, dtype=torch.float64) for _ in range(2))
    others[1, 3] = -torch.inf  # a row of the vocabulary that the teacher masks
    if beta == 1.0:
        logits[1, 3] = -torch.inf
    logits.requires_grad_()
    valid = torch.tensor([True, True, False, True, True])
    factors = torch.randn(2, 5, dtype=torch.float64)
    found = divergences(logits, others, valid, beta=beta, temperature=0.7)
    torch.stack(found).mul(factors).sum().backward()
    gradient, logits.grad = logits.grad, None
    finite = [x.nan_to_num(neginf=-1e3) for x in (logits, others)]
    expected = [x * valid for x in plain_divergences(*finite, beta, 0.7)]
    torch.stack(expected).mul(factors).sum().backward()
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, logits.grad.nan_to_num(), rtol=1e-12, atol=1e-12)


def models(dtype=torch.float64):
    student = tiny_model(STUDENT, dtype, vocab_size=VOCABULARY)
    teacher = tiny_model(TEACHER, dtype, 5, vocab_size=VOCABULARY, hidden_size=96, num_hidden_layers=5).eval()
    return student, teacher


class Distillation:
    """A loss that any student computes: of the divergence times a factor, and of the square of entropies."""

    def __init__(self, teacher, beta, temperature=1.3, linear=True):
        self.teacher, self.beta, self.temperature, self.linear = teacher, beta, temperature, linear

    def __call__(self, model, batch):
        mask = batch["labels"][:, 1:] != IGNORE
        if isinstance(model, SwitchedModel):
            against = self.teacher.against(self.beta, self.temperature)
            expected = mask.double() / 37 if self.linear else None
            out = model(**batch, against=against, expected_seeds=expected)
            assert torch.equal(out.label_mask, mask)
            divergence, entropy = out.divergence, out.entropy
        else:
            given = {name: batch[name] for name in ("input_ids", "attention_mask")}
            with torch.no_grad():
                others = self.teacher(**given, use_cache=False).logits[:, :-1]
            logits = model(**given, use_cache=False).logits[:, :-1]
            divergence, entropy = plain_divergences(logits, others, self.beta, self.temperature)
            divergence, entropy = divergence * mask, entropy * mask
        if self.linear:
            return divergence.sum() / 37
        return (divergence.sum(1) ** 2).mean() / 100 + 0.3 * entropy.square().sum() / 100


def gradients(rank, world_size, mixes, beta):
    student, given = models()
    errors = {}
    for mix in mixes:
        for linear in (True, False):
            batches = [batch_of(rows_of(r, student, seed=3)) for r in range(world_size)]
            plain = Distillation(given, beta, linear=linear)
            expected = reference(student, [(plain, batch) for batch in batches])
            with torch.no_grad(), exact_in_double(torch.float64):
                value = float(plain(student, batches[rank]))
            model = switched(student, mix)
            with exact_in_double(torch.float64):
                teacher = Teacher(given, model.engine)
            own = Distillation(teacher, beta, linear=linear)
            loss = step(model, own, batches[rank])
            with torch.no_grad(), exact_in_double(torch.float64):
                scored = float(own(model, batches[rank]))
            errors[mix, linear] = max(
                worst(model.engine.full_gradients(), expected), abs(float(loss) - value), abs(scored - value)
            )
            assert model._passes.counts["training"] == 1  # gradients that are known are trained at once
            teacher.close()
            model.close()
    return errors


@pytest.mark.parametrize(
    ("world_size", "mixes", "beta"),
    [
        (2, MIXES[2][:1], 0.5),
        pytest.param(2, MIXES[2], 1.0, marks=pytest.mark.slow),
        pytest.param(2, MIXES[2], 0.0, marks=pytest.mark.slow),
        pytest.param(4, MIXES[4], 0.3, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_plain_models(world_size, mixes, beta):
    for errors in run_ranks(world_size, gradients, mixes, beta, timeout=900):
        assert len(errors) == 2 * len(mixes)
        assert max(errors.values()) <= 1e-11, errors


class Sizes(Allocated):
    """Also notes the largest storage."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.largest = max([self.largest, *(size for _, size in self._alive.values())])
        return out


def wide(vocabulary, seed, **sizes):
    """A model of one layer with a large vocabulary."""
    given = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1024,
    } | sizes
    return tiny_model("qwen3_qk_norm_tied", torch.float32, seed, vocab_size=vocabulary, **given)


def batch_of_tokens(rows, length, vocabulary, rank=0):
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def bytes_of_a_step(rank, world_size, buckets, rows, length, vocabulary, **options):
    """Bytes of storages in a step: the largest, and the most at a time."""
    model = switched(wide(vocabulary, 0), buckets, **options)
    teacher = Teacher(wide(vocabulary, 1, hidden_size=24).eval(), model.engine)
    loss = Distillation(teacher, 1.0)
    with Sizes() as sizes:
        step(model, loss, batch_of_tokens(rows, length, vocabulary, rank), double=False)
    assert model._passes.counts["training"] == 1
    held = sum(x.nbytes for x in teacher._hidden.values())
    runners = teacher.engine.phases.values()
    held += sum(p.numel() for runner in runners for p, _ in runner.replica.parameters)
    return sizes.largest, sizes.peak, held, [teacher.close(), model.close()][0]


def bytes_of_world(rank, world_size):
    return bytes_of_a_step(rank, world_size, "tp2:256", 2, 60, 4096, loss_chunk_tokens=24)


def test_no_rank_has_more_than_a_chunk_of_logits():
    for largest, _, held, _ in run_ranks(2, bytes_of_world, timeout=300):
        shard = 4096 // 2 * 4
        assert 24 * shard <= largest < 2 * 24 * shard  # rows of both ranks have 240 tokens
        assert held == 0  # neither hidden states nor weights of the teacher stay


def peaks(rank, world_size):
    """Ours and TRL's, whose loss is chunked, at a vocabulary of 128k: the loss and its gradients alone."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    vocabulary, tokens = 131_072, 2048
    _, own, _, _ = bytes_of_a_step(rank, world_size, "dp1:512@2048", 4, 512, vocabulary)
    student, teacher = wide(vocabulary, 0), wide(vocabulary, 1, hidden_size=24)
    hidden = [torch.randn(1, tokens, width, requires_grad=width == 16) for width in (16, 24)]
    with Sizes() as sizes:
        weights = student.lm_head.weight, teacher.lm_head.weight.detach()
        loss, _, _ = _chunked_divergence_loss(*hidden, *weights, torch.ones(1, tokens), beta=1.0)
        loss.backward()
    return own, sizes.peak


@pytest.mark.slow
def test_the_peak_is_below_trls_at_a_vocabulary_of_128k():
    ((own, of_trl),) = run_ranks(1, peaks, timeout=500)
    assert own < 0.75 * of_trl, (own, of_trl)
