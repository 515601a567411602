"""Ranks of a switched model that do not walk alike, what is not computed twice, and what travels where."""

import os
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from hf_hotspa.errors import HotspaError, PeerError, TokenRangeError, UnsupportedError
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.strategy import parse_buckets
from hf_hotspa.switched.model import SwitchedModel
from hf_hotspa.switched.passes import Documents, TapedReplica
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows
from tests.switched import batch_of, logits_of, loss_of_model, reference, rows_of, scores, step, switched, worst

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
    none_left = list(model.batches([]))
    return errors, none_left


def test_a_rank_whose_loader_has_ended_joins_without_rows():
    for errors, none_left in run_ranks(2, unequal_loaders):
        assert len(errors) == 5
        assert max(errors) <= 1e-11
        assert none_left == []


def _raised(run):
    try:
        run()
    except HotspaError as error:
        return type(error).__name__, str(error)
    return None


def different_calls(rank, world_size):
    """What each rank raises, and the errors of the steps after; what was pending before must not be in these."""
    model, found = _model(), []
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

    for wrong in (one_flushes_and_one_goes_on, other_wants, other_modes, looks_alone, writes_alone):
        found.append((wrong.__name__, _raised(wrong), _is_exact(model, rank), _is_exact(model, rank, loss=squares)))
    if rank == 0:  # a step that only one rank announces is none
        model.announce([_batch(plain, rank)])
    alone = _is_exact(model, rank)
    model.close()
    return found, alone


def test_ranks_that_call_differently_all_raise_and_forget():
    results = run_ranks(2, different_calls)
    assert results[0][0]
    assert [name for name, *_ in results[0][0]] == [name for name, *_ in results[1][0]]
    for found, alone in results:
        for name, raised, *errors in found:
            assert raised is not None, name
            assert raised[0] == "PlanMismatchError", (name, raised)
            assert max(errors) <= 1e-11, name
        assert alone <= 1e-11
    texts = {name: raised[1] for name, raised, *_ in results[0][0]}
    assert "rank 0: flush; rank 1: forward" in texts["one_flushes_and_one_goes_on"]
    assert "for the loss" in texts["other_wants"]
    assert "for 2 numbers of each token" in texts["other_wants"]
    assert "rank 0: read logits" in texts["looks_alone"]


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
    model, found = _model(), []
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

    for change in (token, label, hole, long, extra):
        for announce in (False, True):
            with exact_in_double(torch.float64):  # what is pending then is dropped
                loss_of_model(model, _batch(plain, rank)).backward()
            raised = _raised(lambda change=change, announce=announce: call(change, announce and change is not extra))
            found.append((change.__name__, raised, _is_exact(model, rank)))
    return found


def test_an_unreadable_row_of_one_rank_is_the_same_error_on_all():
    results = run_ranks(2, unreadable_rows)
    kinds = {
        "token": TokenRangeError.__name__,
        "label": TokenRangeError.__name__,
        "hole": UnsupportedError.__name__,
        "long": "OverlongError",
        "extra": UnsupportedError.__name__,
    }
    for (name, raised, error), (_, other, other_error) in zip(*results, strict=True):
        assert raised == other
        assert raised[0] == kinds[name], raised
        assert "rank 1" in raised[1], raised
        assert max(error, other_error) <= 1e-11


def skipped(rank, world_size):
    """Steps that are not made leave nothing behind, whoever clears what, on however many ranks."""
    model = _model()
    plain, found = model.module, []
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
            found.append((name, _is_exact(model, rank, loss=loss)))
    weights = [p.clone() for p in model.parameters()]
    pending(loss_of_model)
    model.zero_grad()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    same = all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    return found, same


def test_a_skipped_step_leaves_nothing_behind():
    for found, same in run_ranks(2, skipped):
        for name, error in found:
            assert error <= 1e-11, name
        assert same


def flushes(rank, world_size):
    model, twin = _model(), _model()
    plain = tiny_model(FAMILY, torch.float64)
    expected = reference(plain, [(loss_of_model, _batch(plain, r, seed=50)) for r in range(2)])
    _is_exact(model, rank)
    model.flush()
    model.flush()
    twice = worst(model.engine.full_gradients(), expected)
    # an optimizer's step flushes by itself
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    optimizers[0].step()
    with exact_in_double(torch.float64):
        loss_of_model(twin, _batch(plain, rank, seed=50)).backward()
        optimizers[1].step()
    for m in (model, twin):
        m.write_back()
    pairs = zip(model.module.parameters(), twin.module.parameters(), strict=True)
    return twice, max(float((a - b).detach().abs().max()) for a, b in pairs), model.step, twin.step


def test_flush_can_be_called_twice_or_by_the_optimizer():
    for twice, difference, steps, twin_steps in run_ranks(2, flushes):
        assert twice <= 1e-11
        assert difference <= 1e-14
        assert steps == twin_steps == 1


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
    return worst(*found)


def test_calls_without_gradients_change_no_seed():
    assert max(run_ranks(2, looked_between)) <= 1e-11


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
    total = sum(len(row["input_ids"]) for row in random_rows(40, 1000, longest=24, seed=0)) + 3
    report = model.report
    return max(widest.rows, widest_back.rows), total, vocab, events, report.numbers_bytes, report.seeds_bytes


def test_no_rank_holds_a_table_of_all_logits():
    (few, total, vocab, events, numbers, seeds), _ = run_ranks(2, tables)
    assert total > 200
    assert few <= 24  # its own row, or a pack: rank 0 computes half of the tokens
    one_table = 4 * vocab * total
    assert 0 < seeds < one_table  # each seed travels once at most, to the rank of its slice
    assert 0 < numbers < one_table
    received = [i for i, event in enumerate(events) if event == "receive"]
    packs = [i for i, event in enumerate(events) if event == "pack"]
    assert len(packs) > 4
    assert sum(any(p < i for i in received if i < q) for p, q in pairwise(packs)) >= 3
    assert received[0] > packs[0]  # none before a pack begins that needs it
    assert received[-1] > packs[-2]


def too_many_logits(rank, world_size):
    plain = tiny_model(FAMILY, torch.float64)
    batch, vocab = _batch(plain, rank, 1 + 3 * rank), plain.config.vocab_size
    limit = 8 * vocab * max(batch["input_ids"].numel() for r in range(1) for batch in [_batch(plain, 0, 1)])
    model = SwitchedModel(tiny_model(FAMILY, torch.float64), _model_buckets(), logit_bytes=limit).train()
    model._head_fields = ("log_probs", "entropy")
    raised = _raised(lambda: model(**batch).logits.sum())
    return raised, _is_exact(model, rank)


def _model_buckets():
    return parse_buckets(BUCKETS)


def test_more_logits_than_the_limit_are_refused_on_all_ranks():
    (raised, error), (other, other_error) = run_ranks(2, too_many_logits)
    assert raised == other
    assert raised[0] == UnsupportedError.__name__
    assert "logit_bytes" in raised[1]
    assert "rank 1" in raised[1]
    assert max(error, other_error) <= 1e-11


# ---- what is not computed twice, and what travels


def known_seeds(rank, world_size):
    """Passes and errors where the caller knows the gradients by the log-probabilities, and where it is wrong."""
    plain, model, found = tiny_model(FAMILY, torch.float64), _model(), []

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
        found.append((worst(model.engine.full_gradients(), expected), passes))
    return found


def test_known_seeds_save_the_scoring_pass_and_wrong_ones_cost_one():
    for found in run_ranks(2, known_seeds):
        assert max(error for error, _ in found) <= 1e-11
        assert [passes for _, passes in found] == [
            {"scoring": 0, "training": 1},
            {"scoring": 0, "training": 1},
            {"scoring": 0, "training": 2},
        ]


def rows_without_seeds(rank, world_size):
    """The documents that the training pass runs, where some rows have no gradient."""
    plain, model, ran = tiny_model(FAMILY, torch.float64), _model(), []
    plan = Documents.plan
    Documents.plan = lambda self, numbers, *rest: (ran.append(list(numbers)), plan(self, ran[-1], *rest))[1]

    def loss(m, batch):
        return scores(m, batch)[0][::2].sum(1).square().mean() / 99

    expected = reference(plain, [(loss, _batch(plain, r)) for r in range(2)])
    step(model, loss, _batch(plain, rank))
    return ran, worst(model.engine.full_gradients(), expected)


def test_rows_without_a_seed_are_not_run():
    for ran, error in run_ranks(2, rows_without_seeds):
        assert ran == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6]]
        assert error <= 1e-11


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
    return len(calls), scored, phases, worst(model.engine.full_gradients(), expected)


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
    """The bytes that the report has, and the errors where others come than were announced."""
    plain, model = tiny_model(FAMILY, torch.float64), _model()
    found = []
    for is_announced in (False, True):
        batch = _batch(plain, rank, seed=3)
        if is_announced:
            model.announce([batch])
        step(model, loss_of_model, batch)
        found.append((model.report.rows_bytes, model.report.numbers_bytes, model.report.seeds_bytes))
    # others come than were announced
    model.announce([_batch(plain, rank, seed=4)])
    error = _is_exact(model, rank)
    model.announce([_batch(plain, rank, seed=5), _batch(plain, rank, seed=6)])
    with exact_in_double(torch.float64):
        loss_of_model(model, _batch(plain, rank, seed=5)).backward()
        model.flush()  # one announced call never came: it counts for nothing
    expected = reference(plain, [(lambda m, b: loss_of_model(m, b), _batch(plain, r, seed=5)) for r in range(2)])
    cut = worst(model.engine.full_gradients(), expected)
    model.close()
    return found, error, cut


def test_other_batches_than_were_announced_and_bytes_are_reported():
    for found, error, cut in run_ranks(2, announced):
        own, others = found
        assert own[1:] == others[1:]
        assert own[0] > 0
        assert others[0] >= own[0]
        assert own[1] > 0 == own[2]
        assert max(error, cut) <= 1e-11


def numbers_to_owners(rank, world_size):
    model = switched(tiny_model(FAMILY, torch.float32), "dp2:64@96", fields=("log_probs",))
    squares_of = lambda m, b: m(**b, fused_lm_head=True).log_probs.sum(1).square().mean() / 99  # noqa: E731
    batch = _batch(model, rank, 6)
    step(model, squares_of, batch, double=False)
    tokens = int(sum(batch_["attention_mask"].sum() for batch_ in (_batch(model, r, 6) for r in range(2))))
    return tokens, model.report.numbers_bytes, model.report.seeds_bytes


def test_numbers_travel_to_their_owners_alone():
    for tokens, numbers, seeds in run_ranks(2, numbers_to_owners):
        # four bytes a token, and those that a rank computes of its own rows do not travel
        assert 0 < numbers < 4 * tokens
        assert numbers == seeds


def logits_in_eval(rank, world_size):
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
    return errors, passes, unlabelled.loss, late


def test_evaluation_scores_once_and_nothing_where_nobody_looks():
    for errors, passes, loss, late in run_ranks(2, logits_in_eval):
        assert max(errors) <= 1e-12
        assert passes == {
            "scoring": 5,
            "training": 0,
        }  # the first look came after the loss; from then on they come together
        assert loss is None
        assert late[0] == UnsupportedError.__name__
        assert "after the step" in late[1]


def eval_mode(rank, world_size):
    """Gradients in eval mode are those without dropout, beside calls of the same step in training mode."""
    plain = tiny_model(FAMILY, torch.float64)  # without any
    model = switched(tiny_model(FAMILY, torch.float64, attention_dropout=0.3), BUCKETS)
    found = []
    for loss in (loss_of_model, squares):
        expected = reference(plain, [(loss, _batch(plain, r)) for r in range(2)])
        model.eval()
        step(model, loss, _batch(plain, rank))
        found.append(worst(model.engine.full_gradients(), expected))
    model.train()
    step(model, squares, _batch(plain, rank, seed=3))
    dropped = model.engine.full_gradients()
    model.step -= 1  # the masks of the same step
    with exact_in_double(torch.float64):
        squares(model, _batch(plain, rank, seed=3)).backward()
        squares(model.eval(), _batch(plain, rank)).backward()
        model.flush()
    both = {name: gradient + dropped[name] for name, gradient in expected.items()}
    return found, worst(model.engine.full_gradients(), both)


def test_calls_in_eval_mode_are_trained_without_dropout():
    for found, error in run_ranks(2, eval_mode):
        assert max(*found, error) <= 1e-11
