"""Switches beside the computation: the same bits as without, and every failure ends all ranks."""

import threading
import time

import pytest
import torch
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.llama import LlamaForCausalLM

from hf_hotspa.engine.overlap import GradientWatch
from hf_hotspa.errors import ModelError, TransferError
from hf_hotspa.parallel import agreement
from hf_hotspa.plan.switch_plan import TARGET
from tests.families import tiny_config, tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows, reference_step, relative_error
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

HOT = "dp4:5@24,dp2tp2:10@20,tp2pp2:16,pp4:45@48,tp4:60"


class Grudging:
    """An executor that couples a switch to the computation as tightly as its contract allows.

    Of a load, a segment holds NaN until just before it is reported complete, and segments arrive late, in vector order.
    Of a return, a segment is read at the moment its gate opens, in the reverse order, and never again.
    """

    def __init__(self, executor, delay):
        self.executor, self.delay = executor, delay

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def run(self, plan, source, target, wire_dtypes, epoch, progress=None, second=None):
        if progress is None:
            return self.executor.run(plan, source, target, wire_dtypes, epoch, None, second)
        if plan.accumulate:
            sent = [None] * len(source)
            for segment in reversed(range(len(source))):
                if source[segment] is not None:
                    progress.await_source([segment])
                    sent[segment] = source[segment].clone()
            return self.executor.run(plan, sent, target, wire_dtypes, epoch)
        # what a load of the trained weights alone leaves out is there already, and not the executor's
        filled = {segment for store, segment in self.executor.schedule(plan, wire_dtypes).extents if store == TARGET}
        target = [buffer if segment in filled else None for segment, buffer in enumerate(target)]
        arrived = [None if t is None else torch.empty_like(t) for t in target]
        for buffer in target:
            if buffer is not None:
                buffer.fill_(float("nan"))
        stats = self.executor.run(plan, source, arrived, wire_dtypes, epoch, None, second)
        for segment, buffer in enumerate(target):
            if buffer is not None:
                time.sleep(self.delay)
                buffer.copy_(arrived[segment])
                progress.target_complete([segment])
        return stats


def make_model(family):
    torch.manual_seed(0)
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=163, n_embd=32, n_layer=3, n_head=4, n_positions=64, embd_pdrop=0.0, attn_pdrop=0.0,
            resid_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return GPT2LMHeadModel(config).train()
    model = tiny_model(family.removesuffix("_frozen"))
    if family.endswith("_frozen"):
        for parameter in model.model.layers[1].parameters():
            parameter.requires_grad_(False)
        model.model.layers[2].mlp.up_proj.weight.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(False)
    return model


def trained(family, buckets, mini_batches, options, grudging):
    """Losses, gradients and weights of some mini-batches with SGD steps, and what the gates had seen."""
    engine = make_engine(make_model(family), buckets, **options)
    if grudging:
        engine._switching.executor = Grudging(engine._switching.executor, 0.002)
    left = []
    original = GradientWatch.disarm

    def disarm(watch):
        if watch._gate is not None and watch._expected:
            left.append(len(watch._gate._closed))
        original(watch)

    GradientWatch.disarm = disarm
    optimizer = torch.optim.SGD([p for _, p in engine.named_parameters()], lr=0.1)
    found, reports = [], []
    try:
        for rows in mini_batches:
            reports.append(engine.forward_backward(make_mini_batch(engine, rows)))
            found += [torch.tensor(reports[-1].loss), *(g.cpu() for g in engine.full_gradients().values())]
            optimizer.step()
            found += [w.to("cpu", copy=True) for w in engine.master.weights if w is not None]
        has_thread = any(thread.name == "hotspa-switch" for thread in threading.enumerate())
        engine.close()
    finally:
        GradientWatch.disarm = original
    assert has_thread == bool(engine.options.overlap(engine.device))
    assert not any(thread.name == "hotspa-switch" for thread in threading.enumerate())
    for report in reports:
        assert report.hidden_s >= 0.0 if has_thread else report.hidden_s == 0.0
        assert all(phase.compute_s >= 0.0 for phase in report.phases)
    return found, left


BOTH = {"overlap_load": True, "overlap_return": True}
OVERLAPS = ((BOTH, False), (BOTH, True), ({"overlap_load": True}, True), ({"overlap_return": True}, True))


def same_bits(rank, world_size, family, buckets, mini_batches, options):
    expected, _ = trained(family, buckets, mini_batches, options, False)
    closed = []
    for overlap, grudging in OVERLAPS:
        found, left = trained(family, buckets, mini_batches, {**options, **overlap}, grudging)
        assert len(found) == len(expected)
        equal = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
        assert all(equal), f"{overlap}, {grudging}: {equal.count(False)} of {len(equal)} differ"
        closed += left
    assert torch.isfinite(torch.stack([f.abs().max() for f in expected if f.numel()])).all()
    return closed


def rows_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(3, 160, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in draw]


SLOW = (
    "five-strategies-tied",
    "uneven-shards",
    "torch-1f1b-tied",
    "frozen",
    "fused-bf16",
    "norms-without-weights",
)
SAME_BITS = {
    "three-strategies": (2, "qwen3_qk_norm_tied", "dp2:10@20,tp2:30,pp2:60", [random_rows(12, 163, 60, s) for s in (1, 2)], {}),
    "five-strategies-tied": (4, "qwen3_qk_norm_tied", HOT, [random_rows(24, 163, 60, seed=s) for s in range(2)], {}),
    "uneven-shards": (4, "llama_uneven", "tp4:24@24,pp4:60", [random_rows(12, 77, 60)], {}),
    "torch-1f1b-tied": (4, "qwen3_qk_norm_tied", "dp2pp2:12@12", [rows_of([12] * 8)], {"pipeline_schedule": "1f1b"}),
    "empty-replica": (4, "llama_gqa_bias", "dp4:12,dp2pp2:20", [rows_of([12]), rows_of([12, 7, 18])], {}),
    "frozen": (4, "llama_gqa_bias_frozen", "dp2tp2:16@32,tp2pp2:60", [random_rows(9, 163, 60, s) for s in (1, 2)], {}),
    "fused-bf16": (2, "phi3_fused", "dp2:16@32,tp2:60", [random_rows(9, 163, 60)], {"compute_dtype": torch.bfloat16}),
    "norms-without-weights": (2, "olmo", "dp2:16@32,pp2:60", [random_rows(9, 163, 60)], {}),
    "no-plan": (2, "gpt2", "dp2:60@64", [random_rows(9, 163, 60)], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in SAME_BITS])
def test_overlap_changes_no_bit(case):
    world_size, *arguments = SAME_BITS[case]
    closed = [number for of_rank in run_ranks(world_size, same_bits, *arguments) for number in of_rank]
    assert closed
    assert not any(closed), "a gradient was final before, but nobody noticed"


def test_one_process_overlaps_too():
    rows = random_rows(9, 163, longest=60)
    loss, gradients = reference_step(make_model("llama_gqa_bias"), rows)
    engine = make_engine(make_model("llama_gqa_bias"), "dp1:60@80", **BOTH)
    report = engine.forward_backward(make_mini_batch(engine, rows))
    got = engine.full_gradients()
    assert max(abs(report.loss - loss) / loss, *(relative_error(got[n], gradients[n]) for n in got)) < 1e-4


def many_to_one_gradient(rank, world_size):
    """A parameter that the loss does not reach, on all ranks: its gate opens at the end."""
    engine = make_engine(make_model("llama_gqa_bias"), "dp2:60@64", **BOTH)
    for phase in engine.phases.values():
        layer = phase.replica.model.model.layers[2]
        layer.mlp.register_forward_hook(lambda module, args, output: output.detach())
    engine._switching.executor = Grudging(engine._switching.executor, 0.0)
    engine.forward_backward(make_mini_batch(engine, random_rows(9, 163, longest=60)))
    gradients = engine.full_gradients()
    engine.close()
    return {name for name, gradient in gradients.items() if not gradient.any()}


def test_gradients_that_nobody_computes_are_zero_and_keep_nobody_waiting():
    for names in run_ranks(2, many_to_one_gradient):
        projections = [f"mlp.{part}_proj.{kind}" for part in ("up", "gate", "down") for kind in ("weight", "bias")]
        assert names == {f"model.layers.2.{name}" for name in ("post_attention_layernorm.weight", *projections)}


# ------------------------------------------------------------------------------------------------------- failures


class HeadByHand(LlamaForCausalLM):
    """Uses the weight of its head without calling the head."""

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, labels=None, **kwargs):
        hidden = self.model(
            input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, **kwargs
        ).last_hidden_state
        logits = functional.linear(hidden, self.lm_head.weight)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def head_by_hand(rank, world_size):
    torch.manual_seed(0)
    model = HeadByHand(tiny_config("llama_gqa_bias")).train()
    engine, overlapping = (make_engine(model, "dp2:60@64", overlap_load=overlap) for overlap in (False, True))
    mini_batch = make_mini_batch(engine, random_rows(9, 163, longest=60))
    engine.forward_backward(mini_batch)
    with pytest.raises(ModelError) as caught:
        overlapping.forward_backward(mini_batch)
    return str(caught.value)


def test_weights_used_unseen_are_refused_by_name():
    for said in run_ranks(2, head_by_hand):
        for fragment in ("'lm_head.weight'", "(1 such parameters)", "hotspa_overlap_load off"):
            assert fragment in said


def twice_added(rank, world_size):
    engine = make_engine(make_model("llama_gqa_bias"), "dp2:60@200", **BOTH)
    [phase] = engine.phases.values()
    original = phase._runner.run

    def run(micro_batches, *rest):
        return original([*micro_batches, *micro_batches], *rest)  # more than were announced

    phase._runner.run = run
    engine.forward_backward(make_mini_batch(engine, random_rows(9, 163, longest=60)))


def test_a_gradient_that_grows_after_it_left_is_an_error():
    for outcome in run_ranks(2, twice_added, expect_failure=True):
        assert outcome.error_type == "ModelError"
        assert "hotspa_overlap_return off" in outcome.error


def fails_in_compute(rank, world_size, buckets, options):
    # longer than the world may live: a rank that waited for a switch would be reported as hanging
    engine = make_engine(make_model("llama_gqa_bias"), buckets, timeout_s=900, **BOTH, **options)
    if rank == 1:
        replica = engine.phases[engine.buckets[0].strategy].replica
        forward, calls = replica.forward, []

        def broken(*args):
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError("no memory for this pack")
            return forward(*args)

        replica.forward = broken
    try:
        engine.forward_backward(make_mini_batch(engine, rows_of([12] * 8)))
    finally:
        if rank == 1:
            assert all(parameter.numel() == 0 for parameter, _ in replica.parameters)


@pytest.mark.parametrize(
    ("buckets", "options"),
    [
        ("dp2:12@12", {}),
        pytest.param("pp2:12@12", {"pipeline_schedule": "own"}, marks=pytest.mark.slow),
        ("pp2:12@12", {"pipeline_schedule": "1f1b"}),
    ],
)
def test_a_failing_computation_ends_all_ranks_with_its_name(buckets, options):
    outcomes = run_ranks(2, fails_in_compute, buckets, options, expect_failure=True, timeout=200)
    assert "no memory for this pack" in outcomes[1].traceback  # torch's schedules wrap what a stage raises
    assert "no memory for this pack" in outcomes[0].error, outcomes[0].error
    assert "rank 1" in outcomes[0].error


def fails_in_a_switch(rank, world_size, buckets, accumulate, error):
    engine = make_engine(make_model("llama_gqa_bias"), buckets, timeout_s=30, **BOTH)
    executor = engine._switching.executor
    real = executor._start
    if rank == 1:

        def started(bound, *args):
            if bound.plan.accumulate == accumulate:
                raise error
            return real(bound, *args)

        executor._start = started
    try:
        engine.forward_backward(make_mini_batch(engine, rows_of([12] * 8)))
    finally:
        found = engine.failures.out_of_memory
        lacks = rank == 1 and isinstance(error, torch.OutOfMemoryError)
        act = "return" if accumulate else "load"
        assert (act if lacks else None) == (found and found.act)


@pytest.mark.parametrize(
    ("buckets", "accumulate"),
    [
        ("dp2:12@12", False),
        ("pp2:12@12", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("dp2:12@12", True), ("pp2:12@12", False))),
    ],
)
def test_a_failing_switch_ends_all_ranks_with_its_name(buckets, accumulate):
    error = TransferError("the switch lost its wire")
    outcomes = run_ranks(2, fails_in_a_switch, buckets, accumulate, error, expect_failure=True, timeout=280)
    for outcome in outcomes:
        assert outcome.error_type == "TransferError", outcome.error
        assert "lost its wire" in outcome.error, outcome.error
    assert "rank 1" in outcomes[0].error


@pytest.mark.parametrize("accumulate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_lack_of_memory_in_a_switch_beside_the_computation_is_called_that(accumulate):
    error, act = torch.OutOfMemoryError("no memory for a group"), "return" if accumulate else "load"
    outcomes = run_ranks(2, fails_in_a_switch, "dp2:12@12", accumulate, error, expect_failure=True, timeout=280)
    for outcome in outcomes:
        assert outcome.error_type == "PhaseMemoryError", outcome.describe()
        for part in (f"rank 1 ran out of memory in the {act} of strategy dp2", "no memory for a group", "HSP-401"):
            assert part in outcome.error


def interrupted(rank, world_size):
    engine = make_engine(make_model("llama_gqa_bias"), "dp2:60@64", **BOTH)
    mini_batch = make_mini_batch(engine, random_rows(9, 163, longest=60))

    def interrupt(*args):
        raise KeyboardInterrupt

    [phase] = engine.phases.values()
    phase.compute = interrupt
    for expected in (KeyboardInterrupt, TransferError):  # the second time, switches are refused: nothing hangs
        with pytest.raises(expected):
            engine.forward_backward(mini_batch)
    return True


def test_an_interrupted_step_leaves_nothing_waiting():
    assert all(run_ranks(2, interrupted, timeout=280))


def late_for_a_switch(rank, world_size, overlap_load, given_up):
    agreement.ANSWER_S = 1.0  # this process ends with the test
    engine = make_engine(
        make_model("llama_gqa_bias"), "dp2:60@64", timeout_s=900, switch_timeout_s=1.5, overlap_load=overlap_load
    )
    mini_batch = make_mini_batch(engine, random_rows(9, 163, longest=60))
    engine.forward_backward(mini_batch)
    if rank == 1:
        real = engine._switching.executor.run

        def run(*args, **kwargs):
            while not given_up.exists():  # the other one has waited for the time of a switch, not for the engine's
                time.sleep(0.05)
            return real(*args, **kwargs)

        engine._switching.executor.run = run
    try:
        engine.forward_backward(mini_batch)
    finally:
        if rank == 0:
            given_up.touch()


@pytest.mark.parametrize("overlap_load", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_switch_waits_for_a_peer_no_longer_than_its_timeout(overlap_load, tmp_path):
    outcomes = run_ranks(2, late_for_a_switch, overlap_load, tmp_path / "given up", expect_failure=True, timeout=200)
    for outcome in outcomes:
        assert outcome.error_type == "SilentPeerError", outcome.error
        for fragment in ("HSP-110", "rank 1 is silent", "switch", "rank 0", "hotspa_switch_timeout"):
            assert fragment in outcome.error, outcome.error
        assert "receive from rank 1" in outcome.error or "send to rank 1" in outcome.error
