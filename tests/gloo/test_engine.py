"""The engine: several strategies in one mini-batch, all pipeline schedules, dtypes, frozen and unequal weights."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.strategy import Strategy
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, reference_step, relative_error
from tests.worlds import gradient_of, make_engine, make_mini_batch, shared_reference, worst_error

pytestmark = pytest.mark.gloo


UNEQUAL = [12, 12, 11, 9, 8, 7, 7]
SCHEDULES = {  # lengths, and whether torch's 1F1B runs them
    "own": [(UNEQUAL, False), ([12], False)],  # the second leaves nothing at all to one replica
    "auto": [([12] * 6, False), (UNEQUAL, False)],
    "1f1b": [(UNEQUAL, True), ([12, 11], False)],  # padded to one shape; fewer packs than stages
    "gpipe": [(UNEQUAL, False), ([12, 11, 10], False)],
}


def schedules(rank, world_size):
    """For each schedule and case the worst error, and whether torch's 1F1B ran; one engine trains all of a schedule."""
    from torch.distributed.pipelining import Schedule1F1B

    model, runs, found = tiny_model("llama_gqa_bias", torch.float64), [], {}
    original = Schedule1F1B.step
    Schedule1F1B.step = lambda self, *a, **k: (runs.append(1), original(self, *a, **k))[1]
    generator = torch.Generator().manual_seed(0)
    for schedule, cases in SCHEDULES.items():
        engine = make_engine(model, "dp2pp2:12@12", pipeline_schedule=schedule)
        for lengths, torch_1f1b in cases:
            runs.clear()
            for again in range(2):
                tokens = [torch.randint(3, 160, (n,), generator=generator).tolist() for n in lengths]
                rows = [{"input_ids": ids, "labels": ids} for ids in tokens]
                error, _ = worst_error(engine, make_mini_batch(engine, rows), *shared_reference(model, rows))
                found[f"{schedule} {lengths} {again}"] = error, bool(runs) == torch_1f1b
        engine.close()
    return found


def test_pipeline_schedules_are_exact():
    for found in run_ranks(4, schedules):
        assert len(found) == 16
        for case, (error, ran_as_it_should) in found.items():
            assert error <= 1e-11, case
            assert ran_as_it_should, case


class _Held:
    """A tensor that autograd keeps for the backward of a micro-batch."""

    def __init__(self, tensor, of):
        self.tensor, self.of = tensor, of


def limited_pipelines(rank, world_size, cases):
    """For each case the worst error, the tokens that were held after each forward, and which schedules of torch ran.

    What is held is what autograd keeps, whoever calls forward and backward: a micro-batch counts as long as one tensor of
    its forward is alive.
    """
    import weakref

    from torch.autograd.graph import saved_tensors_hooks
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    from hf_hotspa.model.replica import Replica

    alive, held, ran = weakref.WeakSet(), [], []
    forward = Replica.forward

    def watched(self, micro_batch, hidden, scale, *more):
        def keep(tensor):
            alive.add(found := _Held(tensor, micro_batch))
            return found

        with saved_tensors_hooks(keep, lambda found: found.tensor):
            out = forward(self, micro_batch, hidden, scale, *more)
        held.append([micro_batch.num_tokens for micro_batch in {id(each.of): each.of for each in alive}.values()])
        return out

    Replica.forward = watched
    for schedule in (Schedule1F1B, ScheduleGPipe):
        step = schedule.step
        schedule.step = lambda self, *a, step=step, **k: (ran.append(type(self).__name__), step(self, *a, **k))[1]
    model, results = tiny_model("llama_gqa_bias", torch.float64), []
    generator = torch.Generator().manual_seed(0)
    for buckets, schedule, lengths, _, _ in cases:
        engine = make_engine(model, buckets, pipeline_schedule=schedule)
        tokens = [torch.randint(3, 160, (n,), generator=generator).tolist() for n in lengths]
        rows = [{"input_ids": ids, "labels": ids} for ids in tokens]
        held.clear(), ran.clear()
        error, _ = worst_error(engine, make_mini_batch(engine, rows), *shared_reference(model, rows))
        assert not alive
        results.append((error, list(held), sorted(ran)))
        engine.close()
    return results


MIXED = [40, 12, 33, 7, 9, 8, 5, 7, 6, 9, 4, 8, 7, 5]
LIMITED = {  # strategy and packs, schedule, lengths, most tokens on a stage, schedules of torch that run on a stage
    "own, packs of many sizes": ("pp4:40@9", "own", MIXED, 40, []),
    "auto, packs of many sizes": ("dp2pp2:40@15", "auto", MIXED, 40, []),
    "auto, equal packs": ("pp4:10@10", "auto", [10] * 8, 40, []),
    "gpipe, equal packs": ("pp4:10@10", "gpipe", [10] * 8, 40, ["ScheduleGPipe"] * 2),
    "gpipe, packs of many sizes": ("pp4:40@12", "gpipe", [40, 11, 10, 9, 11, 12, 8], 48, ["ScheduleGPipe"] * 3),
    "gpipe, two replicas": ("dp2pp2:40@15", "gpipe", MIXED, 40, None),
    "1f1b, equal packs": ("pp4:10@10", "1f1b", [10] * 8, 40, ["Schedule1F1B"]),
    "1f1b, padded within the limit": ("pp4:12@12", "1f1b", [12, 11, 10, 9, 9, 8], 48, ["Schedule1F1B"]),
    "1f1b, padding would pass it": ("pp4:40@12", "1f1b", [40, 11, 10, 9, 11], 48, []),
}


@pytest.mark.slow
def test_no_pipeline_holds_more_tokens_than_its_bucket_says():
    """Whatever the schedule, padding included; results are exact."""
    cases = list(LIMITED.values())
    for ranks in zip(*run_ranks(4, limited_pipelines, cases), LIMITED, strict=True):
        *results, name = ranks
        buckets, _, _, most, schedules = LIMITED[name]
        pp = Strategy.parse(buckets.split(":")[0]).pp
        assert max(error for error, _, _ in results) <= 1e-11, name
        held = [tokens for _, of_rank, _ in results for tokens in of_rank]
        assert max(map(sum, held)) <= most, name
        assert max(map(sum, held)) > most - 12, name  # the limit is used
        fullest = max(map(len, held))
        assert fullest > pp if name == "gpipe, two replicas" else fullest == pp, name  # short ones fill the pipeline
        assert schedules is None or all(ran == schedules for _, _, ran in results), name


def test_a_schedule_that_gives_way_to_the_limit_is_named_once(caplog):
    from types import SimpleNamespace

    from hf_hotspa.packing.pipeline_order import choose_passes
    from hf_hotspa.parallel.pipeline import PipelineRunner

    runner = object.__new__(PipelineRunner)
    runner.__dict__.update(SimpleNamespace(_name="pp4", _schedule="1f1b", _speaks=True).__dict__)
    for _ in range(2):
        runner._say_once(choose_passes("1f1b", [40, 11, 10, 9, 11], 4, 48), 48)
    (line,) = caplog.messages
    assert "pp4" in line
    assert "more than 48 tokens" in line


def mixed_precision(rank, world_size):
    model = tiny_model("llama_gqa_bias")
    engine = make_engine(model, "dp2:16@64,tp2:60", compute_dtype=torch.bfloat16)
    found = {}
    for strategy, phase in engine.phases.items():
        phase.load()
        full = dict(model.named_parameters())
        for parameter, slot in phase.replica.parameters:
            assert parameter.dtype == torch.bfloat16
            assert gradient_of(parameter).dtype == torch.float32
            expected = full[slot.spec.name]
            if slot.spec.shard_dim is not None and strategy.tp > 1:
                rows = slot.spec.shard_rows(strategy.tp, strategy.coord(rank).tp)
                expected = torch.cat(
                    [expected.narrow(slot.spec.shard_dim, a, b - a) for a, b in rows], slot.spec.shard_dim
                )
            found[strategy, slot.spec.name] = torch.equal(parameter, expected.to(torch.bfloat16))
        phase.release()
    rows = random_rows(10, model.config.vocab_size, longest=60)
    loss, gradients = shared_reference(model, rows)
    report = engine.forward_backward(make_mini_batch(engine, rows))
    got = engine.full_gradients()
    whole = relative_error(torch.cat([got[n].flatten() for n in got]), torch.cat([gradients[n].flatten() for n in got]))
    return all(found.values()), len(found), abs(report.loss - loss) / loss, whole


def test_bf16_weights_are_the_rounded_masters_and_gradients_are_fp32():
    for rounded, count, loss_error, gradient_error in run_ranks(2, mixed_precision):
        assert rounded
        assert count > 60
        assert loss_error < 5e-3
        assert gradient_error < 5e-2


def different_seeds(rank, world_size):
    """Whether the weights are those of rank 0, and the elements that replicas hold after a mini-batch."""
    engine = make_engine(tiny_model("llama_gqa_bias", seed=rank), "dp2:16@32,tp2:60")
    engine.forward_backward(make_mini_batch(engine, random_rows(9, 100, longest=60)))
    held = sum(p.numel() for phase in engine.phases.values() for p in phase.replica.model.parameters())
    model = tiny_model("llama_gqa_bias", seed=99)
    engine.write_back(model)
    expected = tiny_model("llama_gqa_bias", seed=0)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True)), held


def test_ranks_with_different_seeds_take_the_weights_of_rank_0_and_replicas_hold_no_storage_between_phases():
    assert run_ranks(2, different_seeds) == [(True, 0)] * 2


def clip_and_step(rank, world_size):
    model = tiny_model("qwen3_qk_norm_tied", torch.float64)
    engine = make_engine(model, "dp2:16@32,tp2:60")
    rows = random_rows(9, model.config.vocab_size, longest=60)
    _, gradients = reference_step(model, rows)  # its gradients are clipped below
    with exact_in_double(torch.float64):
        engine.forward_backward(make_mini_batch(engine, rows))
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    norm = engine.clip_grad_norm_(0.25)
    clipped = {n: p.grad for n, p in model.named_parameters()}
    got = engine.full_gradients()
    assert gradients.keys() == got.keys()
    return abs(norm - expected.item()) / expected.item(), max(relative_error(got[n], clipped[n]) for n in clipped)


def test_clipping_counts_tied_weights_once():
    for norm_error, gradient_error in run_ranks(2, clip_and_step):
        assert norm_error <= 1e-11
        assert gradient_error <= 1e-11


def meshes(rank, world_size):
    engine = make_engine(tiny_model("llama_gqa_bias"), "dp4:8,dp2tp2:16,tp2pp2:24,tp4:60")
    # the tensor-parallel pairs of dp2tp2 and tp2pp2 are the same groups
    pairs = [engine.phases[Strategy(2, 2, 1)].mesh.tensor.group, engine.phases[Strategy(1, 2, 2)].mesh.tensor.group]
    num_groups, found = len(engine._groups), {}
    for strategy, phase in engine.phases.items():
        device_mesh, mesh = engine.mesh(strategy), phase.mesh
        names = device_mesh.mesh_dim_names
        groups = {name: device_mesh[name].get_group() for name in names}
        # what the strategy runs on is what the user is given
        assert groups.get("tp") is (mesh.tensor.group if mesh.tensor else None)
        assert groups.get("pp") is mesh.pipeline
        assert {name: getattr(mesh.coord, name) for name in names} == {
            name: device_mesh.get_local_rank(name) for name in names
        }
        if "dp" in names:  # the ranks of a replica's axis: those that differ in dp alone
            ranks = {strategy.rank(replace(mesh.coord, dp=d)) for d in range(strategy.dp)}
            assert set(dist.get_process_group_ranks(groups["dp"])) == ranks
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=groups["dp"])
            assert total.item() == sum(ranks)
        found[str(strategy)] = (names, device_mesh.mesh.tolist())
        assert engine.mesh(strategy) == device_mesh
    with pytest.raises(HotspaConfigError, match="pp4 is not one of the engine's strategies"):
        engine.mesh(Strategy(pp=4))
    return found, pairs[0] is pairs[1], num_groups, len(engine._groups)


def test_one_device_mesh_per_strategy_on_shared_groups():
    for found, shared, num_groups, with_replicas in run_ranks(4, meshes):
        assert found == {
            "dp4": (("dp",), [0, 1, 2, 3]),
            "dp2tp2": (("dp", "tp"), [[0, 1], [2, 3]]),
            "tp2pp2": (("pp", "tp"), [[0, 1], [2, 3]]),
            "tp4": (("tp",), [0, 1, 2, 3]),
        }
        assert shared
        assert with_replicas == num_groups  # dp4 has the ranks of tp4, and dp2 those of pp2
        # two pairs for tp2, two for pp2, one of all for tp4, and switch, forward and agreement
        assert num_groups == 8


def test_one_process_runs_the_same_path():
    model = tiny_model("llama_gqa_bias", torch.float64)
    engine = make_engine(model, "dp1:60@80")
    rows = random_rows(9, model.config.vocab_size, longest=60)
    error, report = worst_error(engine, make_mini_batch(engine, rows), *reference_step(model, rows))
    assert error <= 1e-11
    assert report.moved_bytes == 0
