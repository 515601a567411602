"""Data parallelism with ZeRO or FSDP, which plans are compared with: what it sends, holds and takes, by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hf_hotspa.cli import main
from hf_hotspa.costs.formulas import Traffic, traffic
from hf_hotspa.costs.hardware import load_hardware
from hf_hotspa.costs.memory import MemoryModel
from hf_hotspa.costs.terms import Cost
from hf_hotspa.costs.time import TimeModel
from hf_hotspa.errors import HotspaConfigError
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.search.baselines import STAGES, DataParallel, padded
from tests.unit.test_cost_memory import SIZES_7B

PSI = 6_738_415_616
"""Parameters of the 7B model: 32 layers of 202,383,360, and 262,148,096 of embedding, head and last norm."""
LAYER, ENDS = 202_383_360, 262_148_096
LINK = load_hardware("a800-80g").intra_bandwidth * 0.75


def runs(b: float = 1e-4, slots: float = float("inf"), world: int = 8, nodes_of: int = 8) -> DataParallel:
    """The 7B model where a token takes b seconds, a third of it forward."""
    time = TimeModel("test", StageCosts(SIZES_7B.stage_costs.layers), layers={1: Cost(b=b / 32)}, slots=slots)
    hardware = replace(load_hardware("a800-80g"), devices_per_node=nodes_of)
    return DataParallel(MemoryModel(SIZES_7B, world), time, hardware)


def test_what_is_sent_follows_the_laws() -> None:
    """In units of plain data parallelism, 2 psi: 1, (m + 1) / 2, 3 m / 2, and m for frozen weights."""
    for packs in (1, 2, 5):
        plain = 2 * PSI * 7 / 8
        assert sum(traffic(PSI, 0, 8, 0, packs)) == pytest.approx(plain)
        assert sum(traffic(PSI, 0, 8, 1, packs)) == pytest.approx(plain)
        assert sum(traffic(PSI, 0, 8, 2, packs)) == pytest.approx(plain * (packs + 1) / 2)
        assert sum(traffic(PSI, 0, 8, 3, packs)) == pytest.approx(plain * 3 * packs / 2)
        assert sum(traffic(0, PSI, 8, 3, packs)) == pytest.approx(plain * packs)
        assert sum(traffic(0, PSI, 8, 2, packs)) == 0
    assert traffic(16e9, 0, 4, 3, 2) == Traffic(gathers=48e9, reduces=24e9)
    assert sum(traffic(16e9, 0, 1, 3, 2)) == 0
    with pytest.raises(HotspaConfigError, match="no ZeRO stage 4"):
        traffic(1, 0, 1, 4, 1)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "sharded"),
    [
        # bf16 weights as the layers compute; all else in fp32, and whole
        (0, 2 * PSI, 4 * PSI, 12 * PSI),
        # bf16 weights and gradients whole; an eighth of fp32 weights and of 8 bytes of Adam
        (1, 2 * PSI, 2 * PSI, 12 * PSI / 8),
        # gradients an eighth, and those of embedding and head, the largest unit, whole
        (2, 2 * PSI, 2 * PSI / 8 + 2 * ENDS, 12 * PSI / 8),
        # all an eighth, and the weights of two layers and of embedding and head whole
        (3, 2 * PSI / 8 + 2 * (2 * LAYER + ENDS), 2 * PSI / 8 + 2 * ENDS, 12 * PSI / 8),
    ],
)
def test_what_is_held(stage: int, weights: float, gradients: float, sharded: float) -> None:
    assert SIZES_7B.num_parameters == PSI == 32 * LAYER + ENDS
    found = runs().breakdown(stage, False, 4096)
    assert found.weights == pytest.approx(weights)
    assert found.gradients == pytest.approx(gradients)
    assert found.master_weights + found.optimizer == pytest.approx(sharded)
    assert found.arena == found.switch == found.master_gradients == 0
    again = runs().breakdown(stage, True, 4096)
    assert again.activations < found.activations / 4
    assert again.weights == found.weights


def test_seconds_that_computation_takes() -> None:
    """Fast computation does not hide transfers, slow computation hides them; three replicas of eight have work."""
    packs = [[[6000], [2000]], [[4000, 1000]], [[3000]], *[[]] * 5]
    slow = runs(b=1e-2)
    # alone: the busiest replica; with ZeRO-1 the weights are gathered at the end
    gather = 2 * PSI * 7 / 8 / LINK
    assert slow.seconds(1, False, packs) == pytest.approx(80 + gather)
    # pack by pack: 6000 and 2000 of the first replica are the longest of each
    assert slow.seconds(2, False, packs) == pytest.approx(80 + gather)
    assert slow.seconds(3, False, packs) == pytest.approx(80)
    # replicas wait for one another: 6000 with 5000, and 2000 with 3000
    crossed = [[[6000], [2000]], [[5000], [3000]], *[[]] * 6]
    assert slow.seconds(1, False, crossed) == pytest.approx(80 + gather)
    assert slow.seconds(3, False, crossed) == pytest.approx(90)
    # another forward pass of every layer
    assert slow.seconds(3, True, crossed) == pytest.approx(120)


def test_seconds_that_transfers_take() -> None:
    packs = [[[6000], [2000]], *[[]] * 7]
    none = runs(b=1e-12)
    one = 2 * PSI * 7 / 8 / LINK  # an all-gather or a reduce-scatter of the model in bf16
    assert none.seconds(0, False, packs) == pytest.approx(4 * one, rel=1e-3)  # gradients of DDP are in fp32
    assert none.seconds(1, False, packs) == pytest.approx(2 * one, rel=1e-3)
    assert none.seconds(2, False, packs) == pytest.approx(3 * one, rel=1e-3)
    assert none.seconds(3, False, packs) == pytest.approx(6 * one, rel=1e-3)
    # part of it hides: forward 10 s of one pack, and backward 20 s
    half = runs(b=30 / 6000)
    slow_links = replace(
        half, hardware=replace(half.hardware, intra_bandwidth=2 * PSI * 7 / 8 / 0.75 / 15)
    )  # one is 15 s
    assert slow_links.seconds(3, False, [[[6000]], *[[]] * 7]) == pytest.approx(max(10, 15) + max(20, 30))
    assert slow_links.seconds(2, False, [[[6000]], *[[]] * 7]) == pytest.approx(10 + max(20, 15) + 15)
    # two nodes of four with a NIC each of 25 GB/s: 100 GB/s, below the 200 of a port
    nodes = runs(b=1e-12, nodes_of=4)
    assert nodes.seconds(1, False, packs) == pytest.approx(4 * one, rel=1e-3)


def asked(batches: list[list[int]], weights: list[float], longest: int, limit: int) -> Any:
    """What `best` reads of a question."""
    shape = SimpleNamespace(quadratic_cost=SIZES_7B.shape.quadratic_cost)
    capacities = SimpleNamespace(limit_bytes=limit)
    return SimpleNamespace(batches=(batches, weights), longest=longest, capacities=capacities, shape=shape)


def test_the_largest_pack_and_the_best_run() -> None:
    found = runs()
    limit = 79 << 30
    for stage in STAGES[1:]:
        for again in (False, True):
            most = found.largest_pack(stage, again, limit)
            assert found.breakdown(stage, again, most).total <= limit < found.breakdown(stage, again, most + 1).total
    assert found.largest_pack(1, False, 1 << 30) == 0
    batches, weights = [[1000] * 64, [2000] * 32], [0.5, 0.5]
    plain = found.largest_pack(3, False, limit)
    for stage in STAGES[1:]:
        run = found.best(stage, asked(batches, weights, 2000, limit))
        assert (run.stage, run.recompute) == (stage, False)  # all fit without, which is faster
        # 8000 tokens a replica, evenly: 0.8 s of computation, and transfers
        assert run.seconds == pytest.approx(0.8, rel=0.2)
    longer = found.best(3, asked(batches, weights, plain + 1, limit))
    assert longer.recompute
    assert longer.seconds is not None
    most = found.largest_pack(3, True, limit)
    none = found.best(3, asked([[most + 1]], [1.0], most + 1, limit))
    assert (none.seconds, none.pack_tokens, none.recompute) == (None, most, True)
    assert none.to_dict()["longest_that_fits"] == most


def test_logits_exist_whole_unless_liger_is_named() -> None:
    whole, chunks = (runs().breakdown(3, True, 8192, liger) for liger in (False, True))
    assert whole.logits == 8192 * SIZES_7B.shape.vocab_size * (2 + 2 * 4)
    assert chunks.logits < whole.logits / 2
    assert replace(whole, logits=0) == replace(chunks, logits=0)


def test_rows_in_their_order_are_padded_to_the_longest_of_a_micro_batch() -> None:
    assert padded([5, 1, 2, 3, 4], 2, 2) == [[[5, 5], [4]], [[3, 3]]]
    assert padded([5, 1, 2], 2, 1) == [[[5], [2]], [[1]]]


def test_only_the_trainer_of_rows_packs(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--model", "llama2-7b", "--nodes", "1x8", "--hardware", "h100-80g", "--lengths", "chat", "--json"]
    assert main([*args, "--longest", "2048", "--mini-batch", "64", "--task", "reward"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["baselines"]) == 5
    assert all(found["padded"] for found in data["baselines"])
    assert data["copy"].startswith(("RewardConfig(", "hotspa_strategies"))


def test_one_device_has_one_setting() -> None:
    alone, limit = runs(world=1), 160 << 30
    (run,) = alone.settings(asked([[1000] * 16], [1.0], 1000, limit))
    assert run.name == "the stock Trainer"
    # logits of 60,000 tokens take 19 GB: with less room the setting names what computes them in chunks
    longest = alone.largest_pack(0, True, limit) + 1
    (other,) = alone.settings(asked([[longest]], [1.0], longest, limit))
    assert other.liger
    assert other.seconds is not None
    assert "use_liger_kernel=True" in other.arguments
    # packs are as long as memory allows, and a config without it would take eight of them at a time
    assert f"per_device_train_batch_size=1, packing=True, max_length={other.pack_tokens}" in other.arguments


def test_the_table_of_a_plan_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Also what does not fit on small devices, with the longest sequence that does."""
    args = ["plan", "--model", "llama2-7b", "--nodes", "1x8", "--hardware", "l40s", "--memory-limit", "39GiB"]
    args += ["--lengths", "chat", "--longest", "16384", "--mini-batch", "128", "--max-buckets", "1"]
    assert main([*args, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [found["stage"] for found in data["baselines"][:4]] == [0, 1, 2, 3]
    pads, chunks = data["baselines"][4:6]
    assert pads["name"].endswith(", padded")
    assert chunks["liger"]
    fitting = [found for found in data["baselines"] if found["fits"]]
    assert all(found["memory_bytes"] <= data["limit_bytes"] for found in fitting)
    assert main(args) == 0
    text = " ".join(capsys.readouterr().out.split())
    for found in fitting:
        size = f"rows in {found['padded']}s" if found["padded"] else f"packs of {found['pack_tokens']}"
        assert f"{found['name']}, {size}" in text
    assert "DDP + ZeRO-1 with checkpointing: sequences of up" in text
