"""Ranks of a switched model that do not walk alike, what is not computed twice, and what travels where."""

import os
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from hf_hotspa.errors import HotspaError, OverlongError, PeerError, TokenRangeError, UnsupportedError
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.switched.passes import Documents, TapedReplica
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows
from tests.switched import (
    batch_of,
    logits_of,
    loss_of_model,
    reference,
    rows_of,
    run_parts,
    scores,
    step,
    switched,
    worst,
)

pytestmark = pytest.mark.gloo

FAMILY, BUCKETS = "llama_gqa_bias", "dp2:14@64,tp2:64@96"


def _model(buckets=BUCKETS, **options):
    return switched(tiny_model(FAMILY, torch.float64), buckets, **options)


def _batch(model, rank, num_rows=4, seed=0):
    return batch_of(rows_of(rank, getattr(model, "module", model), num_rows, seed=seed))


def squares(model, batch):
    """A loss that is no sum over tokens."""
    return scores(model, batch)[0].sum(1).square().mean() / 99


@cache
def _expected(world_size, seed, loss):
    plain = tiny_model(FAMILY, torch.float64)
    return reference(plain, [(loss, _batch(plain, r, seed=seed)) for r in range(world_size)])


def _is_exact(model, rank, seed=50, loss=loss_of_model):
    step(model, loss, _batch(model, rank, seed=seed))
    return worst(model.engine.full_gradients(), _expected(model.engine.world_size, seed, loss))


# ---- ranks that do not walk alike


def unequal_loaders(rank, world_size):
    plain, model = tiny_model(FAMILY, torch.float64), _model()
    loaders = [[_batch(plain, r, 3, seed) for seed in range(3 - 2 * r)] for r in range(2)]
    errors = []
    for index, batch in enumerate(model.batches(loaders[rank])):
        given = [loaders[r][index] if index < len(loaders[r]) else None for r in range(2)]
        for loss in (loss_of_model, squares) if index else (loss_of_model,):
            parts = [
                (lambda m, b, loss=loss: torch.zeros(()) if b is None else loss(m, b), own)  # type: ignore[misc]
                for own in given
            ]
            expected = reference(plain, parts)  # type: ignore[arg-type]
            step(model, loss, batch)  # of no rows, too: a mean of nothing is not a number, and has no gradient
            errors.append(worst(model.engine.full_gradients(), expected))
    assert len(errors) == 5
    assert max(errors) <= 1e-11, errors
    assert list(model.batches([])) == []
    model.close()


def _raised(run):
    try:
        run()
    except HotspaError as error:
        return type(error).__name__, str(error)
    return None


def different_calls(rank, world_size):
    """All ranks raise; what was pending before is not in the steps after."""
    model = _model()
    plain = model.module

    def forward(loss=loss_of_model):
        with exact_in_double(torch.float64):
            loss(model, _batch(plain, rank)).backward()

    def one_flushes_and_one_goes_on():  # as after an exception between forward and flush that one rank has caught
        forward()
        model.flush() if rank == 0 else forward()

    def other_wants():
        forward(squares)
        forward(loss_of_model if rank == 0 else squares)

    def other_modes():
        model.train(rank == 0)
        try:
            forward()
        finally:
            model.train()

    def looks_alone():
        forward()
        out = model(**_batch(plain, rank))
        if rank == 0:
            out.logits.sum()
        else:
            model.flush()

    def writes_alone():
        forward()
        model.write_back() if rank == 0 else model.flush()

    for wrong, *words in (
        (one_flushes_and_one_goes_on, "rank 0: flush; rank 1: forward"),
        (other_wants, "for the loss", "for 2 numbers of each token"),
        (other_modes,),
        (looks_alone, "rank 0: read logits"),
        (writes_alone,),
    ):
        kind, text = _raised(wrong) or ("", "")
        assert kind == "PlanMismatchError", (wrong, text)
        assert all(word in text for word in words), text
        errors = _is_exact(model, rank), _is_exact(model, rank, loss=squares)
        assert max(errors) <= 1e-11, (wrong, errors)
    if rank == 0:  # a step that only one rank announces is none
        model.announce([_batch(plain, rank)])
    assert _is_exact(model, rank) <= 1e-11
    model.close()


def lost_peer(rank, world_size):
    model = _model()
    batch = _batch(model, rank)
    dist.barrier()
    if rank == 1:
        os._exit(3)
    loss_of_model(model, batch)


def test_a_rank_that_is_gone_is_an_error():
    outcomes = run_ranks(2, lost_peer, expect_failure=True, timeout=120)
    assert outcomes[0].error_type == PeerError.__name__


def unreadable_rows(rank, world_size):
    """An unreadable row of one rank is the same error on all."""
    model, texts = _model(), []
    plain = model.module

    def call(change, announce=False, **more):
        batch = _batch(plain, rank)
        if rank == 1:
            change(batch)
        if announce:
            model.announce([batch])
        model(**batch, **more)

    def token(batch):
        batch["input_ids"][0, 0] = 10_000

    def label(batch):
        batch["labels"][0, 1] = 10_000

    def hole(batch):
        batch["attention_mask"][:, 2] = 0

    def long(batch):
        for name in batch:
            batch[name] = torch.ones(1, 200, dtype=torch.int64)

    def extra(batch):
        batch["inputs_embeds"] = torch.zeros(1)

    kinds = {
        token: TokenRangeError, label: TokenRangeError, hole: UnsupportedError, long: OverlongError, extra: UnsupportedError,
    }  # fmt: skip
    for change, kind in kinds.items():
        for announce in (False, True):
            with exact_in_double(torch.float64):  # what is pending then is dropped
                loss_of_model(model, _batch(plain, rank)).backward()
            raised = _raised(lambda change=change, announce=announce: call(change, announce and change is not extra))
            assert raised[0] == kind.__name__, raised
            assert "rank 1" in raised[1], raised
            assert (error := _is_exact(model, rank)) <= 1e-11, (change, error)
            texts.append(raised)
    model.close()
    return texts


def skipped(rank, world_size):
    """Steps that are not made leave nothing behind, whoever clears what, on however many ranks."""
    model = _model()
    plain = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def pending(loss):
        with exact_in_double(torch.float64):
            loss(model, _batch(plain, rank, seed=1)).backward()

    clears = {
        "model": model.zero_grad,
        "optimizer": optimizer.zero_grad,
        "in place": lambda: optimizer.zero_grad(set_to_none=False),
        "one rank": lambda: optimizer.zero_grad() if rank else None,
        "one rank in place": lambda: optimizer.zero_grad(set_to_none=False) if rank else None,
    }
    for name, clear in clears.items():
        for loss in (loss_of_model, squares):
            pending(loss)
            clear()
            assert (error := _is_exact(model, rank, loss=loss)) <= 1e-11, (name, error)
    weights = [p.clone() for p in model.parameters()]
    pending(loss_of_model)
    model.zero_grad()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    model.close()


def flushes(rank, world_size):
    """`flush` can be called twice, or by the optimizer."""
    model, twin = _model(), _model()
    plain = tiny_model(FAMILY, torch.float64)
    _is_exact(model, rank)
    model.flush()
    model.flush()
    assert worst(model.engine.full_gradients(), _expected(2, 50, loss_of_model)) <= 1e-11
    # an optimizer's step flushes by itself
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    optimizers[0].step()
    with exact_in_double(torch.float64):
        loss_of_model(twin, _batch(plain, rank, seed=50)).backward()
        optimizers[1].step()
    for m in (model, twin):
        m.write_back()
    pairs = zip(model.module.parameters(), twin.module.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) <= 1e-14
    assert model.step == twin.step == 1
    model.close()
    twin.close()


def looked_between(rank, world_size):
    """Two losses with dropout, with and without calls between them that train nothing."""
    found = []
    for between in (False, True):
        model = switched(tiny_model(FAMILY, torch.float64, attention_dropout=0.3), BUCKETS, seed=3)
        with exact_in_double(torch.float64):
            for seed, loss in enumerate((squares, loss_of_model, squares)):
                loss(model, _batch(model, rank, seed=seed)).backward()
                if between:
                    with torch.no_grad():
                        model(**_batch(model, rank, seed=9)).logits.sum()
                        model.eval()
                        model(**_batch(model, rank, 7, seed=8))
                        scores(model, _batch(model, rank, 2, seed=8))
                        model.train()
            model.flush()
        found.append(model.engine.full_gradients())
        model.close()
    assert worst(*found) <= 1e-11


def test_ranks_that_do_not_walk_alike_and_steps_that_are_not_made():
    run_parts(2, unequal_loaders, different_calls, unreadable_rows, skipped, flushes, looked_between)


# ---- logits


class _Widest(TorchFunctionMode):
    """The most rows of a tensor whose last dim is the vocabulary, or a shard of it."""

    def __init__(self, widths):
        super().__init__()
        self.widths, self.rows = widths, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if type(out) is torch.Tensor and out.dim() > 1 and out.shape[-1] in self.widths:
            self.rows = max(self.rows, out.shape[:-1].numel())
        return out


def tables(rank, world_size):
    """The largest table of logits on a rank that has few rows; where seeds are received; and what travels."""
    model = switched(tiny_model(FAMILY, torch.float32, vocab_size=1000), "dp2:16@16,tp2:24@24")
    vocab = model.engine.description.shape.vocab_size
    rows = random_rows(40, 1000, longest=24, seed=0) if rank else [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]
    batch = batch_of(rows)
    events = []
    of, receive = TapedReplica.of, Agreement.receive
    TapedReplica.of = lambda self, m, w, scale: (events.append("pack"), of(self, m, w, scale))[1]
    Agreement.receive = lambda self, t, r, tag: (events.append("receive"), receive(self, t, r, tag))[1]
    out = model(**{name: batch[name] for name in ("input_ids", "attention_mask")})
    with _Widest({vocab, vocab // 2}) as widest:
        logits = out.logits.whole()
    events.clear()
    (logits.square().mean()).backward()
    with _Widest({vocab, vocab // 2}) as widest_back:
        model.flush()
    model.close()
    TapedReplica.of, Agreement.receive = of, receive
    if rank == 0:
        check_tables(max(widest.rows, widest_back.rows), vocab, model.report, events)


def check_tables(few, vocab, report, events):
    total = sum(len(row["input_ids"]) for row in random_rows(40, 1000, longest=24, seed=0)) + 3
    assert total > 200
    assert few <= 24  # its own row, or a pack: rank 0 computes half of the tokens
    one_table = 4 * vocab * total
    assert 0 < report.seeds_bytes < one_table  # each seed travels once at most, to the rank of its slice
    assert 0 < report.numbers_bytes < one_table
    received = [i for i, event in enumerate(events) if event == "receive"]
    packs = [i for i, event in enumerate(events) if event == "pack"]
    assert len(packs) > 4
    assert sum(any(p < i for i in received if i < q) for p, q in pairwise(packs)) >= 3
    assert received[0] > packs[0]  # none before a pack begins that needs it
    assert received[-1] > packs[-2]


def too_many_logits(rank, world_size):
    """The same error on all ranks."""
    plain = tiny_model(FAMILY, torch.float64)
    batch, vocab = _batch(plain, rank, 1 + 3 * rank), plain.config.vocab_size
    limit = 8 * vocab * max(batch["input_ids"].numel() for r in range(1) for batch in [_batch(plain, 0, 1)])
    model = SwitchedModel(tiny_model(FAMILY, torch.float64), parse_buckets(BUCKETS), logit_bytes=limit).train()
    model._head_fields = ("log_probs", "entropy")
    raised = _raised(lambda: model(**batch).logits.sum())
    assert raised[0] == UnsupportedError.__name__
    assert "logit_bytes" in raised[1]
    assert "rank 1" in raised[1]
    assert _is_exact(model, rank) <= 1e-11
    model.close()
    return raised


# ---- what is not computed twice, and what travels


def known_seeds(rank, world_size):
    """A caller that knows the gradients by the log-probabilities saves the scoring pass; one that is wrong costs one."""
    plain, model = tiny_model(FAMILY, torch.float64), _model()

    def weights(batch, by_rank):
        generator = torch.Generator().manual_seed(by_rank)
        return torch.randn(batch["labels"][:, 1:].shape, generator=generator, dtype=torch.float64) + 2

    for factor, is_right in ((1.0, True), (3.0, True), (1.0, False)):

        def loss(m, batch, factor=factor, is_right=is_right):
            of_rank = int(batch["input_ids"].sum())
            seeds = weights(batch, of_rank)
            if not isinstance(m, SwitchedModel):
                return factor * (scores(m, batch)[0] * seeds).sum()
            out = m(**batch, fused_lm_head=True, expected_seeds=seeds if is_right else seeds.square())
            return factor * (out.log_probs * seeds).sum()

        before = dict(model._passes.counts)
        expected = reference(plain, [(loss, _batch(plain, r)) for r in range(2)])
        step(model, loss, _batch(plain, rank))
        passes = {kind: count - before[kind] for kind, count in model._passes.counts.items()}
        assert worst(model.engine.full_gradients(), expected) <= 1e-11
        assert passes == {"scoring": 0, "training": 1 if is_right else 2}
    model.close()


def rows_without_seeds(rank, world_size):
    """Rows without a gradient are not in the training pass."""
    plain, model, ran = tiny_model(FAMILY, torch.float64), _model(), []
    plan = Documents.plan
    Documents.plan = lambda self, numbers, *rest: (ran.append(list(numbers)), plan(self, ran[-1], *rest))[1]

    def loss(m, batch):
        return scores(m, batch)[0][::2].sum(1).square().mean() / 99

    expected = reference(plain, [(loss, _batch(plain, r)) for r in range(2)])
    step(model, loss, _batch(plain, rank))
    Documents.plan = plan
    assert ran == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6]]
    assert worst(model.engine.full_gradients(), expected) <= 1e-11
    model.close()


def kept_graphs(rank, world_size, buckets, num_rows):
    """Layers that ran forward in a step with a scoring pass, over those of its first pass; and what the first phase loaded."""
    plain, model = tiny_model(FAMILY, torch.float64), _model(buckets)
    calls = []
    for runner in model.engine.phases.values():
        for part in runner.parts:
            for layer in part.layers:
                layer.register_forward_hook(lambda *_: calls.append(1))
    expected = reference(plain, [(squares, _batch(plain, r, num_rows)) for r in range(2)])
    with exact_in_double(torch.float64):
        value = squares(model, _batch(plain, rank, num_rows))
        scored = len(calls)
        value.backward()
        model.flush()
    phases = [(phase.strategy, phase.load_bytes) for phase in model.report.phases]
    error = worst(model.engine.full_gradients(), expected)
    model.close()
    return len(calls), scored, phases, error


@pytest.mark.parametrize(
    ("buckets", "num_rows", "forwards"),
    [
        ("dp2:64@400", 3, 1),  # one pack a replica: its graph is kept
        pytest.param("tp2:64@400", 3, 1, marks=pytest.mark.slow),
        pytest.param(
            "tp2+sp+rc:64@400", 3, None, marks=pytest.mark.slow
        ),  # layers run again in the backward all the same
        pytest.param("dp2:64@64", 6, None, marks=pytest.mark.slow),  # some packs are
        ("pp2:64@400", 3, 2),
    ],
)
def test_the_last_scored_phase_is_trained_first_from_its_graphs(buckets, num_rows, forwards):
    for calls, scored, phases, error in run_ranks(2, kept_graphs, buckets, num_rows):
        assert error <= 1e-11
        assert phases[0][1] == 0  # its weights were loaded
        assert calls < 2 * scored or forwards != 1
        assert forwards is None or calls == forwards * scored


def test_the_phase_that_is_loaded_runs_first():
    for _, _, phases, error in run_ranks(2, kept_graphs, "dp2:14@64,tp2:64@96", 6):
        assert [strategy for strategy, _ in phases] == ["tp2", "dp2"]
        assert phases[0][1] == 0
        assert error <= 1e-11


def announced(rank, world_size):
    """The report has the bytes; others may come than were announced."""
    plain, model = tiny_model(FAMILY, torch.float64), _model()
    found = []
    for is_announced in (False, True):
        batch = _batch(plain, rank, seed=3)
        if is_announced:
            model.announce([batch])
        step(model, loss_of_model, batch)
        found.append((model.report.rows_bytes, model.report.numbers_bytes, model.report.seeds_bytes))
    own, others = found
    assert own[1:] == others[1:]
    assert others[0] >= own[0] > 0
    assert own[1] > 0 == own[2]
    # others come than were announced
    model.announce([_batch(plain, rank, seed=4)])
    assert _is_exact(model, rank) <= 1e-11
    model.announce([_batch(plain, rank, seed=5), _batch(plain, rank, seed=6)])
    with exact_in_double(torch.float64):
        loss_of_model(model, _batch(plain, rank, seed=5)).backward()
        model.flush()  # one announced call never came: it counts for nothing
    assert worst(model.engine.full_gradients(), _expected(2, 5, loss_of_model)) <= 1e-11
    model.close()


def numbers_to_owners(rank, world_size):
    model = switched(tiny_model(FAMILY, torch.float32), "dp2:64@96", fields=("log_probs",))
    squares_of = lambda m, b: m(**b, fused_lm_head=True).log_probs.sum(1).square().mean() / 99  # noqa: E731
    batch = _batch(model, rank, 6)
    step(model, squares_of, batch, double=False)
    tokens = int(sum(batch_["attention_mask"].sum() for batch_ in (_batch(model, r, 6) for r in range(2))))
    # four bytes a token, and those that a rank computes of its own rows do not travel
    assert 0 < model.report.numbers_bytes == model.report.seeds_bytes < 4 * tokens
    model.close()


def test_what_is_known_is_not_computed_twice_and_what_travels_is_counted():
    run_parts(2, known_seeds, rows_without_seeds, announced, numbers_to_owners)


def logits_in_eval(rank, world_size):
    """Evaluation scores once, and nothing where nobody looks."""
    plain, model = tiny_model(FAMILY, torch.float64), _model()
    model.eval()
    batch, errors = _batch(plain, rank), []
    before = dict(model._passes.counts)
    with torch.no_grad(), exact_in_double(torch.float64):
        expected_loss, expected = logits_of(plain, batch, with_loss=True)
        mask = batch["attention_mask"][..., None].bool()
        for kept in (0, 3, torch.tensor([1, 4])):
            out = model(**batch, logits_to_keep=kept)
            logits = out.logits.whole()
            columns = kept if isinstance(kept, torch.Tensor) else slice(-kept, None) if kept else slice(None)
            errors.append(float(((logits - expected[:, columns]) * mask[:, columns]).abs().max()))
            errors.append(abs(float(out.loss - expected_loss)))
        loss_alone = model(**batch, return_dict=False)[0]
        errors.append(abs(float(loss_alone - expected_loss)))
        unlabelled = model(batch["input_ids"], batch["attention_mask"])
    passes = {kind: count - before[kind] for kind, count in model._passes.counts.items()}
    late = _raised(lambda: (step(model.train(), loss_of_model, batch), model.step_begins(), unlabelled.logits.sum()))
    assert max(errors) <= 1e-12, errors
    # the first look came after the loss; from then on they come together
    assert passes == {"scoring": 5, "training": 0}
    assert unlabelled.loss is None
    assert late[0] == UnsupportedError.__name__
    assert "after the step" in late[1]
    model.close()


def eval_mode(rank, world_size):
    """Gradients in eval mode are those without dropout, beside calls of the same step in training mode."""
    model = switched(tiny_model(FAMILY, torch.float64, attention_dropout=0.3), BUCKETS)
    for loss in (loss_of_model, squares):
        expected = _expected(2, 0, loss)  # without any
        model.eval()
        step(model, loss, _batch(model, rank))
        assert worst(model.engine.full_gradients(), expected) <= 1e-11
    model.train()
    step(model, squares, _batch(model, rank, seed=3))
    dropped = model.engine.full_gradients()
    model.step -= 1  # the masks of the same step
    with exact_in_double(torch.float64):
        squares(model, _batch(model, rank, seed=3)).backward()
        squares(model.eval(), _batch(model, rank)).backward()
        model.flush()
    both = {name: gradient + dropped[name] for name, gradient in expected.items()}
    assert worst(model.engine.full_gradients(), both) <= 1e-11
    model.close()


def test_logits_travel_where_they_are_read_and_eval_mode_has_no_dropout():
    run_parts(2, tables, too_many_logits, logits_in_eval, eval_mode)
