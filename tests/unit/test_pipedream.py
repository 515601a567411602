"""Stages that update by themselves, without processes: versions, the master store by stage, memory, flags; and PipeDream's partition
against all cuts and replications there are."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest

from hf_hotspa.cli import main
from hf_hotspa.cluster import Cluster
from hf_hotspa.costs.memory import MemoryModel, MemoryOptions
from hf_hotspa.costs.sizes import ModelSizes
from hf_hotspa.engine.switching import PlanPool
from hf_hotspa.errors import HotspaConfigError, HotspaError
from hf_hotspa.features.pipedream.arguments import PipelineModeArguments
from hf_hotspa.features.pipedream.mode import PipeDream, check_strategies
from hf_hotspa.features.pipedream.unequal_stages import Partition, of_formulas, partition
from hf_hotspa.layout.placement import master_layout, strategy_layout
from hf_hotspa.packing.pipeline_order import choose_passes
from hf_hotspa.plan.switch_plan import DST, SRC
from hf_hotspa.search.setup import Setup
from hf_hotspa.strategy import Bucket, Strategy, parse_buckets
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from tests.random_models import random_model
from tests.unit.test_stages import cuts


def held_versions(mode: PipeDream, tokens: list[int], num_stages: int, stage: int, limit: int | None) -> int:
    """The most versions that must exist at a time, by walking through the operations of a stage."""
    passes = choose_passes("own", tokens, num_stages, limit)
    versions = mode.pack_versions(passes, stage)
    updates, gone, most = 0, -1, 1
    for pack, is_backward in passes.operations(stage):
        if is_backward:
            gone, updates = pack, updates + 1
        else:
            assert versions[pack] <= updates  # it exists already
        needed = {version for version in versions[gone + 1 :] if version <= updates}
        most = max(most, len(needed))
    return most


def test_versions_are_behind_by_what_the_rule_says_and_newer_where_long_packs_wait() -> None:
    rng, newer = random.Random(3), 0
    for limit in (None, 100) * 300:
        num_stages, mode = rng.randint(2, 7), PipeDream(vertical_sync=rng.random() < 0.5)
        tokens = [rng.choice((5, 20, 90)) for _ in range(rng.randint(0, 12))]
        passes = choose_passes("own", tokens, num_stages, limit)
        for stage, delay in enumerate(mode.delays(num_stages)):
            assert delay == num_stages - 1 - (0 if mode.vertical_sync else stage)
            versions, full = mode.pack_versions(passes, stage), [max(0, pack - delay) for pack in range(len(tokens))]
            held = held_versions(mode, tokens, num_stages, stage, limit)
            if limit is None:
                assert versions == full
                assert held == mode.most_versions(num_stages, stage, len(tokens))
                continue
            assert versions == sorted(versions)
            assert all(
                least <= version <= pack for pack, (version, least) in enumerate(zip(versions, full, strict=True))
            )
            newer += versions != full
            assert held <= mode.most_versions(num_stages, stage)
    assert newer > 100


def test_the_master_store_of_a_stage_lies_on_its_ranks_and_no_plan_leaves_them() -> None:
    """Also where nodes hold several stages, or a stage several nodes: relays are no ranks of other stages."""
    rng, checked = random.Random(11), 0
    for _ in range(60):
        model = random_model(rng)
        world = rng.choice((2, 4, 6, 8))
        tied = any(spec.in_head for spec in model.vector.specs)
        ways = [s for s in model.strategies(world) if s.pp > 1 and s == Strategy(s.dp, s.tp, s.pp)]
        if not ways or tied:
            continue
        strategy, segments = rng.choice(ways), model.vector.segments
        layout, held = master_layout(model.vector, world, strategy), strategy_layout(model.vector, strategy)
        for index, segment in enumerate(segments):
            sizes = [layout.sizes[rank][index] for rank in range(world)]
            assert sum(sizes) == segment.numel
            owners = {strategy.coord(rank).pp for rank in range(world) if sizes[rank]}
            assert owners == {strategy.coord(rank).pp for rank in range(world) if held.sizes[rank][index]}
        elements = Counter(at for of_rank in layout.holdings for i in of_rank for at in range(i.start, i.stop))
        assert len(elements) == model.vector.numel
        assert set(elements.values()) == {1}
        per_node = rng.choice([n for n in (1, 2, 3, 4, 8) if world % n == 0])
        pool = PlanPool(
            model.vector, [strategy], Cluster(world, per_node), [2] * len(segments), [4] * len(segments), by_stage=True
        )
        for plan in (pool.load(strategy), pool.return_gradients(strategy)):
            for table in (hop for kind in plan.kinds for hop in kind.hops):
                for row in table:
                    assert strategy.coord(int(row[SRC])).pp == strategy.coord(int(row[DST])).pp
                    checked += 1
    assert checked > 500


def test_memory_counts_versions_and_the_masters_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    model = random_model(random.Random(4))
    while any(spec.in_head for spec in model.vector.specs) or model.shape.num_layers < 3:
        model = random_model(random.Random(model.vector.numel))
    strategy = Strategy(2, 1, 3)
    sizes = ModelSizes(model.shape, vector=model.vector)
    plain, synced = (
        MemoryModel(sizes, 6, MemoryOptions(features=(PipeDream(vertical),))).stages(Bucket(strategy, 0, 64))
        for vertical in (False, True)
    )
    own, layout = sizes.stages(strategy), master_layout(model.vector, 6, strategy)
    for stage in range(3):
        assert plain[stage].weights == own[stage].weight_bytes + (2 - stage) * own[stage].trained_bytes
        assert synced[stage].weights == own[stage].weight_bytes + 2 * own[stage].trained_bytes
        trained = [s.index for s in model.vector.segments if s.trainable]
        most = max(sum(layout.sizes[rank][i] for i in trained) for rank in (2 * stage, 2 * stage + 1))
        assert plain[stage].optimizer <= 8 * most
    asked = ["estimate", "--model", "llama2-7b", "--nodes", "1x4", "--strategy", "pp4", "--pack-tokens", "64", "--json"]
    found = []
    for extra in ([], ["--pipeline-mode", "pipedream"]):
        assert main([*asked, *extra]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [f["pipeline_mode"] for f in found] == ["synchronous", "pipedream"]
    weights = [f["memory"]["weights"] for f in found]
    assert 3.9 * weights[0] < weights[1] < 4.1 * weights[0]


FINE: dict[str, Any] = {"hotspa_pipeline_mode": "pipedream", "max_grad_norm": 0}
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"hotspa_pipeline_mode": "synchronous", "hotspa_vertical_sync": True}, "pp2:64", "hotspa_vertical_sync=True", "leave it out"),
    ({"hotspa_pipeline_mode": "synchronous", "hotspa_clip_per_stage": True}, "pp2:64", "hotspa_clip_per_stage=True", "leave it out"),
    ({}, "auto", "hotspa_strategies=auto", "such as pp2:2048"),
    ({}, "dp2:32,pp2:64", "dp2, pp2", "such as pp2:64"),
    ({}, "dp2:64", "strategy dp2", "pp of at least 2"),
    ({}, "pp2+ck8:64", "pp2+ck8", "use pp2"),
    ({}, "cp2pp2:64", "cp2", "use pp2"),
    ({}, "pp2+z2:64", "+z2", "use pp2"),
    ({"hotspa_pipeline_schedule": "gpipe"}, "pp2:64", "gpipe", "schedule own"),
    ({"max_grad_norm": 1.0}, "pp2:64", "max_grad_norm=1.0", "hotspa_clip_per_stage=True"),
    ({"hotspa_clip_per_stage": True}, "pp2:64", "max_grad_norm=0", "max_grad_norm=1.0"),
    ({"hotspa_overlap_load": "on"}, "pp2:64", "hotspa_overlap_load=on", "hotspa_overlap_load=auto"),
    ({"hotspa_overlap_return": "on"}, "pp2:64", "hotspa_overlap_return=on", "hotspa_overlap_return=auto"),
    ({"hotspa_offload": "master"}, "pp2:64", "hotspa_offload=master", "hotspa_offload=none"),
    ({"hotspa_stragglers": "balance"}, "pp2:64", "hotspa_stragglers=balance", "hotspa_stragglers=off"),
    ({"hotspa_stragglers": "migrate"}, "pp2:64", "hotspa_stragglers=migrate", "hotspa_stragglers=off"),
    ({"hotspa_skip_non_finite": 2}, "pp2:64", "hotspa_skip_non_finite=2", "hotspa_skip_non_finite=0"),
]  # fmt: skip


def arguments(tmp_path: Any, **options: Any) -> HotSPaTrainingArguments:
    """Arguments of one process, on which the flags are set afterwards: two processes would be needed for pp2."""
    args = HotSPaTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", hotspa_strategies="dp1:64")
    for name, value in {**FINE, **options}.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize(("options", "strategies", "what", "fix"), REFUSED)
def test_what_does_not_go_together_is_refused_by_name(
    options: Any, strategies: str, what: str, fix: str, tmp_path: Any
) -> None:
    args = arguments(tmp_path, **options)
    with pytest.raises(HotspaError) as caught:
        PipelineModeArguments.check_feature(args, () if strategies == "auto" else parse_buckets(strategies))
    assert what in str(caught.value)
    assert fix in str(caught.value)


def test_flags_become_the_mode(tmp_path: Any) -> None:
    assert PipelineModeArguments.feature_settings(arguments(tmp_path, hotspa_pipeline_mode="synchronous")) is None
    for options, mode in (
        ({}, PipeDream()),
        ({"hotspa_vertical_sync": True}, PipeDream(True)),
        ({"max_grad_norm": 0.5, "hotspa_clip_per_stage": True}, PipeDream(max_norm=0.5)),
    ):
        args = arguments(tmp_path, **options)
        PipelineModeArguments.check_feature(args, parse_buckets("pp2:64"))
        assert PipelineModeArguments.feature_settings(args) == mode
    assert check_strategies(parse_buckets("tp2pp2+sp+rc:64")) == Strategy(1, 2, 2, True, 1)
    assert "behind by 3, 2, 1, 0 packs on stages 0 to 3" in PipeDream().text(4)
    assert "behind by 3, 3, 3, 3 packs" in PipeDream(True).text(4)


# -- the partition --------------------------------------------------------------------------------------------------------


def shares(machines: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide machines among stages, each of which gets one."""
    for inner in combinations(range(1, machines), stages - 1):
        yield tuple(b - a for a, b in zip((0, *inner), (*inner, machines), strict=True))


def seconds_of(
    stages: Sequence[range], replicas: Sequence[int], layers: Sequence[int], sends: Sequence[int],
    syncs: Sequence[Sequence[int]],
) -> float:  # fmt: skip
    """The slowest stage, or pass, straight from the definition."""
    slowest = 0.0
    for layers_of, m in zip(stages, replicas, strict=True):
        work = sum(layers[layer] for layer in layers_of)
        sync = sum(syncs[layer][m - 1] for layer in layers_of) if syncs else 0
        slowest = max(slowest, max(work, sync) / m)
        if layers_of.start and sends:
            slowest = max(slowest, 2 * sends[layers_of.start - 1])
    return slowest


def brute_force(
    layers: Sequence[int], machines: int, sends: Sequence[int] = (), syncs: Sequence[Sequence[int]] = ()
) -> float:
    return min(
        seconds_of(stages, replicas, layers, sends, syncs)
        for count in range(1, min(len(layers), machines) + 1)
        for stages in cuts(len(layers), count)
        for replicas in shares(machines, count)
    )


def check(
    found: Partition, layers: Sequence[int], machines: int, sends: Sequence[int], syncs: Sequence[Sequence[int]]
) -> None:
    stages, replicas = zip(*found.stages, strict=True)
    assert [layer for stage in stages for layer in stage] == list(range(len(layers)))
    assert sum(replicas) == machines
    assert all(replicas)
    assert found.seconds == seconds_of(stages, replicas, layers, sends, syncs)
    assert found.seconds == brute_force(layers, machines, sends, syncs)


@pytest.mark.parametrize("seed", range(500))
def test_random_instances_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    count, machines = rng.randint(1, 7), rng.randint(1, 5)
    layers = [rng.randint(0, 12) * rng.choice((1, 1, 5)) for _ in range(count)]
    sends = [rng.randint(0, 6) for _ in range(count)] if rng.random() < 0.7 else []
    syncs = (
        [[0, *(rng.randint(0, 30) for _ in range(machines - 1))] for _ in range(count)] if rng.random() < 0.5 else []
    )
    check(partition(layers, machines, sends, syncs), layers, machines, sends, syncs)


def test_what_cannot_be() -> None:
    for layers, machines in (((), 2), ((1,), 0)):
        with pytest.raises(HotspaConfigError, match="do not form a pipeline"):
            partition(layers, machines)


def test_the_partition_of_pipedream_is_at_least_as_good_as_what_layouts_can_run() -> None:
    for nodes in ("1x2", "1x8", "1x5"):
        found = of_formulas(Setup.read("llama2-7b", nodes, "a100-80g"), 1, 2048)
        assert found.best.seconds <= found.equal_seconds * (1 + 1e-6)
        assert sum(replicas for _, replicas in found.best.stages) == found.equal[0] * found.equal[1]
    data = found.to_dict()["pipedream"]
    assert data["stages"][0]["layers"][0] == 0
    assert "with one d for all stages" in str(found)
