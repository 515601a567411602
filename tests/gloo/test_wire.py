"""What ranks say on their process groups, by the rules of NCCL: recorded, counted against the product, proven; faults are found."""

from collections import Counter

import pytest
import torch

from hf_hotspa.costs.formulas import ALL_REDUCES_PER_LAYER
from hf_hotspa.strategy import parse_buckets
from tests.families import tiny_model
from tests.wire_faults import FAULTS, complaint, complaints_without, traces_with
from tests.wire_rules import Proof, check
from tests.wire_runs import CASES, Case, traces_of

pytestmark = pytest.mark.gloo

QUICK = [case for case in CASES if case.is_quick]
FOUND_FAST = ("a send and a receive of neighbours are two calls", "one rank reduces equal bytes of another dtype",
              "ranks start two communicators in another order, and wait for both")  # fmt: skip


def proven(recorded):
    wrong = {str(case): str(found) for case, traces, _ in recorded if not isinstance(found := check(traces), Proof)}
    assert not wrong, "\n".join(f"{name}: {fault}" for name, fault in wrong.items())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_everything_that_is_said(size):
    proven(traces_of([case for case in CASES if case.world_size == size], 900.0))


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.name, marks=() if f.name in FOUND_FAST else pytest.mark.slow) for f in FAULTS]
)
def test_a_fault_is_found_by_its_name(fault):
    assert complaint(fault, check(traces_with(fault))) == ""


@pytest.mark.slow
def test_no_fault_is_found_where_none_is():
    assert complaints_without(FAULTS) == []


def test_there_are_enough_faults():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
    assert set(FOUND_FAST) <= {fault.name for fault in FAULTS}


# -- what was recorded is what the product counts ------------------------------------------------------------------------------


def _step(name, buckets, **options):
    return Case(name, 4, buckets, options, run="step")


def of_all_ranks(trace):
    """The communicators of all ranks for switches: the first two for devices that are made."""
    everyone = tuple(range(trace.world_size))
    names = [n for n, c in trace.communicators.items() if c.ranks == everyone and not c.is_host and n != "world"]
    return names[:2]


def others(trace):
    """The communicators of one strategy."""
    shared = of_all_ranks(trace)
    return [
        n
        for n, c in trace.communicators.items()
        if not c.is_host and n not in ("world", *shared) and trace.rank in c.ranks
    ]


def switches_send_the_bytes_that_are_reported(case, traces, results):
    report = results[0][0]
    sent = sum(trace.bytes_to_others(comm) for trace in traces for comm in of_all_ranks(trace))
    assert sent == sum(phase.moved_bytes + phase.unit_bytes for phase in report.phases) > 0


def packs_cross_each_border_once_forward_and_once_backward(case, traces, results):
    strategy = parse_buckets(case.buckets)[0].strategy
    hidden = tiny_model(case.family).config.hidden_size
    stages = strategy.pp * strategy.v
    for trace, (_, packs) in zip(traces, results, strict=True):
        stage = trace.rank // (trace.world_size // strategy.pp)
        own = [stage + strategy.pp * n for n in range(strategy.v)]
        messages = sum((one < stages - 1) + (one > 0) for one in own)
        expected = messages * sum(sum(of_bucket) for of_bucket in packs) * hidden * 4
        found = sum(trace.bytes_to_others(comm) for comm in others(trace))
        assert found == expected > 0, (trace.rank, found, expected)


def sent_in_exchanges(trace, comm):
    """What this rank sends the others in a communicator's gathers and all-to-alls, in bytes, by formula."""
    ranks, total = trace.communicators[comm].ranks, 0
    at = ranks.index(trace.rank)
    for op in trace.operations:
        if op.comm != comm:
            continue
        width = getattr(torch, op.dtype).itemsize if op.dtype else 0
        if op.kind == "all_to_all":
            total += width * (sum(op.sizes[: len(ranks)]) - op.sizes[at])
        elif op.kind == "all_gather_single":
            total += width * op.sizes[0] * (len(ranks) - 1)
    return total


def context_parallel_sends_the_bytes_that_are_reported(case, traces, results):
    report, found = results[0][0], 0
    for trace in traces:
        of_cp = others(trace)[-1 if case.name != "heads" else 0]
        found += trace.bytes_to_others(of_cp) + sent_in_exchanges(trace, of_cp)
    assert found == sum(phase.context_bytes for phase in report.phases) > 0


def shards_reduce_a_hidden_state_as_often_as_the_formula_says(case, traces, results):
    """Four all-reduces of each layer and pack, one of the embedding's rows, and one of the head's input."""
    config = tiny_model(case.family).config
    for trace, (_, packs) in zip(traces, results, strict=True):
        reduced = Counter(
            op.sizes for op in trace.operations if op.comm in others(trace) and op.kind == "all_reduce (sum)"
        )
        expected = Counter({(1,): 1})  # the warm-up
        for tokens in packs[0]:
            expected[(tokens * config.hidden_size,)] += ALL_REDUCES_PER_LAYER * config.num_hidden_layers + 2
        assert reduced == expected


SWITCHES, CONTEXT = switches_send_the_bytes_that_are_reported, context_parallel_sends_the_bytes_that_are_reported
BORDERS = packs_cross_each_border_once_forward_and_once_backward
SHARDS = shards_reduce_a_hidden_state_as_often_as_the_formula_says
COUNTED = (
    (_step("switches", "dp4:12@24,tp4:24@32,dp2tp2:62@70", second_source=True), [SWITCHES]),
    (_step("relays", "dp4:24@32,dp2tp2:62@70", devices_per_node=2), [SWITCHES]),
    (_step("units", "dp4+z3:24@32,dp2tp2+z2:62@70"), [SWITCHES]),
    (_step("pipeline", "pp4:62@64", pipeline_schedule="own"), [SWITCHES, BORDERS]),
    (_step("interleaved", "dp2pp2+v2:62@64", pipeline_schedule="own"), [BORDERS]),
    (_step("ring", "cp4:62@64", context_parallel="ring"), [SWITCHES, CONTEXT]),
    (_step("keys", "dp2cp2:62@64", context_parallel="allgather"), [CONTEXT]),
    (_step("heads", "cp2tp2:62@64", context_parallel="ulysses"), [CONTEXT]),
    (_step("shards", "dp2tp2:62@64"), [SWITCHES, SHARDS]),
)


def test_nothing_waits_in_a_circle_and_a_step_sends_what_is_counted():
    assert {case.world_size for case in QUICK} == {2, 4}
    recorded = list(traces_of([*QUICK, *(case for case, _ in COUNTED)], 600.0))
    proven(recorded)
    counts = {id(case): counts for case, counts in COUNTED}
    for each in recorded:
        for count in counts.get(id(each[0]), ()):
            count(*each)
