"""The Trainer under `cp`, `+ck` and `+z`: signals, saves, skipping. Whole runs are in tests/trainer_fuzz.py."""

import pytest

from hf_hotspa.checkpoint.format.folder import checkpoints
from hf_hotspa.checkpoint.format.manifest import verify
from tests.checkpoints import memory_folder
from tests.gloo import test_non_finite as non_finite
from tests.gloo.test_preemption import terminated_run
from tests.harness import run_ranks
from tests.training_runs import STEPS, contents, make_trainer, newest, several_runs, train

pytestmark = pytest.mark.gloo

HOT = {
    "cp": "dp2:16@32,cp2:60@64",
    "chunks": "dp2:16@32,dp2+ck13:32@40,pp2+ck24:60@64",
    "fully sharded": "dp2+z3:16@32,dp2+rc+z2:32@40,pp2+z3:60@64",
}
one_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "fully sharded" else pytest.mark.slow) for kind in HOT]
)


@pytest.fixture
def folder():
    with memory_folder() as path:
        yield path


@one_kind
def test_a_signal_saves_and_a_resumed_run_ends_with_the_same_bits(folder, kind):
    options = {"hotspa_strategies": HOT[kind], "save_steps": 2, "hotspa_async_save": True}
    for found in run_ranks(2, terminated_run, str(folder / "a"), (1,), "on_phase_begin", dict(options)):
        assert found == (3, 3, True, [])
    verify(checkpoints(folder / "a")[0])
    options = {"hotspa_strategies": HOT[kind], "save_steps": STEPS}
    run_ranks(2, several_runs, [(str(folder / "a"), True, options), (str(folder / "b"), None, options)])
    resumed, whole = (contents(newest(folder / name)) for name in ("a", "b"))
    for state in (resumed, whole):
        del state["trainer_state"]
    assert resumed == whole


@one_kind
def test_mini_batches_are_skipped(folder, kind):
    for changed, logs, error, step in run_ranks(2, skipped, str(folder), kind):
        assert (error, step) == (None, 6)
        assert changed == [False, False, True, True, False]
        assert [count for _, count in logs] == [2.0, 2.0, 3.0]


def skipped(rank, world_size, folder, kind):
    non_finite.BUCKETS = HOT[kind]
    return non_finite.skip_world(rank, world_size, folder, 2, (0, 1, 4))


def from_config(rank, world, folder):
    """Strategies that say nothing, with DeepSpeed's stage 3 and with `fsdp`."""
    found = []
    for options in ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {"fsdp": "shard_grad_op"}):
        trainer = make_trainer(folder, world, hotspa_strategies="dp2:60@64", max_steps=1, save_steps=9, **options)
        train(trainer)
        found.append(trainer.last_report.phases[0].strategy)
    return found


def test_sharding_stages_of_others_are_run(folder):
    assert run_ranks(2, from_config, str(folder)) == [["dp2+z3", "dp2+z2"]] * 2
